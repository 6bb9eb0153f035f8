# ruff: noqa: S101, PT012 - this module is made of assertions
"""Cases of the store port: nobody waits, and COMMIT tells who was first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from idemp.errors import TransientStoreError
from idemp.inbox.port import Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import RELAY_AFTER, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.inbox.port import Claim, UnitOfWork
    from idemp.messages import Output


class OptimisticCases(StoreSuite):
    """Two handlings of one entity run side by side, and one of them is committed; for stores without locks."""

    waits = False

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_both_run_and_the_first_commit_wins(self, bench: Bench, late: bool) -> None:
        """The second is told to run again, and is a duplicate then, with the winner's outputs."""
        claim, outputs = bench.claim(), make_outputs(3)
        with self.another(bench) as other, other.store.begin([claim], late=late) as second:
            self._handled(other, second, claim, make_outputs(2), late=late)
            with bench.store.begin([claim], late=late) as first:
                self._handled(bench, first, claim, outputs, late=late)
                first.commit()
            with pytest.raises(TransientStoreError) as lost:
                second.commit()
            assert lost.value.committed == "no"
            found = other.handle(claim, make_outputs(1), effect="sale", late=late)
            assert (found.verdict, [stored.output for stored in found.outputs]) == (Verdict.DUPLICATE, outputs)
        bench.counted("sale", 1)

    def test_first_rolls_back_and_the_second_does_not_notice(self, bench: Bench) -> None:
        """Nobody waits for it, nor for what it would have done."""
        claim, outputs = bench.claim(), make_outputs(2)
        with pytest.raises(ZeroDivisionError), bench.store.begin([claim]) as first:
            self._handled(bench, first, claim, make_outputs(1))
            assert bench.handle(claim, outputs, effect="sale").verdict is Verdict.CLAIMED
            raise ZeroDivisionError
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.counted("sale", 1)

    def test_other_message_of_the_same_entity(self, bench: Bench) -> None:
        """It is no duplicate: who loses runs again, and both are handled."""
        one = bench.claim()
        another = replace(bench.claim(), entity=one.entity)
        with bench.store.begin([one]) as unit:
            self._handled(bench, unit, one, make_outputs(1))
            assert bench.handle(another, make_outputs(2), effect="sale").verdict is Verdict.CLAIMED
            with pytest.raises(TransientStoreError):
                unit.commit()
        bench.counted("sale", 1)
        assert bench.handle(one, make_outputs(1), effect="sale").verdict is Verdict.CLAIMED
        bench.counted("sale", 2)
        assert [len(bench.look(claim).outputs) for claim in (one, another)] == [1, 2]

    def _handled(
        self, bench: Bench, unit: UnitOfWork, claim: Claim, outputs: Sequence[Output], *, late: bool = False
    ) -> None:
        """All of a handling but its COMMIT."""
        if late:
            bench.effects.write(unit, "sale")
            assert unit.claim_and_store(claim, outputs, RELAY_AFTER).verdict is Verdict.CLAIMED
            return
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        bench.effects.write(unit, "sale")
        unit.store_outputs(claim, outputs, RELAY_AFTER)
