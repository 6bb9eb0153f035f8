"""Daily tables in tests: opened in few words, looked at, and cleared away."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import delete, text, update

from idemp.identity import effective_id, new_id
from idemp.inbox.port import Claim
from idemp.inbox.sql.claiming import qualified
from idemp.testing.store_bench import Bench, effect_tables

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from idemp.inbox.sql import SqlStore, Tables
    from idemp.inbox.sql.days import Layout
    from idemp.testing.clock import FakeClock

_OURS = text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = COALESCE(:schema, current_schema()) AND c.relkind = 'r' ORDER BY c.relname"
)
_GUARDS = text("SELECT conname FROM pg_constraint WHERE conrelid = CAST(:inbox AS regclass) AND contype = 'c'")


class TimedBench(Bench):
    """By turns an id of today, one of tomorrow, and one without a time, where a test does not name it."""

    turn = 0

    def claim(self, text: str | None = None, **options: Any) -> Claim:
        """A claim in a daily table, but for each third one."""
        made = super().claim(text, **options)
        today = datetime.combine(self.clock.now().date(), datetime.min.time(), UTC)
        if text is not None and len(text) > 200:
            return made  # as long as ids may be: no room for a time
        if text is not None:
            identifier = effective_id("envelope", (UUID(str(new_id_at(today))), text))
        elif (turn := self.turn % 3) < 2:
            identifier = effective_id("envelope", str(new_id(today + timedelta(days=turn))))
        else:
            identifier = made.id
        self.turn += text is None
        return Claim(
            consumer=made.consumer,
            id=identifier,
            message_type=made.message_type,
            fingerprint=made.fingerprint,
            wait=made.wait,
        )


def new_id_at(moment: datetime) -> UUID:
    """The same for the same moment."""
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62))


def open_days(store: SqlStore, clock: FakeClock, consumer: str, ahead: int = 2) -> Layout:
    """Daily tables for this consumer from today on, since time has gone on to the first day."""
    layout = store.upkeep.daily.open(consumer, clock.now().date() + timedelta(days=1), ahead)
    enter_first(store, clock)
    return layout


def enter_first(store: SqlStore, clock: FakeClock) -> None:
    """Time goes on to the day after the present one, for which there are tables."""
    clock.advance(timedelta(days=1, hours=1))
    store.places.look()


def parts(engine: Engine, tables: Tables) -> list[str]:
    """What follows the prefix in the names of all parts."""
    with engine.connect() as connection:
        found = connection.scalars(_OURS, {"schema": tables.schema}).all()
    ours = [name for name in found if name not in tables.names and tables.is_ours(name)]
    return [name.removeprefix(tables.prefix) for name in ours]


def guards(engine: Engine, tables: Tables) -> list[str]:
    """The names of the plain inbox's CHECK constraints."""
    with engine.connect() as connection:
        return sorted(connection.scalars(_GUARDS, {"inbox": qualified(tables.inbox)}))


def clear(engine: Engine, tables: Tables) -> None:
    """No part is left, nor a guard."""
    schema = f"{tables.schema}." if tables.schema else ""
    with engine.begin() as connection:
        for name in parts(engine, tables):
            connection.execute(text(f"DROP TABLE {schema}{tables.prefix}{name}"))
        for name in guards(engine, tables):
            connection.execute(text(f"ALTER TABLE ONLY {qualified(tables.inbox)} DROP CONSTRAINT {name}"))


def empty(engine: Engine, tables: Tables, consumer: str) -> None:
    """Nothing is left but this consumer and its parts, without rows: making them takes longer than most cases."""
    with engine.begin() as connection:
        for table in (*tables.metadata.tables.values(), *effect_tables()):
            if table is tables.consumer:
                connection.execute(delete(table).where(table.c.name != consumer))
                connection.execute(update(table).values(queue=None, purged_before=None))
            elif table is not tables.daily:
                connection.execute(delete(table))


def names_of(days: list[date]) -> list[str]:
    """As they stand in tables' names."""
    return [f"{day:%Y%m%d}" for day in days]
