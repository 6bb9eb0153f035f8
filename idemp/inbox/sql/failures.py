"""What the exceptions of SQLAlchemy and the drivers mean for a whole delivery."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from idemp.errors import StoreError, StoreUnavailable, TransientStoreError

if TYPE_CHECKING:
    from sqlalchemy import Connection

# PostgreSQL: SQLSTATE, by Appendix A of its manual.
_PG_TRANSIENT: Final = {"40001", "40P01", "55P03"}
_PG_HANDLERS_OWN: Final = {"25P03"}  # it let its transaction lie idle for too long
_PG_UNAVAILABLE_CLASSES: Final = ("08", "53", "57P", "58")
_PG_UNAVAILABLE: Final = {"25006", "28000", "28P01", "3D000"}

_PG_DENIED: Final = "42501"

_CONNECTION_GONE: Final = "8s2b"  # SQLAlchemy's code for statements on a connection that was invalidated

# MySQL and MariaDB: server and client error numbers.
_MYSQL_TRANSIENT: Final = {1205, 1213, 1020}
_MYSQL_UNAVAILABLE: Final = {
    0, 1040, 1045, 1049, 1053, 1077, 1079, 1129, 1130, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1290, 1836, 1927,
    2002, 2003, 2006, 2013, 2014, 2027, 2045, 2055,
}  # fmt: skip

_SQLITE_TRANSIENT: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_SQLITE_UNAVAILABLE: Final = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PROTOCOL,
}  # fmt: skip

# Of these: the server answers, and takes no writes. It is a replica, it was set so, or its disk is full.
_PG_REFUSES_WRITES: Final = frozenset({"25006", "53100"})
_MYSQL_REFUSES_WRITES: Final = frozenset({1290, 1836})
_SQLITE_REFUSES_WRITES: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL})

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
    if error.connection_invalidated or is_unavailable(driver_error):
        read_only = refuses_writes(driver_error)
        what = "takes no writes" if read_only else "can't be reached"
        away = StoreUnavailable(f"The database {what}: {_first_line(driver_error)}.")
        away.refuses_writes = read_only
        return away
    if is_transient(driver_error):
        return TransientStoreError(f"The database asks to try again: {_first_line(driver_error)}.")
    return None


def refused(error: exc.SQLAlchemyError) -> StoreError:
    """What `translate` knows nothing better about, met by a statement of idemp's own.

    Example:
        >>> refused(exc.DBAPIError("DELETE", {}, sqlite3.OperationalError("no such table: idemp_inbox"))).message
        'The database refuses: no such table: idemp_inbox.'
    """
    return StoreError(
        f"The database refuses: {_first_line(getattr(error, 'orig', None) or error)}.",
        fix="See with `idemp doctor` whether tables and rights are as they must be (docs/how-to/least-privilege.md).",
    )


def denied(error: exc.SQLAlchemyError) -> StoreUnavailable | None:
    """PostgreSQL denies this user what idemp's own statement needs; no message is at fault, so consumption pauses.

    Example:
        >>> denied(exc.DBAPIError("DELETE", {}, sqlite3.OperationalError("no such table: idemp_inbox"))) is None
        True
    """
    driver_error = getattr(error, "orig", None)
    if getattr(driver_error, "sqlstate", None) != _PG_DENIED:
        return None
    return StoreUnavailable(
        f"The database user lacks a right: {_first_line(driver_error)}.",
        fix="Grant it (docs/how-to/least-privilege.md); where it is about a daily table, run "
        "`idemp db partition CONSUMER` as the tables' owner.",
    )


def told(connection: Connection, error: Exception) -> exc.DBAPIError:
    """A driver's error as SQLAlchemy would have raised it, for statements of idemp's own that go past it.

    A connection that is lost leaves the pool, and all that are older than the loss with it.
    """
    dialect = connection.dialect
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


def is_lock_wait(error: object) -> bool:
    """Whether a lock that somebody else holds was waited for in vain.

    Example:
        >>> from pymysql.err import OperationalError
        >>> is_lock_wait(OperationalError(1205, "Lock wait timeout exceeded"))
        True
    """
    return _sqlstate(error) == _PG_LOCK_WAIT or mysql_code(error) == _MYSQL_LOCK_WAIT


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


def _sqlite_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0][:300].rstrip(". ")
