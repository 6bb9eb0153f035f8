"""The guard file, made by Spark from the archive: segment by segment, so that no machine has to hold all of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from idemp.lateguard import PROBES, SEGMENT_BYTES, Span, scope_of, segments_for, write
from idemp.spark.archive.folder import gaps

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from idemp.spark.archive.folder import Archive

_DIGEST_BYTES: Final = 24
_EMPTY: Final = bytes(SEGMENT_BYTES)


def build(spark: SparkSession, archive: Archive, path: Path, *, span: timedelta | None = None) -> dict[str, Span]:
    """Make the guard file anew from all runs of an archive; what it holds, by consumer.

    Args:
        spark: a session.
        archive: where the runs are; without any the file holds nothing. Where one is missing, it reaches back to the next.
        path: the file; workers see the new one with the next late message.
        span: leave out days that are longer ago; the file says so.
    """
    runs = archive.runs()
    earliest = datetime.now(UTC) - span if span is not None else None
    missing = gaps(runs)
    spans: dict[str, Span] = {}
    for run in runs:
        manifest = run.manifest
        rows = manifest.tables["inbox"].rows
        if earliest is not None:
            rows = sum(day["inbox"] for date, day in manifest.days.items() if date >= earliest.date().isoformat())
        known = spans.get(manifest.consumer)
        since = max(filter(None, (manifest.since, earliest, missing.get(manifest.consumer))))
        latest = known is None or manifest.until >= known.until
        spans[manifest.consumer] = Span(
            since=since if known is None or latest else known.since,
            until=manifest.until if known is None or latest else known.until,
            ids=rows + (known.ids if known is not None else 0),
        )
    if not runs:
        write(path, [_EMPTY], {})
        return {}
    frames = [spark.read.parquet(run.path("inbox")).select("consumer", "message_key", "date") for run in runs]
    ids = reduce(lambda one, other: one.unionByName(other), frames)
    if earliest is not None:
        ids = ids.where(F.col("date") >= F.lit(earliest.date()))
    count = segments_for(sum(each.ids for each in spans.values()))
    write(path, segments(ids, list(spans), count), spans)
    return spans


def segments(ids: DataFrame, consumers: list[str], count: int) -> Iterator[bytes]:
    """The segments of a guard file, in order.

    Args:
        ids: `consumer` and `message_key` of each.
        consumers: all that there are.
        count: how many segments.
    """
    scope: Column = F.lit(None).cast("binary")
    for name in consumers:
        scope = F.when(F.col("consumer") == name, F.lit(scope_of(name))).otherwise(scope)
    digest = F.substring(F.unhex(F.sha2(F.concat(scope, "message_key"), 256)), 1, _DIGEST_BYTES)

    def parted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import numpy as np
        import pyarrow as pa

        for batch in batches:
            words = _words(batch.column(0))
            chosen = (words[:, 0] % np.uint64(count)).astype("int32")
            yield pa.RecordBatch.from_arrays([pa.array(chosen), batch.column(0)], ["segment", "digest"])

    def filled(group: pa.Table) -> pa.Table:
        import pyarrow as pa

        number = group.column("segment")[0].as_py()
        bits = _filled(_words(group.column("digest").combine_chunks()))
        return pa.table({"segment": pa.array([number], pa.int32()), "bits": pa.array([bits], pa.binary())})

    digests = ids.select(digest.alias("digest")).mapInArrow(parted, "segment INT, digest BINARY")
    made = digests.groupBy("segment").applyInArrow(filled, "segment INT, bits BINARY").sort("segment")
    following = 0
    for row in made.toLocalIterator():
        yield from [_EMPTY] * (row["segment"] - following)
        yield bytes(row["bits"])
        following = row["segment"] + 1
    yield from [_EMPTY] * (count - following)


def _words(digests: pa.Array[Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The three numbers of each digest; as `idemp.lateguard.places_of` reads them."""
    import numpy as np

    return np.frombuffer(b"".join(each or b"" for each in digests.to_pylist()), dtype="<u8").reshape(-1, 3)


def _filled(words: np.ndarray[Any, np.dtype[np.uint64]]) -> bytes:
    """The bits of a segment."""
    import numpy as np

    position, step = words[:, 1], words[:, 2] | np.uint64(1)
    bits = np.zeros(SEGMENT_BYTES * 8, dtype=bool)
    mask = np.uint64(SEGMENT_BYTES * 8 - 1)
    for number in range(PROBES):
        bits[(position + np.uint64(number) * step) & mask] = True
    return np.packbits(bits, bitorder="little").tobytes()
