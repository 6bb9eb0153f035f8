"""The SQL store on PostgreSQL keeps the port's promises, at each isolation level that is allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import Executable, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ClauseElement

from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStore, Tables, shared_tables
from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.inbox.sql.stored_postgresql import read_all, read_one
from idemp.testing.store_conformance import Bench, SqlEffects, StoreConformance, make_outputs
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.testing.clock import FakeClock


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    server: Any = request.getfixturevalue(request.cls.server)
    with kept.database(server, isolation_level=request.cls.isolation) as made:
        yield made


class TestReadCommitted(StoreConformance):
    server = "postgresql"
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


@pytest.mark.slow
class TestRepeatableRead(TestReadCommitted):
    isolation = "REPEATABLE READ"
    asks_again = True


@pytest.mark.slow
class TestSerializable(TestReadCommitted):
    isolation = "SERIALIZABLE"
    asks_again = True


class TestBehindPgBouncer(TestReadCommitted):
    """Each transaction may run on another server connection."""

    server = "pgbouncer"


@pytest.mark.slow
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


def test_statistics_of_a_long_transaction_mislead_nobody(postgresql_url: str) -> None:
    """ANALYZE that meets nothing but its rows takes tables for empty: all indexes look alike, and one finds an id."""
    engine = create_engine_safely(postgresql_url)
    upgrade(engine, Tables())
    one, several = read_one(Tables()), read_all(Tables())
    asked = {"consumer_id": 1, "message_key": uuid4(), "message_keys": [uuid4() for _ in range(50)]}
    with engine.connect() as writing, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        writing.execute(text(_CLAIMS_AND_OUTPUTS))
        other.execute(text("ANALYZE idemp_inbox, idemp_output, idemp_pending"))
        writing.execute(text(_CLAIMS_AND_OUTPUTS))
        plans = ["\n".join(other.execute(_Explained(each), asked).scalars()) for each in (one, several)]
    engine.dispose()
    for plan in plans:
        assert re.findall(r"Index Cond: \(+(\w+) = .*", plan) == ["consumer_id", "id", "consumer_id", "output_id"], plan
        assert len(re.findall(r"Index Cond: .*message_key = ", plan)) == 2, plan
        assert "Filter" not in plan


class _Explained(Executable, ClauseElement):
    inherit_cache = False

    def __init__(self, statement: Any) -> None:
        self.statement = statement


@compiles(_Explained)
def _explained(element: _Explained, compiler: Any, **options: Any) -> str:
    return f"EXPLAIN {compiler.process(element.statement, **options)}"


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
