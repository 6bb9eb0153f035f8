"""How far back retention windows reach, as a worker remembers it: read once in a while, never older than cleaners expect."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from idemp.errors import TransientStoreError
from idemp.inbox.port import HORIZON_SLACK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from idemp.clock import Clock

_NEVER_LATE: Final = datetime.min.replace(tzinfo=UTC)


class Horizons:
    """Starts of windows, remembered for at most `HORIZON_SLACK`.

    A window's start moves on while it is remembered. Somebody who remembers an old one would take a message for young
    enough to have a claim, and for new since it has none any more: purged meanwhile. So cleaners keep claims for that
    much longer (`idemp.retention`), and whoever remembers for longer than that reads anew.

    Args:
        late_before: reads one.
        clock: source of time.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> horizons = Horizons(lambda consumer, window: datetime(2026, 1, 1, tzinfo=UTC), SystemClock())
        >>> horizons.read("orders", [timedelta(days=7)])
        >>> horizons.late_before("orders", timedelta(days=7)).year
        2026
    """

    def __init__(self, late_before: Callable[[str, timedelta], datetime], clock: Clock) -> None:
        self._late_before = late_before
        self._clock = clock
        self._starts: dict[tuple[str, timedelta], tuple[datetime, float]] = {}

    def read(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Read the starts of a consumer's windows."""
        for retention in set(retentions):
            now = self._clock.monotonic()  # before the reading: better too old than too new
            self._starts[consumer, retention] = self._late_before(consumer, retention), now

    def read_if_due(self) -> None:
        """Read those again that nobody has read for some time; never inside of a transaction."""
        due = self._clock.monotonic() - HORIZON_SLACK.total_seconds() / 2
        for (consumer, retention), (_, at) in list(self._starts.items()):
            if at < due:
                self.read(consumer, [retention])

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The start of a window; where it was never read, nothing counts as late.

        Raises:
            TransientStoreError: it was read too long ago; the next transaction begins by reading it.
        """
        start, at = self._starts.get((consumer, retention), (_NEVER_LATE, self._clock.monotonic()))
        if self._clock.monotonic() - at > HORIZON_SLACK.total_seconds():
            raise TransientStoreError("The retention window was read too long ago; the delivery runs again.")
        return start
