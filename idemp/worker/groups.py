"""The runner of plain handlers: groups of deliveries through the protocol, one group at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from idemp.messages import Delivery
from idemp.protocol import Protocol
from idemp.work import Work
from idemp.worker.intake import Intake
from idemp.worker.shell import NEVER, Stop

__all__ = ["Groups"]

FAST: Final = 0.050  # seconds; slower handlers run in a group of one


class Groups:
    """Runs deliveries in groups, in the consuming thread.

    Args:
        protocol: Runs a group.
        most: Deliveries that are taken at once.
        intake: Holds deliveries for the next turn.
        stop: Says when no more is begun.

    Example:
        >>> Groups(None, 20, None, Stop()).room()
        20
    """

    def __init__(self, protocol: Protocol, most: int, intake: Intake, stop: Stop) -> None:
        self._protocol, self._most, self._intake, self._stop = protocol, most, intake, stop
        self._accepted: list[Work] = []  # and not handled yet
        self.slow: deque[Work] = deque()
        """Accepted deliveries of slow handlers: one is run each turn."""

    def serve(self, consume: Callable[[], None]) -> None:
        """Consume in this thread."""
        consume()

    def run(self, deliveries: Sequence[Delivery]) -> None:
        """Run what was taken, in groups."""
        taken, held, protocol = len(deliveries), self._intake.held, self._protocol
        suspect = taken == 1 and deliveries[0].row is not None and deliveries[0].row.suspect
        full = taken >= self._most and not suspect  # so there may be more; a suspect leaves no group unsettled
        self._accepted = list(map(protocol.executor.accept, deliveries))
        while self._accepted and self._stop.deadline == NEVER and not held:
            group, self._accepted, fast, waits = _split(self._accepted)
            if waits:
                self.slow += group
            else:
                self._handle(group, more=full and fast)
        if self.slow and self._stop.deadline == NEVER and not held:
            self._handle([self.slow.popleft()])  # one a turn, so that fast neighbours come in between
        if not full and protocol.sent is not None:
            self._intake.hold(protocol.complete())

    def _handle(self, group: list[Work], *, more: bool = False) -> None:
        if not more and self._protocol.sent is not None:  # no group waits for a slow neighbour to be settled
            self._intake.hold(self._protocol.complete())
        if held := self._protocol.handle(group, more=more):
            self._intake.hold(held)

    def take_back(self) -> list[Delivery]:
        """Return what was accepted and has not had its turn."""
        accepted, self._accepted = self._accepted, []
        return [work.delivery for work in accepted]

    def room(self) -> int:
        """Leave room for what is slow."""
        return self._most - len(self.slow)

    def may_wait(self) -> bool:
        """Wait for messages if nothing is to be settled or slow."""
        return not self.slow and self._protocol.sent is None

    def is_free(self) -> bool:
        """Return True: one thread runs all handlers."""
        return True

    def complete(self) -> list[Work]:
        """Settle the group that was sent."""
        return self._protocol.complete()

    def begin_suspect(self, suspect: Delivery | None) -> None:
        """Do nothing: no other handler runs."""

    def works_again(self) -> bool:
        """A turn that holds nothing is a sign of that."""
        return True

    def finish(self) -> None:
        """Nothing runs between two turns."""

    def running(self) -> list[Work]:
        """Return the delivery that is being handled."""
        running = self._protocol.executor.running
        return [running] if running is not None else []

    def silent(self, turn: float) -> float:
        """A handler that runs is not judged."""
        executor = self._protocol.executor
        return 0.0 if executor.running is not None else time.monotonic() - max(turn, executor.seen)

    def watch(self, now: float) -> None:
        """Nothing waits for a handler but the next one."""


def _split(works: list[Work]) -> tuple[list[Work], list[Work], bool, bool]:
    """Return what runs next, the rest, whether it is fast, and whether it waits for a turn of its own.

    What is fast and opted in runs together, others alone. What is known to be slow waits, unless it is a suspect.
    """
    together: list[Work] = []
    others: list[Work] = []
    for work in works:
        handler = work.handler
        fast = work.error is not None or handler is None or (handler.opted_in and handler.seconds < FAST)
        (together if fast else others).append(work)
    if together:
        return together, others, True, False
    handler, row = others[0].handler, others[0].delivery.row
    known_slow = handler is not None and FAST <= handler.seconds < NEVER
    return others[:1], others[1:], False, known_slow and not (row is not None and row.suspect)
