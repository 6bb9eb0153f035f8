"""Brokers that let messages overtake each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from idemp.broker.memory import MemoryReceiver
from idemp.broker.port import Ack, Park, Release
from tests.testing.broker_mutants.sound import Broker, breaks

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Settlement, Topology


@breaks("one_receiver_after_the_other")
class AllAreActive(Broker):
    """Says that it can, and does not."""

    def declare(self, topology: Topology) -> None:
        super().declare(replace(topology, single_active=False))


@breaks("one_receiver_after_the_other")
class CancelledIsOver(Broker):
    """Who is cancelled makes room for the next, whatever it still has in hand."""

    class receives(MemoryReceiver):  # noqa: N801
        def cancel(self) -> None:
            super().cancel()
            for queue in self._queues:
                queue.receivers.append(queue.receivers.pop(0))


@breaks("one_receiver_after_the_other")
class GivenBackComesLast(Broker):
    """What is given back stands behind what was never handed out."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            if isinstance(settlement, Release):
                self._held[delivery.tag][1].number += 1000
            super().settle(delivery, settlement)


@breaks("what_was_parked_leaves_no_gap")
class ParkedTakesOneMore(Broker):
    """Parking one loses the next one."""

    class receives(MemoryReceiver):  # noqa: N801
        def settle(self, delivery: Delivery, settlement: Settlement) -> None:
            super().settle(delivery, settlement)
            if isinstance(settlement, Park) and self._held:
                self._store.settle(*self._held.popitem(), Ack())
