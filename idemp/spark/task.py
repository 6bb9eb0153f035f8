"""Tasks in Spark's Python workers: one chunk after the other through one `Bulk` a process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from sqlalchemy import exc

from idemp.app import App, load_app
from idemp.bulk import Answer, Bulk, Report
from idemp.errors import InFlight, Unavailable, describe_error
from idemp.process import Process
from idemp.settings import Settings
from idemp.spark.columns import MESSAGE, PARTS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COUNTS", "RESULT", "Job", "chunks"]

COUNTS: Final = (*(answer.value for answer in Answer), "outputs")
RESULT: Final = f"{MESSAGE}, answer string, rule string, error string, {', '.join(f'{name}_rows bigint' for name in COUNTS)}"
PATIENCE: Final = 60.0  # seconds during which a chunk is retried, before Spark retries the task


@dataclass(frozen=True)
class Job:
    """The part of a sink that its tasks need. It travels inside a pickled function, so no plan and no log shows its settings.

    Attributes:
        app: `module:name` of the app.
        options: Arguments of `Bulk`.
        rows: Rows of a chunk; those of one id stay together.
        token: Identifies the job, so that a Python worker keeps its connection from task to task of one job.

    Example:
        >>> Job("shop.orders:app", Settings(), {"run": "backfill"}).rows
        50000
    """

    app: str
    settings: Settings
    options: Mapping[str, Any]
    rows: int = 50_000
    token: str = field(default_factory=lambda: uuid4().hex)

    def open_app(self) -> App:
        """Return the app, with the settings of the driver."""
        app = load_app(self.app)
        app.process = Process(app.engine, self.settings)
        return app

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Handle the rows of a partition, sorted by `grouped_by`; return the parked ones, and a row of counts for each chunk."""
        gc.disable()  # rows have no reference cycles, and collections would take a third of the time
        try:
            for chunk in chunks(batches, self.rows):
                yield from _result(chunk, self._handle(chunk)).to_batches()
        finally:
            gc.enable()

    def _handle(self, chunk: pa.Table) -> Report:
        until = time.monotonic() + PATIENCE
        pause = 0.1
        while True:
            try:
                return self._bulk().run(chunk)
            except (Unavailable, InFlight, exc.OperationalError) as error:
                if time.monotonic() > until:
                    raise Unavailable(describe_error(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _bulk(self) -> Bulk:
        if self.token not in _OPEN:
            for bulk in _OPEN.values():
                bulk.close()
            _OPEN.clear()
            _OPEN[self.token] = Bulk(self.open_app(), **self.options)
        return _OPEN[self.token]


_OPEN: Final[dict[str, Bulk]] = {}


def chunks(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Join batches into chunks, and keep the rows of a group in one chunk.

    Example:
        >>> import pyarrow as pa
        >>> batch = pa.RecordBatch.from_pydict({"grouped_by": ["a", "b", "b", "c"]})
        >>> [chunk.num_rows for chunk in chunks(iter([batch]), 2)]
        [3, 1]
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        while count > rows:
            table = pa.Table.from_batches(waiting)
            groups = table["grouped_by"]
            end = rows + pc.index(pc.not_equal(groups.slice(rows), groups[rows - 1]), value=True).as_py()
            if end < rows:  # all that follow are of the same group, and more of them may come
                waiting = table.to_batches()
                break
            yield table.slice(0, end)
            waiting, count = table.slice(end).to_batches(), count - end
    if count:
        yield pa.Table.from_batches(waiting)


def _result(chunk: pa.Table, report: Report) -> pa.Table:
    import pyarrow as pa

    count = len(report.parked)
    rows = chunk.take(pa.array([parked_row.place for parked_row in report.parked], pa.int64()))
    parked = pa.table({name: rows[name] for name in PARTS})  # each column may be NULL
    details = [
        [parked_row.answer.value for parked_row in report.parked],
        [parked_row.rule for parked_row in report.parked],
        [parked_row.error for parked_row in report.parked],
    ]
    for name, values in zip(("answer", "rule", "error"), details, strict=True):
        parked = parked.append_column(name, pa.array(values, pa.string()))
    counts = [report.counts[answer] for answer in Answer] + [report.outputs]
    counted = pa.table({name: pa.nulls(1, parked.schema.field(name).type) for name in parked.column_names})
    for name, value in zip(COUNTS, counts, strict=True):
        parked = parked.append_column(f"{name}_rows", pa.nulls(count, pa.int64()))
        counted = counted.append_column(f"{name}_rows", pa.array([value], pa.int64()))
    return pa.concat_tables([parked, counted])
