# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""Cases of the store port: effects outside the database, which no relay ever gets."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from idemp.inbox.port import Mark
from idemp.messages import OutputKind
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import LEASE, RELAY_AFTER, Background, Bench, make_outputs

if TYPE_CHECKING:
    from idemp.messages import Output


def make_mixed() -> tuple[Output, Output, Output]:
    """A message, an effect, and a message."""
    first, second, third = make_outputs(3)
    return first, replace(second, kind=OutputKind.EFFECT, exchange="", routing_key="mail.receipt"), third


class EffectCases(StoreSuite):
    """Due at once, leased to their own consumer, settled as messages are."""

    def test_effects_are_no_relays_affair(self, bench: Bench) -> None:
        """Whatever a relay takes, effects are not among it; and who runs effects gets no messages."""
        upkeep, (first, effect, third) = bench.store.upkeep, make_mixed()
        bench.handle(bench.claim(), [first, effect, third])
        assert not upkeep.take_pending(10, LEASE)
        (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
        assert (item.output, item.attempts) == (effect, 1), "nobody else runs it: due from its COMMIT on"
        bench.clock.advance(RELAY_AFTER)
        assert [item.output for item in upkeep.take_pending(10, LEASE)] == [first, third]
        assert not upkeep.take_effects(bench.consumer, 10, LEASE)
        assert upkeep.pending_count() == 3

    def test_effects_of_several_handlings_and_ways_to_store(self, bench: Bench) -> None:
        """By late claims, several at once, and left to others from the start: an effect is an effect."""
        upkeep, stored = bench.store.upkeep, []
        for late in (False, True):
            _, effect, _ = mixed = make_mixed()
            bench.handle(bench.claim(), mixed, late=late)
            stored.append(effect)
        claims = [bench.claim() for _ in range(20)]
        together = [(claim, make_mixed()) for claim in claims]
        with bench.store.begin(claims) as unit:
            unit.claim_all(claims, timedelta(seconds=1))
            unit.store_all(together, timedelta(0))
            unit.commit()
        stored += [effect for _, (_, effect, _) in together]
        taken = upkeep.take_effects(bench.consumer, 100, LEASE)
        assert {item.output.id for item in taken} == {effect.id for effect in stored}
        assert len(upkeep.take_pending(100, LEASE)) == 40
        kept, (_, never, _) = bench.claim(), make_mixed()
        with bench.store.begin([kept]) as unit:
            unit.claim(kept)
            unit.store_outputs(kept, [never], None)
            unit.commit()
        assert not upkeep.take_effects(bench.consumer, 100, LEASE), "kept, and never run"

    def test_effects_of_another_consumer(self, bench: Bench) -> None:
        """Who does not know them does not get them."""
        _, effect, _ = make_mixed()
        bench.handle(bench.claim(), [effect])
        assert not bench.store.upkeep.take_effects("another consumer", 10, LEASE)
        assert len(bench.store.upkeep.take_effects(bench.consumer, 10, LEASE)) == 1

    def test_effects_are_leased_and_settled(self, bench: Bench) -> None:
        """A lease ends, a failure waits, what was not run costs no attempt, and what is done is gone."""
        upkeep, claim = bench.store.upkeep, bench.claim()
        _, effect, _ = make_mixed()
        bench.handle(claim, [effect])
        for attempt in (1, 2):
            (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
            assert item.attempts == attempt
            assert not upkeep.take_effects(bench.consumer, 10, LEASE)
            bench.clock.advance(LEASE)
        (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
        upkeep.settle_pending([], {effect.id: "503"}, timedelta(minutes=5), refused=True)
        bench.clock.advance(timedelta(minutes=4))
        assert not upkeep.take_effects(bench.consumer, 10, LEASE)
        bench.clock.advance(timedelta(minutes=1))
        (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
        assert (item.attempts, item.refusals) == (4, 1)
        upkeep.return_effects({effect.id: "unknown"}, timedelta(seconds=10))
        assert not upkeep.take_effects(bench.consumer, 10, LEASE)
        bench.clock.advance(timedelta(seconds=10))
        (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
        assert item.attempts == 4
        upkeep.settle_pending([effect.id], {}, timedelta(0))
        upkeep.return_effects({effect.id: "too late"}, timedelta(0))
        bench.clock.advance(LEASE)
        assert not upkeep.take_effects(bench.consumer, 10, LEASE)
        assert bench.pending(claim) == []

    def test_effects_in_quarantine(self, bench: Bench) -> None:
        """Out of all rounds until somebody releases them; then they are effects again, and no relay's."""
        upkeep, claim = bench.store.upkeep, bench.claim()
        first, effect, _ = make_mixed()
        bench.handle(claim, [first, effect])
        upkeep.take_effects(bench.consumer, 10, LEASE)
        upkeep.quarantine({effect.id: "550 no such mailbox"})
        bench.clock.advance(timedelta(days=30))
        assert not upkeep.take_effects(bench.consumer, 10, LEASE)
        assert [item.output for item in upkeep.take_pending(10, LEASE)] == [first]
        assert bench.pending(claim) == [first.id, effect.id]
        assert upkeep.pending_state().quarantined == 1
        assert upkeep.release_quarantined([effect.id]) == 1
        (item,) = upkeep.take_effects(bench.consumer, 10, LEASE)
        assert (item.output, item.attempts, item.refusals) == (effect, 2, 1), "of two attempts one was refused"
        upkeep.quarantine({first.id: "returned", effect.id: "550 no such mailbox"})
        assert upkeep.release_quarantined([first.id, effect.id]) == 2
        assert [(item.output, item.refusals) for item in upkeep.take_pending(10, LEASE)] == [(first, 0)]
        assert [item.output for item in upkeep.take_effects(bench.consumer, 10, LEASE)] == [effect]
        bench.store.record([Mark(claim, (first.id, effect.id))])
        assert bench.pending(claim) == []

    def test_announcing_effects_wakes_who_runs_them(self, bench: Bench) -> None:
        """Not only by polling, and not by what relays are woken by."""
        upkeep = bench.store.upkeep
        upkeep.wait_for_effects(0.01)  # whatever is needed before something can be heard
        upkeep.announce_pending()
        assert not upkeep.wait_for_effects(0.05)
        waiting = Background(lambda: upkeep.wait_for_effects(self.patience))
        deadline = time.monotonic() + self.patience
        while waiting.running and time.monotonic() < deadline:
            bench.store.announce_effects()
        assert waiting.result(self.patience)
