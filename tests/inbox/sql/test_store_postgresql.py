"""The SQL store on PostgreSQL keeps the port's promises, at each isolation level that is allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStore, Tables, shared_tables
from idemp.inbox.sql.engine import create_engine_safely
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


@pytest.mark.parametrize("table", ["inbox", "output", "pending"])
def test_statistics_of_a_long_transaction_mislead_nobody(postgresql_url: str, table: str) -> None:
    """ANALYZE that meets nothing but its rows takes the table for empty: all indexes look alike, and one finds an id."""
    engine = create_engine_safely(postgresql_url)
    upgrade(engine, Tables())
    with engine.connect() as writing, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        writing.execute(text(_CLAIMS_AND_OUTPUTS))
        other.execute(text(f"ANALYZE idemp_{table}"))
        writing.execute(text(_CLAIMS_AND_OUTPUTS))
        found = "consumer_id = 1 AND message_key = '3b8d6b4e-6d3e-4d5c-9a7e-0d6d1f3f8b11'"
        plan = "\n".join(other.scalars(text(f"EXPLAIN SELECT * FROM idemp_{table} WHERE {found}")).all())
    engine.dispose()
    assert re.search(r"Index Cond: \(\(consumer_id = 1\) AND \(message_key = ", plan), plan


_CLAIMS_AND_OUTPUTS = """
    WITH claimed AS (
        INSERT INTO idemp_inbox (message_key, consumer_id, type_id, claimed_at)
        SELECT gen_random_uuid(), 1, 1, now() FROM generate_series(1, 5000) RETURNING message_key
    ), stored AS (
        INSERT INTO idemp_output (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT gen_random_uuid(), message_key, 1, 0, 'send', '', 'stock', '{}', '' FROM claimed RETURNING message_key
    )
    INSERT INTO idemp_pending (output_id, message_key, consumer_id, ordinal, attempts, due_at)
    SELECT gen_random_uuid(), message_key, 1, 0, 0, now() FROM stored
"""
