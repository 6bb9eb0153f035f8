"""Which queues and bindings idemp declared: kept on the broker itself, as messages of one queue that everybody browses.

STOMP has no exchanges, and the broker makes any queue that somebody names. So a publisher reads here where an output
goes, and that a queue is none of a slip of the pen.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from idemp.broker.copies import dead_queue
from idemp.broker.routing import matches
from idemp.broker.stomp.wire import destination
from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from idemp.broker.port import Topology
    from idemp.broker.stomp.client import Frame
    from idemp.broker.stomp.link import Link

REGISTRY: Final = "idemp.topology"
#: Seconds after which a delay's message waits in the next tier: a long wait holds up no short one.
TIERS: Final = (10.0, 300.0, float("inf"))
_MANY: Final = 10_000
_MOST_ENTRIES: Final = 20
_QUIET: Final = 0.2
#: What the broker takes for a wildcard, a list of destinations or their options.
_SPECIAL: Final = frozenset("*>,?")
_PLACES: Final = tuple(
    f"/{kind}/" for kind in ("queue", "topic", "temp-queue", "temp-topic", "remote-temp-queue", "remote-temp-topic")
)


@dataclass(slots=True)
class Known:
    """What the registry says.

    Attributes:
        queues: each declared queue, and whether it has one active consumer at a time.
        bindings: per exchange, pattern and queue.
        read: when, on the monotonic clock.
        entries: of how many messages this was put together.
    """

    queues: dict[str, bool] = field(default_factory=dict)
    bindings: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    read: float = field(default_factory=time.monotonic)
    entries: int = 0

    def has(self, queue: str) -> bool:
        """Whether it was declared, by itself or as what stands beside one."""
        return queue in self.queues or any(queue in {dead_queue(name), *waiting_queues(name)} for name in self.queues)

    def bound(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message published so reaches, each once."""
        bindings = self.bindings.get(exchange, set())
        return sorted({queue for pattern, queue in bindings if matches(pattern, routing_key)})

    def add(self, entry: Frame) -> None:
        """Take in what one message of the registry says; one that is none of ours says nothing."""
        self.entries += 1
        try:
            found = json.loads(entry.body)
            queues = {str(name): bool(single) for name, single in found["queues"].items()}
            bindings = {
                str(exchange): {(str(pattern), str(queue)) for pattern, queue in pairs}
                for exchange, pairs in found["exchanges"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        self.queues.update(queues)
        for exchange, pairs in bindings.items():
            self.bindings.setdefault(exchange, set()).update(pairs)

    def body(self) -> bytes:
        """All of it as the body of one message."""
        exchanges = {exchange: sorted(pairs) for exchange, pairs in self.bindings.items()}
        return json.dumps({"queues": self.queues, "exchanges": exchanges}).encode()


def waiting_queue(queue: str, delay: float) -> str:
    """Where messages of a queue wait that are to come after so many seconds.

    Example:
        >>> waiting_queue("orders", 2.5), waiting_queue("orders", 3600)
        ('orders.waiting-1', 'orders.waiting-3')
    """
    tier = next(number for number, limit in enumerate(TIERS, start=1) if delay <= limit)
    return f"{queue}.waiting-{tier}"


def waiting_queues(queue: str) -> list[str]:
    """All of a queue's waiting places.

    Example:
        >>> waiting_queues("orders")
        ['orders.waiting-1', 'orders.waiting-2', 'orders.waiting-3']
    """
    return [f"{queue}.waiting-{number}" for number, _ in enumerate(TIERS, start=1)]


def usable(name: str) -> bool:
    """Whether messages can go to a queue of this name, or to what a foreign producer gave as a destination.

    Never to the registry: a message asks for its answer wherever it likes, and could write there where events go.

    Example:
        >>> usable("orders.eu"), usable("orders.*"), usable("")
        (True, False, False)
        >>> usable("/temp-queue/answers"), usable("/orders"), usable("idemp.topology")
        (True, False, False)
    """
    if name.startswith("/") and not name.startswith(_PLACES):
        return False  # the broker would make a queue of it
    if name.removeprefix(destination("")) == REGISTRY:
        return False
    return bool(name) and name.isprintable() and not _SPECIAL & set(name) and name == name.strip()


def read(link: Link, deadline: float) -> Known:
    """What was declared, by whomever.

    Raises:
        StompError: refused, late, or the connection is gone.
    """
    known = Known()
    for entry in link.browse(destination(REGISTRY), _MANY, deadline):
        known.add(entry)
    return known


def declare(link: Link, topology: Topology, deadline: float) -> None:
    """Write into the registry what it does not have yet.

    Raises:
        StompError: refused, late, or the connection is gone.
        ConfigurationError: a name that no queue can have, or a binding to a queue that does not exist.
    """
    for name in topology.queues:
        if not usable(name) or name.startswith("/"):
            raise ConfigurationError(
                f"ActiveMQ can't have a queue {name!r}.",
                fix=f"Leave out * > , ?, line ends, and / or spaces at its ends; {REGISTRY} is taken.",
            )
    known = read(link, deadline)
    missing = {binding.queue for binding in topology.bindings} - {*topology.queues, *known.queues}
    if missing:
        raise ConfigurationError(f"Bindings name queues that do not exist: {sorted(missing)}.")
    queues = dict.fromkeys(topology.queues, topology.single_active)
    bindings = {(binding.routing_key, binding.queue) for binding in topology.bindings}
    if queues.items() <= known.queues.items() and bindings <= known.bindings.get(topology.exchange, set()):
        return
    _write(link, Known(queues, {topology.exchange: bindings}), deadline)
    if known.entries >= _MOST_ENTRIES:
        _merge(link, known.entries + 1, deadline)


def _write(link: Link, known: Known, deadline: float) -> None:
    headers = {"destination": destination(REGISTRY), "persistent": "true", "content-type": "application/json"}
    link.call("SEND", headers, known.body(), deadline=deadline)


def _merge(link: Link, entries: int, deadline: float) -> None:
    """Put one message in the place of many: the broker shows no more of a queue than its policy's `maxBrowsePageSize`.

    Readers never miss anything: the one is there before the many go, and whatever another declares meanwhile stays.
    """
    inbox: deque[Frame] = deque()
    headers = {"ack": "client-individual", "activemq.prefetchSize": str(entries)}
    name = link.subscribe(destination(REGISTRY), inbox, headers)
    held: list[Frame] = []
    while len(held) < entries and (frame := link.next(inbox, time.monotonic() + _QUIET)) is not None:
        held.append(frame)
    known = Known()
    for frame in held:
        known.add(frame)
    if held:
        _write(link, known, deadline)
    for frame in held:
        link.fire("ACK", {"id": frame.headers["ack"]})
    link.unsubscribe(name)
    link.end_fired(deadline)
