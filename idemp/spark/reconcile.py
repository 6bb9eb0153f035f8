"""Reconciliation of a log of sent messages with those that were handled, produced and confirmed.

One union of all facts about each message, one aggregate by message, one rule for each gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from idemp.app import App, load_app
from idemp.cloudevents import read_event
from idemp.errors import ConfigurationError, UnknownType, Unreadable, describe_error
from idemp.handlers import Handler
from idemp.identity import made_at
from idemp.initiation import INITIATION
from idemp.messages import Delivery, read_properties
from idemp.policy import Duration, seconds
from idemp.process import Process
from idemp.settings import Settings
from idemp.spark.columns import Columns
from idemp.spark.reading import Snapshot, read, snapshot
from idemp.spark.session import given_up

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Gap", "Reconciliation", "reconcile"]

IDENTIFIED: Final = "key string, type string, id string, sent_at double, print binary, error string"
UNCHECKED: Final = "unchecked"


class Gap(Enum):
    """A kind of discrepancy. A message has at most one, the first that fits.

    Example:
        >>> Gap.LOST.meaning
        'sent, and neither handled nor parked within the grace time'
    """

    UNUSABLE = "unusable"
    CONFLICT = "conflict"
    DEAD = "dead"
    LOST = "lost"
    UNSENT = "unsent"
    UNDISPATCHED = "undispatched"

    @property
    def meaning(self) -> str:
        """Description of the gap."""
        return {
            Gap.UNUSABLE: "sent without an id that can be used, unreadable, or of a type that the app does not know",
            Gap.CONFLICT: "sent again under its id with another body, or another message was handled under it",
            Gap.DEAD: "sent, and a dead letter",
            Gap.LOST: "sent, and neither handled nor parked within the grace time",
            Gap.UNSENT: "handled, and not in the log of sent messages",
            Gap.UNDISPATCHED: "handled, and an output is in quarantine or not confirmed within the grace time",
        }[self]


@dataclass(frozen=True)
class Reconciliation:
    """The result of `reconcile`.

    Attributes:
        at: The moment of the snapshot, in seconds since 1970.
        counts: Messages by outcome: the gaps, and `handled`, `waiting` (a retry, or within the grace time), `forgotten`
            (older than the retention window) and `unchecked` (of types that are not opted in, or have a former identity).
        gaps: A row for each message with a gap: gap, type, id, key, sent_at, claimed_at, sends, outputs, pending, error.

    Example:
        >>> Reconciliation(0.0, {"handled": 7, "lost": 0}, None).clean
        True
    """

    at: float
    counts: Mapping[str, int]
    gaps: DataFrame

    @property
    def clean(self) -> bool:
        """True if there are no gaps."""
        return not any(self.counts.get(gap.value) for gap in Gap)

    def as_dict(self, limit: int = 100) -> dict[str, Any]:
        """Return the result for JSON, with at most `limit` gaps."""
        rows = [row.asDict() for row in self.gaps.orderBy("gap", "id").limit(limit).collect()]
        return {"at": self.at, "clean": self.clean, "counts": dict(self.counts), "gaps": rows}


def reconcile(
    app: str, sent: DataFrame, columns: Columns | None = None, *, grace: Duration = "15m", since: float | None = None
) -> Reconciliation:
    """Compare a log of messages that were sent to an app with its tables.

    Args:
        app: `module:name` of the app.
        sent: Messages that were sent to the app, each once or more often.
        columns: By default those of the names `id`, `type`, `time`, `headers` and `body`.
        grace: Time that a message and its outputs may take.
        since: Start of the log, in seconds since 1970; by default the time of its first message. Claims before it, and within the
            grace time after it, may belong to messages that were sent earlier.

    Raises:
        ConfigurationError: The log is empty, or columns, app or tables are invalid.
        IdempError: Spark gave up a task that raised this error.

    Example:
        >>> def check(log: "DataFrame") -> bool:
        ...     return reconcile("shop.orders:app", log, Columns(time="sent_at"), grace="1h").clean
    """
    from pyspark.sql import functions as f

    loaded, spark = load_app(app), sent.sparkSession
    loaded.configure()
    settings = loaded.settings
    if (engine := loaded.engine) is not None:
        settings = settings.model_copy(update={"database_url": engine.url.render_as_string(hide_password=False)})
    with given_up(), snapshot(settings) as moment:
        judge = _Judge(app, loaded, moment, seconds(grace, "grace"))
        log = judge.identified((columns or Columns()).of(sent)).persist()
        first, count = log.agg(f.min("sent_at"), f.count(f.lit(1))).collect()[0]
        if not count:
            raise ConfigurationError("the log of sent messages is empty, so nothing can be compared")
        judged = judge.judged(
            log, read(spark, "inbox", moment), read(spark, "outputs", moment), read(spark, "messages", moment),
            first if since is None else since,
        ).persist()  # fmt: skip
        try:
            counts = {row["gap"]: int(row["count"]) for row in judged.groupBy("gap").count().collect()}
            gaps = judged.where(f.col("gap").isin([gap.value for gap in Gap])).localCheckpoint()
        finally:
            judged.unpersist()
            log.unpersist()
    names = ("handled", "waiting", "forgotten", UNCHECKED, *(gap.value for gap in Gap))
    return Reconciliation(moment.at, {name: counts.get(name, 0) for name in names}, gaps)


class _Judge:
    """The rules, and the moment and grace time by which they are applied."""

    def __init__(self, name: str, app: App, moment: Snapshot, grace: float) -> None:
        self._app, self._name, self._at, self._settled = app, name, moment.at, moment.at - grace
        self._grace, self._settings = grace, app.settings

    def identified(self, messages: DataFrame) -> DataFrame:
        """Return the key of each message, found as its handler does."""
        name, settings = self._name, self._settings

        def identify(batches: Any) -> Iterator[Any]:
            yield from _identified(name, settings, batches)

        return messages.mapInArrow(identify, IDENTIFIED)

    def judged(self, sent: DataFrame, inbox: DataFrame, outputs: DataFrame, parked: DataFrame, since: float | None) -> DataFrame:
        """Return a row for each message, with its outcome."""
        from pyspark.sql import functions as f

        consumer, unreadable = self._app.name, f.concat(f.lit("?"), f.monotonically_increasing_id().cast("string"))
        ours = f.col("consumer") == consumer
        handlers = self._app.handlers.values()
        known = [f.lit(handler.type) for handler in handlers if handler.identity and handler.identity.former is None]
        overdue = f.col("pending") & (f.col("due_at") <= self._settled) | f.col("quarantined_at").isNotNull()
        waiting = parked.where(f.col("queue") == consumer)
        rows = [
            sent.withColumn("key", f.coalesce("key", unreadable)).withColumn("sends", f.lit(1)),
            inbox.where(ours & (f.col("type") != INITIATION)).select(
                f.col("message_key").alias("key"), f.col("type").alias("claimed_type"), f.col("fingerprint").alias("claimed_print"),
                f.decode(f.substring("original_id", 3, 10_000), "UTF-8").alias("claimed_id"), "claimed_at",
            ),
            outputs.where(ours).select(
                f.col("message_key").alias("key"), f.lit(1).alias("outputs"), f.col("pending").cast("int").alias("pending"),
                overdue.cast("int").alias("overdue"),
            ),
            self.identified(_as_messages(waiting)).where("key IS NOT NULL").select(
                "key", f.when(f.col("error") == "", 1).alias("dead"), f.lit(1).alias("rows")
            ),
        ]  # fmt: skip
        union = rows[0]
        for part in rows[1:]:
            union = union.unionByName(part, allowMissingColumns=True)
        largest = ("type", "id", "claimed_type", "claimed_id", "claimed_print", "claimed_at", "error")
        total = ("sends", "outputs", "pending", "overdue", "dead", "rows")
        by_key = union.groupBy("key").agg(
            f.min("sent_at").alias("sent_at"), f.max("sent_at").alias("sent_last"), f.min("print").alias("least"),
            f.max("print").alias("greatest"), f.min("type").alias("least_type"),
            *(f.max(name).alias(name) for name in largest), *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in total),
        )  # fmt: skip
        gap = self._gap(since, f.coalesce(f.col("claimed_type").isin(known), f.lit(False)))
        return by_key.select(
            gap.alias("gap"), f.coalesce("type", "claimed_type").alias("type"), f.coalesce("id", "claimed_id").alias("id"), "key",
            "sent_at", "claimed_at", "sends", "outputs", "pending", "error",
        ).where("gap IS NOT NULL")  # fmt: skip

    def _gap(self, since: float | None, known: Column) -> Column:
        from pyspark.sql import functions as f

        sent, claimed = f.col("sends") > 0, f.col("claimed_at").isNotNull()
        other = f.col("least") != f.col("greatest")
        other |= f.col("claimed_print").isNotNull() & (f.col("claimed_print") != f.col("greatest"))
        other |= (f.col("least_type") != f.col("type")) | (f.col("claimed_type") != f.col("type"))
        early = f.col("claimed_at") <= (float("-inf") if since is None else since + self._grace)
        retention = f.lit(float("inf"))
        for handler in self._app.handlers.values():
            if handler.identity is not None:
                retention = f.when(f.col("type").isin(handler.types), handler.identity.retention).otherwise(retention)
        return (
            f.when(f.col("error") == UNCHECKED, UNCHECKED)
            .when(f.col("error").isNotNull(), Gap.UNUSABLE.value)
            .when(sent & f.coalesce(other, f.lit(False)), Gap.CONFLICT.value)
            .when(sent & ~claimed & (f.col("dead") > 0), Gap.DEAD.value)
            .when(sent & ~claimed & (f.col("rows") > 0), "waiting")
            .when(sent & ~claimed & (f.col("sent_last") > self._settled), "waiting")
            .when(sent & ~claimed & (f.col("sent_last") < self._at - retention), "forgotten")
            .when(sent & ~claimed, Gap.LOST.value)
            .when(~sent & claimed & known & ~early, Gap.UNSENT.value)
            .when(claimed & (f.col("overdue") > 0), Gap.UNDISPATCHED.value)
            .when(sent & claimed, "handled")
        )


def _as_messages(parked: DataFrame) -> DataFrame:
    """Return retries and dead letters as messages whose properties are one header."""
    from pyspark.sql import functions as f

    kept = f.struct(f.decode("headers", "UTF-8").alias(_PROPERTIES), f.col("due_at").cast("string").alias(_DUE))
    nothing = f.lit(None)
    return parked.select(
        nothing.cast("string").alias("id"), nothing.cast("string").alias("type"), nothing.cast("double").alias("time"),
        f.to_json(kept).alias("headers"), "body",
    )  # fmt: skip


_PROPERTIES: Final = "idemp-properties"
_DUE: Final = "idemp-due"


def _identified(name: str, settings: Settings, batches: Any) -> Iterator[Any]:
    """Identify messages, in a Python worker."""
    import pyarrow as pa

    from idemp.bulk.rows import deliveries

    app = load_app(name)
    app.process = Process(app.engine, settings)
    app.configure()
    kinds = {"string": pa.string(), "double": pa.float64(), "binary": pa.binary()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in map(str.split, IDENTIFIED.split(", "))])
    for batch in batches:
        rows = [_identify(app, delivery) for delivery in deliveries(app.name, pa.Table.from_batches([batch]))]
        yield pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


def _identify(app: App, delivery: Delivery) -> tuple[str | None, str | None, str | None, float | None, bytes | None, str | None]:
    """Return key, type, id, time, fingerprint and error of a message. A dead letter has the error ''."""
    headers = delivery.properties.get("headers") or {}
    parked = isinstance(headers, dict) and _PROPERTIES in headers
    if parked:
        delivery = Delivery(delivery.queue, read_properties(headers[_PROPERTIES].encode()), delivery.body)
    with suppress(Unreadable):
        delivery = read_event(delivery)
    properties = delivery.properties
    type = properties.get("type") or app.handlers.default
    id, at = properties.get("message_id"), made_at(properties)
    handler: Handler | None = app.handlers.get(type)
    if handler is None:
        return None, type or None, id, at, None, describe_error(UnknownType(f"no handler takes messages of type {type!r}"))
    if handler.identity is None or handler.identity.former is not None:
        return None, handler.type, id, at, None, UNCHECKED
    try:
        claim = handler.identify(delivery)
    except Unreadable as error:
        return None, handler.type, id, at, None, describe_error(error)
    assert claim is not None
    fingerprint = None if claim.skips_conflicts else claim.fingerprint
    dead = "" if parked and headers.get(_DUE) is None else None
    return str(claim.key), handler.type, claim.original[2:], at, fingerprint, dead
