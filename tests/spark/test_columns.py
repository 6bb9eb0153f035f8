"""From DataFrames to messages: what is taken for what, and where it stands."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger

from idemp.errors import ConfigurationError
from idemp.messages import UNSTORED_HEADER
from idemp.spark.columns import MESSAGE, PARTS, Columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def rows(frame: DataFrame, **columns: Any) -> list[dict[str, Any]]:
    found = Columns(**columns).of(frame)
    assert tuple(found.columns) == PARTS
    return [row.asDict() for row in found.collect()]


@pytest.fixture(scope="module")
def orders(spark: SparkSession) -> DataFrame:
    return spark.sql(
        """SELECT * FROM VALUES
        (7, 'A-1', named_struct('n', 1), map('tenant', 'x'), '2026-01-02T03:04:05Z'),
        (8, 'B-2', named_struct('n', 2), map(), 'some day')
        AS o(order_id, sku, inner, head, at)"""
    )


@pytest.mark.slow
def test_messages_have_one_schema(spark: SparkSession, orders: DataFrame) -> None:
    found = Columns(id="order_id", type="'shop.Order'", body="sku", time="at", headers="head").of(orders)
    assert found.schema.simpleString() == spark.createDataFrame([], MESSAGE).schema.simpleString()


def test_names_and_expressions(orders: DataFrame) -> None:
    first, second = rows(orders, id="order_id", type="concat('shop.', sku)", body="to_json(inner)", time="at")
    assert (first["id"], first["type"], bytes(first["body"])) == ("7", "shop.A-1", b'{"n":1}')
    assert first["time"].isoformat() == "2026-01-02T03:04:05"
    assert second["time"] is None  # no time that can be read is an unknown one
    assert first["headers"] is None
    assert first["position"] is None


def test_what_is_only_tried_is_in_no_log(orders: DataFrame) -> None:
    """PySpark's own log has a stack of 12 KB for each column that is not there."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    log.addHandler(handler)
    try:
        assert Columns(id="order_id", type="'t'").of(orders)  # it looks for a file's path, and then for a row's number
        assert told == []
        with pytest.raises(AnalysisException):
            orders.selectExpr("order_no")
        assert len(told) == 1
    finally:
        log.removeHandler(handler)


def test_all_columns_are_the_body_unless_there_is_one(orders: DataFrame) -> None:
    body = json.loads(rows(orders.drop("head"), id="order_id", type="'t'")[0]["body"])
    assert body == {"order_id": 7, "sku": "A-1", "inner": {"n": 1}, "at": "2026-01-02T03:04:05Z"}
    named = orders.selectExpr("order_id AS id", "sku AS type", "'{}' AS body")
    assert bytes(rows(named)[0]["body"]) == b"{}"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (None, {}),
        ("head", {"tenant": "x"}),
        ("""'{"tenant": {"a": [1]}}'""", {"tenant": {"a": [1]}}),
        ("""' { } '""", {}),
        ("CAST(NULL AS STRING)", {}),
    ],
)
def test_a_body_written_anew_says_so(orders: DataFrame, headers: str | None, told: dict[str, Any]) -> None:
    anew = rows(orders, id="order_id", type="'t'", body="inner", headers=headers)[0]
    assert json.loads(anew["headers"]) == {UNSTORED_HEADER: 1, **told}
    said = rows(orders, id="order_id", type="'t'", body="to_json(inner)", headers=headers, original=False)[0]
    assert json.loads(said["headers"]) == {UNSTORED_HEADER: 1, **told}


def test_headers_that_are_none_stay_so(orders: DataFrame) -> None:
    assert rows(orders, id="order_id", type="'t'", body="inner", headers="'[1]'")[0]["headers"] == "[1]"


def test_missing_columns_are_named_at_start(orders: DataFrame) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Columns(id="ordr_id", body="payload").of(orders)
    told = str(raised.value)
    for words in ("no id as 'ordr_id'", "no type", "no body as 'payload'", "order_id, sku, inner", "'order_id'?"):
        assert words in told


def test_types_that_do_not_fit_are_named_at_start(orders: DataFrame) -> None:
    with pytest.raises(ConfigurationError, match=r"body as 'order_id' is of type int"):
        Columns(id="order_id", type="'t'", body="order_id").of(orders)


def test_places_in_kafka(spark: SparkSession) -> None:
    frame = spark.sql("SELECT 'orders' AS topic, 3 AS partition, 1201L AS offset, 'k' AS id, 't' AS type, '{}' AS body")
    assert rows(frame)[0]["position"] == "orders/3#1201"


@pytest.mark.slow
def test_places_in_parquet_are_rows_however_the_file_is_split(spark: SparkSession, tmp_path: Path) -> None:
    folder = str(tmp_path / "orders")
    spark.range(1000).selectExpr("id", "'t' AS type", "'{}' AS body").coalesce(1).write.parquet(folder)

    def read() -> dict[str, str]:
        return {row["id"]: row["position"] for row in rows(spark.read.parquet(folder))}

    whole = read()
    assert len(set(whole.values())) == 1000
    assert whole["17"].startswith("file:/")
    assert whole["17"].endswith(".parquet#17")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "1000")
    try:
        assert spark.read.parquet(folder).rdd.getNumPartitions() > 1
        assert read() == whole
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")


def test_places_in_text_are_what_stands_there(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\none\n")
    (tmp_path / "b.txt").write_text("one\n")
    found = rows(spark.read.text(str(tmp_path)), id="value", type="'t'", body="value")
    by_file = sorted((row["position"].rpartition("/")[2], row["id"]) for row in found)
    assert len(by_file) == 4
    assert len({place for place, _ in by_file}) == 3  # equal rows of one file are numbered by the task
    assert all("#~" in place for place, _ in by_file)
    assert [place[:5] for place, _ in by_file] == ["a.txt", "a.txt", "a.txt", "b.txt"]
