"""The atomic sink: all of a micro-batch in one transaction, or nothing of it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.errors import StreamingQueryException
from pyspark.sql import types as t
from sqlalchemy import text

from idemp.bulk.arrow import KINDS
from idemp.errors import ConfigurationError, StoreError, TransactionEnded
from idemp.spark.atomic.applying import applied
from idemp.spark.atomic.options import Options
from idemp.spark.atomic.writer import link
from idemp.spark.columns import Columns
from idemp.spark.datasource import InboxSource, _Speculating
from idemp.spark.reading.secret import told_by_file
from idemp.spark.summary import Summary
from idemp.spark.testing import Fault, inject, lose_checkpoint
from tests.docs.pages import blocks, page
from tests.spark.shop import ORDER, WHERE, Shop, message, once
from tests.spark.streams import ORDERS, assert_exact, write_input

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark.atomic.writer import StreamWriter
    from tests.servers.postgresql import PostgreSQL

pytestmark = pytest.mark.slow

_KINDS = {
    "id": t.StringType(), "type": t.StringType(), "body": t.BinaryType(), "headers": t.StringType(),
    "time": t.TimestampType(), "position": t.StringType(),
}  # fmt: skip
SCHEMA = t.StructType([t.StructField(name, kind) for name, kind in _KINDS.items()])


@pytest.fixture
def options(shop: Shop, tmp_path: Path) -> Iterator[dict[str, str]]:
    with told_by_file(shop.url) as url_file:
        yield {"app": WHERE, "parked": str(tmp_path / "parked"), "url_file": str(url_file), "rows": "50"}
    link.close()


def writer(options: dict[str, str], **others: str) -> StreamWriter:
    return InboxSource({**options, **others}).streamWriter(SCHEMA, overwrite=False)


def stage(to: StreamWriter, rows: Iterable[dict[str, Any]]) -> Any:
    """As a task does it, in two batches; the position is the row's number here."""
    encoded = [{**row, "body": row["body"].encode(), "position": f"archive#{place}"} for place, row in enumerate(rows)]
    middle = len(encoded) // 2
    schema = pa.schema(list(KINDS.items()))
    halves = (encoded[:middle], encoded[middle:])
    return to.write(pa.RecordBatch.from_pylist(half, schema=schema) for half in halves)


def take(options: dict[str, str], staged: Sequence[Any], batch: int = 0) -> Summary:
    """As the driver does it; what became of the messages."""
    return applied(Options.read(options), [each.landed for each in staged], batch)


def letters(folder: Path) -> dict[str, list[str]]:
    """Ids of parked messages, by their files' paths."""
    files = sorted((folder / "parked").rglob("*.parquet"))
    return {
        str(file.relative_to(folder / "parked").parent): parquet.read_table(file, partitioning=None)
        .column("id")
        .to_pylist()
        for file in files
    }


def test_one_transaction_whatever_is_in_it(shop: Shop, options: dict[str, str], tmp_path: Path) -> None:
    shop.handle_online([message(number) for number in range(10)])
    other = {**message(3), "body": '{"sku": "other"}'}
    bad = [message(200, poison=True), {**message(201), "type": "shop.Unknown"}]
    first, second = [*map(message, range(80)), *bad], [*map(message, range(40, 120)), other, *bad[:1]]

    def run() -> Summary:
        made = writer(options)
        return take(options, [stage(made, first), stage(made, second)], batch=7)

    assert run() == Summary(new=110, duplicate=50, conflict=1, parked=3, outputs=110)
    assert shop.counts() == (120, 120, 110)
    parked = letters(tmp_path)
    assert parked == {
        "run=shop/batch=7/error=PayloadConflict": ["order-3"],
        "run=shop/batch=7/error=UnknownMessageType": ["order-201"],
        "run=shop/batch=7/error=ValueError": ["order-200", "order-200"],
    }
    assert run() == Summary(replay=110, duplicate=50, conflict=1, parked=3), "it was delivered again"
    assert shop.counts() == (120, 120, 110)
    assert letters(tmp_path) == parked
    assert shop.count("idemp_arrival") == 0


def test_handlers_of_sets(shop: Shop, options: dict[str, str]) -> None:
    options |= {"sets": "tests.spark.shop:SETS", "rows": "200"}
    made = writer(options)
    staged = [stage(made, map(message, range(start, start + 300))) for start in (0, 150)]
    assert take(options, staged) == Summary(new=450, duplicate=150, outputs=450)
    assert shop.counts() == (450, 450, 450)


def test_commit_that_fails_applies_nothing(shop: Shop, options: dict[str, str], tmp_path: Path) -> None:
    """Here for want of a folder, once all else is done."""
    (tmp_path / "parked").write_text("no folder")
    made = writer(options)
    staged = [stage(made, [*map(message, range(60)), message(99, poison=True)])]
    with pytest.raises(StoreError, match=r"could not be parked.*Nothing of the micro-batch was handled"):
        made.commit(staged, 0)
    assert shop.counts() == (0, 0, 0)
    assert shop.count("idemp_inbox") == 0
    assert shop.count("idemp_arrival") == 2
    made.abort([*staged, None], 0)
    assert shop.count("idemp_arrival") == 0
    (tmp_path / "parked").unlink()
    made.commit([stage(made, map(message, range(60)))], 0)
    assert shop.counts() == (60, 60, 60)
    made.abort(staged, 0)  # as may follow a COMMIT that took place
    assert shop.counts() == (60, 60, 60)


def test_handler_that_ends_the_transaction_is_not_run_again(shop: Shop, options: dict[str, str]) -> None:
    """What came before it is committed, and claimed; it stays staged until the query gives up."""
    made = writer(options)
    staged = [stage(made, [*map(message, range(50)), message(50, ends=True), *map(message, range(51, 100))])]
    with pytest.raises(TransactionEnded, match="See whether the handler's effects are there"):
        made.commit(staged, 0)
    assert shop.count("idemp_inbox") == 50
    assert shop.sales().count("order-50") == 1


def test_what_a_crash_of_the_server_took_is_missed(own_postgresql: PostgreSQL, tmp_path: Path) -> None:
    shop = Shop(own_postgresql.create_database("shop"))
    with told_by_file(shop.url) as url_file:
        made = writer({"app": WHERE, "parked": str(tmp_path), "url_file": str(url_file)})
        staged = [stage(made, map(message, range(60)))]
        shop.engine.dispose()
        own_postgresql.stop_immediately()
        own_postgresql.start()
        late = stage(made, map(message, range(60, 70)))
        with pytest.raises(StoreError, match="Of 70 messages that tasks staged, 10 are there"):
            made.commit([*staged, late], 0)
        assert shop.counts() == (0, 0, 0)
        made.commit([stage(made, map(message, range(70)))], 0)
        assert shop.counts() == (70, 70, 70)
    link.close()
    shop.close()


def test_what_dead_attempts_left_is_deleted_after_a_day(shop: Shop, options: dict[str, str]) -> None:
    made = writer(options)
    for _ in range(2):
        stage(made, [message(1), message(2)])
    with shop.engine.begin() as connection:
        one = "(SELECT token FROM idemp_arrival LIMIT 1)"
        connection.execute(
            text(f"UPDATE idemp_arrival SET arrived_at = now() - interval '25 hours' WHERE token = {one}")
        )
    made.commit([], 0)
    assert shop.count("idemp_arrival") == 2, "those of the other one"
    assert shop.count("idemp_inbox") == 0


def test_what_is_wrong_is_told_before_anything_is_staged(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'park'\. Did you mean 'parked'"):
        writer({**options, "park": "here"})
    with pytest.raises(ConfigurationError, match="never overwritten"):
        InboxSource(options).streamWriter(SCHEMA, overwrite=True)
    with pytest.raises(ConfigurationError, match="the columns are id STRING, not id STRING, type"):
        InboxSource(options).writer(t.StructType([SCHEMA["id"]]), overwrite=False)
    with pytest.raises(ConfigurationError, match="SPARK-56564"):
        _Speculating(options).streamWriter(SCHEMA, overwrite=False)
    with told_by_file("sqlite:///shop.db") as url_file, pytest.raises(ConfigurationError, match="PostgreSQL alone"):
        writer(options, url_file=str(url_file))


def test_page_has_all_options() -> None:
    text = page("reference/data-source.md")
    _, _, writing = text.partition("## Writing")
    named = re.findall(r"^\| (`.*?`) \|", writing.partition("\n## ")[0], re.MULTILINE)
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == {each.name for each in fields(Options)}


def test_stream_is_exact_whatever_dies(
    spark: SparkSession, shop: Shop, options: dict[str, str], tmp_path: Path
) -> None:
    """First the process that commits, in the middle of it; then a task that has staged; at last the checkpoint is lost."""
    write_input(tmp_path)
    first = tmp_path / "input" / "0.json"
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    lines[41]["dies"] = str(tmp_path / "died")
    first.write_text("\n".join(map(json.dumps, lines)))
    os.utime(first, (0, 0))  # the older one comes first
    of_page = blocks(page("how-to/streaming.md"), "python")[1]
    assert of_page.count('app="shop:app", parked="parked"') == of_page.count('"checkpoint"') == 1
    code = of_page.replace('app="shop:app", parked="parked"', "**options").replace('"checkpoint"', "checkpoint")

    def messages(frame: DataFrame) -> DataFrame:
        return Columns(id="id", type=f"'{ORDER}'").of(frame)

    def land() -> None:
        source = spark.readStream.schema("id STRING, sku STRING, dies STRING").option("maxFilesPerTrigger", 1)
        told = {"options": options, "checkpoint": str(tmp_path / "checkpoint"), "spark": spark}
        exec(code, {**told, "messages": messages(source.json(str(tmp_path / "input")))})

    with pytest.raises(StreamingQueryException):
        land()
    assert not once(str(tmp_path / "died"))
    assert shop.counts() == (0, 0, 0)
    assert shop.count("idemp_inbox") + shop.count("idemp_arrival") == 0
    with inject(spark, Fault("kill", "after commit", attempt=0)) as fired:
        land()
        assert len(fired()) == 1
    assert_exact(shop)
    assert shop.count("idemp_arrival") == 1, "of the attempt that was killed"
    lose_checkpoint(tmp_path / "checkpoint")
    land()
    archive = messages(spark.read.schema("id STRING, sku STRING, dies STRING").json(str(tmp_path / "input")))
    archive.write.format("idemp").mode("append").options(**options).save()
    assert_exact(shop)
    assert shop.count("idemp_inbox") == ORDERS
