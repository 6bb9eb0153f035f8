"""Ending prepared branches: with patience, and without taking one that is gone for one that was committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from idemp.twophase.port import Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.twophase.port import Database, Prepared

_BUSY_PAUSES: Final = (0.02, 0.05, 0.1, 0.3)
"""Seconds. A server takes a moment to notice that a connection has ended, and another process to do what it is at."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Why a branch that was to be committed is not known to be.

    Attributes:
        reason: as it follows the database's name.
        is_lost: whether nobody can commit it any more, so that a person has to mend what it should have written.

    Example:
        >>> Unfinished("is not registered here", is_lost=True).reason
        'is not registered here'
    """

    reason: str
    is_lost: bool = False


def why_unfinished(database: Database, prepared: Prepared, ended: Ended) -> Unfinished | None:
    """Why a branch that was to be committed is not known to be; `None` if it is."""
    if ended is Ended.BUSY:
        return Unfinished("has it in another connection's hands")
    if ended is Ended.GONE and database.place != prepared.place:  # perhaps it is still there
        return Unfinished(f"is {database.place} here, and its part was prepared in {prepared.place}")
    # Prepared it was, or nothing would have been decided; so somebody ended it, and only who goes by the decision should.
    if ended is Ended.GONE and database.outcome(prepared) is False:
        return Unfinished("has rolled it back, by hand or by losing it", is_lost=True)
    return None


def patiently(end: Callable[[], Ended], wait: Callable[[float], object]) -> Ended:
    """End a branch; while it is in other hands, wait a moment.

    Example:
        >>> import threading
        >>> patiently(lambda: Ended.GONE, threading.Event().wait)
        <Ended.GONE: 'gone'>
    """
    for pause in _BUSY_PAUSES:
        ended = end()
        if ended is not Ended.BUSY:
            return ended
        wait(pause)
    return end()
