"""The intake of a worker: held deliveries, one suspect alone, or rows that are due and deliveries of the broker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from idemp.errors import Unavailable
from idemp.handling import Handling
from idemp.messages import Delivery, MessageRow
from idemp.ports import Receiver, Scheduler
from idemp.protocol import Protocol
from idemp.worker.shell import POLL

__all__ = ["HandlerRunner", "Intake", "Solitude"]

ALONE: Final = 10.0  # seconds for which a suspect has its process to itself; twice as long with each delivery
DOUBLINGS: Final = 5
PATIENCE: Final = 1.0  # seconds for which nothing is taken, so that a suspect can run alone; twice as long with each try in vain
LONGEST_PATIENCE: Final = 16.0


class HandlerRunner(ABC):
    """Runs what a worker takes: in groups, or as tasks of an event loop.

    Attributes:
        in_hand: Deliveries that were accepted and are not settled when the consuming thread takes others.
        settled: Whether anything was settled, the last time.
        accepted: Deliveries that have not had their turn.

    Example:
        >>> HandlerRunner.in_hand
        0
    """

    in_hand = 0
    settled = True

    def __init__(self) -> None:
        self.accepted: list[Handling] = []

    def serve(self, consume: Callable[[], None]) -> None:
        """Run a function that consumes."""
        consume()

    @abstractmethod
    def run(self, deliveries: Sequence[Delivery]) -> None:
        """Run what was taken; hold it, if the database takes no work."""

    @abstractmethod
    def room(self) -> int:
        """Return how many deliveries may be taken."""

    @abstractmethod
    def may_wait(self) -> bool:
        """Return whether nothing else is to be done while no message comes."""

    @abstractmethod
    def running(self) -> list[Handling]:
        """Return the deliveries that are being claimed or handled."""

    def wait(self) -> None:  # noqa: B027
        """Wait a moment for what is in hand, because nothing may be taken."""

    def watch(self, now: float) -> None:  # noqa: B027
        """Look for what keeps others waiting; called by the thread of upkeep."""

    def finish(self) -> None:  # noqa: B027
        """Let what runs come to its end, when the worker stops."""


class Solitude:
    """Keeps a process free of other deliveries for a suspect, within limits: others must not wait for ever.

    Attributes:
        patience: Seconds for which nothing is taken, so that what runs comes to its end; longer after each try in vain.

    Example:
        >>> Solitude(None).wanted(0, suspect_due=True)
        False
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.patience = PATIENCE
        self._patient_until = self._next_patience = 0.0
        self._suspect: MessageRow | None = None  # it runs alone
        self._alone_until = 0.0

    def is_free(self, in_hand: int) -> bool:
        """Return whether a suspect may be taken: nothing else is in hand, or that was waited for in vain for long."""
        return not in_hand or self.patience > LONGEST_PATIENCE

    def begin(self, suspect: Delivery | None, in_hand: int) -> None:
        """Begin to run a suspect, alone or in company; with None, there was none."""
        if suspect is not None and (row := suspect.row) is not None:
            if in_hand:
                self._scheduler.accompany(row)
            else:
                self._suspect = row
                self._alone_until = time.monotonic() + ALONE * 2 ** max(0, min(row.deliveries - 2, DOUBLINGS))
        self.patience, self._patient_until = PATIENCE, 0.0

    def wanted(self, in_hand: int, *, suspect_due: bool) -> bool:
        """Return whether nothing is to be taken: a suspect runs alone, or could if the others came to an end."""
        now = time.monotonic()
        if self._suspect is not None:
            if in_hand and now < self._alone_until:
                return True
            if in_hand:
                self._scheduler.accompany(self._suspect)
            self._suspect = None
        elif suspect_due and in_hand and now >= self._next_patience:
            self._patient_until = self._patient_until or now + self.patience
            if now < self._patient_until:
                return True
            self._next_patience, self._patient_until = now + self.patience, 0.0
            self.patience *= 2
        return False


class Intake:
    """Takes what is to be done next.

    Args:
        queue: Name of the queue.
        scheduler: Leases rows that are due.
        receiver: Takes deliveries of the broker.
        protocol: Moves redelivered messages into rows, and settles what was sent before a suspect runs.

    Attributes:
        held: Deliveries that come next, because the database took no work when it was their turn.
        obstacle: Why they are held.
        suspect_due: Whether a row is due that is to run alone.
        solitude: Keeps the process free for it.

    Example:
        >>> Intake("shop", None, None, None).held
        []
    """

    def __init__(self, queue: str, scheduler: Scheduler, receiver: Receiver, protocol: Protocol) -> None:
        self.receiver, self._scheduler, self._queue, self._protocol = receiver, scheduler, queue, protocol
        self.held: list[Delivery] = []
        self.obstacle = ""
        self.suspect_due, self.solitude = False, Solitude(scheduler)
        self._aside: list[Delivery] = []  # redelivered, and not in rows yet
        self._busy = False
        self._next_rows = 0.0

    def hold(self, handlings: Sequence[Handling]) -> None:
        """Take deliveries again, before others."""
        for handling in handlings:
            self.held.append(handling.delivery)
            self.obstacle = handling.obstacle or self.obstacle

    def take(self, runner: HandlerRunner, poll: float) -> list[Delivery]:
        """Return what was held; else one suspect alone; else rows that are due, and deliveries of the broker.

        Args:
            runner: Says how many it has room for, and what is in hand.
            poll: Seconds to wait for deliveries, if nothing is due.
        """
        if self.held:
            held, self.held = self.held, []
            return held
        in_hand = runner.in_hand
        if self.suspect_due and self.solitude.is_free(in_hand) and (suspect := self._take_suspect(in_hand)):
            return [suspect]
        room = 0 if self.held or self.solitude.wanted(in_hand, suspect_due=self.suspect_due) else runner.room()
        if room <= 0:
            runner.wait()
            return []
        taken = self._rows(room // 2 or 1 if self._busy else room)
        nothing_due = not taken and not (self.suspect_due and self.solitude.is_free(in_hand))
        try:
            fresh = self.receiver.receive(room - len(taken), poll if nothing_due and runner.may_wait() else 0.0)
            self._busy = bool(fresh)
            for delivery in fresh:
                (self._aside if delivery.redelivered else taken).append(delivery)
            if self._aside:
                self._aside, self._next_rows = self._protocol.set_aside(self._aside), 0.0
                if self._aside:
                    raise Unavailable("redelivered messages could not be moved into rows")
        except Exception:
            self.held += taken
            raise
        return taken

    def _take_suspect(self, in_hand: int) -> Delivery | None:
        """Return a message that may have ended its process twice, when nothing else runs."""
        self.suspect_due, self._next_rows = False, 0.0
        self.hold(self._protocol.complete())
        if self.held:
            return None
        suspect = self._scheduler.lease_suspect(self._queue)
        if suspect is not None:
            self.held.append(suspect)  # until it is noted whether it has company
        self.solitude.begin(suspect, in_hand)
        self.held.clear()
        return suspect

    def take_back(self, accepted: list[Handling]) -> None:
        """Hold deliveries that have not had their turn."""
        self.held += [handling.delivery for handling in accepted]
        accepted.clear()

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
