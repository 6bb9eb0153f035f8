"""PostgreSQL through psycopg 3. No session state and no named statements, so that a pooler in transaction mode is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import URL, ColumnElement, Connection, Double, Engine, Table, bindparam, exc, func, literal_column, select, text
from sqlalchemy.dialects.postgresql import insert

from idemp.errors import ConfigurationError
from idemp.ports import Finding, Kind
from idemp.sql.dialects import CLAIM_SECONDS, Dialect, FastPath, no_right
from idemp.sql.fast import COMMIT_WAITS, GIVE_BACK, SimpleQueries, exchange, idle_driver, limit, reported, table_limit
from idemp.sql.tables import Tables

__all__ = ["PostgresqlDialect", "engine_options"]

MARK: Final = "SELECT set_config('idemp.mark', {}, true)"
TABLE_SECONDS: Final = 10.0  # how long a claim waits for its table
TRANSIENT: Final = ("40001", "40P01", "55P03")  # serialization, deadlock, lock
LOST: Final = ("08", "53", "57P", "58", "25006", "28000", "28P01", "3D000")
LOSES: Final = "commits are lost when the server dies"
ISOLATION: Final = ("read committed", "claims of one id fail, and run again")
WANTED: Final = {
    "fsync": ("on", LOSES),
    "full_page_writes": ("on", LOSES),
    "synchronous_commit": ("on", LOSES),
    "default_transaction_isolation": ISOLATION,
    "transaction_isolation": ISOLATION,
}
"""Settings, what they should be, and what another value means."""
RIGHTS: Final = text(
    "SELECT name, right_ AS right, has_table_privilege(name, right_) AS held "
    "FROM unnest(CAST(:names AS text[]), CAST(:rights AS text[])) AS needed (name, right_) WHERE to_regclass(name) IS NOT NULL "
    "UNION ALL SELECT sequence, 'USAGE', has_sequence_privilege(sequence, 'USAGE') FROM unnest(CAST(:counted AS text[])) AS name, "
    "pg_get_serial_sequence(name, 'id') AS sequence WHERE sequence IS NOT NULL AND to_regclass(name) IS NOT NULL "
    "UNION ALL SELECT CAST(CAST(oid AS regprocedure) AS text), 'EXECUTE', has_function_privilege(oid, 'EXECUTE') FROM pg_proc "
    "WHERE proname = 'pg_logical_emit_message' AND proargtypes[2] = CAST('text' AS regtype)"
)
SHORTER: Final = (
    "SELECT set_config(name, CASE WHEN present BETWEEN 1 AND {0} THEN present::bigint::text ELSE '{0}' END, true) FROM ("
    "SELECT name, extract(epoch FROM current_setting(name)::interval) * 1000 AS present "
    "FROM unnest(ARRAY['statement_timeout', 'idle_in_transaction_session_timeout']) AS name) AS limits"
)
LONGEST_MS: Final = 2**31 - 1
OWN: Final = ("25P03", "25P04")  # idle or open for too long: the handler's fault, although they end the connection


def engine_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the options of an engine of our own.

    Example:
        >>> from sqlalchemy import make_url
        >>> engine_options(make_url("postgres://shop@localhost/shop"))[0].drivername
        'postgresql+psycopg'
    """
    alive = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
    given = {name: value for name, value in alive.items() if name not in url.query}
    arguments = {"prepare_threshold": None, "connect_timeout": 10, **given}
    return url.set(drivername="postgresql+psycopg"), {"connect_args": arguments}


def _same(key: UUID) -> UUID:
    return key


MARKED: Final = "current_setting('idemp.mark',true)"


class PostgresqlDialect(Dialect):
    """PostgreSQL.

    Example:
        >>> PostgresqlDialect().classify(ValueError()) is None
        True
    """

    now: ColumnElement[float] = literal_column("extract(epoch FROM statement_timestamp())::double precision", Double())
    key: Callable[[UUID], Any] = staticmethod(_same)
    insert: Callable[[Table], Any] = staticmethod(insert)
    refused_words = frozenset({"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE", "RESET ALL"})
    deletes_in_queries = True
    unmarked = "a rollback, or RESET ALL"
    session_words = frozenset({"SET", "RESET", "DISCARD", "LISTEN", "UNLISTEN", "LOAD", "DECLARE"})
    local_words = frozenset({"LOCAL", "CONSTRAINTS", "TRANSACTION"})
    shows_early = True  # with synchronous_commit=off

    def autocommits(self, connection: Connection) -> bool:
        driver: Any = connection.connection.dbapi_connection
        return bool(driver.autocommit)

    def schema(self, engine: Engine, table: str) -> str | None:
        with engine.connect() as connection:
            name = _value(
                connection,
                "SELECT coalesce((SELECT relnamespace::regnamespace::text FROM pg_class "  # noqa: S608
                f"WHERE oid = to_regclass('{table}')), quote_ident(current_schema()))",
            )
        if name is None:
            raise ConfigurationError("the search_path names no schema that exists: create one, or set search_path")
        return name[1:-1].replace('""', '"') if name.startswith('"') else name

    def fast_path(self, engine: Engine, tables: Tables) -> FastPath | None:
        return None if engine.driver == "asyncpg" else SimpleQueries(engine, tables, (TABLE_SECONDS, CLAIM_SECONDS))

    def mark(self, connection: Connection, name: str, inbox: Table) -> None:
        _run(connection, *_limits(connection, inbox, CLAIM_SECONDS), mark=name)

    @contextmanager
    def alone(self, connection: Connection, name: str) -> Iterator[None]:
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))
        yield

    def claimed(self, connection: Connection) -> None:
        _run(connection, GIVE_BACK)

    @contextmanager
    def limited(self, connection: Connection, inbox: Table, wait: float) -> Iterator[None]:
        _run(connection, *_limits(connection, inbox, wait))
        yield
        _run(connection, GIVE_BACK)

    @contextmanager
    def handler_limited(self, connection: Connection, seconds: float) -> Iterator[None]:
        _run(connection, SHORTER.format(min(max(1, round(seconds * 1000)), LONGEST_MS)))
        yield  # the limits end with the transaction

    @contextmanager
    def impatient(self, connection: Connection) -> Iterator[None]:
        _run(connection, limit(CLAIM_SECONDS))
        yield

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:
        driver: Any = error.orig
        if getattr(driver, "sqlstate", None) not in ("55P03", "57014"):
            return False
        context = (
            driver.diag.context if isinstance(driver, psycopg.Error) else getattr(driver.__cause__, "context", "")
        )  # asyncpg's
        return inbox.name in (context or "")  # quoted, in the language of the server

    def let_commit_wait(self, connection: Connection) -> None:
        _run(connection, COMMIT_WAITS)

    def prove(self, connection: Connection, name: str) -> bool:
        return _value(connection, "SELECT current_setting('idemp.mark', true)") == name

    def mark_within(self, connection: Connection, name: str) -> None:
        _value(connection, f"SELECT set_config('idemp.mark',concat({MARKED},'/{name}'),true)")

    def prove_within(self, connection: Connection, name: str) -> bool:
        length = len(name) + 1
        rest = f"set_config('idemp.mark',left({MARKED},-{length}),true)||'.'"
        return bool(_value(connection, f"SELECT CASE right({MARKED},{length}) WHEN '/{name}' THEN {rest} END"))

    def is_open(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        if isinstance(driver, psycopg.BaseConnection):
            return driver.info.transaction_status == TransactionStatus.INTRANS
        return bool(driver.is_in_transaction())

    def abandon(self, connection: Connection, *, committed: bool) -> None:  # noqa: ARG002 - the driver knows
        adapted: Any = connection.connection.dbapi_connection
        driver: Any = connection.connection.driver_connection
        if not isinstance(driver, psycopg.BaseConnection):
            adapted.rollback()
            if driver.is_in_transaction():
                raise exc.InvalidRequestError("the handler has left a transaction of the driver open")
            return
        driver = idle_driver(connection)
        if driver.info.transaction_status != TransactionStatus.IDLE:
            adapted.rollback()
        if driver.row_factory is not tuple_row or driver.autocommit:
            raise psycopg.ProgrammingError(
                "the handler has left a row_factory or autocommit on the connection for others to meet"
            )

    def check_rights(self, connection: Connection, tables: Tables) -> list[Finding]:
        preparer = connection.dialect.identifier_preparer
        rights = {preparer.format_table(table): rights for table, rights in tables.rights.items()}
        counted = [preparer.format_table(tables.message)]
        schema = f"{preparer.quote_schema(tables.schema)}." if tables.schema else ""
        version = f"{schema}{tables.version_table}"
        needed = [(name, right) for name, rights_ in [*rights.items(), (version, ("SELECT",))] for right in rights_]
        asked = {"names": [name for name, _ in needed], "rights": [right for _, right in needed], "counted": counted}
        found = connection.execute(RIGHTS, asked).all()
        missing: dict[str, list[str]] = {}
        for each in found:
            if not each.held:
                missing.setdefault(each.name, []).append(each.right)
        if not missing:
            return []
        role = preparer.quote(connection.scalar(text("SELECT current_user")))
        sequences = [name for name, kind in dict.fromkeys((each.name, each.right) for each in found) if kind == "USAGE"]
        wanted = [*rights.items(), (version, ("SELECT",)), *((f"SEQUENCE {name}", ("USAGE",)) for name in sequences)]
        wanted += [(f"FUNCTION {each.name}", ("EXECUTE",)) for each in found if each.right == "EXECUTE" and not each.held]
        return [no_right(role, missing, [f"GRANT {', '.join(rights_)} ON {name} TO {role};" for name, rights_ in wanted])]

    def check(self, connection: Connection, tables: Tables) -> list[Finding]:  # noqa: ARG002
        found = _check_settings(connection)
        driver: Any = connection.connection.driver_connection
        if getattr(driver, "prepare_threshold", None) is None:
            return found
        if _value(connection, "SELECT pg_backend_pid()") == str(driver.info.backend_pid):
            return found
        text = "there is a pooler, before which statements that clients name are mixed up, so that effects are lost"
        return [*found, Finding("red", text, "create the engine with connect_args={'prepare_threshold': None}")]

    def kind(self, driver: BaseException, error: BaseException) -> Kind | None:
        of_asyncpg = type(driver).__module__.startswith("asyncpg.")
        if driver is error and not isinstance(driver, psycopg.Error) and not of_asyncpg:
            return None
        state = getattr(driver, "sqlstate", None)
        if state is None:  # of the driver itself: the connection is closed
            gone = isinstance(error, exc.DBAPIError) and error.connection_invalidated
            if of_asyncpg or type(driver).__module__.endswith(".asyncpg"):  # which has one class for lost and misused connections
                return Kind.LOST if gone or "closed" in str(driver) or isinstance(driver, OSError) else Kind.OTHER
            lost = (psycopg.OperationalError, psycopg.InterfaceError, exc.InterfaceError, exc.OperationalError)
            return Kind.LOST if gone or isinstance(driver, lost) or isinstance(error, lost) else Kind.OTHER
        if state in OWN:
            return Kind.OTHER
        return Kind.TRANSIENT if state in TRANSIENT else Kind.LOST if state.startswith(LOST) else Kind.OTHER


def _check_settings(connection: Connection) -> list[Finding]:
    """Return settings of the server with which commits are lost, or claims fail and run again."""
    found, preparer = [], connection.dialect.identifier_preparer
    role, database = (preparer.quote(name) for name in connection.execute(text("SELECT current_user, current_database()")).one())
    places = {
        "database": f"ALTER DATABASE {database} RESET {{name}};",
        "user": f"ALTER ROLE {role} RESET {{name}};",
        "database user": f"ALTER ROLE {role} IN DATABASE {database} RESET {{name}};",
        "client": "remove {name} from the options of the database URL",
        "session": "create the engine with isolation_level='READ COMMITTED'",
        "command line": "start the server without {name}",
    }
    asked = text("SELECT name, setting, source FROM pg_settings WHERE name IN :names").bindparams(
        bindparam("names", list(WANTED), expanding=True)
    )
    rows = {row.name: row for row in connection.execute(asked)}
    if rows["transaction_isolation"].setting == ISOLATION[0]:
        del rows["default_transaction_isolation"]  # the engine sets it
    elif rows["default_transaction_isolation"].setting != ISOLATION[0]:
        del rows["transaction_isolation"]  # which comes from there
    for row in rows.values():
        wanted, means = WANTED[row.name]
        if row.setting != wanted and not (row.name == "synchronous_commit" and row.setting != "off"):
            anywhere = f"ALTER SYSTEM SET {row.name} = '{wanted}';\nSELECT pg_reload_conf();"
            fix = places.get(row.source, anywhere).format(name=row.name)
            found.append(Finding("yellow", f"{row.name} is {row.setting}: {means}", fix))
    return found


def _limits(connection: Connection, inbox: Table, wait: float) -> list[str]:
    """Return the statements before a claim: the table first, so that waiting for a migration is not taken for waiting for an id."""
    table = connection.dialect.identifier_preparer.format_table(inbox)
    return [table_limit(TABLE_SECONDS), f"LOCK TABLE ONLY {table} IN ROW EXCLUSIVE MODE", limit(wait)]


def _run(connection: Connection, *statements: str, mark: str = "") -> None:
    """Run statements of idemp's below SQLAlchemy, whose listeners look at those of the handler; in one message if possible.

    Args:
        connection: In a transaction, or about to begin one.
        statements: Without parameters.
        mark: Marks the transaction.
    """
    asyncpg = connection.dialect.driver == "asyncpg"
    with reported(connection, statements[0]):
        if not asyncpg:
            idle_driver(connection)
            statements = ("; ".join([*statements, MARK.format(f"'{mark}'")] if mark else statements),)
        cursor = connection.connection.cursor()  # which begins the transaction
        for statement in statements:
            cursor.execute(statement)
        if asyncpg and mark:  # as a parameter, because asyncpg prepares each text
            cursor.execute(MARK.format("$1"), (mark,))
        cursor.close()


def _value(connection: Connection, statement: str) -> str | None:
    """Return the text that a statement of idemp's asks for."""
    if connection.dialect.driver != "asyncpg":
        answer = exchange(connection, statement)[-1].get_value(0, 0)
        return None if answer is None else answer.decode()
    with reported(connection, statement):
        cursor = connection.connection.cursor()
        cursor.execute(statement)
        row = cursor.fetchone()
        cursor.close()
    return row[0] if row else None
