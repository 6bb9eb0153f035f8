"""Claims in a transaction of a caller's: `Inbox.claim` and `App.initiate(session=…)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idemp.context import BaseContext
from idemp.errors import Conflict, InFlight, Late
from idemp.messages import RESULT
from idemp.ports import Claim, Handled, Verdict

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from idemp.sql.scheduler import SqlScheduler
    from idemp.sql.store import SqlStore

__all__ = ["Caller", "join"]


@dataclass(frozen=True)
class Caller:
    """The transaction of a caller's session, as a context uses it.

    Example:
        >>> Caller(None).session is None
        True
    """

    session: Session

    @property
    def connection(self) -> Any:
        """The connection of the session."""
        return self.session.connection()


@contextmanager
def join(
    session: Session,
    store: SqlStore,
    scheduler: SqlScheduler,
    kind: Callable[..., Any],
    tx: Any,
    claim: Claim,
    properties: Mapping[str, Any],
    *,
    wait: float,
    parks_late: bool,
    unrelayed: Callable[[int], None],
    grace: float | None = None,
) -> Iterator[Any]:
    """Claim an id in the transaction of a session, and store there what the block emits. If anything fails, it is rolled back.

    Args:
        session: Of the caller, who commits it after the block.
        store: On the engine of the session.
        scheduler: Knows whether a relay is alive.
        kind: Class of the context.
        tx: What the context works with.
        claim: The id.
        properties: Of the message.
        wait: Seconds to wait for another transaction that holds the id.
        parks_late: Whether a message that is older than deleted claims is refused.
        unrelayed: Is called with the number of outputs if no relay is alive that would send them.
        grace: Seconds for which relays leave the outputs to the caller, who needs no relay then; None sends them by a relay.

    Raises:
        InFlight: Another transaction has held the id for longer; the session was rolled back.
        Conflict: Another message was handled under the id.
        Late: Claims of the message's age have been deleted.
        ConfigurationError: The session commits each statement (AUTOCOMMIT).
        BlockEnded: The block has ended the transaction of the claim, or tried to commit it: outputs would be lost.
        BlockRolledBack: The block has caught a database error, after which the transaction can only be rolled back.

    Example:
        >>> join.__name__
        'join'
    """
    from idemp.sql.dialects import autocommit_refused
    from idemp.sql.guard import kept_open

    connection = session.connection()
    if store.database.dialect.autocommits(connection):
        raise autocommit_refused()
    with _undone(session):
        answer = store.claim_within(connection, claim, wait)
        late = answer.late and parks_late
        if late:
            store.withdraw_on(connection, claim)
        if answer.verdict is Verdict.IN_FLIGHT:
            raise InFlight(
                f"another transaction holds the id {claim.original!r}, or on SQLite the database, and has not ended within "
                f"{wait:g} s; yours was rolled back: try it again"
            )
    if answer.verdict is Verdict.CONFLICT:
        raise Conflict(f"another message was handled under the id {claim.original!r}")
    if late:
        raise Late("claims of its age have been deleted, so it may have been handled")
    unit = kind(claim.consumer, properties, tx, claim)
    unit.duplicate = answer.verdict is Verdict.DUPLICATE
    if unit.duplicate:
        unit.stored, unit.result = answer.outputs, answer.result
        with _undone(session), _closing(unit):
            yield unit
        return
    with _undone(session):
        with _closing(unit), kept_open(session, connection, store.database.dialect):
            yield unit
        outputs = unit.outputs()
        if outputs:
            store.store_on(connection, [Handled(claim.consumer, claim, outputs)], grace or 0.0)
        unit.stored = [output for output in outputs if output.kind != RESULT]
        if unit.stored and grace is None and not scheduler.relay_alive(connection):
            unrelayed(len(unit.stored))


@contextmanager
def _closing(unit: BaseContext) -> Iterator[None]:
    """Refuse messages after the block: they would be lost."""
    try:
        yield
    finally:
        unit.close()


@contextmanager
def _undone(session: Session) -> Iterator[None]:
    """Roll the caller's transaction back if anything fails: a claim without its effects and outputs must not be committed."""
    try:
        yield
    except Exception:
        session.rollback()
        raise
    except BaseException:  # a task that was cancelled may be cancelled again while it waits for a rollback
        session.invalidate()
        raise
