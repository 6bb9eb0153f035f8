"""A stream of orders into the shop's inbox, and what has to be in its database at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr
from sqlalchemy import text

from tests.spark.shop import ORDER, WHERE, Shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

BATCHES = 2
ROWS = 60
"""Of each micro-batch; every fifth comes a second time, in the same one and in the next."""
ORDERS = BATCHES * ROWS


def write_input(folder: Path) -> None:
    """Files of orders, one for each micro-batch."""
    (folder / "input").mkdir()
    for batch in range(BATCHES):
        fresh = range(batch * ROWS, (batch + 1) * ROWS)
        again = [*fresh[::5], *(number - ROWS for number in fresh[::5] if batch)]
        lines = [json.dumps({"id": f"order-{number}", "sku": f"sku-{number}"}) for number in [*fresh, *again]]
        (folder / "input" / f"{batch}.json").write_text("\n".join(lines))


def stream(spark: SparkSession, folder: Path, url: str, *, rows: int = 20) -> StreamingQuery:
    """Start a query over the files, to their end, with so many rows a chunk."""
    from idemp.spark import Columns, sink

    frame = spark.readStream.schema("id STRING, sku STRING").option("maxFilesPerTrigger", 1).json(str(folder / "input"))
    handle = sink(WHERE, parked=str(folder / "parked"), database=SecretStr(url), rows=rows)
    return (
        Columns(id="id", type=f"'{ORDER}'")
        .of(frame)
        .writeStream.foreachBatch(handle)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def land(spark: SparkSession, folder: Path, url: str, *, rows: int = 20) -> StreamingQuery:
    """Run it to its end."""
    query = stream(spark, folder, url, rows=rows)
    query.awaitTermination()
    return query


def assert_exact(shop: Shop) -> None:
    """Every order once: its effect, its claim, its output, which waits for a relay."""
    sums = "count(*), count(DISTINCT order_id), sum(substr(order_id, 7)::int), sum(substr(sku, 5)::int)"
    with shop.engine.connect() as connection:
        effects = connection.execute(text(f"SELECT {sums} FROM sale")).one()
        outputs = connection.execute(text("SELECT count(*), count(DISTINCT output_id) FROM idemp_output")).one()
    assert tuple(effects) == (ORDERS, ORDERS, sum(range(ORDERS)), sum(range(ORDERS)))
    assert tuple(outputs) == (ORDERS, ORDERS)
    assert shop.count("idemp_inbox") == ORDERS
    assert shop.count("idemp_pending") == ORDERS
