"""Time, injected wherever it is read, so that tests can move it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
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


class CarriedClock:
    """A clock that was read once, or now and then, and is carried on by the time that has passed on this machine since.

    A step of this machine's own clock does not move it, and the time that the machine slept is counted. Before `set` is
    called it shows what the machine's clock showed when it was made.

    Args:
        host: this machine's clock.

    Example:
        >>> clock = CarriedClock(SystemClock())
        >>> clock.set(datetime(2026, 1, 1, tzinfo=UTC))
        >>> clock.now().year
        2026
    """

    def __init__(self, host: Clock) -> None:
        self._host = host
        self._read = host.now(), elapsed()

    def set(self, moment: datetime) -> None:
        """Go on from this moment."""
        self._read = moment, elapsed()

    def now(self) -> datetime:
        """The moment that was read last, and the time that has passed since."""
        moment, then = self._read
        return moment + timedelta(seconds=elapsed() - then)

    def monotonic(self) -> float:
        """As of this machine's clock."""
        return self._host.monotonic()


def elapsed() -> float:
    """Seconds since some fixed point, those included in which the machine slept, where the system counts them.

    Example:
        >>> elapsed() <= elapsed()
        True
    """
    return time.clock_gettime(_BOOTTIME) if _BOOTTIME is not None else time.monotonic()


_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
