"""The unit of work: one transaction that holds claims, and the handler's session in it.

Ends that go through SQLAlchemy are refused. Ends below it are found by a mark in the transaction, which is tested before
anything is stored.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, event, exc
from sqlalchemy.orm import Session

from idemp.errors import BlockEnded, BlockRolledBack, HandlerError, TransactionEnded
from idemp.ports import Claim, Kind
from idemp.sql.dialects import Dialect, Ended, FastPath
from idemp.sql.engine import Database

__all__ = ["HandlerSession", "Unit", "kept_open"]

NO_EVENTS: Final = (
    "the handler listens to before_commit or after_commit of its session, which does not commit: idemp does, so these do not run; "
    "nothing was committed. Send a message to the app's own queue, whose handler runs after the commit, or use a hook of the app"
)
UNIT: Final = "idemp_unit"  # execution option that leads from a connection to its unit
INHERITED: Final[list[Connection]] = []  # of a parent process; while they are kept here, nothing ends their transactions
COMMENTS: Final = re.compile(r"\A(?:\s+|(?:--|#)[^\n]*\n?|/\*.*?\*/)+", re.DOTALL)
HARMLESS: Final = frozenset({"INSERT", "SELECT", "UPDATE", "DELETE"})  # first words that need no look


class HandlerSession(Session):
    """A session that flushes and leaves the end of its transaction to idemp.

    `begin_nested()` and `with session.begin():` work as usual; the latter flushes at its end.
    """

    unit: Unit

    def commit(self) -> None:
        """Refuse."""
        raise self.unit.refuse("session.commit()")

    def rollback(self) -> None:
        """Refuse."""
        raise self.unit.refuse("session.rollback()")

    def close(self) -> None:
        """Refuse."""
        raise self.unit.refuse("session.close()")

    def reset(self) -> None:
        """Refuse."""
        raise self.unit.refuse("session.reset()")

    def invalidate(self) -> None:
        """Refuse."""
        raise self.unit.refuse("session.invalidate()")


class Unit:
    """A transaction on one connection. Used as a context manager: what is not committed is rolled back.

    Attributes:
        connection: SQLAlchemy connection in the transaction.
        name: Marks the transaction.
        claims: Claims that were taken.
        ending: Whether idemp itself ends the transaction.
        error: The refusal that the handler was given; None if there was none.
    """

    __slots__ = (
        "_committed",
        "_database",
        "_ended",
        "_pid",
        "_pool",
        "_session",
        "_spoiled",
        "claims",
        "connection",
        "ending",
        "error",
        "name",
    )

    connection: Connection

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = f"idemp_{secrets.token_hex(8)}"
        self.ending = self._spoiled = self._committed = self._ended = False
        self._pid = os.getpid()
        self._pool = database.engine.pool
        self._session: HandlerSession | None = None
        self.error: HandlerError | None = None
        self.claims: list[Claim] = []

    def __enter__(self) -> Self:
        self.connection = self._database.units.connect().execution_options(**{UNIT: self})
        try:
            self.connection.begin()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ended:
            return
        if self._pid != os.getpid():
            INHERITED.append(self.connection)
            return
        self.ending = self._ended = True
        # What a task was doing when it was cancelled is unknown, to the driver, too.
        self._spoiled = self._spoiled or (kind is not None and not issubclass(kind, Exception))
        try:
            if self._session is not None:
                Session.close(self._session)
        finally:
            self._close()

    def end(self) -> None:
        """Roll back what is not committed, and give the connection back before the block ends, so that one is free to look."""
        self.__exit__(None)

    @property
    def session(self) -> Session:
        """Session in this transaction, made at first use."""
        return self._session or self.adopt(HandlerSession(bind=self.connection, join_transaction_mode="rollback_only"))

    def adopt(self, session: HandlerSession) -> HandlerSession:
        """Take a new session for the one of the handler."""
        self._session, session.unit = session, self
        return session

    def refuse(self, how: str) -> TransactionEnded:
        """Note and return the error of a handler that would end the transaction."""
        self.error = TransactionEnded(how)
        return self.error

    @staticmethod
    def guard(engine: Engine) -> None:
        """Refuse on an engine for units that a handler ends a transaction."""
        event.listen(engine, "commit", _refuse_commit)
        event.listen(engine, "before_cursor_execute", _look_at)

    def look_at(self, statement: str) -> None:
        """Raise if a statement would end the transaction."""
        statement = COMMENTS.sub("", statement)
        word = (statement[:9].split(None, 1) or [""])[0].rstrip(";").upper()
        dialect, words = self._database.dialect, statement.upper().rstrip("; \n").split()[:2]
        if word in dialect.refused_words and not _is_partial(statement):
            raise self.refuse(f"the statement {word}")
        if (both := " ".join(words)) in dialect.refused_words:
            raise self.refuse(f"the statement {both}, which takes the mark of idemp from it")
        if word in self._database.dialect.session_words:
            self._spoiled = self._spoiled or not self._database.dialect.local_words.intersection(statement.upper().split()[1:2])

    def holds(self) -> bool:
        """Return whether the transaction that was marked still is the one of the connection."""
        try:
            return self._database.dialect.prove(self.connection, self.name)
        except Exception:  # noqa: BLE001 - the handler has closed the connection, or it is lost
            return False

    def intact(self) -> bool:
        """Return whether the driver is in a transaction that takes statements."""
        try:
            return self._database.dialect.is_open(self.connection)
        except Exception:  # noqa: BLE001 - as in holds()
            return False

    def restart(self) -> None:
        """Roll back and begin again, with all that listens to it."""
        self.connection.rollback()
        self.connection.begin()

    def commit(
        self,
        rows: Sequence[dict[str, Any]],
        store: Callable[[Connection, Sequence[dict[str, Any]]], None],
        fast: FastPath | None,
        *,
        lazy: bool,
    ) -> None:
        """Flush, prove the transaction, store outputs, commit.

        Args:
            rows: Outputs.
            store: Stores them.
            fast: Does all of it in one message, but for what is too long.
            lazy: Whether COMMIT need not wait for the disk.

        Raises:
            TransactionEnded: The handler was refused an end of the transaction.
            Ended: It ended it below SQLAlchemy.
            HandlerError: This is a forked child.
        """
        if self._pid != os.getpid():
            raise HandlerError("this process was forked in the transaction, which its parent ends: end it by os._exit")
        if self.error is not None:  # a handler that caught the refusal
            raise self.error
        if self._session is not None:
            self._session.flush()
            if self._session.dispatch.after_commit.listeners or self._session.dispatch.before_commit.listeners:
                raise HandlerError(NO_EVENTS)
        # What listens to commits of the user's engine is to run before COMMIT.
        if fast is None or self._database.engine.dispatch.commit or fast.too_long(rows):
            if not self._database.dialect.prove(self.connection, self.name):
                raise Ended
            self.ending = True
            store(self.connection, rows)
        else:
            self.ending = True
            fast.finish(self.connection, self.name, rows, lazy=lazy)
        self.connection.commit()  # for the fast path, in SQLAlchemy's books only
        self._committed = True

    def _close(self) -> None:
        """Give the connection back in a clean state; one that is in doubt is closed."""
        try:
            if self._spoiled:
                self.connection.invalidate()
            elif not self.connection.closed and not self.connection.invalidated:
                # A refused commit leaves SQLAlchemy's transaction dead and the driver's open.
                self._database.dialect.abandon(self.connection, committed=self._committed)
        except BaseException as error:  # the handling is over, and this connection cannot be used again
            self.connection.invalidate()
            if not isinstance(error, Exception):
                raise
        finally:
            self.connection.close()
            if self._database.engine.pool is not self._pool:  # given up in an outage, and this connection went back to it
                self._pool.dispose()


def _refuse_commit(connection: Connection) -> None:
    unit: Unit = connection.get_execution_options()[UNIT]
    if not unit.ending:
        raise unit.refuse("connection.commit()")


def _look_at(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
    if statement[:6] not in HARMLESS and statement.strip():
        connection.get_execution_options()[UNIT].look_at(statement)


def _is_partial(statement: str) -> bool:
    """Return whether a statement goes back to a savepoint, prepares another statement, or makes or drops a temporary table."""
    words = statement.upper().split()
    if words[0] in ("CREATE", "DROP"):
        return "TEMPORARY" in words[1:4]
    return (words[0] == "ROLLBACK" and "TO" in words[1:3]) or (words[0] == "PREPARE" and words[1:2] != ["TRANSACTION"])


@contextmanager
def kept_open(session: Session, connection: Connection, dialect: Dialect) -> Iterator[None]:
    """Refuse a commit of a caller's session in this block, and find another end of its transaction.

    What the block emits is stored after it, and its caller commits after that: both have to be in the transaction of the claim. On
    PostgreSQL, the COMMIT of a transaction in which an error was caught rolls back without an error.

    Raises:
        BlockEnded: The block has ended the transaction, or tried to commit it.
        BlockRolledBack: It has caught a database error, after which the transaction can only be rolled back.

    Example:
        >>> from sqlalchemy import create_engine
        >>> from idemp.sql.sqlite import SqliteDialect
        >>> with Session(create_engine("sqlite://")) as session, kept_open(session, session.connection(), SqliteDialect()):
        ...     session.commit()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        idemp.errors.BlockEnded: the block ended the transaction of its claim by session.commit(): ...
    """

    def refuse(_session: Session) -> None:
        if not session.in_nested_transaction():
            raise BlockEnded("session.commit()")

    ours, root, name = session.get_transaction(), connection.get_transaction(), f"idemp_{secrets.token_hex(8)}"
    dialect.mark_within(connection, name)
    event.listen(session, "before_commit", refuse)
    try:
        yield
        if session.get_transaction() is not ours or connection.closed or connection.get_transaction() is not root:
            raise BlockEnded("a commit or a rollback", committed=None)
        _prove(connection, dialect, name)
    finally:
        event.remove(session, "before_commit", refuse)


def _prove(connection: Connection, dialect: Dialect, name: str) -> None:
    try:
        same = dialect.prove_within(connection, name)
    except exc.DBAPIError as error:
        if dialect.classify(error) is not Kind.OTHER:
            raise
        raise BlockRolledBack("a database error that it caught") from error
    if not same:
        raise BlockEnded("a commit or a rollback below SQLAlchemy", committed=None)
