"""`python -m benchmarks reading`: rows a second from PostgreSQL into Spark.

`--rows 2000000` claims; by default all columns, `--columns message_key,claimed_at` some of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import telling
from idemp.spark.datasource import register
from idemp.spark.reading.views import view_of
from idemp.spark.session import session
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import scratch_directory
from tests.spark.inboxes import inbox_at

if TYPE_CHECKING:
    from collections.abc import Sequence

MILLIONS: Final = 1.0
"""So many rows a second, at least."""


def measure(rows: int, rounds: int, columns: list[str]) -> dict[str, Any]:
    """Read the inbox that often."""
    schema = ", ".join(f"{name} {view_of('inbox').fields[name].type}" for name in columns)
    with ExitStack() as stack:
        server = stack.enter_context(PostgreSQL(stack.enter_context(scratch_directory("reading"))))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inbox = stack.enter_context(inbox_at(server.create_database("reading"), folder))
        inbox.fill(1, rows)
        with inbox.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE idemp_inbox")
        spark = stack.enter_context(session("reading"))
        register(spark)
        seconds = []
        for _ in range(rounds + 1):
            frame = spark.read.format("idemp").option("url_file", inbox.url_file).schema(schema).load()
            begun = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            seconds.append(time.perf_counter() - begun)
    timed = seconds[1:]  # the first one starts Python workers
    rates = [rows / each / 1e6 for each in timed]
    return telling.found(
        f"{rows:,} claims of PostgreSQL, {len(columns)} columns, into Spark's memory",
        {"the first time": telling.figure([seconds[0]], "s"), "from then on": telling.figure(timed, "s")},
        {"rate": telling.goal(rates, MILLIONS, "million rows/s")},
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks reading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--columns", default=",".join(view_of("inbox").fields))
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    return telling.tell("reading", measure(options.rows, options.rounds, options.columns.split(",")), options)
