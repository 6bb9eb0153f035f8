"""Taking back claims that a handler committed on its own, in the tables that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import delete, select

from idemp.inbox.sql.claiming import only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from idemp.inbox.sql.places import Places
    from idemp.inbox.sql.tables import Part, Tables

_KEY = ("consumer_id", "message_key")
_CLAIM = (*_KEY, "worker_id", "claimed_at")
_MOST_READ: Final = 500  # keys in one list


def withdraw(connection: Connection, places: Places, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, UUID]]:
    """Take back those of the claims that are still there as they were made; their consumers and keys.

    Raises:
        sqlalchemy.exc.DBAPIError: among others, where `Places.was_wrong` says so; then nothing of it is to be committed.
    """
    return [
        (row["consumer_id"], row["message_key"])
        for place, own in places.by_place(rows)
        for row in _still_there(connection, place.tables, own)
        if _withdrawn(connection, place.tables, row)
    ]


def _still_there(
    connection: Connection, tables: Tables | Part, rows: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Those of many claims that were committed: none, unless a handler did it, and that is seen with few statements."""
    inbox = tables.inbox
    found: set[UUID] = set()
    for start in range(0, len(rows), _MOST_READ):
        keys = [row["message_key"] for row in rows[start : start + _MOST_READ]]
        found.update(connection.scalars(only(select(inbox.c.message_key), inbox).where(
            inbox.c.consumer_id.in_({row["consumer_id"] for row in rows}), inbox.c.message_key.in_(keys)
        )))  # fmt: skip
    return [row for row in rows if row["message_key"] in found]


def _withdrawn(connection: Connection, tables: Tables | Part, row: Mapping[str, Any]) -> bool:
    inbox = tables.inbox
    ours = (inbox.c[name] == row[name] for name in _CLAIM)
    if connection.execute(only(delete(inbox), inbox).where(*ours)).rowcount == 0:
        return False
    claimed = only(select(inbox.c.message_key), inbox).where(*(inbox.c[name] == row[name] for name in _KEY))
    # Where autocommit was switched on, these were stored by themselves.
    for table in (tables.pending, tables.output, tables.decision):
        same = (table.c[name] == row[name] for name in _KEY)
        connection.execute(only(delete(table), table).where(*same, ~claimed.exists()))
    return True
