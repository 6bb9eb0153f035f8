"""A broker in the memory of this process, for tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Self, assert_never

from idemp.broker.copies import attempt_of, dead_queue, parked, properties_text, restored, retried
from idemp.broker.port import Ack, Delivery, Endpoint, Guarantees, Park, Refusal, Release, Retry
from idemp.broker.routing import matches
from idemp.clock import SystemClock
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from idemp.broker.port import Settlement, Topology
    from idemp.clock import Clock
    from idemp.messages import Message, Output

SHORTEST_WAIT: Final = 0.001

GUARANTEES: Final = Guarantees(
    name="memory",
    at_least_once=True,
    confirms=True,
    delays="in place",
    horizon_seconds=0.0,
    remarks="For tests: what a closed receiver had not settled comes back; everything is gone with the process.",
    single_active=True,
)


@dataclass(slots=True)
class _Entry:
    """A message in one queue. Its number is its place in the order, also after it was given back."""

    number: int
    message: Message
    deliveries: int = 0


@dataclass(slots=True)
class _Queue:
    name: str
    dead_letter: bool = False
    single_active: bool = False
    receivers: list[MemoryReceiver] = field(default_factory=list)
    ready: list[tuple[int, _Entry]] = field(default_factory=list)
    delayed: list[tuple[float, int, _Entry]] = field(default_factory=list)
    unsettled: int = 0

    def serves(self, receiver: MemoryReceiver) -> bool:
        return not self.single_active or self.receivers[0] is receiver

    def put(self, entry: _Entry) -> None:
        heappush(self.ready, (entry.number, entry))

    def put_delayed(self, entry: _Entry, due: float) -> None:
        heappush(self.delayed, (due, entry.number, entry))

    def wake(self, now: float) -> None:
        while self.delayed and self.delayed[0][0] <= now:
            self.put(heappop(self.delayed)[2])


class _Store:
    """The queues, and the one lock under which everything is called."""

    def __init__(self, clock: Clock) -> None:
        self.changed = threading.Condition()
        self.queues: dict[str, _Queue] = {}
        self.bindings: dict[str, set[tuple[str, str]]] = {}
        self.clock = clock
        self._published = 0

    def queue(self, name: str) -> _Queue:
        if name not in self.queues:
            raise ConfigurationError(f"The queue {name!r} does not exist.", fix="Declare it first.")
        return self.queues[name]

    def dead_queue(self, name: str) -> _Queue:
        dead = dead_queue(name)
        return self.queues.setdefault(dead, _Queue(dead, dead_letter=True))

    def now(self) -> float:
        return self.clock.now().timestamp()

    def awake(self, name: str) -> _Queue:
        queue = self.queue(name)
        queue.wake(self.now())
        return queue

    def busy(self, *, delayed: bool) -> bool:
        now = self.now()
        for queue in self.queues.values():
            queue.wake(now)
        working = [queue for queue in self.queues.values() if not queue.dead_letter]
        return any(queue.unsettled for queue in self.queues.values()) or any(
            queue.ready or (delayed and queue.delayed) for queue in working
        )

    def wait(self, deadline: float, queues: Sequence[_Queue]) -> bool:
        """Wait for a change, or for the next delayed message; `False` when the deadline has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        now = self.now()
        waits = [queue.delayed[0][0] - now for queue in queues if queue.delayed]
        self.changed.wait(max(SHORTEST_WAIT, min([left, *waits])))
        return True

    def _route(self, output: Output) -> list[_Queue]:
        if output.exchange == "":
            names = {output.routing_key} & self.queues.keys()
        else:
            bindings = self.bindings.get(output.exchange, set())
            names = {queue for pattern, queue in bindings if matches(pattern, output.routing_key)}
        return [self.queues[name] for name in sorted(names)]

    def publish(self, output: Output) -> Refusal | None:
        try:
            message = restored(properties_text(output.message), bytes(output.message.body))
        except (TypeError, ValueError) as error:
            return Refusal("unsendable", f"the headers are no JSON: {error}")
        queues = self._route(output)
        if not queues and output.mandatory:
            return Refusal("returned", f"no queue takes {output.routing_key!r} of exchange {output.exchange!r}")
        for queue in queues:
            self._published += 1
            entry = _Entry(self._published, message)
            if output.delay > 0:
                queue.put_delayed(entry, self.now() + output.delay)
            else:
                queue.put(entry)
        return None

    def settle(self, queue: _Queue, entry: _Entry, settlement: Settlement) -> None:
        queue.unsettled -= 1
        match settlement:
            case Ack():
                pass
            case Retry():
                entry.message = retried(entry.message, settlement, self.clock.now())
                queue.put_delayed(entry, self.now() + settlement.delay.total_seconds())
            case Park():
                self.dead_queue(queue.name).put(_Entry(entry.number, parked(entry.message, settlement)))
            case Release():
                queue.put(entry)
            case _:  # pragma: no cover - the type checker proves that there is no other
                assert_never(settlement)
        self.changed.notify_all()


class InMemoryBroker:
    """A broker for tests: its queues live in this object, its delays pass by the injected clock.

    Timeouts are seconds of real time. Whoever moves a clock of their own by hand calls `wake` afterwards. A message's
    `ttl` and `priority` are kept with it and have no effect.

    Args:
        clock: the time by which delayed messages come due.

    Example:
        >>> from uuid import UUID
        >>> from idemp.broker.port import Topology
        >>> from idemp.messages import Message, Output, OutputKind
        >>> broker = InMemoryBroker()
        >>> broker.declare(Topology(exchange="events", queues=("orders",)))
        >>> output = Output(id=UUID(int=1), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="orders",
        ...                 message=Message(body=b"{}"))
        >>> broker.publisher().publish([output], timeout=1)
        [None]
        >>> receiver = broker.receiver(["orders"], prefetch=1)
        >>> delivery = receiver.receive(timeout=1)
        >>> receiver.settle(delivery, Ack())
        >>> broker.join(timeout=1)
        True
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._store = _Store(clock or SystemClock())

    @property
    def guarantees(self) -> Guarantees:
        """What a test can rely on."""
        return GUARANTEES

    def declare(self, topology: Topology) -> None:
        """Make queues, their dead-letter queues and bindings."""
        with self._store.changed:
            missing = {binding.queue for binding in topology.bindings} - {*topology.queues, *self._store.queues}
            if missing:
                raise ConfigurationError(f"Bindings name queues that do not exist: {sorted(missing)}.")
            for name in topology.queues:
                self._store.queues.setdefault(name, _Queue(name)).single_active = topology.single_active
                self._store.dead_queue(name)
            bound = self._store.bindings.setdefault(topology.exchange, set())
            bound |= {(binding.routing_key, binding.queue) for binding in topology.bindings}

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        """A receiver of its own."""
        with self._store.changed:
            return MemoryReceiver(self._store, [self._store.queue(name) for name in queues], prefetch)

    def identity(self) -> None:
        """No identity: no other process has this broker."""

    def publisher(self) -> MemoryPublisher:
        """A publisher of its own."""
        return MemoryPublisher(self._store)

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` ready messages, oldest first."""
        with self._store.changed:
            return [entry.message for _, entry in sorted(self._store.awake(queue).ready)[:limit]]

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> MemoryTaken:
        """Take up to `limit` ready messages, oldest first."""
        with self._store.changed:
            source = self._store.awake(queue)
            ids = None if wanted is None else set(wanted)
            chosen = [item for item in sorted(source.ready) if ids is None or item[1].message.message_id in ids][:limit]
            numbers = {number for number, _ in chosen}
            source.ready = sorted(item for item in source.ready if item[0] not in numbers)
            source.unsettled += len(chosen)
            return MemoryTaken(self._store, source, [entry for _, entry in chosen])

    def depth(self, queue: str) -> int:
        """How many messages are ready."""
        with self._store.changed:
            return len(self._store.awake(queue).ready)

    def join(self, timeout: float, *, delayed: bool = True) -> bool:
        """Wait until nothing is left to do: all queues but the dead-letter ones are empty, and all is settled.

        Args:
            timeout: seconds of real time to wait at most.
            delayed: whether messages that wait for their time count as left.

        Returns:
            Whether it came to that.
        """
        deadline = time.monotonic() + timeout
        with self._store.changed:
            while self._store.busy(delayed=delayed):
                if not self._store.wait(deadline, list(self._store.queues.values())):
                    return False
            return True

    def wake(self) -> None:
        """Look again at what is due: call it after moving a clock by hand."""
        with self._store.changed:
            self._store.changed.notify_all()


class MemoryReceiver:
    """Consumes queues of an `InMemoryBroker`."""

    def __init__(self, store: _Store, queues: Sequence[_Queue], prefetch: int) -> None:
        self._store = store
        self._queues = list(queues)
        self._prefetch = prefetch
        self._held: dict[object, tuple[_Queue, _Entry]] = {}
        self._cancelled = False
        self._closed = False
        for queue in self._queues:
            queue.receivers.append(self)

    def receive(self, timeout: float) -> Delivery | None:
        """The oldest ready message of all queues, unless `prefetch` messages are unsettled."""
        deadline = time.monotonic() + timeout
        with self._store.changed:
            while True:
                if self._closed:
                    raise BrokerUnavailable("The receiver is closed.", fix="Open another.")
                delivery = self._next()
                if delivery is not None or not self._store.wait(deadline, self._queues):
                    return delivery

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once."""
        with self._store.changed:
            if self._closed:
                raise BrokerUnavailable("The receiver is closed; the message will be delivered again.")
            held = self._held.pop(delivery.tag, None)
            if held is None:
                raise BrokerError("This delivery is not in this receiver's hands: it was settled before.")
            self._store.settle(*held, settlement)

    def keep_alive(self) -> None:
        """There is no link that could go idle."""

    def cancel(self) -> None:
        """Take no more."""
        with self._store.changed:
            self._cancelled = True

    def close(self) -> None:
        """Give back what is not settled."""
        with self._store.changed:
            if not self._closed:
                for queue in self._queues:
                    queue.receivers.remove(self)
            self._closed = True
            for queue, entry in self._held.values():
                self._store.settle(queue, entry, Release())
            self._held.clear()
            self._store.changed.notify_all()

    def _next(self) -> Delivery | None:
        now = self._store.now()
        for queue in self._queues:
            queue.wake(now)
        filled = [queue for queue in self._queues if queue.ready and queue.serves(self)]
        if not filled or self._cancelled or len(self._held) >= self._prefetch:
            return None
        queue = min(filled, key=lambda candidate: candidate.ready[0][0])
        entry = heappop(queue.ready)[1]
        entry.deliveries += 1
        queue.unsettled += 1
        tag = object()
        self._held[tag] = (queue, entry)
        return Delivery(
            message=entry.message,
            queue=queue.name,
            attempt=attempt_of(entry.message),
            redelivered=entry.deliveries > 1,
            tag=tag,
        )


class MemoryPublisher:
    """Publishes to an `InMemoryBroker`."""

    endpoint = Endpoint("memory")

    def __init__(self, store: _Store) -> None:
        self._store = store

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:  # noqa: ARG002 - never waits
        """Put all into their queues."""
        with self._store.changed:
            answers = [self._store.publish(output) for output in outputs]
            self._store.changed.notify_all()
            return answers

    def keep_alive(self) -> None:
        """There is no link that could go idle."""

    def close(self) -> None:
        """There is no link to close; the next publish works as before."""


class MemoryTaken:
    """Messages taken out of a queue of an `InMemoryBroker`."""

    def __init__(self, store: _Store, queue: _Queue, entries: Sequence[_Entry]) -> None:
        self.messages: Sequence[Message] = [entry.message for entry in entries]
        self._store = store
        self._queue = queue
        self._left = dict(enumerate(entries))

    def accept(self, index: int) -> None:
        """Remove one for good."""
        self._settle(index, Ack())

    def _settle(self, index: int, settlement: Settlement) -> None:
        with self._store.changed:
            if index not in self._left:
                raise BrokerError(f"The message {index} is not in our hands: it was accepted before.")
            self._store.settle(self._queue, self._left.pop(index), settlement)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in list(self._left):
            self._settle(index, Release())
