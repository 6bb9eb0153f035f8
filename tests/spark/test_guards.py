"""The guard file as Spark makes it: bit for bit what the consumer looks for, at a size that takes several segments."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from pyspark.sql import functions as F  # noqa: N812

from idemp.lateguard import SEGMENT_BYTES, Guard, Span, places_of, scope_of, segments_for, write
from idemp.spark.archive.guards import segments

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

IDS = 500_000
"""Nearly as many as a segment is for."""
NOW = datetime(2026, 11, 22, tzinfo=UTC)


def numbered(spark: SparkSession, first: int, last: int) -> DataFrame:
    """Keys whose bytes are digests of numbers, so that this process has them, too."""
    key = F.substring(F.unhex(F.md5(F.col("id").cast("string").cast("binary"))), 1, 16)
    return spark.range(first, last).select(F.lit("shop").alias("consumer"), key.alias("message_key"))


def key_of(number: int) -> UUID:
    import hashlib

    return UUID(bytes=hashlib.md5(str(number).encode(), usedforsecurity=False).digest())


def test_bits_are_where_the_consumer_looks(spark: SparkSession) -> None:
    ids = [("shop", uuid.uuid4()) for _ in range(50)] + [("billing", uuid.uuid4()) for _ in range(50)]
    frame = spark.createDataFrame(
        [(name, bytearray(key.bytes)) for name, key in ids], "consumer STRING, message_key BINARY"
    )
    made = list(segments(frame, ["shop", "billing"], 3))
    expected = [bytearray(SEGMENT_BYTES) for _ in range(3)]
    for name, key in ids:
        segment, bits = places_of(scope_of(name), key.bytes, 3)
        for bit in bits:
            expected[segment][bit >> 3] |= 1 << (bit & 7)
    assert made == list(map(bytes, expected))


def test_no_false_negative_few_false_positives_and_fast(spark: SparkSession, tmp_path: Path) -> None:
    """At 10M ids: `python -m benchmarks guard`."""
    path = tmp_path / "guard"
    count = segments_for(IDS)
    write(path, segments(numbered(spark, 0, IDS), ["shop"], count), {"shop": Span(NOW - timedelta(1), NOW, IDS)})
    guard = Guard(path)
    assert all(guard.perhaps("shop", key_of(number)) for number in range(IDS))
    strangers = [key_of(number) for number in range(IDS, IDS + 50_000)]
    begun = time.perf_counter()
    wrong = sum(guard.perhaps("shop", key) for key in strangers)
    each = (time.perf_counter() - begun) / len(strangers)
    assert wrong < 50
    assert each < 50e-6  # 2 µs on a quiet machine; `python -m benchmarks guard` measures it
