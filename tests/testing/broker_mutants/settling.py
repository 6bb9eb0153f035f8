"""Brokers whose deliveries end in the wrong way."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

from idemp.broker.memory import MemoryReceiver
from idemp.broker.port import Ack, Delivery, Park, Release, Retry, Settlement
from tests.testing.broker_mutants.sound import Broker, breaks

# Settling


@breaks("unsettled_returns_after_close", "ack_is_final")
class AckAtReceipt(Broker):
    """The broker forgets a message when it hands it out."""

    class receives(MemoryReceiver):  # noqa: N801
        def close(self) -> None:
            self._held.clear()
            super().close()


@breaks("unsettled_returns_after_close")
class ReturnsCount(Broker):
    """What comes back counts as the next attempt."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, attempt=delivery.attempt + delivery.redelivered)


@breaks("ack_is_final")
class AckUpToHere(Broker):
    """An ack is one for all that was handed out before."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            for tag in list(self._held)[: list(self._held).index(delivery.tag)]:
                super().settle(replace(delivery, tag=tag), Ack())
            super().settle(delivery, settlement)


@breaks("ack_is_final", "publish_confirm_receive_ack")
class AckedComesAgain(Broker):
    """An ack gives the message back."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            super().settle(delivery, Release() if settlement == Ack() else settlement)


@breaks("settling_twice_affects_no_other")
class SettlesWhateverIsHeld(Broker):
    """A second settlement hits the delivery that is held now."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if delivery.tag not in self._held and self._held:
                delivery = replace(delivery, tag=next(iter(self._held)))
            super().settle(delivery, settlement)


@breaks("retry_waits_and_lets_others_pass")
class RetriesAtOnce(Broker):
    """A retry forgets its delay."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Retry):
                settlement = replace(settlement, delay=timedelta(0))
            super().settle(delivery, settlement)


@breaks("retry_waits_and_lets_others_pass")
class RetriesTooEarly(Broker):
    """A retry waits for a third of its delay."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Retry):
                settlement = replace(settlement, delay=settlement.delay / 3)
            super().settle(delivery, settlement)


@breaks("retry_waits_and_lets_others_pass")
class RetriesBlockTheQueue(Broker):
    """While a message waits nothing passes it."""

    class receives(MemoryReceiver):  # noqa: N801
        def _next(self) -> Delivery | None:
            for queue in self._queues:
                queue.wake(self._store.now())
            return None if any(queue.delayed for queue in self._queues) else super()._next()


@breaks("retry_waits_and_lets_others_pass", "attempts_add_up")
class EveryRetryCounts(Broker):
    """A retry that doesn't count is an attempt all the same."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Retry):
                settlement = replace(settlement, counted=True)
            super().settle(delivery, settlement)


@breaks("attempts_add_up")
class AttemptsStopAtTwo(Broker):
    """The number tells a first attempt from later ones, and no more."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, attempt=min(2, delivery.attempt))


@breaks("retry_keeps_the_message")
class RetriesAreNewMessages(Broker):
    """The copy has an id of its own."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Retry):
                entry = self._held[delivery.tag][1]
                entry.message = replace(entry.message, message_id=str(uuid4()))
            super().settle(delivery, settlement)


@breaks("park_goes_to_the_dead_letter_queue_intact")
class ParkedWithoutHeaders(Broker):
    """A parked message loses its own headers."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Park):
                entry = self._held[delivery.tag][1]
                entry.message = replace(entry.message, headers={})
            super().settle(delivery, settlement)


@breaks("park_goes_to_the_dead_letter_queue_intact")
class ParkedWithoutItsStory(Broker):
    """Nobody can see why a message was parked."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            super().settle(delivery, Park("?") if isinstance(settlement, Park) else settlement)


@breaks("park_goes_to_the_dead_letter_queue_intact", "close_ends_what_was_settled")
class ParkedIsDropped(Broker):
    """A parked message is thrown away."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            super().settle(delivery, Ack() if isinstance(settlement, Park) else settlement)


@breaks("release_comes_back_at_once")
class ReleasesCount(Broker):
    """What was given back is the next attempt."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            retry = Retry(timedelta(0), counted=True)
            super().settle(delivery, retry if isinstance(settlement, Release) else settlement)


@breaks("release_comes_back_at_once")
class ReleasesWaitForClose(Broker):
    """What was given back is free only when its receiver is closed."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if not isinstance(settlement, Release):
                super().settle(delivery, settlement)


@breaks("what_a_receiver_gives_back_can_come_to_itself")
class NeverTheSameAgain(Broker):
    """A receiver gets no message twice."""

    class receives(MemoryReceiver):  # noqa: N801
        def _next(self) -> Delivery | None:
            delivery = super()._next()
            if delivery is None or not (delivery.redelivered or delivery.attempt > 1):
                return delivery
            queue, entry = self._held.pop(delivery.tag)
            queue.unsettled -= 1
            queue.put_delayed(entry, self._store.now() + 60)
            return None


@breaks("close_ends_what_was_settled")
class CloseForgetsTheLast(Broker):
    """Settlements are carried out in batches, and `close` doesn't wait for the last one."""

    class receives(MemoryReceiver):  # noqa: N801
        waiting: tuple[Delivery, Settlement] | None = None

        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if self.waiting is not None:
                super().settle(*self.waiting)
            self.waiting = (delivery, settlement)


@breaks("cancel_takes_no_more")
class CancelIsIgnored(Broker):
    """It goes on taking messages."""

    class receives(MemoryReceiver):  # noqa: N801
        def cancel(self) -> None:
            """Nothing."""


@breaks("cancel_takes_no_more")
class CancelCloses(Broker):
    """What was handed out can't be settled any more."""

    class receives(MemoryReceiver):  # noqa: N801
        def cancel(self) -> None:
            self.close()
