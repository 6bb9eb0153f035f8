"""The sink: messages of a DataFrame, or of the micro-batches of a stream, through the handlers of an app.

The inbox alone decides what is new: if a task, a micro-batch or a run is repeated, its rows are claimed already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel

from idemp.app import App, load_app
from idemp.bulk import Answer, Bulk
from idemp.bulk.sets import SetHandler
from idemp.errors import ConfigurationError
from idemp.spark.columns import Columns
from idemp.spark.session import given_up
from idemp.spark.task import COUNTS, RESULT, Job
from idemp.sql.engine import worker_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Sink", "Summary", "grouped", "sink"]


@dataclass(frozen=True)
class Summary:
    """Answers to the rows of a run or of a micro-batch.

    Attributes:
        counts: Rows by answer; they add up to the rows. Those of a task that ran again are counted once, as replays.
        outputs: Number of messages that new rows produced.

    Example:
        >>> Summary({"new": 2, "replay": 0, "duplicate": 1, "conflict": 0, "parked": 0}, 4).rows
        3
    """

    counts: Mapping[str, int]
    outputs: int

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return sum(self.counts.values())


class Sink:
    """Handles DataFrames and micro-batches; created by `sink`.

    Example:
        >>> def start(stream: "DataFrame") -> None:
        ...     orders = sink("shop.orders:app", Columns(body="value"), parked="parked")
        ...     stream.writeStream.foreachBatch(orders).option("checkpointLocation", "checkpoint").start()
    """

    def __init__(
        self, app: str, columns: Columns, parked: str, run: str | None, tasks: int | None, rows: int, options: Mapping[str, Any]
    ) -> None:
        self._app, self._columns, self._parked, self._run = app, columns, parked, run
        self._tasks, self._rows, self._options = tasks, rows, options
        self._jobs: dict[str, Job] = {}

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Handle a micro-batch, for `foreachBatch`. If no run is named, the run is the streaming query."""
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        self._handle(batch, self._run or f"stream-{query}", number)

    def run(self, frame: DataFrame) -> Summary:
        """Handle a DataFrame. If this fails, run it again: committed rows count as done.

        Raises:
            ConfigurationError: Columns, app or tables are invalid; nothing was changed.
            IdempError: Spark gave a task up, for this error.
        """
        return self._handle(frame, self._run or worker_name(), 0)

    def _handle(self, frame: DataFrame, run: str, batch: int) -> Summary:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        job = self._job(run)
        with given_up():
            messages = grouped(load_app(self._app), self._columns.of(frame))
            tasks = self._tasks or frame.sparkSession.sparkContext.defaultParallelism
            # Equal ids go to one task, in one order: else tasks would wait for each other's claims.
            parts = messages.repartition(tasks, "grouped_by").sortWithinPartitions("grouped_by")

            def handle(batches: Any) -> Any:
                yield from job.run(batches)

            counting = Observation()  # observed after the tasks: rows counted before a shuffle count twice if a task runs again
            result = parts.mapInArrow(handle, RESULT).observe(counting, *(f.sum(f"{name}_rows").alias(name) for name in COUNTS))
            parked = result.where("answer IS NOT NULL").select("id", "type", "time", "headers", "body", "answer", "rule", "error")
            if self._options.get("dry_run"):
                parked.write.format("noop").mode("overwrite").save()
            else:
                parked.write.mode("overwrite").parquet(f"{self._parked}/run={quote(run, safe='')}/batch={batch}")
        counts = {name: int(counting.get[name] or 0) for name in COUNTS}
        return Summary({answer.value: counts[answer.value] for answer in Answer}, counts["outputs"])

    def _job(self, run: str) -> Job:
        """Return the job that tasks run. Its configuration is checked here, before the first task."""
        if run not in self._jobs:
            app = load_app(self._app)
            options = {**self._options, "run": run}
            Bulk(app, **options).close()
            self._jobs = {run: Job(self._app, app.settings, options, self._rows)}
        return self._jobs[run]


def sink(
    app: str,
    columns: Columns | None = None,
    *,
    parked: str,
    run: str | None = None,
    sets: Mapping[type[BaseModel] | str, SetHandler] | None = None,
    dispatch: Literal["relay", "never"] = "relay",
    adopt: bool = False,
    dry_run: bool = False,
    tasks: int | None = None,
    rows: int = 50_000,
) -> Sink:
    """Return a sink for `foreachBatch` of a stream, and for DataFrames.

    Args:
        app: `module:name` of the app; its module is imported by each Python worker. Settings are those of this process.
        columns: By default those of the names `id`, `type`, `time`, `headers` and `body`.
        parked: Folder for rows that are not handled, as Parquet files by run and batch, which can be read as an input.
        run: Name of the run, for one input: rows that it claimed before count as replays. By default the query of a stream, or a name
            that is not used again.
        sets: See `Bulk`; so are `dispatch`, `adopt` and `dry_run`.
        dispatch: Whether outputs are left to a relay, or never sent.
        adopt: Whether to claim only.
        dry_run: Whether to count only.
        tasks: Number of concurrent tasks, and so of connections; by default Spark's parallelism.
        rows: Rows of a chunk.

    Raises:
        ConfigurationError: There is no such app.

    Example:
        >>> def backfill(archive: "DataFrame") -> Summary:
        ...     return sink("shop.orders:app", Columns(time="created_at"), parked="parked", run="backfill-2026").run(archive)
    """
    if rows < 1 or (tasks is not None and tasks < 1):
        raise ConfigurationError("rows and tasks have to be 1 or more")
    load_app(app)
    options = {"sets": sets, "dispatch": dispatch, "adopt": adopt, "dry_run": dry_run}
    return Sink(app, columns or Columns(), parked, run, tasks, rows, options)


def grouped(app: App, messages: DataFrame) -> DataFrame:
    """Return messages with a column `grouped_by`, which is equal for equal ids, and may be equal for different ones.

    Example:
        >>> def tasks(messages: "DataFrame") -> "DataFrame":
        ...     return grouped(App("shop"), messages).repartition("grouped_by")
    """
    from pyspark.sql import functions as f

    app.configure()
    group: Column = f.col("id")
    for type, handler in app.handlers.items():
        kind, _, names = handler.identity.descriptor.partition(":") if handler.identity else ("", "", "")
        if kind not in ("header", "body"):
            continue
        if kind == "header":
            own = f.get_json_object("headers", f"$['{names}']")
        else:
            steps = ["".join(f"['{step}']" for step in name.split(".")) for name in names.split(",")]
            text = f.col("body").cast("string")
            own = f.concat_ws("\n", *(f.get_json_object(text, f"${step}") for step in steps))
        named = f.col("type") == type
        group = (
            f.when(f.coalesce(f.col("type"), f.lit("")) == "" if type == app.handlers.default else named, own)
            .when(named, own)
            .otherwise(group)
        )
    return messages.withColumn("grouped_by", f.coalesce(group, f.hex(f.xxhash64("body"))))
