"""The SQL store on PostgreSQL keeps the port's promises, at each isolation level that is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStore, Tables, shared_tables
from idemp.inbox.sql.schema import upgrade
from idemp.testing.store_conformance import Bench, SqlEffects, StoreConformance, make_outputs
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.testing.clock import FakeClock


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql, isolation_level=request.cls.isolation) as made:
        yield made


class TestReadCommitted(StoreConformance):
    isolation = "READ COMMITTED"
    shortest_wait = 0.2

    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables()

    @pytest.fixture
    def store(self, engine: Engine, tables: Tables, clock: FakeClock) -> Iterator[SqlStore]:
        kept.empty(engine, tables)
        made = SqlStore(engine, tables=tables, clock=clock)
        yield made
        made.upkeep.close()

    @pytest.fixture
    def effects(self, engine: Engine) -> SqlEffects:
        return SqlEffects(engine)

    def reopen(self, store: Any) -> SqlStore:
        return kept.another(store, isolation_level=self.isolation)

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.lost_at_commit(store, isolation_level=self.isolation)


class TestRepeatableRead(TestReadCommitted):
    isolation = "REPEATABLE READ"
    asks_again = True


class TestSerializable(TestReadCommitted):
    isolation = "SERIALIZABLE"
    asks_again = True


class TestSchemaAndPrefix(TestReadCommitted):
    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables("messaging", "billing_")

    def test_same_id_in_two_schemas_and_prefixes(self, bench: Bench, engine: Engine, clock: FakeClock) -> None:
        claim, outputs = bench.claim("event-1"), make_outputs(2)
        bench.handle(claim, outputs)
        for tables in (Tables(), Tables(schema="messaging"), Tables(schema="other", prefix="billing_")):
            upgrade(engine, tables)
            other = SqlStore(engine, tables=tables, clock=clock)
            with other.begin([claim]) as unit:
                assert unit.claim(claim).verdict is Verdict.CLAIMED
                unit.store_outputs(claim, make_outputs(1), claim.wait)
                unit.commit()
            assert other.upkeep.pending_count() == 1
        assert [stored.output for stored in bench.look(claim).outputs] == outputs

    def test_nothing_is_left_in_the_public_schema(self, bench: Bench, engine: Engine) -> None:
        bench.handle(bench.claim(), make_outputs(1))
        with engine.connect() as connection:
            found = connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")).all()
        assert not [name for name in found if name.startswith("billing_")]
