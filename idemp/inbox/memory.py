"""An inbox in memory, for tests: the same port, the same conformance suite, no database."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from idemp.clock import Clock, SystemClock
from idemp.errors import StoreError, TransactionEnded
from idemp.fingerprint import fingerprints_conflict
from idemp.inbox.port import STARTS_KEPT, Claim, Claimed, Mark, PendingOutput, PendingState, StoredOutput, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from uuid import UUID

    from idemp.messages import Output

_Key = tuple[str, "UUID"]
_FOREVER_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass
class _Row:
    claim: Claim
    claimed_at: datetime
    outputs: tuple[Output, ...] = ()
    redelivered: int = 0


@dataclass
class _Pending:
    key: _Key
    output: Output
    due_at: datetime
    attempts: int = 0
    quarantined: bool = False
    reason: str = ""
    refusals: int = 0


@dataclass
class _Unfinished:
    starts: int
    last_at: datetime


@dataclass
class _State:
    rows: dict[_Key, _Row] = field(default_factory=dict)
    pending: dict[UUID, _Pending] = field(default_factory=dict)
    unfinished: dict[_Key, _Unfinished] = field(default_factory=dict)
    data: dict[Any, Any] = field(default_factory=dict)
    holders: dict[_Key, MemoryUnit] = field(default_factory=dict)
    beats: dict[str, datetime] = field(default_factory=dict)


class MemorySession:
    """The effects of a handling on an `InMemoryStore`: a mapping whose changes take place at COMMIT.

    Example:
        >>> store = InMemoryStore()
        >>> with store.begin() as unit:
        ...     unit.session["stock"] = 7
        >>> "stock" in store.data
        False
    """

    def __init__(self, unit: MemoryUnit) -> None:
        self._unit = unit
        self._changes: dict[Any, Any] = {}

    def __getitem__(self, name: Any) -> Any:
        return self._changes[name] if name in self._changes else self._unit.committed[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        self._changes[name] = value

    def __contains__(self, name: Any) -> bool:
        return name in self._changes or name in self._unit.committed

    def __iter__(self) -> Iterator[Any]:
        return iter({**self._unit.committed, **self._changes})

    def get(self, name: Any, default: Any = None) -> Any:
        """The value, or `default`."""
        return {**self._unit.committed, **self._changes}.get(name, default)

    def changes(self) -> dict[Any, Any]:
        """What this handling changed so far."""
        return dict(self._changes)

    def commit(self) -> None:
        """Refused: the handling's end commits."""
        self._unit.refuse("commit")

    def rollback(self) -> None:
        """Refused: an exception rolls back."""
        self._unit.refuse("rollback")


class MemoryUnit:
    """One transaction on an `InMemoryStore`."""

    def __init__(self, store: InMemoryStore) -> None:
        self._store = store
        self._held: list[_Key] = []
        self._rows: dict[_Key, _Row] = {}
        self._due: dict[_Key, tuple[datetime, int]] = {}
        self._broken: TransactionEnded | None = None
        self.session = MemorySession(self)
        self.connection = self.session

    @property
    def committed(self) -> dict[Any, Any]:
        """The data as last committed."""
        return self._store.state.data

    def refuse(self, what: str) -> None:
        """A handler tried to end the transaction."""
        self._broken = TransactionEnded(
            f"The handler called {what} on the transaction that holds its claim; its work was rolled back.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back.",
        )
        raise self._broken

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; wait for another holder of the same one."""
        key = (claim.consumer, claim.id.key)
        store = self._store
        with store.changed:
            if key in self._rows:
                return Claimed(Verdict.CLAIMED)
            free = store.changed.wait_for(lambda: key not in store.state.holders, claim.wait.total_seconds())
            if not free:
                return Claimed(Verdict.IN_FLIGHT)
            row = store.state.rows.get(key)
            if row is not None:
                return store.found(row, claim)
            store.state.holders[key] = self
            self._held.append(key)
            self._rows[key] = _Row(claim, store.clock.now())
        return Claimed(Verdict.CLAIMED)

    def usable(self) -> bool:
        """Memory does not go away."""
        return True

    def flush(self) -> None:
        """Nothing is held back here; a refusal that the handler swallowed is raised."""
        if self._broken is not None:
            raise self._broken

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> None:
        """Keep outputs under the claimed id."""
        if self._broken is not None:
            raise self._broken
        key = (claim.consumer, claim.id.key)
        self._rows[key].outputs = tuple(outputs)
        self._due[key] = (self._store.clock.now() + relay_after, 1 if relay_after else 0)

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """Both at once."""
        claimed = self.claim(claim)
        if claimed.verdict is Verdict.CLAIMED:
            self.store_outputs(claim, outputs, relay_after)
        return claimed

    def commit(self) -> None:
        """Make everything visible at once."""
        if self._broken is not None:
            raise self._broken
        with self._store.changed:
            state = self._store.state
            state.data.update(self.session.changes())
            for key, row in self._rows.items():
                state.rows[key] = row
                for output in row.outputs:
                    state.pending[output.id] = _Pending(key, output, *self._due[key])
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._store.changed:
            self._release()
        if self._broken is not None and isinstance(error, Exception) and error is not self._broken:
            raise self._broken from error  # the handler swallowed it, and failed of its consequences

    def _release(self) -> None:
        for key in self._held:
            self._store.state.holders.pop(key, None)
        self._held.clear()
        self._rows = {}
        self._store.changed.notify_all()


class InMemoryStore:
    """Claims and outputs in memory; loses everything at the process's end. Implements `Store` and `Upkeep`.

    Args:
        clock: source of time.

    Example:
        >>> InMemoryStore().pending_count()
        0
    """

    relay_life = timedelta(seconds=15)

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.state = _State()
        self.changed = threading.Condition(threading.RLock())
        self._identities: dict[tuple[str, str], str] = {}

    @property
    def data(self) -> dict[Any, Any]:
        """The effects of committed handlings."""
        return self.state.data

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        """A new unit of work."""
        del claims, late
        return MemoryUnit(self)

    @property
    def upkeep(self) -> InMemoryStore:
        """Itself: one object does both halves."""
        return self

    worker = "memory"

    def close(self) -> None:
        """Nothing is open."""

    def verify(self) -> None:
        """Nothing can be missing."""

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:
        """Nothing to prepare."""

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Nothing is cached."""

    def translate(self, error: BaseException) -> StoreError | None:
        """Our own errors mean what they say; all others are the handler's."""
        return error if isinstance(error, StoreError) else None

    def found(self, row: _Row, claim: Claim) -> Claimed:
        """The verdict about an id that is taken."""
        outputs = tuple(StoredOutput(output, output.id in self.state.pending) for output in row.outputs)
        if row.claim.id.text != claim.id.text:
            detail = f"its digest belongs to {row.claim.id.text!r}"
            return Claimed(Verdict.CONFLICT, (), detail, collision=True, claimed_at=row.claimed_at)
        if fingerprints_conflict(row.claim.fingerprint, claim.fingerprint):
            detail = f"first handled at {row.claimed_at.isoformat()}"
            return Claimed(Verdict.CONFLICT, outputs, detail, claimed_at=row.claimed_at)
        return Claimed(Verdict.DUPLICATE, outputs, claimed_at=row.claimed_at)

    def record(self, marks: Sequence[Mark]) -> None:
        """Confirmed outputs are no longer pending, refused ones keep the reason."""
        with self.changed:
            for mark in marks:
                for output_id in mark.confirmed:
                    self.state.pending.pop(output_id, None)
                for output_id, reason in mark.refused:
                    if (item := self.state.pending.get(output_id)) is not None:
                        item.reason = reason
                row = self.state.rows.get((mark.claim.consumer, mark.claim.id.key))
                if row is not None and mark.redelivered:
                    row.redelivered += 1

    def note_start(self, consumer: str, key: UUID) -> int:
        """A handler is about to start; how many earlier starts did not end."""
        with self.changed:
            former = self.state.unfinished.get((consumer, key))
            earlier = 0 if former is None else former.starts
            self.state.unfinished[consumer, key] = _Unfinished(earlier + 1, self.clock.now())
            return earlier

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended: all but `left` of its recorded starts are forgotten."""
        with self.changed:
            row = self.state.unfinished.pop((consumer, key), None)
            if row is not None and left > 0:
                self.state.unfinished[consumer, key] = replace(row, starts=min(left, row.starts))

    def relay_alive(self) -> bool:
        """Whether a relay beat lately."""
        now = self.clock.now()
        return any(now - beat < self.relay_life for beat in self.state.beats.values())

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The window counts back from now: in memory, a consumer never stands still."""
        del consumer
        with suppress(OverflowError):
            return self.clock.now() - retention
        return _FOREVER_AGO

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease what is due."""
        now = self.clock.now()
        with self.changed:
            due = sorted(
                (item for item in self.state.pending.values() if item.due_at <= now and not item.quarantined),
                key=lambda item: (item.due_at, item.key[1].int, item.output.ordinal),
            )[:limit]
            for item in due:
                item.due_at = now + lease
                item.attempts += 1
            return [PendingOutput(item.output, item.attempts, item.refusals) for item in due]

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Confirmed ones are done, failed ones wait."""
        with self.changed:
            for output_id in confirmed:
                self.state.pending.pop(output_id, None)
            for output_id, reason in failed.items():
                if (item := self.state.pending.get(output_id)) is not None:
                    item.due_at, item.reason = self.clock.now() + retry_in, reason
                    item.refusals += refused

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Out of the relay's rounds."""
        with self.changed:
            for output_id, reason in outputs.items():
                if (item := self.state.pending.get(output_id)) is not None:
                    item.quarantined, item.reason = True, reason

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Back into the relay's rounds."""
        with self.changed:
            wanted = (self.state.pending.get(item) for item in outputs)
            found = [pending for pending in wanted if pending is not None and pending.quarantined]
            for pending in found:
                pending.quarantined, pending.due_at = False, self.clock.now()
                pending.attempts, pending.refusals = 1, 0
            return len(found)

    def pending_count(self) -> int:
        """Outputs without a confirm."""
        return len(self.state.pending)

    def pending_state(self) -> PendingState:
        """How much waits, and how long already."""
        with self.changed:
            waiting = [item for item in self.state.pending.values() if not item.quarantined]
            claimed = [self.state.rows[item.key].claimed_at for item in waiting if item.key in self.state.rows]
            oldest = (self.clock.now() - min(claimed)).total_seconds() if claimed else 0.0
            count = len(self.state.pending)
            return PendingState(count, count - len(waiting), max(0.0, oldest))

    def wait_for_pending(self, timeout: float) -> bool:
        """Until somebody announces, or the time is over."""
        with self.changed:
            return self.changed.wait(timeout)

    def announce_pending(self) -> None:
        """Wake whoever waits."""
        with self.changed:
            self.changed.notify_all()

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """Delete expired claims without pending outputs, and forgotten starts."""
        with self.changed:
            self._forget_starts(consumer, [*retention.values(), *([others] if others is not None else [])], limit)
            expired = [key for key, _ in self._expired(consumer, retention, others)][:limit]
            for key in expired:
                del self.state.rows[key]
            return len(expired)

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far the oldest claim that could be deleted is past its window."""
        with self.changed:
            return max((lag for _, lag in self._expired(consumer, retention, others)), default=timedelta(0))

    def _expired(
        self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None
    ) -> Iterator[tuple[_Key, timedelta]]:
        """Claims past their windows with nothing pending, and how far past."""
        waiting = {item.key for item in self.state.pending.values()}
        for key, row in self.state.rows.items():
            window = retention.get(row.claim.message_type, others)
            if key[0] == consumer and key not in waiting and window is not None:
                lag = self.late_before(consumer, window) - row.claimed_at
                if lag > timedelta(0):
                    yield key, lag

    def _forget_starts(self, consumer: str, windows: Sequence[timedelta], limit: int) -> None:
        if not windows:
            return
        before = self.late_before(consumer, max(*windows, STARTS_KEPT))
        old = [key for key, found in self.state.unfinished.items() if key[0] == consumer and found.last_at < before]
        for key in old[:limit]:
            del self.state.unfinished[key]

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """Show life."""
        del consumers
        if relay:
            self.state.beats[worker] = self.clock.now()
        else:
            self.retire(worker)

    def retire(self, worker: str) -> None:
        """Take the heartbeat back."""
        self.state.beats.pop(worker, None)

    def agree_identities(self, *args: Any, **options: Any) -> None:
        """Nothing outlives the process, so nothing can have changed."""
        del args, options


__all__ = ["InMemoryStore", "MemorySession", "MemoryUnit"]
