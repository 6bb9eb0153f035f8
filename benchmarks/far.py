"""`python -m benchmarks far`: what a message costs through Spark among ten million, beside one among a million.

All of an archive goes into PostgreSQL, through a sink whose handlers are SQL, with effects and outputs: `--rows` messages
twice, of which the second time counts, and `--far` messages once, into empty tables. That with time-ordered ids, and with
random ones, whose outputs have random ids as well: beside these stands the server's own statement that writes the same, all
in one transaction.

CPU time is told by process, and the most memory that the JVM (driver and executor in one) and all Python processes took.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from benchmarks import telling
from benchmarks.archived import CLAIMS_WITH_EFFECTS, DUPLICATES, SETS, WHERE, Place, timed
from benchmarks.servers import Servers
from benchmarks.usage import OURS, Usage, watched
from idemp.spark import sink
from idemp.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

TARGET: Final = 1.2


def through_spark(place: Place, spark: SparkSession, folder: Path, times: int) -> tuple[float, Usage]:
    """Seconds for each message, and what was used, the last time."""
    messages = place.archived(spark, str(folder / f"archive-{place.rows}-{place.ids}"))
    to = sink(WHERE, sets=SETS, parked=str(folder / "parked"), run_name="run", database=SecretStr(place.url))
    for _ in range(times):
        place.empty()
        with watched(place.server()) as usage:
            seconds = timed(lambda: to.run(messages))
        place.check(only_claims=False)
    return seconds / place.rows, usage


def by_server(place: Place) -> float:
    """The same by one statement of the server's."""
    place.empty()
    seconds = timed(lambda: place.run(CLAIMS_WITH_EFFECTS))
    place.check(only_claims=False)
    return seconds / place.rows


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks far", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--far", type=int, default=10_000_000)
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    goals: dict[str, Any] = {}
    for ids in ("time-ordered", "random"):
        each: dict[int, float] = {}
        alone: dict[int, float] = {}
        for rows in (options.rows, options.far):
            with Servers() as servers, tempfile.TemporaryDirectory() as scratch, session("benchmark") as spark:
                place = Place(servers.database("postgresql"), rows, ids)
                each[rows], usage = through_spark(place, spark, Path(scratch), times=2 if rows == options.rows else 1)
                if ids == "random":
                    alone[rows] = by_server(place)
            figures |= told(f"{rows:,} with {ids} ids", rows, each[rows], usage)
        goals[f"a message of {options.far:,} / one of {options.rows:,}, {ids} ids"] = telling.goal(
            [each[options.far] / each[options.rows]], TARGET, at_most=True
        )
        if alone:
            goals[f"the same by the server's own statement, {ids} ids"] = telling.goal(
                [alone[options.far] / alone[options.rows]], None, at_most=True
            )
    where = f"{options.rows:,} and {options.far:,} messages in Parquet with {DUPLICATES:.0%} duplicates, once each"
    return telling.tell("far", telling.found(where, figures, goals), options)


def told(what: str, rows: int, seconds: float, usage: Usage) -> dict[str, Any]:
    """A rate, and what was used."""
    figures = {what: telling.figure([1 / seconds], "messages/s")}
    for whose, own in usage.seconds.items():
        figures[f"CPU of {what}, {whose}"] = telling.figure([own / rows * 1e6], "µs a message")
    for kind in OURS:
        figures[f"memory of {what}, {kind}"] = telling.figure([usage.memory[kind]], "MiB")
    return figures
