"""Claims on SQLite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from idemp.inbox.sql.claiming import INBOX_COLUMNS, INBOX_TYPES, ClaimDialect, qualified, typed
from idemp.inbox.sql.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from sqlalchemy import Connection


class SqliteDialect(ClaimDialect):
    """SQLite: one writer at a time, so nobody ever holds the same id elsewhere; a busy database is a retry."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        columns = ", ".join(INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in INBOX_COLUMNS)
        self._claim = text(
            f"INSERT INTO {qualified(tables.inbox)} ({columns}) VALUES ({values}) "
            "ON CONFLICT (consumer_id, message_key) DO NOTHING"
        ).bindparams(*typed(INBOX_TYPES))

    def begin(self, connection: Connection) -> None:
        """Take the write lock first: a transaction that reads and then writes may find its snapshot outdated."""
        if not getattr(connection.connection.dbapi_connection, "in_transaction", False):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        super().begin(connection)

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT; the write lock is ours."""
        del wait
        return True if connection.execute(self._claim, row).rowcount == 1 else None
