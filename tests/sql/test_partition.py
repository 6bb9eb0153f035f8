"""Hash partitions on PostgreSQL: all promises hold on them, and a table is partitioned as a whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import exc

from idemp import ConfigurationError, Settings
from idemp.bulk import Bulk
from idemp.cli.main import Exit
from idemp.sql.checks import check_database
from idemp.sql.engine import Database
from idemp.sql.partition import partition, unpartitioned
from idemp.sql.schema import upgrade
from idemp.testing import SchedulerConformance, StoreConformance
from tests.bulk.test_bulk import SET, Order, Shop, answers, order
from tests.cli.test_commands import run
from tests.servers.databases import query
from tests.sql.test_conformance import open_scheduler, open_store
from tests.worker.test_loop import wait_for
from tests.worker.test_purge import test_expired_claims_go_while_deliveries_come as expired_claims_go

__all__ = ["open_scheduler", "open_store"]

pytestmark = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
FILL = "INSERT INTO idemp_inbox SELECT 1, gen_random_uuid(), 2, convert_to('s:' || number, 'UTF8'), NULL, 0, 'worker' FROM generate_series(1, %s) AS number"


@pytest.fixture
def partitioned(url: str) -> str:
    database = Database(url)
    assert partition(database, 4) == ["idemp_inbox", "idemp_output"]
    database.close()
    return url


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url, sets={Order: SET})
    yield shop
    shop.app.close()
    shop.database.close()


@pytest.mark.slow
@pytest.mark.usefixtures("partitioned")
class TestStore(StoreConformance):
    pass


@pytest.mark.slow
@pytest.mark.usefixtures("partitioned")
class TestScheduler(SchedulerConformance):
    pass


def test_a_purge_goes_on_beside_deliveries(partitioned: str) -> None:
    expired_claims_go(partitioned, 1_000, 20)


def test_tables_with_rows_keep_them_and_go_on(shop: Shop) -> None:
    first = [order(n) for n in range(300)]
    assert answers(shop.run(first)) == {"new": 300}
    assert partition(shop.database, 4) == ["idemp_inbox", "idemp_output"]
    assert (partition(shop.database, 4), unpartitioned(shop.database)) == ([], {})
    assert (shop.count("inbox"), shop.count("output"), shop.count("pending")) == (300, 600, 600)
    rows = [*first, *(order(n) for n in range(300, 600)), order("alien", "id-7")]
    assert answers(shop.run(rows, run="second")) == {"new": 300, "duplicate": 300, "conflict": 1}
    with Bulk(shop.app, run="online") as bulk:
        assert answers(bulk.run([order(n) for n in range(599, 602)])) == {"new": 2, "duplicate": 1}
    upgrade(shop.database)
    assert check_database(shop.database) == []
    metadata = shop.database.tables.metadata
    own = {table.name for table in metadata.sorted_tables}
    with shop.database.engine.connect() as connection:
        options = {"include_name": lambda name, kind, _: kind != "table" or name in own, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


@pytest.mark.slow
def test_a_server_that_dies_while_it_copies_loses_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    query(url, FILL, 300_000)
    database = Database(url)
    busy = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query LIKE 'INSERT%'"
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(partition, database, 4)
        wait_for(lambda: query(url, busy))
        claim = threading.Thread(target=query, args=(url, FILL, 1))  # waits for the copy, and then finds the old table
        claim.start()
        query(
            url,
            f"SELECT pg_terminate_backend(pid) FROM ({busy.replace('INSERT%', 'INSERT INTO %idemp_inbox%unpartitioned')}) AS busy",
        )
        with pytest.raises(exc.OperationalError):
            copy.result()
    claim.join()
    assert (list(unpartitioned(database)), _counts(url)) == (["idemp_inbox", "idemp_output"], [(300_001, 300_001)])
    assert query(url, "SELECT count(*) FROM pg_class WHERE relname ~ 'unpartitioned|_p[0-9]'") == [(0,)]
    assert partition(database, 4) == ["idemp_inbox", "idemp_output"]
    assert _counts(url) == [(300_001, 300_001)]
    with pytest.raises(Exception, match="idemp_inbox_p._pkey"):
        query(url, "INSERT INTO idemp_inbox SELECT * FROM idemp_inbox LIMIT 1")
    database.close()


def _counts(url: str) -> list[tuple[int, ...]]:
    return query(url, "SELECT count(*), count(DISTINCT message_key) FROM idemp_inbox")


def test_what_a_copy_would_lose_is_kept_or_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemp.sql.partition.LOCK_SECONDS", 1)
    query(url, "CREATE ROLE looks_on")
    try:
        query(url, "GRANT SELECT ON idemp_inbox TO looks_on WITH GRANT OPTION")
        query(url, "ALTER TABLE idemp_inbox SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01)")
        query(url, "CREATE INDEX own ON idemp_inbox (worker) WHERE worker <> 'a:b%'")
        database = Database(url)
        query(url, "CREATE VIEW seen AS SELECT * FROM idemp_inbox")
        with pytest.raises(ConfigurationError, match="nothing was changed .PostgreSQL says: .*depend"):
            partition(database, 2)
        query(url, "DROP VIEW seen")
        query(url, "CREATE PUBLICATION own FOR TABLE idemp_output")
        with pytest.raises(ConfigurationError, match="idemp_output has triggers, .*nothing was changed"):
            partition(database, 2)
        query(url, "DROP PUBLICATION own")
        assert list(unpartitioned(database)) == ["idemp_inbox", "idemp_output"]
        with database.engine.connect() as connection:
            connection.execute(database.tables.inbox.select())
            with pytest.raises(ConfigurationError, match="nothing was changed: run the command again, .*longer than 1 s"):
                partition(database, 2)
        partition(database, 2)
        for table in ("idemp_inbox", "idemp_inbox_p0", "idemp_inbox_p1"):
            assert query(url, f"SELECT has_table_privilege('looks_on', '{table}', 'SELECT WITH GRANT OPTION')") == [(True,)]
        parts = query(url, "SELECT reloptions FROM pg_class WHERE relname ~ '^idemp_inbox_p[0-9]$'")
        assert parts == [(["fillfactor=80", "autovacuum_vacuum_scale_factor=0.01"],)] * 2
        assert query(url, "SELECT pg_get_indexdef('own'::regclass) LIKE '%a:b\\%%'") == [(True,)]
        database.close()
    finally:
        query(url, "DROP OWNED BY looks_on")
        query(url, "DROP ROLE looks_on")


def test_partitions_are_read_as_of_one_moment(partitioned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from idemp.spark import reading, snapshot

    monkeypatch.setattr(reading, "PAGES", 7)
    query(partitioned, "INSERT INTO idemp_name VALUES (1, 'consumer', 'shop'), (2, 'type', 'shop.Order')")
    query(partitioned, FILL, 5_000)
    with snapshot(Settings(database_url=partitioned)) as moment:
        pieces = reading._pieces("inbox", moment)
        assert (len({piece[1] for piece in pieces if piece}), len(pieces) > 4) == (4, True)
        query(partitioned, FILL, 100)
        rows = [row for piece in pieces for batch in reading._read("inbox", moment, piece) for row in batch.to_pylist()]
    assert sorted(int(row["original_id"][2:]) for row in rows) == list(range(1, 5_001))


def test_the_command_says_what_it_does(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("db", "partition") == Exit.REFUSED
    assert capsys.readouterr().err == "idemp: only tables on PostgreSQL can be partitioned; nothing was changed\n"
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    monkeypatch.setattr("idemp.sql.partition.SMALL", 100_000)
    query(url, FILL, 20_000)
    assert run("db", "partition") == Exit.USAGE
    assert "nothing was changed: try it on a copy, then use --yes" in capsys.readouterr().err
    assert run("db", "partition", "--partitions", "3", "--yes") == Exit.OK
    told = capsys.readouterr()
    assert "have 3 MB, and workers wait" in told.err
    assert told.out == "idemp_inbox and idemp_output have 3 partitions\n"
    assert run("db", "partition") == Exit.OK
    assert capsys.readouterr().out == "the tables have partitions already; nothing was changed\n"
    assert run("db", "check") == Exit.OK
