"""Homes and barriers of prepared messages with seeded faults."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from idemp.errors import OppositeDecision, RolledBack
from idemp.prepared.port import Answer, Decision, Prepared, State, Taken
from idemp.testing.simulation.prepared import (
    DecidingHome,
    QueueHome,
    SimulatedBarrier,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.prepared.memory import InMemoryWork


class NoCompare(DecidingHome):
    """The last decision wins."""

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        kept = self._kept[prepared.id]
        self._move(kept, State.COMMITTED if decision is Decision.COMMIT else State.ROLLED_BACK)
        kept.due_at = self._clock.now() + lease
        return decision is Decision.COMMIT


class CommitAfterRollback(DecidingHome):
    """A commit is taken whatever was decided before."""

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        try:
            return super().decide(prepared, decision, lease)
        except OppositeDecision:
            if decision is Decision.ROLLBACK:
                raise
            self._move(self._kept[prepared.id], State.COMMITTED)
            return True


class NoLease(DecidingHome):
    """Two checkers have one message at a time."""

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        return super().take(limit, timedelta(0))


class CommittedIsDone(DecidingHome):
    """What is decided is nobody's to look at any more."""

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        return [each for each in super().take(limit, lease) if each.state is State.PREPARED]


class ForgetsUndecided(DecidingHome):
    """What is old is forgotten, whatever became of it."""

    def forget(self, ids: Any) -> None:
        self._kept.clear()


class EndsFirst(QueueHome):
    """The copy in hands is ended before the next one is there."""

    def copy(self, taken: Taken, *arguments: Any, **options: Any) -> None:
        self.late = lambda: QueueHome.copy(self, taken, *arguments, **options)
        super().end(taken)

    def end(self, taken: Prepared) -> bool:
        self.late()
        return True


class DecidesByItself(QueueHome):
    """A queue that is taken for a home that can decide."""

    decides = True


class DoesNotWait(SimulatedBarrier):
    """What is in flight is taken for not there."""

    def probe(self, id: UUID) -> Answer:
        return Answer(self._rows.setdefault(id, Decision.ROLLBACK).value)

    def commit(self, work: InMemoryWork) -> None:
        for id_ in self._end(work):
            self._rows[id_] = Decision.COMMIT


class LooksOnly(SimulatedBarrier):
    """The probe inserts nothing, so that work may still come."""

    def probe(self, id: UUID) -> Answer:
        if id in self._in_flight:
            return Answer.UNKNOWN
        return Answer(self._rows.get(id, Decision.ROLLBACK).value)


class PassesAnyway(SimulatedBarrier):
    """Work may commit after the checker."""

    def pass_(self, work: InMemoryWork, id: UUID) -> None:
        with suppress(RolledBack):
            super().pass_(work, id)


class PassesTwice(SimulatedBarrier):
    """A committed row is no reason not to do the work again."""

    def pass_(self, work: InMemoryWork, id: UUID) -> None:
        if self._rows.get(id) is Decision.COMMIT:
            self._in_flight[id] = work
            work.passed.add(id)
            return
        super().pass_(work, id)


class OutsideTheWork(SimulatedBarrier):
    """The row is written in a transaction of its own, before the work."""

    def pass_(self, work: InMemoryWork, id: UUID) -> None:
        super().pass_(work, id)
        self._rows[id] = Decision.COMMIT
        self._end(work)
