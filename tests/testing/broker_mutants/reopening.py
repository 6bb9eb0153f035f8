"""Brokers that keep something in the memory of their process."""

from __future__ import annotations

from copy import copy

from idemp.broker.memory import MemoryReceiver
from tests.testing.broker_mutants.sound import Broker, breaks


@breaks("reopened_has_every_message", "reopened_has_its_topology")
class QueuesInMemory(Broker):
    """Another instance has queues of its own."""

    def reopened(self) -> Broker:
        return type(self)()


@breaks("reopened_has_every_message")
class ReadyInMemory(Broker):
    """What was published is confirmed before it is written."""

    def reopened(self) -> Broker:
        for queue in self._store.queues.values():
            if not queue.dead_letter:
                queue.ready.clear()
        return super().reopened()


@breaks("reopened_has_every_message")
class DelayedInMemory(Broker):
    """What waits for its time is in a timer of the process."""

    def reopened(self) -> Broker:
        for queue in self._store.queues.values():
            queue.delayed.clear()
        return super().reopened()


@breaks("reopened_has_every_message")
class DeadLettersInMemory(Broker):
    """Dead letters go with the process."""

    def reopened(self) -> Broker:
        for queue in self._store.queues.values():
            if queue.dead_letter:
                queue.ready.clear()
        return super().reopened()


@breaks("reopened_has_every_message")
class HeldAreLost(Broker):
    """What was handed out is gone, settled or not."""

    class receives(MemoryReceiver):  # noqa: N801
        def close(self) -> None:
            self._held.clear()
            super().close()


@breaks("reopened_has_its_topology")
class BindingsInMemory(Broker):
    """Who binds a queue binds it for its own instance."""

    def reopened(self) -> Broker:
        other = copy(self)
        other._store = copy(self._store)
        other._store.bindings = {}
        return other
