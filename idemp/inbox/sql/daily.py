"""Daily tables on PostgreSQL: making them ahead, dropping them whole, and moving a consumer to them and back.

They inherit from the plain tables and are no partitions in PostgreSQL's own sense. To drop a partition locks its parent,
and so each running handler and each claim; to detach it first without that takes two transactions and a state in between
that a crash leaves behind. A table that only inherits is dropped under its own locks, in one transaction together with the
note that it is gone. A claim names the table of its day, so no other day is touched or locked, and ids without a time
stay in the parent.
"""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import delete, exists, insert, select, text, update

from idemp.errors import ConfigurationError, TransientStoreError
from idemp.inbox.sql import ddl
from idemp.inbox.sql.claiming import only
from idemp.inbox.sql.days import Layout, days_between, first_key, start_of
from idemp.inbox.sql.dropping import Dropping, StillNeeded
from idemp.inbox.sql.engine import shown
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.places import can_partition, read_layouts
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine

    from idemp.clock import Clock
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables

AHEAD: Final = 14
"""Days for which tables are made in advance."""
YEARS: Final = 10
"""How far a layout reaches unless somebody ends it: long enough, and near enough to look for ids in it by the key."""
_NOTICE: Final = timedelta(hours=1)
"""How long before its first day a layout is noted at the least: workers look every few seconds, all of them by then."""
_LOCK_ATTEMPTS: Final = 100
_LOCK_PAUSE_SECONDS: Final = 0.3


class Daily:
    """Daily tables of all consumers of a database.

    Args:
        engine: where the tables are, as their owner where they are to be altered.
        tables: the plain ones.
        clock: source of time.
        names: interned names.

    Example:
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> Daily(engine, tables, SystemClock(), Names(engine, tables)).open("orders")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: sqlite:// can't have daily tables. Nothing is needed there: ...
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock, names: Names) -> None:
        self._engine = engine
        self._short = Short(engine)
        self._tables = tables
        self._clock = clock
        self._names = names
        self._dropping = Dropping(tables)
        self._pause = threading.Event().wait

    # For people -----------------------------------------------------------------------------------------------------

    def layouts(self, consumer: str) -> Sequence[Layout]:
        """A consumer's layouts, the oldest first; none where there can be none."""
        consumer_id = self._names.known("consumer", consumer)
        return self.of(consumer_id) if consumer_id is not None else ()

    def all(self) -> dict[str, Sequence[Layout]]:
        """The layouts of all consumers that have some, by name."""
        if not can_partition(self._engine):
            return {}
        found = self._short.run(lambda connection: read_layouts(connection, self._tables))
        return {self._names.name("consumer", number): layouts for number, layouts in found.items()}

    def open(self, consumer: str, since: date | None = None, ahead: int = AHEAD) -> Layout:
        """Keep ids that carry a time from this day on in daily tables; by default from the day after tomorrow, UTC.

        Raises:
            ConfigurationError: the day is too near, or belongs to another layout; or ids of that time were claimed.
            TransientStoreError: running handlings left no moment to note it.
        """
        self.refuse_others()
        today = self._today()
        first = since or self._default_first()
        consumer_id = self._names.id("consumer", consumer)
        self._refuse_near(first)
        if any(first < layout.until for layout in self.of(consumer_id)):
            raise ConfigurationError(
                f"{consumer!r} keeps daily tables for that day already.", fix="Choose a day after their end."
            )
        made = max(first, today) + timedelta(days=ahead)
        layout = Layout(consumer_id, since=first, until=_years_after(first), dropped=first, made=made)
        # Should it end before the layout is noted: empty tables that nobody knows of do no harm.
        self._short.run(lambda connection: ddl.make_late(connection, self._tables, layout))
        for day in layout.days:
            self._short.run(partial(ddl.make_day, tables=self._tables, layout=layout, day=day))
        self._exclusively(lambda connection: self._note(connection, layout))
        return layout

    def reaches_beyond(self, layouts: Sequence[Layout]) -> bool:
        """Whether one of them has the day on which another would begin by default, or later ones."""
        return any(self._default_first() < layout.until for layout in layouts)

    def close(self, consumer: str, until: date) -> Layout:
        """Keep ids from this day on in the plain tables again; the days before it go as they would have.

        With the first day of a layout that has not begun, that layout is called off.

        Raises:
            ConfigurationError: the day is too near, there is no layout that reaches it, or ids of that time were claimed.
            TransientStoreError: running handlings left no moment to note it.
        """
        self.refuse_others()
        self._refuse_near(until)
        consumer_id = self._names.id("consumer", consumer)
        found = [layout for layout in self.of(consumer_id) if layout.since <= until < layout.until]
        if not found:
            raise ConfigurationError(
                f"{consumer!r} keeps no daily tables for {until}.",
                fix=f"`idemp db partition {consumer}` shows for which days it does.",
            )
        (old,) = found
        layout = Layout(consumer_id, old.since, until, old.dropped, min(old.made, until))
        self._exclusively(lambda connection: self._shorten(connection, old, layout))
        return layout

    def mend(self, layout: Layout) -> None:
        """Make anew, empty, the tables of a layout that somebody dropped by hand; all have the plain ones' rights then."""
        self._short.run(lambda connection: ddl.make_late(connection, self._tables, layout))
        for day in layout.days:
            self._short.run(partial(self._make, layout=layout, day=day, again=True))

    # For the cleaner ------------------------------------------------------------------------------------------------

    def of(self, consumer_id: int) -> Sequence[Layout]:
        """A consumer's layouts; none where there can be none."""
        if not can_partition(self._engine):
            return ()
        return self._short.run(lambda connection: read_layouts(connection, self._tables)).get(consumer_id, ())

    def may_alter(self) -> bool:
        """Whether this user owns the tables, so that it can make and drop daily ones."""
        return self._short.run(lambda connection: ddl.owns(connection, self._tables))

    def make_ahead(self, layout: Layout, ahead: int = AHEAD) -> int:
        """Make the tables of so many days from today on, one day after the other; how many days had none.

        All that are there get the rights that the plain ones were given meanwhile.
        """
        end = min(self._today() + timedelta(days=ahead + 1), layout.until)
        days = days_between(layout.made, end)
        for day in days:
            self._short.run(partial(self._make, layout=layout, day=day))
        self._short.run(lambda connection: ddl.grant(connection, self._tables))
        return len(days)

    def drop_expired(self, layout: Layout, before: datetime, *, emptied: bool = False) -> int:
        """Drop each day whose ids, and whose claims, are all from before this moment; how many claims there were.

        With `emptied` only those in which there are none but what is still needed.

        It ends at the first day that somebody uses right now, or in which more waits than can be moved.
        """
        dropped = 0
        for day in layout.days:
            if start_of(day + timedelta(days=1)) > before:
                break
            try:
                with self._short.transaction() as connection:
                    dropped += self._dropping.drop(connection, layout, day, before, emptied=emptied)
            except (StillNeeded, TransientStoreError):  # the latter: somebody has a lock on it
                break
        return dropped

    def lag(self, layouts: Sequence[Layout], before: datetime) -> timedelta:
        """How far the oldest day that could be dropped is past this moment; zero if there is none."""
        ends = [start_of(layout.days[0] + timedelta(days=1)) for layout in layouts if layout.days]
        return max([timedelta(0), *(before - end for end in ends)])

    # Their steps ----------------------------------------------------------------------------------------------------

    def _make(self, connection: Connection, layout: Layout, day: date, *, again: bool = False) -> None:
        """The next day of a layout, or one that it has: nobody makes a day that was dropped or given up meanwhile."""
        daily = self._tables.daily
        mine = (daily.c.consumer_id == layout.consumer_id) & (daily.c.since == layout.since)
        if again:
            has_it = select(daily.c.made).where(mine, daily.c.dropped <= day, daily.c.made > day).with_for_update()
            wanted = connection.execute(has_it).first() is not None
        else:
            next_one = update(daily).where(mine, daily.c.made == day, daily.c.until > day)
            wanted = connection.execute(next_one.values(made=day + timedelta(days=1))).rowcount == 1
        if wanted:
            ddl.make_day(connection, self._tables, layout, day)

    def _exclusively(self, work: Callable[[Connection], None]) -> None:
        """While nobody claims: each attempt holds claims up for a moment at most, and gives way to running handlings."""
        for _ in range(_LOCK_ATTEMPTS - 1):
            try:
                with self._short.transaction() as connection:
                    return self._locked(connection, work)
            except TransientStoreError:
                self._pause(_LOCK_PAUSE_SECONDS)
        with self._short.transaction() as connection:
            return self._locked(connection, work)

    def _locked(self, connection: Connection, work: Callable[[Connection], None]) -> None:
        with cluster_lock(connection, self._tables, "daily", wait_seconds=60):
            ddl.lock_inbox(connection, self._tables)
            work(connection)

    def _note(self, connection: Connection, layout: Layout) -> None:
        """The guard and the layout at once; no id may have two homes."""
        self._refuse_near(layout.since)  # it may have waited
        for existing in read_layouts(connection, self._tables).get(layout.consumer_id, ()):
            if layout.since < existing.until:
                raise ConfigurationError(
                    "Somebody else was faster.", fix=f"See `idemp db partition {self._named(layout)}`."
                )
        inbox = self._tables.inbox
        claimed = only(select(inbox.c.message_key), inbox).where(
            inbox.c.consumer_id == layout.consumer_id,
            inbox.c.message_key >= first_key(layout.since),
            inbox.c.message_key < first_key(layout.until),
            text(ddl.CARRIES_TIME),
        )
        latest = connection.scalar(claimed.order_by(inbox.c.message_key.desc()).limit(1))
        if latest is not None:
            raise ConfigurationError(
                f"The id {latest} of {self._named(layout)!r} was claimed already; its time is after {layout.since} began.",
                fix="Mend the clock of whoever made it, and run "
                f"`idemp db partition {self._named(layout)} --from DAY` with a later day.",
            )
        ddl.guard(connection, self._tables, layout)
        values = {name: getattr(layout, name) for name in ("consumer_id", "since", "until", "dropped", "made")}
        connection.execute(insert(self._tables.daily), values)

    def _shorten(self, connection: Connection, old: Layout, new: Layout) -> None:
        """The days that have lost their layout go, empty as they are, and the guard lets their ids in."""
        self._refuse_near(new.until)
        daily = self._tables.daily
        mine = (daily.c.consumer_id == new.consumer_id) & (daily.c.since == new.since) & (daily.c.until == old.until)
        change = update(daily).where(mine, daily.c.made == old.made).values(until=new.until, made=new.made)
        if connection.execute(change).rowcount != 1:
            raise TransientStoreError("The layout was changed meanwhile.", fix="Try again.")
        for day in days_between(new.made, old.made):
            part = self._tables.part(new.part_on(day))
            ddl.lock_part(connection, part)
            if connection.scalar(select(exists(part.inbox.select()))):
                raise ConfigurationError(
                    f"Ids of {day} of {self._named(new)!r} were claimed already.",
                    fix=f"Run `idemp db partition {self._named(new)} --until DAY` with a later day.",
                )
            ddl.drop(connection, part)
        ddl.unguard(connection, self._tables, old)
        if new.since < new.until:
            ddl.guard(connection, self._tables, new)
            return
        connection.execute(delete(daily).where(daily.c.consumer_id == new.consumer_id, daily.c.since == new.since))
        if new.consumer_id not in read_layouts(connection, self._tables):
            ddl.drop(connection, self._tables.part(new.late))

    def refuse_others(self) -> None:
        """Say so where there can be none.

        Raises:
            ConfigurationError: it is not PostgreSQL.
        """
        if not can_partition(self._engine):
            raise ConfigurationError(
                f"{shown(self._engine)} can't have daily tables.",
                fix="Nothing is needed there: expired claims are deleted in batches, which workers do by themselves. "
                "Daily tables need PostgreSQL.",
            )

    def _refuse_near(self, day: date) -> None:
        if start_of(day) < self._clock.now() + _NOTICE:
            raise ConfigurationError(
                f"{day} begins too early: ids of that time may be arriving.",
                fix=f"Choose a later day (UTC), such as {self._today() + timedelta(days=2)}.",
            )

    def _named(self, layout: Layout) -> str:
        return self._names.name("consumer", layout.consumer_id)

    def _default_first(self) -> date:
        return self._today() + timedelta(days=2)

    def _today(self) -> date:
        return self._clock.now().astimezone(UTC).date()


def _years_after(day: date) -> date:
    return date(day.year + YEARS, day.month, 1)
