"""Streams in memory, for tests: the same port, the same conformance suite, no database."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from idemp.inbox.stream.port import AlreadyCommitted, Commit, Found, Pending, WrongVersion

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from idemp.inbox.port import Mark


class InMemoryStreams:
    """Streams of one process, which are lost at its end.

    Attributes:
        commits: by stream, in order.
        unconfirmed: outputs that pend, by the commit's consumer and key and their own ids, and since when.

    Example:
        >>> InMemoryStreams().load("order-7")
        []
    """

    def __init__(self) -> None:
        self.commits: dict[str, list[Commit]] = {}
        self.unconfirmed: dict[tuple[str, UUID, UUID], datetime] = {}
        self._ids: dict[tuple[str, UUID], Commit] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "InMemoryStreams()"

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        """The commits of a stream with higher numbers than `after`."""
        with self._lock:
            return list(self.commits.get(stream, ())[after:])

    def last(self, stream: str) -> Commit | None:
        """The last commit of a stream."""
        with self._lock:
            return next(reversed(self.commits.get(stream, ())), None)

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        """The commit of this id, in whatever stream."""
        del stream
        with self._lock:
            found = self._ids.get((consumer, key))
            if found is None:
                return None
            ids = (output.id for output in found.outputs)
            return Found(found, frozenset(id_ for id_ in ids if (consumer, key, id_) in self.unconfirmed))

    def append(self, commit: Commit, *, pending: bool) -> None:
        """Append a commit if its number is the next one and its id is new.

        Raises:
            AlreadyCommitted: its id is there.
            WrongVersion: its number is taken.
        """
        id_ = (commit.claim.consumer, commit.claim.id.key)
        with self._lock:
            stream = self.commits.setdefault(commit.stream, [])
            if id_ in self._ids:
                raise AlreadyCommitted.of(commit)
            if commit.number != len(stream) + 1:
                raise WrongVersion.of(commit)
            stream.append(commit)
            self._ids[id_] = commit
            if pending:
                self.unconfirmed.update(((*id_, output.id), commit.committed_at) for output in commit.outputs)

    def confirm(self, marks: Sequence[Mark]) -> None:
        """What they say is confirmed no longer pends."""
        with self._lock:
            for mark in marks:
                for output in mark.confirmed:
                    self.unconfirmed.pop((mark.claim.consumer, mark.claim.id.key, output), None)

    def pending(self) -> Pending:
        """What waits for a confirm."""
        with self._lock:
            return Pending(len(self.unconfirmed), min(self.unconfirmed.values(), default=None))

    def overdue(self, consumers: Collection[str], before: datetime, limit: int) -> Sequence[Found]:
        """Commits of whose outputs some pend, the oldest first."""
        with self._lock:
            due = sorted(
                (since, consumer, key, output)
                for (consumer, key, output), since in self.unconfirmed.items()
                if consumer in consumers and since <= before
            )
            outputs: dict[tuple[str, UUID], set[UUID]] = {}
            for _, consumer, key, output in due[:limit]:
                outputs.setdefault((consumer, key), set()).add(output)
            return [Found(self._ids[id_], frozenset(pending)) for id_, pending in outputs.items()]

    def verify(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """Nothing is open."""
