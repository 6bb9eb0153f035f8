"""Which schedules are run: all of them up to states that were seen before, or some by chance; and the shortest bad one."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from idemp.errors import ConfigurationError
from idemp.testing.simulation.stage import DIES, SURROUNDINGS, Move, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RARE: Final = 0.1
"""How often a death or a fault happens that was drawn: otherwise nearly all would come in the first few steps."""


class Scene(Protocol):
    """What all runs of one simulation share."""

    def world(self) -> Stage:
        """A stage as it is before the first choice."""
        ...


@dataclass(frozen=True)
class Run:
    r"""One schedule, run to its end.

    Attributes:
        schedule: the choices, as `Simulation.replay` takes them.
        steps: what happened, in words, choices and the way to rest.
        scheduled: how many of the steps were chosen; the others are the way to rest.
        promise: the promise that broke; empty if all held.
        detail: how it broke.

    Example:
        >>> Run((), ("worker 1: receive → message-1, copy 1",), 1).trace
        b'worker 1: receive \xe2\x86\x92 message-1, copy 1'
    """

    schedule: tuple[str, ...]
    steps: tuple[str, ...]
    scheduled: int
    promise: str = ""
    detail: str = ""

    @property
    def trace(self) -> bytes:
        """The steps as bytes: two runs are the same if these are."""
        return "\n".join(self.steps).encode()

    def __str__(self) -> str:
        lines = [f"{self.promise or 'all promises held'}{': ' if self.detail else ''}{self.detail}"]
        for number, step in enumerate(self.steps, 1):
            if number == self.scheduled + 1:
                lines.append("  then, left alone:")
            lines.append(f"  {number:>3}. {step}")
        return "\n".join(lines)


@dataclass
class Tally:
    """What a search has seen.

    Attributes:
        schedules: schedules run to their end, or to a state that was seen before.
        distinct: digests of the traces of those run to their end.
        states: how many different states were met.
        ends: digests of the states in which nothing was left to choose.
        paths: how many schedules lead from the start to an end through these states; 0 where they were not counted.
        complete: nothing was left out.
        broken: the moves of the first schedule that broke a promise.
    """

    schedules: int = 0
    distinct: set[bytes] = field(default_factory=set)
    states: int = 0
    ends: set[int] = field(default_factory=set)
    paths: int = 0
    complete: bool = False
    broken: list[Move] | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines of simulated trouble."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Graph:
    """States and what follows from each, to count the ways through."""

    def __init__(self) -> None:
        self.following: dict[int, list[int]] = {}
        self.start = 0

    def paths(self) -> int:
        """How many ways lead from the start to an end."""
        counted: dict[int, int] = {}
        stack = [self.start]
        while stack:
            state = stack[-1]
            missing = [each for each in self.following[state] if each not in counted]
            if missing:
                stack += missing
                continue
            counted[stack.pop()] = sum(counted[each] for each in self.following[state]) or 1
        return counted[self.start]


def explore(setting: Scene, limit: int | None, *, merge: bool) -> Tally:
    """Depth first through all schedules, up to a limit; with `merge` not on from a state that was seen before."""
    tally, graph = Tally(), _Graph()
    path: list[_Fork] = []
    while limit is None or tally.schedules < limit:
        world = setting.world()
        try:
            ended = _descend(world, path, graph, tally, merge=merge)
            tally.schedules += 1
            if world.broken is not None:
                tally.broken = [fork.moves[fork.index] for fork in path]
                break
            if ended:
                tally.distinct.add(digest(world))
        finally:
            world.close()
        while path and path[-1].index + 1 == len(path[-1].moves):
            path.pop()
        if not path:
            tally.complete = True
            break
        path[-1].index += 1
    tally.states = len(graph.following)
    if tally.complete and merge:
        tally.paths = graph.paths()
    return tally


@dataclass(slots=True)
class _Fork:
    state: int
    moves: list[Move]
    index: int = 0


def _descend(world: Stage, path: list[_Fork], graph: _Graph, tally: Tally, *, merge: bool) -> bool:
    """Go where the path leads, then on by the first move of each; whether it came to an end."""
    for fork in path:
        world.make(fork.moves[fork.index])
    while world.broken is None:
        state = 0
        if merge:
            state = world.picture()
            if path:
                graph.following[path[-1].state].append(state)
            else:
                graph.start = state
            if state in graph.following:
                return False
            graph.following[state] = []
        moves = world.fewer_moves() if merge else world.moves()
        if not moves:
            tally.ends.add(world.picture())
            world.rest()
            return True
        path.append(_Fork(state, moves))
        world.make(moves[0])
    return True


def sample(setting: Scene, schedules: int, seed: int, first: int = 0, seen: set[bytes] | None = None) -> Tally:
    """So many schedules by chance; each follows from the seed and its number alone."""
    tally = Tally(distinct=seen if seen is not None else set())
    for number in range(first, first + schedules):
        world = setting.world()
        made: list[Move] = []
        try:
            _wander(world, Random(f"{seed}/{number}"), made)  # noqa: S311 - has to repeat itself
            tally.schedules += 1
            if world.broken is not None:
                tally.broken = made
                break
            tally.distinct.add(digest(world))
        finally:
            world.close()
    return tally


def wander(setting: Scene, seed: int, number: int) -> Run:
    """One of the schedules of `sample`, with its steps."""
    world = setting.world()
    made: list[Move] = []
    try:
        _wander(world, Random(f"{seed}/{number}"), made)  # noqa: S311 - has to repeat itself
    finally:
        world.close()
    return run(setting, made)


def _wander(world: Stage, chance: Random, made: list[Move]) -> None:
    while world.broken is None:
        moves = world.moves()
        if not moves:
            world.rest()
            return
        chosen = chance.choice(moves)
        if _is_rare(world, chosen) and chance.random() > _RARE:
            continue
        made.append(chosen)
        world.make(chosen)


def _is_rare(world: Stage, move: Move) -> bool:
    if move.slot == SURROUNDINGS:
        return False
    actor = world.actors[move.slot]
    return move.option == DIES or move.option in actor.faults or move.option in actor.outages


def digest(world: Stage) -> bytes:
    """A digest of a world's trace."""
    return blake2b(repr(world.steps).encode(), digest_size=8).digest()


def run(setting: Scene, schedule: Sequence[str | Move], *, lenient: bool = False) -> Run:
    """Run one schedule, then let everything come to rest. `lenient` leaves out what is not possible.

    Raises:
        ConfigurationError: a choice that is not possible.
    """
    world = setting.world()
    made: list[str] = []
    try:
        for wanted in schedule:
            if world.broken is not None:
                break
            moves = {world.name_of(move): move for move in world.moves()}
            name = wanted if isinstance(wanted, str) else next((n for n, m in moves.items() if m == wanted), "")
            if name not in moves:
                if lenient:
                    continue
                raise ConfigurationError(
                    f"After {len(made)} choices {name or wanted!r} is not possible.",
                    fix=f"Possible: {', '.join(moves)}.",
                )
            made.append(name)
            world.make(moves[name])
        scheduled = len(world.steps)
        if world.broken is None:
            world.rest()
        promise, detail = world.broken or ("", "")
        return Run(tuple(made), tuple(map(str, world.steps)), scheduled, promise, detail)
    finally:
        world.close()


def shortest(setting: Scene, moves: Sequence[Move]) -> Run:
    """A short schedule that breaks the same promise: choices are left out as long as it still does."""
    best = run(setting, moves)
    shrunk = True
    while shrunk:
        shrunk = False
        index = len(best.schedule) - 1
        while index >= 0:
            tried = run(setting, best.schedule[:index] + best.schedule[index + 1 :], lenient=True)
            if tried.promise == best.promise and _size(tried) < _size(best):
                best, shrunk = tried, True
            index = min(index, len(best.schedule)) - 1
    return best


def _size(found: Run) -> tuple[int, int]:
    return len(found.steps), len(found.schedule)
