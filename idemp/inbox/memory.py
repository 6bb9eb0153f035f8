"""An inbox in memory, for tests: the same port, the same conformance suite, no database."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from idemp.clock import CarriedClock, SystemClock
from idemp.errors import TransactionEnded
from idemp.inbox.content import Content, Handling
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.inbox.small import PlainUnit, SmallStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta
    from types import TracebackType
    from uuid import UUID

    from idemp.clock import Clock
    from idemp.messages import Output

__all__ = ["InMemoryStore", "MemorySession", "MemoryUnit"]


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
        return self._changes.get(name, self._unit.committed.get(name, default))

    def changes(self) -> dict[Any, Any]:
        """What this handling changed so far."""
        return dict(self._changes)

    def commit(self) -> None:
        """Refused: the handling's end commits."""
        self._unit.refuse("commit")

    def rollback(self) -> None:
        """Refused: an exception rolls back."""
        self._unit.refuse("rollback")


class MemoryUnit(PlainUnit):
    """One transaction on an `InMemoryStore`: what it claims and changes is its own until COMMIT.

    Example:
        >>> InMemoryStore().begin().usable()
        True
    """

    def __init__(self, store: InMemoryStore) -> None:
        self._store = store
        self._handlings: dict[tuple[str, UUID], Handling] = {}
        self._broken: TransactionEnded | None = None
        self.session = self.connection = MemorySession(self)

    @property
    def committed(self) -> dict[Any, Any]:
        """The data as last committed."""
        return self._store.content.data

    def refuse(self, what: str) -> None:
        """A handler tried to end the transaction."""
        self._broken = TransactionEnded(
            f"The handler called {what} on the transaction that holds its claim; its work was rolled back.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back.",
        )
        raise self._broken

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; wait for another holder of the same one."""
        key, store = (claim.consumer, claim.id.key), self._store
        with store.changed:
            if not store.changed.wait_for(lambda: store.holders.get(key, self) is self, claim.wait.total_seconds()):
                return Claimed(Verdict.IN_FLIGHT)
            former = self._handlings.get(key) or store.content.handlings.get(key)
            if former is not None:
                return former.answer(claim)
            store.holders[key] = self
            self._handlings[key] = Handling(claim, store.clock.now())
        return Claimed(Verdict.CLAIMED)

    def purged_before(self, consumer: str) -> datetime | None:
        """When claims of this consumer were last deleted."""
        with self._store.changed:
            return self._store.content.purged.get(consumer)

    def raised(self, error: Exception) -> bool:
        """Whether it raised this error itself in the handler's hands."""
        return error is self._broken

    def flush(self) -> None:
        """Nothing is held back here; a refusal that the handler swallowed is raised."""
        if self._broken is not None:
            raise self._broken

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs under the claimed id."""
        self.flush()
        self._handlings[claim.consumer, claim.id.key].keep(outputs, self._store.clock.now(), relay_after)

    def commit(self) -> None:
        """Make everything visible at once."""
        self.flush()
        with self._store.changed:
            self._store.content.handlings.update(self._handlings)
            self.committed.update(self.session.changes())
            self._end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._store.changed:
            self._end()
        if self._broken is not None and isinstance(error, Exception) and error is not self._broken:
            raise self._broken from error  # the handler swallowed it, and failed of its consequences

    def _end(self) -> None:
        for key in self._handlings:
            self._store.holders.pop(key, None)
        self._handlings = {}
        self._store.changed.notify_all()


class InMemoryStore(SmallStore):
    """Claims and outputs in memory, for one process; loses everything at its end.

    Units of work run side by side, and only those wait for each other that claim the same id. As in every store, a
    window counts the time in which the consumer consumed: without beats (a `Worker` beats) no claim ever expires.

    Args:
        clock: source of time.

    Attributes:
        content: all that is committed; hold `changed` to look through it while others use the store.
        holders: the units of work that run, by the keys that they claimed.
        changed: locks both, and wakes who waits for a claim.

    Example:
        >>> InMemoryStore().pending_count()
        0
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock or CarriedClock(SystemClock()), worker="memory")
        self.content = Content()
        self.holders: dict[tuple[str, UUID], MemoryUnit] = {}
        self.changed = threading.Condition(threading.RLock())

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        """A new unit of work."""
        del claims, late
        return MemoryUnit(self)

    def read(self) -> Content:
        """The content itself; it changes when others commit."""
        return self.content

    def reading(self) -> AbstractContextManager[Content]:
        """The content, which nobody else changes meanwhile."""
        return self.changing()

    @contextmanager
    def changing(self) -> Iterator[Content]:
        """The content, which nobody else reads or changes meanwhile. An error takes back none of the changes before it."""
        with self.changed:
            yield self.content
