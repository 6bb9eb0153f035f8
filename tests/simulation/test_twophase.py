"""Handlings in several databases, every request a step: the promises hold in all orders, and seeded faults are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idemp.errors import ConfigurationError, TransientStoreError
from idemp.testing.simulation.search import explore, quiet
from idemp.testing.simulation.twophase import (
    DecidingStore,
    InMemoryDatabase,
    InMemoryDecisions,
    InMemoryXA,
    TwoPhaseParts,
)
from tests.lanes import mostly_slow
from tests.simulation.mutants import MINUTE, Mutant
from tests.simulation.twophase import BOTH, XA, case, large, small
from tests.simulation.twophase_faults import MUTANTS
from tests.twophase.conformance import DatabaseCases, DecisionsCases

CASES = small()
PAGE = Path(__file__).parents[2] / "docs/explanation/simulation.md"


@pytest.mark.parametrize("name", mostly_slow(CASES, first=4))
def test_promises_hold_in_every_schedule_of_a_small_case(name: str) -> None:
    report = CASES[name].explore()
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


@pytest.mark.parametrize(
    "options",
    [{"crashes": 1, "parts": XA}, {"recoverers": 1, "faults": 1, "only": "prepare"}],
    ids=["XA, a crash", "a recovery, a fault"],
)
def test_merged_schedules_come_to_the_same_ends_as_all(options: dict[str, Any]) -> None:
    with quiet():
        merged = explore(case(**options).setting, None, merge=True)
        apart = explore(case(**options).setting, None, merge=False)
    print(f"{options}: {merged.schedules} for {apart.schedules}, {len(merged.ends)} ends")
    assert merged.complete
    assert apart.complete
    assert merged.broken is apart.broken is None
    assert merged.ends == apart.ends
    assert merged.schedules < apart.schedules == len(apart.distinct)


@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, first=10), ids=lambda mutant: mutant.name)
def test_seeded_fault_is_found(mutant: Mutant) -> None:
    report = mutant.simulation.explore(5_000)
    print(f"{mutant.name}: {report}")
    violation = report.violation
    assert violation is not None
    assert mutant.simulation.replay(violation.schedule) == violation, "the schedule does not lead there again"
    parts = mutant.simulation.parts
    assert isinstance(parts, TwoPhaseParts)
    databases = {name: BOTH.databases[name] for name in parts.databases}
    genuine = replace(mutant.simulation, parts=TwoPhaseParts(databases=databases)).explore(30)
    assert genuine.violation is None, genuine


def test_late_prepare_of_the_page_is_found_where_the_key_alone_decides() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "the key alone decides"]
    violation = mutant.simulation.explore().violation
    assert str(violation) in PAGE.read_text(encoding="utf-8")


def test_large_case_by_chance() -> None:
    report = large().sample(30, seed=3)
    print(report)
    assert report.violation is None, report
    assert report.distinct > 25


TWO = case(workers=2, copies=2, recoverers=1, recoveries=2, crashes=1, faults=1)
WRITTEN = ["receive", "list what is prepared in ledger", "begin", "claim", "late before", "handler", "begin in ledger"]
NOTED = [*WRITTEN, "insert in ledger", "store", "note the decision"]


def of(who: str, *calls: str) -> list[str]:
    return [f"{who}: {call}" for call in calls]


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        pytest.param(
            [
                *of("worker 1", *NOTED, "its session in the inbox ends, unnoticed"),
                *of(
                    "worker 2", *NOTED, "prepare in ledger", "commit", "commit its own in ledger", "forget the decision"
                ),
                *of("worker 1", "prepare in ledger"),
            ],
            [
                "worker 1: prepare in ledger",
                "worker 1: commit → the session has ended",
                "worker 1: claim → duplicate",
                "recoverer 1: roll back #1 in ledger → done",
            ],
            id="lost its claim unnoticed, and prepares after its successor has committed",
        ),
        pytest.param(
            [
                *of("worker 1", *NOTED, "prepare in ledger"),
                *of("recoverer 1", "recover", "list decisions", "list what is prepared in ledger", "begin", "claim"),
                *of("worker 1", "commit"),
                *of("recoverer 1", "claim", "read the decision", "commit #1 in ledger"),
            ],
            [
                "recoverer 1: claim → waits for another",
                "worker 1: commit → committed",
                "recoverer 1: read the decision → #1",
                "recoverer 1: commit #1 in ledger → done",
            ],
            id="recovery waits for work in flight",
        ),
        pytest.param(
            of("worker 1", *NOTED, "prepare in ledger", "dies"),
            [
                "worker 1, life 2: list what is prepared in ledger → #1 of message-1",
                "worker 1, life 2: claim → claimed",
                "worker 1, life 2: roll back #1 in ledger → done",
                "worker 1, life 2: begin in ledger → #2",
                "worker 1, life 2: settle → ack",
            ],
            id="dies before the decision",
        ),
        pytest.param(
            of("worker 1", *NOTED, "prepare in ledger", "commit", "dies"),
            [
                "worker 1: commit → committed",
                "worker 1, life 2: claim → duplicate",
                "worker 1, life 2: read the decision → #1",
                "worker 1, life 2: commit #1 in ledger → done",
                "worker 1, life 2: settle → ack",
            ],
            id="dies after the decision",
        ),
    ],
)
def test_schedule_by_hand(schedule: Sequence[str], wanted: Sequence[str]) -> None:
    """What the cases above contain is what they should contain."""
    run = TWO.replay(schedule)
    assert run.promise == ""
    steps = iter(run.steps)
    assert all(step in steps for step in wanted), f"not in this order: {run}"


class TestInMemoryDatabase(DatabaseCases):
    """What stands for PostgreSQL in the simulation does what PostgreSQL does."""

    kind = InMemoryDatabase

    @pytest.fixture
    def database(self) -> InMemoryDatabase:
        self.made = self.kind("ledger")
        return self.made

    def write(self, branch: Any, row: int) -> None:
        branch.session.insert(str(row))

    def count(self, row: int) -> int:
        return self.made.rows[str(row)]

    def test_updated_rows_are_locked_to_the_end(self, database: InMemoryDatabase) -> None:
        (_, first, _), (id_, second, _) = self.begun(database), self.begun(database)
        first.session.update("row")
        assert database.is_locked("row", id_)
        with pytest.raises(TransientStoreError):
            second.session.update("row")
        first.prepare()
        assert database.is_locked("row", id_), "prepared, and not ended"
        first.commit()
        second.session.update("row")


class TestInMemoryXA(TestInMemoryDatabase):
    """What stands for MariaDB does what MariaDB does."""

    kind = InMemoryXA
    in_hands = True
    tells_outcomes = False


class TestInMemoryDecisions(DecisionsCases):
    @pytest.fixture
    def store(self) -> DecidingStore:
        return DecidingStore()

    @pytest.fixture
    def decisions(self, store: DecidingStore) -> InMemoryDecisions:
        return InMemoryDecisions(store, self.consumer)


def test_what_claims_otherwise_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="claim first"):
        case(claim="late", jumps=(MINUTE,))
