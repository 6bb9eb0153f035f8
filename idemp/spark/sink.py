"""The sink: messages of a DataFrame, or of the micro-batches of a stream, through the handlers of an app.

The inbox alone decides what is new: if a task, a micro-batch or a run is repeated, its rows are claimed already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

from pydantic import BaseModel

from idemp.app import App, load_app
from idemp.bulk import Answer, Bulk
from idemp.bulk.sets import SetHandler
from idemp.cloudevents import PREFIXES, STRUCTURED
from idemp.errors import ConfigurationError
from idemp.identity import digest
from idemp.process import Process
from idemp.spark.columns import PARTS, Columns
from idemp.spark.parked import REASONS, Attempt, check_folder, corrected, read_parked
from idemp.spark.progress import reported
from idemp.spark.session import GivenUp, given_up
from idemp.spark.task import COUNTS, RESULT, Job, patient
from idemp.sql.engine import worker_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["Sink", "Summary", "grouped", "sink"]

LONGEST_RUN: Final = 200
DIED: Final = re.compile("worker exited unexpectedly|SystemExit|KeyboardInterrupt")


@dataclass(frozen=True)
class Summary:
    """Answers to the rows of a run or of a micro-batch.

    Attributes:
        counts: Rows by answer; they add up to the rows. Those of a task that ran again are counted once, as replays.
        outputs: Number of messages that new rows produced.
        run: Name of the run.

    Example:
        >>> Summary({"new": 2, "replay": 0, "duplicate": 1, "conflict": 0, "parked": 0}, 4, "backfill").rows
        3
    """

    counts: Mapping[str, int]
    outputs: int
    run: str

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
        # Nothing is sent here, so no secret of the broker travels.
        self._settings = load_app(app).settings.model_copy(update={"broker_url": "sql://"})
        self._tasks, self._rows, self._options = tasks, rows, options
        self._jobs: dict[str, Job] = {}

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Handle a micro-batch, for `foreachBatch`. If no run is named, the run is the streaming query.

        Raises:
            ConfigurationError: No run is named, and Spark Connect does not say the query.
        """
        run, context = self._run, getattr(batch.sparkSession, "sparkContext", None)
        if run is None:
            if context is None:
                raise ConfigurationError(
                    "over Spark Connect, a stream has to name its run: sink(…, run='orders'); nothing was changed"
                )
            run = f"stream-{context.getLocalProperty('sql.streaming.queryId')}"
        with given_up():
            messages = self._columns.of(batch)
        self._handle(messages, run, {"batch": number})

    def run(self, frame: DataFrame, *, progress: Callable[[str], Any] | None = None) -> Summary:
        """Handle a DataFrame. If this fails, run it again: committed rows count as done.

        Args:
            frame: The rows.
            progress: Takes a line about the progress, every 10 seconds.

        Raises:
            ConfigurationError: Columns, app or tables are invalid; nothing was changed.
            IdempError: Spark gave a task up, for this error.
        """
        with given_up():
            messages = self._columns.of(frame)
        return self._handle(messages, self._run or worker_name(), {}, None, progress)

    def replay(
        self, spark: SparkSession, lines: Iterable[str] | None = None, *, progress: Callable[[str], Any] | None = None
    ) -> Summary:
        """Handle the open rows of the sink's folder again. Those that fail again are open in a new attempt; the others are done with.

        Args:
            spark: Spark session.
            lines: Corrected rows as lines of JSON; see `corrected`. By default all open rows are handled as they are.
            progress: Takes a line about the progress, every 10 seconds.

        Raises:
            ConfigurationError: There are no open rows, or a line is not one of them; nothing was changed.
            IdempError: Spark gave a task up, for this error. Replay again: committed rows count as done.
        """
        rows, rest = read_parked(spark, self._parked).persist(), None
        try:
            with given_up():
                files = sorted(row[0] for row in rows.selectExpr("explode(files)").distinct().collect())
                if not files:
                    raise ConfigurationError(f"all rows in {self._parked} were replayed: there is nothing to do")
                todo = rows
                if lines is not None:
                    todo, rest = corrected(rows, lines)
            run = self._run or f"replay-{digest(*files).hex()[:16]}"
            return self._handle(todo.select(*PARTS), run, {"replaces": files}, rest, progress)
        finally:
            rows.unpersist()

    def _handle(
        self,
        messages: DataFrame,
        run: str,
        about: Mapping[str, Any],
        rest: DataFrame | None = None,
        progress: Callable[[str], Any] | None = None,
    ) -> Summary:
        """Handle messages; keep those that fail, and the rest, in a folder of this attempt."""
        with reported(messages.sparkSession, progress) as handled:
            job = replace(self._job(run), handled=handled)
            try:
                return self._attempt(job, messages, run, about, rest)
            except GivenUp as error:  # Spark may give a task only one attempt
                if not DIED.search(str(error)):
                    raise
                return self._attempt(replace(job, apart=True), messages, run, about, rest)

    def _attempt(self, job: Job, messages: DataFrame, run: str, about: Mapping[str, Any], rest: DataFrame | None) -> Summary:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        spark = messages.sparkSession
        with given_up():
            # Equal ids go to one task, in one order: else tasks would wait for each other's claims.
            groups = grouped(load_app(self._app), messages)
            tasks = self._tasks or _tasks(spark, stream="batch" in about)
            parts = groups.repartition(tasks, "grouped_by").sortWithinPartitions("grouped_by")

            def handle(batches: Any) -> Any:
                yield from job.run(batches)

            counting = Observation()  # observed after the tasks: rows counted before a shuffle count twice if a task runs again
            result = parts.mapInArrow(handle, RESULT).observe(counting, *(f.sum(f"{name}_rows").alias(name) for name in COUNTS))
            parked = result.where("answer IS NOT NULL").select(*PARTS, *REASONS)
            if self._options.get("dry_run"):
                parked.write.format("noop").mode("overwrite").save()
            else:
                attempt = Attempt.new(self._parked, run)
                attempt.keep(parked if rest is None else parked.unionByName(rest.select(*PARTS, *REASONS)))
            counts = {name: int(counting.get[name] or 0) for name in COUNTS}
            if not self._options.get("dry_run"):
                attempt.close(spark, {"app": self._app, "run": run, **about, "counts": counts})
        return Summary({answer.value: counts[answer.value] for answer in Answer}, counts["outputs"], run)

    def _job(self, run: str) -> Job:
        """Return the job that tasks run. Its configuration is checked here, before the first task."""
        if run not in self._jobs:
            app = load_app(self._app)
            if app.settings.database_url != self._settings.database_url:  # a batch at a server of Spark Connect
                app.process = Process(app.engine, self._settings)
            options = {**self._options, "run": run}
            patient(lambda: Bulk(app, **options).close(), 0.0)
            self._jobs = {run: Job(self._app, self._settings, options, self._rows)}
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
        parked: Folder for rows that are not handled, as Parquet files by run and attempt. Nothing in it is ever overwritten.
        run: Name of the run, for one input: rows that it claimed before count as replays. By default the query of a stream, or a name
            that is not used again.
        sets: See `Bulk`; so are `dispatch`, `adopt` and `dry_run`.
        dispatch: Whether outputs are left to a relay, or never sent.
        adopt: Whether to claim only.
        dry_run: Whether to count only.
        tasks: Number of tasks, and so the most connections; by default two for each core, in a micro-batch one. As many of them run
            at once, and hold a connection, as there are cores.
        rows: Rows of a chunk.

    Raises:
        ConfigurationError: There is no such app.

    Example:
        >>> def backfill(archive: "DataFrame") -> Summary:
        ...     return sink("shop.orders:app", Columns(time="created_at"), parked="parked", run="backfill-2026").run(archive)
    """
    if rows < 1 or (tasks is not None and tasks < 1):
        raise ConfigurationError("rows and tasks have to be 1 or more")
    if (
        run is not None and len(quote(run, safe="")) > LONGEST_RUN
    ):  # else its folder could not be made, after its rows were handled
        raise ConfigurationError(
            f"run={run!r} has more than {LONGEST_RUN} characters in the name of a folder: name a shorter one"
        )
    check_folder(parked)
    options = {"sets": sets, "dispatch": dispatch, "adopt": adopt, "dry_run": dry_run}
    return Sink(app, columns or Columns(), parked, run, tasks, rows, options)


def _tasks(spark: SparkSession, *, stream: bool) -> int:
    """Return the default number of tasks: one for each core in a micro-batch; two in a run, whose ends show how far it is."""
    context = getattr(spark, "sparkContext", None)
    if context is None:  # over Spark Connect, which does not say its cores
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    return int(context.defaultParallelism) * (1 if stream else 2)


def grouped(app: App, messages: DataFrame) -> DataFrame:
    """Return messages with a column `grouped_by`, which is equal for equal ids, and may be equal for different ones.

    Example:
        >>> def tasks(messages: "DataFrame") -> "DataFrame":
        ...     return grouped(App("shop"), messages).repartition("grouped_by")
    """
    from pyspark.sql import functions as f

    app.configure()
    body = f.col("body").cast("string")
    structured = f.lower("content_type").startswith(STRUCTURED)

    def attribute(name: str) -> Column:
        """Return an attribute of a CloudEvent; NULL if the message is none."""
        headers = (f.get_json_object("headers", f"$['{prefix}{name}']") for prefix in PREFIXES)
        return f.coalesce(f.when(structured, f.get_json_object(body, f"$.{name}")), *headers)

    group = f.coalesce(attribute("id"), f.col("id"))
    type = f.coalesce(attribute("type"), f.col("type"), f.lit(""))
    data = f.when(structured, f.get_json_object(body, "$.data")).otherwise(body)
    for each, handler in app.handlers.items():
        kind, _, names = handler.identity.descriptor.partition(":") if handler.identity else ("", "", "")
        if kind == "header":
            own = f.get_json_object("headers", f"$['{names}']")
        elif kind == "body":
            steps = ["".join(f"['{step}']" for step in name.split(".")) for name in names.split(",")]
            own = f.concat_ws("\n", *(f.get_json_object(data, f"${step}") for step in steps))
        elif kind == "digest":
            own = f.hex(f.xxhash64(data))
        else:
            continue
        named = type.isin([each, ""] if each == app.handlers.default else [each])
        group = f.when(named, own).otherwise(group)
    # A UUID is one in either case.
    return messages.withColumn("grouped_by", f.lower(f.coalesce(group, f.hex(f.xxhash64("body")))))
