"""What stores answer that have no relay: a delivery is acked after its confirms, and until then it comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from uuid import UUID

    from idemp.inbox.port import PendingOutput


class Unrelayed:
    """The part of `Upkeep` that relays ask for, where there are none.

    Example:
        >>> Unrelayed().release_quarantined([])
        0
    """

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Nothing: what pends is sent by the next delivery of its message, which the broker keeps until then."""
        del limit, lease
        return ()

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

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Nothing was taken."""

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Nothing was taken."""

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Nothing is in quarantine."""
        del outputs
        return 0
