"""A branch by SQLAlchemy: the handler's session and connection in another database, which it can't end."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import event, exc
from sqlalchemy.orm import Session

from idemp.errors import (
    ConfigurationError,
    HandlerError,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
)
from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import AnotherTransaction
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.twophase.port import Ended, Prepared
from idemp.twophase.sql.kinds import is_aborted, was_rolled_back

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Transaction
    from sqlalchemy.orm import sessionmaker

    from idemp.twophase.port import BranchId
    from idemp.twophase.sql.kinds import Kind

log = logging.getLogger("idemp.twophase")


class BranchingDatabase(Protocol):
    """What a branch needs of its database."""

    name: str
    engine: Engine
    kind: Kind
    session_factory: sessionmaker[Any]

    @property
    def place(self) -> str:
        """Which database it is."""

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """End a prepared branch on another connection."""

    def meaning(self, error: exc.SQLAlchemyError) -> StoreError:
        """What an error means that a statement of idemp's own met."""


class SqlBranch:
    """A transaction in another database. Made by `SqlDatabase.begin`, used by one thread, never twice."""

    def __init__(self, database: BranchingDatabase, id: BranchId) -> None:
        self.ending = True  # until the branch has begun, nothing has to be guarded
        self._database = database
        self._id = id
        self._session: Session | None = None
        self._broken: Exception | None = None
        self._asked_again: TransientStoreError | None = None
        self._is_prepared = self._is_over = self._is_lost = False
        try:
            self._connection = database.engine.connect().execution_options(**{UNIT_OPTION: self})
            try:
                self._begun = database.kind.begin(self._connection, id)
            except BaseException:
                self._discard()
                raise
        except exc.SQLAlchemyError as error:
            raise database.meaning(error) from error
        self.ending = False

    @property
    def savepoint(self) -> Transaction | None:
        """It is a transaction of its own."""
        return None

    @property
    def prepared(self) -> Prepared:
        """How a decision knows it."""
        return Prepared(self._database.name, self._database.place, self._begun)

    # For handlers ---------------------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """The branch's own connection."""
        return self._connection

    @property
    def session(self) -> Session:
        """A session of the user's own factory on that connection."""
        if self._session is None:
            session = self._database.session_factory(bind=self._connection, join_transaction_mode="control_fully")
            if session.bind is not self._connection:
                raise ConfigurationError(
                    f"The session factory of the database {self._database.name!r} made a session on another engine.",
                    fix="Give App the sessionmaker of that engine, without binds=.",
                )
            event.listen(session, "before_commit", self._before_session_commit)
            session.close = partial(self.refuse, "close")  # it would drop what it holds, without a word
            self._session = session
        return self._session

    def refuse(self, what: str) -> None:
        """The handler tried to end the transaction; remembered, in case it swallows the error."""
        if self._is_lost and what == "XA":
            return  # SQLAlchemy's own rollback
        self._broken = TransactionEnded(
            f"The handler issued {what} on the database {self._database.name!r}, whose transaction ends with its claim's; "
            "all its work was rolled back.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back; use begin_nested() for a part of the work.",
        )
        raise self._broken

    def sends_commit(self) -> None:
        """SQLAlchemy's own COMMIT finds nothing to do."""

    def commit_failed(self) -> None:
        """As above."""

    def is_flushing(self) -> bool:
        """Whether the session is in a flush, whose failure rolls back."""
        return bool(getattr(self._session, "_flushing", False))

    def lost_to(self, error: BaseException) -> None:
        """SQLAlchemy rolls back because of a failed flush; whatever the handler does now can't be committed."""
        self._is_lost = True
        self._broken = failures.translate(error) or (error if isinstance(error, Exception) else self._ended())

    def asked_again(self, error: TransientStoreError) -> None:
        """The database asked to try again; on MariaDB a deadlock has ended the transaction as well."""
        self._asked_again = error

    # For the protocol -----------------------------------------------------------------------------------------------

    def usable(self) -> bool:
        """Whether the connection is still there."""
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

    def prepare(self) -> None:
        """Prove that this is still the same transaction, and prepare it."""
        self.flush()
        self.ending = True
        try:
            self._database.kind.prepare(self._connection, self._id, self._begun)
        except AnotherTransaction as error:
            raise self._asked_again or self._ended() from error
        except exc.DBAPIError as error:
            raise self._refused(error) from error
        self._is_prepared = True

    def _refused(self, error: exc.DBAPIError) -> Exception:
        if self._asked_again is not None or was_rolled_back(error):
            return self._asked_again or TransientStoreError(
                f"The database {self._database.name!r} rolled back: {error.orig}."
            )
        if is_aborted(error):
            return HandlerError(
                f"A statement of the handler failed on the database {self._database.name!r} and the handler went on; all "
                "its work was rolled back.",
                fix="Let the error out, or use begin_nested() around a statement that may fail.",
            )
        known = failures.translate(error)
        return self._database.meaning(error) if isinstance(known, StoreUnavailable) else known or error

    def _ended(self) -> TransactionEnded:
        return TransactionEnded(
            f"The transaction in the database {self._database.name!r} had ended before idemp prepared it: by a commit or "
            "rollback behind SQLAlchemy's back. What came after was rolled back, and so was the claim.",
            committed="unknown",
            fix="See whether the handler's effects are there, mend the handler, then replay or discard the message.",
        )

    def commit(self) -> Ended:
        """On its own connection; where that is gone, on another one."""
        try:
            if not self._is_over and self.usable():
                ended = self._database.kind.end_own(self._connection, self._id, commit=True)
                self._is_over = ended is not Ended.BUSY
                return ended
        except exc.SQLAlchemyError as error:
            log.debug("a branch's own connection did not commit it: %s", error)
            self._discard()
        return self._database.end(self._id, commit=True)

    def rollback(self) -> None:
        """On its own connection; if that fails it is discarded, and with it all that was not prepared."""
        if self._is_over:
            return
        self.ending = True
        try:
            if self.usable():
                if self._is_prepared:
                    self._database.kind.end_own(self._connection, self._id, commit=False)
                else:
                    self._database.kind.abandon(self._connection, self._id)
                self._is_over = True
        except (exc.SQLAlchemyError, StoreError) as error:
            log.debug("a branch was not rolled back by its own connection: %s", error)

    def leave(self) -> None:
        """A connection goes back to its pool only if the branch has ended on it."""
        self.ending = True
        if not self._is_over or self._broken is not None:
            self._discard()
        with suppress(exc.SQLAlchemyError):
            if self._session is not None:
                Session.close(self._session)
        with suppress(exc.SQLAlchemyError):
            if not self._connection.closed:
                self._connection.close()

    def _discard(self) -> None:
        with suppress(exc.SQLAlchemyError):
            if not self._connection.closed:
                self._connection.invalidate()

    def _before_session_commit(self, session: Session) -> None:
        if not self.ending and session.get_nested_transaction() is None:
            self.refuse("commit")
