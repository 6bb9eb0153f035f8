"""The SQL store keeps the port's promises where ids carry their time, and their consumer keeps daily tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import SqlStore, Tables, shared_tables
from idemp.testing.cases.relays import RelayCases
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import MESSAGE_TYPE
from idemp.testing.store_conformance import CoreStoreConformance, SqlEffects
from tests.inbox.sql import days, kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.inbox.port import InboxStore
    from idemp.testing.clock import FakeClock
    from idemp.testing.store_bench import Bench, Effects


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql, isolation_level=request.cls.isolation) as made:
        yield made


class OnDailyTables(StoreSuite):
    """By turns today's table, tomorrow's and the plain one: batches have ids in all of them.

    One consumer has them for a whole class of tests.
    """

    consumer = "conformance"

    isolation = "READ COMMITTED"
    shortest_wait = 0.2

    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables()

    @pytest.fixture
    def store(self, engine: Engine, tables: Tables, clock: FakeClock) -> Iterator[SqlStore]:
        if days.parts(engine, tables):
            days.empty(engine, tables, self.consumer)
        else:
            kept.empty(engine, tables)
        made = SqlStore(engine, tables=tables, clock=clock)
        yield made
        made.upkeep.close()

    @pytest.fixture
    def effects(self, engine: Engine) -> SqlEffects:
        return SqlEffects(engine)

    def make_bench(self, store: InboxStore, effects: Effects, clock: FakeClock) -> Bench:
        assert isinstance(store, SqlStore)
        store.prepare(self.consumer, [MESSAGE_TYPE])
        if days.parts(store.engine, store.tables):
            days.enter_first(store, clock)
        else:
            days.open_days(store, clock, self.consumer)
        return days.TimedBench(store, effects, clock, self.consumer, self.asks_again, self.patience, self.quiet)

    def reopen(self, store: Any) -> SqlStore:
        return kept.another(store, isolation_level=self.isolation)

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.lost_at_commit(store, isolation_level=self.isolation)


class TestDaily(OnDailyTables, CoreStoreConformance, RelayCases):
    def test_they_are_where_their_ids_say(self, bench: Bench, engine: Engine, tables: Tables) -> None:
        claims = [bench.claim() for _ in range(6)]
        for claim in claims:
            bench.handle(claim)
        with engine.connect() as connection:
            found = {
                row.message_key: row.place
                for row in connection.exec_driver_sql(
                    f"SELECT message_key, tableoid::regclass::text AS place FROM {tables.inbox.name}"
                )
            }
        assert [found[claim.id.key].rpartition("_")[2] for claim in claims] == ["20260102", "20260103", "inbox"] * 2


@pytest.mark.slow
class TestDailySerializable(TestDaily):
    isolation = "SERIALIZABLE"
    asks_again = True


@pytest.mark.slow
class TestDailyInASchema(OnDailyTables):
    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables("messaging", "billing_")

    def test_they_are_where_their_ids_say(self, bench: Bench, engine: Engine, tables: Tables) -> None:
        for _ in range(3):
            bench.handle(bench.claim())
        with engine.connect() as connection:
            places = connection.exec_driver_sql(
                f"SELECT tableoid::regclass::text FROM {tables.schema}.{tables.inbox.name}"
            ).scalars()
            assert len({place for place in places if place.startswith("messaging.billing_inbox")}) == 3
