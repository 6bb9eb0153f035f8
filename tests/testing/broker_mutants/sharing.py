"""Brokers that fail several receivers, or those who look into queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop
from types import TracebackType
from typing import Any

from idemp.broker.memory import MemoryPublisher, MemoryReceiver, MemoryTaken
from idemp.broker.port import Ack, Delivery, Settlement, Topology
from idemp.errors import BrokerError, ConfigurationError
from idemp.messages import Message
from tests.testing.broker_mutants.sound import Broker, breaks

# Sharing


@breaks("prefetch_bounds_what_one_receiver_holds")
class PrefetchIgnored(Broker):
    """One receiver takes all."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            self._prefetch = 1_000_000
            return super().receive(timeout)


@breaks("settling_makes_room")
class RoomIsNeverMade(Broker):
    """`prefetch` counts all that was ever received."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            super().settle(delivery, settlement)
            self._prefetch -= 1


@breaks("two_receivers_share_without_overlap")
class EverybodyGetsAll(Broker):
    """Two receivers of a queue get each message both."""

    class receives(MemoryReceiver):  # noqa: N801
        def _next(self) -> Delivery | None:
            delivery = super()._next()
            if delivery is not None and not delivery.redelivered:
                queue, entry = self._held[delivery.tag]
                queue.put(entry)
            return delivery


@breaks("two_receivers_share_without_overlap")
class OnlyTheFirstWorks(Broker):
    """One receiver of a queue is served, the others wait."""

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        receiver = super().receiver(queues, prefetch=prefetch)
        if getattr(self, "served", None):
            receiver.cancel()
        self.served = True
        return receiver


@breaks("one_receiver_of_two_queues")
class FirstQueueOnly(Broker):
    """Of several queues only the first is consumed."""

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        return super().receiver(queues[:1], prefetch=prefetch)


@breaks("one_receiver_of_two_queues")
class QueueUntold(Broker):
    """A delivery is told to be from the first queue, wherever it is from."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, queue=self._queues[0].name)


# Looking and taking


@breaks("browse_takes_nothing")
class BrowsingTakes(Broker):
    """Who looks at messages has them."""

    def browse(self, queue: str, limit: int) -> list[Message]:
        messages = super().browse(queue, limit)
        with self._store.changed:
            source = self._store.queue(queue)
            for _ in messages:
                heappop(source.ready)
        return messages


@breaks("browse_takes_nothing")
class BrowsingTurnsRound(Broker):
    """What was looked at goes to the end of the queue."""

    def browse(self, queue: str, limit: int) -> list[Message]:
        messages = super().browse(queue, limit)
        with self._store.changed:
            source = self._store.queue(queue)
            for _ in messages:
                entry = heappop(source.ready)[1]
                entry.number += 1_000_000
                source.put(entry)
        return messages


@breaks("take_removes_what_is_accepted")
class AcceptedComesBack(Broker):
    """All that was taken goes back."""

    class takes(MemoryTaken):  # noqa: N801
        def accept(self, index: int) -> None:
            """Nothing."""


@breaks("take_removes_what_is_accepted")
class AcceptsTheFirst(Broker):
    """It is not the chosen message that goes."""

    class takes(MemoryTaken):  # noqa: N801
        def accept(self, index: int) -> None:
            super().accept(min(self._left))


@breaks("take_by_id")
class TakesAnyId(Broker):
    """The ids make no difference."""

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> MemoryTaken:
        return super().take(queue, None, limit)


@breaks("take_keeps_to_its_limit")
class TakesAll(Broker):
    """The limit is not kept."""

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> MemoryTaken:
        return super().take(queue, wanted, 1_000_000)


@breaks("take_gives_back_after_an_error")
class TakenAreLostByErrors(Broker):
    """After an error nothing goes back."""

    class takes(MemoryTaken):  # noqa: N801
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if error is None:
                super().__exit__(kind, error, trace)


@breaks("take_gives_back_after_an_error")
class TakingSwallowsErrors(Broker):
    """An error ends at the `with` block."""

    class takes(MemoryTaken):  # noqa: N801
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> bool:  # type: ignore[override]
            super().__exit__(kind, error, trace)
            return True


@breaks("depth_counts_what_is_ready")
class DepthOfAll(Broker):
    """What consumers hold is counted, too."""

    def depth(self, queue: str) -> int:
        with self._store.changed:
            return super().depth(queue) + self._store.queue(queue).unsettled


# Living


@breaks("declare_twice_is_harmless")
class DeclaringEmpties(Broker):
    """Declaring a queue makes a new one."""

    def declare(self, topology: Topology) -> None:
        for name in topology.queues:
            self._store.queues.pop(name, None)
        super().declare(topology)


@breaks("declare_twice_is_harmless")
class DeclaringTwiceIsAnError(Broker):
    """What is there can't be declared."""

    def declare(self, topology: Topology) -> None:
        if topology.queues[0] in self._store.queues:
            raise ConfigurationError("The queue exists.")
        super().declare(topology)


@breaks("declare_twice_is_harmless")
class BindingsDouble(Broker):
    """A binding that is declared twice delivers twice."""

    times = 0

    def declare(self, topology: Topology) -> None:
        super().declare(topology)
        self.times += 1

    def publisher(self) -> MemoryPublisher:
        made: Any = super().publisher()
        publish, copies = made.publish, self.times
        made.publish = lambda outputs, timeout: publish(list(outputs) * copies, timeout)[: len(outputs)]
        return made


@breaks("keep_alive_from_another_thread")
class KeepAliveNeedsItsThread(Broker):
    """A heartbeat from another thread is an error."""

    class receives(MemoryReceiver):  # noqa: N801
        def keep_alive(self) -> None:
            raise BrokerError("Only the thread that opened the connection may use it.")


@breaks("keep_alive_from_another_thread")
class KeepAliveReceives(Broker):
    """A heartbeat takes what has arrived, and drops it."""

    class receives(MemoryReceiver):  # noqa: N801
        def keep_alive(self) -> None:
            with self._store.changed:
                if not self._closed and (delivery := self._next()) is not None:
                    self.settle(delivery, Ack())


@breaks("receive_returns_none_after_its_timeout")
class ReceiveDoesNotWait(Broker):
    """`receive` answers at once."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            return super().receive(0)


@breaks("receive_wakes_for_a_new_message")
class ReceivePolls(Broker):
    """`receive` looks again when its timeout is over."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(0)
            if delivery is None:
                time.sleep(min(timeout, 1.5))
            return delivery or super().receive(0)


@breaks("close_twice_is_harmless")
class ClosesOnce(Broker):
    """Closing what is closed is an error."""

    class receives(MemoryReceiver):  # noqa: N801
        def close(self) -> None:
            if self._closed:
                raise BrokerError("It is closed.")
            super().close()


@breaks("close_twice_is_harmless")
class CloseTwiceGivesBackTwice(Broker):
    """Each close gives back what was held."""

    class receives(MemoryReceiver):  # noqa: N801
        def close(self) -> None:
            held = dict(self._held)
            super().close()
            self._held = held
