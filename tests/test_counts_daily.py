"""Daily tables cost nothing where they are used: as many round trips as ever, and no more WAL for all the days before."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idemp.identity import new_id
from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.testing.clock import FakeClock
from tests.house import sale
from tests.inbox.sql import days
from tests.inbox.sql.test_daily import claim_of
from tests.test_counts import BATCH, DUPLICATE, DUPLICATES, FIRST, MARKS, Watched, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

    from tests.servers.postgresql import PostgreSQL

MESSAGES = 200
ROWS = 40_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def partitioned(watched: Watched) -> Watched:
    """From now on its consumer has daily tables."""
    store = watched.house.store.inner
    days.open_days(store, watched.house.clock, "shop")
    store.refresh_horizons("shop", [])
    watched.clear()
    return watched


def timed(watched: Watched) -> str:
    """An id of today."""
    return str(new_id(watched.house.clock.now()))


def plain_names(statements: list[str]) -> list[str]:
    """As they would be without daily tables; each of them has to name a day."""
    inboxes = [name for statement in statements for name in re.findall(r"idemp_(?:inbox|history)\S*", statement)]
    assert all(re.search(r"_[0-9]+_20260102", name) for name in inboxes), inboxes
    return [re.sub(r"_[0-9]+_20260102", "", statement) for statement in statements]


@pytest.mark.parametrize(("database", "claim", "outputs"), [given for given in FIRST if given[0] == "postgresql"])
def test_first_delivery(
    stack: ExitStack, tmp_path: Path, postgresql_url: str, database: str, claim: str, outputs: int
) -> None:
    watched = partitioned(opened(stack, postgresql_url, tmp_path, outputs=outputs, claim=claim))
    assert plain_names(watched.deliver(timed(watched))) == FIRST[database, claim, outputs]


def test_duplicate_and_marks(stack: ExitStack, tmp_path: Path, postgresql_url: str) -> None:
    watched = partitioned(opened(stack, postgresql_url, tmp_path, outputs=3))
    watched.deliver(known := timed(watched))
    watched.clear()
    watched.house.restart()
    assert plain_names(watched.statements()) == MARKS["postgresql"]
    assert plain_names(watched.deliver(known)) == DUPLICATE["postgresql"]


def test_batch(stack: ExitStack, tmp_path: Path, postgresql_url: str) -> None:
    watched = partitioned(opened(stack, postgresql_url, tmp_path, outputs=1, batch=50))
    watched.house.together(*(sale(timed(watched)) for _ in range(10)))
    watched.house.restart()
    messages = [sale(timed(watched)) for _ in range(10)]
    watched.clear()
    watched.house.together(*messages)
    assert plain_names(watched.statements()) == BATCH["postgresql"]
    watched.house.restart()
    watched.clear()
    watched.house.together(*messages)
    assert plain_names(watched.statements()) == DUPLICATES["postgresql"]


def test_ids_without_a_time_cost_what_they_did(stack: ExitStack, tmp_path: Path, postgresql_url: str) -> None:
    watched = partitioned(opened(stack, postgresql_url, tmp_path, outputs=1))
    assert watched.deliver("sale-1") == FIRST["postgresql", "early", 1]


class TestWal:
    @pytest.fixture
    def store(self, own_postgresql: PostgreSQL, unique_name: str) -> Iterator[SqlStore]:
        """On a server of its own: the log and its checkpoints are the whole server's."""
        engine = create_engine_safely(own_postgresql.create_database(unique_name))
        upgrade(engine, Tables())
        made = SqlStore(engine, clock=FakeClock())
        days.open_days(made, made.clock, "orders")  # type: ignore[arg-type]
        yield made
        engine.dispose()

    @pytest.mark.slow
    def test_it_stays_flat(self, store: SqlStore) -> None:
        """After a checkpoint each page that is touched is logged whole: random keys touch all of them."""
        now = store.clock.now
        few = self.least(store, lambda: new_id(now()))
        day = f"idemp_inbox_{store.names.id('consumer', 'orders')}_20260102"
        for table, key in (("idemp_inbox", "gen_random_uuid()"), (day, self.AT_RANDOM_IN_THE_DAY)):
            with store.engine.begin() as connection:
                connection.execute(
                    text(
                        f"INSERT INTO {table} (message_key, consumer_id, type_id, claimed_at) "
                        f"SELECT {key}, (SELECT id FROM idemp_consumer), 1, now() FROM generate_series(1, {ROWS}) n"
                    )
                )
        many, many_random = self.least(store, lambda: new_id(now())), self.least(store, uuid4)
        assert many < 1.5 * few, (few, many)
        assert many < 600, many
        assert many_random > 3 * many, "else this shows nothing"

    AT_RANDOM_IN_THE_DAY = (
        "('019b7c01-0400-7' || substr(md5(n::text), 1, 3) || '-8000-' || substr(md5(n::text), 4, 12))::uuid"
    )

    def least(self, store: SqlStore, make: Any) -> float:
        """Of several runs: the server's own upkeep, and checkpoints in between, can only add to it."""
        return min(self.bytes_of(store, make) for _ in range(3))

    @staticmethod
    def bytes_of(store: SqlStore, make: Any) -> float:
        """WAL for each of many claims that follow a checkpoint."""
        keys: list[UUID] = [make() for _ in range(MESSAGES)]
        with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking:
            looking.execute(text("CHECKPOINT"))
            before = looking.scalar(text("SELECT pg_current_wal_insert_lsn()"))
            for key in keys:
                claim = claim_of(key)
                with store.begin([claim]) as unit:
                    assert unit.claim(claim).verdict is Verdict.CLAIMED
                    unit.commit()
            written = text("SELECT pg_current_wal_insert_lsn() - CAST(:before AS pg_lsn)")
            return float(looking.scalar(written, {"before": before}) or 0) / MESSAGES
