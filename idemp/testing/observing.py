"""Observation of a run: its statements, commits elsewhere, files, networks, programs and threads."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from sqlalchemy import Connection, Engine, event, exc

from idemp.sql.guard import COMMENTS, UNIT

__all__ = ["Seen", "Statement", "Watch", "watching"]

NETWORK: Final = frozenset({"socket.connect", "socket.sendto", "smtplib.connect", "http.client.connect", "urllib.Request"})
PROGRAMS: Final = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn"})
FILES: Final = {
    "open": 0, "os.remove": 0, "os.rename": 1, "os.mkdir": 0, "os.rmdir": 0, "os.truncate": 0, "os.link": 1, "os.symlink": 1,
    "shutil.move": 1, "shutil.copyfile": 1,
}  # fmt: skip
"""Which argument of an audit event is the path that is changed."""
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
READS: Final = frozenset({"SELECT", "SHOW", "EXPLAIN", "PRAGMA", "VALUES", "SET", "BEGIN", "ROLLBACK"})
PARTIAL: Final = frozenset({"SAVEPOINT", "RELEASE", "ROLLBACK"})
CHANGES: Final = re.compile(r"\b(INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE)
OWN: Final = ("logging", "importlib", "_frozen_importlib_external", "sqlalchemy", "idemp.events")  # do no effects of a handler


@dataclass
class Statement:
    """A statement of the handler's transaction.

    Attributes:
        locks: Whether it locked rows that it found.

    Example:
        >>> Statement("INSERT INTO paid VALUES (1)", (), 1).writes
        True
    """

    text: str
    values: Any
    rows: int = -1
    locks: bool = False

    @property
    def writes(self) -> bool:
        """True if it changes rows."""
        return _writes(self.text)

    @property
    def inserts(self) -> bool:
        """True if it adds rows."""
        return _word(self.text) == "INSERT"


@dataclass
class Seen:
    """Observations of one run.

    Attributes:
        elsewhere: Statements that were committed, or blocked, on other connections.
        outside: Kind (`network`, `program`, `file` or `connection`) and what was done.
        left: Threads and tasks that it has started and not waited for.
        failed: Whether the statement that had to fail was reached.

    Example:
        >>> Seen().statements
        []
    """

    statements: list[Statement] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: bool = False


class Watch:
    """Collects what one run does.

    Args:
        unit: The transaction of the run.
        fail_at: Number of the statement, from 1, that fails.

    Example:
        >>> with watching(Watch(None)) as seen:
        ...     _ = Path("/dev/null").write_text("nothing")
        >>> seen.outside
        []
    """

    def __init__(self, unit: Any, fail_at: int = 0) -> None:
        self.seen, self._unit, self._fail_at, self._count = Seen(), unit, fail_at, 0
        self._open: dict[int, list[str]] = {}  # writes of other connections that are not committed
        self._files: list[tuple[str, str]] = []
        self._databases: dict[str, Any] = {}
        self._threads: set[threading.Thread] = set()

    # Databases

    def execute(self, connection: Connection, statement: str, values: Any, context: Any) -> None:
        """Take note of a statement before it is executed."""
        if connection.get_execution_options().get(UNIT) is not self._unit:
            if _writes(statement):
                if _commits_each(connection):
                    self.seen.elsewhere.append(f"in autocommit mode, {_short(statement)}")
                self._open.setdefault(id(connection), []).append(_short(statement))
            return
        if _word(statement) in PARTIAL:
            return
        self._count += 1
        if self._count == self._fail_at:
            self.seen.failed = True
            raise exc.OperationalError(statement, None, RuntimeError("made to fail by assert_idempotent"))
        clause = getattr(getattr(context, "compiled", None), "statement", None)
        locks = getattr(clause, "_for_update_arg", None) is not None or "advisory" in statement.lower()
        self.seen.statements.append(Statement(statement, values, locks=locks))

    def executed(self, connection: Connection, cursor: Any) -> None:
        """Take note of the rows that a statement has found or changed."""
        if connection.get_execution_options().get(UNIT) is self._unit and self.seen.statements:
            self.seen.statements[-1].rows = cursor.rowcount

    def commit(self, connection: Connection) -> None:
        """Take note of a commit on another connection."""
        self.seen.elsewhere += self._open.pop(id(connection), [])

    def rollback(self, connection: Connection) -> None:
        """Forget what another connection has rolled back."""
        self._open.pop(id(connection), None)

    def fail(self) -> None:
        """Take note that the handler failed: on SQLite, a second connection waits for its own transaction."""
        self.seen.elsewhere += [each for statements in self._open.values() for each in statements]

    # The rest of the world

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Take note of an event of the interpreter (PEP 578)."""
        frame = sys._getframe(2)  # noqa: SLF001
        if name == "sqlite3.connect":
            file = str(arguments[0]).removeprefix("file:").partition("?")[0]
            if not _called_by(frame, ("sqlalchemy", "aiosqlite")):
                self._databases.setdefault(file, _contents(file))
        elif name in FILES:
            path = _path(arguments[FILES[name]])
            if path is not None and _changes(name, path, arguments) and not _called_by(frame, OWN):
                place, known = os.path.realpath(path), [each for each, _ in self._files]
                if name in ("os.remove", "os.rmdir") and place not in known and os.path.lexists(place):
                    self.seen.outside.append(("file", f"{name} {path}"))
                self._files.append((place, f"{name} {path}"))
        elif not _called_by(frame, OWN):
            first = 1 if name in NETWORK and name != "urllib.Request" else 0  # after the object that calls
            detail = ", ".join(str(each)[:80] for each in arguments[first : first + 1 + first])
            self.seen.outside.append(("network" if name in NETWORK else "program", f"{name} {detail}"))

    def started(self, thread: threading.Thread) -> None:
        """Take note of a thread."""
        self._threads.add(thread)

    def joined(self, thread: threading.Thread) -> None:
        """Take note that a thread was waited for."""
        self._threads.discard(thread)

    def end(self) -> None:
        """Sum up: a file that is gone again was a temporary one."""
        for path, what in self._files:
            if Path(path).is_file() or Path(path).is_dir():
                self.seen.outside.append(("file", what))
        for path, before in self._databases.items():
            if _contents(path) != before:
                self.seen.outside.append(("connection", f"sqlite3.connect {path}"))
        pooled: Any = pools._threads_queues  # noqa: SLF001 - they wait for work, which has a result to wait for
        self.seen.left += [f"the thread {thread.name!r}" for thread in self._threads if thread not in pooled]


@contextmanager
def watching(watch: Watch) -> Iterator[Seen]:
    """Watch a run.

    Example:
        >>> with watching(Watch(None)) as seen:
        ...     thread = threading.Thread(target=print, name="mail")
        ...     thread.start()
        <BLANKLINE>
        >>> seen.left
        ["the thread 'mail'"]
    """
    global _present  # noqa: PLW0603 - an audit hook cannot be removed
    _install()
    start, join = threading.Thread.start, threading.Thread.join
    tasks = _tasks()

    def started(thread: threading.Thread) -> None:
        watch.started(thread)
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        watch.joined(thread)

    threads: Any = threading.Thread
    threads.start, threads.join = started, joined
    listeners: list[tuple[str, Any]] = [
        ("before_cursor_execute", lambda each, _, text, values, context, _many: watch.execute(each, text, values, context)),
        ("after_cursor_execute", lambda each, cursor, *_: watch.executed(each, cursor)),
        ("commit", watch.commit),
        ("rollback", watch.rollback),
    ]
    for name, listener in listeners:
        event.listen(Engine, name, listener)
    _present = watch
    try:
        yield watch.seen
    finally:
        _present = None
        for name, listener in listeners:
            event.remove(Engine, name, listener)
        threads.start, threads.join = start, join
        watch.seen.left += [f"the task {task.get_name()!r}" for task in _tasks() - tasks]
        watch.end()


_present: Watch | None = None
_installed = False
WATCHED: Final = frozenset({*NETWORK, *PROGRAMS, *FILES, "sqlite3.connect"})


def _install() -> None:
    global _installed  # noqa: PLW0603
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


def _hook(name: str, arguments: tuple[Any, ...]) -> None:
    if _present is not None and name in WATCHED:
        _present.audit(name, arguments)


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no event loop
        return set()


def _word(statement: str) -> str:
    statement = COMMENTS.sub("", statement)
    return (statement[:12].split(None, 1) or [""])[0].strip("(;").upper()


def _writes(statement: str) -> bool:
    word = _word(statement)
    return word not in READS and word not in PARTIAL and (word != "WITH" or CHANGES.search(statement) is not None)


def _short(statement: str) -> str:
    return " ".join(COMMENTS.sub("", statement).split())[:80]


def _commits_each(connection: Connection) -> bool:
    with suppress(NotImplementedError, AttributeError):
        return bool(connection.dialect.detect_autocommit_setting(connection.connection.dbapi_connection))  # type: ignore[arg-type]
    return False


def _called_by(frame: FrameType | None, packages: tuple[str, ...]) -> bool:
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in packages or module.startswith(tuple(f"{each}." for each in packages)):
            return True
        frame = frame.f_back
    return False


def _path(value: Any) -> str | None:
    try:
        return os.fsdecode(value)
    except TypeError:  # a file descriptor
        return None


def _changes(name: str, path: str, arguments: tuple[Any, ...]) -> bool:
    if name == "os.mkdir":
        return not os.path.lexists(path)
    if name != "open":
        return True
    if Path(path).is_dir():  # for a file without a name in it
        return False
    _, mode, flags = arguments
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & WRITES)


def _contents(path: str) -> list[Any]:
    """Return what differs when a database of SQLite was changed."""
    found: list[Any] = []
    for file in (Path(path), Path(f"{path}-wal")):
        with suppress(OSError, ValueError), file.open("rb") as opened:
            found.append((file.stat().st_size, file.stat().st_mtime_ns, opened.read(100)))
    return found
