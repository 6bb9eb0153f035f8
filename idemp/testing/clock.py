"""A clock that goes when it is told to."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta


class FakeClock:
    """Stands still until it is moved. Safe to share between threads.

    Args:
        now: what it shows first.

    Example:
        >>> clock = FakeClock()
        >>> clock.advance(timedelta(days=7))
        datetime.datetime(2026, 1, 8, 0, 0, tzinfo=datetime.timezone.utc)
        >>> clock.now() == clock.advance()
        True
    """

    def __init__(self, now: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._began = now
        self._now = now
        self._monotonic = 0.0
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """The time it was set to."""
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        """Seconds by which it was moved in sum."""
        with self._lock:
            return self._monotonic

    def advance(self, by: timedelta = timedelta(0)) -> datetime:
        """Move it; answers the new time.

        Raises:
            ValueError: backwards.
        """
        if by < timedelta(0):
            raise ValueError(f"A clock does not go back, so not by {by}.")
        with self._lock:
            self._now += by
            self._monotonic += by.total_seconds()
            return self._now

    def reset(self) -> None:
        """Back to where it began, for a new run on the same objects.

        Example:
            >>> clock = FakeClock()
            >>> _ = clock.advance(timedelta(days=7))
            >>> clock.reset()
            >>> clock.now()
            datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)
        """
        with self._lock:
            self._now = self._began
            self._monotonic = 0.0
