# ruff: noqa: S101 - this module is made of assertions
"""Cases of the broker port: queues with one active consumer at a time, for brokers that say that they can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp.broker.port import Ack, Park, Release, Topology
from idemp.testing.cases.broker import BrokerSuite

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Receiver
    from idemp.testing.broker_bench import Bench


class OrderingCases(BrokerSuite):
    """Nobody has a later message while an earlier one is in another's hands."""

    def test_one_receiver_after_the_other(self, bench: Bench) -> None:
        """Whatever the first one is told, and in whatever order: all that it did not end comes to the next, in order."""
        first, held = self._holding(bench)
        second = bench.receiver(queue=held[0].queue)
        for delivery in (held[3], held[1]):
            first.settle(delivery, Release())
        first.settle(held[0], Ack())
        first.cancel()
        assert second.receive(self.quiet) is None, "it got a message, and earlier ones have not ended"
        first.close()
        assert [delivery.message.body for delivery in bench.drain(second, 5)] == [b"1", b"2", b"3", b"4", b"5"]

    def test_what_was_parked_leaves_no_gap(self, bench: Bench) -> None:
        """Nor does it come again."""
        first, held = self._holding(bench)
        first.settle(held[1], Park("Refuse"))
        first.close()
        second = bench.receiver(queue=held[0].queue)
        assert [delivery.message.body for delivery in bench.drain(second, 5)] == [b"0", b"2", b"3", b"4", b"5"]

    def _holding(self, bench: Bench) -> tuple[Receiver, list[Delivery]]:
        """A receiver that has four of six messages in hand."""
        if not bench.broker.guarantees.single_active:
            pytest.skip("the broker hands a queue to several consumers at once, and says so")
        queue = f"{bench.name}.ordered"
        bench.broker.declare(Topology(exchange="", queues=(queue,), single_active=True))
        bench.send(*[str(number).encode() for number in range(6)], queue=queue)
        receiver = bench.receiver(queue=queue, prefetch=4)
        return receiver, [bench.next(receiver) for _ in range(4)]
