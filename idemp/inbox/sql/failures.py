"""What the exceptions of SQLAlchemy and the drivers mean for a whole delivery."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from idemp.credentials import without_credentials
from idemp.errors import SchemaError, StoreError, StoreUnavailable, TransientStoreError
from idemp.showing import text_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

# PostgreSQL: SQLSTATE, by Appendix A of its manual.
_PG_TRANSIENT: Final = {"40001", "40P01", "55P03"}
_PG_HANDLERS_OWN: Final = {"25P03", "25P04"}  # its transaction lay idle, or lasted, for too long
_PG_UNAVAILABLE_CLASSES: Final = ("08", "53", "57P", "58")
_PG_UNAVAILABLE: Final = {"25006", "28000", "28P01", "3D000"}

# The user lacks a right. MySQL's family: on a database, a table, a column, for a global privilege, on a routine.
_PG_DENIED: Final = "42501"
_MYSQL_DENIED: Final = frozenset({1044, 1142, 1143, 1227, 1370})
_GRANT: Final = (
    "Grant it (docs/how-to/least-privilege.md); `idemp doctor` has the statement. Where it is about a daily table, run "
    "`idemp db partition CONSUMER` as the tables' owner."
)

# PgBouncer's words; their SQLSTATE is that of any protocol violation.
_STATEMENT_MODE: Final = "statement pooling mode"
OTHER_POOL_MODE: Final = "Set pool_mode = transaction, or session, in the pooler's settings (docs/how-to/poolers.md)."

_CONNECTION_GONE: Final = "8s2b"  # SQLAlchemy's code for statements on a connection that was invalidated

# MySQL and MariaDB: server and client error numbers.
_MYSQL_TRANSIENT: Final = {1205, 1213, 1020}
_MYSQL_UNAVAILABLE: Final = {
    0, 1021, 1037, 1040, 1041, 1045, 1049, 1053, 1077, 1079, 1114, 1129, 1130, 1135, 1152, 1158, 1159, 1160, 1161, 1184,
    1203, 1226, 1290, 1698, 1792, 1820, 1836, 1862, 1927, 2002, 2003, 2006, 2013, 2014, 2027, 2045, 2055, 3118, 4151,
}  # fmt: skip

_SQLITE_TRANSIENT: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_SQLITE_UNAVAILABLE: Final = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_PERM,
}  # fmt: skip

# Of these: the server answers, and takes no writes. It is a replica, it was set so, or its disk is full.
_PG_REFUSES_WRITES: Final = frozenset({"25006", "53100"})
_MYSQL_REFUSES_WRITES: Final = frozenset({1021, 1114, 1290, 1792, 1836})
# Of these: this session takes no writes; one that begins now, at another server after a failover, may take them.
_PG_READ_ONLY: Final = "25006"
_MYSQL_READ_ONLY: Final = frozenset({1290, 1792, 1836})
_SQLITE_REFUSES_WRITES: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL})

# Of these: the server answers, and has no more memory, disk or connections. A statement may be greedy, or the server full.
_PG_USED_UP_CLASS: Final = "53"
_MYSQL_USED_UP: Final = frozenset({1021, 1037, 1040, 1041, 1114, 1135, 1203, 1226})
_SQLITE_USED_UP: Final = frozenset({sqlite3.SQLITE_FULL})

_PG_NO_TABLE: Final = "42P01"
_MYSQL_NO_TABLE: Final = 1146
_PG_CANCELLED: Final = "57014"
_MYSQL_CANCELLED: Final = frozenset({1317, 1969, 3024})
_SQLITE_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_CLOSED_HERE: Final = "the connection was closed in this process"
_MAKE_THEM: Final = (
    "If it is one of idemp's, restore it from a backup; or run `idemp db upgrade`, which makes it anew, without what it "
    "held."
)
_RESTORE: Final = "Stop all processes that use it, restore the file from a backup, and start them again."
_LONGER: Final = (
    "Give this user a longer time (statement_timeout, max_statement_time), or look for what held the statement up."
)

UNFIT: Final = "idemp_unfit"
"""In a pooled connection's `info`: it is closed when it comes back (`pooling.py`)."""

# A lock that was waited for in vain; in SQLite the whole database is one.
_PG_LOCK_WAIT: Final = "55P03"
_MYSQL_LOCK_WAIT: Final = 1205


def translate(error: BaseException) -> StoreError | None:
    """The store error that an exception amounts to, `None` when it is the handler's own affair.

    Example:
        >>> translate(ValueError("quantity")) is None
        True
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable(f"No database connection became free: {error}.", fix="Raise the engine's pool_size.")
    if isinstance(error, exc.PendingRollbackError):
        lost = StoreUnavailable("The connection was lost in the middle of the handling.")
        return translate_chain(error) or (lost if error.code == _CONNECTION_GONE else None)
    if not isinstance(error, exc.DBAPIError):
        return None
    driver_error = error.orig
    if getattr(driver_error, "sqlstate", None) in _PG_HANDLERS_OWN:
        return None
    if is_statement_mode(driver_error):
        return StoreUnavailable(
            f"The pooler before the database allows no transactions: {first_line(driver_error)}.", fix=OTHER_POOL_MODE
        )
    if error.connection_invalidated or is_unavailable(driver_error):
        read_only = refuses_writes(driver_error)
        what = "takes no writes" if read_only else "can't be reached"
        away = StoreUnavailable(f"The database {what}: {first_line(driver_error)}.")
        away.refuses_writes = read_only
        away.used_up = is_used_up(driver_error)
        return away
    if is_transient(driver_error):
        return TransientStoreError(f"The database asks to try again: {first_line(driver_error)}.")
    return None


def refused(error: exc.SQLAlchemyError) -> StoreError:
    """What `translate` knows nothing better about, met by a statement of idemp's own.

    Example:
        >>> refused(exc.DBAPIError("DELETE", {}, sqlite3.OperationalError("no such table: idemp_inbox"))).message
        'A table is missing: no such table: idemp_inbox.'
        >>> refused(exc.DBAPIError("DELETE", {}, sqlite3.OperationalError("no such column: due_at"))).message
        'The database refuses: no such column: due_at.'
    """
    driver_error = getattr(error, "orig", None) or error
    line = first_line(driver_error)
    if is_missing_table(driver_error):
        return StoreError(f"A table is missing: {line}.", fix=_MAKE_THEM)
    if is_damaged(driver_error):
        return StoreError(f"The database file is damaged: {line}.", fix=_RESTORE)
    if is_denied(driver_error):
        return StoreError(_lacking(driver_error), fix=_GRANT)
    if is_timeout(driver_error):
        return StoreUnavailable(f"The database cancelled a statement of idemp's own: {line}.", fix=_LONGER)
    return StoreError(
        f"The database refuses: {line}.",
        fix="See with `idemp doctor` whether tables and rights are as they must be (docs/how-to/least-privilege.md).",
    )


def unwritable(table: str, error: exc.DBAPIError, rights: str) -> StoreError | SchemaError:
    """What it means that a probe could not write to a table; its rights are suspected where nothing else is known.

    Args:
        table: its name.
        error: what the database said.
        rights: which rights the user needs.
    """
    known = refused(error)
    if is_missing_table(error.orig) or is_damaged(error.orig) or is_timeout(error.orig):
        return known
    return SchemaError(f"The table {table} can't be written: {first_line(error.orig)}.", fix=rights)


def denied(error: exc.SQLAlchemyError) -> StoreUnavailable | None:
    """The database denies this user what idemp's own statement needs; no message is at fault, so consumption pauses.

    Example:
        >>> denied(exc.DBAPIError("DELETE", {}, sqlite3.OperationalError("no such table: idemp_inbox"))) is None
        True
    """
    driver_error = getattr(error, "orig", None)
    return StoreUnavailable(_lacking(driver_error), fix=_GRANT) if is_denied(driver_error) else None


def told(connection: Connection, error: Exception) -> exc.DBAPIError:
    """A driver's error as SQLAlchemy would have raised it, for statements of idemp's own that go past it.

    A connection that is lost leaves the pool, and all that are older than the loss with it.
    """
    dialect = connection.dialect
    if is_read_only(error):
        connection.info[UNFIT] = True
    lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)  # type: ignore[arg-type]
    if lost:
        with suppress(exc.SQLAlchemyError):
            connection.exec_driver_sql("SELECT 1")  # never sent: so SQLAlchemy learns of it, and drops the whole pool
        connection.invalidate(error)
    base: type[Exception] = dialect.loaded_dbapi.Error
    made = exc.DBAPIError.instance(
        None, None, error, base, hide_parameters=True, connection_invalidated=lost, dialect=dialect
    )
    assert isinstance(made, exc.DBAPIError)  # noqa: S101 - what it makes of a driver's error
    return made


def translate_chain(error: BaseException) -> StoreError | None:
    """As `translate`, for an error that only reports an earlier one."""
    cause = error.__cause__ or error.__context__
    return translate(cause) if cause is not None else None


def is_transient(error: object) -> bool:
    """Deadlock, serialization failure, lock wait, busy database: nothing is wrong with message or handler.

    Example:
        >>> from pymysql.err import OperationalError
        >>> error = OperationalError(1205, "Lock wait timeout exceeded")
        >>> error.sqlstate = "HY000"  # as PyMySQL 1.2 has it
        >>> is_transient(error)
        True
    """
    state = _sqlstate(error)
    if state is not None:
        return state in _PG_TRANSIENT
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _SQLITE_TRANSIENT
    return mysql_code(error) in _MYSQL_TRANSIENT


def is_unavailable(error: object) -> bool:
    """The connection is gone, or the server takes no work now."""
    state = _sqlstate(error)
    if state is not None:
        return state in _PG_UNAVAILABLE or state.startswith(_PG_UNAVAILABLE_CLASSES)
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _SQLITE_UNAVAILABLE
    if _is_psycopg(error):
        return type(error).__name__ in {"OperationalError", "InterfaceError"}  # without a SQLSTATE: no server answered
    return mysql_code(error) in _MYSQL_UNAVAILABLE


def refuses_writes(error: object) -> bool:
    """Whether the server answers, and takes no writes: a replica after a failover, or a full disk.

    Example:
        >>> from pymysql.err import OperationalError
        >>> refuses_writes(OperationalError(1290, "running with the --read-only option"))
        True
    """
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _SQLITE_REFUSES_WRITES
    return _sqlstate(error) in _PG_REFUSES_WRITES or mysql_code(error) in _MYSQL_REFUSES_WRITES


def is_read_only(error: object) -> bool:
    """Whether the session takes no writes, which may be its own state and no longer that of the server behind the URL.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_read_only(OperationalError(1290, "running with the --read-only option"))
        True
    """
    return _sqlstate(error) == _PG_READ_ONLY or mysql_code(error) in _MYSQL_READ_ONLY


def is_used_up(error: object) -> bool:
    """Whether a resource of the server is used up: memory, disk, connections.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_used_up(OperationalError(1041, "Out of memory."))
        True
    """
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _SQLITE_USED_UP
    return (_sqlstate(error) or "").startswith(_PG_USED_UP_CLASS) or mysql_code(error) in _MYSQL_USED_UP


def is_lock_wait(error: object) -> bool:
    """Whether a lock that somebody else holds was waited for in vain.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_lock_wait(OperationalError(1205, "Lock wait timeout exceeded"))
        True
    """
    return _sqlstate(error) == _PG_LOCK_WAIT or mysql_code(error) == _MYSQL_LOCK_WAIT


def is_missing_table(error: object) -> bool:
    """Whether a statement named a table that is not there.

    Example:
        >>> from pymysql.err import ProgrammingError
        >>> is_missing_table(ProgrammingError(1146, "Table 'shop.idemp_inbox' doesn't exist"))
        True
    """
    if isinstance(error, sqlite3.Error):
        return str(error).startswith("no such table")
    return _sqlstate(error) == _PG_NO_TABLE or mysql_code(error) == _MYSQL_NO_TABLE


def is_denied(error: object) -> bool:
    """Whether the user lacks a right, or the program itself denies a statement to SQLite.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_denied(OperationalError(1142, "SELECT command denied to user 'shop'@'db' for table `shop`.`idemp_inbox`"))
        True
    """
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) == sqlite3.SQLITE_AUTH
    return _sqlstate(error) == _PG_DENIED or mysql_code(error) in _MYSQL_DENIED


def is_statement_mode(error: object) -> bool:
    """Whether a pooler gives each statement another server connection, so that no transaction can begin.

    Example:
        >>> is_statement_mode(Exception("server closed the connection"))
        False
    """
    return _is_psycopg(error) and _STATEMENT_MODE in str(error)


def is_timeout(error: object) -> bool:
    """Whether the server cancelled a statement: it took longer than a setting allows, or somebody asked for it.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_timeout(OperationalError(1969, "Query execution was interrupted (max_statement_time exceeded)"))
        True
    """
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) == sqlite3.SQLITE_INTERRUPT
    return _sqlstate(error) == _PG_CANCELLED or mysql_code(error) in _MYSQL_CANCELLED


def is_damaged(error: object) -> bool:
    """Whether a SQLite file is cut off, overwritten, or none at all.

    Example:
        >>> is_damaged(sqlite3.OperationalError("no such table: idemp_inbox"))
        False
    """
    return isinstance(error, sqlite3.Error) and _sqlite_code(error) in _SQLITE_DAMAGED


def said(error: object) -> str:
    """What a driver says; in words where it says nothing.

    Example:
        >>> from pymysql.err import InterfaceError
        >>> said(InterfaceError(0, "")), said(InterfaceError(0, "Not connected"))
        ('the connection was closed in this process', "(0, 'Not connected')")
    """
    text = without_credentials(text_of(error)).strip()
    return _CLOSED_HERE if text in {"", "()", "(0, '')"} else text


def _sqlstate(error: object) -> str | None:
    """PostgreSQL's code of what happened. PyMySQL 1.2 has the attribute, too: there it says less than the error number."""
    state = getattr(error, "sqlstate", None) if _is_psycopg(error) else None
    return state if isinstance(state, str) else None


def _is_psycopg(error: object) -> bool:
    return type(error).__module__.partition(".")[0] == "psycopg"


def mysql_code(error: object) -> int | None:
    """The error number of a MySQL driver's exception."""
    arguments = getattr(error, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def _lacking(error: object) -> str:
    return f"The database user lacks a right: {first_line(error)}."


def _sqlite_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def first_line(error: object) -> str:
    """The first line of what a driver says, without a full stop.

    Example:
        >>> first_line(ValueError("permission denied for table idemp_output."))
        'permission denied for table idemp_output'
    """
    return said(error).partition("\n")[0][:300].rstrip(". ")
