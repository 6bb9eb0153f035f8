"""Prepared messages in the simulation: the cases that are run in full, and one by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.testing.simulation.prepared import (
    PreparedParts,
    PreparedSimulation,
    QueueHome,
)
from tests.simulation.mutants import MINUTE

if TYPE_CHECKING:
    pass

QUEUE = PreparedParts(home=QueueHome)


def small() -> dict[str, PreparedSimulation]:
    """Those of the suite."""
    return {
        "two checkers, a crash, a minute": PreparedSimulation(jumps=(MINUTE,)),
        "stepwise, a checker, a crash and a fault": PreparedSimulation(style="steps", checkers=1, checks=1, faults=1),
        "on a queue, a checker, a crash and a fault": PreparedSimulation(checkers=1, checks=1, faults=1, parts=QUEUE),
        "on a queue, stepwise, two checkers, a crash": PreparedSimulation(style="steps", parts=QUEUE),
        "a key run twice, and forgotten between, a crash": PreparedSimulation(runs=2, sweeps=1, checkers=1, checks=1),
        "two consumers, a crash and a fault": PreparedSimulation(workers=2, checkers=0, faults=1),
        "a checker that looks, a crash": PreparedSimulation(
            style="steps", answers="looks", jumps=(MINUTE,), checkers=1
        ),
        "a checker that guesses, a crash and a fault": PreparedSimulation(
            style="steps", answers="guesses", checkers=1, faults=1
        ),
        "a checker that does not know, a fault": PreparedSimulation(
            style="steps", answers="unknown", checkers=1, faults=1
        ),
    }


def full() -> dict[str, PreparedSimulation]:
    """Those by command: larger ones, too."""
    return {
        **small(),
        "two producers of one key, a checker, a crash": PreparedSimulation(producers=2, runs=2, checkers=1),
        "two producers of one key on a queue, a checker, a crash": PreparedSimulation(
            producers=2, runs=2, checkers=1, parts=QUEUE
        ),
        "two checkers, a crash and a fault, a minute": PreparedSimulation(jumps=(MINUTE,), faults=1),
        "stepwise, two checkers, a crash, a minute": PreparedSimulation(style="steps", jumps=(MINUTE,)),
        "on a queue, two checkers, a crash, a minute": PreparedSimulation(jumps=(MINUTE,), parts=QUEUE),
        "on a queue, two checkers, a fault, a minute": PreparedSimulation(
            jumps=(MINUTE,), crashes=0, faults=1, parts=QUEUE
        ),
        "on a queue, stepwise, a checker, a crash and a fault": PreparedSimulation(
            style="steps", checkers=1, faults=1, parts=QUEUE
        ),
        "a checker, two crashes and two faults": PreparedSimulation(checkers=1, checks=1, crashes=2, faults=2),
        "a consumer, a checker, a crash": PreparedSimulation(workers=1, checkers=1),
    }


def large(parts: PreparedParts | None = None) -> PreparedSimulation:
    """One too large to be run in full: two keys, each run by two producers, with consumers, deaths and faults."""
    return PreparedSimulation(
        workers=2,
        messages=2,
        producers=4,
        runs=2,
        checks=6,
        sweeps=1,
        crashes=2,
        faults=2,
        jumps=(MINUTE, MINUTE, MINUTE),
        parts=parts or PreparedParts(),
    )
