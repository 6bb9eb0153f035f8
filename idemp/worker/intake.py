"""What a worker takes in a turn: what was held, one suspect alone, or rows that are due and deliveries of the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from idemp.errors import Unavailable
from idemp.messages import Delivery
from idemp.ports import Receiver, Scheduler
from idemp.work import Work
from idemp.worker.shell import POLL

__all__ = ["Intake", "Runner"]


class Runner(Protocol):
    """Runs what a worker takes: in groups, or as tasks of an event loop."""

    def serve(self, consume: Callable[[], None]) -> None:
        """Run a function that consumes, in the consuming thread."""

    def run(self, deliveries: Sequence[Delivery]) -> None:
        """Run what was taken; hold it, if the database takes no work."""

    def take_back(self) -> Sequence[Delivery]:
        """Return what was accepted and has not had its turn, because a turn failed."""

    def room(self) -> int:
        """Return how many deliveries may be taken."""

    def may_wait(self) -> bool:
        """Return whether nothing else is to be done while no message comes."""

    def is_free(self) -> bool:
        """Return whether a suspect may be taken."""

    def complete(self) -> Sequence[Work]:
        """Settle what was sent, and return what could not be settled."""

    def begin_suspect(self, suspect: Delivery | None) -> None:
        """Begin to run a suspect, or learn that there was none."""

    def works_again(self) -> bool:
        """Return whether an outage is over, if nothing is held any more."""

    def finish(self) -> None:
        """Let what runs come to its end, when the worker stops."""

    def running(self) -> Sequence[Work]:
        """Return the deliveries that are being claimed or handled."""

    def silent(self, turn: float) -> float:
        """Return the seconds since the consuming thread's last sign of life, or since it began a turn."""

    def watch(self, now: float) -> None:
        """Look for what keeps others waiting; called by the thread of upkeep."""


class Intake:
    """Takes what is to be done next.

    Args:
        queue: Name of the queue.
        scheduler: Leases rows that are due.
        receiver: Takes deliveries of the broker.
        set_aside: Moves redelivered messages into rows, and returns those that could not be moved.

    Attributes:
        held: Deliveries that come next, because the database took no work when it was their turn.
        obstacle: Why they are held.
        suspect_due: Whether a row is due that is to run alone.

    Example:
        >>> Intake("shop", None, None, list).held
        []
    """

    def __init__(
        self, queue: str, scheduler: Scheduler, receiver: Receiver, set_aside: Callable[[Sequence[Delivery]], list[Delivery]]
    ) -> None:
        self.receiver, self._scheduler, self._queue, self._set_aside = receiver, scheduler, queue, set_aside
        self.held: list[Delivery] = []
        self.obstacle = ""
        self.suspect_due = False
        self._aside: list[Delivery] = []  # redelivered, and not in rows yet
        self._busy = False
        self._next_rows = 0.0

    def hold(self, works: Sequence[Work]) -> None:
        """Take deliveries again, before others."""
        for work in works:
            self.held.append(work.delivery)
            self.obstacle = work.obstacle or self.obstacle

    def take(self, runner: Runner, poll: float) -> list[Delivery]:
        """Return what was held; else one suspect alone; else rows that are due, and deliveries of the broker.

        Args:
            runner: Says how many it has room for, and whether a suspect would be alone.
            poll: Seconds to wait for deliveries, if nothing is due.
        """
        if self.held:
            held, self.held = self.held, []
            return held
        if self.suspect_due and runner.is_free() and (suspect := self._take_suspect(runner)):
            return [suspect]
        room = runner.room()
        if room <= 0 or self.held:
            return []
        taken = self._rows(room // 2 or 1 if self._busy else room)
        nothing_due = not taken and not (self.suspect_due and runner.is_free())
        try:
            fresh = self.receiver.receive(room - len(taken), poll if nothing_due and runner.may_wait() else 0.0)
            self._busy = bool(fresh)
            for delivery in fresh:
                (self._aside if delivery.redelivered else taken).append(delivery)
            if self._aside:
                self._aside, self._next_rows = self._set_aside(self._aside), 0.0
                if self._aside:
                    raise Unavailable("redelivered messages could not be moved into rows")
        except Exception:
            self.held += taken
            raise
        return taken

    def _take_suspect(self, runner: Runner) -> Delivery | None:
        """Return a message that may have ended its process twice, when nothing else runs."""
        self.suspect_due, self._next_rows = False, 0.0
        self.hold(runner.complete())
        if self.held:
            return None
        suspect = self._scheduler.lease_suspect(self._queue)
        if suspect is not None:
            self.held.append(suspect)  # until it is noted whether it has company
        runner.begin_suspect(suspect)
        self.held.clear()
        return suspect

    def look_again(self) -> None:
        """Look for rows in the next turn."""
        self._next_rows = 0.0

    def _rows(self, limit: int) -> list[Delivery]:
        now = time.monotonic()
        if now < self._next_rows:
            return []
        rows, self.suspect_due = self._scheduler.lease_messages(self._queue, limit)
        self._next_rows = 0.0 if rows else now + POLL
        return list(rows)
