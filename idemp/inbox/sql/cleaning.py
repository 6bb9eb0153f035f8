"""Retention: expired claims go by one cleaner at a time, out of the claims' way: in bounded batches, or a day at once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, exists, func, or_, select

from idemp.errors import ConfigurationError, StoreError, StoreUnavailable
from idemp.inbox.port import STARTS_KEPT
from idemp.inbox.sql.claiming import only, timed
from idemp.inbox.sql.days import part_of
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.purged import Purged
from idemp.inbox.sql.short import Locking, Short
from idemp.inbox.sql.unfinished import Forgotten
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Delete, Engine, Select, Table

    from idemp.inbox.sql.daily import Daily
    from idemp.inbox.sql.days import Layout
    from idemp.inbox.sql.liveness import Liveness
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Part, Tables

MAX_BATCH: Final = 5000
_ANOTHER_CLEANER: Final = 60
"""Seconds to wait for one."""

log = logger("idemp.retention")


class Expired:
    """The statements that find and delete expired claims of the plain tables, or of one part.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> expired = Expired(Tables())  # .delete(connection, consumer_id, type_id, before, limit=1000)
    """

    def __init__(self, tables: Tables | Part) -> None:
        inbox = tables.inbox
        # Outputs without a confirm; and branches that may be prepared still, whose fate the claim tells.
        waits = or_(
            *(
                exists().where(table.c.consumer_id == inbox.c.consumer_id, table.c.message_key == inbox.c.message_key)
                for table in (tables.pending, tables.decision)
            )
        )
        expired = (
            inbox.c.consumer_id == bindparam("consumer"),
            inbox.c.type_id == bindparam("type"),
            inbox.c.claimed_at < bindparam("before"),
            ~waits,
        )
        oldest_first = only(select(inbox.c.message_key), inbox).where(*expired).order_by(inbox.c.claimed_at)
        self._expired = oldest_first.limit(bindparam("limit"))
        self._oldest = oldest_first.with_only_columns(inbox.c.claimed_at).limit(1)
        # Locked by a statement of its own: MySQL's family might lock, or skip, rows of `pending` along with them.
        free = (
            only(select(inbox.c.message_key), inbox)
            .where(
                inbox.c.consumer_id == bindparam("consumer"),
                inbox.c.message_key.in_(bindparam("keys", expanding=True)),
                inbox.c.claimed_at < bindparam("before"),
            )
            .order_by(inbox.c.message_key)
        )
        self._free = Locking(free)
        self._settled = free.where(~waits)
        self._deletions = [
            only(delete(table), table).where(
                table.c.consumer_id == bindparam("consumer"),
                table.c.message_key.in_(bindparam("keys", expanding=True)),
            )
            for table in (tables.output, tables.history, inbox)
        ]
        self._at_once = self._in_one_statement(oldest_first, tables)

    @staticmethod
    def _in_one_statement(oldest_first: Select[Any], tables: Tables | Part) -> Delete:
        """All of `delete` for PostgreSQL: no key travels, and the cleaner's process has next to nothing to do."""
        locked = oldest_first.limit(bindparam("limit")).with_for_update(skip_locked=True, of=tables.inbox)
        keys = func.array(select(locked.cte("expired").c.message_key).scalar_subquery())

        def of(table: Table) -> Delete:
            # An array, so that the planner takes the index whatever it thinks of the limit.
            ours = (table.c.consumer_id == bindparam("consumer"), table.c.message_key == func.any(keys))
            return only(delete(table), table).where(*ours)

        belongings = [of(table).cte(f"gone_{place}") for place, table in enumerate((tables.output, tables.history))]
        return of(tables.inbox).add_cte(*belongings).execution_options(preserve_rowcount=True)

    def oldest(self, connection: Connection, consumer_id: int, type_id: int, before: datetime) -> datetime | None:
        """When the oldest of a type's expired claims was made."""
        values = {"consumer": consumer_id, "type": type_id, "before": before}
        found: datetime | None = connection.scalar(self._oldest, values)
        return found

    def delete(self, connection: Connection, consumer_id: int, type_id: int, before: datetime, limit: int) -> int:
        """Delete at most so many of a type's expired claims; how many it were."""
        values = {"consumer": consumer_id, "type": type_id, "before": before, "limit": limit}
        if connection.dialect.name == "postgresql":
            return connection.execute(self._at_once, values).rowcount
        return self._delete(connection, consumer_id, connection.scalars(self._expired, values).all(), before)

    def delete_those(self, connection: Connection, consumer_id: int, keys: Sequence[UUID], before: datetime) -> int:
        """Delete these claims, of whatever type, if they are from before this moment and nothing of them pends."""
        wanted = {"consumer": consumer_id, "keys": keys, "before": before}
        return self._delete(connection, consumer_id, connection.scalars(self._settled, wanted).all(), before)

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


class Cleaning:
    """Deletes claims that are older than their type's window, and what belongs to them; and starts that never ended.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.daily import Daily
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.liveness import Liveness
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables, clock = create_engine_safely("sqlite://"), Tables(), SystemClock()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> liveness, daily = Liveness(engine, tables, clock, names), Daily(engine, tables, clock, names)
        >>> cleaning = Cleaning(engine, tables, liveness, names, daily)
        >>> cleaning.purge("orders", {"orders.Place": timedelta(days=7)}, limit=100)
        0
    """

    def __init__(self, engine: Engine, tables: Tables, liveness: Liveness, names: Names, daily: Daily) -> None:
        self._short = Short(engine)
        self._tables = tables
        self._liveness = liveness
        self._names = names
        self._daily = daily
        self._told = False  # that somebody else has to make daily tables
        self._forgotten = Forgotten(tables)
        self._plain = Expired(tables)
        self._purged = Purged(tables)
        inbox, kind = tables.inbox, tables.message_type
        self._types = (
            select(kind.c.id, kind.c.name)
            .where(
                exists().where(inbox.c.consumer_id == bindparam("consumer"), inbox.c.type_id == kind.c.id, timed(inbox))
            )
            .order_by(kind.c.id)
        )

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, others: timedelta | None = None
    ) -> int:
        """Drop expired days, and delete at most `limit` other expired claims (and never more than `MAX_BATCH`).

        How many claims that were; of days with many of them about so many.
        0 while another cleaner works.
        """
        consumer_id = self._names.known("consumer", consumer)
        windows = [*retention.values(), *([others] if others is not None else [])]
        if consumer_id is None or not windows:
            return 0
        layouts = self._daily.of(consumer_id)
        # Types that are not named, where nothing is said of others, are kept for ever: then so are whole days.
        dropped = self._try_to_turn_days(consumer, layouts, max(windows)) if layouts and others is not None else 0

        def work(connection: Connection) -> int:
            with cluster_lock(connection, self._tables, "purge", wait_seconds=0) as locked:
                if not locked:
                    return 0
                deleted = self._purge(connection, consumer_id, layouts, retention, others, min(limit, MAX_BATCH))
                before = self._liveness.ago(max(*windows, STARTS_KEPT))
                self._forgotten.purge(connection, consumer_id, before, min(limit, MAX_BATCH))
                self._liveness.prune(connection, consumer_id, max(windows))
                return deleted

        return dropped + self._short.run(work)

    def purge_archived(self, consumer: str, keys: Sequence[UUID], before: datetime) -> int:
        """Delete these claims, which an archive has, if they are from before this moment; how many it were.

        Waits while another cleaner works, for a minute at most.
        """
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None or not keys:
            return 0
        by_part: dict[str | None, list[UUID]] = {}
        layouts = self._daily.of(consumer_id)
        for key in keys:
            by_part.setdefault(part_of(layouts, key), []).append(key)

        def work(connection: Connection) -> int:
            with cluster_lock(connection, self._tables, "purge", wait_seconds=_ANOTHER_CLEANER):
                deleted = 0
                for name, own in by_part.items():
                    expired = self._plain if name is None else Expired(self._tables.part(name))
                    deleted += expired.delete_those(connection, consumer_id, own, before)
                self._purged.note(connection, consumer_id, before, archived=True)
                return deleted

        return self._short.run(work)

    def purged_before(self, consumer: str) -> datetime | None:
        """The moment before which claims of this consumer may be gone; `None` if none ever went."""
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return None
        return self._short.run(lambda connection: self._purged.read(connection, consumer_id))

    def tidy_archived(self, consumer: str, before: datetime) -> None:
        """After `purge_archived`: drop days that it has emptied, and forget starts that never ended."""
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return
        layouts = self._daily.of(consumer_id)
        if layouts and self._daily.may_alter():
            for layout in layouts:
                self._daily.drop_expired(layout, before, emptied=True)

        def work(connection: Connection) -> None:
            with cluster_lock(connection, self._tables, "purge", wait_seconds=_ANOTHER_CLEANER):
                earlier = min(before, self._liveness.ago(STARTS_KEPT))
                while self._forgotten.purge(connection, consumer_id, earlier, MAX_BATCH):
                    pass

        self._short.run(work)

    def lag(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None = None) -> timedelta:
        """How far the oldest claim that `purge` could delete is past its window; zero if there is none."""
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return timedelta(0)
        layouts = self._daily.of(consumer_id)

        def work(connection: Connection) -> timedelta:
            longest = timedelta(0)
            for type_id, before in self._windows(connection, consumer_id, retention, others):
                for expired in self._all_expired(layouts):
                    oldest = expired.oldest(connection, consumer_id, type_id, before)
                    longest = max(longest, before - oldest) if oldest is not None else longest
            if layouts and others is not None:
                before = self._liveness.late_before_by(connection, consumer_id, max(*retention.values(), others))
                longest = max(longest, self._daily.lag(layouts, before))
            return longest

        return self._short.run(work)

    def _turn_days(self, consumer: str, layouts: Sequence[Layout], window: timedelta) -> int:
        """Make the tables of days to come and drop those of days gone by, where this user may."""
        if not self._daily.may_alter():
            if not self._told:
                log.warning(
                    "daily tables have to be made and dropped by their owner",
                    extra={"event": "daily_not_ours", "consumer": consumer, "made_until": layouts[-1].made.isoformat()},
                )
            self._told = True
            return 0
        for layout in layouts:
            self._daily.make_ahead(layout)
        before = self._liveness.late_before(consumer, window)
        return sum(self._daily.drop_expired(layout, before) for layout in layouts)

    def _try_to_turn_days(self, consumer: str, layouts: Sequence[Layout], window: timedelta) -> int:
        """`_turn_days`, where that fails the batched DELETE goes on all the same."""
        try:
            return self._turn_days(consumer, layouts, window)
        except StoreUnavailable:
            raise  # then nothing else goes on either
        except (StoreError, ConfigurationError) as error:
            log.warning(
                "daily tables are neither made nor dropped: %s",
                error,
                extra={"event": "daily_failed", "consumer": consumer},
            )
            return 0

    def _all_expired(self, layouts: Sequence[Layout]) -> list[Expired]:
        late = {layout.late for layout in layouts}
        return [self._plain, *(Expired(self._tables.part(name)) for name in late)]

    def _purge(
        self,
        connection: Connection,
        consumer_id: int,
        layouts: Sequence[Layout],
        retention: Mapping[str, timedelta],
        others: timedelta | None,
        limit: int,
    ) -> int:
        deleted = 0
        for type_id, before in self._windows(connection, consumer_id, retention, others):
            for expired in self._all_expired(layouts):
                gone = expired.delete(connection, consumer_id, type_id, before, limit - deleted)
                if gone:
                    self._purged.note(connection, consumer_id, before)
                deleted += gone
                if deleted >= limit:
                    return deleted
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
