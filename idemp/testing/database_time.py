"""The time that a test's database gives: stopped where the database lets it, and recognized where it does not.

SQLite asks functions of the kit for the time, and MySQL and MariaDB have a variable for it. PostgreSQL can't be stopped:
there, two runs have different times, and what differs between them is compared as times.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from time_machine import escape_hatch

from idemp.inbox.sql.engine import is_mysql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

_FUNCTIONS: Final = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1}
"""SQLite's functions of the time, and which of their arguments is "now" if it is left out."""
_CURRENT: Final = {"current_timestamp": "datetime", "current_date": "date", "current_time": "time"}
_NEAR: Final = timedelta(days=2)
_MOST_SECONDS: Final = 100_000_000_000  # what is more counts milliseconds


class DatabaseTime:
    """The clock of a test's database. It stands still from the beginning.

    Args:
        engine: on the database.

    Attributes:
        stops: whether the database lets its clock be stopped.
        moment: where it stands.

    Example:
        >>> from sqlalchemy import create_engine
        >>> engine = create_engine("sqlite://")
        >>> clock = DatabaseTime(engine)
        >>> with clock.at(datetime(2026, 1, 1, tzinfo=UTC)), engine.connect() as connection:
        ...     tuple(connection.exec_driver_sql("SELECT current_timestamp, date('now', '+1 day')").one())
        ('2026-01-01 00:00:00', '2026-01-02')
    """

    def __init__(self, engine: Engine) -> None:
        self.moment = datetime.now(UTC)
        self.stops = True
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", self._connected)
        elif is_mysql(engine.dialect.name):
            event.listen(engine, "checkout", self._checked_out)
        else:
            self.stops = False

    @contextmanager
    def at(self, moment: datetime) -> Iterator[None]:
        """Have it stand at another moment while the block runs."""
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def _connected(self, connection: Any, _record: Any) -> None:
        asked = sqlite3.connect(":memory:", check_same_thread=False)  # it has the functions that are replaced here
        for name in _FUNCTIONS:
            connection.create_function(name, -1, partial(self._evaluated, asked, name), deterministic=True)
        for name, function in _CURRENT.items():
            connection.create_function(name, 0, partial(self._evaluated, asked, function), deterministic=True)

    def _evaluated(self, asked: sqlite3.Connection, name: str, *arguments: Any) -> Any:
        given = [*arguments, "now"] if len(arguments) == _FUNCTIONS[name] else list(arguments)
        now = self.moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        given = [now if isinstance(each, str) and each.lower() == "now" else each for each in given]
        return asked.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]

    def _checked_out(self, connection: Any, record: Any, _proxy: Any) -> None:
        if record.info.get(self) != self.moment:
            with connection.cursor() as cursor:
                cursor.execute(f"SET timestamp = {self.moment.timestamp():.6f}")
            record.info[self] = self.moment


def differing_places(one: Any, other: Any, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two values that `comparable` made differ, and what stands there.

    Example:
        >>> differing_places([("Row", {"id": 1, "at": 2})], [("Row", {"id": 1, "at": 3})])
        {'[0].Row.at': (2, 3)}
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        parts = [(f"{place}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        is_object = len(one) == len(("class", "columns")) and one[0] == other[0] and isinstance(one[1], Mapping)
        parts = [(f"{place}.{one[0]}", one[1], other[1])] if is_object else []
        parts = parts or [(f"{place}[{index}]", a, b) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return {} if one == other else {place: (one, other)}
    return {name: values for part in parts for name, values in differing_places(part[1], part[2], part[0]).items()}


def are_times(*values: Any) -> bool:
    """Whether values of two runs are times of about now, as a clock gives them that the kit could not stop.

    Example:
        >>> now = datetime.now()
        >>> are_times(now, now.isoformat(), now.timestamp()), are_times("2001-01-01"), are_times(7)
        (True, False, False)
    """
    real: Any = escape_hatch.datetime.datetime if escape_hatch.is_travelling() else datetime
    now = real.now(UTC).replace(tzinfo=None)
    times = [_as_time(value) for value in values]
    return all(each is not None and abs(each - now) < _NEAR for each in times)


def _as_time(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, date):
        return datetime.combine(value, time_of_day())
    with suppress(ValueError, OverflowError, OSError):
        if isinstance(value, str):
            return datetime.fromisoformat(value).replace(tzinfo=None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value / 1000 if value > _MOST_SECONDS else value
            return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return None
