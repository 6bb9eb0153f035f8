"""Durations, as people write them."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}

DurationLike = timedelta | float | str


def parse_duration(value: object) -> timedelta:
    """A duration from a `timedelta`, seconds, or text such as `30s`, `15m`, `12h`, `7d`, `1h30m`, `500ms`.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_duration("1h30m")
        datetime.timedelta(seconds=5400)
    """
    with suppress(OverflowError, ValueError):  # longer than a calendar, or no number
        match value:
            case timedelta():
                return value
            case bool():
                pass
            case int() | float():
                return timedelta(seconds=value)
            case str() if re.fullmatch(r"(\s*\d+(\.\d+)?\s*(ms|s|m|h|d))+\s*", value):
                parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", value)
                return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    raise ValueError(f"{value!r} is no duration; write 30s, 15m, 12h or 7d")
