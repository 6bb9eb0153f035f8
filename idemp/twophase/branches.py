"""The other databases of one handling: begun when the handler asks for them, and ended with the claim's transaction."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Self

from idemp.errors import BranchUnavailable, IdempError, StoreError, StoreUnavailable, TransactionEnded
from idemp.showing import logger, text_of
from idemp.twophase.ending import Unfinished, patiently, why_unfinished
from idemp.twophase.port import BranchId, Decision, Ended, in_order, not_two_phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from idemp.inbox.port import Claim, UnitOfWork
    from idemp.twophase.coordinator import Coordinator
    from idemp.twophase.port import Branch, Database, Transaction

log = logger("idemp.twophase")


class Branches:
    """The branches of one attempt to handle a message. Used by one thread, as a context around its unit of work.

    Args:
        coordinator: knows the databases.
        claims: what the handling claims, the present id first.
        names: the databases that it may use.
    """

    def __init__(self, coordinator: Coordinator, claims: Sequence[Claim], names: Sequence[str]) -> None:
        self._coordinator = coordinator
        self._claims = claims
        self._names = names
        self._inbox = coordinator.decisions.inbox()  # asked before the claim's transaction begins
        self._token = coordinator.new_token()
        self._earlier: dict[str, list[BranchId]] = {}
        self._away: dict[str, StoreError] = {}
        self._look()
        self._open: dict[str, Branch] = {}
        self._broken: Exception | None = None
        self._decision: Decision | None = None  # once it is noted
        self._may_be_made = False

    # For the handler ------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Transaction:
        """The transaction in another database, which begins with this.

        Raises:
            HandlerError: the type's policy does not name it.
            BranchUnavailable: it can't be reached, or a branch of an earlier attempt can't be ended.
        """
        if name not in self._names:
            raise not_two_phase(name)
        if name not in self._open:
            try:
                self._open[name] = self._begun(self._coordinator.databases[name])
            except Exception as error:
                self._broken = error  # in case the handler swallows it
                raise
        return self._open[name]

    def _look(self) -> None:
        """See what is prepared, before this attempt claims its ids.

        An attempt prepares after it has claimed. So those that are seen here had the claim before, and lost it if this one
        gets it: they never commit, whatever becomes of this one. Of what is seen later nobody could say so: this attempt may
        have lost its claim without knowing it, to one that has just committed.
        """
        for name in self._names:
            try:
                listed = self._coordinator.databases[name].in_doubt()
            except StoreError as error:  # perhaps it is a duplicate, or its handler does not ask for this one
                self._away[name] = error
            else:
                self._earlier[name] = [doubt.id for doubt in listed if doubt.id.inbox == self._inbox]

    def _begun(self, database: Database) -> Branch:
        if database.name in self._away:
            raise self._away[database.name]
        self._end_earlier(database)
        number = self._coordinator.decisions.number(self._claims[0].consumer)
        return database.begin(BranchId(self._inbox, number, self._claims[0].id.key, self._token, len(self._open)))

    def _end_earlier(self, database: Database) -> None:
        """Roll back what earlier attempts left prepared: they hold locks on which this one would wait."""
        number = self._coordinator.decisions.number
        keys = {(number(claim.consumer), claim.id.key) for claim in self._claims}
        for branch in self._earlier[database.name]:
            if (branch.consumer, branch.key) not in keys:
                continue
            try:
                ended = patiently(partial(database.end, branch, commit=False), self._coordinator.pause)
            except StoreError as error:
                raise BranchUnavailable(
                    f"A transaction of an earlier attempt can't be rolled back. {error.message}",
                    fix="Nothing was committed; the delivery comes again. On PostgreSQL only the user that prepared it, or "
                    "a superuser, may end it: run `idemp recover` as that user.",
                ) from error
            if ended is Ended.BUSY:
                raise BranchUnavailable(
                    f"The database {database.name!r} has a transaction of an earlier attempt in another connection's hands.",
                    fix="Nothing was committed; the delivery comes again when that connection has ended.",
                )

    # For the protocol -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the sessions still hold, so that their failures count as the handler's.

        Raises:
            IdempError: a database could not be opened, or the handler ended its transaction, and went on.
        """
        if self._broken is not None:
            raise self._broken
        for branch in self._open.values():
            branch.flush()

    def raised(self, error: Exception) -> bool:
        """Whether one of these transactions raised this error in the handler's hands, or could not be begun."""
        return error is self._broken or any(error is branch.broken for branch in self._open.values())

    def meaning(self, error: Exception) -> IdempError | None:
        """What an exception of the handler means if one of these databases is gone, or was ended by it; else `None`."""
        if isinstance(error, IdempError) and not isinstance(error, StoreUnavailable):
            return None
        for branch in self._open.values():
            if isinstance(branch.broken, TransactionEnded):
                return branch.broken  # the handler swallowed it, and failed of its consequences
        gone = [name for name, branch in self._open.items() if not branch.usable()]
        if not gone:
            return None
        lost = BranchUnavailable(
            f"The connection to the database {gone[0]!r} was lost: {text_of(error)}",
            fix="Nothing was committed; the delivery comes again.",
        )
        lost.answers = self._answers(gone[0])
        return lost

    def _answers(self, name: str) -> bool:
        """Whether a database answers on another connection."""
        try:
            self._coordinator.databases[name].in_doubt()
        except StoreError:
            return False
        return True

    def prepare(self, unit: UnitOfWork) -> None:
        """Note in the unit what its COMMIT will decide, then prepare all branches.

        Raises:
            Exception: as of `Branch.prepare`; nothing is decided.
        """
        if not self._open:
            return
        decisions, claim, prepared = self._coordinator.decisions, self._claims[0], in_order(self._open)
        number = decisions.number(claim.consumer)
        self._decision = decisions.note(unit, number, claim.id.key, self._token, prepared)
        for name, branch in self._open.items():
            try:
                branch.prepare()
            except BranchUnavailable as error:
                error.answers = not branch.usable() and self._answers(name)
                raise

    def decide(self, unit: UnitOfWork) -> None:
        """Commit the unit.

        Raises:
            Exception: as of `UnitOfWork.commit`; where it does not say that nothing was committed, the branches stay as they
                are, and the next attempt or recovery finds out.
        """
        try:
            unit.commit()
        except BaseException as error:
            self._may_be_made = not _is_certainly_not_committed(error)
            raise
        self._may_be_made = True

    def carry_out(self) -> None:
        """Commit all branches, if that was decided, and forget the decision.

        Raises:
            BranchUnfinished: a branch is prepared still.
        """
        if self._decision is None:
            return
        unfinished = {}
        for name, branch in self._open.items():
            try:
                ended = patiently(branch.commit, self._coordinator.pause)
                why = why_unfinished(self._coordinator.databases[name], branch.prepared, ended)
            except StoreError as error:
                why = Unfinished(f"failed: {error.message.rstrip('.')}")
            if why is not None:
                unfinished[name] = why
        self._coordinator.ended(self._decision, unfinished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for branch in self._open.values():
            if not self._may_be_made:
                branch.rollback()
            branch.leave()


def _is_certainly_not_committed(error: BaseException) -> bool:
    if isinstance(error, IdempError):
        return error.committed == "no"
    return isinstance(error, Exception)  # the database's own refusal, or a listener's that comes before COMMIT
