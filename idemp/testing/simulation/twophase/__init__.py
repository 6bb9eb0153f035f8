"""Handlings in several databases in the simulation: workers and recoveries, whose steps are put into every order.

The real `Coordinator`, `Branches` and `Recovery` run on an inbox and other databases in memory, which prepare as PostgreSQL
does, or as MariaDB. Each request is a step, may be lost, lose its answer or be slow; sessions end unnoticed; and whoever
acts may die before each step.

>>> from idemp.testing.simulation.twophase import TwoPhaseSimulation
>>> report = TwoPhaseSimulation(workers=1, recoverers=0).explore()
>>> report.complete, report.violation
(True, None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from idemp.errors import ConfigurationError
from idemp.testing.simulation.exploring import Exploring
from idemp.testing.simulation.inboxes import SimulatedInbox
from idemp.testing.simulation.options import Options, Parts
from idemp.testing.simulation.twophase.databases import (
    DecidingStore,
    InMemoryDatabase,
    InMemoryDecisions,
    InMemoryXA,
)
from idemp.testing.simulation.twophase.ports import TwoPhaseInbox
from idemp.testing.simulation.twophase.world import TwoPhaseSetting
from idemp.twophase import Coordinator, Recovery

if TYPE_CHECKING:
    from idemp.clock import Clock

__all__ = [
    "DecidingStore",
    "InMemoryDatabase",
    "InMemoryDecisions",
    "InMemoryXA",
    "TwoPhaseOptions",
    "TwoPhaseParts",
    "TwoPhaseSimulation",
]


@dataclass(frozen=True, kw_only=True)
class TwoPhaseParts(Parts):
    """The classes that are simulated; idemp's own, unless a test gives others. The worker's are as in `Parts`.

    Attributes:
        coordinator: knows the other databases.
        recovery: ends what is in doubt.
        databases: the others, by their names: `InMemoryDatabase`, `InMemoryXA`, or what does the same.
        store: makes the inbox of one run, in whose data decisions are.
    """

    coordinator: type[Coordinator] = Coordinator
    recovery: type[Recovery] = Recovery
    databases: Mapping[str, type[InMemoryDatabase]] = field(default_factory=lambda: {"ledger": InMemoryDatabase})
    inbox: type[SimulatedInbox] = TwoPhaseInbox
    store: Callable[[Clock], DecidingStore] = DecidingStore


@dataclass(frozen=True, kw_only=True)
class TwoPhaseOptions(Options):
    """What is simulated: as `Options`, and beside it what follows.

    Attributes:
        recoverers: processes that run `idemp recover`.
        recoveries: rounds of theirs, in which something is in doubt; beyond them one recovers at the end.
        upkeep: they are workers' rounds instead, of which the first ends everything, and later ones only what the round
            before has seen.
        start: "recover": workers have a round of their own before they consume.
        updates: handlers update rows in the other databases, for which they wait while another transaction has them; else
            they insert some.
        only: a part of the names of those faults that may happen; empty for all.
    """

    relays: int = 0
    purges: int = 0
    jumps: tuple[timedelta, ...] = ()
    copies: int = 1
    recoverers: int = 1
    recoveries: int = 1
    upkeep: bool = False
    start: Literal["recover", "consume"] = "consume"
    updates: bool = False
    only: str = ""
    parts: TwoPhaseParts = field(default_factory=TwoPhaseParts)

    def __post_init__(self) -> None:
        """See that there is something to simulate.

        Raises:
            ConfigurationError: there is not.
        """
        super().__post_init__()
        if self.claim == "late" or self.together > 1:
            raise ConfigurationError(
                "Handlings in several databases claim first, each in a transaction of its own.",
                fix="Leave out claim and together.",
            )


class TwoPhaseSimulation(TwoPhaseOptions, Exploring):
    """Workers, recoveries, databases, a broker and a clock, whose steps are put into every order.

    Arguments are the attributes of `TwoPhaseOptions`.

    Raises:
        ConfigurationError: there is nothing to simulate.

    Example:
        >>> simulation = TwoPhaseSimulation(workers=1, recoverers=0)
        >>> print(simulation.replay(["worker 1: receive", "worker 1: dies"]))  # doctest: +ELLIPSIS
        all promises held
            1. worker 1: receive → message-1, copy 1
            2. worker 1: dies → before list what is prepared in ledger
        ...
    """

    @cached_property
    def setting(self) -> TwoPhaseSetting:
        """What all runs of it share."""
        return TwoPhaseSetting(self)
