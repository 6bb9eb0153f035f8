"""The sink: every message once in effect, whatever is run again."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from idemp.errors import ConfigurationError, SchemaError, StoreUnavailable
from idemp.spark.columns import Columns
from idemp.spark.summary import Summary
from idemp.spark.writing import Sink, sink
from tests.spark.shop import ORDER, SETS, WHERE, Shop, message, shop_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame, SparkSession

MANY = 300


def messages(spark: SparkSession, rows: Iterable[dict[str, Any]]) -> DataFrame:
    """Rows with their number as place in the source."""
    numbered = [{**row, "position": f"archive#{place}"} for place, row in enumerate(rows)]
    return Columns().of(spark.createDataFrame(numbered, "id STRING, type STRING, body STRING, position STRING"))


def to(shop: Shop, folder: Path, **options: Any) -> Sink:
    told = {"parked": str(folder / "parked"), "run_name": "run", "rows": 50, **options}
    return sink(WHERE, database=SecretStr(shop.url), **told)


def parked(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    return [row.asDict() for row in spark.read.parquet(str(folder / "parked")).orderBy("position").collect()]


def test_handles_once_and_leaves_outputs_to_the_relay(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    frame = messages(spark, map(message, range(MANY)))
    assert to(shop, tmp_path).run(frame) == Summary(new=MANY, outputs=MANY)
    assert shop.sales() == sorted(f"order-{number}" for number in range(MANY))
    assert shop.counts() == (MANY, MANY, MANY)


def test_what_is_run_again_is_a_replay(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    frame = messages(spark, map(message, range(MANY)))
    to(shop, tmp_path).run(frame.limit(100))
    assert to(shop, tmp_path).run(frame) == Summary(new=MANY - 100, replay=100, outputs=MANY - 100)
    assert to(shop, tmp_path).run(frame) == Summary(replay=MANY)
    assert shop.counts() == (MANY, MANY, MANY)


@pytest.mark.slow
def test_duplicates_within_a_batch_and_across_its_chunks(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    rows = [message(number % 100) for number in range(MANY)]
    found = to(shop, tmp_path, rows=7, partitions=3).run(messages(spark, rows))
    assert found == Summary(new=100, duplicate=200, outputs=100)
    assert shop.counts() == (100, 100, 100)


def test_what_was_handled_online_is_skipped_and_the_other_way_round(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    shop.handle_online([message(number) for number in range(30)])
    frame = messages(spark, map(message, range(MANY)))
    assert to(shop, tmp_path).run(frame) == Summary(new=MANY - 30, duplicate=30, outputs=MANY - 30)
    shop.handle_online([message(number) for number in range(100)])
    assert shop.counts()[:2] == (MANY, MANY)


@pytest.mark.slow
def test_keys_of_bodies_count_as_online(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    def cancel(number: int) -> dict[str, Any]:
        return {"id": f"m-{number}", "type": "shop.Cancel", "body": json.dumps({"order_id": number % 5})}

    shop.handle_online([cancel(0)])
    frame = messages(spark, map(cancel, range(1, 20)))
    found = to(shop, tmp_path).run(frame)
    assert (found.new, found.duplicate) == (4, 15)
    assert shop.sales() == ["0", "1", "2", "3", "4"]
    again = to(shop, tmp_path, prefilter=True).run(frame)
    assert again == Summary(skipped=4, duplicate=15)
    assert str(again) == "19 messages: 0 new, 0 replay, 15 duplicate, 0 conflict, 0 parked, 4 skipped; 0 outputs"


def test_bad_messages_are_parked_with_the_reason_and_the_others_go_on(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    bad = [
        {**message(1), "id": None},
        {**message(2), "type": "shop.Unknown"},
        {**message(3), "body": '{"sku": '},
        message(4, poison=True),
        {**message(5), "body": None},
    ]
    frame = messages(spark, [*bad, *map(message, range(10, MANY))])
    found = to(shop, tmp_path).run(frame)
    assert found == Summary(new=MANY - 10, parked=5, outputs=MANY - 10)
    assert found.rows == frame.count()
    letters = parked(spark, tmp_path)
    assert [(row["position"], row["error"]) for row in letters] == [
        ("archive#0", "MissingId"),
        ("archive#1", "UnknownMessageType"),
        ("archive#2", "UndecodableMessage"),
        ("archive#3", "ValueError"),
        ("archive#4", "UndecodableMessage"),
    ]
    assert {row["run"] for row in letters} == {"run"}
    assert "no such sku" in letters[3]["reason"]
    assert bytes(letters[2]["body"]) == b'{"sku": '
    assert shop.count("sale") == MANY - 10


@pytest.mark.slow
def test_parked_ones_are_there_once_and_can_be_handled_later(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    frame = messages(spark, [message(1, poison=True), message(2)])
    for _ in range(2):
        to(shop, tmp_path).run(frame, batch=7)
    (letter,) = parked(spark, tmp_path)
    assert letter["batch"] == 7
    again = Columns(body="replace(CAST(body AS STRING), 'poison', 'cured')").of(
        spark.read.parquet(str(tmp_path / "parked"))
    )
    assert to(shop, tmp_path).run(again) == Summary(new=1, outputs=1)
    assert shop.sales() == ["order-1", "order-2"]


@pytest.mark.slow
def test_conflicts_are_told_and_parked(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    shop.handle_online([message(1)])
    other = {**message(1), "body": '{"sku": "other"}'}
    assert to(shop, tmp_path).run(messages(spark, [other])) == Summary(conflict=1)
    assert parked(spark, tmp_path)[0]["error"] == "PayloadConflict"
    anew = Columns(original=False).of(spark.createDataFrame([other], "id STRING, type STRING, body STRING"))
    assert to(shop, tmp_path).run(anew) == Summary(duplicate=1)


@pytest.mark.slow
def test_empty_batches_are_no_matter(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    empty = messages(spark, [message(1)]).where("id = 'none'")
    assert to(shop, tmp_path).run(empty) == Summary()
    assert to(shop, tmp_path).run(messages(spark, [message(1)]).limit(0)) == Summary()


@pytest.mark.slow
def test_dry_run_says_what_would_be_and_changes_nothing(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    shop.handle_online([message(number) for number in range(10)])
    rows = [message(number % 100) for number in range(MANY)]
    frame = messages(spark, [*rows, {**message(7), "body": "{}"}])
    would = to(shop, tmp_path, dry_run=True, rows=7).run(frame)
    assert would == Summary(new=90, duplicate=210, conflict=1)
    assert shop.counts()[:2] == (10, 10)
    assert not (tmp_path / "parked").exists()
    assert to(shop, tmp_path).run(frame) == Summary(new=90, duplicate=210, conflict=1, outputs=90)


@pytest.mark.slow
def test_adoption_marks_as_handled_and_runs_nothing(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    frame = messages(spark, map(message, range(20)))
    assert to(shop, tmp_path, adopt=True).run(frame) == Summary(new=20)
    assert shop.counts() == (0, 0, 0)
    shop.handle_online([message(number) for number in range(30)])
    assert shop.count("sale") == 10


@pytest.mark.slow
def test_outputs_may_be_stored_without_dispatch(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    assert to(shop, tmp_path, dispatch="never").run(messages(spark, map(message, range(20)))).outputs == 20
    assert shop.counts() == (20, 20, 0)


@pytest.mark.slow
def test_handlers_of_whole_sets(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    shop.handle_online([message(number) for number in range(10)])
    rows = [message(number % 100) for number in range(MANY)]
    frame = messages(spark, [*rows, {**message(500), "body": "{"}])
    found = to(shop, tmp_path, sets=SETS).run(frame)
    assert found == Summary(new=90, duplicate=210, parked=1, outputs=90)
    assert shop.sales() == sorted(f"order-{number}" for number in range(100))
    assert shop.counts()[:2] == (100, 100)


def test_a_worker_that_dies_in_a_chunk_costs_nothing(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    rows = [message(number) for number in range(MANY)]
    rows[MANY // 2] = message(MANY // 2, dies=str(tmp_path / "died"))
    found = to(shop, tmp_path, rows=20).run(messages(spark, rows))
    assert (tmp_path / "died").exists()
    assert (found.rows, found.new + found.replay) == (MANY, MANY)
    assert found.replay > 0  # what the lost attempt had committed
    assert shop.counts() == (MANY, MANY, MANY)


@pytest.mark.slow
def test_url_is_in_neither_plan_nor_sink(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    made = to(shop, tmp_path, prefilter=True)
    with made._wanted(messages(spark, [message(1)])) as wanted:
        plan = made._handled(wanted)._jdf.queryExecution().toString()
    assert "MapInArrow" in plan
    assert "LeftAnti" in plan
    secret = shop.url.partition("://")[2]
    assert secret not in plan
    assert secret not in repr(made)


@pytest.mark.slow
def test_one_connection_for_each_worker_of_python(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE sale ADD COLUMN backend int DEFAULT pg_backend_pid()")
    made = to(shop, tmp_path, partitions=6, rows=10)
    for batch in range(2):
        made.run(messages(spark, map(message, range(batch * MANY, (batch + 1) * MANY))), batch)
    with shop.engine.connect() as connection:
        backends = connection.exec_driver_sql("SELECT count(DISTINCT backend) FROM sale").scalar_one()
    assert backends <= 2  # cores of the session


@pytest.mark.slow
def test_rate_is_kept(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    import time

    frame = messages(spark, map(message, range(60)))
    begun = time.monotonic()
    to(shop, tmp_path, rate=30, rows=5, partitions=2).run(frame)
    assert time.monotonic() - begun > 1.5


def test_stream_survives_replay_and_a_lost_checkpoint(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    told: list[Summary] = []

    def drop(name: str, numbers: range) -> None:
        lines = [json.dumps({"order": f"order-{number}", "sku": f"sku-{number}"}) for number in numbers]
        (tmp_path / "in" / name).write_text("\n".join(lines) + "\n")

    def stream() -> None:
        source = spark.readStream.text(str(tmp_path / "in"))
        mapped = Columns(id="get_json_object(value, '$.order')", type=f"'{ORDER}'", body="value").of(source)
        made = to(shop, tmp_path, run_name=None, tell=lambda _, summary: told.append(summary))
        writer = mapped.writeStream.foreachBatch(made).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()

    drop("a.json", range(50))
    stream()
    assert told.pop() == Summary(new=50, outputs=50)

    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    stream()
    assert told.pop() == Summary(replay=50)

    drop("b.json", range(40, 60))
    stream()
    assert told.pop() == Summary(new=10, duplicate=10, outputs=10)

    shutil.rmtree(tmp_path / "checkpoint")
    stream()
    assert Counter(replay=sum(each.replay for each in told), duplicate=sum(each.duplicate for each in told)) == Counter(
        replay=60, duplicate=10
    )
    assert shop.counts() == (60, 60, 60)


def test_what_is_wrong_is_told_at_start(postgresql_url: str, tmp_path: Path) -> None:
    there = {"parked": str(tmp_path)}
    with pytest.raises(ConfigurationError, match="no module 'nowhere'"):
        sink("nowhere:app", **there)
    with pytest.raises(SchemaError):
        sink(WHERE, database=SecretStr(postgresql_url), **there)
    with pytest.raises(StoreUnavailable):
        sink(WHERE, database=SecretStr("postgresql://me@127.0.0.1:1/none"), **there)
    with pytest.raises(ConfigurationError, match="rate=0"):  # else every task would fail of it
        sink(WHERE, rate=0, **there)


def test_frames_that_are_no_messages_are_refused(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the columns are id, not id, type"):
        to(shop, tmp_path).run(spark.range(3))


@pytest.mark.slow
def test_a_task_that_fails_for_good_is_told_in_its_own_words(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    made = to(shop, tmp_path)
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE idemp_inbox CASCADE")
    with pytest.raises(SchemaError):
        made.run(messages(spark, [message(1)]))


def test_sqlite_takes_the_same_way(spark: SparkSession, tmp_path: Path) -> None:
    with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        assert to(shop, tmp_path).run(messages(spark, map(message, range(40)))) == Summary(new=40, outputs=40)
        assert shop.count("sale") == 40
