# ruff: noqa: S101 - this module is made of assertions
"""Cases of stores without a relay: outputs whose confirm nobody recorded are sent once more, and recorded."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.port import Mark, Verdict
from idemp.inbox.resending import LOOK_EVERY, RESEND_AFTER, SPREAD
from idemp.relay import Relay, Round
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import LEASE, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from idemp.inbox.port import InboxStore
    from idemp.messages import Output

QUEUE = "stock"


class ResendingCases(StoreSuite):
    """What becomes of a handling whose worker died between the ack and the record of its confirms."""

    def test_what_nobody_recorded_is_sent_once_more(self, bench: Bench) -> None:
        """By any worker of the consumer, under the same ids, once it is old; then it no longer pends."""
        broker = _broker()
        claim, outputs = bench.claim(), make_outputs(3)
        bench.handle(claim, outputs)
        bench.store.record([Mark(claim, (outputs[1].id,))])
        with self.another(bench) as other:
            other.consume(timedelta(0))
            assert _sent(other, broker) == Round(), "its own worker may still record it"
            bench.clock.advance(RESEND_AFTER + SPREAD)
            assert _sent(other, broker) == Round(taken=2, confirmed=2)
        copies = broker.browse(QUEUE, 10)
        assert [(copy.message_id, copy.body) for copy in copies] == _of(outputs[0], outputs[2])
        assert all(copy.redispatched for copy in copies), "the next consumer is not to redispatch in turn"
        assert bench.pending(claim) == []
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        assert bench.store.upkeep.pending_count() == 0

    def test_consumers_of_others_are_left_alone(self, bench: Bench) -> None:
        """Their outputs may be for another broker."""
        claim, outputs = bench.claim(consumer=f"{bench.consumer}-other"), make_outputs(1)
        bench.handle(claim, outputs)
        bench.consume(timedelta(0))
        bench.clock.advance(RESEND_AFTER + SPREAD)
        assert _sent(bench, _broker()) == Round()
        assert bench.pending(claim) == [outputs[0].id]

    def test_what_is_refused_again_waits_and_lets_others_pass(self, bench: Bench) -> None:
        """It stays pending, is tried at longer and longer intervals, and no quarantine takes it from its delivery."""
        broker = _broker()
        gone, claim = bench.claim(), bench.claim()
        unroutable, outputs = make_outputs(1, to="nowhere"), make_outputs(1)
        bench.handle(gone, unroutable)
        bench.clock.advance(timedelta(seconds=1))
        bench.handle(claim, outputs)
        bench.consume(timedelta(0))
        bench.clock.advance(RESEND_AFTER + SPREAD)
        relay = Relay(bench.store.upkeep, broker.publisher(), batch=1, max_attempts=1)
        rounds = []
        for _ in range(4):
            rounds.append(relay.run_once())
            bench.clock.advance(timedelta(milliseconds=1))
        assert [done.taken for done in rounds] == [1, 1, 0, 0]
        assert sum(done.confirmed for done in rounds) == 1
        assert [copy.message_id for copy in broker.browse(QUEUE, 10)] == [str(outputs[0].id)]
        assert (bench.pending(gone), bench.pending(claim)) == ([unroutable[0].id], [])
        bench.clock.advance(timedelta(hours=2))
        broker.declare(Topology(exchange="", queues=("nowhere",)))
        assert relay.run_once() == Round(taken=1, confirmed=1)
        assert bench.pending(gone) == []

    def test_a_lease_that_ends_is_taken_over(self, bench: Bench) -> None:
        """A relay that never answered: what it had is lent again, and no sooner."""
        claim, outputs = bench.claim(), make_outputs(1)
        bench.handle(claim, outputs)
        bench.consume(timedelta(0))
        bench.clock.advance(RESEND_AFTER + SPREAD)
        upkeep = bench.store.upkeep

        def taken() -> list[UUID]:
            return [item.output.id for item in upkeep.take_pending(10, LEASE)]

        assert taken() == [outputs[0].id]
        assert taken() == []
        bench.clock.advance(LEASE + LOOK_EVERY)
        assert taken() == [outputs[0].id]
        upkeep.settle_pending([outputs[0].id], {}, timedelta(0))
        assert bench.pending(claim) == []
        assert bench.look(claim).verdict is Verdict.DUPLICATE


def _broker() -> InMemoryBroker:
    broker = InMemoryBroker()
    broker.declare(Topology(exchange="", queues=(QUEUE,)))
    return broker


def _sent(bench: Bench, broker: InMemoryBroker) -> Round:
    """One round of a worker's relay, at a time at which it looks."""
    bench.clock.advance(LOOK_EVERY)
    store: InboxStore = bench.store
    return Relay(store.upkeep, broker.publisher()).run_once()


def _of(*outputs: Output) -> Sequence[tuple[str | None, bytes]]:
    return [(str(output.id), output.message.body) for output in outputs]
