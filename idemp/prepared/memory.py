"""Prepared messages and barriers in memory, for tests: the same ports and the same conformance suites as a server's."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from idemp.clock import Clock, SystemClock
from idemp.errors import TransientStoreError
from idemp.prepared.port import Answer, Decision, Prepared, Record, State, Taken
from idemp.prepared.refusing import already_passed, conflict, opposite, rolled_back, unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

_UNDECIDED: Final = frozenset({State.PREPARED, State.PARKED})


@dataclass(slots=True)
class _Kept:
    prepared: Prepared
    prepared_at: datetime
    due_at: datetime
    state: State = State.PREPARED
    checks: int = 0
    attempts: int = 0
    reason: str | None = None
    final_at: datetime | None = None

    def record(self) -> Record:
        due_at = self.due_at if self.state in {State.PREPARED, State.COMMITTED} else None
        return Record(self.prepared, self.state, self.checks, self.attempts, self.reason, self.prepared_at, due_at)


class InMemoryHome:
    """Prepared messages of one process; loses everything at its end.

    Args:
        clock: the home's one clock.

    Example:
        >>> from datetime import timedelta
        >>> InMemoryHome().take(10, lease=timedelta(seconds=30))
        []
    """

    decides = True

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept: dict[UUID, _Kept] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """This very object."""
        return f"memory:{id(self):x}"

    def verify(self) -> None:
        """It is always ready."""

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """Keep it, unless it is kept already."""
        with self._lock:
            now = self._clock.now()
            kept = self._kept.setdefault(prepared.id, _Kept(prepared, now, now + check_after))
        if kept.prepared.fingerprint != prepared.fingerprint:
            raise conflict(prepared)

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        """Compare and set."""
        wanted = State.COMMITTED if decision is Decision.COMMIT else State.ROLLED_BACK
        with self._lock:
            kept = self._kept.get(prepared.id)
            if kept is None:
                raise unknown(prepared.id, decision)
            if kept.state in _UNDECIDED:
                self._move(kept, wanted)
                kept.due_at = self._clock.now() + lease
            committed = kept.state in {State.COMMITTED, State.PUBLISHED}
            if committed is not (decision is Decision.COMMIT):
                raise opposite(prepared.id, decision)
            return kept.state is State.COMMITTED

    def published(self, prepared: Prepared) -> None:
        """From `COMMITTED` only."""
        with self._lock:
            kept = self._kept.get(prepared.id)
            if kept is not None and kept.state is State.COMMITTED:
                self._move(kept, State.PUBLISHED)

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """Those that are due longest first."""
        with self._lock:
            now = self._clock.now()
            due = [each for each in self._kept.values() if self._is_open(each) and each.due_at <= now]
            due = sorted(due, key=lambda kept: kept.due_at)[:limit]
            for kept in due:
                kept.due_at = now + lease
            return [
                Taken(each.prepared.output, each.prepared.fingerprint, each.state, each.checks, each.attempts)
                for each in due
            ]

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """If it still is in the state in which it was taken."""
        with self._lock:
            kept = self._kept.get(taken.id)
            if kept is None or kept.state is not taken.state:
                return
            kept.due_at = self._clock.now() + retry_in
            kept.reason = reason
            if checked:
                kept.checks += 1
            elif kept.state is State.COMMITTED:
                kept.attempts += 1

    def park(self, prepared: Prepared, reason: str) -> bool:
        """From `PREPARED` only."""
        with self._lock:
            kept = self._kept.get(prepared.id)
            if kept is None or kept.state is not State.PREPARED:
                return False
            kept.state, kept.reason = State.PARKED, reason
            return True

    def resume(self, id: UUID) -> bool:
        """From `PARKED` only."""
        with self._lock:
            kept = self._kept.get(id)
            if kept is None or kept.state is not State.PARKED:
                return False
            kept.state, kept.checks, kept.due_at = State.PREPARED, 0, self._clock.now()
            return True

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """In the order in which they were prepared."""
        with self._lock:
            found = [
                kept
                for kept in self._kept.values()
                if kept.state is state or (state is None and not kept.state.is_final)
            ]
            return [kept.record() for kept in found[:limit]]

    def find(self, id: UUID) -> Record | None:
        """One of them."""
        with self._lock:
            kept = self._kept.get(id)
            return kept.record() if kept is not None else None

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:
        """Those that have been final for longer."""
        with self._lock:
            before = self._clock.now() - retention
            ids = [id_ for id_, kept in self._kept.items() if kept.final_at is not None and kept.final_at <= before]
            return ids[:limit]

    def forget(self, ids: Collection[UUID]) -> None:
        """Those of them that are final."""
        with self._lock:
            for id_ in ids:
                if id_ in self._kept and self._kept[id_].state.is_final:
                    del self._kept[id_]

    def close(self) -> None:
        """Nothing is open."""

    def _move(self, kept: _Kept, state: State) -> None:
        kept.state = state
        if state.is_final:
            kept.final_at = self._clock.now()

    @staticmethod
    def _is_open(kept: _Kept) -> bool:
        return kept.state in {State.PREPARED, State.COMMITTED}


@dataclass(slots=True)
class InMemoryWork:
    """A unit of local work in memory: what it passed counts from its commit on.

    Attributes:
        passed: the barriers that it passed.
        over: whether it ended.
    """

    passed: set[UUID] = field(default_factory=set)
    over: bool = False


class InMemoryBarrier:
    """Barriers of one process. Nobody waits here: what a server would wait for is "unknown", or an error, at once.

    Args:
        clock: the barrier's one clock.

    Example:
        >>> from uuid import UUID
        >>> barrier, id = InMemoryBarrier(), UUID("0192c8a4-7d3e-7000-8000-000000000001")
        >>> with barrier.begin() as work:
        ...     barrier.pass_(work, id)
        ...     barrier.probe(id)
        <Answer.UNKNOWN: 'unknown'>
        >>> barrier.probe(id)
        <Answer.COMMIT: 'commit'>
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._rows: dict[UUID, Decision] = {}
        self._in_flight: dict[UUID, InMemoryWork] = {}
        self._settled: dict[UUID, datetime] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """This very object."""
        return f"memory:{id(self):x}"

    def verify(self) -> None:
        """It is always ready."""

    @contextmanager
    def begin(self) -> Iterator[InMemoryWork]:
        """Work that commits at the end of the block."""
        work = InMemoryWork()
        try:
            yield work
        except BaseException:
            self.roll_back(work)
            raise
        self.commit(work)

    def commit(self, work: InMemoryWork) -> None:
        """What it passed stands."""
        with self._lock:
            for id_ in self._end(work):
                self._rows[id_] = Decision.COMMIT

    def roll_back(self, work: InMemoryWork) -> None:
        """What it passed never was."""
        with self._lock:
            self._end(work)

    def pass_(self, work: InMemoryWork, id: UUID) -> None:
        """Insert the row, to be seen by others from the work's commit on.

        Raises:
            RolledBack: the checker was first.
            AlreadyPassed: work for it is committed.
            TransientStoreError: other work for it is in flight.
        """
        with self._lock:
            reason = self._rows.get(id)
            if reason is Decision.ROLLBACK:
                raise rolled_back(id)
            if reason is Decision.COMMIT:
                raise already_passed(id)
            if self._in_flight.get(id, work) is not work:
                raise TransientStoreError(f"Other work is in flight for message {id}.")
            self._in_flight[id] = work
            work.passed.add(id)

    def probe(self, id: UUID) -> Answer:
        """Insert "rollback" unless there is a row, or one in flight."""
        with self._lock:
            if id in self._in_flight:
                return Answer.UNKNOWN
            return Answer(self._rows.setdefault(id, Decision.ROLLBACK).value)

    def settle(self, ids: Collection[UUID]) -> None:
        """Note when."""
        with self._lock:
            for id_ in ids:
                self._settled.setdefault(id_, self._clock.now())

    def is_settled(self, id: UUID) -> bool:
        """Whether it was noted."""
        with self._lock:
            return id in self._settled

    def purge(self, retention: timedelta, limit: int) -> int:
        """Delete those that were settled longer ago."""
        with self._lock:
            before = self._clock.now() - retention
            old = [id_ for id_, settled_at in self._settled.items() if settled_at <= before][:limit]
            for id_ in old:
                del self._settled[id_]
                self._rows.pop(id_, None)
            return len(old)

    def close(self) -> None:
        """Nothing is open."""

    def _end(self, work: InMemoryWork) -> set[UUID]:
        passed, work.passed, work.over = work.passed, set(), True
        for id_ in passed:
            del self._in_flight[id_]
        return passed
