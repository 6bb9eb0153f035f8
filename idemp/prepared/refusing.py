"""The errors of prepared messages in words, the same from every home and every barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.errors import (
    AlreadyPassed,
    ConfigurationError,
    OppositeDecision,
    PreparedConflict,
    RolledBack,
    UnknownPrepared,
)
from idemp.prepared.port import Decision

if TYPE_CHECKING:
    from uuid import UUID

    from idemp.errors import Committed
    from idemp.prepared.port import Prepared


def conflict(prepared: Prepared) -> PreparedConflict:
    """The id is there with another message."""
    named = f"{prepared.key!r} (id {prepared.id})" if prepared.key else str(prepared.id)
    return PreparedConflict(
        f"A message {named} was prepared before, with another destination, type or body.",
        fix="Use one key for one message.",
    )


def unknown(id: UUID, decision: Decision) -> UnknownPrepared:
    """A decision about what is not there.

    Example:
        >>> from uuid import UUID
        >>> print(unknown(UUID(int=7), Decision.COMMIT))
        No message 00000000-0000-0000-0000-000000000007 is prepared, so the decision 'commit' changed nothing. Whether ...
    """
    return UnknownPrepared(
        f"No message {id} is prepared, so the decision {decision.value!r} changed nothing.",
        committed="unknown",
        fix="If it was decided longer ago than the home's retention, all is well; else prepare before you decide.",
    )


def opposite(id: UUID, decision: Decision, *, committed: Committed = "unknown") -> OppositeDecision:
    """A decision after the opposite one.

    Example:
        >>> from uuid import UUID
        >>> print(opposite(UUID(int=7), Decision.COMMIT).message)
        Message 00000000-0000-0000-0000-000000000007 was rolled back before: it can't be committed, and is not published.
    """
    if decision is Decision.COMMIT:
        return OppositeDecision(
            f"Message {id} was rolled back before: it can't be committed, and is not published.",
            committed=committed,
            fix="If the local work is committed, no barrier stopped it: undo it, or prepare the message under another key.",
        )
    return OppositeDecision(
        f"Message {id} was committed before: it can't be rolled back, and is published.",
        committed=committed,
        fix="Undo the work with a message of its own.",
    )


def rolled_back(id: UUID) -> RolledBack:
    """Local work that comes after the checker."""
    return RolledBack(
        f"The checker was first: message {id} is rolled back, and its local work must not commit.",
        fix="Roll back; to try again, prepare it under another key, and with a longer check_after.",
    )


def already_passed(id: UUID) -> AlreadyPassed:
    """Local work that was done before."""
    return AlreadyPassed(
        f"The local work of message {id} is committed already.",
        fix="Roll back this transaction, and don't do the work again.",
    )


def work_ended() -> ConfigurationError:
    """Local work whose transaction is not there any more, so that its end says nothing."""
    return ConfigurationError(
        "The local work ended its transaction itself, by a commit, a rollback or a close of its session.",
        fix="Let `submit_after` do that; to have the work rolled back, raise an exception.",
    )


def work_not_done(work: object) -> ConfigurationError:
    """Local work that was called and did nothing yet."""
    return ConfigurationError(
        f"The local work {work!r} is asynchronous or a generator: nothing of it was done.",
        fix="Give a plain function.",
    )
