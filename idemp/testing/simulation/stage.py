"""The stage: actors that stop before each call of a port, until somebody says whose turn it is.

Every actor is a greenlet, so that one thread runs all of them and nothing happens that the schedule does not say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from idemp.testing.crash_points import Crash

DIES: Final = "dies"
_DEATH: Final = (DIES,)
SURROUNDINGS: Final = -1
"""The slot of what happens without a call: the broker or the database notices a death, time passes."""


class Move(NamedTuple):
    """One thing that can happen next: whose slot, and what."""

    slot: int
    option: str


@cache
def _moves(slot: int, options: tuple[str, ...]) -> tuple[Move, ...]:
    return tuple(Move(slot, option) for option in options)


class Step(NamedTuple):
    """One thing that happened: who, which call, with what answer.

    Example:
        >>> str(Step("worker 1", "claim", "claimed"))
        'worker 1: claim → claimed'
    """

    who: str
    call: str
    answer: str

    def __str__(self) -> str:
        return f"{self.who}: {self.call} → {self.answer}" if self.answer else f"{self.who}: {self.call}"


class Role(NamedTuple):
    """Whom the actors of one slot play, one after the other.

    Attributes:
        name: for people.
        live: what one of them does.
        mortal: whether it may be killed.
        alike: roles of one such name may change places, and it is all the same; empty where they may not.
    """

    name: str
    live: Callable[[Actor], object]
    mortal: bool = True
    alike: str = ""


class Event(NamedTuple):
    """Something in the surroundings that can happen, once."""

    who: str
    do: Callable[[], object]
    detail: object = None


class Actor:
    """One process. It tells the stage what it is about to call, and goes on when that is chosen.

    Attributes:
        name: for people.
        mortal: whether it may be killed.
        dead: it was killed: nothing of it happens any more.
        ended: it has nothing left to do.
        calls: how many calls it made.
        memory: a digest of all answers it got, from which everything that it knows follows.
        offers: what it is about to call, possible when `ready` says so.
        always: what else may happen there, whether it is ready or not.
        faults: what may go wrong there.
        outages: how the database may fail there.
        away: statements that fail without being asked for, since the database is away from this process.
        idle: its death here would change nothing.
        stained: a fault happened to it, of which it may keep something.
    """

    __slots__ = (
        "_body",
        "_greenlet",
        "_hub",
        "_stage",
        "always",
        "away",
        "calls",
        "dead",
        "ended",
        "faults",
        "idle",
        "memory",
        "mortal",
        "name",
        "offers",
        "outages",
        "ready",
        "stained",
    )

    def __init__(self, stage: Stage, name: str, body: Callable[[Actor], object], *, mortal: bool = True) -> None:
        self.name = name
        self.mortal = mortal
        self.dead = self.ended = self.idle = self.stained = False
        self.calls = self.memory = self.away = 0
        self.offers: tuple[str, ...] = ()
        self.always: tuple[str, ...] = ()
        self.faults: tuple[str, ...] = ()
        self.outages: tuple[str, ...] = ()
        self.ready: Callable[[], bool] | None = None
        self._stage = stage
        self._body = body
        self._hub = getcurrent()
        self._greenlet = greenlet(self._live)

    def start(self) -> None:
        """Run up to the first call."""
        self._greenlet.switch()

    def resume(self, option: str) -> None:
        """Make the call that was chosen, and run up to the next one."""
        self._greenlet.switch(option)

    def point(
        self,
        call: str,
        *,
        ready: Callable[[], bool] | None = None,
        always: tuple[str, ...] = (),
        faults: tuple[str, ...] = (),
        outages: tuple[str, ...] = (),
        idle: bool = False,
    ) -> str:
        """Stop before a call of a port; what was chosen there.

        Raises:
            Crash: it dies here, or has died before.
        """
        if self.dead:
            raise Crash(call)
        self.calls += 1
        if self._stage.resting and (ready is None or ready()):
            return call
        self.offers, self.ready, self.always, self.idle = (call,), ready, always, idle
        self.faults, self.outages = faults, outages
        chosen: str = self._hub.switch()
        if chosen == DIES:
            self.dead = True
            self._stage.tell(self, DIES, f"before {call}")
            raise Crash(call)
        return chosen

    def tell(self, call: str, answer: str = "", *, kept: object = None) -> None:
        """Say what came of a call; `kept` is what else it knows from now on."""
        self.memory = hash((self.memory, call, answer, kept))
        self._stage.tell(self, call, answer)

    def end(self) -> None:
        """Take it off the stage; nothing of it happens."""
        self.dead = True
        if self._greenlet:
            self._greenlet.throw(GreenletExit)

    def _live(self) -> None:
        try:
            self._body(self)
        except (Crash, GreenletExit):
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends a process that should live
            if not self.dead:
                self._stage.breaks("no process ends by itself", f"{self.name} ended with {error!r}")
        self.offers = self.always = self.faults = self.outages = ()
        self.ended = True


class Stage(ABC):
    """Actors and surroundings, and what happened so far. What they are, a subclass says.

    Args:
        crashes: how many deaths may still happen.
        faults: how many other faults may still happen.
        outages: how many statements of the database may still fail.

    Attributes:
        steps: what happened.
        broken: the promise that broke, and how.
        resting: no more choices: whoever can go on, goes on.
    """

    def __init__(self, crashes: int, faults: int, outages: int = 0) -> None:
        self.crashes = crashes
        self.faults = faults
        self.outages = outages
        self.actors: list[Actor] = []
        self.events: dict[str, Event] = {}
        self.steps: list[Step] = []
        self.broken: tuple[str, str] | None = None
        self.resting = False

    def tell(self, actor: Actor, call: str, answer: str) -> None:
        """Note a step."""
        self.steps.append(Step(actor.name, call, answer))

    def breaks(self, promise: str, detail: str) -> None:
        """A promise broke; the first one counts."""
        if self.broken is None:
            self.broken = (promise, detail)

    def moves(self) -> list[Move]:
        """Everything that can happen next."""
        found: list[Move] = []
        for slot, actor in enumerate(self.actors):
            if actor.ended:
                continue
            if actor.ready is None or actor.ready():
                found += _moves(slot, actor.offers)
                if self.faults:
                    found += _moves(slot, actor.faults)
                if self.outages:
                    found += _moves(slot, actor.outages)
            found += _moves(slot, actor.always)
            if self.crashes and actor.mortal and not actor.idle:
                found += _moves(slot, _DEATH)
        found += [Move(SURROUNDINGS, name) for name in self.events]
        return found

    def name_of(self, move: Move) -> str:
        """A move in words, as schedules have it."""
        who = self.events[move.option].who if move.slot == SURROUNDINGS else self.actors[move.slot].name
        return f"{who}: {move.option}"

    def make(self, move: Move) -> None:
        """Let it happen."""
        if move.slot == SURROUNDINGS:
            self.happen(move.option)
            return
        actor = self.actors[move.slot]
        if move.option == DIES:
            self.crashes -= 1
        elif move.option in actor.faults:
            self.faults -= 1
            actor.stained = True
        elif move.option in actor.outages:
            self.outages -= 1
            actor.stained = True
        actor.resume(move.option)
        if actor.dead and self.broken is None:
            self.after_death(move.slot)

    def happen(self, name: str) -> None:
        """Something happens in the surroundings."""
        event = self.events.pop(name)
        self.steps.append(Step(event.who, name, ""))
        event.do()

    @abstractmethod
    def after_death(self, slot: int) -> None:
        """Whoever died is followed by another."""

    @abstractmethod
    def picture(self) -> int:
        """A digest of everything that the future depends on: two schedules that lead here go on alike."""

    @abstractmethod
    def fewer_moves(self) -> list[Move]:
        """Enough of the moves that can happen next: the others lead to nothing else."""

    @abstractmethod
    def rest(self) -> None:
        """Let everything come to rest, without choices and faults, and see what became of it."""

    def close(self) -> None:
        """Take everybody off."""
        self.broken = self.broken or ("", "")  # what they do while they leave is no step of the schedule
        for actor in self.actors:
            actor.end()
