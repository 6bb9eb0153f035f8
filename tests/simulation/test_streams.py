"""The protocol over event streams, every request a step: the promises hold in all orders, and seeded faults are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idemp.testing.simulation import Parts
from idemp.testing.simulation.search import explore, quiet
from idemp.testing.simulation.streams import DECIDED_ON_WHAT_IS, StreamsInbox
from tests.lanes import mostly_slow
from tests.simulation.mutants import Mutant
from tests.simulation.streams import MUTANTS, case, small

CASES = small()


@pytest.mark.parametrize("name", mostly_slow(CASES, first=1))
def test_promises_hold_in_every_schedule_of_a_small_case(name: str) -> None:
    report = CASES[name].explore()
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


@pytest.mark.parametrize("options", [{"workers": 2, "crashes": 1}, {"copies": 2, "faults": 1}], ids=str)
def test_merged_schedules_come_to_the_same_ends_as_all(options: dict[str, Any]) -> None:
    simulation = case(**options)
    with quiet():
        merged = explore(simulation.setting, None, merge=True)
        apart = explore(simulation.setting, None, merge=False)
    print(f"{options}: {merged.schedules} for {apart.schedules}, {len(merged.ends)} ends")
    assert merged.complete
    assert apart.complete
    assert merged.broken is apart.broken is None
    assert merged.ends == apart.ends
    assert merged.schedules <= apart.schedules == len(apart.distinct)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_seeded_fault_is_found(mutant: Mutant) -> None:
    report = mutant.simulation.explore(5_000)
    print(f"{mutant.name}: {report}")
    violation = report.violation
    assert violation is not None
    assert mutant.simulation.replay(violation.schedule) == violation, "the schedule does not lead there again"
    genuine = replace(mutant.simulation, parts=Parts(inbox=StreamsInbox)).explore(30)
    assert genuine.violation is None, genuine


def test_a_decision_on_what_is_no_longer_so_is_told() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "appends at any version"]
    violation = mutant.simulation.explore().violation
    assert violation is not None
    assert violation.promise == DECIDED_ON_WHAT_IS
    wanted = [
        "worker 1: last → there is none",
        "worker 2: last → there is none",
        "worker 1: append → number 1 of entity-1",
        "worker 2: append → number 1 of entity-1",
    ]
    assert [step for step in violation.steps if step in wanted] in (
        wanted,
        [wanted[1], wanted[0], wanted[3], wanted[2]],
    )
