"""Messages that may have ended a process: their handlers' starts are counted, and proven culprits run alone.

A process that dies in a handler takes the messages with it that were waiting in its hands; all come back marked as
redelivered, and nothing tells the one from the others. So the start of each redelivered message's handler is recorded in
the database before it runs, and its end after it. A start without an end is a death: from then on that message runs
alone, so that no neighbour is held to account for it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from idemp.deadletter import REPLAYS_HEADER
from idemp.errors import StoreError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.inbox.port import Store
    from idemp.work import Work

log = logging.getLogger("idemp.suspects")

LONGEST_WAIT: Final = 30.0
"""Seconds that a turn is waited for: a handler that takes longer must not hold up all others."""


class Turns:
    """Who may run a handler now; shared by the consuming threads of a process.

    Args:
        solitary: there is one consuming thread, so that every handler runs alone anyway.
        longest_wait: seconds after which a handler starts without its turn.

    Example:
        >>> turns = Turns()
        >>> with turns.alone():
        ...     turns.running
        1
    """

    def __init__(self, *, solitary: bool = False, longest_wait: float = LONGEST_WAIT) -> None:
        self.solitary = solitary
        self.running = 0
        self._longest_wait = longest_wait
        self._loners = 0  # waiting, or running alone
        self._changed = threading.Condition()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A turn beside others, while nobody waits for, or has, a turn of his own."""
        with self._changed:
            self._wait_until(lambda: self._loners == 0)
            self.running += 1
        try:
            yield
        finally:
            self._leave(0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A turn while nobody else runs; goes before those that come after it."""
        with self._changed:
            self._loners += 1
            self._wait_until(lambda: self.running == 0)
            self.running += 1
        try:
            yield
        finally:
            self._leave(1)

    def _leave(self, loners: int) -> None:
        with self._changed:
            self.running -= 1
            self._loners -= loners
            self._changed.notify_all()

    def _wait_until(self, free: Callable[[], bool]) -> None:
        self._changed.wait_for(free, self._longest_wait)


class Suspects:
    """Counts the deaths of processes against the message whose handler had started.

    Args:
        store: where starts are recorded.
        turns: shared by the threads of this process.
    """

    def __init__(self, store: Store, turns: Turns) -> None:
        self._store = store
        self._turns = turns

    @contextmanager
    def turn(self, work: Work, *, redelivered: bool) -> Iterator[Work]:
        """While the block runs it is this work's turn; it says how many deaths are held against it.

        Raises:
            StoreError: the start could not be recorded; the handler must not run.
        """
        if not redelivered:
            if REPLAYS_HEADER in work.message.headers:
                self._ended(work)  # somebody has looked at it: its deaths are forgiven
            with self._turns.shared():
                yield work
            return
        starts = self._store.note_start(work.consumer, work.key)
        # The first start ran beside others, so that its death may be another's fault.
        deaths = starts if self._turns.solitary else max(0, starts - 1)
        deaths = min(deaths, max(0, work.policy.attempts - work.attempt + 1))  # what is parked again did not start again
        try:
            with self._turns.alone() if starts else self._turns.shared():
                yield replace(work, attempt=work.attempt + deaths, deaths=deaths)
        except WorkerDied:
            # Not forgotten: if the process ends before its letter is confirmed and it is acked, it comes again, and must
            # be parked again without being started.
            raise
        except BaseException:
            self._ended(work)
            raise
        self._ended(work)

    def _ended(self, work: Work) -> None:
        try:
            self._store.note_end(work.consumer, work.key)
        except StoreError as error:  # one death too many is held against it, should it come again
            log.debug("the end of a handler is not recorded: %s", error)
