"""Retention: expired claims are deleted in bounded batches, by one cleaner at a time, out of the claims' way."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, exists, select

from idemp.inbox.port import STARTS_KEPT
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.short import Locking, Short
from idemp.inbox.sql.unfinished import Forgotten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.liveness import Liveness
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables

MAX_BATCH: Final = 5000


class Cleaning:
    """Deletes claims that are older than their type's window, and what belongs to them; and starts that never ended.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.liveness import Liveness
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> cleaning = Cleaning(engine, tables, Liveness(engine, tables, SystemClock(), names), names)
        >>> cleaning.purge("orders", {"orders.Place": timedelta(days=7)}, limit=100)
        0
    """

    def __init__(self, engine: Engine, tables: Tables, liveness: Liveness, names: Names) -> None:
        self._short = Short(engine)
        self._tables = tables
        self._liveness = liveness
        self._names = names
        self._forgotten = Forgotten(tables)
        inbox, pending, kind = tables.inbox, tables.pending, tables.message_type
        waits = exists().where(
            pending.c.consumer_id == inbox.c.consumer_id, pending.c.message_key == inbox.c.message_key
        )
        expired = (
            inbox.c.consumer_id == bindparam("consumer"),
            inbox.c.type_id == bindparam("type"),
            inbox.c.claimed_at < bindparam("before"),
            ~waits,
        )
        oldest_first = select(inbox.c.message_key).where(*expired).order_by(inbox.c.claimed_at)
        self._expired = oldest_first.limit(bindparam("limit"))
        self._oldest = oldest_first.with_only_columns(inbox.c.claimed_at).limit(1)
        # Locked by a statement of its own: MySQL's family might lock, or skip, rows of `pending` along with them.
        free = (
            select(inbox.c.message_key)
            .where(
                inbox.c.consumer_id == bindparam("consumer"),
                inbox.c.message_key.in_(bindparam("keys", expanding=True)),
                inbox.c.claimed_at < bindparam("before"),
            )
            .order_by(inbox.c.message_key)
        )
        self._free = Locking(free)
        self._types = (
            select(kind.c.id, kind.c.name)
            .where(exists().where(inbox.c.consumer_id == bindparam("consumer"), inbox.c.type_id == kind.c.id))
            .order_by(kind.c.id)
        )
        self._deletions = [
            delete(table).where(
                table.c.consumer_id == bindparam("consumer"),
                table.c.message_key.in_(bindparam("keys", expanding=True)),
            )
            for table in (tables.output, tables.history, inbox)
        ]

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, others: timedelta | None = None
    ) -> int:
        """Delete at most `limit` expired claims (and never more than `MAX_BATCH`); 0 while another cleaner works."""
        consumer_id = self._names.known("consumer", consumer)
        windows = [*retention.values(), *([others] if others is not None else [])]
        if consumer_id is None or not windows:
            return 0

        def work(connection: Connection) -> int:
            with cluster_lock(connection, self._tables, "purge", wait_seconds=0) as locked:
                if not locked:
                    return 0
                deleted = self._purge(connection, consumer_id, retention, others, min(limit, MAX_BATCH))
                before = self._liveness.ago(max(*windows, STARTS_KEPT))
                self._forgotten.purge(connection, consumer_id, before, min(limit, MAX_BATCH))
                self._liveness.prune(connection, consumer_id, max(windows))
                return deleted

        return self._short.run(work)

    def lag(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None = None) -> timedelta:
        """How far the oldest claim that `purge` could delete is past its window; zero if there is none."""
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return timedelta(0)

        def work(connection: Connection) -> timedelta:
            longest = timedelta(0)
            for type_id, before in self._windows(connection, consumer_id, retention, others):
                values = {"consumer": consumer_id, "type": type_id, "before": before}
                oldest = connection.scalar(self._oldest, values)
                longest = max(longest, before - oldest) if oldest is not None else longest
            return longest

        return self._short.run(work)

    def _purge(
        self,
        connection: Connection,
        consumer_id: int,
        retention: Mapping[str, timedelta],
        others: timedelta | None,
        limit: int,
    ) -> int:
        deleted = 0
        for type_id, before in self._windows(connection, consumer_id, retention, others):
            values = {"consumer": consumer_id, "type": type_id, "before": before, "limit": limit - deleted}
            expired = connection.scalars(self._expired, values).all()
            deleted += self._delete(connection, consumer_id, expired, before)
            if deleted >= limit:
                break
        return deleted

    def _windows(
        self,
        connection: Connection,
        consumer_id: int,
        retention: Mapping[str, timedelta],
        others: timedelta | None,
    ) -> Iterator[tuple[int, datetime]]:
        """The types that this consumer has claims of, and where each one's window starts."""
        before: dict[timedelta, datetime] = {}
        for type_id, name in connection.execute(self._types, {"consumer": consumer_id}).all():
            window = retention.get(name, others)
            if window is None:
                continue
            if window not in before:
                before[window] = self._liveness.late_before_by(connection, consumer_id, window)
            yield type_id, before[window]

    def _delete(self, connection: Connection, consumer_id: int, expired: Sequence[UUID], before: datetime) -> int:
        if not expired:
            return 0
        # A claim that a late duplicate is looking at right now stays for the next round: nobody waits for anybody.
        wanted = {"consumer": consumer_id, "keys": expired, "before": before}
        keys = connection.scalars(self._free.on(connection), wanted).all()
        if keys:
            for deletion in self._deletions:
                connection.execute(deletion, {"consumer": consumer_id, "keys": keys})
        return len(keys)
