"""Tasks in Spark's Python workers: one chunk after the other through one `Bulk` a process.

The first attempt of a task handles its rows in the worker itself. If that dies, further attempts handle each chunk in a child process;
a chunk whose child dies is handled in halves, until the row that ends its process is alone, and parked.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

from sqlalchemy import exc

from idemp.app import App, load_app
from idemp.bulk import Answer, Bulk, Report
from idemp.errors import ConfigurationError, HandlerError, IdempError, InFlight, Unavailable, describe_error
from idemp.events import log
from idemp.process import Process
from idemp.settings import Settings
from idemp.spark.columns import MESSAGE, PARTS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import pyarrow as pa
    from pyspark import Accumulator

__all__ = ["COUNTS", "RESULT", "Job", "chunks", "patient"]

T = TypeVar("T")

COUNTS: Final = (*(answer.value for answer in Answer), "outputs")
RESULT: Final = f"{MESSAGE}, answer string, rule string, error string, {', '.join(f'{name}_rows bigint' for name in COUNTS)}"
DEATHS: Final = 3  # of processes that handled a row alone, after which it is parked
POISONS: Final = 20  # such rows of a chunk, after which the handler is to blame
CROWDED: Final = re.compile("too many (clients|connections)|connection slots|max_user_connections", re.IGNORECASE)
PATIENCE: Final = 60.0  # seconds during which a chunk is retried, before Spark retries the task


@dataclass(frozen=True)
class Job:
    """The part of a sink that its tasks need. It travels inside a pickled function, so no plan and no log shows its settings.

    Attributes:
        app: `module:name` of the app.
        options: Arguments of `Bulk`.
        apart: Whether rows are handled in child processes from the first attempt on.
        handled: Counter of handled rows, for the driver.
        rows: Rows of a chunk; those of one id stay together.
        token: Identifies the job, so that a Python worker checks the app and the tables once a job.

    Example:
        >>> Job("shop.orders:app", Settings(), {"run": "backfill"}).rows
        50000
    """

    app: str
    settings: Settings
    options: Mapping[str, Any]
    rows: int = 50_000
    apart: bool = False
    handled: Accumulator[int] | None = field(default=None, compare=False)
    token: str = field(default_factory=lambda: uuid4().hex)

    def open_app(self) -> App:
        """Return the app, with the settings of the driver."""
        app = load_app(self.app)
        app.process = Process(app.engine, self.settings)
        return app

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Handle the rows of a partition, sorted by `grouped_by`; return the parked ones, and a row of counts for each chunk."""
        from pyspark import TaskContext

        context = TaskContext.get()
        again = context is not None and context.attemptNumber() > 0
        gc.disable()  # rows have no reference cycles, and collections would take a third of the time
        try:
            for chunk in chunks(batches, self.rows):
                for rows, report in self._apart(chunk) if again or self.apart else [(chunk, self.handle(chunk))]:
                    yield from _result(rows, report).to_batches()
                    if self.handled is not None:
                        self.handled.add(rows.num_rows)
        finally:
            gc.enable()
            if self.token in _OPEN:  # the worker may wait for its next task for long
                _OPEN[self.token].pause()

    def _apart(self, chunk: pa.Table) -> Iterator[tuple[pa.Table, Report]]:
        """Handle rows in child processes; park a row that ended each of several alone."""
        todo, poison = [(chunk, 0)], 0
        while todo:
            rows, deaths = todo.pop()
            report = _in_child(self, rows)
            if report is None and rows.num_rows > 1:
                middle = rows.num_rows // 2
                todo += [(rows.slice(middle), 0), (rows.slice(0, middle), 0)]
            elif report is None and deaths + 1 < DEATHS:
                todo.append((rows, deaths + 1))
            elif report is None:
                poison += 1
                if poison > POISONS:
                    raise HandlerError(
                        f"more than {POISONS} rows of a chunk end their process: correct the handler, and run again"
                    )
                report = Report()
                report.park(
                    0, Answer.PARKED, "poison", f"HandlerError: {DEATHS} processes ended while they handled this row alone"
                )
                yield rows, report
            else:
                yield rows, report

    def handle(self, chunk: pa.Table) -> Report:
        """Handle rows of a partition in this process."""
        return patient(lambda: self._bulk().run(chunk), PATIENCE)

    def _bulk(self) -> Bulk:
        if self.token not in _OPEN:
            for bulk in _OPEN.values():
                bulk.close()
            _OPEN.clear()
            _OPEN[self.token] = Bulk(self.open_app(), **self.options)
        return _OPEN[self.token]


def patient(work: Callable[[], T], seconds: float) -> T:
    """Do work on the database; wait for one that is away, and without a limit for one that has no connection to spare.

    The limit of connections is the budget of all jobs and consumers, set where they meet: `ALTER ROLE … CONNECTION LIMIT`.

    Args:
        work: What to do; it is done again after a failure.
        seconds: Time until an outage is raised.

    Raises:
        Unavailable: The database was away for too long.

    Example:
        >>> patient(lambda: 7, 60.0)
        7
    """
    until, pause, waits = time.monotonic() + seconds, 0.1, False
    while True:
        try:
            return work()
        except (ConfigurationError, Unavailable, InFlight, exc.OperationalError) as error:
            if CROWDED.search(str(error)):
                if not waits:
                    log("task.waiting", error=describe_error(error))
                waits = True
            elif isinstance(error, ConfigurationError):
                raise
            elif time.monotonic() > until:
                raise Unavailable(describe_error(error)) from None
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


_OPEN: Final[dict[str, Bulk]] = {}
_PARENTS: Final[list[dict[str, Bulk]]] = []
"""What a parent had open, in a child: kept, because closing it would end it for the parent, too."""


def _in_child(job: Job, rows: pa.Table) -> Report | None:
    """Handle rows in a child process; return None if it dies."""
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=_be_child, args=(job, rows, theirs))
    child.start()
    theirs.close()
    try:
        answer: Report | Exception = ours.recv()
    except EOFError:
        return None
    finally:
        ours.close()
        child.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _be_child(job: Job, rows: pa.Table, answers: Connection) -> None:
    _PARENTS.append(dict(_OPEN))
    _OPEN.clear()
    try:
        answer: Report | Exception = job.handle(rows)
    except Exception as error:  # noqa: BLE001 - it is raised in the parent
        answer = error if isinstance(error, IdempError) else HandlerError(describe_error(error))
    answers.send(answer)
    answers.close()


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
