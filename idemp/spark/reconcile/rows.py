"""A log in columns of ours: consumer, type, key, text, sent_at, position, fingerprint, fault."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, MapType, StructType

from idemp.errors import ConfigurationError
from idemp.identity import MAX_ID_BYTES
from idemp.spark.failures import unlogged
from idemp.spark.reconcile.bodies import with_bodies
from idemp.spark.reconcile.keys import envelope_fault, envelope_key, envelope_text, is_own_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from idemp.spark.reconcile.sent import Sent

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TYPES: Final = {
    "id": "string",
    "time": "timestamp",
    "type": "string",
    "consumer": "string",
    "source": "string",
    "headers": "string",
    "body": "binary",
    "digest": "binary",
    "position": "string",
}
_STRUCTURES: Final = (ArrayType, MapType, StructType)


def rows_of(sent: Sent) -> DataFrame:
    """What was sent, by the keys of the inbox.

    `text` is the id where the key is not written as it; a `fault` says why a row has no usable id.

    Raises:
        ConfigurationError: a column is missing; says which are there.
    """
    mapped = _for_consumers(sent, _mapped(sent))
    in_bodies = sent.app is not None or (sent.body is not None and sent.digest is None and not _is_structured(sent))
    return _apart(with_bodies(mapped, sent.app) if in_bodies else _with_envelope_ids(mapped))


def span_of(sent: Sent) -> tuple[datetime, datetime]:
    """The first and the last time in the log.

    Raises:
        ConfigurationError: a column is missing; there is no time.
    """
    time = f.unix_micros("time")
    first, last = _mapped(sent).agg(f.min(time), f.max(time)).collect()[0]
    if first is None:
        raise ConfigurationError(
            "What was sent has no row with a time.", fix="See that it is the right log; else say since and until."
        )
    return _EPOCH + timedelta(microseconds=first), _EPOCH + timedelta(microseconds=last)


def _mapped(sent: Sent) -> DataFrame:
    said = {name: _said(sent, name) for name in _TYPES}
    if sent.body is not None and _is_structured(sent):
        # Written anew it is not what the producer wrote, so that it says nothing about the inbox's fingerprint.
        said["body"] = f.to_json(said["body"])
        said["digest"] = said["body"] if sent.digest is None else said["digest"]
    # A value that can't be read is unknown; in Spark's ANSI mode, a plain cast would end the job.
    said["time"] = _in_calendar(said["time"].try_cast("timestamp"))
    return sent.frame.select(*(said[name].try_cast(kind).alias(name) for name, kind in _TYPES.items()))


def _in_calendar(time: Column) -> Column:
    """A time that Python has as well; one beyond the year 9999, or before the first, is one that can't be read."""
    return f.when(f.year(time).between(1, 9998), time)


def _said(sent: Sent, name: str) -> Column:
    expression: str | None = getattr(sent, name)
    column = f.expr("NULL" if expression is None else expression)
    try:
        with unlogged():
            kind = sent.frame.select(column).schema[0].dataType  # nothing is read
    except AnalysisException as error:
        raise ConfigurationError(
            f"What was sent has no {name} {expression!r}: {str(error).splitlines()[0]}",
            fix=f"It has the columns {', '.join(sent.frame.columns)}.",
        ) from error
    if name != "body" and isinstance(kind, _STRUCTURES):
        raise ConfigurationError(
            f"What was sent has a {kind.typeName()} as {name}, {expression!r}.", fix="Name a field of it."
        )
    return column


def _is_structured(sent: Sent) -> bool:
    return isinstance(sent.frame.select(f.expr(sent.body or "NULL")).schema[0].dataType, _STRUCTURES)


def _for_consumers(sent: Sent, mapped: DataFrame) -> DataFrame:
    names = list(dict.fromkeys(sent.consumers))
    if sent.consumer is not None:
        return mapped.where(f.col("consumer").isin(names))
    return mapped.withColumn("consumer", f.explode(f.array(*map(f.lit, names))))


def _with_envelope_ids(mapped: DataFrame) -> DataFrame:
    """Rows with the keys of their message ids, made by Spark alone."""
    message_id, source = f.col("id"), f.col("source")
    return mapped.select(
        "consumer",
        "type",
        envelope_key(message_id, source).alias("key"),
        f.when(~is_own_text(message_id, source), envelope_text(message_id, source)).alias("text"),
        f.col("time").alias("sent_at"),
        "position",
        f.col("digest").alias("fingerprint"),
        envelope_fault(message_id, source).alias("fault"),
    )


def _apart(rows: DataFrame) -> DataFrame:
    """Those without a usable id get a key of what else they have: the same in each run, and no other message's."""
    told = f.concat_ws("|", "fault", "text", "position", "sent_at", f.hex("fingerprint"))
    nobodys = f.unhex(f.substring(f.sha2(told, 256), 1, 32))
    faulty = f.col("fault").isNotNull()
    return rows.withColumns(
        {
            "key": f.when(faulty, nobodys).otherwise(f.col("key")),
            "text": f.when(faulty, f.substring("text", 1, MAX_ID_BYTES)).otherwise(f.col("text")),
        }
    )
