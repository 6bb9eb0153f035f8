"""Any `Log` as a streaming source of Spark's: it plans on the driver, and reads in tasks."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from idemp.spark.sources.options import PER_BATCH, PER_TASK, STARTING, Options
from idemp.spark.sources.planning import EARLIEST, Plan, Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

    from idemp.columns import Columns
    from idemp.spark.sources.planning import Log, Offsets
    from idemp.spark.sources.secrets import Secrets

COLUMNS: Final = "id STRING, type STRING, body BINARY, headers STRING, time TIMESTAMP, position STRING"

_TYPES: Final[dict[str, pa.DataType]] = {
    "id": pa.string(),
    "type": pa.string(),
    "body": pa.binary(),
    "headers": pa.string(),
    "time": pa.timestamp("us", tz="UTC"),
    "position": pa.string(),
}
_ARROW: Final = pa.schema(_TYPES)
_ROWS: Final = 2_000  # of an Arrow batch
_BYTES: Final = 4 * 1024 * 1024


class LogSource(DataSource):
    """A data source over a log, with the columns that a consumer's message has.

    Attributes:
        secrets: addresses and passwords; they travel inside of the class, which no plan and no page shows.
        own_options: the names of its own options.
    """

    secrets: ClassVar[Secrets]
    own_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.said = Options(self.name(), options, self.own_options)

    @abstractmethod
    def open(self) -> Log:
        """The log that the options name; connections are opened when they are needed."""

    def schema(self) -> str:
        """The pipeline's columns."""
        return COLUMNS

    def streamReader(self, schema: StructType) -> LogReader:  # noqa: N802 - Spark's name
        """What reads a stream of micro-batches."""
        del schema
        return LogReader(self)


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, slice: Slice) -> None:
        super().__init__((slice.partition, slice.start, slice.end))

    @property
    def slice(self) -> Slice:
        """The slice."""
        return Slice(*self.value)


class LogReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a log in micro-batches. Offsets are those of the next message, by partition.

    One on the driver plans, with connections that stay open; those in tasks only `read`.
    """

    def __init__(self, source: LogSource) -> None:
        said = source.said
        self._source = source
        self._limit = said.number(PER_BATCH)
        self._starting = said.text(STARTING, EARLIEST)
        self._largest_slice = said.number(PER_TASK)
        self._log: Log | None = None
        self._plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks open connections of their own."""
        return {**self.__dict__, "_log": None, "_plan": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return dict(self._planned.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """How much a micro-batch has at most."""
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802 - Spark's
        """Where the micro-batch ends that begins at `start`."""
        return self._planned.latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What comes after this moment is for the next run."""
        self._planned.stop_at_the_end()

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """What the tasks of a micro-batch read."""
        return [Part(each) for each in self._planned.slices(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of one task, as Arrow batches."""
        assert isinstance(partition, Part)  # noqa: S101 - we made it
        part = partition.slice
        with closing(self._source.open()) as log:
            yield from batches(log.read(part.partition, part.start, part.end))

    def commit(self, end: Offsets) -> None:
        """All before `end` is handled, and the checkpoint knows it."""
        if self._log is not None:
            self._log.release(end)

    def stop(self) -> None:
        """The query ends."""
        if self._log is not None:
            self._log.close()

    @property
    def _planned(self) -> Plan:
        if self._plan is None:
            self._log = self._source.open()
            self._plan = Plan(self._log, starting=self._starting, largest_slice=self._largest_slice)
        return self._plan


def batches(rows: Iterator[Columns]) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches, none much larger than 4 MiB unless a single message is."""
    held: list[Columns] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row.body) + len(row.headers or "")
        if len(held) >= _ROWS or size >= _BYTES:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def _batch(rows: list[Columns]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), _ARROW, strict=True)],
        schema=_ARROW,
    )
