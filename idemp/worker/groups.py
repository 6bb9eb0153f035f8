"""The runner of plain handlers: groups of deliveries through the protocol, one group at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from idemp.handling import Handling
from idemp.messages import Delivery
from idemp.protocol import Protocol
from idemp.worker.intake import HandlerRunner, Intake
from idemp.worker.shell import NEVER, Stop

__all__ = ["Groups"]

FAST: Final = 0.050  # seconds; slower handlers run in a group of one


class Groups(HandlerRunner):
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
        super().__init__()
        self._protocol, self._most, self._intake, self._stop = protocol, most, intake, stop
        self.slow: deque[Handling] = deque()
        """Accepted deliveries of slow handlers: one is run each turn."""

    def run(self, deliveries: Sequence[Delivery]) -> None:
        """Run what was taken, in groups."""
        taken, held, protocol = len(deliveries), self._intake.held, self._protocol
        suspect = taken == 1 and deliveries[0].row is not None and deliveries[0].row.suspect
        full = taken >= self._most and not suspect  # so there may be more; a suspect leaves no group unsettled
        self.accepted = list(map(protocol.executor.accept, deliveries))
        while self.accepted and self._stop.deadline == NEVER and not held:
            group, self.accepted, fast, waits = _split(self.accepted)
            if waits:
                self.slow += group
            else:
                self._handle(group, more=full and fast)
        if self.slow and self._stop.deadline == NEVER and not held:
            self._handle([self.slow.popleft()])  # one a turn, so that fast neighbours come in between
        if not full and protocol.sent is not None:
            self._intake.hold(protocol.complete())

    def _handle(self, group: list[Handling], *, more: bool = False) -> None:
        if not more and self._protocol.sent is not None:  # no group waits for a slow neighbour to be settled
            self._intake.hold(self._protocol.complete())
        if held := self._protocol.handle(group, more=more):
            self._intake.hold(held)

    def room(self) -> int:
        """Leave room for what is slow."""
        return self._most - len(self.slow)

    def may_wait(self) -> bool:
        """Wait for messages if nothing is to be settled or slow."""
        return not self.slow and self._protocol.sent is None

    def running(self) -> list[Handling]:
        """Return the delivery that is being handled."""
        running = self._protocol.executor.running
        return [running] if running is not None else []


def _split(handlings: list[Handling]) -> tuple[list[Handling], list[Handling], bool, bool]:
    """Return what runs next, the rest, whether it is fast, and whether it waits for a turn of its own.

    What is fast and opted in runs together, others alone. What is known to be slow waits, unless it is a suspect.
    """
    together: list[Handling] = []
    others: list[Handling] = []
    for handling in handlings:
        handler = handling.handler
        fast = handling.error is not None or handler is None or (handler.opted_in and handler.seconds < FAST)
        (together if fast else others).append(handling)
    if together:
        return together, others, True, False
    handler, row = others[0].handler, others[0].delivery.row
    known_slow = handler is not None and FAST <= handler.seconds < NEVER
    return others[:1], others[1:], False, known_slow and not (row is not None and row.suspect)
