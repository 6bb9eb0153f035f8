"""A transaction in a handler's hands: it works on connection and session, and can't end them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from idemp.errors import ConfigurationError, TransactionEnded
from idemp.inbox.sql import failures

if TYPE_CHECKING:
    from sqlalchemy import Connection, Transaction
    from sqlalchemy.orm import Session, sessionmaker

    from idemp.errors import TransientStoreError


class HeldTransaction:
    """What `idemp.inbox.sql.guard` watches; who makes it gives it a connection and ends it.

    Attributes:
        ending: whether it is at its end, or not begun yet, so that nothing has to be guarded.
    """

    _connection: Connection

    def __init__(self) -> None:
        self.ending = True
        self._session: Session | None = None
        self._broken: Exception | None = None  # why it must not be committed
        self._asked_again: TransientStoreError | None = None

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
            event.listen(session, "before_commit", self._before_session_commit)
            # `with ctx.session as session:` would drop what it holds, without a word.
            session.close = partial(self.refuse, "close")  # type: ignore[method-assign]
            self._session = session
        return self._session

    def usable(self) -> bool:
        """Whether the connection is still there, so that it can't be what the handler failed of."""
        if self._connection.closed or self._connection.invalidated:
            return False
        driver = self._connection.connection.driver_connection
        return not getattr(driver, "closed", False) and bool(getattr(driver, "open", True))

    def flush(self) -> None:
        """Send what the session still holds, so that its failures count as the handler's."""
        if self._broken is not None:
            raise self._broken
        if self._session is not None:
            self._session.flush()

    # For the guard --------------------------------------------------------------------------------------------------

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
        error.add_note(
            "It rolled back the handling's transaction. Let it out, or use begin_nested() for a part of the work."
        )
        self._broken = failures.translate(error) or (error if isinstance(error, Exception) else self._had_ended())

    def asked_again(self, error: TransientStoreError) -> None:
        """The database asked to try again; on MySQL a deadlock has ended the transaction as well."""
        self._asked_again = error

    def _before_session_commit(self, session: Session) -> None:
        if not self.ending and session.get_nested_transaction() is None:
            self.refuse("commit")
