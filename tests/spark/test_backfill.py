"""`idemp pipeline backfill`: archives of all kinds, good and bad."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import Answer, Cli
from tests.spark.shop import ORDER, WHERE, Shop, message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Backfill:
    """The command, on one shop."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        self._shop = shop
        self.folder = folder
        self.parked = folder / "parked"

    def __call__(self, *options: str) -> Answer:
        told = ("--database", self._shop.url, "--parked", str(self.parked), "--rows", "50", "--partitions", "2")
        return Cli()("pipeline", "backfill", WHERE, *options, *told, "--json")


@pytest.fixture
def backfill(spark: SparkSession, shop: Shop, tmp_path: Path) -> Backfill:
    return Backfill(shop, tmp_path)


def counts(answer: Answer) -> dict[str, int]:
    """What is not nothing."""
    names = ("rows", "new", "replay", "duplicate", "conflict", "parked", "skipped", "outputs")
    return {name: answer.data[name] for name in names if answer.data[name]}


def lines(file: Path, rows: list[str]) -> str:
    file.write_text("".join(f"{row}\n" for row in rows))
    return str(file)


def order(number: int, **others: Any) -> str:
    return json.dumps({"order": f"order-{number}", "sku": f"sku-{number}", **others})


OF_ORDERS = ("--format", "json", "--id", "order", "--type", ORDER)


def test_json_goes_on_where_it_stopped(backfill: Backfill, shop: Shop, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.json", [order(number) for number in range(100)])
    first = backfill("--input", archive, *OF_ORDERS)
    assert (first.code, counts(first)) == (0, {"rows": 100, "new": 100, "outputs": 100})
    lines(tmp_path / "a.json", [order(number) for number in range(120)])
    assert counts(backfill("--input", archive, *OF_ORDERS)) == {"rows": 120, "replay": 100, "new": 20, "outputs": 20}
    assert shop.counts() == (120, 120, 120)
    # What the prefilter can't tell goes to the inbox: what was handled online, and another payload.
    shop.handle_online([{"id": "order-121", "type": ORDER, "body": order(121)}])
    lines(tmp_path / "a.json", [*(order(number) for number in range(122)), order(7, note="another")])
    last = backfill("--input", archive, *OF_ORDERS, "--prefilter")
    told = {"rows": 123, "skipped": 120, "new": 1, "duplicate": 1, "conflict": 1, "outputs": 1}
    assert (last.code, counts(last)) == (1, told)


@pytest.mark.slow
def test_equal_lines_of_one_file_are_duplicates_and_then_replays(backfill: Backfill, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.json", [order(1), order(2), order(1), order(1)])
    assert counts(backfill("--input", archive, *OF_ORDERS)) == {"rows": 4, "new": 2, "duplicate": 2, "outputs": 2}
    assert counts(backfill("--input", archive, *OF_ORDERS)) == {"rows": 4, "replay": 2, "duplicate": 2}


@pytest.mark.slow
def test_corrupt_lines_are_parked_as_they_are(backfill: Backfill, spark: SparkSession, tmp_path: Path) -> None:
    good = [order(number) for number in range(95)]
    bad = ["[" * 100_000, order(95)[:-3], "", "[1]", '{"order": null}', '{"order": ""}']
    answer = backfill("--input", lines(tmp_path / "a.json", [*bad, *good]), *OF_ORDERS)
    assert (answer.code, counts(answer)) == (1, {"rows": 101, "new": 95, "parked": 6, "outputs": 95})
    assert answer.data["parked_in"] == f"{backfill.parked}/run={answer.data['run']}"
    letters = spark.read.parquet(answer.data["parked_in"]).collect()
    assert order(95)[:-3].encode() in [bytes(row["body"]) for row in letters]
    assert Counter(row["error"] for row in letters).total() == 6
    assert all(row["reason"] and "a.json#~" in row["position"] for row in letters)


@pytest.mark.slow
def test_parquet_whose_files_have_different_columns(
    backfill: Backfill, shop: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    archive = str(tmp_path / "orders")
    rows = spark.range(40).selectExpr("concat('order-', id) AS id", f"'{ORDER}' AS type")
    sku = "concat('sku-', id) AS sku"
    for number, columns in enumerate([(sku,), (sku, "'x' AS tenant"), ("1 AS n",)]):
        part = rows.selectExpr("*", *columns).where(f"pmod(hash(id), 3) = {number}")
        part.write.mode("append").parquet(archive)
    answer = backfill("--input", archive, "--type-column", "type")
    told = counts(answer)
    assert (answer.code, told["rows"]) == (1, 40)
    assert told["new"] + told["parked"] == 40
    assert shop.count("sale") == told["new"] > 0
    assert backfill("--input", archive, "--type-column", "type", "--id", "ordr").error["exit_code"] == 3
    for id_ in ("cast(1 as double)", "timestamp'2026-11-22 10:00:00'"):  # as texts, they are not what they are online
        assert "id as" in backfill("--input", archive, "--type-column", "type", "--id", id_).error["message"]


@pytest.mark.slow
def test_a_value_that_python_can_not_read_is_one_messages_trouble(
    backfill: Backfill, shop: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    archive = str(tmp_path / "orders")
    far = "timestamp'9999-12-31 12:00:00' + interval 2 days"
    rows = f"('61', now()), ('62', {far}), ('80FF', now()), ('80FE', now())"
    spark.sql(f"SELECT unhex(col1) AS id, col2 AS time, 'x' AS sku FROM VALUES {rows}").write.parquet(archive)
    answer = backfill("--input", archive, "--type", ORDER)
    assert (answer.code, counts(answer)) == (1, {"rows": 4, "new": 2, "parked": 2, "outputs": 2})
    assert shop.sales() == ["a", "b"]
    assert {row["error"] for row in spark.read.parquet(answer.data["parked_in"]).collect()} == {"MissingId"}


@pytest.mark.slow
def test_csv_with_rows_that_do_not_fit(backfill: Backfill, shop: Shop, spark: SparkSession, tmp_path: Path) -> None:
    rows = [b"order no.,sku", b"order-1,A-1", b"order-2", b'order-3,"B ""2"", \\"', b"order-4,C-3,too,many"]
    other_encoding = ["order-ä,A-1".encode("latin-1"), "order-ö,A-1".encode("latin-1")]
    archive = tmp_path / "a.csv"
    archive.write_bytes(b"\n".join([*rows, *other_encoding]))
    asked = ("--input", str(archive), "--format", "csv", "--id", "order no.", "--type", ORDER)
    answer = backfill(*asked)
    assert (answer.code, counts(answer)) == (1, {"rows": 6, "new": 2, "parked": 4, "outputs": 2})
    assert shop.sales() == ["order-1", "order-3"]
    assert shop.count("sale WHERE sku = 'B \"2\", \\'") == 1
    letters = spark.read.parquet(answer.data["parked_in"]).collect()
    assert {b"order-2", b"order-4,C-3,too,many"} <= {bytes(row["body"]) for row in letters}
    archive.write_text('order no.,sku\norder-5,"A\nB"\n')
    refused = backfill(*asked)
    assert (refused.code, "multiLine=true" in refused.error["fix"]) == (3, True)
    assert counts(backfill(*asked, "--option", "multiLine=true")) == {"rows": 1, "new": 1, "outputs": 1}
    assert shop.count("sale WHERE sku = 'A\nB'") == 1


@pytest.mark.slow
def test_oversized_bodies_and_types_without_a_handler(backfill: Backfill, shop: Shop, tmp_path: Path) -> None:
    rows = [json.dumps({**message(number), "body": None, "sku": "x"}) for number in range(3)]
    rows.append(json.dumps({"id": "large", "type": ORDER, "sku": "x" * (8 * 1024 * 1024)}))
    rows.append(json.dumps({"id": "strange", "type": "shop.Strange"}))
    answer = backfill("--input", lines(tmp_path / "a.json", rows), "--format", "json")
    assert (answer.code, counts(answer)) == (1, {"rows": 5, "new": 3, "parked": 2, "outputs": 3})


@pytest.mark.slow
def test_dry_run_and_adoption(backfill: Backfill, shop: Shop, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.json", [order(number) for number in range(10)])
    asked = ("--input", archive, *OF_ORDERS)
    assert counts(backfill(*asked, "--dry-run")) == {"rows": 10, "new": 10}
    assert not backfill.parked.exists()
    assert counts(backfill(*asked, "--adopt")) == {"rows": 10, "new": 10}
    assert counts(backfill(*asked)) == {"rows": 10, "replay": 10}
    assert shop.counts() == (0, 0, 0)


def test_outputs_without_dispatch(backfill: Backfill, shop: Shop, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.json", [order(number) for number in range(10)])
    assert backfill("--input", archive, *OF_ORDERS, "--no-dispatch").code == 0
    assert shop.counts() == (10, 10, 0)


def test_fields_that_are_missing_are_named_before_anything_is_done(
    backfill: Backfill, shop: Shop, tmp_path: Path
) -> None:
    archive = lines(tmp_path / "a.json", [order(1)])
    answer = backfill("--input", archive, "--format", "json", "--id", "ordr", "--type", ORDER)
    assert answer.code == 3
    for words in ("no id as 'ordr'", "Its fields: order, sku", "'order'?"):
        assert words in f"{answer.error['message']} {answer.error['fix']}"
    assert backfill("--input", archive, "--format", "json", "--id", "a;b", "--type", ORDER).code == 3
    assert shop.count("idemp_inbox") == 0


@pytest.mark.parametrize("format", ["json", "csv", "parquet", "parqet"])
def test_files_that_are_not_there(backfill: Backfill, tmp_path: Path, format: str) -> None:
    answer = backfill("--input", str(tmp_path / "none"), "--format", format, "--id", "a", "--type", "b")
    assert (answer.code, "can't be read" in answer.error["message"]) == (3, True)


@pytest.mark.slow
def test_text_for_people(backfill: Backfill, shop: Shop, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.json", [order(1), "{"])
    told = ("--database", shop.url, "--parked", str(backfill.parked))
    answer = Cli()("pipeline", "backfill", WHERE, "--input", archive, *OF_ORDERS, *told)
    assert "2 messages: 1 new, 0 replay, 0 duplicate, 0 conflict, 1 parked; 1 output." in answer.out
    assert f"What was parked is in {backfill.parked}/run=backfill-" in answer.out
