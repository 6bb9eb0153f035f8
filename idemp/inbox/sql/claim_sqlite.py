"""Claims on SQLite, past SQLAlchemy: its statements cost the process more than the database's work does."""

from __future__ import annotations

import sqlite3
from datetime import UTC
from typing import TYPE_CHECKING, Any

from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import (
    INBOX_COLUMNS,
    SAVEPOINT,
    ClaimDialect,
    StillWriting,
    output_rows,
    qualified,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection

    from idemp.inbox.sql.claiming import Handled
    from idemp.inbox.sql.due import Due
    from idemp.inbox.sql.tables import Part, Tables

_OUTPUT_COLUMNS = (
    "consumer_id", "message_key", "output_id", "ordinal", "kind", "exchange", "routing_key", "envelope", "body",
)  # fmt: skip
_PENDING_COLUMNS = ("consumer_id", "message_key", "output_id", "ordinal", "attempts", "due_at", "broker_id")


class SqliteDialect(ClaimDialect):
    """SQLite: one writer at a time, so nobody ever holds the same id elsewhere; a busy database is a retry."""

    def __init__(self, tables: Tables | Part) -> None:
        super().__init__(tables)

        def inserting(table: Any, columns: Sequence[str]) -> str:
            return f"INSERT INTO {qualified(table)} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"

        self._claim = f"{inserting(tables.inbox, INBOX_COLUMNS)} ON CONFLICT (consumer_id, message_key) DO NOTHING"
        self._store = inserting(tables.output, _OUTPUT_COLUMNS)
        self._pend = inserting(tables.pending, _PENDING_COLUMNS)

    def begin(self, connection: Connection) -> None:
        """Take the write lock first: a transaction that reads and then writes may find its snapshot outdated."""
        if not getattr(connection.connection.dbapi_connection, "in_transaction", False):
            _run(connection, "BEGIN IMMEDIATE")
        _run(connection, f"SAVEPOINT {SAVEPOINT}")

    def is_over(self, connection: Connection) -> bool:
        """The driver knows."""
        return not _driver(connection).in_transaction

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT; the write lock is ours."""
        del wait
        key, claimed_at = row["message_key"].bytes, _moment(row["claimed_at"])
        values = {**row, "message_key": key, "claimed_at": claimed_at}
        inserted = _run(connection, self._claim, [values[name] for name in INBOX_COLUMNS]).rowcount
        return True if inserted == 1 else None

    def store_outputs(self, connection: Connection, handled: Handled, due: Due | None) -> object | None:
        """Two INSERTs."""
        places = [(key["consumer_id"], key["message_key"].bytes) for key, outputs in handled for _ in outputs]
        rows, names = output_rows(handled), _OUTPUT_COLUMNS[3:]
        each = list(zip(places, rows, strict=True))
        values = [(*place, row["output_id"].bytes, *(row[name] for name in names)) for place, row in each]
        _run_many(connection, self._store, values)
        if due is not None:
            waiting = []
            for place, row in each:
                attempts, due_at, broker_id = due.of(row["kind"])
                waiting.append((*place, row["output_id"].bytes, row["ordinal"], attempts, _moment(due_at), broker_id))
            _run_many(connection, self._pend, waiting)
        return None

    def is_same_transaction(self, connection: Connection, claimed: object | None, stored: object | None) -> bool:
        """As for all, without SQLAlchemy in between.

        Raises:
            StillWriting: a statement is in the middle of its rows.
        """
        del claimed, stored
        try:
            _driver(connection).execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
        except sqlite3.Error as error:
            if "statements in progress" in str(error):
                raise StillWriting from error
            meant = failures.told(connection, error)
            if failures.translate(meant) is not None:
                raise meant from error
            return False
        return True


def _driver(connection: Connection) -> sqlite3.Connection:
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver


def _run(connection: Connection, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
    try:
        return _driver(connection).execute(statement, values)
    except sqlite3.Error as error:
        raise failures.told(connection, error) from error


def _run_many(connection: Connection, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    try:
        _driver(connection).executemany(statement, rows)
    except sqlite3.Error as error:
        raise failures.told(connection, error) from error


def _moment(value: datetime) -> str:
    """As SQLAlchemy keeps it."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
