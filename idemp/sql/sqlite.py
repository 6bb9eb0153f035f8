"""SQLite: one writer at a time, so each transaction of idemp takes the write lock first."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    URL,
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
from idemp.ports import Finding, Kind
from idemp.sql.dialects import Dialect, autocommit_refused
from idemp.sql.tables import Tables

__all__ = ["SqliteDialect", "engine_options"]

BUSY_SECONDS: Final = 10
FULL: Final = 2  # of PRAGMA synchronous: COMMIT waits for the disk
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

BEGIN: Final = "BEGIN IMMEDIATE"


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
        try:  # in place of _run(), because each transaction begins here
            connection.connection.cursor().execute(BEGIN)
        except sqlite3.Error as error:
            raise exc.DBAPIError.instance(BEGIN, None, error, sqlite3.Error) from error

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
        url, options = engine_options(make_url(engine.url).set(database=queues))
        return create_engine(url, **pool, **options)

    def lock(self, rows: Select[Any]) -> Select[Any]:
        return rows  # BEGIN IMMEDIATE has locked all

    @contextmanager
    def limited(self, connection: Connection, inbox: Table, wait: float) -> Iterator[None]:  # noqa: ARG002
        before = _run(connection, "PRAGMA busy_timeout").fetchone()[0]
        _run(connection, f"PRAGMA busy_timeout = {round(wait * 1000)}")
        try:
            yield
        finally:
            _run(connection, f"PRAGMA busy_timeout = {before}")

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:  # noqa: ARG002 - there is one lock for all ids
        return self.kind(error.orig or error, error) is Kind.TRANSIENT

    def check(self, connection: Connection, tables: Tables) -> list[Finding]:  # noqa: ARG002
        if _run(connection, "PRAGMA synchronous").fetchone()[0] >= FULL:
            return []
        text = "PRAGMA synchronous of the engine is not FULL: commits are lost when the machine loses power"
        return [Finding("yellow", text, "set PRAGMA synchronous = FULL when the engine connects")]

    def mark(self, connection: Connection, name: str, _inbox: Table) -> None:
        _run(connection, f"SAVEPOINT {name}")

    def mark_within(self, connection: Connection, name: str) -> None:
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


def engine_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the options of an engine of our own.

    Example:
        >>> engine_options(make_url("sqlite:///shop.db"))[1]
        {'connect_args': {'timeout': 10}}
    """
    return url, {} if "timeout" in url.query else {"connect_args": {"timeout": BUSY_SECONDS}}


def _run(connection: Connection, statement: str) -> Any:
    """Run a statement of idemp's below SQLAlchemy, whose listeners look at those of the handler; return its cursor."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(statement)
    except sqlite3.Error as error:
        raise exc.DBAPIError.instance(statement, None, error, sqlite3.Error) from error
    return cursor
