"""The sink: messages of a DataFrame through an app's handlers, on the inbox of its online consumer.

```
messages ── repartition by id, sort ── tasks: chunk by chunk, each one transaction (`idemp.spark.task`)
                                          ├── counts ────────► observed by Spark, once for each part ──► Summary
                                          └── parked messages ──► Parquet, by run, batch and error
```

The inbox alone decides what is new. Whatever is run again (a task, a micro-batch, all of it with the checkpoint lost) finds
its own claims and skips them; there is no second record of progress that could say otherwise.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, Literal

from idemp.errors import ConfigurationError
from idemp.loading import load_app
from idemp.spark import require
from idemp.spark.chunks import GROUP
from idemp.spark.columns import PARTS
from idemp.spark.failures import told_plainly
from idemp.spark.prefilter import without_handled
from idemp.spark.summary import Summary
from idemp.spark.task import RESULT, Job
from idemp.spark.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pydantic import SecretStr
    from pyspark.sql import DataFrame, SparkSession

    from idemp.app import App
    from idemp.bulk import SetHandler
    from idemp.settings import Settings

_QUERY_ID: Final = "sql.streaming.queryId"  # a local property of the thread that runs a micro-batch
_COUNTS: Final = tuple(item.name for item in fields(Summary) if item.name != "skipped")  # by tasks
_LETTERS: Final = tuple(column.split()[0] for column in RESULT.split(", ") if column.split()[0] not in _COUNTS)


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Handles messages once in effect: for `DataStreamWriter.foreachBatch`, or `run` on a DataFrame. `sink` makes it."""

    job: Job
    parked: str
    run_name: str | None = None
    partitions: int | None = None
    rate: float | None = None
    prefilter: Settings | None = field(default=None, repr=False)
    tell: Callable[[int, Summary], object] | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """A micro-batch."""
        summary = self.run(frame, batch)
        if self.tell is not None:
            self.tell(batch, summary)

    def run(self, frame: DataFrame, batch: int = 0) -> Summary:
        """Handle all messages of a DataFrame; what became of them.

        Run it again after any failure: what is handled stays handled.

        Raises:
            ConfigurationError: the DataFrame has no messages' columns; see `Columns`.
            StoreUnavailable: the database stayed away, and Spark gave a task up.
            GivenUp: Spark gave a task up for another reason.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        _check(frame)
        observation = Observation()
        with told_plainly(), self._wanted(frame) as wanted:
            answered = self._handled(wanted).observe(observation, *(f.sum(name).alias(name) for name in _COUNTS))
            self._keep(answered.where("error IS NOT NULL").select(*_LETTERS), batch)
            summary = Summary.of(observation.get)
            if self.prefilter is not None:
                # Of the input, not of the join: what is observed ahead of a shuffle counts twice when an executor is lost.
                summary = replace(summary, skipped=frame.count() - summary.rows)
        summary.tell(batch)
        return summary

    def _app(self) -> App:
        app = load_app(self.job.app)
        app.registry.build(self.job.settings.messages)
        return app

    def _wanted(self, frame: DataFrame) -> AbstractContextManager[DataFrame]:
        """What goes to the tasks."""
        if self.prefilter is None:
            return nullcontext(frame)
        app = self._app()
        return without_handled(frame, app.registry, app.name, self.prefilter)

    def _handled(self, frame: DataFrame) -> DataFrame:
        """Equal ids in one task, in order: else tasks wait for one another, and the inbox is written here and there."""
        at_once = cores(frame.sparkSession)
        parts = self.partitions or at_once
        job = replace(self.job, rate=self.rate and self.rate / min(parts, at_once))
        grouped = frame.withColumn(GROUP, together(self._app().registry))
        return grouped.repartition(parts, GROUP).sortWithinPartitions(GROUP, "position").mapInArrow(job.run, RESULT)

    def _keep(self, letters: DataFrame, batch: int) -> None:
        """What was parked, as it was before if this batch ran before. Writing it is what runs the tasks."""
        from pyspark.sql import functions as f

        if self.job.dry_run:
            letters.write.format("noop").mode("overwrite").save()
            return
        run = self.run_name or _query_id(letters)
        placed = letters.withColumns({"run": f.lit(run), "batch": f.lit(batch)})
        writer = placed.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
        writer.partitionBy("run", "batch", "error").parquet(self.parked)


def sink(
    app: str,
    *,
    parked: str,
    database: SecretStr | None = None,
    settings: Settings | None = None,
    sets: Mapping[type | str, SetHandler] | None = None,
    dispatch: Literal["relay", "never"] = "relay",
    adopt: bool = False,
    dry_run: bool = False,
    rows: int = 50_000,
    size: int = 64 * 2**20,
    partitions: int | None = None,
    rate: float | None = None,
    prefilter: bool = False,
    run_name: str | None = None,
    tell: Callable[[int, Summary], object] | None = None,
) -> Sink:
    """A sink for messages (see `Columns`), checked as far as can be before the first one.

    Args:
        app: `MODULE:APP`; the module has to be found by the workers, too (`--py-files`, or installed).
        parked: the folder for what can't be handled: Parquet, in a file system that all executors share, by run, batch and
            error, in the columns of messages, so that it can be read and handled again.
        database: its URL, if not that of the app or of the settings. It is in neither plan nor UI.
        settings: for the app, on the driver and in all tasks; default those that the app has here.
        sets: handlers of whole sets per message type; see `Bulk`.
        dispatch: whether a relay sends the outputs ("relay"), or nobody ever ("never").
        adopt: mark messages as handled without running handlers.
        dry_run: say what would be, and change nothing.
        rows: messages of a chunk, which is one transaction, at most.
        size: bytes of a chunk, at most.
        partitions: into how many tasks a batch is divided, by default as many as there are cores. No more run at once than
            there are cores, and each has one database connection.
        rate: messages a second, at most.
        prefilter: leave out what the inbox says was handled from the same position under the same id, before it comes to
            the tasks: for archives of millions of which most is done. It reads the inbox, and the messages a second time, to
            count them.
        run_name: names the run in the folder of parked messages; by default the id of the streaming query.
        tell: called on the driver with each micro-batch's number and summary.

    Raises:
        ConfigurationError: Spark, the app, its settings or its tables are not as they must be.
        StoreUnavailable: the database can't be reached.
    """
    require()
    for name, value in {"rows": rows, "size": size, "partitions": partitions, "rate": rate}.items():
        if value is not None and value <= 0:
            raise ConfigurationError(f"{name}={value} is no number above nought.")
    settings = settings or load_app(app).settings
    if database is not None:
        settings = settings.model_copy(update={"database_url": database.get_secret_value()})
    job = Job(
        app=app,
        settings=settings,
        override=database is not None,
        dispatch=dispatch,
        adopt=adopt,
        dry_run=dry_run,
        sets=sets or {},
        rows=rows,
        size=size,
    )
    inbox = job.check()
    return Sink(
        job=job,
        parked=parked,
        run_name=run_name,
        partitions=partitions,
        rate=rate,
        prefilter=inbox if prefilter else None,
        tell=tell,
    )


def cores(spark: SparkSession) -> int:
    """How many tasks run at the same time; through Spark Connect, which does not tell, its number of shuffle partitions."""
    if hasattr(spark, "_jsparkSession"):
        return spark.sparkContext.defaultParallelism
    return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)


def _check(frame: DataFrame) -> None:
    if tuple(frame.columns) != PARTS:
        raise ConfigurationError(
            f"These are no messages: the columns are {', '.join(frame.columns)}, not {', '.join(PARTS)}.",
            fix="Say what is what: Columns(id=…, type=…).of(frame).",
        )


def _query_id(frame: DataFrame) -> str:
    """The id of the streaming query whose micro-batch this is; a checkpoint that is lost gives another one."""
    spark = frame.sparkSession
    found = spark.sparkContext.getLocalProperty(_QUERY_ID) if hasattr(spark, "_jsparkSession") else None
    if found is None:
        raise ConfigurationError(
            "Nobody says what this run is called.", fix="Say sink(…, run_name=…), another one for each run."
        )
    return str(found)
