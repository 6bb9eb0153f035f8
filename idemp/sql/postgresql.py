"""PostgreSQL through psycopg 3. No session state and no named statements, so that a pooler in transaction mode is safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import URL, ColumnElement, Connection, Double, Engine, Insert, Select, Table, exc, literal_column
from sqlalchemy.dialects.postgresql import insert

from idemp.errors import ConfigurationError
from idemp.ports import Kind
from idemp.sql.dialects import FastPath
from idemp.sql.fast import SimpleQueries, driver_of, idle_driver, reported
from idemp.sql.tables import Tables

__all__ = ["PostgresqlDialect", "engine_options"]

CLAIM_SECONDS: Final = 2  # how long a claim waits for another transaction with its id
TABLE_SECONDS: Final = 10  # and for its table
TRANSIENT: Final = ("40001", "40P01", "55P03")  # serialization, deadlock, lock
LOST: Final = ("08", "53", "57P", "58", "25006", "28000", "28P01", "3D000")
OWN: Final = ("25P03", "25P04")  # idle or open for too long: the handler's fault, although they end the connection


def engine_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the arguments of psycopg for an engine of our own.

    Example:
        >>> from sqlalchemy import make_url
        >>> engine_options(make_url("postgres://shop@localhost/shop"))[0].drivername
        'postgresql+psycopg'
    """
    alive = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
    given = {name: value for name, value in alive.items() if name not in url.query}
    return url.set(drivername="postgresql+psycopg"), {"prepare_threshold": None, "connect_timeout": 10, **given}


def _same(key: UUID) -> UUID:
    return key


class PostgresqlDialect:
    """PostgreSQL.

    Example:
        >>> PostgresqlDialect().classify(ValueError()) is None
        True
    """

    now: ColumnElement[float] = literal_column("extract(epoch FROM statement_timestamp())::double precision", Double())
    key: Callable[[UUID], Any] = staticmethod(_same)
    refused_words = frozenset({"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE"})
    session_words = frozenset({"SET", "RESET", "DISCARD", "LISTEN", "UNLISTEN", "LOAD", "DECLARE"})

    def begin(self, connection: Connection) -> None:
        if driver_of(connection).autocommit:
            # Behind a rollback, each further statement of a handler would be an effect without a claim.
            raise ConfigurationError(
                "the engine commits each statement: create it without isolation_level='AUTOCOMMIT', and without connect_args or a "
                "listener that set autocommit of the driver's connection"
            )

    def queue_engine(self, engine: Engine) -> Engine:
        return engine

    def schema(self, engine: Engine, table: str) -> str | None:
        with engine.connect() as connection:
            cursor = driver_of(connection).cursor(row_factory=tuple_row)
            found = cursor.execute(
                "SELECT coalesce((SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass(%s)), "
                "quote_ident(current_schema()))",
                [table],
            ).fetchone()
        if found is None or found[0] is None:
            raise ConfigurationError("the search_path names no schema that exists: create one, or set search_path")
        name = str(found[0])
        return name[1:-1].replace('""', '"') if name.startswith('"') else name

    def insert_new(self, table: Table, key: Sequence[str]) -> Insert:
        return insert(table).on_conflict_do_nothing(index_elements=key)

    def upsert(self, table: Table, key: Sequence[str], values: dict[str, Any], where: Any = None) -> Insert:
        new = insert(table)
        changes = {name: new.excluded[name] if value is None else value for name, value in values.items()}
        return new.on_conflict_do_update(index_elements=key, set_=changes, where=where)

    def lock(self, rows: Select[Any]) -> Select[Any]:
        return rows.with_for_update(skip_locked=True)

    def fast_path(self, engine: Engine, tables: Tables) -> FastPath | None:
        return SimpleQueries(engine, tables, (TABLE_SECONDS, CLAIM_SECONDS))

    def mark(self, connection: Connection, name: str, inbox: Table) -> None:
        # The lock of the table comes first, so that waiting for a migration is not taken for waiting for an id.
        table = connection.dialect.identifier_preparer.format_table(inbox)
        limits = [f"SET LOCAL lock_timeout = '{seconds}s'" for seconds in (TABLE_SECONDS, CLAIM_SECONDS)]
        lock, mark = f"LOCK TABLE ONLY {table} IN ROW EXCLUSIVE MODE", f"SELECT set_config('idemp.mark', '{name}', true)"
        _run(connection, "; ".join((limits[0], lock, limits[1], mark)))

    def claimed(self, connection: Connection) -> None:
        _run(connection, "SET LOCAL lock_timeout TO DEFAULT")

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:
        driver = error.orig
        if not isinstance(driver, psycopg.Error) or driver.sqlstate not in ("55P03", "57014"):
            return False
        return inbox.name in (driver.diag.context or "")  # quoted, in the language of the server

    def prove(self, connection: Connection, name: str) -> bool:
        found = _run(connection, f"SELECT current_setting('idemp.mark', true) = '{name}'").fetchone()
        return bool(found and found[0])

    def is_open(self, connection: Connection) -> bool:
        return bool(driver_of(connection).info.transaction_status == TransactionStatus.INTRANS)

    def abandon(self, connection: Connection) -> None:
        driver = idle_driver(connection)
        if driver.info.transaction_status != TransactionStatus.IDLE:
            driver.rollback()
        if driver.row_factory is not tuple_row or driver.autocommit:
            raise psycopg.ProgrammingError(
                "the handler has left a row_factory or autocommit on the connection for others to meet"
            )

    def classify(self, error: BaseException) -> Kind | None:
        if isinstance(error, exc.TimeoutError):  # the pool has no connection left
            return Kind.LOST
        driver = error.orig if isinstance(error, exc.DBAPIError) else error
        if not isinstance(driver, psycopg.Error):
            gone = isinstance(error, exc.PendingRollbackError) and error.code == "8s2b"
            return Kind.LOST if gone else Kind.OTHER if isinstance(error, exc.SQLAlchemyError) else None
        state = driver.sqlstate
        if state is None:  # psycopg's own: the connection is closed
            return Kind.LOST if isinstance(driver, psycopg.OperationalError | psycopg.InterfaceError) else Kind.OTHER
        if state in OWN:
            return Kind.OTHER
        return Kind.TRANSIENT if state in TRANSIENT else Kind.LOST if state.startswith(LOST) else Kind.OTHER


def _run(connection: Connection, statement: str) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run statements of idemp's in one message, below SQLAlchemy, whose listeners look at those of the handler."""
    with reported(connection, statement):
        return idle_driver(connection).cursor(row_factory=tuple_row).execute(statement.encode())
