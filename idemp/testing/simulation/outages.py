"""How a statement of the database fails: it is refused, or its connection is lost before or after it took effect."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from idemp.errors import StoreUnavailable, TransientStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemp.testing.simulation.stage import Actor

__all__ = ["AWAY", "AWAY_FOR", "LOST", "REFUSED", "UNANSWERED", "asked", "lost_answer"]

REFUSED: Final = "it is refused"
"""The server answers with an error: a deadlock, say. A transaction is rolled back by it."""
LOST: Final = "the connection is lost"
"""Before the statement took effect. The server rolls an open transaction back when it notices."""
UNANSWERED: Final = "its answer is lost"
"""The statement took effect, and then the connection is lost."""
AWAY: Final = "the database is away for long"
"""It can't be reached for so long that a worker stops to try at once, and holds what it has in hand."""
AWAY_FOR: Final = 8
"""Statements of the process that meets it; a delivery runs again five times at once."""
_EVERY: Final = (REFUSED, LOST, UNANSWERED, AWAY)


def asked(
    actor: Actor,
    call: str,
    kinds: tuple[str, ...] = _EVERY,
    *,
    faults: tuple[str, ...] = (),
    ready: Callable[[], bool] | None = None,
    idle: bool = False,
) -> str:
    """Stop before a statement of an actor; what was chosen there, if the statement takes effect.

    Args:
        actor: whose statement.
        call: which one.
        kinds: how it may fail.
        faults: what else may go wrong there.
        ready: as of `Actor.point`.
        idle: likewise.

    Raises:
        TransientStoreError: it is refused.
        StoreUnavailable: the connection is lost before it took effect.
    """
    if actor.away and not actor.dead:
        actor.away -= 1
        actor.tell(call, AWAY)
        raise StoreUnavailable("The simulation says: away.")
    chosen = actor.point(call, faults=faults, outages=_named(call, kinds), ready=ready, idle=idle)
    if chosen == f"{call}, {REFUSED}":
        actor.tell(chosen)
        raise TransientStoreError("The simulation says: refused.")
    if chosen in {f"{call}, {LOST}", f"{call}, {AWAY}"}:
        actor.away = AWAY_FOR if chosen.endswith(AWAY) else 0
        actor.tell(chosen)
        raise StoreUnavailable("The simulation cut the connection to the database.")
    return chosen


def lost_answer(chosen: str) -> None:
    """Raise if the statement that took effect was not answered.

    Raises:
        StoreUnavailable: it was not.
    """
    if chosen.endswith(UNANSWERED):
        raise StoreUnavailable("The simulation took the answer away.")


@cache
def _named(call: str, kinds: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{call}, {kind}" for kind in kinds)
