"""Seeded faults in all parts of prepared messages; a small case that shows each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from idemp.errors import IdempError, OppositeDecision, RolledBack, StoreError, UnknownPrepared
from idemp.prepared import PreparedMessages
from idemp.prepared.checking import Checking, Round
from idemp.prepared.deciding import Deciding
from idemp.prepared.port import Answer, Decision, Prepared, Taken
from idemp.testing.simulation.prepared import (
    DecidingHome,
    PreparedParts,
    PreparedSimulation,
    QueueHome,
)
from tests.simulation.mutants import Mutant
from tests.simulation.prepared_stores import (
    CommitAfterRollback,
    CommittedIsDone,
    DecidesByItself,
    DoesNotWait,
    EndsFirst,
    ForgetsUndecided,
    LooksOnly,
    NoCompare,
    NoLease,
    OutsideTheWork,
    PassesAnyway,
    PassesTwice,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.app import App


# Producers --------------------------------------------------------------------------------------------------------------


def decided_by(kind: type[Deciding], home: Any = DecidingHome) -> PreparedParts:
    class Messages(PreparedMessages):
        def __init__(self, app: App, home: Any, **options: Any) -> None:
            super().__init__(app, home, **options)
            self.deciding = kind(app.name, home, self.barrier, self.publishers, lease=self.lease, timeout=self.timeout)

    return PreparedParts(messages=Messages, home=home)


class SwallowsCommit(Deciding):
    """Three times, then it is silent about it."""

    def write(self, prepared: Prepared, decision: Decision) -> bool:
        for _ in range(3):
            with suppress(IdempError):
                return super().write(prepared, decision)
        return False


class SwallowsOpposite(Deciding):
    """An opposite decision that came before is no reason to complain."""

    def write(self, prepared: Prepared, decision: Decision) -> bool:
        with suppress(OppositeDecision):
            return super().write(prepared, decision)
        return False


class NoneIsSuccess(PreparedMessages):
    """A prepare whose answer was bad is taken for a late one, and a decision about nothing for a repeated one."""

    def submit_after(self, work: Callable[[Any], object], message: Any, **options: Any) -> UUID:
        class Hopeful:
            def __init__(self, home: Any) -> None:
                self._home = home

            def __getattr__(self, name: str) -> Any:
                return getattr(self._home, name)

            def prepare(self, *arguments: Any) -> None:
                with suppress(StoreError):
                    self._home.prepare(*arguments)

            def decide(self, *arguments: Any) -> bool:
                try:
                    return bool(self._home.decide(*arguments))
                except UnknownPrepared:
                    return False

        self.home = self.deciding._home = Hopeful(self.home)
        return super().submit_after(work, message, **options)


class ErrorIsRollback(Deciding):
    """An exception, also one of COMMIT, is taken for a rollback."""

    def _after_error(self, barrier: Any, prepared: Prepared, error: Exception, *, worked: bool) -> None:
        self.write(prepared, Decision.ROLLBACK)
        raise error

    def leave(self, half: Any) -> None:
        if not half.decided:
            self.write(half.prepared, Decision.ROLLBACK)


class ErrorIsTheTruth(Deciding):
    """Whatever COMMIT said goes to the caller, who takes it for a "no"."""

    def _after_error(self, barrier: Any, prepared: Prepared, error: Exception, *, worked: bool) -> None:
        raise RolledBack(str(error))


class WorksFirst(PreparedMessages):
    """The message is prepared after the local work: whoever dies between has lost it."""

    def submit_after(self, work: Callable[[Any], object], message: Any, **options: Any) -> UUID:
        prepared = self.make(message, **options)
        with self.needed_barrier().begin() as session:
            self.needed_barrier().pass_(session, prepared.id)
            work(session)
        self.home.prepare(prepared, self.check_after)
        self.deciding.write(prepared, Decision.COMMIT)
        return prepared.id


class PublishesFirst(PreparedMessages):
    """The message goes out with the work, before its COMMIT."""

    def submit_after(self, work: Callable[[Any], object], message: Any, **options: Any) -> UUID:
        def both(session: Any) -> None:
            work(session)
            self.deciding._publish(self.make(message, **options))

        return super().submit_after(both, message, **options)


class PublishesUndecided(Deciding):
    """The decision is written after the message is out."""

    def write(self, prepared: Prepared, decision: Decision) -> bool:
        if decision is Decision.COMMIT:
            self._publishers.publish([prepared.output], self._timeout)
        return super().write(prepared, decision)


class NoBarrierPassed(PreparedMessages):
    """The work does not pass the barrier, so that no probe knows of it."""

    @contextmanager
    def prepare(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        with super().prepare(*arguments, **options) as half:
            half.pass_barrier = lambda work: None  # type: ignore[method-assign]
            yield half


class FreshIds(PreparedMessages):
    """Two commits of one key store two messages."""

    def make(self, message: Any, *, key: str | None = None, **options: Any) -> Prepared:
        self.runs = getattr(self, "runs", 0) + 1
        made = super().make(message, key=key, **options)
        return replace(made, output=replace(made.output, id=UUID(int=self.runs)))


class MarksFirst(Deciding):
    """Recorded as published before the broker confirmed it."""

    def _publish(self, prepared: Prepared) -> bool:
        self._home.published(prepared)
        return super()._publish(prepared)


class SettlesFirst(Deciding):
    """The barrier is told that all is done, before it is published."""

    def _publish(self, prepared: Prepared) -> bool:
        self.settle(prepared)
        return super()._publish(prepared)


# The checker ------------------------------------------------------------------------------------------------------------


def checked_by(kind: type[Checking], home: Any = DecidingHome) -> PreparedParts:
    class Messages(PreparedMessages):
        def run_once(self, limit: int = 50) -> Round:
            return kind(self).run_once(limit)

    return PreparedParts(messages=Messages, home=home)


class CountsUnasked(Checking):
    """An outage is counted as an answer."""

    def _ask(self, taken: Taken) -> tuple[Answer, str]:
        try:
            return super()._ask(taken)
        except StoreError:
            return Answer.UNKNOWN, "away"


class DropsUnknown(Checking):
    """Checked too often is rolled back."""

    def _unknown(self, taken: Taken, why: str) -> str:
        if taken.checks + 1 < self._messages.max_checks:
            return super()._unknown(taken, why)
        with suppress(OppositeDecision):
            self._home.decide(taken, Decision.ROLLBACK, self._messages.lease)
        return "parked"


class UnknownIsCommit(Checking):
    """Who does not know is taken to agree."""

    def _ask(self, taken: Taken) -> tuple[Answer, str]:
        answer, why = super()._ask(taken)
        return (Answer.COMMIT if answer is Answer.UNKNOWN else answer), why


class ErrorIsNo(Checking):
    """A checker that can't be asked has said "rollback"."""

    def _ask(self, taken: Taken) -> tuple[Answer, str]:
        try:
            return super()._ask(taken)
        except StoreError:
            return Answer.ROLLBACK, "away"


class ParksEarly(Checking):
    """The first "unknown" is the last."""

    def _unknown(self, taken: Taken, why: str) -> str:
        self._home.park(taken, why)
        return "parked"


class CheckerMarksFirst(Checking):
    """What is decided for commit is ended before it is published."""

    def _publish(self, committed: Sequence[Taken]) -> int:
        for each in committed:
            self._home.published(each)
        return super()._publish(committed)


class RefusedIsDone(Checking):
    """What the broker refused is ended as if it had confirmed it."""

    def _publish(self, committed: Sequence[Taken]) -> int:
        self._messages.publishers.publish([each.output for each in committed], self._messages.timeout)
        for each in committed:
            self._home.published(each)
        return len(committed)


def _mutant(name: str, parts: PreparedParts, **options: Any) -> Mutant:
    alone: dict[str, Any] = {"crashes": 0, "checkers": 1, "checks": 1}
    return Mutant(name, PreparedSimulation(parts=parts, **{**alone, **options}))


STEPS = {"style": "steps"}
GUESSED = {**STEPS, "answers": "guesses"}
UNGUARDED = {**STEPS, "answers": "unknown"}
MUTANTS = [
    _mutant("commit swallowed after three tries", decided_by(SwallowsCommit), **UNGUARDED, checks=0, faults=3),
    _mutant('"does not exist" taken for success', PreparedParts(messages=NoneIsSuccess), faults=1),
    _mutant("error of COMMIT taken for a rollback", decided_by(ErrorIsRollback), faults=1),
    _mutant("error of COMMIT taken for a rollback, stepwise", decided_by(ErrorIsRollback), **STEPS, faults=1),
    _mutant("error of COMMIT, no barrier", decided_by(ErrorIsRollback), **UNGUARDED, faults=1),
    _mutant("error of COMMIT told as it is", decided_by(ErrorIsTheTruth), faults=1),
    _mutant("prepared after the work", PreparedParts(messages=WorksFirst), crashes=1),
    _mutant("published before COMMIT", PreparedParts(messages=PublishesFirst)),
    _mutant("published before the decision", decided_by(PublishesUndecided)),
    _mutant("work that passes no barrier", PreparedParts(messages=NoBarrierPassed), **STEPS),
    _mutant("two commits store two messages", PreparedParts(messages=FreshIds), runs=2),
    _mutant("marked published before the confirm", decided_by(MarksFirst)),
    _mutant("settled before the confirm, on a queue", decided_by(SettlesFirst, QueueHome), crashes=1),
    _mutant("a check counted without asking", checked_by(CountsUnasked), faults=1),
    _mutant("checked too often is dropped", checked_by(DropsUnknown), checks=2, crashes=1),
    _mutant("unknown taken for commit", checked_by(UnknownIsCommit)),
    _mutant("away taken for rollback", checked_by(ErrorIsNo), faults=1),
    _mutant("parked at the first unknown", checked_by(ParksEarly)),
    _mutant("checker marks before it publishes", checked_by(CheckerMarksFirst), crashes=1),
    _mutant("checker ends before it publishes, on a queue", checked_by(CheckerMarksFirst, QueueHome)),
    _mutant("a refused publish taken for done", checked_by(RefusedIsDone, QueueHome), faults=1),
    _mutant("decided without comparing", PreparedParts(home=NoCompare), **GUESSED),
    _mutant("commit accepted after rollback", PreparedParts(home=CommitAfterRollback), **GUESSED),
    _mutant("the opposite decision is passed over", decided_by(SwallowsOpposite), **GUESSED),
    _mutant("take without a lease", PreparedParts(home=NoLease), checkers=2, checks=2, crashes=1),
    _mutant("committed and not published is nobody's", PreparedParts(home=CommittedIsDone), crashes=1),
    _mutant("undecided is forgotten", PreparedParts(home=ForgetsUndecided), messages=2, producers=2, sweeps=1),
    _mutant("a copy ended before the next is there", PreparedParts(home=EndsFirst), crashes=2),
    _mutant("a queue taken for what decides", PreparedParts(home=DecidesByItself)),
    _mutant("probe that does not wait", PreparedParts(barrier=DoesNotWait)),
    _mutant("probe that does not insert", PreparedParts(barrier=LooksOnly)),
    _mutant("work accepted after the checker", PreparedParts(barrier=PassesAnyway)),
    _mutant("work done twice", PreparedParts(barrier=PassesTwice), runs=2),
    _mutant("barrier outside of the work", PreparedParts(barrier=OutsideTheWork), faults=1),
]
