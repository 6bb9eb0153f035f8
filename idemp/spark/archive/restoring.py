"""Rows of an archive back into the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from idemp.inbox.sql.restoring import ArchivedClaim, Restoring

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from idemp.inbox.sql import SqlStore
    from idemp.spark.archive.folder import Archive, Run

_AT_ONCE: Final = 500
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OF_OUTPUT: Final = ("output_id", "ordinal", "kind", "exchange", "routing_key", "envelope", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which claims come back; what is `None` restricts nothing.

    Attributes:
        consumer: of this consumer.
        since: claimed on this day (UTC) or later.
        until: claimed before this day.
        original_id: of this id, as a person calls it.
    """

    consumer: str | None = None
    since: date | None = None
    until: date | None = None
    original_id: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """How many claims were found in the archive, and how many of them were missing in the database and put back."""

    found: int
    restored: int


def restore(
    spark: SparkSession,
    archive: Archive,
    store: SqlStore,
    wanted: Wanted,
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> Restored:
    """Put claims and their outputs back where they are missing. They have expired: the next archive run takes them again.

    Args:
        spark: a session.
        archive: where they are.
        store: where they go.
        wanted: which ones.
        advance: told how many more were looked at.

    Raises:
        ArchiveDamaged: a file is not as it was written; nothing of that run came back.
        StoreError: the database could not do its part; run it again.
    """
    found = restored = 0
    restoring = Restoring(store)
    for run in archive.runs(wanted.consumer):
        run.check_files()
        claims = _claims(_chosen(spark, run, wanted))
        while some := list(islice(claims, _AT_ONCE)):
            restored += restoring.put_back(some)
            found += len(some)
            advance(len(some))
    return Restored(found, restored)


def _chosen(spark: SparkSession, run: Run, wanted: Wanted) -> DataFrame:
    """Claims, each with an array of its outputs."""
    claims = spark.read.parquet(run.path("inbox"))
    if wanted.since is not None:
        claims = claims.where(F.col("date") >= F.lit(wanted.since))
    if wanted.until is not None:
        claims = claims.where(F.col("date") < F.lit(wanted.until))
    if wanted.original_id is not None:
        claims = claims.where(F.col("original_id") == wanted.original_id)
    if not run.manifest.tables["outputs"].rows:
        return claims
    outputs = spark.read.parquet(run.path("outputs"))
    gathered = outputs.groupBy("message_key").agg(F.collect_list(F.struct(*_OF_OUTPUT)).alias("outputs"))
    return claims.join(gathered, "message_key", "left")


def _claims(frame: DataFrame) -> Iterator[ArchivedClaim]:
    with_outputs = "outputs" in frame.columns
    # Moments as numbers: as such, Spark hands them over by this machine's time zone.
    moments = frame.withColumn("claimed_at", F.unix_micros("claimed_at"))
    for row in moments.toLocalIterator():
        yield ArchivedClaim(
            consumer=row["consumer"],
            key=UUID(bytes=bytes(row["message_key"])),
            original_id=row["original_id"],
            message_type=row["type"],
            worker=row["worker"],
            claimed_at=_EPOCH + timedelta(microseconds=row["claimed_at"]),
            fingerprint=_bytes(row["fingerprint"]),
            source_position=row["source_position"],
            outputs=_outputs((row["outputs"] or ()) if with_outputs else ()),
        )


def _outputs(rows: Sequence[Any]) -> list[dict[str, Any]]:
    made = [{name: each[name] for name in _OF_OUTPUT} for each in rows]
    for each in made:
        each["output_id"] = UUID(bytes=bytes(each["output_id"]))
        each["body"] = bytes(each["body"])
    return sorted(made, key=lambda each: int(each["ordinal"]))


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
