"""When what pends may be taken. Messages pend in our own time; effects in one of their own, far behind all messages.

So one index serves both, neither is ever met where the other is looked for, however many of them wait, and a relay of an
earlier release, which knows of no effects, does not find any.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import case

from idemp.messages import OutputKind

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

EFFECT: Final = OutputKind.EFFECT.value
EFFECTS_LATER: Final = timedelta(days=1_000_000)
"""How far the time in which effects are due is ahead of ours: some 2,700 years."""
EFFECTS_FROM: Final = datetime(4000, 1, 1, tzinfo=UTC)
"""What is due from then on is an effect, up to what is in quarantine."""
NEVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""When quarantined messages are due: behind all that waits, in the index that relays read."""
NEVER_RUN: Final = datetime(9999, 7, 1, tzinfo=UTC)
"""When quarantined effects are due."""


class Due(NamedTuple):
    """When a relay may take an output, and how often it may have been sent by then; and since when an effect may be run.

    `broker_id` is the broker that messages go to, `None` for the default one; effects go to none.
    """

    at: datetime
    tries: int
    effects_at: datetime
    broker_id: int | None = None

    @classmethod
    def after(cls, now: datetime, relay_after: timedelta, broker_id: int | None = None) -> Due:
        """A unit that leaves its outputs to the relay at once does not send them itself. Effects nobody else runs."""
        return cls(now + relay_after, 1 if relay_after else 0, now + EFFECTS_LATER, broker_id)

    def of(self, kind: str) -> tuple[int, datetime, int | None]:
        """Attempts so far, when it is due, and the broker of an output of this kind."""
        return (0, self.effects_at, None) if kind == EFFECT else (self.tries, self.at, self.broker_id)


def told(due_at: datetime) -> datetime:
    """When something is due, as people count time.

    Example:
        >>> told(datetime(2026, 11, 22, tzinfo=UTC) + EFFECTS_LATER).date().isoformat()
        '2026-11-22'
    """
    return due_at - EFFECTS_LATER if EFFECTS_FROM <= due_at < NEVER else due_at


def moved(
    due_at: ColumnElement[datetime], until: ColumnElement[datetime], effects_until: ColumnElement[datetime]
) -> ColumnElement[datetime]:
    """`until` for a message, `effects_until` for an effect: what a row is due at from now on."""
    effect = ((due_at >= EFFECTS_FROM) & (due_at < NEVER)) | (due_at >= NEVER_RUN)
    return case((effect, effects_until), else_=until)
