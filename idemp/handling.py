"""A delivery whose life stops once: while its outputs are on their way, the thread may begin others."""

from __future__ import annotations

from collections.abc import Generator

from idemp.broker.port import Settlement
from idemp.dispatch import Refused, Shipment
from idemp.outcome import Outcome

Ended = tuple[Outcome, Settlement]
Life = Generator[Shipment, Refused, Ended]
"""Yields what is to be sent, if anything, goes on with what has no confirm, and ends with how to settle the delivery."""


class Handling:
    """A delivery after its transaction: either it has ended, or its outputs are to be sent.

    Args:
        life: is run up to where outputs are sent.

    Attributes:
        shipment: what is to be sent; `None` if nothing is.
        ended: the outcome and how to settle the delivery, if nothing is to be sent.

    Raises:
        Exception: what the life raised on its way.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.broker.port import Ack
        >>> def life():
        ...     refused = yield Shipment(outputs=(), timeout=timedelta(seconds=1), outcome=lambda refused: Outcome.HANDLED)
        ...     return Outcome.HANDLED, Ack()
        >>> handling = Handling(life())
        >>> handling.shipment.via, handling.confirmed(())
        ('dispatch', (<Outcome.HANDLED: 'handled'>, Ack()))
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self.shipment: Shipment | None = None
        self.ended: Ended
        try:
            self.shipment = next(life)
        except StopIteration as end:
            self.ended = end.value

    def confirmed(self, refused: Refused) -> Ended:
        """The broker has answered: all is confirmed but what was refused."""
        try:
            self._life.send(refused)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("a delivery sends its outputs once")
