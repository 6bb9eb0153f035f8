"""What a handler does beside emitting outputs: statements on its transaction and elsewhere, the world outside, its memory.

Statements are seen by an event of SQLAlchemy, everything outside the database by an audit hook of the interpreter
(PEP 578). Both are installed once per process and cost nothing while no handler is watched.
"""

from __future__ import annotations

import copy
import re
import sys
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, event, exc

from idemp.errors import OutputError
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.testing.connections import statements, traced
from idemp.testing.following import Followed
from idemp.testing.memory import changed, is_users, snapshot
from idemp.testing.outside import AUDITED, Outside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from sqlalchemy import Connection

    from idemp.context import Context
    from idemp.testing.memory import Kept

_READS: Final = (
    "SELECT", "VALUES", "PRAGMA", "SHOW", "EXPLAIN", "SET ", "BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK", "COMMIT",
)  # fmt: skip
_COMMENTS: Final = re.compile(r"/\*.*?(?:\*/|\Z)|--[^\n]*", re.DOTALL)
_WRITES_WITHIN: Final = re.compile(r"\b(INSERT|UPDATE|DELETE|MERGE|REPLACE)\b")


@dataclass
class Seen:
    """What one run of a handler did.

    Attributes:
        statements: on the claim's transaction, with their parameters, in order.
        matched: how many rows each of them changed, where the driver says so.
        locked: whether rows were found and locked by SELECT … FOR UPDATE.
        elsewhere: on other connections, what could change something.
        foreign: how many statements were sent past SQLAlchemy.
        handed: sentences about what it handed to threads that were there before.
        outside: what reached beyond the databases, as (kind, detail); kinds are those of `Outside`.
        memory: what outlives the message, before and after.
        mutated: whether the handler changed its message.
        left_for_later: whether it asked SQLAlchemy to call something after COMMIT.
        injected: whether the error that was to be raised inside of it was raised.
    """

    statements: list[tuple[str, Any]] = field(default_factory=list)
    matched: dict[int, int] = field(default_factory=dict)
    locked: bool = False
    elsewhere: list[str] = field(default_factory=list)
    foreign: int = 0
    handed: list[str] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    memory: tuple[dict[str, Kept], dict[str, Kept]] = ({}, {})
    mutated: bool = False
    left_for_later: bool = False
    injected: bool = False

    def changes(self, place: str) -> bool:
        """Whether the handler changed what stands in a place of its memory."""
        return any(name == place or name.startswith(f"{place}.") for name in changed(*self.memory))

    @property
    def writes(self) -> list[tuple[str, Any]]:
        """Those statements that can change something."""
        return [(text, values) for text, values in self.statements if not only_reads(text)]

    @property
    def matches(self) -> list[int]:
        """How many rows each of the writes changed; -1 where nobody knows."""
        return [self.matched.get(index, -1) for index, (text, _) in enumerate(self.statements) if not only_reads(text)]


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
        self._followed = Followed()
        self._outside = Outside()
        self._own: Any = None

    @contextmanager
    def watching(self, function: Callable[..., Any], body: Any, ctx: Context) -> Iterator[None]:
        """Watch while the block runs `function` on `body`."""
        global _active  # noqa: PLW0603 - an audit hook belongs to the whole process
        _install()
        before, memory = _copied(body), snapshot(function)
        headers = copy.deepcopy(dict(ctx.headers))
        self._watch_outputs(ctx)
        own = self._own = _driver_connection(ctx)
        _active = self
        try:
            with (
                self._followed.following(),
                statements(self.on_foreign_statement),
                traced(own, self.on_foreign_statement),
            ):
                yield
        finally:
            _active = None
            self._outside.end()
            self.seen.outside = self._outside.found
            self.seen.handed = list(self._followed.unseen)
            self.seen.memory = memory, snapshot(function)
            self.seen.left_for_later = _listens_for_commit(ctx)
            self.seen.mutated = (before is not None and before.value != body) or headers != dict(ctx.headers)

    def on_statement(self, connection: Connection, text: str, values: Any) -> None:
        """A statement is about to be sent."""
        if connection.get_execution_options().get(UNIT_OPTION) is not None:
            self.seen.statements.append((text, values))
            self._act(exc.OperationalError(text, {}, Exception("raised by the test: the database is locked")))
        elif not only_reads(text):
            mode = "autocommit, " if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" else ""
            self.seen.elsewhere.append(f"{mode}{' '.join(text.split())[:120]}")

    def on_foreign_statement(self, text: str, values: Any, connection: Any) -> None:
        """A statement is about to be sent past SQLAlchemy, through the claim's own connection or another one."""
        if not self._followed.is_here():
            return
        own = connection is not None and connection is self._own
        self.seen.foreign += not own
        if only_reads(text):
            return
        if own:
            self.seen.statements.append((text, values))
        else:
            self.seen.elsewhere.append(" ".join(text.split())[:120])

    def on_executed(self, connection: Connection, cursor: Any, text: str, values: Any, context: Any) -> None:
        """A statement was sent."""
        if connection.get_execution_options().get(UNIT_OPTION) is None:
            return
        self.seen.matched[len(self.seen.statements) - 1] = cursor.rowcount
        if not self.seen.locked and _locks(text, context):
            with closing(cursor.connection.cursor()) as asking:  # SQLite has no such lock, and leaves the words out
                asking.execute(text, values)
                self.seen.locked = asking.fetchone() is not None

    def on_audit(self, name: str, arguments: tuple[Any, ...], frame: FrameType) -> None:
        """The interpreter is about to do something that it audits."""
        if not self._followed.is_here():
            return
        self._outside.add(name, arguments, frame)

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
        event.listen(Engine, "after_cursor_execute", _on_executed)


def _on_audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None and name in AUDITED:  # `sys._getframe` is audited, too
        _active.on_audit(name, arguments, sys._getframe(1))  # noqa: SLF001 - who asks for it decides what it means


def _on_execute(connection: Connection, _cursor: Any, text: str, values: Any, _context: Any, _many: bool) -> None:
    if _active is not None:
        _active.on_statement(connection, text, values)


def _on_executed(connection: Connection, cursor: Any, text: str, values: Any, context: Any, many: bool) -> None:
    if _active is not None and not many:
        _active.on_executed(connection, cursor, text, values, context)


def only_reads(text: str) -> bool:
    """Whether a statement can't change anything."""
    words = _COMMENTS.sub(" ", text).lstrip(" \t\r\n(").upper()
    return not words or words.startswith(_READS) or (words.startswith("WITH") and not _WRITES_WITHIN.search(words))


def _locks(text: str, context: Any) -> bool:
    asked = getattr(getattr(context, "invoked_statement", None), "_for_update_arg", None)
    return "FOR UPDATE" in text.upper() or (asked is not None and not asked.read)


def _driver_connection(ctx: Context) -> Any:
    with suppress(Exception):  # there is none
        return ctx.connection.connection.driver_connection
    return None


def _listens_for_commit(ctx: Context) -> bool:
    session: Any = getattr(ctx._unit, "_session", None)  # noqa: SLF001 - asking for `ctx.session` would make one
    if session is None:
        return False
    own = [*_modules(session.dispatch.after_commit), *_modules(session.dispatch.after_transaction_end)]
    if any(not module.startswith("idemp.") for module in own):
        return True
    # Those of its class, too, unless they are a library's.
    return any(is_users(getattr(listener, "__module__", None)) for listener in session.dispatch.after_commit)


def _modules(hook: Any) -> list[str]:
    """The modules of what listens to a hook of one session, and not of its class."""
    return [str(getattr(listener, "__module__", None)) for listener in getattr(hook, "listeners", ())]


@dataclass(frozen=True, slots=True)
class _Copy:
    value: Any


def _copied(body: Any) -> _Copy | None:
    try:
        copied = copy.deepcopy(body)
    except Exception:  # noqa: BLE001 - classes of the user's
        return None
    return _Copy(copied) if copied == body else None
