"""`python -m benchmarks.guard`: the guard against late duplicates at ten million ids: made by Spark, asked by Python.

Every id that was put in is asked for (there may be no false negative), and as many strangers; times are of one look, in
rounds. `--ids 200000` for a first look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812

from idemp.lateguard import Guard, Span, segments_for, write
from idemp.spark.archive.guards import segments
from idemp.spark.session import session

ROUND = 100_000


def key_of(number: int) -> UUID:
    """As Spark makes it from the number."""
    return UUID(bytes=hashlib.md5(str(number).encode(), usedforsecurity=False).digest())


def measure(ids: int, strangers: int) -> dict[str, float]:
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
        missed = sum(not guard.perhaps("shop", key_of(number)) for number in range(ids))
        looks, wrong = [], 0
        chance = random.Random(7)
        for first in range(ids, ids + strangers, ROUND):
            keys = [key_of(number) for number in range(first, min(first + ROUND, ids + strangers))]
            chance.shuffle(keys)
            begun = time.perf_counter()
            wrong += sum(guard.perhaps("shop", each) for each in keys)
            looks.append((time.perf_counter() - begun) / len(keys))
        known = [key_of(chance.randrange(ids)) for _ in range(ROUND)]
        begun = time.perf_counter()
        for each in known:
            guard.perhaps("shop", each)
        hit = (time.perf_counter() - begun) / ROUND
        return {
            "ids": ids,
            "bytes": path.stat().st_size,
            "made_seconds": made,
            "opened_seconds": opened,
            "false_negatives": missed,
            "false_positives": wrong / strangers,
            "microseconds_no": statistics.median(looks) * 1e6,
            "microseconds_perhaps": hit * 1e6,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--strangers", type=int, default=1_000_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.ids, given.strangers), indent=2))
