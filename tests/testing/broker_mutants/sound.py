"""Sound brokers that the mutants differ from in one thing, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from idemp.broker.memory import InMemoryBroker, MemoryPublisher, MemoryReceiver, MemoryTaken
from idemp.broker.port import Delivery, Refusal
from idemp.messages import Message, Output
from tests.testing.mutants import Table

TABLE = Table()
breaks = TABLE.breaks


class Broker(InMemoryBroker):
    """Sound; the mutants differ from it in one thing."""

    receives: type[MemoryReceiver] = MemoryReceiver
    publishes: type[MemoryPublisher] = MemoryPublisher
    takes: type[MemoryTaken] = MemoryTaken

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        with self._store.changed:
            return self.receives(self._store, [self._store.queue(name) for name in queues], prefetch)

    def publisher(self) -> MemoryPublisher:
        return self.publishes(self._store)

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> MemoryTaken:
        taken = super().take(queue, wanted, limit)
        return self.takes(self._store, taken._queue, list(taken._left.values()))

    def reopened(self) -> Broker:
        """Another instance on the same queues."""
        return copy(self)


class Modest(Broker):
    """Sound, with limits that it may declare: small bodies, and no word about redeliveries."""

    largest = 10_000

    class receives(MemoryReceiver):  # noqa: N801 - an attribute that happens to be a class
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, redelivered=False)

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            if any(len(output.message.body) > Modest.largest for output in outputs):
                return [Refusal("unsendable", "too large")] * len(outputs)
            return super().publish(outputs, timeout)


class Changing(MemoryPublisher):
    """Changes each message on its way."""

    def changed(self, message: Message) -> Message:
        raise NotImplementedError

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        return super().publish([replace(output, message=self.changed(output.message)) for output in outputs], timeout)
