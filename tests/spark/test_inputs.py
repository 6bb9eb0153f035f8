"""Files and columns: each bad row is parked alone, and none is read as something else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from idemp import ConfigurationError
from tests.spark.conftest import Shop, parked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = "tests.spark.shop:app"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_bad_lines_of_json_are_parked_and_the_others_keep_their_text(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.spark import Columns, read_files, sink

    lines = [
        json.dumps({"meta": {"id": f"id-{n}"}, "order_id": f"{n}", "at": "2026-11-24T00:00:00Z"}).encode() for n in range(20)
    ]
    bad = [
        b"{",
        b'{"meta": {"id": "id-x"}}',
        b'{"meta": {"id": "\xff"}, "order_id": "1"}',
        b'{"meta": {"id": "id-y"}, "order_id": "1", "order_id": "2"}',
    ]
    far = b'{"meta": {"id": "far"}, "order_id": "far", "at": "99999-01-01T00:00:00Z"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*lines, *bad, far, lines[3]]))
    path, columns = str(tmp_path / "in.jsonl"), Columns(id="meta.id", time="at", of_type="shop.Order")
    found = sink(APP, parked=str(tmp_path / "parked")).run(read_files(spark, path, "json", columns))
    assert dict(found.counts) == {"new": 21, "replay": 0, "duplicate": 1, "conflict": 0, "parked": 4}
    kept = spark.read.parquet(str(tmp_path / "parked")).collect()
    assert sorted(bytes(row.body) for row in kept) == sorted(bad)
    for wrong, said in (
        (Columns(id="nope"), "has 'nope'"),
        (Columns(id="a b"), "not a field"),
        (Columns(body="x"), "the line is the body"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            read_files(spark, path, "json", wrong)
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_files(spark, str(tmp_path / "nowhere"), "json")


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_csv_is_read_as_rfc_4180_has_it(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.spark import Columns, read_files, sink

    text = b'id,order_id\r\n1,"say ""hi"""\r\n2,"two\r\nlines"\r\n3,"a,b"\r\n4\r\n5,x,y\r\n6,\xff\r\n7,last\r\n'
    (tmp_path / "in.csv").write_bytes(text)
    read = read_files(spark, str(tmp_path / "in.csv"), "csv", Columns(of_type="shop.Order"))
    found = sink(APP, parked=str(tmp_path / "parked")).run(read)
    assert dict(found.counts) == {"new": 4, "replay": 0, "duplicate": 0, "conflict": 0, "parked": 3}
    assert {each.replace("\r", "") for each in tables.effects()} == {'say "hi"', "two\nlines", "a,b", "last"}
    assert parked(spark, tmp_path / "parked") == Counter(["4", "5", "6"])
    (tmp_path / "half.csv").write_bytes(b'id,order_id\n1,"one\n2,two\n')
    for options in ({}, {"multiLine": "false"}):
        with pytest.raises(ConfigurationError, match="unbalanced quotation mark"):
            read_files(spark, str(tmp_path / "half.csv"), "csv", options=options)


def test_columns_are_known_or_refused(spark: SparkSession) -> None:
    from idemp.spark import Columns

    kafka = spark.sql(
        "SELECT cast('k' AS binary) key, cast('{\"a\": 1}' AS binary) value, 't' topic, 0 partition, 1L offset, "
        "timestamp'2026-01-01 00:00:00' timestamp, array(struct('message_id' AS key, cast('m' AS binary) AS value), "
        "struct('type' AS key, cast('shop.Order' AS binary) AS value), "
        "struct('twice' AS key, cast('1' AS binary) AS value), struct('twice' AS key, cast('2' AS binary) AS value)) headers"
    )
    row = Columns().of(kafka).collect()[0]
    assert (row.id, row.type, row.time, bytes(row.body)) == ("m", "shop.Order", 1767225600.0, b'{"a": 1}')
    assert json.loads(row.headers) == {"message_id": "m", "type": "shop.Order", "twice": "2"}
    anew = Columns(id="n", body="s").of(spark.sql("SELECT 7L n, struct(1 AS a) s")).collect()[0]
    assert (anew.id, bytes(anew.body), anew.headers) == ("7", b'{"a":1}', '{"idemp-fingerprint":"none"}')
    marked = spark.sql("SELECT 'x' id, map('idemp-fingerprint', 'x', 'a', 'b') headers, struct(1 AS a) body")
    assert json.loads(Columns().of(marked).collect()[0].headers) == {"idemp-fingerprint": "none", "a": "b"}
    unreadable = spark.sql("SELECT 'x' id, '[' headers, struct(1 AS a) body")
    assert Columns().of(unreadable).collect()[0].headers == "["
    strange = spark.sql("SELECT cast(x'ff' AS string) id, 'x' type, cast('{}' AS binary) body")
    assert Columns().of(strange).collect()[0].id == "\ufffd"
    wrong = spark.sql("SELECT 1.5 AS price, timestamp'2026-01-01 00:00:00' AS at, 'x' AS text")
    for columns, said in (
        (Columns(id="price"), "id: price is decimal"),
        (Columns(id="at"), "id: at is timestamp"),
        (Columns(headers="price"), "headers: price is decimal"),
        (Columns(id="nope"), "there is no nope: the input has price, at, text"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            columns.of(wrong)
