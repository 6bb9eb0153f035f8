"""Home, barrier and local work as one process has them: each call is a step, may be lost, lose its answer, or be slow."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from idemp.errors import BrokerUnavailable, CommitUnknown, IdempError, StoreUnavailable, TransientStoreError
from idemp.prepared.memory import InMemoryWork
from idemp.prepared.port import Answer, Decision, Prepared, Taken
from idemp.testing.crash_points import Crash
from idemp.testing.simulation.prepared.homes import QueueHome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import timedelta
    from uuid import UUID

    from idemp.testing.simulation.prepared.witness import Attempt
    from idemp.testing.simulation.prepared.world import PreparedWorld
    from idemp.testing.simulation.stage import Actor

LOST: Final = "its answer is lost"
AWAY: Final = "it never arrives"
SLOW: Final = "it is slow"
FAILS: Final = "it fails"

DEADLOCK: Final = "it meets a deadlock"
COMMIT_FAULTS: Final = tuple(f"commit work, {fault}" for fault in (LOST, AWAY, SLOW, DEADLOCK))

T = TypeVar("T")


class LocalWorkFailed(Exception):
    """The producer's own code fails, before it wrote anything that counts."""


class _Stepped:
    """Calls of one actor that are steps.

    Attributes:
        away: the error of a request that never arrived.
        unheard: the error of one whose answer is lost.
    """

    away: type[IdempError] = StoreUnavailable
    unheard: type[IdempError] = CommitUnknown

    def __init__(self, world: PreparedWorld, actor: Actor) -> None:
        self._world = world
        self._actor = actor

    def _call(
        self,
        call: str,
        arrive: Callable[[], T],
        told: Callable[[T], str],
        *,
        writes: bool = True,
        about: Prepared | None = None,
    ) -> T:
        """One request: it arrives and is answered; or not, or only its answer is lost, or it comes after it was given up."""
        faults = (LOST, AWAY, SLOW) if writes else (AWAY,)
        chosen = self._actor.point(call, faults=tuple(f"{call}, {fault}" for fault in faults))
        if chosen == call:
            try:
                answer = arrive()
            except IdempError as error:
                self._actor.tell(call, type(error).__name__)
                raise
            self._actor.tell(call, told(answer), kept=self._world.clock.time)
            return answer
        self._actor.tell(chosen)
        if chosen.endswith(AWAY):
            raise self.away("The simulation says: away.")

        def given_up() -> None:
            with suppress(IdempError):
                arrive()

        if chosen.endswith(LOST):
            given_up()
        else:
            what = f"a request of {self._actor.name} arrives: {call}"
            self._world.later("network", what, given_up, (call, about and about.id))
        raise self.unheard("The simulation took the answer away.")


class SteppedHome(_Stepped):
    """The home as one process has it.

    Args:
        inner: the home of all.
        world: where it is.
        actor: the process.
    """

    def __init__(self, inner: Any, world: PreparedWorld, actor: Actor) -> None:
        super().__init__(world, actor)
        self._inner = inner
        self.decides: bool = inner.decides
        if not self.decides:
            self.away = self.unheard = BrokerUnavailable
        self.asked: set[UUID] = set()
        self._tags: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """As the port says."""
        self._world.seen.prepares(prepared)
        self._call("prepare", self._seen(partial(self._inner.prepare, prepared, check_after)), _nothing, about=prepared)

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        """As the port says. A home that can't decide notes nothing of what is not in hands: that is no step."""
        if not self.decides and (decision is Decision.COMMIT or not isinstance(prepared, Taken)):
            if decision is Decision.ROLLBACK:
                self._world.seen.rolls_back(prepared)
            return bool(self._inner.decide(prepared, decision, lease))

        def arrive() -> bool:
            to_publish: bool = self._inner.decide(prepared, decision, lease)
            if decision is Decision.ROLLBACK:
                self._world.seen.rolls_back(prepared)
            return to_publish

        return self._call(
            f"decide {decision.value}" if self.decides else "end this copy",
            self._seen(arrive),
            lambda to_publish: "publish it" if to_publish else "",
            about=prepared,
        )

    def published(self, prepared: Prepared) -> None:
        """As the port says."""
        self._world.seen.published(prepared)
        if self.decides or isinstance(prepared, Taken):
            self._call("published", self._seen(lambda: self._inner.published(prepared)), _nothing, about=prepared)

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """As the port says; while nothing is due, nobody asks."""
        chosen = self._actor.point(
            "take", ready=self._world.something_is_due, faults=(f"take, {LOST}", f"take, {AWAY}")
        )
        self._world.takes()
        taken: Sequence[Taken] = [] if chosen.endswith(AWAY) else self._inner.take(limit, lease)
        self.asked.clear()
        self._tags = [each.tag for each in taken]
        if chosen != "take":
            self._actor.tell(chosen)
            raise self.away("The simulation took the answer away.")
        if self.decides:
            now = self._world.clock.now()
            self._world.seen.leases([each.id for each in taken], now, now + lease)
        told = [f"{each.key} ({each.state.value}, {each.checks} checks)" for each in taken]
        self._actor.tell("take", ", ".join(told) or "nothing due", kept=tuple(each.tag for each in taken))
        return taken

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """As the port says, in whole minutes: jitter makes no difference. A queue takes a copy first, then ends this one."""
        if checked:
            self._world.seen.counts(taken, asked=taken.id in self.asked)
        rounded = self._world.rounded(retry_in)
        if isinstance(self._inner, QueueHome):
            copy = partial(self._inner.copy, taken, reason, rounded, checked=checked)
            self._call("postpone", copy, _nothing, about=taken)
            self._call("end this copy", partial(self._inner.end, taken), _nothing, about=taken)
            return

        def postpone() -> None:
            self._world.seen.ends_leases([taken.id])
            self._inner.postpone(taken, reason, rounded, checked=checked)

        self._call("postpone", postpone, _nothing, about=taken)

    def park(self, prepared: Taken, reason: str) -> bool:
        """As the port says, in the same way."""
        self._world.seen.counts(prepared, asked=prepared.id in self.asked)
        self._world.seen.parks(prepared, prepared.checks + 1, self._world.options.max_checks)
        if isinstance(self._inner, QueueHome):
            self._call("park", partial(self._inner.set_aside, prepared, reason), _nothing, about=prepared)
            self._call("end this copy", partial(self._inner.end, prepared), _nothing, about=prepared)
            return True
        return self._call(
            "park", self._seen(lambda: bool(self._inner.park(prepared, reason))), _whether, about=prepared
        )

    def forget(self, ids: Collection[UUID]) -> None:
        """As the port says."""
        self._call("forget", self._seen(partial(self._inner.forget, ids)), _nothing)

    def dies(self) -> None:
        """Its process is dead: a broker notices at any time, a table only by the leases."""
        if isinstance(self._inner, QueueHome) and self._tags:
            give_back = partial(self._inner.give_back, self._tags)
            self._world.later("broker", f"takes copies back from {self._actor.name}", give_back, tuple(self._tags))

    def _seen(self, arrive: Callable[[], T]) -> Callable[[], T]:
        def watched() -> T:
            try:
                return arrive()
            finally:
                self._world.looks()

        return watched


class SteppedBarrier(_Stepped):
    """The barrier as one process has it; without a barrier its local work is here all the same.

    Args:
        inner: the barrier of all.
        world: where it is.
        actor: the process.
        home: its home, to be told that the barrier was asked.
    """

    def __init__(self, inner: Any, world: PreparedWorld, actor: Actor, home: SteppedHome) -> None:
        super().__init__(world, actor)
        self._inner = inner
        self._home = home
        self.attempt: Attempt | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def begin(self) -> Iterator[LocalWork]:
        """A unit of local work."""
        if self._actor.dead:
            raise Crash("begin")
        work = LocalWork(self._inner, self._world, self._actor, self.attempt)
        try:
            yield work
            chosen = self._actor.point("commit work", faults=COMMIT_FAULTS)
        except BaseException:
            work.roll_back()
            raise
        work.commit(chosen)

    def pass_(self, work: LocalWork, id: UUID) -> None:
        """As the port says. Whoever waits for other work in flight comes later, or gives up."""
        self._call("pass", lambda: self._inner.pass_(work.inner, id), _nothing, writes=False)

    def probe(self, id: UUID) -> Answer:
        """As the port says. Whoever waits for work in flight comes later, or gives up."""
        answer = self._call("probe", lambda: Answer(self._inner.probe(id)), lambda answer: answer.value)
        self._home.asked.add(id)
        return answer

    def settle(self, ids: Collection[UUID]) -> None:
        """As the port says."""
        self._world.seen.settles(ids)
        self._call("settle barrier", lambda: self._inner.settle(ids), _nothing)

    def is_settled(self, id: UUID) -> bool:
        """As the port says."""
        return self._call("is settled", lambda: bool(self._inner.is_settled(id)), _whether, writes=False)


class LocalWork:
    """One transaction in the business store: the producer's own work, and the barriers that it passed.

    Attributes:
        inner: the transaction, as the barrier knows it.
    """

    def __init__(self, barrier: Any, world: PreparedWorld, actor: Actor, attempt: Attempt | None) -> None:
        self.inner = InMemoryWork()
        self._barrier = barrier
        self._world = world
        self._actor = actor
        self._attempt = attempt
        self._written = False

    def write(self) -> None:
        """The work itself; the producer's own code may fail here."""
        if self._actor.point("work", faults=(f"work, {FAILS}",)) != "work":
            self._actor.tell(f"work, {FAILS}")
            raise LocalWorkFailed("the simulation says so")
        self._written = True
        self._actor.tell("work")

    def commit(self, chosen: str) -> None:
        """COMMIT: it takes place, or not, or only its answer is lost, or it takes place after nobody waits for it."""
        if chosen.endswith(SLOW):
            self._world.later("database", f"commits the work of {self._actor.name}", self._commit, self._in_flight())
        elif chosen.endswith((AWAY, DEADLOCK)):
            self._end()
        else:
            self._commit()
        self._actor.tell(chosen, "rolled back" if chosen.endswith((AWAY, DEADLOCK)) else "")
        if chosen.endswith(DEADLOCK):
            raise TransientStoreError("The simulation says: a deadlock.")
        if chosen != "commit work":
            raise CommitUnknown("The simulation took the answer of COMMIT away.")

    def roll_back(self) -> None:
        """At once; where its process died, when the database notices."""
        if self._actor.dead and self.inner.passed:
            self._world.later("database", f"rolls back {self._actor.name}", self._end, self._in_flight())
        else:
            self._end()

    def _commit(self) -> None:
        self._barrier.commit(self.inner)
        if self._written and self._attempt is not None:
            self._world.seen.works(self._attempt)

    def _end(self) -> None:
        self._barrier.roll_back(self.inner)

    def _in_flight(self) -> object:
        return (frozenset(self.inner.passed), self._written)


def _nothing(_: object) -> str:
    return ""


def _whether(answer: bool) -> str:
    return "yes" if answer else "no"
