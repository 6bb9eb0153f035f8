"""The protocol over documents, every request a step: the promises hold in all orders, and the textbook's deletion loses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idemp.errors import ConfigurationError
from idemp.testing.simulation import Parts, Simulation
from idemp.testing.simulation.documents import DocumentsInbox
from idemp.testing.simulation.search import explore, quiet
from tests.lanes import mostly_slow
from tests.simulation.documents import CLEANED, MUTANTS, TEXTBOOK, case, large, small
from tests.simulation.mutants import Mutant

CASES = small()
PAGE = Path(__file__).parents[2] / "docs/explanation/documents.md"


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_promises_hold_in_every_schedule_of_a_small_case(name: str) -> None:
    report = CASES[name].explore()
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


@pytest.mark.parametrize("options", [{"workers": 2, "crashes": 1}, {"faults": 1}, CLEANED], ids=str)
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


@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS), ids=lambda mutant: mutant.name)
def test_seeded_fault_is_found(mutant: Mutant) -> None:
    report = mutant.simulation.explore(5_000)
    print(f"{mutant.name}: {report}")
    violation = report.violation
    assert violation is not None
    assert mutant.simulation.replay(violation.schedule) == violation, "the schedule does not lead there again"
    genuine = replace(mutant.simulation, parts=Parts(inbox=DocumentsInbox)).explore(30)
    assert genuine.violation is None, genuine


def test_deletion_of_the_textbook_loses_an_output() -> None:
    """The first attempt's write is slow; the second sees no id, and deletes outputs that count by then."""
    violation = TEXTBOOK.simulation.explore().violation
    assert violation is not None
    assert violation.promise == "nothing lost"
    wanted = [
        "worker 1: write state, it is slow",
        "worker 1: read state → there is none",
        "network: a write of worker 1 arrives",
        "worker 1: delete outputs",
        "worker 1: read state → names attempt 1",
        "worker 1: read outputs → there is none",
        "worker 1: settle → parked as UnusableState",
    ]
    steps = iter(violation.steps)
    assert all(step in steps for step in wanted), f"not in this order: {violation}"
    assert str(violation) in PAGE.read_text(encoding="utf-8")


def test_large_case_by_chance() -> None:
    report = large().sample(150, seed=3)
    print(report)
    assert report.violation is None, report
    assert report.distinct > 145


def test_kinds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="relays=0"):
        Simulation(parts=Parts(inbox=DocumentsInbox))
