"""The clock of a document store's server, as the `Date` of its HTTP answers shows it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from idemp.clock import CarriedClock, SystemClock, elapsed

__all__ = ["ServerClock"]

_KEPT_SECONDS: Final = 30.0
_RESOLUTION: Final = timedelta(seconds=1)


class ServerClock(CarriedClock):
    """Time by the `Date` header of a server's answers: no request is made for it. It is right to about a second.

    Example:
        >>> clock = ServerClock()
        >>> clock.hear("Thu, 01 Jan 2026 12:00:00 GMT")
        >>> clock.now().year
        2026
    """

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self._next = 0.0

    def hear(self, date: str | None) -> None:
        """Take the time from an answer's `Date`, if that is due; an answer without one changes nothing."""
        if date is None or elapsed() < self._next:
            return
        with suppress(ValueError):
            there = parsedate_to_datetime(date) + _RESOLUTION / 2
            self._next = elapsed() + _KEPT_SECONDS
            if abs(there - self.now()) > _RESOLUTION:
                self.set(there)
