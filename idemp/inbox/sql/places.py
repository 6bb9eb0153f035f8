"""Where a worker looks for an id: what it remembers of the layouts, and the statements for each part."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select, text

from idemp.errors import FutureMessage, SchemaError, StoreUnavailable
from idemp.forking import renewed_in_child
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.days import Layout, NoTableYet, part_of, start_of
from idemp.inbox.sql.dialects import dialect_for
from idemp.inbox.sql.liveness import FAR_PAST
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Engine, exc

    from idemp.clock import Clock
    from idemp.inbox.sql.claiming import ClaimDialect
    from idemp.inbox.sql.tables import Tables

PARTITION_COMMAND: Final = "idemp db partition"
KEPT_SECONDS: Final = 60
"""How old what is remembered may get: a guard tells whoever acts on less recent knowledge, and this makes that rare."""
FUTURE: Final = timedelta(days=1)
"""How far ahead of ours a producer's clock may be."""
_MOST_PARTS: Final = 200
_UNDEFINED_TABLE: Final = "42P01"
_CHECK_VIOLATION: Final = "23514"
_GUARDS: Final = text(
    "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(:inbox) AND contype = 'c' "
    "AND starts_with(conname::text, :prefix)"
)

Layouts = dict[int, tuple[Layout, ...]]


class Places:
    """Which tables an id belongs to. Safe to share between threads.

    Without a layout, and on every database but PostgreSQL, that is the plain ones, and costs nothing.

    Args:
        engine: where the tables are.
        tables: the plain ones.
        clock: source of time.
        without_returning: as for `dialect_for`.

    Example:
        >>> from uuid import uuid4
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> places = Places(create_engine_safely("sqlite://"), Tables(), SystemClock())
        >>> places.of(7, uuid4()) is places.plain
        True
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock, *, without_returning: bool = False) -> None:
        self.plain = dialect_for(engine.dialect, tables, without_returning=without_returning)
        self._sqlalchemy = engine.dialect
        self._short = Short(engine)
        self._tables = tables
        self._clock = clock
        self._layouts: Layouts = {}
        self._parts: dict[str, ClaimDialect] = {}
        self._next_look: float | None = 0.0 if can_partition(engine) else None
        self._lock = renewed_in_child(threading.Lock())

    def look(self) -> None:
        """Read the layouts anew, in a transaction of its own."""
        if self._next_look is None:
            return
        layouts = self._short.run(lambda connection: read_layouts(connection, self._tables))
        with self._lock:
            self._layouts = layouts
            self._next_look = self._clock.monotonic() + KEPT_SECONDS

    def look_if_due(self) -> None:
        """`look` where what is remembered is too old, or was found to be wrong; never inside of a transaction."""
        if self._next_look is not None and self._clock.monotonic() >= self._next_look:
            self.look()

    def expect(self, consumer_id: int, key: UUID) -> None:
        """See, before a transaction begins, that an id has a home.

        Raises:
            FutureMessage: its time lies in the future.
            StoreUnavailable: nobody made the tables of its day.
        """
        try:
            part_of(self._layouts.get(consumer_id, ()), key)
        except NoTableYet:
            self.look()  # perhaps they have been made meanwhile
            self.of(consumer_id, key)

    def of(self, consumer_id: int, key: UUID) -> ClaimDialect:
        """The statements for the tables of an id.

        Raises:
            FutureMessage: as `expect` says.
            StoreUnavailable: as `expect` says.
        """
        layouts = self._layouts.get(consumer_id)
        if layouts is None:
            return self.plain
        try:
            name = part_of(layouts, key)
        except NoTableYet as none:
            raise self._homeless(key, none) from none
        return self.plain if name is None else self._parts.get(name) or self._made(name)

    def is_divided(self, consumer_id: int) -> bool:
        """Whether some ids of this consumer are not in the plain tables."""
        return consumer_id in self._layouts

    def kept_from(self, consumer_id: int, key: UUID) -> datetime:
        """The start of the first day that was not dropped, of the layout that an id belongs to; else long ago."""
        for layout in self._layouts.get(consumer_id, ()):
            if layout.covers(key):
                return start_of(layout.dropped)
        return FAR_PAST

    def by_place(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[ClaimDialect, list[Mapping[str, Any]]]]:
        """Rows by the tables that they belong to: first the plain ones, then in the order of their names.

        The same order for all units, so that no two wait for each other.
        """
        if not self._layouts:
            return [(self.plain, list(rows))] if rows else []
        found: dict[ClaimDialect, list[Mapping[str, Any]]] = {}
        for row in rows:
            found.setdefault(self.of(row["consumer_id"], row["message_key"]), []).append(row)
        return sorted(found.items(), key=lambda item: item[0].tables.inbox.name)

    def was_wrong(self, error: exc.DBAPIError) -> bool:
        """Whether a statement of ours failed because the layout is no longer as remembered; then it is read anew."""
        if self._next_look is None or not is_misplaced(error, self._tables):
            return False
        self._next_look = 0.0
        return True

    def _made(self, name: str) -> ClaimDialect:
        made = dialect_for(self._sqlalchemy, self._tables.part(name))
        with self._lock:
            while len(self._parts) >= _MOST_PARTS:  # days go by
                del self._parts[next(iter(self._parts))]
            return self._parts.setdefault(name, made)

    def _homeless(self, key: UUID, none: NoTableYet) -> FutureMessage | StoreUnavailable:
        moment = none.moment.isoformat()
        if none.moment > self._clock.now() + FUTURE:
            return FutureMessage(
                f"The time inside the id {key} is {moment}, which is in the future.",
                fix="Mend the producer's clock, or how it makes ids; then have it send the message anew.",
            )
        return StoreUnavailable(
            f"There are no daily tables for the id {key}, of {moment}.",
            fix=f"Run `{PARTITION_COMMAND} CONSUMER` as the tables' owner, and have it run each day.",
        )


def can_partition(engine: Engine) -> bool:
    """Whether this kind of database can have daily tables."""
    return engine.dialect.name == "postgresql"


def read_layouts(connection: Connection, tables: Tables) -> Layouts:
    """The layouts of all consumers, by consumer, the oldest first."""
    daily = tables.daily.c
    found: dict[int, list[Layout]] = {}
    columns = (daily.consumer_id, daily.since, daily.until, daily.dropped, daily.made)
    for row in connection.execute(select(*columns).order_by(daily.consumer_id, daily.since)):
        found.setdefault(row.consumer_id, []).append(Layout(*row))
    return {consumer_id: tuple(layouts) for consumer_id, layouts in found.items()}


def check_guards(connection: Connection, tables: Tables) -> None:
    """See that no guard refuses ids of days that no layout knows of any more.

    Raises:
        SchemaError: one does; says the statement that takes it away.
    """
    if connection.dialect.name != "postgresql":
        return
    # In this order: a guard that is seen was noted along with its layout.
    guards = connection.scalars(_GUARDS, {"inbox": qualified(tables.inbox), "prefix": guard_prefix(tables)}).all()
    known = {
        f"{guard_prefix(tables)}{layout.consumer_id}_{layout.since:%Y%m%d}"
        for layouts in read_layouts(connection, tables).values()
        for layout in layouts
    }
    for name in sorted(set(guards) - known):
        raise SchemaError(
            f"The constraint {name} refuses ids of which {tables.daily.name} has no layout: no table takes them.",
            fix=f"Restore {tables.daily.name} from a backup; or, if no daily table of this consumer has claims in it, run "
            f"`ALTER TABLE ONLY {qualified(tables.inbox)} DROP CONSTRAINT {name}` as the owner.",
        )


def is_misplaced(error: exc.DBAPIError, tables: Tables) -> bool:
    """Whether a part that was addressed is not there, or the plain inbox refused an id that belongs to a part."""
    state = getattr(error.orig, "sqlstate", None)
    if state == _CHECK_VIOLATION:
        constraint = getattr(getattr(error.orig, "diag", None), "constraint_name", None) or ""
        return str(constraint).startswith(guard_prefix(tables))
    parts = rf"\b{tables.prefix}(inbox|output|history)_[0-9]+_"
    return state == _UNDEFINED_TABLE and re.search(parts, str(error.orig)) is not None


def names_ours(error: exc.SQLAlchemyError, tables: Tables) -> bool:
    """Whether the server's message is about one of idemp's tables, or the schema that they were given."""
    words = re.findall(r"\w+", str(getattr(error, "orig", "")).partition("\n")[0])
    return any(tables.is_ours(word) or word == tables.configured_schema for word in words)


def guard_prefix(tables: Tables) -> str:
    """What the names of the plain inbox's guards begin with."""
    return f"{tables.prefix}daily_"
