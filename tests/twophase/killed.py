"""Processes that handle one message and are killed at a step of the protocol; and processes that recover."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from idemp.inbox.sql.unit import SqlUnit
from idemp.twophase import Recovery
from idemp.twophase.sql.branch import SqlBranch
from idemp.twophase.sql.database import SqlDatabase
from idemp.twophase.sql.decisions import SqlDecisions
from tests.twophase.world import Consumer, Noting, Place

if TYPE_CHECKING:
    from collections.abc import Callable

POINTS: dict[str, tuple[type, str, str, int]] = {
    "before the branch begins": (SqlDatabase, "begin", "before", 1),
    "after the branch begins": (SqlDatabase, "begin", "after", 1),
    "after the decision is noted": (SqlDecisions, "note", "after", 1),
    "after PREPARE": (SqlBranch, "prepare", "after", 1),
    "after the last PREPARE": (SqlBranch, "prepare", "after", -1),
    "before COMMIT": (SqlUnit, "commit", "before", 1),
    "after COMMIT": (SqlUnit, "commit", "after", 1),
    "after COMMIT PREPARED": (SqlBranch, "commit", "after", 1),
    "before the decision is forgotten": (SqlDecisions, "finished", "before", 1),
    "after the decision is forgotten": (SqlDecisions, "finished", "after", 1),
    "before dispatch": (Noting, "publish", "before", 1),
    "after dispatch": (Noting, "publish", "after", 1),
}
"""Class, method, before or after it, at which call (-1: that of the last database)."""
DECIDED = list(POINTS)[list(POINTS).index("after COMMIT") :]


def die_at(point: str, databases: int) -> None:
    """From now on this process kills itself there."""
    cls, name, when, nth = POINTS[point]
    call: Callable[..., Any] = getattr(cls, name)
    calls = 0

    def killing(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        dies = calls == (databases if nth < 0 else nth)
        if dies and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = call(self, *given, **named)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(cls, name, killing)


def handle(place: Place, point: str | None, n: int, ready: Any = None) -> None:
    """Handle one message. Without a point it lives, or is killed by whoever waits until it is ready."""
    consumer = Consumer(place)
    if point is not None:
        die_at(point, len(place.others))
    if ready is not None:
        consumer.deliver(-n)  # connections, names
        ready.set()
    consumer.deliver(n)
    consumer.close()


def recover(place: Place, begin: Any) -> None:
    """One round, at the same moment as others."""
    consumer = Consumer(place)
    recovery = Recovery(consumer.coordinator)
    recovery.look()
    begin.wait()
    for _ in range(20):  # what another has in hand is not in doubt for long
        if not recovery.run_once().left:
            return
        time.sleep(0.05)
    raise SystemExit(1)
