"""Prepared messages, every request a step: the promises hold in all orders, and seeded faults are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idemp.clock import SystemClock
from idemp.errors import ConfigurationError
from idemp.testing.prepared_conformance import PreparedHomeConformance
from idemp.testing.simulation.prepared import PreparedParts, PreparedSimulation, QueueHome
from idemp.testing.simulation.search import explore, quiet
from tests.lanes import mostly_slow
from tests.simulation.mutants import Mutant
from tests.simulation.prepared import QUEUE, large, small
from tests.simulation.prepared_faults import MUTANTS

CASES = small()
PAGE = Path(__file__).parents[2] / "docs/explanation/simulation.md"


@pytest.mark.parametrize("name", mostly_slow(CASES, first=2))
def test_promises_hold_in_every_schedule_of_a_small_case(name: str) -> None:
    report = CASES[name].explore()
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"crashes": 1, "parts": QUEUE},
        {"crashes": 0, "faults": 1, "style": "steps", "answers": "unknown"},
    ],
    ids=["a queue, a crash", "a fault"],
)
def test_merged_schedules_come_to_the_same_ends_as_all(options: dict[str, Any]) -> None:
    simulation = PreparedSimulation(**{"checkers": 1, "checks": 1, **options})
    with quiet():
        merged = explore(simulation.setting, None, merge=True)
        apart = explore(simulation.setting, None, merge=False)
    print(f"{options}: {merged.schedules} for {apart.schedules}, {len(merged.ends)} ends")
    assert merged.complete
    assert apart.complete
    assert merged.broken is apart.broken is None
    assert merged.ends == apart.ends
    assert merged.schedules <= apart.schedules == len(apart.distinct)


@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, first=10), ids=lambda mutant: mutant.name)
def test_seeded_fault_is_found(mutant: Mutant) -> None:
    report = mutant.simulation.explore(5_000)
    print(f"{mutant.name}: {report}")
    violation = report.violation
    assert violation is not None
    assert mutant.simulation.replay(violation.schedule) == violation, "the schedule does not lead there again"
    home = QueueHome if issubclass(mutant.simulation.parts.home, QueueHome) else PreparedParts().home
    genuine = replace(mutant.simulation, parts=PreparedParts(home=home)).explore(30)
    assert genuine.violation is None, genuine


def test_late_work_of_the_page_is_found_where_the_probe_does_not_insert() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "probe that does not insert"]
    violation = mutant.simulation.explore().violation
    assert str(violation) in PAGE.read_text(encoding="utf-8")


def test_large_case_by_chance() -> None:
    for parts in (PreparedParts(), QUEUE):
        report = large(parts).sample(50, seed=3)
        print(report)
        assert report.violation is None, report
        assert report.distinct > 45


ONE = PreparedSimulation(checkers=1, faults=1)
WORKED = ["prepare", "pass", "work", "commit work"]


def of(who: str, *calls: str) -> list[str]:
    return [f"{who}: {call}" for call in calls]


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        pytest.param(
            [*of("producer 1", "prepare"), *of("checker 1", "take", "probe"), *of("producer 1", "pass")],
            ["checker 1: probe → rollback", "producer 1: pass → RolledBack", "checker 1: decide rollback"],
            id="checker first, work later",
        ),
        pytest.param(
            of("producer 1", *WORKED[:-1], "commit work, its answer is lost"),
            ["producer 1: probe → commit", "producer 1: decide commit → publish it", "consumer: settle → ack"],
            id="COMMIT took place, and returned an error",
        ),
        pytest.param(
            of("producer 1", *WORKED[:-1], "commit work, it never arrives"),
            ["producer 1: probe → rollback", "producer 1: decide rollback"],
            id="COMMIT did not take place, and returned an error",
        ),
        pytest.param(
            [
                *of("producer 1", *WORKED[:-1]),
                *of("checker 1", *("take", "probe", "postpone", "take", "probe", "park")),
            ],
            ["checker 1: park → yes", "producer 1: decide commit → publish it", "consumer: settle → ack"],
            id="work that takes longer than all checks",
        ),
        pytest.param(
            [*of("producer 1", *WORKED, "dies"), *of("checker 1", "take", "probe, it never arrives")],
            [
                "checker 1: postpone",
                "checker at the end: take → order-1 (prepared, 0 checks)",
                "checker at the end: probe → commit",
            ],
            id="a check that could not be asked",
        ),
    ],
)
def test_schedule_by_hand(schedule: Sequence[str], wanted: Sequence[str]) -> None:
    """What the cases above contain is what they should contain."""
    run = ONE.replay(schedule)
    assert run.promise == ""
    steps = iter(run.steps)
    assert all(step in steps for step in wanted), f"not in this order: {run}"


class TestQueueHome(PreparedHomeConformance):
    """The simulated home that is like a broker's does what such a home must."""

    @pytest.fixture
    def home(self) -> QueueHome:
        return QueueHome(SystemClock())


def test_submit_without_a_barrier_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a barrier"):
        PreparedSimulation(answers="unknown")
