# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""Cases of the store port: what relays ask of it."""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import pytest

from idemp.errors import BrokerChanged
from idemp.inbox.port import Mark, PendingState
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import LEASE, RELAY_AFTER, Background, Bench, make_outputs


class RelayCases(StoreSuite):
    """Leases, refusals, quarantine, heartbeats."""

    # Relays

    def test_pending_waits_for_its_time(self, bench: Bench) -> None:
        """A relay takes nothing that its own worker may still be sending."""
        claim, outputs = bench.claim(), make_outputs(3)
        bench.handle(claim, outputs)
        assert bench.store.upkeep.pending_count() == 3
        assert not bench.store.upkeep.take_pending(10, LEASE)
        bench.clock.advance(RELAY_AFTER)
        taken = bench.store.upkeep.take_pending(10, LEASE)
        assert [item.output for item in taken] == outputs
        assert [item.attempts for item in taken] == [2, 2, 2], "its own worker may have sent them"

    def test_pending_waits_from_the_storing_on(self, bench: Bench) -> None:
        """However long the handler took, its worker has yet to send them."""
        claim = bench.claim()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.clock.advance(RELAY_AFTER)
            unit.store_outputs(claim, make_outputs(1), RELAY_AFTER)
            unit.commit()
        assert not bench.store.upkeep.take_pending(10, LEASE)
        bench.clock.advance(RELAY_AFTER)
        assert len(bench.store.upkeep.take_pending(10, LEASE)) == 1

    def test_due_by_a_clock_that_was_wrong(self, bench: Bench) -> None:
        """A step back of the clock by an hour does not keep outputs waiting for an hour."""
        claim, outputs = bench.claim(), make_outputs(2)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, outputs, timedelta(hours=1))
            unit.commit()
        assert [item.output for item in bench.store.upkeep.take_pending(10, LEASE)] == outputs
        assert not bench.store.upkeep.take_pending(10, LEASE), "they are leased"

    def test_relays_see_what_is_committed(self, bench: Bench) -> None:
        """Nothing of a unit of work that still runs, and nothing of one that rolled back."""
        upkeep, claim, outputs = bench.store.upkeep, bench.claim(), make_outputs(2)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, make_outputs(3), timedelta(0))
            if not self.one_writer:
                assert upkeep.pending_count() == 0
                assert not upkeep.take_pending(10, LEASE)
        assert upkeep.pending_count() == 0
        assert not upkeep.take_pending(10, LEASE)
        bench.handle(claim, outputs)
        bench.store.record([Mark(bench.claim(), (uuid4(),))])
        assert upkeep.pending_count() == 2
        bench.store.record([Mark(claim, (outputs[0].id,))])
        assert upkeep.pending_count() == 1

    def test_left_to_the_relay_from_the_start(self, bench: Bench) -> None:
        """Nobody else sends them: due at once, and never tried before."""
        claim, outputs = bench.claim(), make_outputs(2)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, outputs, timedelta(0))
            unit.commit()
        taken = bench.store.upkeep.take_pending(10, LEASE)
        assert [(item.output, item.attempts) for item in taken] == [(output, 1) for output in outputs]

    def test_lease_keeps_others_away_until_it_ends(self, bench: Bench) -> None:
        """Case 24: a dead relay's work is taken over, a slow one's is not stolen."""
        bench.handle(bench.claim(), make_outputs(5))
        bench.clock.advance(RELAY_AFTER)
        first = {item.output.id for item in bench.store.upkeep.take_pending(2, LEASE)}
        second = {item.output.id for item in bench.store.upkeep.take_pending(10, LEASE)}
        assert (len(first), len(second), first & second) == (2, 3, set())
        bench.clock.advance(LEASE - timedelta(seconds=1))
        assert not bench.store.upkeep.take_pending(10, LEASE)
        bench.clock.advance(timedelta(seconds=2))
        again = bench.store.upkeep.take_pending(10, LEASE)
        assert {item.output.id for item in again} == first | second
        assert {item.attempts for item in again} == {3}

    def test_settle_pending(self, bench: Bench) -> None:
        """Confirmed ones are done, failed ones wait, quarantined ones stay visible until they are released."""
        upkeep = bench.store.upkeep
        claim, (done, failed, hopeless) = bench.claim(), make_outputs(3)
        bench.handle(claim, [done, failed, hopeless])
        bench.clock.advance(RELAY_AFTER)
        upkeep.take_pending(10, LEASE)
        upkeep.settle_pending([done.id], {failed.id: "nacked"}, timedelta(seconds=5))
        upkeep.quarantine({hopeless.id: "returned: no queue"})
        assert bench.pending(claim) == [failed.id, hopeless.id]
        assert not upkeep.take_pending(10, LEASE)
        bench.clock.advance(timedelta(seconds=5))
        assert [item.output for item in upkeep.take_pending(10, LEASE)] == [failed]
        bench.clock.advance(timedelta(days=30))
        upkeep.settle_pending([failed.id], {}, timedelta(0))
        assert not upkeep.take_pending(10, LEASE)
        assert upkeep.pending_count() == 1
        assert upkeep.release_quarantined([hopeless.id, uuid4()]) == 1
        (item,) = upkeep.take_pending(10, LEASE)
        assert (item.output, item.attempts) == (hopeless, 2)

    def test_refusals_count_apart_from_attempts(self, bench: Bench) -> None:
        """An outage says nothing about an output; what the broker refused for its own sake is counted until a release."""
        upkeep = bench.store.upkeep
        claim, (done, refused, unlucky) = bench.claim(), make_outputs(3)
        bench.handle(claim, [done, refused, unlucky])
        bench.clock.advance(RELAY_AFTER)
        assert {item.refusals for item in upkeep.take_pending(10, LEASE)} == {0}
        upkeep.settle_pending([done.id], {refused.id: "closed", unlucky.id: "closed"}, timedelta(0))
        assert {item.refusals for item in upkeep.take_pending(10, LEASE)} == {0}
        for expected in (1, 2):
            upkeep.settle_pending([], {refused.id: "returned"}, timedelta(0), refused=True)
            upkeep.settle_pending([], {unlucky.id: "nacked"}, timedelta(0))
            found = {item.output.id: item for item in upkeep.take_pending(10, LEASE)}
            assert {id_: item.refusals for id_, item in found.items()} == {refused.id: expected, unlucky.id: 0}
            assert {item.attempts for item in found.values()} == {3 + expected}
        upkeep.quarantine({refused.id: "returned"})
        assert upkeep.release_quarantined([refused.id]) == 1
        (item,) = upkeep.take_pending(10, LEASE)
        assert (item.output, item.attempts, item.refusals) == (refused, 2, 0)

    def test_outputs_belong_to_one_broker(self, bench: Bench) -> None:
        """A second one of the same name is refused, so that no relay ships the outputs of another broker."""
        upkeep = bench.store.upkeep
        for _ in range(2):
            upkeep.agree_broker("the broker of all cases")
        with pytest.raises(BrokerChanged):
            upkeep.agree_broker("another broker")
        upkeep.agree_broker("the broker of all cases")

    def test_confirm_beats_quarantine(self, bench: Bench) -> None:
        """What was confirmed meanwhile is confirmed, whatever a relay thinks of it."""
        claim, (output,) = bench.claim(), make_outputs(1)
        bench.handle(claim, [output])
        bench.store.record([Mark(claim, (output.id,))])
        bench.store.upkeep.quarantine({output.id: "returned"})
        bench.store.upkeep.settle_pending([], {output.id: "nacked"}, timedelta(0))
        assert bench.pending(claim) == []
        assert bench.store.upkeep.pending_count() == 0
        assert bench.store.upkeep.release_quarantined([output.id]) == 0

    def test_pending_state(self, bench: Bench) -> None:
        """How much waits, and how long already; quarantined ones wait for nobody."""
        upkeep = bench.store.upkeep
        assert upkeep.pending_state() == PendingState()
        claim, (oldest, sent, hopeless) = bench.claim(), make_outputs(3)
        bench.handle(claim, [oldest, sent, hopeless])
        bench.clock.advance(timedelta(minutes=2))
        bench.handle(bench.claim(), make_outputs(2))
        bench.store.record([Mark(claim, (sent.id,))])
        upkeep.take_pending(10, LEASE)
        assert upkeep.pending_state() == PendingState(4, 0, 120)
        upkeep.quarantine({hopeless.id: "returned: no queue"})
        bench.clock.advance(timedelta(seconds=30))
        assert upkeep.pending_state() == PendingState(4, 1, 150)
        upkeep.settle_pending([oldest.id], {}, timedelta(0))
        assert upkeep.pending_state() == PendingState(3, 1, 30)
        upkeep.release_quarantined([hopeless.id])
        assert upkeep.pending_state() == PendingState(3, 0, 150)

    def test_relay_alive_by_beat_and_retire(self, bench: Bench) -> None:
        """Only a relay's beat counts, only for a while, and not after a clean end."""
        store = bench.store
        assert not store.relay_alive()
        store.upkeep.beat("worker", relay=False, consumers=[bench.consumer])
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        assert store.relay_alive()
        assert store.upkeep.relay_alive()
        store.upkeep.retire("relay")
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        bench.clock.advance(timedelta(minutes=1))
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        store.upkeep.beat("relay", relay=False, consumers=[])
        assert not store.relay_alive()

    def test_announcing_wakes_a_waiting_relay(self, bench: Bench) -> None:
        """Not only by polling."""
        bench.store.upkeep.wait_for_pending(0.01)  # whatever is needed before something can be heard
        waiting = Background(lambda: bench.store.upkeep.wait_for_pending(self.patience))
        deadline = time.monotonic() + self.patience
        while waiting.running and time.monotonic() < deadline:
            bench.store.announce_pending()
        assert waiting.result(self.patience)
