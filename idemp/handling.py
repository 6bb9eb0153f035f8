"""A delivery whose life stops twice: before its transaction, which it may share, and while its outputs are sent."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from idemp.broker.port import Settlement
from idemp.dispatch import Refused, Shipment
from idemp.outcome import Outcome
from idemp.telemetry import Watch
from idemp.work import Work


@dataclass(frozen=True, slots=True)
class Member:
    """A delivery before its transaction, and perhaps one of a batch.

    Attributes:
        work: the delivery, decoded.
        watch: sees it.
        redelivered: the broker's hint that it delivered this before.
    """

    work: Work
    watch: Watch
    redelivered: bool = False

    def turn(self) -> AbstractContextManager[None]:
        """What happens in here is about it, and it waits again afterwards."""
        return self.watch.turn()


Ended = tuple[Outcome, Settlement]
CameTo = Outcome | Shipment | Exception | None
"""What became of a delivery in its batch: an error is raised as its own, and with `None` it runs alone."""
Life = Generator[Member | Shipment, Any, Ended]
"""Yields itself as a member and goes on with a `CameTo`, yields what is to be sent, if anything, and goes on with what has
no confirm; ends with how to settle the delivery."""


class Handling:
    """A delivery on its way: before its transaction, or its outputs are to be sent, or it has ended.

    Args:
        life: is run up to its first stop.

    Attributes:
        member: what waits for `joined`; `None` once it has been called, or if the delivery could not be decoded.
        shipment: what is to be sent; `None` if nothing is.
        order: what it has in common with those whose order it keeps, even if it could not be decoded further.
        ended: the outcome and how to settle the delivery, where it waits for nothing.

    Raises:
        Exception: what the life raised on its way.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.broker.port import Ack
        >>> def life():
        ...     came_to = yield Member(None, None)
        ...     refused = yield Shipment(outputs=(), timeout=timedelta(seconds=1), outcome=lambda refused: came_to)
        ...     return came_to, Ack()
        >>> handling = Handling(life())
        >>> handling.joined(Outcome.HANDLED)
        >>> handling.shipment.via, handling.confirmed(())
        ('dispatch', (<Outcome.HANDLED: 'handled'>, Ack()))
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self.member: Member | None = None
        self.shipment: Shipment | None = None
        self.order: bytes | None = None
        self.ended: Ended
        self._go_on(None)

    def joined(self, came_to: CameTo) -> None:
        """Its transaction has ended, or it is to have one of its own.

        Raises:
            Exception: as `Protocol.handle` says.
        """
        self._go_on(came_to)

    def confirmed(self, refused: Refused) -> Ended:
        """The broker has answered: all is confirmed but what was refused."""
        self._go_on(refused)
        return self.ended

    def abandon(self) -> None:
        """It is given back instead."""
        self._life.close()

    def _go_on(self, answer: Any) -> None:
        self.member = self.shipment = None
        try:
            stop = self._life.send(answer)
        except StopIteration as end:
            self.ended = end.value
            return
        if isinstance(stop, Member):
            self.member = stop
        else:
            self.shipment = stop
