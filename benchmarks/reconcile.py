"""`python -m benchmarks reconcile`: a reconciliation beside Spark's own distinct count of the same ids, in the same rounds.

Ten million rows of a log, of eight million messages, against as many claims and their outputs, all of them from Parquet;
what was planted among them has to be found, and nothing else. `--messages` for fewer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import telling
from benchmarks.figures import paired

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark.reconcile import Summary

MOST: Final = 3.0
"""So many times as long as the distinct count it may take."""


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks reconcile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2,4]")
    telling.add_options(parser)
    return parser.parse_args(arguments)


def run(spark: SparkSession, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the files, then measure."""
    from benchmarks.planting import plant

    planted = plant(spark, options.messages, every_read_twice=4)
    for name in ("sent", "inbox", "outputs"):
        getattr(planted, name).write.parquet(str(folder / name))
    sent, inbox, outputs = (spark.read.parquet(str(folder / name)) for name in ("sent", "inbox", "outputs"))
    ids = sent.select("id").union(inbox.select("original_id")).union(outputs.selectExpr("hex(message_key)"))
    distinct: list[float] = []
    sent_distinct: list[float] = []
    found: list[float] = []
    for _ in range(options.rounds + 1):  # the first one warms up
        distinct.append(_seconds(lambda: ids.distinct().count()))
        sent_distinct.append(_seconds(lambda: sent.select("id").distinct().count()))
        found.append(_seconds(lambda: check(reconciled(sent, inbox, outputs))))
    seconds = {
        "distinct count of all ids": distinct,
        "distinct count of the log's": sent_distinct,
        "reconciliation": found,
    }
    where = f"{sent.count():,} rows of a log, {inbox.count():,} claims, {outputs.count():,} outputs, in Parquet"
    return telling.found(
        where,
        {name: telling.figure(each[1:], "s") for name, each in seconds.items()},
        {
            "reconciliation / distinct count": telling.goal(paired(found[1:], distinct[1:]), MOST, at_most=True),
            "reconciliation / distinct count of the log": telling.goal(
                paired(found[1:], sent_distinct[1:]), None, at_most=True
            ),
        },
    )


def reconciled(sent: DataFrame, inbox: DataFrame, outputs: DataFrame) -> Summary:
    """The whole of it, from files to the summary."""
    from benchmarks.planting import AS_OF, CONSUMER, RETENTION
    from idemp.spark.reconcile import Sent, reconcile

    log = Sent(
        frame=sent, consumers=[CONSUMER], id="id", type="type", time="time", digest="digest", position="position"
    )
    with reconcile(log, inbox, outputs, as_of=AS_OF, retention=RETENTION) as found:
        return found.summary()


def check(summary: Summary) -> None:
    """See that exactly what was planted was found.

    Raises:
        AssertionError: it was not.
    """
    from benchmarks.planting import expected
    from idemp.spark.reconcile import Kind

    numbers = {kind.value: summary.totals.of(kind) for kind in Kind}
    if numbers != expected(numbers):
        raise AssertionError(f"found {numbers}, planted {expected(numbers)}")


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    from idemp.spark.session import session

    options = options_of(arguments)
    conf = {"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "16"}
    with tempfile.TemporaryDirectory() as folder, session("reconcile", master=options.master, conf=conf) as spark:
        figures = run(spark, Path(folder), options)
    return telling.tell("reconcile", figures, options)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
