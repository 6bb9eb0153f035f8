# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""Cases of the store port: what the cleaner asks of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import uuid4

from idemp.inbox.port import Mark, Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import MESSAGE_TYPE, Bench, make_outputs


class RetentionCases(StoreSuite):
    """Windows, batches, lags."""

    # Retention

    def test_purge_keeps_the_window(self, bench: Bench) -> None:
        """Case 40: just inside still a duplicate, just past it gone; consuming time counts."""
        window, claim = timedelta(minutes=5), bench.claim()
        bench.consume(timedelta(0))
        self.handled(bench, claim)
        bench.consume(window)
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 0
        assert bench.look(claim).verdict is Verdict.DUPLICATE
        bench.consume(timedelta(seconds=1))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1
        assert bench.handle(claim).verdict is Verdict.CLAIMED

    def test_window_stands_still_with_its_consumer(self, bench: Bench) -> None:
        """After a month's standstill the broker still has its messages: nothing of that month counts."""
        window, claim = timedelta(minutes=5), bench.claim()
        bench.consume(timedelta(0))
        self.handled(bench, claim)
        bench.consume(timedelta(minutes=2))
        if self.outlives_process:
            bench.clock.advance(timedelta(days=30))
        bench.consume(timedelta(minutes=2))
        assert bench.store.upkeep.purge_lag(bench.consumer, {MESSAGE_TYPE: window}) == timedelta(0)
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 0
        assert bench.look(claim).verdict is Verdict.DUPLICATE
        bench.consume(timedelta(minutes=2))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1

    def test_purge_never_touches_pending(self, bench: Bench) -> None:
        """Case 41: neither such a claim nor its outputs."""
        window, claim, outputs = timedelta(minutes=1), bench.claim(), make_outputs(2)
        bench.consume(timedelta(0))
        bench.handle(claim, outputs)
        bench.store.record([Mark(claim, (outputs[0].id,))])
        bench.consume(timedelta(minutes=2))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 0
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.store.record([Mark(claim, (outputs[1].id,))])
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1

    def test_purge_is_bounded_and_keeps_to_its_consumer(self, bench: Bench) -> None:
        """Case 42: batches; types that are not named, and other consumers' claims, stay."""
        other = f"{bench.consumer}-other"
        theirs = bench.claim(consumer=other)
        unnamed = replace(bench.claim(), message_type="conformance.Gone")
        bench.consume(timedelta(0))
        for claim in (*(bench.claim() for _ in range(5)), theirs, unnamed):
            self.handled(bench, claim)
        bench.consume(timedelta(minutes=2))
        window = {MESSAGE_TYPE: timedelta(minutes=1)}
        upkeep = bench.store.upkeep
        assert [upkeep.purge(bench.consumer, window, 3) for _ in range(3)] == [3, 2, 0]
        assert bench.look(theirs).verdict is Verdict.DUPLICATE
        assert bench.look(unnamed).verdict is Verdict.DUPLICATE
        assert upkeep.purge(bench.consumer, window, 3, others=timedelta(minutes=1)) == 1
        assert bench.look(unnamed).verdict is Verdict.CLAIMED

    def test_purge_forgets_starts_that_nobody_came_back_for(self, bench: Bench) -> None:
        """Not before a day, not before the longest window, not what started again meanwhile, and not at other consumers."""
        store, other = bench.store, f"{bench.consumer}-other"
        gone, back = uuid4(), uuid4()
        purge = partial(store.upkeep.purge, bench.consumer, limit=10)
        for consumer, key in ((bench.consumer, gone), (bench.consumer, back), (other, gone)):
            store.note_start(consumer, key)
        bench.clock.advance(timedelta(hours=23))
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}) == 0
        assert store.note_start(bench.consumer, gone) == 1
        assert store.note_start(bench.consumer, back) == 1
        bench.clock.advance(timedelta(hours=25))
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}, others=timedelta(days=3)) == 0
        assert purge({MESSAGE_TYPE: timedelta(minutes=1), "conformance.Slow": timedelta(days=3)}) == 0
        assert store.note_start(bench.consumer, back) == 2
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}) == 0, "starts are not counted among the claims"
        assert store.note_start(bench.consumer, gone) == 0
        assert store.note_start(bench.consumer, back) == 3
        assert store.note_start(other, gone) == 1

    def test_purge_forgets_starts_in_batches(self, bench: Bench) -> None:
        """Bounded as everything that the cleaner does."""
        store, keys = bench.store, [uuid4() for _ in range(5)]
        for key in keys:
            store.note_start(bench.consumer, key)
        bench.clock.advance(timedelta(hours=25))
        store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: timedelta(minutes=1)}, 3)
        assert sorted(store.note_start(bench.consumer, key) for key in keys) == [0, 0, 0, 1, 1]

    def test_purge_lag(self, bench: Bench) -> None:
        """How far the oldest that could go is past its own window: pending ones, and those without a window, can't."""
        upkeep, (output,) = bench.store.upkeep, make_outputs(1)
        short, waiting, unnamed = bench.claim(), bench.claim(), replace(bench.claim(), message_type="conformance.Gone")
        windows = {MESSAGE_TYPE: timedelta(minutes=5)}
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)
        bench.consume(timedelta(0))
        bench.handle(waiting, [output])
        self.handled(bench, unnamed)
        bench.consume(timedelta(minutes=1))
        self.handled(bench, short)
        bench.consume(timedelta(minutes=5))
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)
        bench.consume(timedelta(minutes=2))
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(minutes=2)
        assert upkeep.purge_lag(bench.consumer, windows, others=timedelta(minutes=1)) == timedelta(minutes=7)
        bench.store.record([Mark(waiting, (output.id,))])
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(minutes=3)
        assert upkeep.purge(bench.consumer, windows, 10) == 2
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)

    def test_purged_before_is_known_to_later_claims(self, bench: Bench) -> None:
        """Case 15: whatever is no longer there is from before it; a guard against late duplicates goes by that."""
        window, claim = timedelta(minutes=5), bench.claim()
        bench.consume(timedelta(0))
        handled_at = bench.clock.now()
        self.handled(bench, claim)
        with bench.store.begin([claim]) as unit:
            assert unit.claim(claim).verdict is Verdict.DUPLICATE
            assert unit.purged_before(bench.consumer) is None, "nothing was deleted so far"
        bench.consume(window + timedelta(minutes=1))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1
        with bench.store.begin([claim]) as unit:
            assert unit.claim(claim).verdict is Verdict.CLAIMED
            purged = unit.purged_before(bench.consumer)
        assert purged is not None
        assert purged > handled_at

    def test_late_before_follows_the_window(self, bench: Bench) -> None:
        """Case 15: what lies before it may have been purged; refreshed off the hot path."""
        window = timedelta(minutes=5)
        handled_at = bench.clock.now()
        bench.consume(window + timedelta(minutes=1))
        bench.store.refresh_horizons(bench.consumer, [window])
        before = bench.store.late_before(bench.consumer, window)
        assert before == bench.store.upkeep.late_before(bench.consumer, window)
        assert handled_at < before <= bench.clock.now() - window
