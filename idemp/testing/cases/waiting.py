# ruff: noqa: S101, PT012 - this module is made of assertions
"""Cases of the store port: a claim keeps others from its id until its unit of work ends."""

from __future__ import annotations

import time

import pytest

from idemp.errors import TransientStoreError
from idemp.inbox.port import Claimed, Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import RELAY_AFTER, Background, Bench, make_outputs


class WaitingCases(StoreSuite):
    """Who comes second waits, and is told; for stores that have locks."""

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_second_waits_and_is_a_duplicate(self, bench: Bench, late: bool) -> None:
        """Case 2: while the first one works, the second neither runs nor fails."""
        claim, outputs = bench.claim(), make_outputs(100)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            second = Background(lambda: bench.handle(claim, make_outputs(1), effect="sale", late=late))
            unit.store_outputs(claim, outputs, RELAY_AFTER)
            assert second.stays(self.quiet)
            unit.commit()
        found = second.result(self.patience)
        assert found.verdict is Verdict.DUPLICATE
        assert [stored.output for stored in found.outputs] == outputs
        bench.counted("sale", 1)

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_second_waits_and_the_first_rolls_back(self, bench: Bench, late: bool) -> None:
        """Case 4: then the second executes."""
        claim, outputs = bench.claim(), make_outputs(2)
        with pytest.raises(ZeroDivisionError), bench.store.begin([claim]) as unit:
            unit.claim(claim)
            second = Background(lambda: bench.handle(claim, outputs, effect="sale", late=late))
            assert second.stays(self.quiet)
            raise ZeroDivisionError
        assert second.result(self.patience).verdict is Verdict.CLAIMED
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.counted("sale", 1)

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_holder_slower_than_the_wait(self, bench: Bench, late: bool) -> None:
        """In flight, in about the time that the claim waits; the holder is not disturbed."""
        claim, patient = bench.claim(wait=self.shortest_wait), bench.claim()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            since = time.monotonic()
            second = Background(lambda: bench.handle(claim, effect="sale", late=late))
            if self.one_writer:
                with pytest.raises(TransientStoreError):
                    second.result(self.patience)
            else:
                assert second.result(self.patience) == Claimed(Verdict.IN_FLIGHT)
                assert 0.8 * self.shortest_wait < time.monotonic() - since < self.shortest_wait + 4
                assert Background(lambda: bench.handle(patient)).result(self.patience).verdict is Verdict.CLAIMED
            unit.store_outputs(claim, make_outputs(1), RELAY_AFTER)
            unit.commit()
        assert bench.look(claim).verdict is Verdict.DUPLICATE
        bench.counted("sale", 1)

    def test_waiting_setting_does_not_outlive_the_claim(self, bench: Bench) -> None:
        """A short wait of one claim is no limit for the next one on the same connection."""
        bench.handle(bench.claim(wait=0.001))
        claim = bench.claim(wait=10.0)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            second = Background(lambda: bench.handle(claim))
            assert second.stays(self.quiet)
            unit.commit()
        assert second.result(self.patience).verdict is Verdict.DUPLICATE

    def test_instances_exclude_each_other(self, bench: Bench) -> None:
        """Two processes with one message at once: the second sees nothing of the first, waits, and is a duplicate."""
        claim, outputs = bench.claim(), make_outputs(2)
        with self.another(bench) as other:
            with bench.store.begin([claim]) as unit:
                unit.claim(claim)
                bench.effects.write(unit, "sale")
                unit.store_outputs(claim, outputs, RELAY_AFTER)
                other.counted("sale", 0)
                second = Background(lambda: other.handle(claim, make_outputs(1), effect="sale"))
                assert second.stays(self.quiet)
                unit.commit()
            found = second.result(self.patience)
            assert (found.verdict, [stored.output for stored in found.outputs]) == (Verdict.DUPLICATE, outputs)
            other.counted("sale", 1)
