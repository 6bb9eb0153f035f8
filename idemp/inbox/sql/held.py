"""A transaction in a handler's hands: it works on connection and session, and can't end them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event, exc

from idemp.errors import ConfigurationError, HandlerError, TransactionEnded
from idemp.inbox.sql import drivers, failures
from idemp.inbox.sql.guard import roll_back
from idemp.showing import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import Connection, NestedTransaction, Transaction
    from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

    from idemp.errors import TransientStoreError


# Options of SQLAlchemy's connection that would change idemp's own statements, and what they usually are.
_STATEMENT_OPTIONS: Final[Mapping[str, Any]] = {
    "stream_results": False,
    "yield_per": None,
    "schema_translate_map": None,
    "no_parameters": False,
}


class HeldTransaction:
    """What `idemp.inbox.sql.guard` watches; who makes it gives it a connection and ends it.

    Attributes:
        ending: whether it is at its end, or not begun yet, so that nothing has to be guarded.
        own_statement: the last statement through SQLAlchemy, if it was one of idemp's own that changes the session.
        undone: the last savepoint of the handler's own that was rolled back on the connection.
    """

    _connection: Connection
    _driver: Any  # kept, since a handler can take it away from the connection

    def __init__(self) -> None:
        self.ending = True
        self.own_statement: str | None = None
        self.undone: NestedTransaction | None = None
        self._session: Session | None = None
        self._joined: NestedTransaction | None = None  # a savepoint in which the session began
        self._broken: Exception | None = None  # why it must not be committed
        self._asked_again: TransientStoreError | None = None
        self._taken: Exception | None = None  # the connection, by the handler
        self._session_changed = False

    # For who makes it -----------------------------------------------------------------------------------------------

    @property
    def _session_factory(self) -> sessionmaker[Any]:
        raise NotImplementedError

    def _refusal(self, what: str) -> TransactionEnded:
        """What a handler is told that issued `what`."""
        raise NotImplementedError

    def _foreign_session(self) -> ConfigurationError:
        """What is wrong with a session factory of another engine."""
        raise NotImplementedError

    def _had_ended(self) -> TransactionEnded:
        """What a handling is parked with whose transaction was not the same at its end."""
        raise NotImplementedError

    def _hold(self) -> None:
        """Watch the driver's connection, and remember the options under which statements run on SQLAlchemy's."""
        self._options = self._connection.get_execution_options()
        self._driver = self._connection.connection.dbapi_connection
        drivers.watch(self._connection, self)

    def _check_connection(self) -> None:
        """Look whether the handler has left the connection such that the transaction can be ended on it.

        Raises:
            HandlerError: it has not.
        """
        if self._see_whether_taken() and self._taken is not None:
            raise self._taken
        self._reset_options()
        if self.usable() and (what := drivers.left_open(self._driver)) is not None:
            self._broken = self._broken or left_open(what)
            raise self._broken

    def _reset_options(self) -> None:
        """Take back what the handler has set for its own statements: `stream_results`, for example."""
        present = self._connection.get_execution_options()
        changed = {
            name: self._options.get(name, usual)
            for name, usual in _STATEMENT_OPTIONS.items()
            if present.get(name, usual) != self._options.get(name, usual)
        }
        if changed and not self._connection.closed:
            self._connection.execution_options(**changed)

    def _give_up_connection(self) -> None:
        """End a connection on which nothing can be ended any more; the server rolls back."""
        if self._see_whether_taken():
            # A detached one is in no pool: nothing else would end it.
            if self._was_taken() and self._connection.connection.dbapi_connection is not None:
                with suppress(Exception):
                    self._connection.dialect.do_terminate(self._driver)
            self._invalidate()
        elif self.usable() and drivers.left_open(self._driver) is not None:
            self._invalidate()

    def _invalidate(self) -> None:
        with suppress(exc.SQLAlchemyError):
            if not self._connection.closed:
                self._connection.invalidate()

    def _see_whether_taken(self) -> bool:
        """Remember it if the handler has taken the connection away."""
        if self._taken is None and self._was_taken():
            self._broken = self._taken = self._refusal("detach(), close() or invalidate()")
        return self._taken is not None

    def _was_taken(self) -> bool:
        """Whether the handler has parted the connection from its pool, or given it back."""
        if self._connection.closed or self._connection.invalidated:
            return False
        fairy = self._connection.connection
        return fairy.dbapi_connection is None or fairy.is_detached

    # For handlers ---------------------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """Its own connection."""
        return self._connection

    @property
    def session(self) -> Session:
        """A session of the user's own factory on that connection."""
        if self._session is None:
            session: Session = self._session_factory(bind=self._connection, join_transaction_mode="control_fully")
            if session.bind is not self._connection:
                raise self._foreign_session()
            self._watch_session(session)
            self._session = session
        return self._session

    def usable(self) -> bool:
        """Whether the connection is still there, so that it can't be what the handler failed of."""
        if self._connection.closed or self._connection.invalidated or self._was_taken():
            return False
        driver = self._connection.connection.driver_connection
        return not getattr(driver, "closed", False) and bool(getattr(driver, "open", True))

    def raised(self, error: Exception) -> bool:
        """Whether it raised this error itself in the handler's hands."""
        return error is self._broken or error is self._asked_again

    def flush(self) -> None:
        """Send what the session still holds, so that its failures count as the handler's."""
        self._check_connection()
        if self._broken is not None:
            raise self._broken
        if self._session is not None:
            self._session.flush()

    # For the guard --------------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether it can't be committed any more, so that a rollback does no harm."""
        return self._broken is not None

    @property
    def savepoint(self) -> Transaction | None:
        """What it is, if not a transaction of its own."""
        return None

    def refuse(self, what: str) -> None:
        """The handler tried to end the transaction; remembered, in case it swallows the error."""
        self._broken = self._refusal(what)
        raise self._broken

    def sends_commit(self) -> None:
        """SQLAlchemy is about to send COMMIT."""

    def commit_failed(self) -> None:
        """The database, or the way to it, did not take the COMMIT, as far as one can see."""

    def is_flushing(self) -> bool:
        """Whether the session is in a flush, whose failure rolls back."""
        return bool(getattr(self._session, "_flushing", False))

    def lost_to(self, error: BaseException) -> None:
        """SQLAlchemy rolls back because of a failed flush; whatever the handler does now can't be committed."""
        note = "It rolled back the handling's transaction. Let it out, or use begin_nested() for a part of the work."
        guarded(lambda: error.add_note(note), lambda _: None)
        self._broken = failures.translate(error) or (error if isinstance(error, Exception) else self._had_ended())

    def uses_connection(self) -> None:
        """The handler is about to send something."""

    def changed_session(self) -> None:
        """A statement changed the connection beyond the transaction, so that it must not go back to its pool."""
        self._session_changed = True

    def asked_again(self, error: TransientStoreError) -> None:
        """The database asked to try again; on MySQL a deadlock has ended the transaction as well."""
        self._asked_again = error

    # A session that has sent nothing ends its transaction without a word to the connection, and drops what it holds.

    def _watch_session(self, session: Session) -> None:
        event.listen(session, "after_begin", self._after_session_begin)
        event.listen(session, "before_commit", self._before_session_commit)
        event.listen(session, "after_rollback", self._after_session_rollback)
        event.listen(session, "after_transaction_end", self._after_session_end)
        session.rollback = partial(self._roll_back_session, session, session.rollback)  # type: ignore[method-assign]
        for end in ("close", "reset", "invalidate"):  # `with ctx.session as session:` closes
            setattr(session, end, partial(self._end_session, end, getattr(session, end)))

    def _end_session(self, what: str, end_it: Callable[[], None]) -> None:
        if not self.ending:
            self.refuse(what)
        end_it()

    def _roll_back_session(self, session: Session, roll_back_begun: Callable[[], None]) -> None:
        """Refuse a rollback of the session also if its transaction has not begun, which SQLAlchemy takes for done."""
        if not session.in_transaction():
            self._session_rolls_back()
        roll_back_begun()

    def _after_session_begin(self, _: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if transaction.parent is None:
            self._joined = connection.get_nested_transaction()

    def _before_session_commit(self, session: Session) -> None:
        if not self.ending and session.get_nested_transaction() is None:
            self.refuse("commit")

    def _after_session_rollback(self, session: Session) -> None:
        if session.get_nested_transaction() is None:
            self._session_rolls_back()

    def _after_session_end(self, _: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            self._session_rolls_back()
            self._joined = None

    def _session_rolls_back(self) -> None:
        is_part = self._joined is not None and self._joined is self.undone
        if not (self.ending or self.is_lost or is_part):
            roll_back(self)


def left_open(what: str) -> HandlerError:
    """What a handling fails of on whose connection no further statement can follow."""
    return HandlerError(
        f"The handler left {what} open on the driver's own connection, which was closed; its work was rolled back.",
        fix="Finish it before the handler returns: leave its `with` block, read its results.",
    )
