"""Time, injected wherever it is read, so that tests can move it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> datetime:
        """The current time, with its zone."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's clock.

    Example:
        >>> SystemClock().now().tzname()
        'UTC'
    """

    def now(self) -> datetime:
        """The current time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()
