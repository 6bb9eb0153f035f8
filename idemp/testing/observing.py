"""What a handler does beside emitting outputs: statements on its transaction and elsewhere, the world outside, its memory.

Statements are seen by an event of SQLAlchemy, everything outside the database by an audit hook of the interpreter
(PEP 578). Both are installed once per process and cost nothing while no handler is watched. What C libraries do on their
own (a driver that opens its own socket, say) is not seen.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, event, exc

from idemp.errors import OutputError
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.testing.memory import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from idemp.context import Context

_NETWORK: Final = {
    "socket.connect", "socket.sendto", "socket.getaddrinfo", "smtplib.connect", "smtplib.send", "http.client.connect",
    "http.client.send", "urllib.Request", "ftplib.connect", "imaplib.open", "poplib.connect",
}  # fmt: skip
_PROCESSES: Final = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
_FILES: Final = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.move",
    "shutil.copyfile", "shutil.rmtree",
}  # fmt: skip
_WITH_OBJECT_FIRST: Final = _NETWORK - {"socket.getaddrinfo", "urllib.Request"}
_WRITING_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_READS: Final = ("SELECT", "PRAGMA", "SHOW", "EXPLAIN", "SET ", "BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK", "COMMIT")


@dataclass
class Seen:
    """What one run of a handler did.

    Attributes:
        statements: on the claim's transaction, with their parameters, in order.
        elsewhere: on other connections, by where they went and whether they could change something.
        outside: what reached beyond the databases, as (kind, detail); kinds are "network", "process" and "file".
        changed: names of module globals and the like that were changed.
        mutated: whether the handler changed its message.
        left_for_later: whether it asked SQLAlchemy to call something after COMMIT.
        injected: whether the error that was to be raised inside of it was raised.
    """

    statements: list[tuple[str, Any]] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    mutated: bool = False
    left_for_later: bool = False
    injected: bool = False

    @property
    def writes(self) -> list[tuple[str, Any]]:
        """Those statements that can change something."""
        return [(text, values) for text, values in self.statements if not _only_reads(text)]


class Watch:
    """Watches one run of a handler, and may raise inside of it.

    Args:
        fail_at: at which of its own actions (statements and outputs, from 1) an error is raised; 0 for none.

    Example:
        >>> from idemp.testing import context
        >>> def handler(message, ctx):
        ...     message.clear()
        >>> watch, message = Watch(), {"sku": "A-1"}
        >>> with watch.watching(handler, message, context()):
        ...     handler(message, context())
        >>> watch.seen.mutated
        True
    """

    def __init__(self, *, fail_at: int = 0) -> None:
        self.seen = Seen()
        self._fail_at = fail_at
        self._actions = 0
        self._threads = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    @contextmanager
    def watching(self, function: Callable[..., Any], body: Any, ctx: Context) -> Iterator[None]:
        """Watch while the block runs `function` on `body`."""
        global _active  # noqa: PLW0603 - an audit hook belongs to the whole process
        _install()
        before, memory = _copied(body), snapshot(function)
        headers = copy.deepcopy(dict(ctx.headers))
        self._watch_outputs(ctx)
        _active = self
        try:
            yield
        finally:
            _active = None
            after = snapshot(function)
            self.seen.changed = sorted(name for name in {*memory, *after} if memory.get(name) != after.get(name))
            self.seen.left_for_later = _listens_for_commit(ctx)
            self.seen.mutated = (before is not None and before.value != body) or headers != dict(ctx.headers)

    def on_statement(self, connection: Connection, text: str, values: Any) -> None:
        """A statement is about to be sent."""
        if connection.get_execution_options().get(UNIT_OPTION) is not None:
            self.seen.statements.append((text, values))
            self._act(exc.OperationalError(text, {}, Exception("raised by the test: the database is locked")))
        elif not _only_reads(text):
            mode = "autocommit, " if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" else ""
            self.seen.elsewhere.append(f"{mode}{' '.join(text.split())[:120]}")

    def on_audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        """The interpreter is about to do something that it audits."""
        if threading.get_ident() in self._threads:
            return
        kind = _kind(name, arguments)
        if kind is not None:
            self.seen.outside.append((kind, f"{name} {_detail(name, arguments)}".strip()))

    def _watch_outputs(self, ctx: Context) -> None:
        emitter: Any = ctx._emitter  # noqa: SLF001 - there is no other way to fail inside of it
        emit = emitter.emit

        def watched(*arguments: Any, **options: Any) -> Any:
            if _active is self:
                self._act(OutputError("raised by the test: the output can't be encoded"))
            return emit(*arguments, **options)

        emitter.emit = watched

    def _act(self, error: Exception) -> None:
        self._actions += 1
        if self._actions == self._fail_at:
            self.seen.injected = True
            raise error


_active: Watch | None = None
_installed = False


def _install() -> None:
    global _installed  # noqa: PLW0603 - hooks can't be taken back
    if not _installed:
        _installed = True
        sys.addaudithook(_on_audit)
        event.listen(Engine, "before_cursor_execute", _on_execute)


def _on_audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None:
        _active.on_audit(name, arguments)


def _on_execute(connection: Connection, _cursor: Any, text: str, values: Any, _context: Any, _many: bool) -> None:
    if _active is not None:
        _active.on_statement(connection, text, values)


def _kind(name: str, arguments: tuple[Any, ...]) -> str | None:
    if name in _NETWORK:
        return "network"
    if name in _PROCESSES:
        return "process"
    if name in _FILES:
        return "file"
    if name == "sqlite3.connect" and str(arguments[0]) != ":memory:":
        return "database"
    if name == "open":
        path, mode, flags = arguments
        writing = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING_FLAGS)
        if writing and isinstance(path, str | bytes) and not _is_harmless(os.fsdecode(path)):
            return "file"
    return None


def _is_harmless(path: str) -> bool:
    return path == os.devnull or "__pycache__" in path


def _detail(name: str, arguments: tuple[Any, ...]) -> str:
    picked = arguments[1:3] if name in _WITH_OBJECT_FIRST else arguments[:1]
    return ", ".join(str(item)[:80] for item in picked)


def _only_reads(text: str) -> bool:
    return text.lstrip().upper().startswith(_READS)


def _listens_for_commit(ctx: Context) -> bool:
    session: Any = getattr(ctx._unit, "_session", None)  # noqa: SLF001 - asking for `ctx.session` would make one
    if session is None:
        return False
    hooks = (session.dispatch.after_commit, session.dispatch.after_transaction_end)
    return any(len(getattr(hook, "listeners", ())) > 0 for hook in hooks)


@dataclass(frozen=True, slots=True)
class _Copy:
    value: Any


def _copied(body: Any) -> _Copy | None:
    try:
        copied = copy.deepcopy(body)
    except Exception:  # noqa: BLE001 - classes of the user's
        return None
    return _Copy(copied) if copied == body else None
