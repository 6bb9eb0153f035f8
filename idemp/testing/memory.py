"""A broker in memory, for tests: queues of this process, with the promises of the port."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from idemp.messages import Delivery, Output, Refusal, read_properties
from idemp.ports import Finding

__all__ = ["MemoryBroker", "MemoryPublisher", "MemoryReceiver"]


@dataclass(slots=True)
class _Message:
    properties: bytes
    body: bytes
    delivered: bool = False


class MemoryBroker:
    """Queues in this process.

    Args:
        strict: Whether a queue has to be declared, as at other brokers. If not, it is made by the first message to it, and a
            published message that no queue takes counts as taken.

    Example:
        >>> broker = MemoryBroker(strict=False)
        >>> broker.publisher().publish([Output("1", "send", "", "stock", {}, b"{}")], 1.0)
        [None]
        >>> [delivery.body for delivery in broker.receiver("stock").receive(10, 0.0)]
        [b'{}']
    """

    identity = "memory"

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict
        self.queues: dict[str, deque[_Message]] = {}
        self.bindings: set[tuple[str, str]] = set()
        self.receivers: list[MemoryReceiver] = []
        self.changed = threading.Condition()

    def declare(self, queue: str, types: Sequence[str]) -> list[Finding]:
        """Make a queue, and let it take published messages of these types."""
        with self.changed:
            for name in (queue, f"{queue}.unstorable"):
                self.queues.setdefault(name, deque())
            self.bindings |= {(type, queue) for type in types}
        return []

    def receiver(self, queue: str, prefetch: int = 40) -> MemoryReceiver:
        """Return a new receiver."""
        with self.changed:
            self.receivers.append(MemoryReceiver(self, queue, prefetch))
        return self.receivers[-1]

    def publisher(self) -> MemoryPublisher:
        """Return a new publisher."""
        return MemoryPublisher(self)

    def lose(self, *receivers: MemoryReceiver) -> None:
        """Lose the connections of some receivers, or of all: what was not acknowledged is delivered again, and says so."""
        with self.changed:
            for receiver in receivers or self.receivers:
                receiver.give_back(delivered=True)

    def take(self, output: Output) -> Refusal | None:
        """Put a message into the queues that take it."""
        key = output.routing_key
        if output.exchange:
            found = {queue for type, queue in self.bindings if type == key}
        else:
            found = {key} if key in self.queues or not self._strict else set()
        if self._strict and output.mandatory and not found:
            return Refusal(f"no queue takes {key!r}", own=True)
        for queue in found:
            message = _Message(json.dumps(output.properties).encode(), output.body)
            self.queues.setdefault(queue, deque()).append(message)
        return None


class MemoryPublisher:
    """Puts messages into queues.

    Example:
        >>> MemoryPublisher(MemoryBroker()).publish([Output("1", "send", "", "stock", {}, b"{}")], 1.0)
        [Refusal(reason="no queue takes 'stock'", own=True)]
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave it to `publish`."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:  # noqa: ARG002 - nothing to wait for
        """Put each output into the queues that take it."""
        with self._broker.changed:
            answers = [self._broker.take(output) for output in outputs]
            self._broker.changed.notify_all()
        return answers

    def close(self) -> None:
        """Do nothing."""


class MemoryReceiver:
    """Takes messages of one queue. `MemoryBroker.receiver` makes it.

    Attributes:
        unacknowledged: Messages that were delivered, by tag.

    Example:
        >>> MemoryReceiver(MemoryBroker(), "stock", 40).receive(1, 0.0)
        []
    """

    def __init__(self, broker: MemoryBroker, queue: str, prefetch: int) -> None:
        self._broker, self._queue, self._prefetch = broker, queue, prefetch
        self._tags, self._woken = count(), False
        self.unacknowledged: dict[int, _Message] = {}

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Return messages, or wait for some."""
        most = min(limit, self._prefetch - len(self.unacknowledged))
        with self._broker.changed:
            queue = self._broker.queues.setdefault(self._queue, deque())
            if most > 0:
                self._broker.changed.wait_for(lambda: queue or self._woken, timeout)
            self._woken = False
            return [self._deliver(queue.popleft()) for _ in range(min(most, len(queue)))]

    def _deliver(self, message: _Message) -> Delivery:
        tag, again = next(self._tags), message.delivered
        self.unacknowledged[tag] = message
        return Delivery(self._queue, read_properties(message.properties), message.body, again, tag)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Forget messages; one whose connection was lost stays."""
        with self._broker.changed:
            for delivery in deliveries:
                self.unacknowledged.pop(delivery.tag, None)

    def keep_alive(self) -> None:
        """Do nothing: nothing runs out."""

    def wake(self) -> None:
        """End a waiting `receive`."""
        with self._broker.changed:
            self._woken = True
            self._broker.changed.notify_all()

    def give_back(self, *, delivered: bool) -> None:
        """Put what was not acknowledged back, in order."""
        with self._broker.changed:
            for message in reversed(self.unacknowledged.values()):
                message.delivered = message.delivered or delivered
                self._broker.queues[self._queue].appendleft(message)
            self.unacknowledged.clear()
            self._broker.changed.notify_all()

    def close(self) -> None:
        """Put what was not acknowledged back, as if it had not been delivered."""
        self.give_back(delivered=False)
        with suppress(ValueError):
            self._broker.receivers.remove(self)
