"""Runs of a simulation: all of its schedules, some of them, or one; and what they found."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from idemp.testing.simulation import search
from idemp.testing.simulation.search import Run, Scene, Tally


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a simulation found.

    Attributes:
        schedules: schedules run, those included that were left where another had been before.
        distinct: how many different traces were run to their end.
        states: how many different states were met, where they were compared.
        paths: how many different schedules lead through these states; 0 where they were not counted.
        complete: every schedule was run, or led to a state from which everything was.
        violation: the shortest schedule found that breaks a promise.
        seconds: how long it took.

    Example:
        >>> print(Report(schedules=10, distinct=4, states=30, paths=120, complete=True, violation=None, seconds=0.5))
        10 schedules run in 0.5 s (20 per second), 4 of them distinct and to their end; 30 states
        they stand for all 120 distinct schedules
        all promises held
    """

    schedules: int
    distinct: int
    states: int
    paths: int
    complete: bool
    violation: Run | None
    seconds: float

    def __str__(self) -> str:
        rate = self.schedules / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.schedules:,} schedules run in {self.seconds:.1f} s ({rate:,.0f} per second), "
            f"{self.distinct:,} of them distinct and to their end"
            + (f"; {self.states:,} states" if self.states else "")
        ]
        if self.complete:
            lines.append(f"they stand for all {max(self.paths, self.distinct):,} distinct schedules")
        return "\n".join([*lines, str(self.violation or "all promises held")])


class Exploring(ABC):
    """Whatever has schedules that can be run."""

    @property
    @abstractmethod
    def setting(self) -> Scene:
        """What all runs of it share."""

    def explore(self, limit: int | None = None, *, merge: bool = True) -> Report:
        """Run all schedules, depth first.

        Args:
            limit: stop after so many.
            merge: leave a schedule where it comes to a state that another has been in, since both go on alike from there.

        Example:
            >>> from idemp.testing.simulation import Simulation
            >>> Simulation(workers=1, copies=1, relays=0, purges=0, jumps=()).explore(10, merge=False).distinct
            10
        """
        with _timed() as took:
            tally = search.explore(self.setting, limit, merge=merge)
        return self._report(tally, took[0])

    def sample(self, schedules: int, *, seed: int = 0, first: int = 0) -> Report:
        """Run schedules by chance. Which ones follows from the seed alone.

        Args:
            schedules: how many.
            seed: of chance.
            first: the number of the first one, where a search goes on.

        Example:
            >>> from idemp.testing.simulation import Simulation
            >>> Simulation(workers=3, messages=3, crashes=2, faults=2).sample(5, seed=1).violation is None
            True
        """
        with _timed() as took:
            tally = search.sample(self.setting, schedules, seed, first)
        return self._report(tally, took[0])

    def replay(self, schedule: Sequence[str]) -> Run:
        """Run one schedule, then let everything come to rest.

        Args:
            schedule: choices, as `Run.schedule` has them; the first ones of a run will do.

        Raises:
            ConfigurationError: a choice that is not possible at its place.

        Example:
            >>> from idemp.testing.simulation import Simulation
            >>> run = Simulation(relays=0, purges=0, jumps=()).replay(["worker 1: receive", "worker 1: dies"])
            >>> print(run)  # doctest: +ELLIPSIS
            all promises held
                1. worker 1: receive → message-1, copy 1
                2. worker 1: dies → before begin
              then, left alone:
                3. broker: takes back from worker 1
                4. worker 1, life 2: receive → message-1, copy 1, redelivered
            ...
        """
        with search.quiet():
            return search.run(self.setting, schedule)

    def run(self, number: int = 0, *, seed: int = 0) -> Run:
        """One of the schedules that `sample` runs, with its steps.

        Example:
            >>> from idemp.testing.simulation import Simulation
            >>> simulation = Simulation()
            >>> simulation.run(7, seed=1).trace == simulation.run(7, seed=1).trace
            True
        """
        with search.quiet():
            return search.wander(self.setting, seed, number)

    def _report(self, tally: Tally, seconds: float) -> Report:
        violation = None
        if tally.broken is not None:
            with search.quiet():
                violation = search.shortest(self.setting, tally.broken)
        return Report(
            schedules=tally.schedules,
            distinct=len(tally.distinct),
            states=tally.states,
            paths=tally.paths,
            complete=tally.complete,
            violation=violation,
            seconds=seconds,
        )


@contextmanager
def _timed() -> Iterator[list[float]]:
    took: list[float] = []
    begun = time.perf_counter()
    with search.quiet():
        yield took
    took.append(time.perf_counter() - begun)
