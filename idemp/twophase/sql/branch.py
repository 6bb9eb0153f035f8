"""A branch by SQLAlchemy: the handler's session and connection in another database, which it can't end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import exc
from sqlalchemy.orm import Session

from idemp.errors import (
    ConfigurationError,
    HandlerError,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
)
from idemp.inbox.sql import drivers, failures
from idemp.inbox.sql.claiming import AnotherTransaction
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.inbox.sql.held import HeldTransaction
from idemp.showing import logger
from idemp.twophase.port import Ended, Prepared
from idemp.twophase.sql.kinds import is_aborted, was_rolled_back

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import sessionmaker

    from idemp.twophase.port import BranchId
    from idemp.twophase.sql.kinds import Kind

log = logger("idemp.twophase")


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


class SqlBranch(HeldTransaction):
    """A transaction in another database. Made by `SqlDatabase.begin`, used by one thread, never twice."""

    def __init__(self, database: BranchingDatabase, id: BranchId) -> None:
        super().__init__()
        self._database = database
        self._id = id
        self._is_prepared = self._is_over = self._is_lost = False
        try:
            self._connection = database.engine.connect().execution_options(**{UNIT_OPTION: self})
            try:
                self._hold()
                self._begun = database.kind.begin(self._connection, id)
            except BaseException:
                self._discard()
                raise
        except exc.SQLAlchemyError as error:
            raise database.meaning(error) from error
        self.ending = False

    @property
    def prepared(self) -> Prepared:
        """How a decision knows it."""
        return Prepared(self._database.name, self._database.place, self._begun)

    @property
    def broken(self) -> Exception | None:
        """Why it must not be committed, if the handler did what forbids it."""
        self._see_whether_taken()
        return self._broken

    # As a handler's ------------------------------------------------------------------------------------------------

    @property
    def _session_factory(self) -> sessionmaker[Any]:
        return self._database.session_factory

    def _refusal(self, what: str) -> TransactionEnded:
        return TransactionEnded(
            f"The handler issued {what} on the database {self._database.name!r}, whose transaction ends with its claim's; "
            "all its work was rolled back.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back; use begin_nested() for a part of the work.",
        )

    def _foreign_session(self) -> ConfigurationError:
        return ConfigurationError(
            f"The session factory of the database {self._database.name!r} made a session on another engine.",
            fix="Give App the sessionmaker of that engine, without binds=.",
        )

    def _had_ended(self) -> TransactionEnded:
        return TransactionEnded(
            f"The transaction in the database {self._database.name!r} had ended before idemp prepared it: by a commit or "
            "rollback behind SQLAlchemy's back. What came after was rolled back, and so was the claim.",
            committed="unknown",
            fix="See whether the handler's effects are there, mend the handler, then replay or discard the message.",
        )

    def refuse(self, what: str) -> None:
        """As of any held transaction, but for SQLAlchemy's own rollback, which is a statement here."""
        if not (self._is_lost and what == "XA"):
            super().refuse(what)

    def lost_to(self, error: BaseException) -> None:
        """As of any held transaction; what SQLAlchemy sends next ends it."""
        self._is_lost = True
        super().lost_to(error)

    # For the protocol -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Prove that this is still the same transaction, and prepare it."""
        self.flush()
        self.ending = True
        try:
            self._database.kind.prepare(self._connection, self._id, self._begun)
        except AnotherTransaction as error:
            raise self._asked_again or self._had_ended() from error
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

    def commit(self) -> Ended:
        """On its own connection; where that is gone, on another one."""
        try:
            if not self._is_over and self.usable():
                ended = self._database.kind.end_own(self._connection, self._id, commit=True)
                self._is_over = ended is not Ended.BUSY
                return ended
        except Exception as error:  # noqa: BLE001 - whatever became of the connection: the decision stands
            log.debug("a branch's own connection did not commit it: %s", error)
            self._discard()
        return self._database.end(self._id, commit=True)

    def rollback(self) -> None:
        """On its own connection; if that fails it is discarded, and with it all that was not prepared."""
        if self._is_over:
            return
        self.ending = True
        self._give_up_connection()
        try:
            if self.usable():
                if self._is_prepared:
                    self._database.kind.end_own(self._connection, self._id, commit=False)
                else:
                    self._database.kind.abandon(self._connection, self._id)
                self._is_over = True
        except Exception as error:  # noqa: BLE001 - as above
            log.debug("a branch was not rolled back by its own connection: %s", error)

    def leave(self) -> None:
        """A connection goes back to its pool only if the branch has ended on it."""
        self.ending = True
        if not self._is_over or self._broken is not None or self._session_changed:
            self._discard()
        with suppress(exc.SQLAlchemyError):
            if self._session is not None:
                Session.close(self._session)
        with suppress(exc.SQLAlchemyError):
            if not self._connection.closed:
                drivers.release(self._connection)
                self._connection.close()

    def _discard(self) -> None:
        with suppress(exc.SQLAlchemyError):
            if not self._connection.closed:
                self._connection.invalidate()
