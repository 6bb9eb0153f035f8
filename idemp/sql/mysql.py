"""MariaDB and MySQL, through PyMySQL and aiomysql."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import ceil
from operator import attrgetter
from typing import Any, Final

from pymysql import MySQLError
from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Insert,
    Select,
    Table,
    bindparam,
    exc,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.mysql import insert

from idemp.errors import ConfigurationError, Unavailable
from idemp.ports import Finding, Kind
from idemp.sql.dialects import CLAIM_SECONDS, Dialect, no_right
from idemp.sql.tables import Tables

__all__ = ["MysqlDialect", "engine_options"]

UPGRADE_SECONDS: Final = 60  # how long an upgrade waits for another one
READ_SECONDS: Final = 300  # after which a server that says nothing counts as lost, a handler's long statements included
OLDEST: Final = {True: (10, 6), False: (8, 0, 1)}  # of MariaDB, of MySQL: SKIP LOCKED
NO_RIGHT: Final = frozenset({1142, 1143})  # to a table, to a column
NO_TABLE: Final = 1146
ALL: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
DUPLICATE, LOCK_WAIT, NO_SAVEPOINT = 1062, 1205, 1305
TRANSIENT: Final = frozenset({1020, LOCK_WAIT, 1213, 3572})  # changed, lock wait, deadlock, locked
LOST: Final = frozenset(
    int(number)
    for numbers in (
        "0 2002 2003 2006 2013 2014 2027 2045 2055 4031",  # the connection
        "1053 1077 1079 1152 1158 1159 1160 1161 1184 1927 3118 4151",  # shutting down, aborted, killed, locked account
        "1021 1037 1040 1041 1114 1135 1203 1226",  # disk, memory, connections
        "1047",  # a node of a cluster without the others
        "1044 1045 1049 1129 1130 1698 1820 1862",  # access, database
        "1290 1792 1836",  # read-only
    )
    for number in numbers.split()
)
SPELLINGS: Final = ("NO_BACKSLASH_ESCAPES", "ORACLE", "EMPTY_STRING_IS_NULL")
"""Modes that give statements another meaning than their author's."""
CHARACTER_SETS: Final = ("utf8mb4", "utf8mb3", "utf8")
ENDING: Final = (
    "BEGIN START COMMIT ROLLBACK XA ALTER TRUNCATE RENAME GRANT REVOKE LOCK UNLOCK ANALYZE OPTIMIZE REPAIR FLUSH INSTALL"
)


def engine_options(url: URL, *, asynchronous: bool = False) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the arguments of an engine of our own.

    At the default isolation, claims of different ids would wait for each other's gaps. Connections are given back in a clean state,
    so the pool need not send ROLLBACK.

    Example:
        >>> from sqlalchemy import make_url
        >>> engine_options(make_url("mariadb://shop@localhost/shop"))[0].drivername
        'mysql+pymysql'
    """
    limits = {"connect_timeout": 10}
    if not asynchronous:
        limits |= {"read_timeout": READ_SECONDS, "write_timeout": 60}
    given = {name: value for name, value in limits.items() if name not in url.query}
    options = {"connect_args": given, "isolation_level": "READ COMMITTED", "pool_reset_on_return": None}
    return url.set(drivername="mysql+aiomysql" if asynchronous else "mysql+pymysql"), options


class MysqlDialect(Dialect):
    """MariaDB and MySQL.

    Args:
        fast: Whether to limit the wait of a claim in its own statement, where the server can: MariaDB.

    Example:
        >>> MysqlDialect().classify(ValueError()) is None
        True
    """

    # UTC_TIMESTAMP knows no daylight saving time.
    now: ColumnElement[float] = literal_column("(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)", Double())
    key = staticmethod(attrgetter("bytes"))
    insert = staticmethod(insert)
    # Most statements that change tables or rights commit.
    refused_words = frozenset({*ENDING.split(), "CREATE", "DROP"})
    session_words = frozenset({"SET", "USE", "CREATE", "DROP", "HANDLER"})
    local_words = frozenset({"STATEMENT"})

    def __init__(self, *, fast: bool = True) -> None:
        self._fast = fast
        self._compiled: dict[tuple[Insert, str], Any] = {}

    def autocommits(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        return bool(driver.get_autocommit())

    def newest(self, rows: Select[Any]) -> Select[Any]:
        return rows.with_for_update(read=True)

    def schema(self, engine: Engine, table: str) -> str | None:  # noqa: ARG002 - there is one alone
        try:
            with engine.connect() as connection:
                name: str | None = connection.scalar(text("SELECT DATABASE()"))
        except TypeError as error:  # of a provider's ?ssl-mode=…
            raise ConfigurationError(f"the driver refuses an option of the URL ({error}): for TLS, write ?ssl_ca=FILE") from None
        if name is None:
            raise ConfigurationError("the URL names no database: write it as in mysql://HOST/DATABASE")
        return name

    def insert_new(self, table: Table, key: Sequence[str]) -> Insert:
        # INSERT IGNORE would ignore too much: texts that are cut, and columns without a value.
        return insert(table).on_duplicate_key_update({key[0]: table.c[key[0]]})

    def upsert(self, table: Table, key: Sequence[str], values: dict[str, Any], where: Any = None) -> Insert:  # noqa: ARG002
        new = insert(table)
        changes = {name: new.inserted[name] if value is None else value for name, value in values.items()}
        if where is not None:
            changes = {name: func.if_(where, value, table.c[name]) for name, value in changes.items()}
        return new.on_duplicate_key_update(changes)

    def claim_statement(self, inbox: Table) -> Insert:
        return insert(inbox)

    def claim(self, connection: Connection, statement: Insert, row: Mapping[str, Any], wait: float = CLAIM_SECONDS) -> bool:
        limit = f"innodb_lock_wait_timeout={_whole(wait)}"
        try:
            if self._fast and getattr(connection.dialect, "is_mariadb", False):
                key = (statement, connection.dialect.paramstyle)
                compiled = self._compiled.get(key) or statement.compile(dialect=connection.dialect)
                self._compiled[key], values = compiled, compiled.construct_params(row)
                names = compiled.positiontup  # of aiomysql
                connection.exec_driver_sql(
                    f"SET STATEMENT {limit} FOR {compiled}", tuple(values[name] for name in names) if names else values
                )
            else:
                with _impatient(connection, limit):
                    connection.execute(statement, row)
        except exc.IntegrityError as error:
            if _number(error.orig) == DUPLICATE and "PRIMARY" in str(error.orig.args[-1]):  # type: ignore[union-attr]
                return False
            raise
        return True

    @contextmanager
    def alone(self, connection: Connection, name: str) -> Iterator[None]:
        # Such a lock is one of the server, and no transaction's: its statements that make tables commit.
        lock = func.concat(func.left(func.md5(func.database()), 32), name)
        if not connection.scalar(select(func.get_lock(lock, UPGRADE_SECONDS))):
            raise Unavailable(f"another process has been at {name} for {UPGRADE_SECONDS} s: wait for it, and run this again")
        try:
            yield
        finally:
            connection.scalar(select(func.release_lock(lock)))

    def impatient(self, connection: Connection) -> AbstractContextManager[None]:
        return _impatient(connection, f"innodb_lock_wait_timeout={_whole(CLAIM_SECONDS)}")

    @contextmanager
    def handler_limited(self, connection: Connection, seconds: float) -> Iterator[None]:
        whole = max(1, ceil(seconds))
        dialect: Any = connection.dialect
        if dialect.is_mariadb:
            limits: dict[str, float] = {"max_statement_time": seconds, "idle_transaction_timeout": whole}
        else:  # MySQL limits SELECT only
            limits = {"max_execution_time": max(1, round(seconds * 1000)), "innodb_lock_wait_timeout": whole}
        before = _ask(connection, f"SELECT {', '.join(f'@@session.{name}' for name in limits)}")
        shorter = [min(old, new) if old else new for old, new in zip(before, limits.values(), strict=True)]
        _run(connection, f"SET {', '.join(f'{name} = {value}' for name, value in zip(limits, shorter, strict=True))}")
        try:
            yield
        finally:
            with suppress(exc.DBAPIError, exc.InvalidRequestError):  # the connection is gone, and its limits with it
                _run(connection, f"SET {', '.join(f'{name} = {value}' for name, value in zip(limits, before, strict=True))}")

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:  # noqa: ARG002 - a lock of another row costs a retry
        return _number(error.orig) == LOCK_WAIT

    def mark(self, connection: Connection, name: str, inbox: Table) -> None:  # noqa: ARG002
        _run(connection, "START TRANSACTION")  # SAVEPOINT alone begins none in the books of the driver
        _run(connection, f"SAVEPOINT {name}")

    def mark_within(self, connection: Connection, name: str) -> None:
        _run(connection, f"SAVEPOINT {name}")

    def prove(self, connection: Connection, name: str) -> bool:
        try:
            _run(connection, f"RELEASE SAVEPOINT {name}")
        except exc.DBAPIError as error:
            if _number(error.orig) == NO_SAVEPOINT:
                return False
            raise
        return True

    def is_open(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        return bool(driver.server_status & SERVER_STATUS_IN_TRANS)

    def abandon(self, connection: Connection, *, committed: bool) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.get_autocommit():
            raise exc.InvalidRequestError("the handler has left autocommit on the connection for others to meet")
        if not committed:  # the driver does not know: an answer with rows does not say that a transaction is open
            connection.connection.rollback()

    def check_rights(self, connection: Connection, tables: Tables) -> list[Finding]:
        """Try statements that change no row, since grants of roles and patterns are in many tables."""
        missing: dict[str, list[str]] = {}
        database, user = connection.exec_driver_sql("SELECT DATABASE(), CURRENT_USER()").one()
        role = "@".join(f"'{part}'" for part in user.rsplit("@", 1))
        grants = []
        columns = {table.name: next(iter(table.c)).name for table in tables.all}
        for name, rights in [
            *((table.name, rights) for table, rights in tables.rights.items()),
            (tables.version_table, ("SELECT",)),
        ]:
            # An INSERT that takes a conflict needs the right to UPDATE.
            needed = [right for right in ALL if right in rights or (right == "UPDATE" and "INSERT" in rights)]
            grants.append(f"GRANT {', '.join(needed)} ON {database}.{name} TO {role};")
            tried = {
                "SELECT": f"SELECT 1 FROM {name} WHERE 1 = 0",  # noqa: S608 - our own names
                "INSERT": f"INSERT INTO {name} SELECT * FROM {name} WHERE 1 = 0",  # noqa: S608
                "UPDATE": f"UPDATE {name} SET {columns.get(name)} = 1 WHERE 1 = 0",  # noqa: S608
                "DELETE": f"DELETE FROM {name} WHERE 1 = 0",  # noqa: S608
            }
            for right in needed:
                try:
                    connection.exec_driver_sql(tried[right])
                except exc.DBAPIError as error:
                    if _number(error.orig) in NO_RIGHT:
                        missing.setdefault(name, []).append(right)
                    elif _number(error.orig) != NO_TABLE:
                        raise
        return [no_right(user, missing, grants)] if missing else []

    def check(self, connection: Connection, tables: Tables) -> list[Finding]:
        dialect: Any = connection.dialect
        found = []
        if dialect.server_version_info < OLDEST[dialect.is_mariadb]:
            found.append(Finding("red", "the server is too old", "use MariaDB 10.6, MySQL 8.0.1 or later"))
        asked = "SELECT @@sql_mode AS modes, @@innodb_flush_log_at_trx_commit AS flushes, @@character_set_client AS characters"
        row = connection.execute(text(asked)).one()
        if modes := [mode for mode in SPELLINGS if mode in row.modes.split(",")]:
            text_ = f"the engine's connections read texts in another way (sql_mode {', '.join(modes)})"
            found.append(Finding("red", text_, "remove that from sql_mode"))
        if row.characters not in CHARACTER_SETS:
            text_ = f"drivers quote texts wrongly in the character set {row.characters}"
            found.append(Finding("red", text_, "write ?charset=utf8mb4 into the URL of the engine"))
        if "STRICT_" not in row.modes:
            text_ = "the engine's connections cut texts that are too long"
            found.append(Finding("red", text_, "add STRICT_TRANS_TABLES to sql_mode"))
        if row.flushes != 1:
            lost = "the server loses commits when it dies (innodb_flush_log_at_trx_commit)"
            found.append(Finding("yellow", lost, "SET GLOBAL innodb_flush_log_at_trx_commit = 1;"))
        if (level := connection.get_isolation_level()) != "READ COMMITTED":
            waits = f"claims wait for each other's gaps (isolation {level})"
            found.append(Finding("yellow", waits, "create the engine with isolation_level='READ COMMITTED'"))
        names = [table.name for table in tables.all]
        engines = text(
            "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE() AND engine <> 'InnoDB' "
            "AND table_name IN :names"
        ).bindparams(bindparam("names", names, expanding=True))
        return found + [
            Finding("red", f"{name} has no transactions", f"ALTER TABLE {name} ENGINE = InnoDB;")
            for name in connection.scalars(engines)
        ]

    def kind(self, driver: BaseException, error: BaseException) -> Kind | None:
        number = _number(driver)
        if number is None:
            return None
        lost = number in LOST or (isinstance(error, exc.DBAPIError) and error.connection_invalidated)
        return Kind.TRANSIENT if number in TRANSIENT else Kind.LOST if lost else Kind.OTHER


def _number(driver: BaseException | None) -> int | None:
    """Return the number of an error; -1 if it has none. Its SQLSTATE says less."""
    if not isinstance(driver, MySQLError):
        return None
    first = driver.args[0] if driver.args else None
    return first if isinstance(first, int) else -1


@contextmanager
def _impatient(connection: Connection, limit: str) -> Iterator[None]:
    _run(connection, f"SET @idemp_wait = @@SESSION.innodb_lock_wait_timeout, SESSION {limit}")
    try:
        yield
    finally:
        if not connection.invalidated:  # a session has the limit, not a transaction
            _run(connection, "SET SESSION innodb_lock_wait_timeout = @idemp_wait")


def _whole(seconds: float) -> int:
    return max(1, ceil(seconds))


def _ask(connection: Connection, statement: str) -> Sequence[Any]:
    cursor = connection.connection.cursor()
    try:
        cursor.execute(statement)
        return cursor.fetchone() or ()
    finally:
        cursor.close()


def _run(connection: Connection, statement: str) -> None:
    """Run a statement of idemp's below SQLAlchemy, whose listeners look at those of the handler."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(statement)
    except MySQLError as error:
        raise exc.DBAPIError.instance(statement, None, error, MySQLError) from error
    finally:
        cursor.close()
