"""The data source: all of a table, at one moment, and nothing that tells where the database is."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from idemp.errors import ConfigurationError
from idemp.spark.datasource import register
from idemp.spark.reading import Snapshot, arrow, pages
from idemp.spark.reading.reader import Options, Reader
from idemp.spark.reading.snapshots import Holding, hold
from idemp.spark.reading.views import markdown, view_of
from tests.docs.test_readme import ROOT
from tests.inbox.sql.days import new_id_at
from tests.servers.process import wait_until
from tests.spark.inboxes import START, Inbox, inbox_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

MANY = 20_000
SPARSE = text("ALTER TABLE idemp_inbox SET (fillfactor = 10)")
"""With pages that are nearly empty, so many rows are an inbox that is worth several tasks: more than 16 MiB."""
GONE = "snapshot that this read belongs to is gone"


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def inbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inbox]:
    """An empty inbox of each kind."""
    url = (
        f"sqlite:///{tmp_path}/inbox.db"
        if request.param == "sqlite"
        else request.getfixturevalue(f"{request.param}_url")
    )
    with inbox_at(url, tmp_path) as made:
        yield made


@pytest.fixture
def large(postgresql_url: str, tmp_path: Path) -> Iterator[Inbox]:
    """An inbox of many claims."""
    with inbox_at(postgresql_url, tmp_path) as made:
        with made.store.engine.begin() as connection:
            connection.execute(SPARSE)
        made.fill(1, MANY)
        yield made


def read(spark: SparkSession, inbox: Inbox, table: str = "inbox", **options: Any) -> DataFrame:
    register(spark)
    reader = spark.read.format("idemp").option("table", table).option("url_file", inbox.url_file)
    return reader.options(**options).load()


def reader_of(inbox: Inbox, table: str = "inbox", columns: Sequence[str] = (), **options: Any) -> Reader:
    fields = view_of(table).fields
    kinds = {"BINARY": BinaryType, "BOOLEAN": BooleanType, "INT": IntegerType, "STRING": StringType}
    wanted = [StructField(name, kinds.get(fields[name].type, TimestampType)()) for name in columns or fields]
    return Reader(Options.read({"table": table, "url_file": inbox.url_file, **options}), StructType(wanted))


def directly(inbox: Inbox, table: str = "inbox", columns: Sequence[str] = (), **options: Any) -> list[dict[str, Any]]:
    """What the tasks of a read would hand to Spark, without Spark."""
    reader = reader_of(inbox, table, columns, **options)
    found = [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]
    return sorted(found, key=str)


def rows(found: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in columns) for row in found), key=str)


class TestTables:
    def test_inbox(self, inbox: Inbox) -> None:
        first = inbox.handle("order-1", outputs=1, confirmed=False, position="archive#1")
        timed = str(new_id_at(START))
        second = inbox.handle(timed, consumer="billing", message_type="billing.Pay")
        shared = {"claimed_at": START, "worker": "host-1"}
        assert directly(inbox) == sorted(
            [
                {
                    "consumer": "shop", "message_key": first.key.bytes, "original_id": "order-1", "type": "shop.Order",
                    "fingerprint": b"order-1".ljust(32, b"."), "source_position": "archive#1", "pending": True, **shared,
                },
                {
                    "consumer": "billing", "message_key": second.key.bytes, "original_id": timed, "type": "billing.Pay",
                    "fingerprint": timed.encode()[:32], "source_position": None, "pending": False, **shared,
                },
            ],
            key=lambda row: str({name: row[name] for name in view_of("inbox").fields}),
        )  # fmt: skip

    def test_outputs(self, inbox: Inbox) -> None:
        inbox.handle("order-1", outputs=2)
        inbox.handle("order-2", outputs=1, confirmed=False)
        found = directly(inbox, "outputs")
        columns = ("ordinal", "kind", "routing_key", "type", "claimed_at", "body", "pending", "quarantined")
        assert rows(found, *columns) == [
            (0, "send", "stock", "shop.Order", START, b'{"n": 0}', False, False),
            (0, "send", "stock", "shop.Order", START, b'{"n": 0}', True, False),
            (1, "send", "stock", "shop.Order", START, b'{"n": 1}', False, False),
        ]

    def test_quarantined_outputs(self, inbox: Inbox) -> None:
        inbox.handle("order-1", outputs=1, confirmed=False)
        inbox.clock.advance(timedelta(minutes=1))
        (taken,) = inbox.store.upkeep.take_pending(1, timedelta(seconds=30))
        inbox.store.upkeep.quarantine({taken.output.id: "no queue takes it"})
        assert rows(directly(inbox, "outputs"), "quarantined", "reason") == [(True, "no queue takes it")]
        (row,) = directly(inbox, "pending")
        assert (row["consumer"], row["output_id"], row["reason"]) == (
            "shop",
            taken.output.id.bytes,
            "no queue takes it",
        )
        assert row["quarantined_at"] == inbox.clock.now()

    def test_history_and_unfinished(self, inbox: Inbox) -> None:
        id_ = inbox.handle("order-1", outputs=2)
        inbox.store.note_start("shop", id_.key)
        assert rows(directly(inbox, "history"), "consumer", "confirmed", "worker") == [("shop", 2, "host-1")]
        assert rows(directly(inbox, "unfinished"), "consumer", "starts", "worker") == [("shop", 1, "host-1")]

    def test_empty(self, inbox: Inbox) -> None:
        assert directly(inbox) == directly(inbox, consumer="shop") == []

    def test_restricted(self, inbox: Inbox) -> None:
        for hour in range(4):
            inbox.handle(f"order-{hour}", message_type=("shop.Order", "shop.Cancel")[hour % 2], outputs=1)
            inbox.handle(f"bill-{hour}", consumer="billing")
            inbox.clock.advance(timedelta(hours=1))
        span = {"since": "2026-03-01T13:00", "before": "2026-03-01T15:00:00+00:00"}
        assert rows(directly(inbox, consumer="shop", **span), "original_id") == [("order-1",), ("order-2",)]
        assert rows(directly(inbox, type="shop.Cancel"), "original_id") == [("order-1",), ("order-3",)]
        assert rows(directly(inbox, "outputs", type="shop.Cancel", **span), "type") == [("shop.Cancel",)]
        assert len(directly(inbox, consumer="nobody, shop")) == 4
        assert directly(inbox, consumer="nobody") == []

    def test_columns_that_are_asked_for(self, inbox: Inbox) -> None:
        inbox.handle("order-1", outputs=1)
        assert directly(inbox, columns=["type", "original_id"]) == [{"type": "shop.Order", "original_id": "order-1"}]
        assert directly(inbox, "outputs", columns=["ordinal"]) == [{"ordinal": 0}]


def test_without_adbc_rows_are_the_same(postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inbox_at(postgresql_url, tmp_path) as inbox:
        inbox.handle("order-1", outputs=2, position="archive#1")
        inbox.handle(str(new_id_at(START)), outputs=1, confirmed=False)
        every = ("inbox", "outputs", "pending", "history", "unfinished")
        fast = [directly(inbox, table) for table in every]
        monkeypatch.setattr(arrow, "ADBC", "no_such_driver")
        assert [directly(inbox, table) for table in every] == fast


class TestManyTasks:
    def test_all_rows_once(self, spark: SparkSession, large: Inbox) -> None:
        found = read(spark, large, partitions=4)
        assert found.rdd.getNumPartitions() > 1
        (row,) = found.agg(
            F.count("*"), F.countDistinct("message_key"), F.sum(F.substring("original_id", 7, 9))
        ).collect()
        assert tuple(row) == (MANY, MANY, MANY * (MANY + 1) / 2)

    def test_by_default_a_task_has_what_is_worth_one(self, large: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
        """As at 256 MiB, which the constants say here is eight."""
        whole = reader_of(large).partitions()
        monkeypatch.setattr(pages, "SMALL", 1_000)
        monkeypatch.setattr(pages, "_WORTH", 1_000)
        cut = reader_of(large).partitions()
        assert (len(whole), [task.piece.pages for task in cut[:2]]) == (1, [(0, 1_000), (1_000, 2_000)])

    def test_days_in_tables_of_their_own(self, large: Inbox) -> None:
        store, days = large.store, [START + timedelta(days=number) for number in range(2, 6)]
        store.names.id("consumer", "timed")
        store.upkeep.daily.open("timed", days[0].date(), ahead=6)
        large.clock.advance(timedelta(days=2))
        store.places.look()
        ids = [large.handle(str(new_id_at(day)), consumer="timed", outputs=2) for day in days]
        for most in (1, 64):
            found = directly(large, columns=["message_key"], consumer="timed", partitions=most)
            assert {row["message_key"] for row in found} == {id_.key.bytes for id_ in ids}
        assert (
            rows(directly(large, "outputs", columns=["consumer", "type"]), "consumer", "type")
            == [("timed", "shop.Order")] * 8
        )

    def test_a_table_under_writes_is_read_as_of_one_moment(self, spark: SparkSession, large: Inbox) -> None:
        """Rows move to other pages all the time; at each moment there are as many."""
        move = text(
            "WITH gone AS (DELETE FROM idemp_inbox WHERE message_key IN (SELECT message_key FROM idemp_inbox LIMIT 200) "
            "RETURNING *) INSERT INTO idemp_inbox (message_key, consumer_id, type_id, worker_id, claimed_at) "
            "SELECT gen_random_uuid(), consumer_id, type_id, worker_id, claimed_at FROM gone"
        )
        stop, moves = threading.Event(), []

        def write() -> None:
            while not stop.wait(0.05):
                with large.store.engine.begin() as connection:
                    connection.execute(move)
                moves.append(time.monotonic())

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(2):
                before = len(moves)
                (row,) = read(spark, large, partitions=8).agg(F.count("*"), F.countDistinct("message_key")).collect()
                assert tuple(row) == (MANY, MANY)
                assert len(moves) > before, "nothing was written meanwhile"
        finally:
            stop.set()
            writer.join()

    def test_tables_at_one_moment(self, spark: SparkSession, large: Inbox) -> None:
        with Snapshot(url_file=large.url_file) as moment:
            large.handle("late", outputs=3)
            claims, outputs = moment.read(spark, "inbox", partitions=4), moment.read(spark, "outputs")
            assert claims.rdd.getNumPartitions() > 1
            assert (claims.count(), outputs.count()) == (MANY, 0)
            assert claims.count() == MANY
        assert read(spark, large).count() == MANY + 1

    def test_a_read_whose_snapshot_is_gone_fails(self, spark: SparkSession, large: Inbox) -> None:
        with Snapshot(url_file=large.url_file) as moment:
            claims = moment.read(spark, "inbox")
        with pytest.raises(Exception, match=GONE):
            claims.count()

    def test_a_holder_ends_with_its_time(self, postgresql_url: str, tmp_path: Path) -> None:
        """Its process, and with it the transaction that keeps VACUUM from its work."""
        idle = "datname = current_database() AND state LIKE 'idle in transaction%'"
        holding = text(f"SELECT count(*) FROM pg_stat_activity WHERE {idle}")
        with inbox_at(postgresql_url, tmp_path) as inbox, inbox.store.engine.connect() as connection:

            def holders() -> int:
                connection.rollback()
                return int(connection.scalar(holding) or 0)

            before = holders()
            assert hold(Holding(inbox.url, None, "idemp_", seconds=5))
            assert holders() > before
            wait_until(lambda: holders() == before, "the holder to end")

    def test_nobody_drops_what_is_being_read(self, large: Inbox) -> None:
        exclusive = text("LOCK TABLE ONLY idemp_inbox IN ACCESS EXCLUSIVE MODE NOWAIT")
        with (
            Snapshot(url_file=large.url_file),
            large.store.engine.connect() as connection,
            pytest.raises(OperationalError, match="could not obtain lock"),
        ):
            connection.execute(exclusive)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"table": "inbix"}, "no table 'inbix' to read.*'inbox'"),
            ({"colour": "red"}, "no option 'colour'"),
            ({"since": "yesterday"}, "'since' is no moment"),
            ({"partitions": "0"}, "'partitions' is no number above nought"),
            ({"snapshot_lifetime": "2d"}, "up to 1 day"),
            ({"snapshot": "x'; DROP TABLE"}, "is no snapshot's id"),
            ({"table": "history", "since": "2026-01-01"}, "has no column 'claimed_at'"),
            ({"url_file": "/no/such/file"}, "/no/such/file can't be read"),
        ],
    )
    def test_wrong_options(
        self, spark: SparkSession, postgresql_url: str, tmp_path: Path, options: dict[str, str], said: str
    ) -> None:
        with inbox_at(postgresql_url, tmp_path) as inbox, pytest.raises(Exception, match=said):
            register(spark)
            spark.read.format("idemp").options(**{"url_file": inbox.url_file, **options}).load().collect()

    def test_snapshots_are_postgresqls(self, tmp_path: Path) -> None:
        with (
            inbox_at(f"sqlite:///{tmp_path}/inbox.db", tmp_path) as inbox,
            pytest.raises(ConfigurationError, match="Only PostgreSQL has snapshots"),
            Snapshot(url_file=inbox.url_file),
        ):
            pass

    def test_database_that_is_away(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "url").write_text("postgresql://me:hidden@127.0.0.1:1/shop")
        register(spark)
        with pytest.raises(Exception, match="can't be reached") as told:
            spark.read.format("idemp").option("url_file", str(tmp_path / "url")).load().collect()
        assert "hidden" not in str(told.value)


def test_no_secret_in_plans(spark: SparkSession, large: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    url = make_url(large.url).set(password="sesame")
    Path(large.url_file).write_text(url.render_as_string(hide_password=False))
    frame = read(spark, large).where("type = 'shop.Order'")
    assert frame.count() == MANY
    frame.explain(mode="extended")
    told = capfd.readouterr().out
    assert "idemp" in told.lower()
    assert "sesame" not in told
    assert "sesame" not in frame._jdf.queryExecution().toString()


def test_the_reference_page_has_the_tables_of_the_code() -> None:
    page = (ROOT / "docs/reference/data-source.md").read_text(encoding="utf-8")
    assert markdown().strip() in page
