"""Handlings in several databases in the simulation: the cases that are run in full, and one by chance."""

from __future__ import annotations

from typing import Any

from idemp.testing.simulation.twophase import InMemoryDatabase, InMemoryXA, TwoPhaseParts, TwoPhaseSimulation
from idemp.testing.simulation.twophase.ports import SESSION_ENDS, SLOW
from tests.simulation.mutants import LONG, MINUTE

XA = TwoPhaseParts(databases={"books": InMemoryXA})
BOTH = TwoPhaseParts(databases={"ledger": InMemoryDatabase, "books": InMemoryXA})


def case(**options: Any) -> TwoPhaseSimulation:
    """A worker, and nobody who recovers before the end."""
    alone: dict[str, Any] = {"workers": 1, "outputs": 0, "recoverers": 0, "crashes": 0}
    return TwoPhaseSimulation(**{**alone, **options})


def small() -> dict[str, TwoPhaseSimulation]:
    """Those of the suite."""
    return {
        "a worker, a crash and a fault": case(outputs=1, crashes=1, faults=1),
        "XA, a worker, a crash": case(outputs=1, crashes=1, parts=XA),
        "XA, a worker that updates, a fault": case(faults=1, updates=True, parts=XA),
        "two databases, a worker, a crash": case(crashes=1, parts=BOTH),
        "two databases, a worker, a fault": case(faults=1, parts=BOTH),
        "a worker, a commit fails twice": case(outputs=1, faults=2, only="commit"),
        "a worker and a recovery, a crash": case(recoverers=1, crashes=1),
        "a worker and a recovery, something is slow": case(recoverers=1, faults=1, only=SLOW),
        "a worker and two recoveries": case(recoverers=2, recoveries=2),
        "a worker that recovers first, a crash": case(start="recover", crashes=1),
        "a worker and a cleaner, a crash": case(purges=1, jumps=(LONG,), crashes=1),
    }


def full() -> dict[str, TwoPhaseSimulation]:
    """Those by command: larger ones, too."""
    return {
        **small(),
        "a worker and a recovery, a fault": case(recoverers=1, faults=1),
        "XA, a worker and a recovery, a fault": case(recoverers=1, faults=1, parts=XA),
        "XA, a worker, a crash and a fault": case(outputs=1, crashes=1, faults=1, parts=XA),
        "XA, a worker and a recovery, a crash": case(recoverers=1, crashes=1, parts=XA),
        "two databases, a worker, a crash and a fault": case(crashes=1, faults=1, parts=BOTH),
        "XA, a worker, two faults": case(faults=2, parts=XA),
        "two databases, a worker and two recoveries": case(recoverers=2, recoveries=2, parts=BOTH),
        "two workers, a session that ends unnoticed": case(workers=2, copies=2, faults=1, only=SESSION_ENDS),
        "two workers that update, a session that ends unnoticed": case(
            workers=2, copies=2, faults=1, only=SESSION_ENDS, updates=True
        ),
        "a worker and its upkeep, a crash": case(recoverers=1, recoveries=2, upkeep=True, crashes=1),
        "two workers, a fault": case(workers=2, copies=2, faults=1),
        "two workers, a crash": case(workers=2, copies=2, crashes=1),
        "a worker and two recoveries, a crash": case(recoverers=2, recoveries=2, crashes=1),
    }


def large() -> TwoPhaseSimulation:
    """One too large to be run in full: two kinds of databases, two messages, two recoveries, deaths and faults."""
    return TwoPhaseSimulation(
        messages=2,
        copies=2,
        recoverers=2,
        recoveries=4,
        purges=1,
        jumps=(MINUTE, LONG),
        crashes=2,
        faults=3,
        start="recover",
        parts=BOTH,
    )
