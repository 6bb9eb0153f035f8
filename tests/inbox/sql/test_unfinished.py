"""Handler starts without an end, in SQL: the cost of a record, its bound, its rights, and the cleaner's manners."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, event, select, update

from idemp.errors import SchemaError, StoreError, StoreUnavailable
from idemp.inbox.port import Identity, Mark, Verdict
from idemp.inbox.sql import SqlStore
from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.schema import check, upgrade
from idemp.inbox.sql.tables import Tables
from idemp.inbox.sql.unfinished import MOST_STARTS
from idemp.testing.store_bench import LEASE, MESSAGE_TYPE, RELAY_AFTER, Background, Bench, NoEffects, make_outputs
from tests.inbox.sql.rows import alter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.inbox.sql.conftest import MovedClock

RIGHTS = Path(__file__).parents[3] / "docs" / "how-to" / "least-privilege.md"


@pytest.fixture
def store(engine: Engine, tables: Tables, clock: MovedClock) -> SqlStore:
    made = SqlStore(engine, tables=tables, clock=clock, worker="host-1")
    made.prepare("orders")
    return made


def kept(store: SqlStore) -> list[Any]:
    table = store.tables.unfinished
    with store.engine.connect() as connection:
        return list(connection.execute(select(table.c.starts, table.c.first_at, table.c.last_at, table.c.worker_id)))


def test_record_says_since_when_and_by_whom(store: SqlStore, clock: MovedClock) -> None:
    first, key = clock.now(), uuid4()
    store.note_start("orders", key)
    later = clock.move(minutes=5)
    other = SqlStore(store.engine, clock=clock, worker="host-2")
    assert other.note_start("orders", key) == 1
    assert kept(store) == [(2, first, later, store.names.id("worker", "host-2"))]
    store.note_end("orders", key)
    assert kept(store) == []


def test_count_never_overflows(store: SqlStore) -> None:
    key = uuid4()
    store.note_start("orders", key)
    with store.engine.begin() as connection:
        connection.execute(update(store.tables.unfinished).values(starts=MOST_STARTS - 2))
    assert [store.note_start("orders", key) for _ in range(3)] == [MOST_STARTS - 2, MOST_STARTS - 1, MOST_STARTS - 1]
    (row,) = kept(store)
    assert row.starts == MOST_STARTS


def test_new_key_does_not_inherit_the_count_of_the_one_before(store: SqlStore) -> None:
    """MySQL's family brings the number back as last inserted id, which belongs to the connection."""
    key = uuid4()
    for _ in range(3):
        store.note_start("orders", key)
    assert [store.note_start("orders", uuid4()) for _ in range(3)] == [0, 0, 0]


def test_costs_one_statement_and_no_transaction_where_that_can_be(store: SqlStore) -> None:
    statements: list[tuple[str, bool]] = []

    def watch(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        driver = connection.connection.driver_connection
        by_itself = getattr(driver, "autocommit", False) is True if "psycopg" in type(driver).__module__ else False
        statements.append((statement.split(maxsplit=1)[0], by_itself))

    event.listen(store.engine, "before_cursor_execute", watch)
    key = uuid4()
    for _ in range(2):
        store.note_start("orders", key)
    store.note_end("orders", key)
    event.remove(store.engine, "before_cursor_execute", watch)
    by_itself = store.engine.dialect.name == "postgresql"
    wanted = [("INSERT", by_itself), ("INSERT", by_itself), ("DELETE", by_itself)]
    assert [found for found in statements if found[0] != "BEGIN"] == wanted
    assert len(statements) == len(wanted) + (3 if store.engine.dialect.name == "sqlite" else 0)


def test_four_processes_starting_one_message_lose_no_count(store: SqlStore, tables: Tables, clock: MovedClock) -> None:
    """Each with an engine of its own; the record is taken away in between, so that inserts race with deletions, too."""
    engines = [create_engine_safely(store.engine.url) for _ in range(4)]
    stores = [SqlStore(engine, tables=tables, clock=clock, worker="host-1") for engine in engines]
    keys = [uuid4() for _ in range(10)]
    start = threading.Barrier(len(stores))

    def work(one: SqlStore) -> list[int]:
        found = []
        for key in keys:
            start.wait(30)
            one.note_end("orders", uuid4())
            found.append(one.note_start("orders", key))
        return found

    running = [Background(lambda one=one: work(one)) for one in stores]  # type: ignore[misc]
    found = [background.result(60) for background in running]
    assert [sorted(column) for column in zip(*found, strict=True)] == [[0, 1, 2, 3]] * len(keys)
    for engine in engines:
        engine.dispose()


def test_missing_right_is_found_at_start_and_told_at_work(postgresql_url: str, unique_name: str) -> None:
    engine, tables = create_engine_safely(postgresql_url), Tables()
    upgrade(engine, tables)
    alter(
        engine,
        f"CREATE ROLE {unique_name} LOGIN",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {unique_name}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {unique_name}",
        f"REVOKE UPDATE ON idemp_unfinished FROM {unique_name}",
    )
    worker = create_engine_safely(engine.url.set(username=unique_name))
    with pytest.raises(SchemaError, match=r"idemp_unfinished can't be written: .*GRANT UPDATE ON TABLE"):
        check(worker, tables)
    with pytest.raises(StoreError, match="permission denied for table idemp_unfinished") as caught:
        SqlStore(worker).note_start("orders", uuid4())
    assert not isinstance(caught.value, StoreUnavailable), "no outage to wait for"
    worker.dispose()
    alter(engine, f"DROP OWNED BY {unique_name}", f"DROP ROLE {unique_name}")
    engine.dispose()


def test_altered_table_is_found(empty_engine: Engine, tables: Tables) -> None:
    upgrade(empty_engine, tables)
    columns = "consumer_id, message_key, starts, first_at, last_at, worker_id"
    if empty_engine.dialect.name == "sqlite":
        alter(empty_engine, "DROP TABLE idemp_unfinished", f"CREATE TABLE idemp_unfinished ({columns})")
    else:
        key = "CONSTRAINT idemp_unfinished_pkey" if empty_engine.dialect.name == "postgresql" else "PRIMARY KEY"
        alter(empty_engine, f"ALTER TABLE idemp_unfinished DROP {key}")
    with pytest.raises(SchemaError, match=r"primary key of idemp_unfinished is \(none\)"):
        check(empty_engine, tables)


def test_database_that_is_away(store: SqlStore) -> None:
    if store.engine.dialect.name == "sqlite":
        away = create_engine_safely("sqlite:////no/such/folder/inbox.db")
    else:
        away = create_engine_safely(store.engine.url.set(host="127.0.0.1", port=1, query={}))
    other = SqlStore(away)
    for act in (other.note_start, other.note_end):
        with pytest.raises(StoreUnavailable):
            act("orders", uuid4())


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)  # SQLite has one writer
def test_cleaner_passes_over_a_start_that_is_being_recorded(
    empty_engine: Engine, tables: Tables, clock: MovedClock
) -> None:
    upgrade(empty_engine, tables)
    store = SqlStore(empty_engine, clock=clock)
    held, old = uuid4(), uuid4()
    store.note_start("orders", held)
    store.note_start("orders", old)
    clock.move(days=2)
    table = tables.unfinished
    with empty_engine.connect() as connection, connection.begin():
        connection.execute(update(table).where(table.c.message_key == held).values(last_at=clock.now()))
        purged = Background(lambda: store.upkeep.purge("orders", {"orders.Place": timedelta(hours=1)}, 10))
        assert purged.result(20) == 0
    assert (store.note_start("orders", held), store.note_start("orders", old)) == (1, 0)


@pytest.fixture
def least(postgresql_url: str, unique_name: str, clock: MovedClock) -> Iterator[Bench]:
    """A store whose user has the rights that the how-to gives to a worker, and no others."""
    owner, tables = create_engine_safely(postgresql_url), Tables(schema="idemp")
    upgrade(owner, tables)
    found = re.search(r"```sql\n(.*?)```", RIGHTS.read_text(), re.DOTALL)
    assert found is not None
    grants = [part.strip() for part in found.group(1).split(";") if part.strip().startswith("GRANT")]
    alter(
        owner,
        f"CREATE ROLE {unique_name} LOGIN",
        *(grant.replace("TO worker", f"TO {unique_name}") for grant in grants),
    )
    engine = create_engine_safely(owner.url.set(username=unique_name))
    store = SqlStore(engine, tables=tables, clock=clock)
    yield Bench(store, NoEffects(), clock, "orders", asks_again=False, patience=30.0)  # type: ignore[arg-type]
    store.close()
    engine.dispose()
    alter(owner, f"DROP OWNED BY {unique_name}", f"DROP ROLE {unique_name}")
    owner.dispose()


def test_documented_rights_are_enough_for_all_that_a_worker_does(least: Bench, clock: MovedClock) -> None:
    store, window = least.store, {MESSAGE_TYPE: timedelta(minutes=5)}
    store.verify()
    store.prepare("orders", [MESSAGE_TYPE])
    store.upkeep.agree_identities("orders", "orders", [Identity(MESSAGE_TYPE, "message_id")], {}, window)
    store.upkeep.agree_identities("orders", "moved", [Identity(MESSAGE_TYPE, "message_id")], {}, window)
    store.upkeep.beat("host-1", relay=True, consumers=["orders"])
    claim, outputs = least.claim(), make_outputs(3)
    assert store.note_start("orders", claim.id.key) == 0
    assert store.note_start("orders", claim.id.key) == 1
    assert least.handle(claim, outputs).verdict is Verdict.CLAIMED
    store.note_end("orders", claim.id.key)
    assert least.handle(claim).verdict is Verdict.DUPLICATE
    store.record([Mark(claim, (outputs[0].id,), redelivered=True)])
    clock.move(seconds=RELAY_AFTER.total_seconds() + 1)
    store.upkeep.take_pending(10, LEASE)
    store.upkeep.settle_pending([outputs[1].id], {outputs[2].id: "nacked"}, timedelta(0))
    store.upkeep.quarantine({outputs[2].id: "nacked"})
    store.upkeep.release_quarantined([outputs[2].id])
    store.upkeep.settle_pending([outputs[2].id], {}, timedelta(0))
    for _ in range(20):
        clock.move(seconds=30)
        store.upkeep.beat("host-1", relay=True, consumers=["orders"])
    assert store.upkeep.purge("orders", window, 10) == 1
    store.upkeep.retire("host-1")
