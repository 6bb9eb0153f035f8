"""What goes wrong: one lane for processes and servers, one for the links of the worker that is never killed."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import kombu

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Topology
from idemp.testing import FaultProxy
from tests.servers.postgresql import PostgreSQL
from tests.servers.rabbitmq import RabbitMQ
from tests.soak.app import INVOICES
from tests.soak.audit import Drain
from tests.soak.plan import Plan
from tests.storms.workers import Workers

LIMIT = 200
"""So many invoices fit into their queue."""
_SLOWEST, _FASTEST = 20_000.0, 200_000.0
# One at random: of a worker, of the producer, of a consumer of the outputs.
_CLOSE_ONE = """\
case rabbit_networking:connections() of
    [] -> none;
    All -> rabbit_networking:close_connection(lists:nth(1 + {number} rem length(All), All), "soak")
end"""

Fault = Callable[[float], None]


@dataclass(frozen=True)
class Place:
    """All that can be broken."""

    database: PostgreSQL
    broker: RabbitMQ
    topology: Topology
    database_link: FaultProxy
    broker_link: FaultProxy
    workers: Workers
    invoices: Drain
    add_killer: Callable[[], None]

    def heal(self) -> None:
        """End whatever a fault that was interrupted has left behind."""
        self.database_link.heal()
        self.broker_link.heal()
        self.broker.clear_memory_alarm()
        self.broker.clear_disk_alarm()
        self.invoices.resume()
        KombuBroker(self.broker.url).declare(self.topology)


class Lane:
    """Faults one after the other: all kinds in random order, then all kinds again in another one.

    Args:
        name: told with each fault.
        kinds: the faults by name; each gets the seconds that it lasts, and has ended when it returns.
        plan: pauses, and the randomness.
        began: when the soak began, by `time.monotonic()`.

    Attributes:
        happened: how often each fault happened.
        log: when which began, and how long it lasted.
        failures: what could not be done.
    """

    def __init__(self, name: str, kinds: Mapping[str, Fault], plan: Plan, began: float) -> None:
        self._name = name
        self._kinds = dict(kinds)
        self._plan = plan
        self._dice = plan.dice(name)
        self._began = began
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.happened: Counter[str] = Counter()
        self.log: list[tuple[float, str, float]] = []
        self.failures: list[str] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Return when the present fault has ended."""
        self._stop.set()
        self._thread.join()

    @property
    def missing(self) -> list[str]:
        """The kinds that have not happened."""
        return sorted(self._kinds.keys() - self.happened.keys())

    @property
    def has_had_all(self) -> bool:
        """Whether every kind has happened, or the lane has ended with a failure."""
        return not self.missing or not self._thread.is_alive()

    def _run(self) -> None:
        for name in self._drawn():
            if self._stop.wait(self._plan.pause.drawn(self._dice)):
                return
            seconds = self._plan.hold.drawn(self._dice)
            began = time.monotonic()
            self._say(f"{name}, {seconds:.1f} s")
            try:
                self._kinds[name](seconds)
            except Exception as error:
                self.failures.append(f"{name}: {error!r}")
                self._say(f"{name} FAILED: {error!r}")
                return
            self.happened[name] += 1
            self.log.append((round(began - self._began, 1), name, round(time.monotonic() - began, 1)))

    def _drawn(self) -> Iterator[str]:
        while True:
            yield from self._dice.sample(sorted(self._kinds), len(self._kinds))

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {self._name}: {what}", file=sys.stderr, flush=True)


def server_faults(place: Place, dice: random.Random) -> dict[str, Fault]:
    """Workers killed, servers restarted, alarms, a full queue, a missing exchange, connections closed by the broker."""
    broker = place.broker
    return {
        "worker killed": lambda _: place.workers.kill_one(dice),
        "another worker killed": lambda _: place.workers.kill_one(dice),
        "database restarted": lambda _: _restart_database(place.database),
        "broker restarted": lambda _: broker.restart(),
        "memory alarm": partial(_held, broker.raise_memory_alarm, broker.clear_memory_alarm),
        "disk alarm": partial(_held, broker.raise_disk_alarm, broker.clear_disk_alarm),
        "output queue full": partial(_fill, place),
        "exchange deleted": partial(_held, partial(_delete_exchange, place), partial(_declare, place)),
        "connection closed by the broker": lambda _: _close_one(broker, dice),
        "message that kills its worker": lambda _: place.add_killer(),
    }


def link_faults(place: Place, dice: random.Random) -> dict[str, Fault]:
    """Cut, gone, stalled, half-open, slow: to the broker, and to the database."""
    found: dict[str, Fault] = {}
    for name, link in (("broker", place.broker_link), ("database", place.database_link)):
        found |= {
            f"link to the {name} cut": partial(_cut, link, dice),
            f"link to the {name} gone": partial(_held, partial(_gone, link), link.heal),
            f"link to the {name} stalled": partial(_held, partial(_directed, link.stall, dice), link.heal),
            f"link to the {name} half-open": partial(_held, partial(_directed, link.half_open, dice), link.heal),
            f"link to the {name} slow": partial(_held, partial(_slow, link, dice), link.heal),
        }
    return found


def declare_invoices(url: str) -> None:
    """The queue of the invoices, which refuses what does not fit; it must exist before anybody else declares it."""
    with kombu.Connection(url) as connection:
        arguments = {"x-queue-type": "quorum", "x-max-length": LIMIT, "x-overflow": "reject-publish"}
        connection.channel().queue_declare(INVOICES, durable=True, auto_delete=False, arguments=arguments)


def _held(begin: Callable[[], object], end: Callable[[], object], seconds: float) -> None:
    begin()
    try:
        # The fault's own duration: nothing is waited for.
        time.sleep(seconds)
    finally:
        end()


def _restart_database(database: PostgreSQL) -> None:
    database.stop_immediately()
    database.start()


def _fill(place: Place, seconds: float) -> None:
    _held(place.invoices.pause, place.invoices.resume, seconds + LIMIT / 50)


def _delete_exchange(place: Place) -> None:
    with kombu.Connection(place.broker.url) as connection:
        connection.channel().exchange_delete(place.topology.exchange)


def _declare(place: Place) -> None:
    KombuBroker(place.broker.url).declare(place.topology)


def _close_one(broker: RabbitMQ, dice: random.Random) -> None:
    broker.evaluate(_CLOSE_ONE.format(number=dice.randrange(1_000_000)))


def _cut(link: FaultProxy, dice: random.Random, _: float) -> None:
    link.cut(reset=dice.random() < 0.5)


def _gone(link: FaultProxy) -> None:
    link.refuse()
    link.cut()


def _directed(fault: Callable[..., None], dice: random.Random) -> None:
    fault(dice.choice(["to_server", "to_client", "both"]))


def _slow(link: FaultProxy, dice: random.Random) -> None:
    link.slow(dice.uniform(_SLOWEST, _FASTEST), delay=dice.uniform(0.0, 0.02))
