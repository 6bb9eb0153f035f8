"""Reconciliation of a log of sent messages with those that were handled, produced and confirmed.

One union of all facts about each message, one aggregate by message, one rule for each gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select

from idemp.app import App, load_app
from idemp.envelopes import read_delivery
from idemp.errors import ConfigurationError, UnknownType, Unreadable, describe_error
from idemp.handlers import Handler
from idemp.identity import made_at
from idemp.initiation import INITIATION
from idemp.messages import Delivery, read_properties
from idemp.policy import Duration, seconds
from idemp.process import Process
from idemp.settings import Settings
from idemp.spark.columns import MESSAGE, Columns
from idemp.spark.reading import Snapshot, read, snapshot
from idemp.spark.session import given_up
from idemp.sql.engine import Database
from idemp.sql.records.claims import shown_id

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Gap", "Reconciliation", "reconcile"]

IDENTIFIED: Final = "key string, type string, id string, sent_at double, misdated string, print binary, error string"
UNCHECKED: Final = "unchecked"
OF_ROWS: Final = ["properties", "due_at"]
"""Columns of retries and dead letters, beside those of messages."""


class Gap(Enum):
    """A kind of discrepancy. A message has at most one, the first that fits.

    Example:
        >>> Gap.LOST.meaning
        'sent, and neither handled, nor a retry or a dead letter, within the grace time'
    """

    UNUSABLE = "unusable"
    CONFLICT = "conflict"
    DEAD = "dead"
    MISDATED = "misdated"
    LOST = "lost"
    UNSENT = "unsent"
    INCOMPLETE = "incomplete"
    UNDISPATCHED = "undispatched"

    @property
    def meaning(self) -> str:
        """Description of the gap."""
        return {
            Gap.UNUSABLE: "sent without an id that can be used, unreadable, or of a type that the app does not know",
            Gap.CONFLICT: "sent again under its id with another body, or another message was handled under it",
            Gap.DEAD: "sent, and a dead letter",
            Gap.MISDATED: "not handled, and its time is before 2020, in the future or no number: it may be lost",
            Gap.LOST: "sent, and neither handled, nor a retry or a dead letter, within the grace time",
            Gap.UNSENT: "handled, and not in the log of sent messages",
            Gap.INCOMPLETE: "handled, and an output is not in the tables any more",
            Gap.UNDISPATCHED: "handled, and an output is in quarantine or not confirmed within the grace time",
        }[self]


@dataclass(frozen=True)
class Reconciliation:
    """The result of `reconcile`.

    Attributes:
        at: The moment of the snapshot, in seconds since 1970.
        counts: Messages by outcome: the gaps, and `handled`, `waiting` (a retry, or within the grace time), `forgotten`
            (the inbox has purged later claims) and `unchecked` (of types that are not opted in, or have a former identity).
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
        return not self.gap_count

    @property
    def gap_count(self) -> int:
        """Number of messages with a gap."""
        return sum(self.counts.get(gap.value, 0) for gap in Gap)

    def as_dict(self, limit: int = 100) -> dict[str, Any]:
        """Return the result for JSON, with at most `limit` gaps."""
        rows = [row.asDict() for row in self.gaps.orderBy("gap", "id").limit(limit).collect()]
        counts = {"clean": self.clean, "gap_count": self.gap_count, "counts": dict(self.counts)}
        return {"at": self.at, **counts, "gaps": rows}


def reconcile(
    app: str,
    sent: DataFrame,
    columns: Columns | None = None,
    *,
    grace: Duration = "15m",
    since: float | None = None,
    until: float | None = None,
    type: str | Sequence[str] = (),
    produces: Mapping[str, int] | None = None,
) -> Reconciliation:
    """Compare a log of messages that were sent to an app with its tables.

    A message is judged if its time is from `since` to `until`, or unknown. A claim without a message in the log is judged if it was
    made later than the grace time after `since`, and not after `until`: other claims may belong to messages outside of the log.

    Args:
        app: `module:name` of the app.
        sent: Messages that were sent to the app, each once or more often.
        columns: By default those of the names `id`, `type`, `time`, `headers` and `body`.
        grace: Time that a message and its outputs may take.
        since: In seconds since 1970; by default the time of the first message of the log.
        until: In seconds since 1970; by default the time of the last message of the log.
        type: The types of messages to judge; by default all.
        produces: The least number of outputs of each handled message, by type. Without it, outputs that are missing are found only
            if a later output of the same message, or their own pending row, is still stored.

    Raises:
        ConfigurationError: The log has no message to judge, or columns, types, app or tables are invalid.
        IdempError: Spark gave up a task that raised this error.

    Example:
        >>> def check(log: "DataFrame") -> bool:
        ...     return reconcile("shop.orders:app", log, Columns(time="sent_at"), grace="1h").clean
    """
    from pyspark.sql import functions as f

    loaded = load_app(app)
    loaded.configure()
    types = _known([type] if isinstance(type, str) else type, loaded, "type")
    least = dict(zip(_known(produces or {}, loaded, "produces"), (produces or {}).values(), strict=True))
    settings = loaded.settings
    if (engine := loaded.engine) is not None:
        settings = settings.model_copy(update={"database_url": engine.url.render_as_string(hide_password=False)})
    with given_up(), snapshot(settings) as moment:
        judge = _Judge(app, loaded, moment, seconds(grace, "grace"))
        log = judge.identified((columns or Columns()).of(sent)).persist()
        try:
            first, last, count = log.agg(f.min("sent_at"), f.max("sent_at"), f.count(f.lit(1))).collect()[0]
            if not count:
                raise ConfigurationError("the log of sent messages is empty, so nothing can be compared")
            window = _Window(first if since is None else since, last if until is None else until, types)
            if log.where(window.has("sent_at", "type")).isEmpty():
                raise ConfigurationError(
                    f"none of the {count} messages in the log is of these types and from {window.since} to {window.until} in seconds "
                    f"since 1970, so nothing can be compared: the times in the log are from {first} to {last}"
                )
            judged = judge.judged(log, window, least).persist()
            try:
                counts = {row["gap"]: int(row["count"]) for row in judged.groupBy("gap").count().collect()}
                gaps = judged.where(f.col("gap").isin([gap.value for gap in Gap]))
                gaps = gaps.withColumn("id", f.udf(_shown, useArrow=False)("id", "key")).localCheckpoint()
            finally:
                judged.unpersist()
        finally:
            log.unpersist()
    names = ("handled", "waiting", "forgotten", UNCHECKED, *(gap.value for gap in Gap))
    return Reconciliation(moment.at, {name: counts.get(name, 0) for name in names}, gaps)


def _known(types: Iterable[str], app: App, option: str) -> list[str]:
    """Return the types by the names of their handlers; a misspelt one would make the result look clean."""
    for type in types:
        if type not in app.handlers:
            known = ", ".join(sorted(app.handlers))
            raise ConfigurationError(f"{option}: no handler of {app.name} takes messages of type {type!r}: it has {known}")
    return [app.handlers[type].type for type in types]


@dataclass(frozen=True)
class _Window:
    """The messages to judge: a span of time, without limits if there are no times, and types; all if there are none."""

    since: float | None
    until: float | None
    types: Sequence[str]

    def has(self, at: str, type: str, after: float = 0.0) -> Column:
        """Return whether a row belongs to it; a row without a time does, so that no message can hide behind its time."""
        from pyspark.sql import functions as f

        low, high = -inf if self.since is None else self.since + after, inf if self.until is None else self.until
        inside = f.coalesce(f.col(at).between(low, high), f.lit(True))
        return inside & f.coalesce(f.col(type).isin(list(self.types)), f.lit(False)) if self.types else inside


class _Judge:
    """The rules, and the moment and grace time by which they are applied."""

    def __init__(self, name: str, app: App, moment: Snapshot, grace: float) -> None:
        self._app, self._name, self._moment, self._grace = app, name, moment, grace
        self._settled, self._settings = moment.at - grace, moment.settings

    def identified(self, messages: DataFrame) -> DataFrame:
        """Return the key of each message, found as its handler does."""
        name, settings, latest = self._name, self._settings, self._moment.at + self._grace

        def identify(batches: Any) -> Iterator[Any]:
            yield from _identified(name, settings, latest, batches)

        return messages.mapInArrow(identify, IDENTIFIED)

    def judged(self, sent: DataFrame, window: _Window, least: Mapping[str, int]) -> DataFrame:
        """Return a row for each message, with its outcome."""
        from pyspark.sql import functions as f

        consumer, unreadable = self._app.name, f.concat(f.lit("?"), f.monotonically_increasing_id().cast("string"))
        spark, ours, key = sent.sparkSession, f.col("consumer") == consumer, f.col("message_key").alias("key")
        inbox, outputs, pending, parked = (
            read(spark, table, self._moment) for table in ("inbox", "outputs", "pending", "messages")
        )
        overdue = (f.col("due_at") <= self._settled) | f.col("quarantined_at").isNotNull()
        rows = [
            sent.withColumn("key", f.coalesce("key", unreadable)).withColumn("sends", f.lit(1))
            .withColumn("judged", window.has("sent_at", "type").cast("int")),
            inbox.where(ours & (f.col("type") != INITIATION)).select(
                key, f.col("type").alias("claimed_type"), f.col("fingerprint").alias("claimed_print"),
                f.decode("original_id", "UTF-8").alias("claimed_id"), "claimed_at",
            ),
            outputs.where(ours).select(key, "ordinal", f.lit(1).alias("outputs")),
            pending.where(ours).select(key, "ordinal", f.lit(1).alias("pending"), overdue.cast("int").alias("overdue")),
            self.identified(_as_messages(parked.where(f.col("queue") == consumer))).where("key IS NOT NULL").select(
                "key", f.when(f.col("error") == "", 1).alias("dead"), f.lit(1).alias("rows")
            ),
        ]  # fmt: skip
        union = rows[0]
        for part in rows[1:]:
            union = union.unionByName(part, allowMissingColumns=True)
        largest = ("type", "id", "claimed_type", "claimed_id", "claimed_print", "claimed_at", "ordinal", "misdated", "error")
        total = ("sends", "judged", "outputs", "pending", "overdue", "dead", "rows")
        by_key = union.groupBy("key").agg(
            f.min("sent_at").alias("sent_at"), f.max("sent_at").alias("sent_last"), f.min("print").alias("least"),
            f.max("print").alias("greatest"), f.min("type").alias("least_type"),
            *(f.max(name).alias(name) for name in largest), *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in total),
        )  # fmt: skip
        expected = f.greatest(f.coalesce(f.col("ordinal") + 1, f.lit(0)), _by_type("claimed_type", least, 0))
        missing = f.format_string("%d of %d outputs are stored", f.col("outputs"), expected)
        text = f.when(f.col("gap") == Gap.INCOMPLETE.value, missing).when(f.col("gap") == Gap.MISDATED.value, f.col("misdated"))
        return by_key.withColumn("gap", self._gap(window, expected)).select(
            "gap", f.coalesce("type", "claimed_type").alias("type"), f.coalesce("id", "claimed_id").alias("id"), "key",
            "sent_at", "claimed_at", "sends", "outputs", "pending", f.coalesce(text, "error").alias("error"),
        ).where("gap IS NOT NULL")  # fmt: skip

    def _gap(self, window: _Window, expected: Column) -> Column:
        from pyspark.sql import functions as f

        sent, claimed = f.col("sends") > 0, f.col("claimed_at").isNotNull()
        judged = f.when(sent, f.col("judged") > 0).otherwise(claimed & window.has("claimed_at", "claimed_type", self._grace))
        other = f.col("least") != f.col("greatest")
        other |= f.col("claimed_print").isNotNull() & (f.col("claimed_print") != f.col("greatest"))
        other |= (f.col("least_type") != f.col("type")) | (f.col("claimed_type") != f.col("type"))
        handlers = self._app.handlers.values()
        known = [handler.type for handler in handlers if handler.identity and handler.identity.former is None]
        # A claim is never older than its message, so of a message that was sent later the inbox would still have it.
        forgotten = f.col("sent_last") <= _by_type("type", _purged(self._moment, self._app.name), -inf)
        return (
            f.when(~judged, None)
            .when(f.col("error") == UNCHECKED, UNCHECKED)
            .when(f.col("error").isNotNull(), Gap.UNUSABLE.value)
            .when(sent & f.coalesce(other, f.lit(False)), Gap.CONFLICT.value)
            .when(sent & ~claimed & (f.col("dead") > 0), Gap.DEAD.value)
            .when(sent & ~claimed & (f.col("rows") > 0), "waiting")
            .when(sent & ~claimed & f.col("misdated").isNotNull(), Gap.MISDATED.value)
            .when(sent & ~claimed & (f.col("sent_last") > self._settled), "waiting")
            .when(sent & ~claimed & forgotten, "forgotten")
            .when(sent & ~claimed, Gap.LOST.value)
            .when(~sent & f.coalesce(f.col("claimed_type").isin(known), f.lit(False)), Gap.UNSENT.value)
            .when(f.col("outputs") < expected, Gap.INCOMPLETE.value)
            .when(f.col("overdue") > 0, Gap.UNDISPATCHED.value)
            .when(sent, "handled")
        )


def _by_type(column: str, values: Mapping[str, float], other: float) -> Column:
    """Return the value for the type in a column."""
    from pyspark.sql import functions as f

    found = f.lit(other)
    for type, value in values.items():
        found = f.when(f.col(column) == type, value).otherwise(found)
    return found


def _purged(moment: Snapshot, consumer: str) -> dict[str, float]:
    """Return the time of the latest claim that was purged, by type."""
    database = Database(moment.settings.database_url, moment.settings.table_prefix)
    identity = database.tables.identity
    try:
        with database.engine.connect() as connection:
            rows = connection.execute(select(identity.c.type, identity.c.purged_before).where(identity.c.consumer == consumer))
            return {row.type: row.purged_before for row in rows if row.purged_before is not None}
    finally:
        database.close()


def _shown(original: str | None, key: str) -> str | None:
    return None if original is None else shown_id(original, original if key.startswith("?") else key)


def _as_messages(parked: DataFrame) -> DataFrame:
    """Return retries and dead letters as messages, whose properties stand in a column of their own, since no producer writes that."""
    from pyspark.sql import functions as f

    parts = (part.split() for part in MESSAGE.split(", "))
    empty = (f.lit(None).cast(kind).alias(name) for name, kind in parts if name != "body")
    return parked.select(*empty, "body", f.col("headers").alias(OF_ROWS[0]), OF_ROWS[1])


def _identified(name: str, settings: Settings, latest: float, batches: Any) -> Iterator[Any]:
    """Identify messages, in a Python worker."""
    import pyarrow as pa

    from idemp.bulk.rows import deliveries

    app = load_app(name)
    app.process = Process(app.engine, settings)
    app.configure()
    kinds = {"string": pa.string(), "double": pa.float64(), "binary": pa.binary()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in map(str.split, IDENTIFIED.split(", "))])
    for batch in batches:
        messages = deliveries(app.name, pa.Table.from_batches([batch]))
        of_rows = batch.select(OF_ROWS).to_pylist() if OF_ROWS[0] in batch.schema.names else [{}] * batch.num_rows
        found = [asdict(_identify(app, each, latest, row)) for each, row in zip(messages, of_rows, strict=True)]
        yield pa.RecordBatch.from_pylist(found, schema=schema)


@dataclass(slots=True)
class _Identified:
    """A message by its key; the fields are the columns of `IDENTIFIED`.

    Attributes:
        id: Original id, with its JSON type.
        misdated: What is wrong with its time; None if it can be believed, or there is none.
        error: Why it has no key, or `UNCHECKED`; the empty text for a dead letter.
    """

    type: str | None
    id: str | None
    key: str | None = None
    sent_at: float | None = None
    misdated: str | None = None
    print: bytes | None = None
    error: str | None = None


def _identify(app: App, delivery: Delivery, latest: float, row: Mapping[str, Any]) -> _Identified:
    """Identify a message, which cannot have been sent after `latest`, or that of a row of the database."""
    if row:
        delivery = Delivery(delivery.queue, read_properties(row["properties"]), delivery.body)
    message, error = delivery, None
    handler: Handler | None = None
    try:
        message = read_delivery(delivery)
        handler = app.handlers.find(message)
        claim = handler.identify(message) if handler.identity is not None and handler.identity.former is None else None
    except (Unreadable, UnknownType) as raised:
        error = describe_error(raised)
    properties = message.properties
    type, id = properties.get("type") or app.handlers.default, properties.get("message_id")
    found = _Identified(
        handler.type if handler else type or None, f"s:{id}" if id is not None else None, sent_at=made_at(properties)
    )
    stamp = properties.get("timestamp") if found.sent_at is None else found.sent_at
    if stamp is not None and (found.sent_at is None or found.sent_at > latest):
        found.sent_at, found.misdated = None, f"its time {stamp!r} is before 2020, in the future or no number of seconds"
    if error is not None or claim is None:
        found.error = error or UNCHECKED
        return found
    found.key, found.id = str(claim.key), claim.original
    found.print = None if claim.skips_conflicts else claim.fingerprint
    found.error = "" if row and row["due_at"] is None else None
    return found
