"""Homes of prepared messages whose state a simulation can compare: one that decides, and one that is like a broker's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from idemp.prepared.memory import InMemoryBarrier, InMemoryHome
from idemp.prepared.port import Decision, Home, Prepared, Record, State, Taken

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from idemp.clock import Clock


class PicturedHome(Home, Protocol):
    """A home whose state can be compared."""

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        ...

    def is_due(self) -> bool:
        """Whether a checker would be given something now."""
        ...

    def states(self) -> dict[UUID, set[State]]:
        """Where each message stands, each copy of it."""
        ...


class DecidingHome(InMemoryHome):
    """One that compares and sets, as a table does.

    Example:
        >>> from idemp.clock import SystemClock
        >>> DecidingHome(SystemClock()).states()
        {}
    """

    def picture(self) -> Hashable:
        """Its content."""
        now = self._clock.now()
        return frozenset(
            (id_, kept.state, kept.checks, kept.attempts, kept.due_at if kept.due_at > now else None)
            for id_, kept in self._kept.items()
        )

    def is_due(self) -> bool:
        """By its clock."""
        now = self._clock.now()
        return any(self._is_open(kept) and kept.due_at <= now for kept in self._kept.values())

    def states(self) -> dict[UUID, set[State]]:
        """One each."""
        return {id_: {kept.state} for id_, kept in self._kept.items()}


@dataclass(slots=True)
class _Copy:
    prepared: Prepared
    due_at: datetime
    checks: int = 0
    state: State = State.PREPARED
    reason: str | None = None
    tag: int = 0


class QueueHome:
    """One that can't compare and set, as a broker: copies in a queue, which only whoever has one in hands can end.

    What is prepared twice is there twice. A copy comes back after its lease; whoever held it before can't end it any more.

    Args:
        clock: the home's one clock.

    Example:
        >>> from idemp.clock import SystemClock
        >>> QueueHome(SystemClock()).decides
        False
    """

    decides = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._copies: list[_Copy] = []
        self._tags = 0

    @property
    def place(self) -> str:
        """This very object."""
        return f"memory:{id(self):x}"

    def verify(self) -> None:
        """It is always ready."""

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """One more copy."""
        self._copies.append(_Copy(prepared, self._clock.now() + check_after))

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        """A copy in hands is ended by a rollback; else there is nothing that it could do."""
        del lease
        if decision is Decision.ROLLBACK:
            self._end(prepared)
        return decision is Decision.COMMIT

    def published(self, prepared: Prepared) -> None:
        """A copy in hands is ended."""
        self._end(prepared)

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """Those that are due longest first."""
        now = self._clock.now()
        due = sorted((copy for copy in self._copies if self._is_due(copy, now)), key=lambda copy: copy.due_at)[:limit]
        for copy in due:
            self._tags += 1
            copy.tag, copy.due_at = self._tags, now + lease
        return [
            Taken(each.prepared.output, each.prepared.fingerprint, each.state, each.checks, tag=each.tag)
            for each in due
        ]

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """Another copy, then the end of this one."""
        self.copy(taken, reason, retry_in, checked=checked)
        self._end(taken)

    def park(self, prepared: Prepared, reason: str) -> bool:
        """Another copy where nobody takes it, then the end of this one."""
        self.set_aside(prepared, reason)
        return self._end(prepared)

    def copy(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """The first half of `postpone`."""
        prepared = Prepared(taken.output, taken.fingerprint)
        self._copies.append(
            _Copy(prepared, self._clock.now() + retry_in, taken.checks + checked, State.PREPARED, reason)
        )

    def set_aside(self, prepared: Prepared, reason: str) -> None:
        """The first half of `park`."""
        bare = Prepared(prepared.output, prepared.fingerprint)
        self._copies.append(_Copy(bare, self._clock.now(), 0, State.PARKED, reason))

    def end(self, taken: Prepared) -> bool:
        """The second half of both."""
        return self._end(taken)

    def give_back(self, tags: Collection[int]) -> None:
        """Whoever had these in hands is dead."""
        for each in self._copies:
            if each.tag in tags:
                each.due_at = self._clock.now()

    def resume(self, id: UUID) -> bool:
        """All of its copies that are parked."""
        parked = [each for each in self._copies if each.prepared.id == id and each.state is State.PARKED]
        for each in parked:
            each.state, each.due_at = State.PREPARED, self._clock.now()
        return bool(parked)

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """In the order in which they came."""
        return [self._record(each) for each in self._copies if state in {None, each.state}][:limit]

    def find(self, id: UUID) -> Record | None:
        """The first of its copies, a parked one before others."""
        found = [each for each in self._copies if each.prepared.id == id]
        return min(map(self._record, found), key=lambda each: each.state is not State.PARKED, default=None)

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:
        """None: it forgets by itself."""
        del retention, limit
        return []

    def forget(self, ids: Collection[UUID]) -> None:
        """It forgets by itself."""

    def close(self) -> None:
        """Nothing is open."""

    def picture(self) -> Hashable:
        """Its copies."""
        now = self._clock.now()
        return tuple(
            sorted(
                (each.prepared.id.int, each.state, each.checks, each.tag, max(each.due_at, now).timestamp())
                for each in self._copies
            )
        )

    def is_due(self) -> bool:
        """By its clock."""
        now = self._clock.now()
        return any(self._is_due(each, now) for each in self._copies)

    def states(self) -> dict[UUID, set[State]]:
        """Those of all copies."""
        found: dict[UUID, set[State]] = {}
        for each in self._copies:
            found.setdefault(each.prepared.id, set()).add(each.state)
        return found

    @staticmethod
    def _is_due(copy: _Copy, now: datetime) -> bool:
        return copy.state is State.PREPARED and copy.due_at <= now

    @staticmethod
    def _record(copy: _Copy) -> Record:
        return Record(copy.prepared, copy.state, copy.checks, 0, copy.reason)

    def _end(self, prepared: Prepared) -> bool:
        tag = prepared.tag if isinstance(prepared, Taken) else None
        left = [each for each in self._copies if each.tag != tag]
        ended, self._copies = len(left) < len(self._copies), left
        return ended


class SimulatedBarrier(InMemoryBarrier):
    """A barrier whose state can be compared.

    Example:
        >>> from idemp.clock import SystemClock
        >>> SimulatedBarrier(SystemClock()).picture() == SimulatedBarrier(SystemClock()).picture()
        True
    """

    def picture(self) -> Hashable:
        """Its rows, those of work in flight, and which are settled."""
        return frozenset(self._rows.items()), frozenset(self._in_flight), frozenset(self._settled)
