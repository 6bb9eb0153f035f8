"""Outputs of an app as rows of a Delta table, each id once. The table is written by delta-rs, so Spark needs no jar for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from idemp.app import load_app
from idemp.errors import ConfigurationError, Unavailable, describe_error, needs
from idemp.spark.reading import read, snapshot
from idemp.spark.session import given_up

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["to_lake"]

COLUMNS: Final = (
    "output_id string, consumer string, message_key string, ordinal int, type string, kind string, exchange string, "
    "routing_key string, headers string, body string, claimed_at timestamp, worker string"
)
ROWS: Final = 50_000  # of a commit
BYTES: Final = 64 * 1024 * 1024
ATTEMPTS: Final = 20  # of a commit: one of two writers that conflict always succeeds


def to_lake(spark: SparkSession, app: str, table: str, *, run: str | None = None) -> int:
    """Insert the stored outputs of an app into a Delta table, except those that it has, and return how many were inserted.

    If this fails, run it again. Several may run at once. One Spark task writes, in commits of at most 50,000 rows, so a table on a
    cluster has to be in a file system that its executors share.

    Args:
        spark: Spark session.
        app: `module:name` of the app.
        table: Folder or URL of the table, which is created if there is none. Delta-rs takes credentials from the environment.
        run: Only outputs of messages that this run of a sink handled; by default all that the database has.

    Raises:
        NotInstalled: The package `deltalake` is missing.
        ConfigurationError: App, database or table are invalid; nothing was inserted.
        IdempError: Spark gave up the task. Earlier commits stay.

    Example:
        >>> def export(spark: "SparkSession") -> int:
        ...     return to_lake(spark, "shop.orders:app", "s3://lake/outputs", run="backfill-2026")
    """
    from pyspark.sql import functions as f

    loaded = load_app(app)
    settings = loaded.settings
    if (engine := loaded.engine) is not None:
        settings = settings.model_copy(update={"database_url": engine.url.render_as_string(hide_password=False)})
    _create(table)
    with given_up(), snapshot(settings) as moment:
        ours = f.col("consumer") == loaded.name
        claims = read(spark, "inbox", moment).where(ours).select("message_key", "worker", "claimed_at")
        if run is not None:
            claims = claims.where(f.col("worker") == run)
        outputs = read(spark, "outputs", moment).where(ours).join(claims, "message_key", "left" if run is None else "inner")
        headers = f.make_valid_utf8(f.col("headers").cast("string"))
        found = outputs.withColumns({
            "headers": headers,
            "type": f.get_json_object(headers, "$.type"),
            "body": f.make_valid_utf8(f.col("body").cast("string")),
            "claimed_at": f.timestamp_micros((f.col("claimed_at") * 1e6).cast("bigint")),
        }).select(*_names())  # fmt: skip
        # In the order of ids, a batch concerns few files of the table, and few concurrent commits conflict with it.
        ordered = found.repartitionByRange("output_id").sortWithinPartitions("output_id").coalesce(1)

        size = ROWS

        def insert(batches: Any) -> Iterator[Any]:
            yield from _insert(table, batches, size)

        return sum(row.inserted for row in ordered.mapInArrow(insert, "inserted bigint").collect())


def _names() -> list[str]:
    return [column.split()[0] for column in COLUMNS.split(", ")]


def _create(table: str) -> None:
    """Create the table unless there is one."""
    with needs("lake"):
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError, DeltaError
    import pyarrow as pa

    kinds = {"string": pa.string(), "int": pa.int32(), "timestamp": pa.timestamp("us", "UTC")}
    columns = [column.split() for column in COLUMNS.split(", ")]
    try:
        with suppress(CommitFailedError):  # another writer has created it just now
            DeltaTable.create(table, pa.schema([pa.field(name, kinds[kind]) for name, kind in columns]), mode="ignore")
        present = {field.name for field in DeltaTable(table).schema().fields}
    except (DeltaError, OSError) as error:
        raise ConfigurationError(
            f"{table} cannot be opened as a Delta table: {describe_error(error)}; nothing was inserted"
        ) from None
    if missing := [name for name in _names() if name not in present]:
        raise ConfigurationError(
            f"{table} is a table without the columns {', '.join(missing)}: name another; nothing was inserted"
        )


def _insert(table: str, batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Insert sorted rows, in a Python worker."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= rows or sum(each.nbytes for each in waiting) >= BYTES:
            yield pa.RecordBatch.from_pydict({"inserted": [_merge(table, pa.Table.from_batches(waiting))]})
            waiting = []
    if waiting:
        yield pa.RecordBatch.from_pydict({"inserted": [_merge(table, pa.Table.from_batches(waiting))]})


def _merge(table: str, rows: pa.Table) -> int:
    """Insert the rows whose ids are not there yet, in one commit; return how many."""
    from deltalake import DeltaTable
    from deltalake.exceptions import CommitFailedError

    first, last = rows["output_id"][0].as_py(), rows["output_id"][-1].as_py()
    same = f"target.output_id = source.output_id AND target.output_id BETWEEN '{first}' AND '{last}'"
    for attempt in range(ATTEMPTS):
        merger = DeltaTable(table).merge(rows, same, source_alias="source", target_alias="target")
        try:
            return int(merger.when_not_matched_insert_all().execute()["num_target_rows_inserted"])
        except CommitFailedError as error:  # another writer has inserted rows, which this merge has not seen
            if attempt == ATTEMPTS - 1:
                raise Unavailable(f"other writers of {table} were faster {ATTEMPTS} times: run it again: {error}") from None
    raise AssertionError
