"""What was handled before is left out ahead of the tasks, to go faster; about all that is left the inbox decides.

A row is left out where a claim of the same id says that it came from the very place in the source that the row is at: a
place names one message, the same whenever the source is read. Bodies are not compared. What was handled online, or from
another place, or has an id that SQL can't tell, goes to the tasks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from idemp.columns import MAX_POSITION_BYTES
from idemp.spark.together import by_type, fields_of, header_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

    from idemp.handlers import Registry
    from idemp.settings import Settings
    from idemp.work import Registration

_SOURCE: Final = "idemp-handled"
_CLAIM: Final = "original_id STRING, source_position STRING"
_MOST_SENT_TO_ALL: Final = 500_000
"""Claims that each executor holds in memory, and the driver for a while: some 100 MB."""


@contextmanager
def without_handled(frame: DataFrame, registry: Registry, consumer: str, inbox: Settings) -> Iterator[DataFrame]:
    """Messages without those that a consumer handled from the same position, under the same id; for the time of a block.

    Args:
        frame: messages.
        registry: the consumer's types, which say what their ids are.
        consumer: its name.
        inbox: where its claims are.
    """
    from pyspark.sql import functions as f

    from idemp.spark.datasource import at

    spark = frame.sparkSession
    spark.dataSource.register(at(_SOURCE, inbox))
    claims = spark.read.format(_SOURCE).option("consumer", consumer).schema(_CLAIM).load()
    claims = claims.where("source_position IS NOT NULL").persist()
    same = (f.col("original_id") == by_type(registry, _text)) & (f.col("source_position") == _kept(f.col("position")))
    try:
        # Else the messages themselves would be sorted for the join; Spark can't guess how few claims there are.
        few = claims.count() <= _MOST_SENT_TO_ALL
        yield frame.join(f.broadcast(claims) if few else claims, same, "left_anti")
    finally:
        claims.unpersist()


def _text(item: Registration) -> Column:
    """A message's id, as its claim has it for people; NULL where only Python can tell."""
    from pyspark.sql import functions as f

    key = item.policy.key
    if key.name == "message_id":
        return f.col("id")
    if key.scope == "header":
        return header_of(key)
    values = [part for value in fields_of(key) for part in (f.lit(","), value)][1:] if key.fields else [f.lit(None)]
    return f.concat(f.lit(f"{item.message_type}#"), *values)


def _kept(position: Column) -> Column:
    """A position as a claim has it; see `idemp.bulk.rows.kept_position`."""
    from pyspark.sql import functions as f

    digest = f.concat(f.lit("sha256:"), f.sha2(position.cast("binary"), 256))
    return f.when(f.octet_length(position) > MAX_POSITION_BYTES, digest).otherwise(position)
