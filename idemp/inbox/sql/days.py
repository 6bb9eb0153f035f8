"""Which table an id belongs to: a function of the id alone, and of which days have tables.

An id that carries its time inside (a UUIDv7, which digests of such ids are, too) belongs to the day of that time, where its
consumer keeps daily tables for it. A time *beside* the id never counts: a producer that sends again may stamp anew, and
the second copy would be looked for in another table.

```
            since         dropped            today              made            until
  ───────────┼──────────────┼──────────────────┼──────────────────┼───────────────┼───────────►  time in the id
   the plain │  the part    │   a part for each day, made ahead   │ nowhere: from │ the plain
   tables    │  "late"      │                                     │ the future    │ tables
```

`dropped` and `made` only ever move to the right, each in the very transaction that drops or makes the tables: at any moment
an id has one home or none. Who remembers an older layout finds a table gone, or is refused by the plain inbox (`ddl.guard`),
and looks again: nobody takes an id for new because it looked where the claim is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

from idemp.identity import TIME_ORDERED

if TYPE_CHECKING:
    from collections.abc import Iterable

LATE: Final = "late"
_DAY_MILLISECONDS: Final = 24 * 60 * 60 * 1000
_EPOCH: Final = date(1970, 1, 1)
_TIME_SHIFT: Final = 80  # the time is a UUIDv7's first 48 bits


class NoTableYet(Exception):
    """The id is from a day whose tables have not been made."""

    def __init__(self, moment: datetime) -> None:
        super().__init__(moment)
        self.moment = moment


@dataclass(frozen=True, slots=True)
class Layout:
    """The days for which a consumer keeps tables of their own; see the picture above.

    Attributes:
        consumer_id: the interned consumer.
        since: the first day.
        until: the day after the last; years away unless somebody switches back.
        dropped: the first day that was not dropped.
        made: the day after the last one that has tables.

    Example:
        >>> day = date(2026, 11, 22)
        >>> layout = Layout(7, since=day, until=date(2036, 1, 1), dropped=day, made=day + timedelta(days=15))
        >>> layout.part_of(UUID("01a2008d-7400-7000-8000-000000000001"))
        '7_20261122'
    """

    consumer_id: int
    since: date
    until: date
    dropped: date
    made: date

    def covers(self, key: UUID) -> bool:
        """Whether the id belongs to this layout at all."""
        return key.version == TIME_ORDERED and first_key(self.since) <= key < first_key(self.until)

    def part_of(self, key: UUID) -> str:
        """The part of an id that the layout covers.

        Raises:
            NoTableYet: its day has no tables yet.
        """
        milliseconds = key.int >> _TIME_SHIFT
        day = _EPOCH + timedelta(days=milliseconds // _DAY_MILLISECONDS)
        if day < self.dropped:
            return self.late
        if day >= self.made:
            raise NoTableYet(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds))
        return self.part_on(day)

    def part_on(self, day: date) -> str:
        """The part of a day."""
        return f"{self.consumer_id}_{day:%Y%m%d}"

    @property
    def late(self) -> str:
        """The part of ids that come, by force or by policy, after their day was dropped."""
        return f"{self.consumer_id}_{LATE}"

    @property
    def days(self) -> list[date]:
        """The days that have tables."""
        return days_between(self.dropped, self.made)


def part_of(layouts: Iterable[Layout], key: UUID) -> str | None:
    """The part that an id of this consumer belongs to, `None` for the plain tables.

    Raises:
        NoTableYet: its day has no tables yet.

    Example:
        >>> part_of([], UUID("01a2008d-7400-7000-8000-000000000001")) is None
        True
    """
    for layout in layouts:
        if layout.covers(key):
            return layout.part_of(key)
    return None


def first_key(day: date) -> UUID:
    """The least key that a UUIDv7 of this day can have; keys compare as bytes, and begin with their time.

    Example:
        >>> first_key(date(2026, 11, 22))
        UUID('01a2008d-7400-0000-0000-000000000000')
    """
    return UUID(int=((day - _EPOCH).days * _DAY_MILLISECONDS) << _TIME_SHIFT)


def start_of(day: date) -> datetime:
    """Midnight, UTC."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def days_between(first: date, end: date) -> list[date]:
    """The days from `first` to the one before `end`.

    Example:
        >>> days_between(date(2026, 2, 27), date(2026, 3, 1))
        [datetime.date(2026, 2, 27), datetime.date(2026, 2, 28)]
    """
    return [first + timedelta(days=number) for number in range((end - first).days)]
