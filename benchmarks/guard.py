"""`python -m benchmarks guard`: the guard against late duplicates at ten million ids: made by Spark, asked by Python.

Every id that was put in is asked for (one that is not known voids the figures), and strangers; times are of one look, in
rounds of a hundred thousand. `--ids 200000` for a first look.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812

from benchmarks import telling
from idemp.lateguard import Guard, Span, segments_for, write
from idemp.spark.archive.guards import segments
from idemp.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUND: Final = 100_000
MICROSECONDS: Final = 5.0
"""So long a look of an online consumer may take."""


def key_of(number: int) -> UUID:
    """As Spark makes it from the number."""
    return UUID(bytes=hashlib.md5(str(number).encode(), usedforsecurity=False).digest())


def measure(ids: int, strangers: int) -> dict[str, Any]:
    """Make a file of so many ids, and ask it for all of them, and for others."""
    now = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as folder, session("guard") as spark:
        path = Path(folder, "guard")
        key = F.unhex(F.md5(F.col("id").cast("string").cast("binary")))
        frame = spark.range(ids).select(F.lit("shop").alias("consumer"), key.alias("message_key"))
        begun = time.perf_counter()
        span = Span(now - timedelta(days=400), now, ids)
        write(path, segments(frame, ["shop"], segments_for(ids)), {"shop": span})
        made = time.perf_counter() - begun
        begun = time.perf_counter()
        guard = Guard(path)
        opened = time.perf_counter() - begun
        size = path.stat().st_size
    known, there = looks(guard, range(ids))
    if there != ids:
        raise RuntimeError(f"the figures are void: of {ids} ids {ids - there} are not known")
    unknown, wrong = looks(guard, range(ids, ids + strangers))
    figures = {
        "making the file": telling.figure([made], "s"),
        "opening it": telling.figure([opened], "s"),
        "size": telling.figure([size / ids], "bytes an id"),
        "strangers taken for known": telling.figure([100 * wrong / strangers], "%"),
    }
    goals = {
        "a look that finds nothing": telling.goal(unknown, MICROSECONDS, "µs", at_most=True),
        "a look that finds it": telling.goal(known, MICROSECONDS, "µs", at_most=True),
    }
    return telling.found(f"{ids:,} ids, all of them asked for and known, and {strangers:,} strangers", figures, goals)


def looks(guard: Guard, numbers: range) -> tuple[list[float], int]:
    """Microseconds of a look, by round; and how many were perhaps there."""
    chance, microseconds, there = random.Random(7), [], 0
    for first in range(0, len(numbers), ROUND):
        keys = [key_of(number) for number in numbers[first : first + ROUND]]
        chance.shuffle(keys)
        begun = time.perf_counter()
        found = [guard.perhaps("shop", each) for each in keys]
        microseconds.append((time.perf_counter() - begun) / len(keys) * 1e6)
        there += sum(found)
    return microseconds, there


def main(arguments: Sequence[str]) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--strangers", type=int, default=1_000_000)
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    return telling.tell("guard", measure(options.ids, options.strangers), options)
