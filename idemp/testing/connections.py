"""Database connections that are not idemp's: those that were open before a handler ran raise no audit event.

Statements of Django, psycopg and PyMySQL are seen as they are sent. Changes of SQLite are seen by the counter of each open
connection. Of all other connections the system knows whether something was sent, but not what.
"""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from idemp.testing.outside import is_called_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

OnStatement = Callable[[str, Any, Any], None]
"""Takes a statement, its values, and the driver's connection through which it goes."""

_CURSORS: Final = (
    ("psycopg", "Cursor", ("execute", "executemany", "copy")),
    ("pymysql.connections", "Connection", ("query",)),
)
_WATCHED: Final = "idemp.inbox.sql.drivers"  # through whose classes a handler's statements go, too
_PROCESS: Final = Path("/proc/self/fd")
_SQLITE: Final = b"SQLite format 3\0"
_SENT: Final = 156  # of struct tcp_info: segments with data that were sent
_DATABASES: Final = ("PGSQL", "mysql", "maria")
_MEANT: Final = "Close it before the test, or give the handler ctx.session or ctx.connection."


@contextmanager
def statements(seen: OnStatement) -> Iterator[None]:
    """Call `seen` with each statement that goes to a database past SQLAlchemy while the block runs."""
    with ExitStack() as stack:
        for module, name, methods in _CURSORS:
            cursor = getattr(sys.modules.get(module), name, None)
            for method in methods if cursor is not None else ():
                stack.enter_context(_wrapped(cursor, method, module.partition(".")[0], seen))
        for connection in _of_django():
            wrapper = _told(seen)
            connection.execute_wrappers.append(wrapper)
            stack.callback(connection.execute_wrappers.remove, wrapper)
        yield


@contextmanager
def traced(connection: Any, seen: OnStatement) -> Iterator[None]:
    """The same for the claim's own connection: `sqlite3` tells of each statement, and psycopg's cursors are idemp's."""

    def trace(text: str) -> None:
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("sqlalchemy."):  # noqa: SLF001 - the caller decides
            seen(text, (), connection)

    with ExitStack() as stack:
        cursor = getattr(connection, "cursor_factory", None)
        if isinstance(connection, sqlite3.Connection):
            connection.set_trace_callback(trace)
            stack.callback(connection.set_trace_callback, None)
        elif cursor is not None and cursor is not _class("psycopg", "Cursor"):
            for method in ("execute", "executemany"):
                stack.enter_context(_wrapped(cursor, method, "psycopg", seen))
        yield


@contextmanager
def _wrapped(cursor: Any, name: str, package: str, seen: OnStatement) -> Iterator[None]:
    method = getattr(cursor, name)

    @wraps(method)
    def wrapper(self: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
        frame = sys._getframe(1)  # noqa: SLF001 - the caller decides
        if not is_called_by(frame, "sqlalchemy") and not _is_ours(frame, package):
            seen(_as_text(statement), _as_values(arguments), getattr(self, "connection", self))
        return method(self, statement, *arguments, **options)

    setattr(cursor, name, wrapper)
    try:
        yield
    finally:
        setattr(cursor, name, method)


def _is_ours(frame: FrameType | None, package: str) -> bool:
    """Whether idemp itself called the driver."""
    names: list[str] = []
    while frame is not None and not names:
        name = str(frame.f_globals.get("__name__", ""))
        names = [name] if name != _WATCHED and name.partition(".")[0] not in {package, "contextlib"} else []
        frame = frame.f_back
    return any(name.startswith("idemp.") for name in names)


def _as_text(statement: Any) -> str:
    if isinstance(statement, bytes):
        return statement.decode(errors="replace")
    return statement if isinstance(statement, str) else str(getattr(statement, "as_string", statement.__str__)())


def _as_values(arguments: tuple[Any, ...]) -> Any:
    """The values as SQLAlchemy takes them for a driver: a tuple or a dictionary, or a list of them."""
    values = arguments[0] if arguments else ()
    if isinstance(values, list) and not all(isinstance(each, tuple | dict) for each in values):
        return [tuple(each) for each in values] if all(isinstance(each, list) for each in values) else tuple(values)
    return () if values is None else values


def _of_django() -> Iterable[Any]:
    """The connections that Django has for this thread, open or not."""
    django, settings = sys.modules.get("django.db"), sys.modules.get("django.conf")
    if django is None or settings is None or not settings.settings.configured:
        return ()
    return list(django.connections.all())


def _told(seen: OnStatement) -> Callable[..., Any]:
    def wrapper(execute: Callable[..., Any], sql: Any, parameters: Any, many: Any, context: Any) -> Any:
        seen(_as_text(sql), parameters, None)
        return execute(sql, parameters, many, context)

    return wrapper


class OpenConnections:
    """The connections that are open now, and later what went through them.

    Example:
        >>> other = sqlite3.connect(":memory:", isolation_level=None)
        >>> _ = other.execute("CREATE TABLE mail (id)")
        >>> before = OpenConnections()
        >>> _ = other.execute("INSERT INTO mail VALUES (1)")
        >>> before.changed()
        ['1 row of a SQLite database in memory']
        >>> other.close()
    """

    def __init__(self) -> None:
        self._sqlite, self._pooled, self._watched = _objects()
        self._changes = {id(each): _changes(each) for each in self._sqlite}
        self._sent = _sent()

    def changed(self) -> list[str]:
        """The SQLite databases that were changed since through connections that were open before, in words."""
        return [
            f"{number} row{'' if number == 1 else 's'} of {_named(each)}"
            for each in self._sqlite
            if (number := _changes(each) - self._changes[id(each)]) > 0
        ]

    def talked(self, *, statements_seen: bool) -> set[str]:
        """The peers to which something was sent since through connections of which nothing else is known.

        Args:
            statements_seen: whether a statement was seen that a driver sent past SQLAlchemy.
        """
        known = self._pooled | (self._watched if statements_seen else set())
        return {
            peer
            for (number, inode), (peer, sent) in _sent().items()
            if sent > self._sent.get((number, inode), (peer, 0))[1] and number not in known
        }

    def silent(self) -> set[str]:
        """Databases behind sockets of this machine: the system does not count what is sent there."""
        known = self._pooled | self._watched
        return {
            peer for number, peer in _local_peers() if number not in known and any(name in peer for name in _DATABASES)
        }


def unseen(peers: Iterable[str], silent: Iterable[str]) -> Iterator[str]:
    """Say of connections what could not be seen.

    Example:
        >>> print(*unseen(["127.0.0.1:5432"], []))
        The handler sent something to 127.0.0.1:5432 through a connection that was open before, or ...
    """
    for peer in sorted(peers):
        yield (
            f"The handler sent something to {peer} through a connection that was open before, or that a C library opened. "
            f"What it did there could not be seen. {_MEANT}"
        )
    for peer in sorted(silent):
        yield f"A connection to {peer} is open. Whether the handler used it could not be seen. {_MEANT}"


def can_be_seen() -> bool:
    """Whether this system tells which sockets a process has."""
    return _PROCESS.is_dir()


def _objects() -> tuple[list[sqlite3.Connection], set[int], set[int]]:
    """SQLite connections that SQLAlchemy does not have; descriptors that it has; those of drivers that are watched."""
    sqlite: list[sqlite3.Connection] = []
    pooled, of_pools, watched = set[int](), set[int](), set[int]()
    drivers = tuple(
        filter(None, (_class("psycopg", "Connection"), _class("pymysql.connections", "Connection")))
    )  # their statements are seen
    record = _class("sqlalchemy.pool.base", "_ConnectionRecord")
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, sqlite3.Connection):
            sqlite.append(each)
        elif kind is record:
            pooled.add(id(each.driver_connection))
            of_pools |= _descriptors(each.driver_connection)
        elif drivers and issubclass(kind, drivers):
            watched |= _descriptors(each)
    return [each for each in sqlite if id(each) not in pooled], of_pools, watched


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _descriptors(connection: Any) -> set[int]:
    found = set[int]()
    each: Any
    for each in (connection, getattr(connection, "_sock", None)):
        with suppress(Exception):  # a driver may say in many ways that it is closed
            found.add(int(each.fileno()))
    return found


def _changes(connection: sqlite3.Connection) -> int:
    with suppress(sqlite3.Error):  # closed, or of another thread
        return connection.total_changes
    return 0


def _named(connection: sqlite3.Connection) -> str:
    with suppress(sqlite3.Error):
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        return str(path) if path else "a SQLite database in memory"
    return "a SQLite database"


def _links() -> Iterator[tuple[int, str]]:
    if can_be_seen():
        for entry in list(os.scandir(_PROCESS)):
            with suppress(OSError):
                yield int(entry.name), str(Path(entry.path).readlink())


def _sockets() -> Iterator[tuple[int, str, socket.socket]]:
    for number, link in _links():
        if link.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copied:
                yield number, link, copied


def _sent() -> dict[tuple[int, str], tuple[str, int]]:
    """For each TCP connection its peer, and how many segments with data were sent."""
    found = {}
    for number, link, each in _sockets():
        if each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM:
            with suppress(OSError, struct.error):
                host, port = each.getpeername()[:2]
                told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT + 4)
                found[number, link] = (f"{host}:{port}", int(struct.unpack_from("I", told, _SENT)[0]))
    return found


def _local_peers() -> Iterator[tuple[int, str]]:
    for number, _, each in _sockets():
        if each.family == socket.AF_UNIX:
            with suppress(OSError):
                yield number, os.fsdecode(each.getpeername())
