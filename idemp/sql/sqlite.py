"""SQLite: one writer at a time, so each transaction of idemp takes the write lock first."""

from __future__ import annotations

import sqlite3
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    NullPool,
    Select,
    Table,
    create_engine,
    exc,
    literal_column,
    make_url,
)
from sqlalchemy.dialects.sqlite import insert

from idemp.errors import ConfigurationError
from idemp.ports import Kind
from idemp.sql.dialects import Dialect, autocommit_refused

__all__ = ["SqliteDialect"]

BUSY_SECONDS: Final = 10
LEGACY: Final = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, since Python 3.12
TRANSIENT: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
LOST: Final = frozenset(
    {
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)


class SqliteDialect(Dialect):
    """SQLite through Python's own driver.

    Example:
        >>> SqliteDialect().classify(ValueError()) is None
        True
    """

    now: ColumnElement[float] = literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double())
    key = staticmethod(attrgetter("bytes"))
    insert = staticmethod(insert)
    refused_words = frozenset({"BEGIN", "COMMIT", "END", "ROLLBACK"})
    session_words = frozenset({"PRAGMA", "ATTACH", "DETACH"})

    def begin(self, connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        if driver.isolation_level is None or getattr(driver, "autocommit", LEGACY) != LEGACY:
            raise autocommit_refused()
        info = connection.info
        if "idemp" not in info:  # the engine may be the user's, and have had connections before
            for pragma in (f"busy_timeout = {BUSY_SECONDS * 1000}", "synchronous = FULL"):
                _run(connection, f"PRAGMA {pragma}")
            info["idemp"] = True
        _run(connection, "BEGIN IMMEDIATE")

    def autocommits(self, connection: Connection) -> bool:
        driver: Any = connection.connection.dbapi_connection
        mode = getattr(driver, "autocommit", LEGACY)
        automatic = mode is True or (mode == LEGACY and driver.isolation_level is None)
        return automatic and not self.is_open(connection)  # a listener of the user's may have begun a transaction

    def queue_engine(self, engine: Engine) -> Engine:
        file = engine.url.database
        if not file or file == ":memory:" or "mode=memory" in file:
            raise ConfigurationError("SQLite in memory is one connection for all: use a file, such as sqlite:///shop.db")
        stem, dot, suffix = file.rpartition(".")
        queues = f"{stem}.broker.{suffix}" if dot and "/" not in suffix else f"{file}.broker"
        pool: dict[str, Any] = {"poolclass": NullPool} if engine.dialect.is_async else {}  # nobody could close it on its loop
        return create_engine(make_url(engine.url).set(database=queues), **pool)

    def lock(self, rows: Select[Any]) -> Select[Any]:
        return rows  # BEGIN IMMEDIATE has locked all

    def mark(self, connection: Connection, name: str, _inbox: Table) -> None:
        _run(connection, f"SAVEPOINT {name}")

    def prove(self, connection: Connection, name: str) -> bool:
        try:
            _run(connection, f"RELEASE {name}")
        except exc.OperationalError as error:
            if "no such savepoint" in str(error.orig):
                return False
            raise
        return True

    def is_open(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        return bool(driver.in_transaction)

    def abandon(self, connection: Connection, *, committed: bool) -> None:  # noqa: ARG002 - the driver knows
        driver: Any = connection.connection.driver_connection
        if driver.in_transaction:
            connection.connection.rollback()

    def kind(self, driver: BaseException, error: BaseException) -> Kind | None:  # noqa: ARG002
        if not isinstance(driver, sqlite3.Error):
            return None
        code = (getattr(driver, "sqlite_errorcode", None) or 0) & 0xFF
        return Kind.TRANSIENT if code in TRANSIENT else Kind.LOST if code in LOST else Kind.OTHER


def _run(connection: Connection, statement: str) -> None:
    """Run a statement of idemp's below SQLAlchemy, whose listeners look at those of the handler."""
    try:
        connection.connection.cursor().execute(statement)
    except sqlite3.Error as error:
        raise exc.DBAPIError.instance(statement, None, error, sqlite3.Error) from error
