"""What a handler does on the driver's own connection, past SQLAlchemy: commits are refused, changes of the session noted.

Such a commit is found at the end of the handling at the latest, and then the claim is withdrawn. But a process that dies in
between leaves a claim without outputs, which nothing tells from a handling that had none; so the commit is refused where the
driver lets a caller be asked: its methods, a `with` block around the connection, and statements of its cursors. The same
places show which statements change the session, by the rules that hold for SQLAlchemy's.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from idemp.inbox.sql.guard import examine

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from idemp.inbox.sql.guard import Guarded

__all__ = ["left_open", "release", "watch", "watch_sqlite"]

_UNIT: Final = "idemp_unit"  # in the `info` of a connection while a unit of work has it
_ENDING: Final = (
    "commit", "rollback", "begin", "autocommit", "set_autocommit", "tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback",
)  # fmt: skip
_CHANGING: Final = (
    "select_db", "set_charset", "set_character_set",  # PyMySQL
    "set_isolation_level", "set_read_only", "set_deferrable", "isolation_level", "read_only", "deferrable",  # psycopg
)  # fmt: skip
_USING: Final = (
    "transaction",
    "pipeline",
)  # they would begin the transaction by themselves, and the first one commit it
_EXECUTING: Final = ("execute", "executemany", "stream", "copy")  # of psycopg's cursors
_CURSORS: Final = ("cursor_factory", "server_cursor_factory")

# Of sqlite3.h.
_AUTHORIZED, _DENIED, _TRANSACTION = 0, 1, 22
_CHANGING_ON_SQLITE: Final = frozenset({3, 4, 5, 6, 19, 24, 25})  # CREATE TEMP …, PRAGMA, ATTACH, DETACH


def watch(connection: Connection, unit: Guarded) -> None:
    """Let a unit of work see what comes past SQLAlchemy, and refuse what would end its transaction."""
    info = connection.info
    driver: Any = connection.connection.driver_connection
    info[_UNIT] = ref(unit)  # one that is dropped without its end must not refuse what others do later
    if getattr(driver, "_idemp_info", None) is info:
        return
    with suppress(AttributeError, TypeError):  # a driver in C, for example: then the proof before COMMIT has to do
        kind: Any = type(driver)
        driver.__class__ = _watched(kind, connection.dialect.name)
        driver._idemp_info = info  # noqa: SLF001
        for factory in _CURSORS:
            if hasattr(driver, factory):
                setattr(driver, factory, _watched_cursor(getattr(driver, factory)))


def release(connection: Connection) -> None:
    """The unit of work has left the connection."""
    if not connection.closed and not connection.invalidated:
        connection.info.pop(_UNIT, None)


def watch_sqlite(driver: Any, info: dict[Any, Any]) -> None:
    """The same for a connection of `sqlite3`, whose class can't be changed.

    Args:
        driver: the connection; an authorizer that is set later takes the place of this one.
        info: of the pool, about it.
    """

    def authorize(action: int, what: str | None, *_: object) -> int:
        if action == _TRANSACTION and what == "COMMIT":
            try:
                _refuse(info, "commit")
            except Exception:  # noqa: BLE001 - remembered by the unit; the caller gets sqlite3's own error
                return _DENIED
        elif action in _CHANGING_ON_SQLITE and not _is_own(info):
            _changed(info)
        return _AUTHORIZED

    driver.set_authorizer(authorize)


def left_open(driver: Any) -> str | None:
    """Return what a handler has left unfinished on a driver's connection, so that no statement can follow; or `None`.

    As libpq sees it, without asking the server. PyMySQL reads to its end what is left of a result before it sends another
    statement, and `sqlite3` refuses to end the transaction.
    """
    pgconn = getattr(driver, "pgconn", None)
    if pgconn is None or getattr(driver, "closed", False):
        return None
    if pgconn.pipeline_status != 0:
        return "a pipeline (`with connection.pipeline():`)"
    if pgconn.transaction_status == 1:  # ACTIVE
        return "a COPY, or a query whose results were not read to their end"
    if getattr(driver, "_num_transactions", 0):
        return "a block of the driver's (`with connection.transaction():`)"
    return None


def _unit(info: dict[Any, Any]) -> Guarded | None:
    unit: Guarded | None = info[_UNIT]() if _UNIT in info else None
    return None if unit is None or unit.ending else unit


def _refuse(info: dict[Any, Any], what: str) -> None:
    unit = _unit(info)
    if unit is not None and not (what == "rollback" and unit.is_lost):  # SQLAlchemy's own, after a failed flush
        unit.refuse(what)


def _changed(info: dict[Any, Any], _: str = "") -> None:
    if (unit := _unit(info)) is not None:
        unit.changed_session()


def _uses(info: dict[Any, Any], _: str) -> None:
    if (unit := _unit(info)) is not None:
        unit.uses_connection()


def _is_own(info: dict[Any, Any]) -> bool:
    unit = _unit(info)
    return unit is not None and unit.own_statement is not None


def _check(info: dict[Any, Any], statement: Any, dialect: str, parameters: Any = None) -> None:
    if (unit := _unit(info)) is None:
        return
    if isinstance(statement, (bytes, bytearray)):
        statement = statement.decode(errors="replace")
    if isinstance(statement, str):
        examine(unit, statement, dialect, parameters)


@lru_cache
def _watched(kind: type, dialect: str) -> type:
    """A subclass of a driver's connection, which asks before it ends a transaction."""

    def query(self: Any, sql: Any, *arguments: Any, **options: Any) -> Any:
        _check(self._idemp_info, sql, dialect)
        return kind.query(self, sql, *arguments, **options)  # type: ignore[attr-defined]

    def cursor(self: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("withhold"):
            _changed(self._idemp_info)
        return kind.cursor(self, *arguments, **options)  # type: ignore[attr-defined]

    members = {name: _asking(kind, name, _refuse) for name in _ENDING if hasattr(kind, name)}
    members |= {name: _asking(kind, name, _changed) for name in _CHANGING if hasattr(kind, name)}
    members |= {name: _asking(kind, name, _uses) for name in _USING if hasattr(kind, name)}
    members |= {method.__name__: method for method in (query, cursor) if hasattr(kind, method.__name__)}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def _asking(kind: type, name: str, asked: Callable[[dict[Any, Any], str], None]) -> Any:
    """A method, or an attribute's assignment, that asks first."""
    plain = getattr(kind, name)
    if isinstance(plain, property):

        def assign(self: Any, value: Any) -> None:
            asked(self._idemp_info, name)
            plain.__set__(self, value)

        return property(plain.fget, assign)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        asked(self._idemp_info, name)
        return plain(self, *arguments, **options)

    return method


@lru_cache
def _watched_cursor(kind: type) -> type:
    """A subclass of one of psycopg's cursors, which looks at statements before it sends them."""

    def looking(name: str) -> Any:
        plain = getattr(kind, name)

        def method(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
            text = query.as_string(self) if hasattr(query, "as_string") else query
            parameters = arguments[0] if arguments else options.get("params")
            _check(self.connection._idemp_info, text, "postgresql", parameters)  # noqa: SLF001
            return plain(self, query, *arguments, **options)

        return method

    members = {name: looking(name) for name in _EXECUTING if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
