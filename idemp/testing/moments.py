"""Moments on both sides of the boundaries of the calendar, between which a handler's outputs must not differ.

They lie in the year after the present one, on fixed weekdays, so that what is found does not depend on the day of the test.
"""

from __future__ import annotations

import calendar
import functools
import time
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORTEST_CHANGE: Final = timedelta(hours=1)


def moments(now: datetime) -> Iterator[tuple[str, list[datetime]]]:
    """Name each boundary, with moments in order. Runs at two moments of one boundary are compared, never of two.

    Example:
        >>> boundaries = dict(moments(datetime(2026, 11, 21, tzinfo=UTC)))
        >>> [moment.isoformat(" ", "minutes") for moment in boundaries["the end of a year"]]
        ['2027-12-31 23:59+00:00', '2028-01-01 00:01+00:00']
        >>> [moment.isoformat(" ", "minutes") for moment in boundaries["the end of February"]]
        ['2028-02-28 12:00+00:00', '2028-02-29 12:00+00:00', '2028-03-01 12:00+00:00']
    """
    year = now.year + 1
    wednesday = _weekday(date(year, 1, 10), calendar.WEDNESDAY)
    yield "the hours of a day", [_at(wednesday, hour=hour, minute=30) for hour in range(0, 24, 2)]
    yield "the days of a week", [_at(wednesday + timedelta(days=days)) for days in range(8)]
    yield "the end of a month", [_at(date(year, 9, 30), 23, 59), _at(date(year, 10, 1), 0, 1)]
    yield "the end of a year", [_at(date(year, 12, 31), 23, 59), _at(date(year + 1, 1, 1), 0, 1)]
    leap = next(each for each in range(year, year + 9) if calendar.isleap(each))
    yield "the end of February", [_at(date(leap, 2, 28)), _at(date(leap, 2, 29)), _at(date(leap, 3, 1))]
    sundays = (date(year, 3, 8), 7), (date(year, 3, 25), 1), (date(year, 10, 25), 1), (date(year, 11, 1), 6)
    for day, hour in sundays:  # America, Europe, Europe, America: the UTC hour at which a zone there changes
        change = _at(_weekday(day, calendar.SUNDAY), hour)
        yield "a change of daylight saving time", [change - _SHORTEST_CHANGE, change + _SHORTEST_CHANGE]
    for change in _local_changes(year):
        yield "a change of daylight saving time here", [change - _SHORTEST_CHANGE, change + _SHORTEST_CHANGE]


def _at(day: date, hour: int = 12, minute: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)


def _weekday(day: date, weekday: int) -> date:
    """The first such weekday, on that day or after it."""
    return day + timedelta(days=(weekday - day.weekday()) % 7)


@functools.cache
def _local_changes(year: int) -> list[datetime]:
    """The hours of the year at which the offset of the local time changes."""
    begin = _at(date(year, 1, 1), 0)
    hours = [begin + timedelta(hours=hours) for hours in range(366 * 24)]
    offsets = [time.localtime(hour.timestamp()).tm_gmtoff for hour in hours]
    return [hour for hour, one, other in zip(hours[1:], offsets, offsets[1:], strict=False) if one != other]
