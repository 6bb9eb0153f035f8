"""Dropping a day: all that is in it is gone at once, but for the few rows that somebody still needs."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import bindparam, insert, select, true, update

from idemp.inbox.sql import ddl
from idemp.inbox.sql.days import first_key
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.purged import Purged

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

    from idemp.inbox.sql.days import Layout
    from idemp.inbox.sql.tables import Part, Tables

MOST_MOVED: Final = 1_000
"""Claims that are moved out of a day's table, so that it can be dropped; with more of them it stays."""


class StillNeeded(Exception):
    """The day stays as it is: more of it is needed than can be moved, or another cleaner is at it."""


class Dropping:
    """Drops days of any consumer.

    Args:
        tables: the plain ones.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> dropping = Dropping(Tables())  # .drop(connection, layout, day, before)
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._purged = Purged(tables)

    def drop(
        self, connection: Connection, layout: Layout, day: date, before: datetime, *, emptied: bool = False
    ) -> int:
        """Drop the tables of the first day of a layout that still has any, in this transaction.

        About how many claims are gone: a number for people.

        Claims that pend, and those from the window, become late ones: that is where their ids belong from now on.
        With `emptied` a day goes only if nothing is left in it but such claims.

        Raises:
            StillNeeded: nothing was changed that the end of the transaction doesn't take back.
            sqlalchemy.exc.DBAPIError: somebody has a lock on one of the tables; this waits for nobody.
        """
        with cluster_lock(connection, self._tables, "purge", wait_seconds=0) as locked:
            if not locked or not self._noted(connection, layout, day):
                raise StillNeeded
            part = self._tables.part(layout.part_on(day))
            # Counted before the lock: what is claimed in between is from the window, and moved.
            claims = ddl.count_about(connection, part.inbox)
            ddl.lock_part(connection, part)
            needed = self._needed(connection, layout, day, part, before)
            if len(needed) > MOST_MOVED:
                raise StillNeeded
            if emptied and _has_others(connection, part, needed):
                raise StillNeeded
            moved = _move(connection, part, self._tables.part(layout.late), needed) if needed else 0
            ddl.drop(connection, part)
            if not emptied:
                self._purged.note(connection, layout.consumer_id, before)
            return max(0, claims - moved)

    def _noted(self, connection: Connection, layout: Layout, day: date) -> bool:
        """The layout says that the day is gone; false where it did already. Its row is locked by this."""
        daily = self._tables.daily
        mine = (daily.c.consumer_id == layout.consumer_id) & (daily.c.since == layout.since)
        gone = update(daily).where(mine, daily.c.dropped == day, daily.c.made > day)
        return connection.execute(gone.values(dropped=day + timedelta(days=1))).rowcount == 1

    def _needed(self, connection: Connection, layout: Layout, day: date, part: Part, before: datetime) -> list[UUID]:
        """The ids of claims that can't go yet, and at most a few more than can be moved."""
        inbox, kind = part.inbox.c, self._tables.message_type.c
        most = MOST_MOVED + 1
        # Type by type, for the index on the time of the claim.
        of_type = (
            select(inbox.message_key)
            .where(
                inbox.consumer_id == layout.consumer_id,
                inbox.type_id == kind.id,
                inbox.claimed_at >= bindparam("before", before, type_=inbox.claimed_at.type),
            )
            .limit(most)
            .lateral()
        )
        recent = select(of_type.c.message_key).select_from(self._tables.message_type.join(of_type, true())).limit(most)
        waiting = (
            select(table.c.message_key)
            .where(
                table.c.consumer_id == layout.consumer_id,
                table.c.message_key >= first_key(day),
                table.c.message_key < first_key(day + timedelta(days=1)),
            )
            .distinct()
            .limit(most)
            for table in (self._tables.pending, self._tables.decision)
        )
        return sorted({*connection.scalars(recent), *(key for each in waiting for key in connection.scalars(each))})


def _has_others(connection: Connection, part: Part, needed: list[UUID]) -> bool:
    """Whether a part has claims beside these."""
    others = select(part.inbox.c.message_key).where(part.inbox.c.message_key.not_in(needed)).limit(1)
    return connection.scalar(others) is not None


def _move(connection: Connection, part: Part, late: Part, keys: list[UUID]) -> int:
    moved = 0
    for source, target in ((part.output, late.output), (part.history, late.history), (part.inbox, late.inbox)):
        moved = connection.execute(_copy(source, target), {"keys": keys}).rowcount
    return moved


def _copy(source: Table, target: Table) -> Any:
    names = [column.name for column in source.columns]
    wanted = select(*(source.c[name] for name in names)).where(
        source.c.message_key.in_(bindparam("keys", expanding=True))
    )
    return insert(target).from_select(names, wanted).execution_options(preserve_rowcount=True)
