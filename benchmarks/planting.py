"""A log, an inbox and outputs of any size, with so many faults of each kind planted, and much beside them that is none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from idemp.fingerprint import Fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame, SparkSession

AS_OF: Final = datetime(2026, 3, 10, 12, tzinfo=UTC)
RETENTION: Final = timedelta(days=7)
CONSUMER: Final = "orders"
FAULTS: Final = {"lost": 50, "duplicated": 70, "conflicting": 30, "undispatched": 40, "late": 20}
"""Messages of each kind."""
HARMLESS: Final = {"not yet": 60, "expired": 80, "just claimed": 30, "read twice": 90}
"""Sent just now; longer ago than claims are kept; with outputs on their way; twice in the log from one place."""
_SPAN: Final = timedelta(days=3)
_STRIDE: Final = 7919  # a prime, so that what is planted lies all over the log
_UUID_GROUPS: Final = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))


@dataclass(frozen=True)
class Planted:
    """The three frames, in the columns of the data source and of a producer's log.

    Attributes:
        sent: id, type, body, digest, time, position.
        inbox: claims.
        outputs: what was produced; four of five messages have one.
        rows: messages.
    """

    sent: DataFrame
    inbox: DataFrame
    outputs: DataFrame
    rows: int

    def ids(self, kind: str) -> set[str]:
        """The ids of a planted kind."""
        messages = _messages(self.sent.sparkSession, self.rows).where(f.col("plant") == kind)
        return {row.id for row in messages.select("id").collect()}


def plant(spark: SparkSession, rows: int, *, every_read_twice: int | None = None) -> Planted:
    """So many messages, the same ones each time.

    Args:
        spark: the session.
        rows: at least a thousand, and no multiple of 7919.
        every_read_twice: each so-many-th message stands in the log twice, from one place.
    """
    messages = _messages(spark, rows)
    claims = messages.where(~f.col("plant").isin("lost", "not yet", "expired")).withColumn("claimed_at", _claimed_at())
    sent = _log(messages)
    if every_read_twice is not None:
        sent = sent.union(sent.where(f.regexp_extract("position", "[0-9]+", 0).cast("long") % every_read_twice == 0))
    return Planted(sent, _inbox(claims), _outputs(claims), rows)


def _messages(spark: SparkSession, rows: int) -> DataFrame:
    number = f.col("id")
    digits = f.overlay(f.overlay(f.md5(number.cast("string")), f.lit("4"), 13), f.lit("8"), 17)
    named = spark.range(rows).select(
        number.alias("number"),
        f.unhex(digits).alias("message_key"),
        f.concat_ws("-", *(f.substring(digits, at, size) for at, size in _UUID_GROUPS)).alias("id"),
        f.concat(
            f.lit("shop."),
            f.element_at(f.array(*map(f.lit, ("Order", "Payment", "Parcel"))), (number % 3 + 1).cast("int")),
        ).alias("type"),
        _plant((number * _STRIDE) % rows).alias("plant"),
        f.concat(f.lit('{"number":'), number, f.lit("}")).alias("body"),
        (number / rows).alias("share"),
    )
    return named.withColumn("time", _time()).drop("share")


def _plant(slot: Column) -> Column:
    planted = {**FAULTS, **HARMLESS}
    ends = accumulate(planted.values())
    found = f.lit("")
    for name, end in reversed(list(zip(planted, ends, strict=True))):
        found = f.when(slot < end, name).otherwise(found)
    return found


def _time() -> Column:
    """Spread over three days that end an hour before the snapshot, but for those that are about time."""
    ordinary = _seconds(AS_OF - timedelta(hours=1) - _SPAN) + f.col("share") * _SPAN.total_seconds()
    just_now = _seconds(AS_OF - timedelta(minutes=10))
    long_ago = _seconds(AS_OF - RETENTION - timedelta(hours=3))
    seconds = (
        f.when(f.col("plant").isin("not yet", "just claimed"), just_now)
        .when(f.col("plant") == "expired", long_ago)
        .otherwise(ordinary)
    )
    return f.timestamp_micros((seconds * 1_000_000).cast("long"))


def _log(messages: DataFrame) -> DataFrame:
    first = messages.withColumn("position", f.concat(f.lit("log#"), "number"))
    again = first.where(f.col("plant").isin("duplicated", "conflicting", "read twice")).withColumns(
        {
            "position": f.when(f.col("plant") == "read twice", f.col("position")).otherwise(
                f.concat("position", f.lit("b"))
            ),
            "body": f.when(f.col("plant") == "conflicting", f.lit('{"number":-1}')).otherwise(f.col("body")),
            "time": f.col("time") + f.expr("INTERVAL 5 SECONDS"),
        }
    )
    return first.unionByName(again).select(
        "id", "type", "body", f.unhex(f.md5("body")).alias("digest"), "time", "position"
    )


def _claimed_at() -> Column:
    late = f.expr("INTERVAL 40 MINUTES")
    return f.when(f.col("plant") == "late", f.col("time") + late).otherwise(
        f.col("time") + f.expr("INTERVAL 2 SECONDS")
    )


def _inbox(claims: DataFrame) -> DataFrame:
    scheme = Fingerprint().of({})
    assert scheme is not None
    fingerprint = f.concat(f.lit(scheme[:3]), f.unhex(f.substring(f.sha2("body", 256), 1, 32)))
    return claims.select(
        f.lit(CONSUMER).alias("consumer"),
        "message_key",
        f.col("id").alias("original_id"),
        "type",
        "claimed_at",
        fingerprint.alias("fingerprint"),
    )


def _outputs(claims: DataFrame) -> DataFrame:
    waiting = f.col("plant").isin("undispatched", "just claimed")
    return claims.where((f.col("number") % 5 > 0) | waiting).select(
        f.lit(CONSUMER).alias("consumer"),
        "message_key",
        waiting.alias("pending"),
        f.expr("false").alias("quarantined"),
    )


def _seconds(moment: datetime) -> Column:
    return f.lit(moment.timestamp())


def expected(kinds: Iterable[str]) -> dict[str, int]:
    """How many findings of each kind there are to be."""
    return {kind: FAULTS.get(kind, 0) for kind in kinds}
