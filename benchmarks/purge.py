"""`python -m benchmarks purge`: how long deliveries take while a day of a million expired claims is deleted.

Messages arrive at a fixed rate, half of what the consumer can handle, sent by a process of its own. Time counts from the
moment at which a message was due, whether or not the sender kept up, to its ack. Windows with and without a cleaner are
interleaved in random order; the cleaner runs in the consumer's process, as it does in a worker. Once with the plain tables,
from which claims are deleted in batches, and once with daily tables, which are dropped. PostgreSQL and RabbitMQ.
`--layouts` takes other designs for the plain tables, too: batches of other sizes, and one DELETE for all.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from sqlalchemy import func, insert, inspect, select

from benchmarks.figures import machine, paired, spread, versions
from benchmarks.filling import fill
from benchmarks.results import save
from benchmarks.servers import Servers
from benchmarks.shows import verdicts
from benchmarks.variants import place_of
from benchmarks.work import ORDER, SETTINGS, Order
from benchmarks.wrapped import Wrapped
from idemp import Message, Output
from idemp.broker.making import make_broker
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.daily import Daily
from idemp.inbox.sql.days import start_of
from idemp.inbox.sql.names import Names
from idemp.messages import OutputKind
from idemp.retention import BATCH, Cleaner
from idemp.testing import FakeClock
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.port import Delivery, Receiver, Settlement

RETENTION: Final = timedelta(days=7)
DAY: Final = timedelta(days=1)
MOST: Final = 1.2
SHARE: Final = 0.5
_DAYS: Final = 30
_PATIENCE: Final = 60.0


# The sender's process -----------------------------------------------------------------------------------------------


def send(broker_url: str, queue: str, rate: float, seconds: float) -> None:
    """Send orders, each at its time, and wait for their confirms."""
    publisher: Any = make_broker(broker_url, SETTINGS).publisher()
    began, left = time.monotonic() + 0.2, 0
    for number in range(int(rate * seconds)):
        due = began + number / rate
        time.sleep(max(0.0, due - time.monotonic()))
        publisher.send([_order(queue, due)], _PATIENCE)
        left += 1 - len(_confirmed(publisher, 0.0))
    while left:
        left -= len(_confirmed(publisher, _PATIENCE))
    publisher.close()


def _confirmed(publisher: Any, seconds: float) -> list[Any]:
    answers = publisher.answered(seconds)
    if any(any(refusals) for _, refusals in answers):
        raise RuntimeError(f"the broker did not take an order: {answers}")
    return list(answers)


def _order(queue: str, due: float) -> Output:
    order_id = str(uuid4())
    order = Order(order_id=order_id, sku="A-1", quantity=2, note="x" * 150)
    message = Message(body=order.model_dump_json().encode(), type=ORDER, message_id=order_id, correlation_id=str(due))
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message)


# The consumer's ------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Deliveries that were acked: when each was due, and how long it took."""

    due: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[float]:
        """How long those took that were due then."""
        return [each for due, each in zip(self.due, self.seconds, strict=True) if start <= due < end]


class Timed(Wrapped):
    """A consumer that notes when its deliveries are acked."""

    def around(self, broker: Any) -> Any:
        """The broker, with a watch."""
        self.seen = Seen()
        return _TimedBroker(broker, self.seen)


class _TimedBroker:
    def __init__(self, inner: Any, seen: Seen) -> None:
        self._inner = inner
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> Any:
        return _TimedReceiver(self._inner.receiver(queues, prefetch=prefetch), self._seen)


class _TimedReceiver:
    def __init__(self, inner: Receiver, seen: Seen) -> None:
        self._inner = inner
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        self._inner.settle(delivery, settlement)
        if delivery.message.correlation_id:
            due = float(delivery.message.correlation_id)
            self._seen.due.append(due)
            self._seen.seconds.append(time.monotonic() - due)


class Bench:
    """A consumer, a sender and a cleaner.

    Args:
        servers: the run's.
        rows: how many expired claims there are when a window with a cleaner begins.
    """

    batch = BATCH
    """Rows that one transaction of the cleaner deletes."""

    def __init__(self, servers: Servers, rows: int) -> None:
        self._rows, self._expired, self._handled, self.deleted, self._purges = rows, 0, 0, 0, 0
        self.engine = create_engine_safely(servers.database("postgresql"))
        self._broker_url = servers.broker("rabbitmq")
        self.consumer = Timed(place_of("purge", self.engine, self._broker_url), retention=RETENTION)

    def prepare(self, messages: int) -> float:
        """Make the consumer look as if it had been consuming for long; messages per second that it can handle."""
        rates = [1 / self.consumer.run(messages).seconds for _ in range(4)][1:]
        self._handled += 4 * messages
        activity, now = Tables().activity, datetime.now(UTC)
        with self.engine.begin() as connection:
            consumer = connection.scalars(select(Tables().consumer.c.id)).one()
            always = {"consumer_id": consumer, "started_at": now - 60 * DAY, "ended_at": now + DAY}
            connection.execute(insert(activity).values(always))
        self.lay_out()
        self.fill()
        self.consumer.stay_open()
        return statistics.median(rates)

    def window(self, rate: float, seconds: float, *, purging: bool) -> list[float]:
        """How long the deliveries took that were due while there was, or was not, a cleaner at work."""
        if purging:
            self.fill()
        before, count = len(self.consumer.seen.due), int(rate * seconds)
        arguments = (self._broker_url, self.consumer.place.queue, rate, seconds)
        sender = get_context("spawn").Process(target=send, args=arguments, daemon=True)
        sender.start()
        wait_until(lambda: len(self.consumer.seen.due) > before, "the first delivery")  # its process is up
        began = time.monotonic()
        ended = self._purged(seconds - 1.0) if purging else began + seconds - 1.0
        sender.join()
        if sender.exitcode:
            raise RuntimeError(f"the sender ended with {sender.exitcode}")
        wait_until(lambda: len(self.consumer.seen.due) >= before + count, "all deliveries")
        self._handled += count
        return self.consumer.seen.between(began, ended)

    def conserved(self) -> str:
        """What is wrong; empty if every message had its effect, and no claim is gone but those that had expired."""
        with self.engine.connect() as connection:
            effects = connection.scalars(select(func.count()).select_from(self.consumer.place.effects)).one()
            claims = connection.scalars(select(func.count()).select_from(Tables().inbox)).one()
        left = self.consumer.place.broker.depth(self.consumer.place.queue)
        if (effects, claims, left) == (self._handled, self._handled + self._expired, 0):
            return ""
        return f"{self._handled} handled, {effects} effects, {claims} claims, {left} left in the queue"

    def close(self) -> None:
        """Close what is open."""
        self.consumer.close()
        self.engine.dispose()

    def lay_out(self) -> None:
        """Before the first expired claim."""

    def fill(self) -> None:
        """With expired claims."""
        missing = self._rows - self._expired
        if missing:
            first = datetime.now(UTC) - RETENTION - 2 * DAY
            fill(self.engine, "time-ordered", missing, first=first, step=DAY / missing)
            self._expired = self._rows

    def windows(self) -> dict[str, timedelta]:
        """By which they are expired."""
        return self.consumer.app.retentions()

    def _purged(self, seconds: float) -> float:
        """Let a cleaner work for so long; when it ended."""
        app, stop = self.consumer.app, threading.Event()
        timer = threading.Timer(seconds, stop.set)
        timer.start()
        deleted = Cleaner(app.store.upkeep, app.name, self.windows(), batch=self.batch).run(stop)
        timer.cancel()
        ended = time.monotonic()
        left = self._left(deleted)
        self.deleted += self._expired - left
        self._expired = left
        self._purges += 1
        return ended

    def _left(self, deleted: int) -> int:
        """How many expired claims are left, of which the cleaner says that it deleted so many."""
        return self._expired - deleted


class DailyBench(Bench):
    """With tables of a day's claims each, of which each purge drops one."""

    def lay_out(self) -> None:
        """As somebody did it a month ago."""
        clock = FakeClock(datetime.now(UTC) - _DAYS * DAY)
        name, tables = self.consumer.app.name, Tables()
        daily = Daily(self.engine, tables, clock, Names(self.engine, tables, clock))
        self._layout = daily.open(name, ahead=_DAYS + 2)
        self.consumer.app.store.refresh_horizons(name, [RETENTION])

    def fill(self) -> None:
        """The oldest day that there is."""
        if not self._expired:
            day = self._layout.days[self._purges]
            part = Tables().part(self._layout.part_on(day))
            step = DAY // (self._rows + 1)  # rounded up, the last one would be of the next day
            fill(self.engine, "time-ordered", self._rows, first=start_of(day), step=step, tables=part)
            self._expired = self._rows

    def _left(self, deleted: int) -> int:
        """Of a day that is dropped the cleaner tells about how many; it is gone, or all of it is there."""
        del deleted
        part = Tables().part(self._layout.part_on(self._layout.days[self._purges]))
        return self._expired if inspect(self.engine).has_table(part.inbox.name) else 0

    def windows(self) -> dict[str, timedelta]:
        """By which just that day is expired."""
        end = start_of(self._layout.days[self._purges]) + DAY
        return {ORDER: datetime.now(UTC) - end - DAY / 2}


class SmallBatches(Bench):
    """The same statements more often, each for fewer rows."""

    batch = 100


class LargeBatches(Bench):
    """Fewer statements, each for more rows."""

    batch = 2_500


class AtOnce(Bench):
    """What one would write who thinks of the disk alone: a single DELETE of all that has expired."""

    batch = 1_000_000_000


BENCHES: Final[dict[str, type[Bench]]] = {
    "plain": Bench,
    "daily": DailyBench,
    "plain, 100 rows at once": SmallBatches,
    "plain, 2,500 rows at once": LargeBatches,
    "plain, all rows at once": AtOnce,
}
LAYOUTS: Final = "plain;daily"


def percentile(values: Sequence[float], share: float) -> float:
    """What that share of the values does not exceed.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5)
        2.0
    """
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """All layouts, one after the other."""
    layouts = [{"layout": layout, **measure(servers, layout, options)} for layout in options.layouts.split(";")]
    how = {"rows": options.rows, "rounds": options.rounds}
    return {"machine": machine(), "versions": versions(), **how, "layouts": layouts}


def measure(servers: Servers, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """Capacity, then windows with and without."""
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    with closing(BENCHES[layout](servers, options.rows)) as bench:
        capacity = bench.prepare(options.messages)
        rate = SHARE * capacity
        for number in range(options.rounds):
            print(f"purge, {layout}: round {number + 1} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
            for purging in random.sample([True, False], 2):
                found[purging].append(bench.window(rate, options.seconds, purging=purging))
        if wrong := bench.conserved():
            raise RuntimeError(f"the figures are void: {wrong}")
        deleted = bench.deleted
    p99 = {purging: [percentile(each, 0.99) for each in windows] for purging, windows in found.items()}
    ratio, target = spread(paired(p99[True], p99[False])), {"target": MOST}
    return {
        "messages_per_second": round(rate, 1),
        "capacity": round(capacity, 1),
        "claims_deleted": deleted,
        "p99": {**ratio, **target, **verdicts(ratio, target, at_least=False)},
        "milliseconds": {
            ("purging" if purging else "quiet"): {
                f"p{round(100 * share)}": round(statistics.median(percentile(each, share) for each in windows) * 1e3, 2)
                for share in (0.5, 0.99)
            }
            for purging, windows in found.items()
        },
    }


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks purge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default=LAYOUTS, help=f"with semicolons between: {'; '.join(BENCHES)}")
    parser.add_argument("--rows", type=int, default=1_000_000, help="expired claims")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="per window")
    parser.add_argument("--messages", type=int, default=1000, help="by which the capacity is measured")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it; print it."""
    options = options_of(arguments)
    with Servers() as servers:
        found = run(servers, options)
    if options.save:
        save("purge", found)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for each in found["layouts"]:
        p99, spent = each["p99"], each["milliseconds"]
        print(
            f"{each['layout']:6} {each['messages_per_second']:.0f} messages/s of {each['capacity']:.0f}; p99 while purging "
            f"{spent['purging']['p99']:.1f} ms, else {spent['quiet']['p99']:.1f} ms: {p99['median']:.2f} "
            f"({p99['lower_quartile']:.2f}-{p99['upper_quartile']:.2f}); {each['claims_deleted']:,} claims deleted"
        )
    return 0
