"""Prepared messages in the simulation: producers, checkers and consumers, whose steps are put into every order.

The real `PreparedMessages` runs on a home and a barrier in memory: one that decides, as a table does, or one that is like a
broker's. Each call is a step; whoever makes it may die before, and a request may be lost, lose its answer, or arrive at any
time after it was given up.

>>> from idemp.testing.simulation.prepared import PreparedSimulation
>>> report = PreparedSimulation(checkers=1).explore()
>>> report.complete, report.violation
(True, None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from idemp.errors import ConfigurationError
from idemp.prepared import PreparedMessages
from idemp.testing.simulation.exploring import Exploring
from idemp.testing.simulation.options import Options, Parts
from idemp.testing.simulation.prepared.homes import DecidingHome, PicturedHome, QueueHome, SimulatedBarrier
from idemp.testing.simulation.prepared.world import PreparedSetting

if TYPE_CHECKING:
    from idemp.clock import Clock

__all__ = [
    "DecidingHome",
    "PreparedOptions",
    "PreparedParts",
    "PreparedSimulation",
    "QueueHome",
    "SimulatedBarrier",
]


@dataclass(frozen=True, kw_only=True)
class PreparedParts(Parts):
    """The classes that are simulated; idemp's own, unless a test gives others. The consumers' are as in `Parts`.

    Attributes:
        messages: producers and checkers.
        home: makes the home of one run: `DecidingHome` or `QueueHome`, or what does the same.
        barrier: likewise its barrier.
    """

    messages: type[PreparedMessages] = PreparedMessages
    home: Callable[[Clock], PicturedHome] = DecidingHome
    barrier: Callable[[Clock], SimulatedBarrier] = SimulatedBarrier


@dataclass(frozen=True, kw_only=True)
class PreparedOptions(Options):
    """What is simulated: as `Options`, and beside it what follows.

    Attributes:
        workers: consumers whose steps are put into every order, too; with none one consumes at the end.
        messages: different keys; each has its local work, and one effect at the consumer.
        producers: processes that run a producer's code, for the keys in turn.
        runs: how often the code is run for a key, whatever became of it before.
        style: "submit": `submit_after`; "steps": `prepare` with the decision in its block.
        checkers: processes that check.
        checks: rounds of checkers in which something is due; beyond them one checks at the end.
        sweeps: how often what is decided and published is forgotten, at any moment.
        answers: what tells the work's fate: "barrier"; without one a checker that "looks", and of what is not committed
            knows nothing; one that "guesses" such work to be rolled back; or one to whom it is all "unknown".
        check_after: how long a message waits for its first check; with none checks may come at any moment.
        max_checks: "unknown" answers after which it is parked.
    """

    workers: int = 0
    copies: int = 1
    outputs: int = 0
    relays: int = 0
    purges: int = 0
    jumps: tuple[timedelta, ...] = ()
    producers: int = 1
    runs: int = 1
    style: Literal["submit", "steps"] = "submit"
    checkers: int = 2
    checks: int = 2
    sweeps: int = 0
    answers: Literal["barrier", "looks", "guesses", "unknown"] = "barrier"
    check_after: timedelta = timedelta(0)
    max_checks: int = 2
    parts: PreparedParts = field(default_factory=PreparedParts)
    least: ClassVar[Mapping[str, int]] = {**Options.least, "workers": 0, "producers": 1, "runs": 1, "max_checks": 1}

    def __post_init__(self) -> None:
        """See that there is something to simulate.

        Raises:
            ConfigurationError: there is not.
        """
        super().__post_init__()
        if self.answers != "barrier" and self.style == "submit":
            raise ConfigurationError("submit_after needs a barrier.", fix="Say style='steps', or answers='barrier'.")


class PreparedSimulation(PreparedOptions, Exploring):
    """Producers, checkers, consumers, a home, a barrier, a broker and a clock, whose steps are put into every order.

    Arguments are the attributes of `PreparedOptions`.

    Raises:
        ConfigurationError: there is nothing to simulate.

    Example:
        >>> simulation = PreparedSimulation(style="steps", parts=PreparedParts(home=QueueHome), checkers=1)
        >>> simulation.explore().violation is None
        True
        >>> print(simulation.replay(["producer 1: prepare", "producer 1: dies"]))  # doctest: +ELLIPSIS
        all promises held
            1. producer 1: prepare
            2. producer 1: dies → before pass
          then, left alone:
            3. checker 1: take → order-1 (prepared, 0 checks)
            4. checker 1: probe → rollback
        ...
    """

    @cached_property
    def setting(self) -> PreparedSetting:
        """What all runs of it share."""
        return PreparedSetting(self)
