"""`python -m benchmarks.reading`: rows a second from PostgreSQL into Spark.

`--rows 2000000` claims; by default all columns, `--columns message_key,claimed_at` some of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from idemp.spark.datasource import register
from idemp.spark.reading.views import view_of
from idemp.spark.session import session
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import scratch_directory
from tests.spark.inboxes import inbox_at


def measure(rows: int, rounds: int, columns: list[str]) -> dict[str, float]:
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
    return {
        "rows": rows,
        "columns": len(columns),
        "first_seconds": seconds[0],
        "rows_a_second": rows / statistics.median(timed),
        "best_rows_a_second": rows / min(timed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--columns", default=",".join(view_of("inbox").fields))
    given = parser.parse_args()
    print(json.dumps(measure(given.rows, given.rounds, given.columns.split(",")), indent=2))
