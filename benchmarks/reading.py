"""`python -m benchmarks reading`: rows a second from PostgreSQL into Spark.

Ids, types and times, which is what an audit reads, and all columns; beside them what more tasks read than are worth it, and
what one process reads without Spark. Ways are interleaved in random order.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from sqlalchemy import func, select

from benchmarks import telling
from idemp.inbox.sql import Tables
from idemp.spark.datasource import register
from idemp.spark.reading.arrow import reading
from idemp.spark.reading.views import view_of
from idemp.spark.session import session
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import scratch_directory
from tests.spark.inboxes import inbox_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MILLIONS: Final = 1.0
"""So many rows a second, at least."""
COLUMNS: Final = ("message_key", "type", "claimed_at")
FEW: Final = "ids, types and times"
ALL: Final = "all columns"
ALONE: Final = "the same without Spark, by one process"


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Read the inbox that often in each way, in random order."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgreSQL(stack.enter_context(scratch_directory("reading"))))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inbox = stack.enter_context(inbox_at(server.create_database("reading"), folder))
        inbox.fill(1, rows)
        with inbox.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE idemp_inbox")
        spark = stack.enter_context(session("reading"))
        register(spark)

        def through(columns: Sequence[str], **options: str) -> Callable[[], None]:
            schema = ", ".join(f"{name} {view_of('inbox').fields[name].type}" for name in columns)
            source = spark.read.format("idemp").options(url_file=inbox.url_file, **options).schema(schema)
            return lambda: source.load().write.format("noop").mode("overwrite").save()

        def alone() -> None:
            claims = Tables().inbox.c
            types: list[tuple[str, pa.DataType]] = [
                ("message_key", pa.binary()), ("type_id", pa.int32()), ("claimed_at", pa.timestamp("us", "UTC")),
            ]  # fmt: skip
            statement = select(
                func.uuid_send(claims.message_key).label("message_key"), claims.type_id, claims.claimed_at
            )
            with reading(inbox.url) as source:
                for _ in source.batches(statement, pa.schema(types)):
                    pass

        everything = list(view_of("inbox").fields)
        ways = {
            FEW: through(COLUMNS),
            ALL: through(everything),
            "by tasks of 4 MiB": through(COLUMNS, partitions="64"),
            ALONE: alone,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for warm in range(rounds + 1):
            for name in random.sample(list(ways), len(ways)):
                began = time.perf_counter()
                ways[name]()
                if warm:  # the first round starts Python workers
                    seconds[name].append(time.perf_counter() - began)
    rates = {name: [rows / each / 1e6 for each in own] for name, own in seconds.items()}
    return telling.found(
        f"{rows:,} claims of PostgreSQL into Spark's memory, {rounds} rounds",
        {name: telling.figure(each, "million rows/s") for name, each in rates.items() if name != FEW},
        {FEW: telling.goal(rates[FEW], MILLIONS, "million rows/s")},
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks reading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    return telling.tell("reading", measure(options.rows, options.rounds), options)
