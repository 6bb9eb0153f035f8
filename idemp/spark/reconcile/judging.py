"""The judgement: one union of what was sent, claimed and produced, one aggregate by message, one rule for each finding."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from idemp.fingerprint import PLAIN, REWRITTEN
from idemp.initiation import INITIATION_TYPE
from idemp.spark.reconcile.keys import key_text
from idemp.spark.reconcile.terms import Fate, Kind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from idemp.spark.reconcile.terms import Terms

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FINGERPRINT_BYTES: Final = 19
_SCHEME_BYTES: Final = 3
MESSAGE: Final = ("key", "consumer")
"""In this order: Spark sorts by it, and compares eight bytes at once where the first of them tell rows apart."""
DETAIL: Final = ("key", "text", "sent_at", "claimed_at", "sends", "outputs", "pending", "quarantined", "fault")


def by_message(sent: DataFrame, inbox: DataFrame, outputs: DataFrame) -> DataFrame:
    """One row for each message, whoever knows of it.

    Outer joins would do the same, in half as long again.

    Args:
        sent: as `Sent.rows` has it.
        inbox: consumer, type, message_key, original_id, claimed_at, fingerprint.
        outputs: consumer, message_key, pending, quarantined.
    """
    what = [_sent(sent), _claimed(inbox), _produced(outputs)]
    rows = what[0].unionByName(what[1], allowMissingColumns=True).unionByName(what[2], allowMissingColumns=True)
    # Texts among what is summed up make Spark sort: once, where the rows are together already.
    return (
        rows.repartition("key")
        .groupBy(*MESSAGE)
        .agg(
            f.coalesce(f.max("claimed_type"), f.max("sent_type"), f.lit("")).alias("type"),
            f.max("text").alias("text"),
            f.min("sent_at").alias("sent_at"),
            _total("sends"),
            (f.min("place") != f.max("place")).alias("other_places"),
            f.count("place").alias("placed"),
            f.min("sent_fingerprint").alias("least_fingerprint"),
            f.max("sent_fingerprint").alias("greatest_fingerprint"),
            f.max("fault").alias("fault"),
            f.max("claimed_at").alias("claimed_at"),
            f.max("claimed_fingerprint").alias("claimed_fingerprint"),
            _total("outputs"),
            _total("pending"),
            _total("quarantined"),
        )
    )


def judged(messages: DataFrame, terms: Terms) -> DataFrame:
    """What became of each message of `by_message`, and what is wrong with it."""
    with_fate = messages.withColumn("fate", _fate(terms)).withColumn("conflicts", _conflicts())
    outside = f.col("fate") == Fate.OUTSIDE
    found = f.array_compact(f.array(*(f.when(rule, kind) for kind, rule in _rules(terms).items())))
    return with_fate.select(
        "consumer",
        "type",
        f.when(~outside, f.date_trunc("hour", f.coalesce("sent_at", "claimed_at"))).alias("hour"),
        "fate",
        f.when(outside, f.array().cast("array<string>")).otherwise(found).alias("kinds"),
        *DETAIL,
    )


def collapsed(messages: DataFrame) -> DataFrame:
    """Messages with findings one by one, with a `detail`; all others as counts: small, unless much is wrong."""
    detail = f.when(f.size("kinds") > 0, f.struct(*DETAIL)).alias("detail")
    return messages.groupBy("consumer", "type", "hour", "fate", "kinds", detail).agg(
        f.count(f.lit(1)).alias("messages"), _total("sends"), _total("outputs"), _total("pending")
    )


def _sent(rows: DataFrame) -> DataFrame:
    return rows.select(
        *MESSAGE,
        f.col("type").alias("sent_type"),
        "text",
        "sent_at",
        f.when(f.col("position").isNotNull(), f.xxhash64("position")).alias("place"),
        _comparable("fingerprint").alias("sent_fingerprint"),
        "fault",
        f.lit(1).alias("sends"),
    )


def _claimed(inbox: DataFrame) -> DataFrame:
    return inbox.select(
        "consumer",
        f.col("message_key").alias("key"),
        f.col("type").alias("claimed_type"),
        f.when(f.col("original_id") != key_text(f.col("message_key")), f.col("original_id")).alias("text"),
        "claimed_at",
        _comparable("fingerprint").alias("claimed_fingerprint"),
    )


def _produced(outputs: DataFrame) -> DataFrame:
    return outputs.select(
        "consumer",
        f.col("message_key").alias("key"),
        f.lit(1).alias("outputs"),
        f.col("pending").cast("int").alias("pending"),
        f.col("quarantined").cast("int").alias("quarantined"),
    )


def _total(name: str) -> Column:
    return f.coalesce(f.sum(name), f.lit(0)).alias(name)


def _fate(terms: Terms) -> Column:
    sent, claimed = f.col("sends") > 0, f.col("claimed_at").isNotNull()
    sent_at = f.col("sent_at")
    return (
        f.when(~_is_inside(terms), Fate.OUTSIDE)
        .when(f.col("fault").isNotNull(), Fate.UNUSABLE)
        .when(sent & claimed, Fate.HANDLED)
        .when(sent & (sent_at < _kept_since(terms)), Fate.UNKNOWN)
        .when(sent & (sent_at > _moment(terms.settled)), Fate.NOT_YET)
        .when(sent, Fate.LOST)
        .when(f.col("type") == INITIATION_TYPE, Fate.INITIATED)
        .otherwise(Fate.UNKNOWN_ORIGIN)
    )


def _is_inside(terms: Terms) -> Column:
    """Whether the log would have it: of a message by when it was sent, of others by when they were claimed."""
    sent = f.col("sent_at").isNull() | f.col("sent_at").between(_moment(terms.since), _moment(terms.until))
    claimed = f.coalesce(
        f.col("claimed_at").between(_moment(terms.claims_since), _moment(terms.until)), f.expr("false")
    )
    return f.when(f.col("sends") > 0, sent).otherwise(claimed)


def _kept_since(terms: Terms) -> Column:
    horizon = _moment(terms.kept_since(terms.retention))
    if not terms.windows:
        return horizon
    told = [(f.lit(name), _moment(terms.kept_since(window))) for name, window in terms.windows.items()]
    return f.coalesce(f.create_map(*(part for pair in told for part in pair))[f.col("type")], horizon)


def _comparable(name: str) -> Column:
    """A fingerprint, with one version for all that can be compared."""
    column = f.col(name)
    rewritten = (f.octet_length(column) == _FINGERPRINT_BYTES) & (
        f.hex(f.substring(column, 1, 1)) == f"{REWRITTEN:02X}"
    )
    return f.when(rewritten, f.concat(f.lit(bytes([PLAIN])), f.substring(column, 2, _FINGERPRINT_BYTES))).otherwise(
        column
    )


def _conflicts() -> Column:
    """Whether two bodies are proven to differ; see `idemp.fingerprint.fingerprints_conflict`."""
    least, greatest, claimed = f.col("least_fingerprint"), f.col("greatest_fingerprint"), f.col("claimed_fingerprint")
    comparable = (
        (f.octet_length(least) == _FINGERPRINT_BYTES)
        & (f.octet_length(claimed) == _FINGERPRINT_BYTES)
        & (f.substring(least, 1, _SCHEME_BYTES) == f.substring(claimed, 1, _SCHEME_BYTES))
    )
    return f.coalesce((least != greatest) | (comparable & (least != claimed)), f.expr("false"))


def _rules(terms: Terms) -> dict[Kind, Column]:
    fate, conflicts, claimed_at = f.col("fate"), f.col("conflicts"), f.col("claimed_at")
    again = f.col("other_places") | ((f.col("sends") > 1) & (f.col("placed") < f.col("sends")))
    overdue = (f.col("pending") > 0) & (claimed_at <= _moment(terms.settled))
    return {
        Kind.LOST: fate == Fate.LOST,
        Kind.CONFLICTING: conflicts & (fate != Fate.UNUSABLE),
        Kind.UNDISPATCHED: claimed_at.isNotNull() & ((f.col("quarantined") > 0) | overdue),
        Kind.UNKNOWN_ORIGIN: fate == Fate.UNKNOWN_ORIGIN,
        Kind.UNUSABLE: fate == Fate.UNUSABLE,
        Kind.DUPLICATED: again & ~conflicts & (fate != Fate.UNUSABLE),
        Kind.LATE: (fate == Fate.HANDLED) & (claimed_at > f.col("sent_at") + _interval(terms.grace)),
    }


def _moment(moment: datetime) -> Column:
    """A literal that no session's time zone moves."""
    return f.timestamp_micros(f.lit((moment - _EPOCH) // timedelta(microseconds=1)))


def _interval(duration: timedelta) -> Column:
    return f.make_dt_interval(secs=f.lit(duration.total_seconds()))
