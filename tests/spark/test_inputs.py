"""Files and columns: each bad row is parked alone, and none is read as something else."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from idemp import ConfigurationError
from idemp.bulk.lines import REPLACED
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
    # `4` is JSON, and a row that is cut off is not a message nevertheless.
    adopted = sink(APP, parked=str(tmp_path / "again"), adopt=True).run(read)
    assert (adopted.counts["duplicate"], adopted.counts["parked"]) == (4, 3)
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


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def found(spark: SparkSession, path: Path | str, format: str, columns: Any = None, **options: str) -> dict[str | None, bytes]:
    from idemp.spark import read_files

    rows = read_files(spark, str(path), format, columns, options).collect()
    result = {row.id: bytes(row.body) for row in rows}
    assert len(result) == len(rows)
    return result


def test_headers_keep_types_and_rows_keep_nulls_and_microseconds(spark: SparkSession) -> None:
    from idemp.spark import Columns

    row = Columns().of(spark.sql("SELECT 'x' id, map('x-id', 7) headers, '{}' body")).collect()[0]
    assert row.headers == '{"x-id":7}'
    for text, marked in (
        ('{"n": 7}', '{"n": 7,"idemp-fingerprint":"none"}'),
        (" { } ", ' { "idemp-fingerprint":"none"}'),
        ("{} x", "{} x"),
        ("[1]", "[1]"),
    ):
        frame = spark.createDataFrame([(text,)], "headers string").selectExpr("headers", "struct(1 AS a) AS body")
        assert Columns().of(frame).collect()[0].headers == marked
    whole = spark.sql(
        "SELECT 'x' id, timestamp'2026-01-01 00:00:00.123456' at, timestamp_ntz'2026-01-01 00:00:00.000001' local, "
        "cast(NULL AS string) note, struct(cast(NULL AS int) AS n) inner, array('a') reply_to"
    )
    row = Columns().of(whole).collect()[0]
    assert json.loads(row.body) == {
        "id": "x",
        "at": "2026-01-01T00:00:00.123456Z",
        "local": "2026-01-01T00:00:00.000001",
        "note": None,
        "inner": {"n": None},
        "reply_to": ["a"],  # a business field, and no queue
    }
    assert (row.reply_to, row.content_type) == (None, None)
    parts = spark.sql("SELECT 'x' id, '{}' body, 'text/json' content_type, 'c' correlation_id, cast('q' AS binary) reply_to")
    row = Columns().of(parts).collect()[0]
    assert (row.content_type, row.correlation_id, row.reply_to) == ("text/json", "c", "q")


def test_events_are_recognized(spark: SparkSession, tmp_path: Path) -> None:
    from idemp.cloudevents import STRUCTURED
    from idemp.spark import Columns, read_files

    event = '{"specversion":"1.0","id":"e0","source":"/shop","type":"shop.Ev","data":{"n":0}}'
    lines = write(tmp_path / "e.jsonl", f'{event}\n{{"id":"x","note":"specversion"}}\n{{"id":"y","ct":"text/json","back":"q"}}\n')
    rows = {row.id: row for row in read_files(spark, str(lines), "json").collect()}
    assert {id: row.content_type for id, row in rows.items()} == {"e0": STRUCTURED, "x": None, "y": None}
    named = read_files(spark, str(lines), "json", Columns(content_type="ct", reply_to="back")).collect()
    assert {row.id: (row.content_type, row.reply_to) for row in named}["y"] == ("text/json", "q")
    cells = write(tmp_path / "e.csv", "specversion,id\n1.0,a\n,b\n")
    assert {row.id: row.content_type for row in read_files(spark, str(cells), "csv").collect()} == {"a": STRUCTURED, "b": None}
    spark.sql("SELECT '1.0' specversion, 'a' id, struct(1 AS n) data").write.parquet(str(tmp_path / "events"))
    row = read_files(spark, str(tmp_path / "events"), "parquet").collect()[0]
    assert (row.content_type, json.loads(row.body)["data"]) == (STRUCTURED, {"n": 1})


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_ids_of_json_are_text_or_whole_numbers(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.spark import Columns, read_files, sink

    good = ['"1.5"', '"true"', '"[x"', "7", "12345678901234567890", '"1e2"']
    bad = ["2.5", "true", "[1]", '{"a":1}', "1e3"]
    text = "".join(f'{{"m": {{"x-y": {id}}}, "order_id": "{n}"}}\n' for n, id in enumerate([*good, *bad]))
    read = read_files(spark, str(write(tmp_path / "ids.jsonl", text)), "json", Columns(id="m.x-y", of_type="shop.Order"))
    counts = sink(APP, parked=str(tmp_path / "parked")).run(read).counts
    assert (counts["new"], counts["parked"]) == (len(good), len(bad))
    assert sorted(tables.effects()) == [str(n) for n in range(len(good))]
    errors = [row.error for row in spark.read.parquet(str(tmp_path / "parked")).collect()]
    assert all("is neither text nor a whole number" in error for error in errors), errors


def test_nested_folders_are_read_and_partitions_are_columns(spark: SparkSession, tmp_path: Path) -> None:
    from idemp.spark import Columns

    for folder in ("deep/2026/11", "deep/2026/12", "hive/day=2026-11-01", "hive/day=2026-11-02/part", "mix/day=1", "mix"):
        write(tmp_path / folder / "x y.jsonl", json.dumps({"id": folder}))
        write(tmp_path / "csv" / folder / "x y.csv", f"id,n\n{folder},1\n")
    write(tmp_path / "hidden" / "_x.jsonl", "{}")
    assert found(spark, tmp_path / "deep", "json").keys() == {"deep/2026/11", "deep/2026/12"}
    assert found(spark, tmp_path / "deep" / "2026" / "*", "json").keys() == {"deep/2026/11", "deep/2026/12"}
    assert found(spark, tmp_path / "deep" / "2026" / "11" / "x y.jsonl", "json").keys() == {"deep/2026/11"}
    rows = found(spark, tmp_path / "csv" / "hive", "csv", Columns(id="day"))
    assert json.loads(rows["2026-11-02"]) == {"id": "hive/day=2026-11-02/part", "n": "1", "day": "2026-11-02"}
    for format, folder in (("json", tmp_path), ("csv", tmp_path / "csv")):
        with pytest.raises(ConfigurationError, match="x y.* and .*x y.* different partition columns.*recursiveFileLookup=true"):
            found(spark, folder / "mix", format)
        assert found(spark, folder / "mix", format, recursiveFileLookup="true").keys() == {"mix", "mix/day=1"}
    spark.sql("SELECT 'x' id, '{}' body").write.parquet(str(tmp_path / "parquet" / "2026" / "11"))
    assert found(spark, tmp_path / "parquet", "parquet").keys() == {"x"}
    (tmp_path / "empty").mkdir()
    for folder in ("hidden", "empty"):
        for format in ("json", "csv", "parquet"):
            with pytest.raises(ConfigurationError, match=f"{folder} has no files"):
                found(spark, tmp_path / folder, format)


def test_files_of_csv_are_read_by_their_own_names_or_refused(spark: SparkSession, tmp_path: Path) -> None:
    from idemp.spark import Columns

    one = "id,n\n1,2\n"
    for name, other in (
        ("order", "n,id\r\n4,3\r\n"),
        ("fewer", "id\n3\n"),
        ("nothing", ""),
        ("blank", "\n\n"),
        ("mark", b"\xef\xbb\xbfid,n\n3,4\n"),
        ("packed.gz", gzip.compress(b"n,id\n4,3\n")),
    ):
        write(tmp_path / name / "day=1" / "a b.csv", one)
        write(tmp_path / name / "day=2" / f"{name}.csv{name[6:]}", other)
        rows = found(spark, tmp_path / name, "csv")
        assert json.loads(rows.pop("1")) == {"id": "1", "n": "2", "day": "1"}
        if name in ("nothing", "blank"):
            assert not rows
        else:
            rest = {} if name == "fewer" else {"n": "4"}
            assert json.loads(rows["3"]) == {"id": "3", **rest, "day": "2"}
    assert found(spark, write(tmp_path / "index.csv", ",id\n0,1\n"), "csv") == {"1": b'{"_c0":"0","id":"1"}'}
    utf_16 = write(tmp_path / "u.csv", one.encode("utf-16"))
    assert found(spark, utf_16, "csv", encoding="UTF-16").keys() == {"1"}
    assert found(spark, write(tmp_path / "bare.csv", "1,2\n"), "csv", Columns(id="_c0"), header="false").keys() == {"1"}
    write(tmp_path / "other" / "a.csv", one)
    write(tmp_path / "other" / "b.csv", "3,4\n5,6\n")
    with pytest.raises(ConfigurationError, match=r"u\.csv does not begin with text in ISO-8859-1"):
        found(spark, utf_16, "csv", encoding="ISO-8859-1")
    for path, said in (
        (write(tmp_path / "zero.csv", ""), "zero.csv has only empty files"),
        (tmp_path / "other", "b.csv has the columns 3, 4, and .*a.csv has id, n"),
        (utf_16, "u.csv does not begin with text in UTF-8"),
        (
            write(tmp_path / "packed.csv", gzip.compress(b"id\n1\n", mtime=0x22)),
            "packed.csv does not begin with text.* such as .gz",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            found(spark, path, "csv")


@pytest.mark.parametrize(
    ("octets", "options", "names"),
    [
        ('id,n\n1,"é"\n2,x\n'.encode("latin-1"), {"encoding": "ISO-8859-1"}, ["é", "x"]),
        ('id,n\n1,∞\n2,"x"\n'.encode("utf-16-le"), {"charset": "UTF-16LE"}, ["∞", "x"]),
        (b'id,n\n1,"a\\"b"\n2,x\n', {"escape": "\\"}, ['a"b', "x"]),
        (b"id,n\n1,'5\"'\n2,'o''c'\n", {"QUOTE": "'"}, ['5"', "o'c"]),
        (b'id,n\n1,"\xe9"\n2,x\n', {}, [None, "x"]),
        ('id,n\n1,"é\n2,x\n'.encode("latin-1"), {"encoding": "ISO-8859-1"}, None),
        ('id,n\n1,"∞\n2,x\n'.encode("utf-16"), {"encoding": "UTF-16"}, None),
        (b"id,n\n1,'5\"\n2,x\n", {"QUOTE": "'"}, None),
    ],
    ids=["latin", "wide", "escaped", "another mark", "not UTF-8", "open in latin", "open in wide", "another mark, open"],
)
def test_quotation_marks_are_counted_as_csv_has_them(
    spark: SparkSession, tmp_path: Path, octets: bytes, options: dict[str, str], names: list[str | None] | None
) -> None:
    file = write(tmp_path / "a.csv", octets)
    if names is None:
        with pytest.raises(ConfigurationError, match=r"a\.csv has an unbalanced quotation mark"):
            found(spark, file, "csv", **options)
        return
    rows = found(spark, file, "csv", **options)
    assert [None if body.startswith(REPLACED.encode()) else json.loads(body)["n"] for _, body in sorted(rows.items())] == names


def test_blank_lines_hold_nothing_and_packed_lines_are_read(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"id":"1"}\r\n\r\n \t \n{"id":"2"}\n\n')
    write(tmp_path / "b.jsonl.gz", gzip.compress(b'{"id":"3"}\n\n'))
    write(tmp_path / "c.jsonl", "")
    assert found(spark, tmp_path, "json") == {id: b'{"id":"%s"}' % id.encode() for id in ("1", "2", "3")}


def test_files_of_parquet_that_spark_cannot_read_are_named(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    (tmp_path / "nanos").mkdir()
    (tmp_path / "types").mkdir()
    at = pa.array([1767225600123456789], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"id": ["1"], "at": at}), tmp_path / "nanos" / "b c.parquet")
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "nanos" / "a.parquet")
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "types" / "a.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "types" / "b.parquet")
    write(tmp_path / "text.parquet", "id\n1\n")
    pq.write_table(pa.table({"id": ["1"]}), write(tmp_path / "table" / "a.parquet", ""))
    write(tmp_path / "table" / "_delta_log" / "0.json", "{}")
    for name, said in (
        ("nanos", "b c.parquet: at has times in nanoseconds: write it in microseconds"),
        ("types", "id is string in .*a.parquet and int64 in .*b.parquet"),
        ("text.parquet", "text.parquet"),
        ("table", "is a Delta table, .*read it as delta"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            found(spark, tmp_path / name, "parquet")
    with pytest.raises(ConfigurationError, match="Failed to find the data source: parket"):
        found(spark, tmp_path / "types", "parket")
