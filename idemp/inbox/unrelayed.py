"""Stores that no delivery leaves its outputs to: it is acked after their confirms, and until then it comes again."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from idemp.inbox.port import PendingOutput
    from idemp.inbox.resending import Resending

_REFUSED_FOR_GOOD: Final = timedelta(hours=1)


class Unrelayed:
    """The part of `Upkeep` that relays ask for, where the next delivery of a message sends what pends.

    A worker's relay gets the outputs whose confirm was not recorded for long.

    Attributes:
        resending: which outputs these are.

    Example:
        >>> Unrelayed().release_quarantined([])
        0
    """

    resending: Resending[Any]

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Outputs of handlings long ago whose worker died before it recorded their confirms."""
        return self.resending.take(limit, lease)

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """None: apps with effects are refused here."""
        del consumer, limit, lease
        return ()

    def return_effects(self, effects: Mapping[UUID, str], retry_in: timedelta) -> None:
        """None were taken."""

    def wait_for_effects(self, timeout: float) -> bool:
        """None ever come."""
        del timeout
        return False

    def announce_effects(self) -> None:
        """Nobody waits for them."""

    def agree_broker(self, identity: str) -> None:
        """Agree with every broker: each output goes to the broker that delivers its message again."""

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Record the confirmed ones; the others are due again after `retry_in`."""
        del refused
        self.resending.settle(confirmed, failed, retry_in)

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """They are due again after an hour: there is no quarantine, since the delivery of such an output comes again."""
        self.resending.settle((), outputs, _REFUSED_FOR_GOOD)

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Nothing is in quarantine."""
        del outputs
        return 0
