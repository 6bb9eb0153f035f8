"""The writers behind `format("idemp")`: tasks stage messages, the driver takes all of them at once, or none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from idemp.errors import ConfigurationError, StoreError
from idemp.inbox.sql.arrivals import Arrivals
from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.locating import located
from idemp.inbox.sql.tables import Tables
from idemp.spark.atomic.applying import Landed, applied
from idemp.spark.atomic.options import Options
from idemp.spark.chunks import pieces
from idemp.spark.columns import MESSAGE
from idemp.spark.task import free_locks_in_time, persistently

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType
    from sqlalchemy import Engine

log = logging.getLogger("idemp.pipeline")

_PIECE_ROWS: Final = 10_000
_PIECE_BYTES: Final = 4 * 2**20
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class CommitMessage(WriterCommitMessage):
    """What an attempt of a task tells the driver."""

    landed: Landed


class Work:
    """What both kinds of writers do. It travels to the tasks, and knows no secret.

    Args:
        given: the options, as Spark hands them over.
        schema: the DataFrame's.
        overwrite: whether what is there is to go.

    Raises:
        ConfigurationError: the options, the columns or the mode are not as they must be.
    """

    def __init__(self, given: Mapping[str, Any], schema: StructType, *, overwrite: bool) -> None:
        self._options = Options.read(given)
        self._options.settings()
        _check(schema, overwrite=overwrite)

    def stage(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """A task: stage its messages, under a token that no other attempt has."""
        arrivals, token, number, messages = self._arrivals(), uuid4(), 0, 0
        for piece in pieces(iterator, _PIECE_ROWS, _PIECE_BYTES):
            persistently(partial(arrivals.put, token, number, len(piece), _encoded(piece)))
            number, messages = number + 1, messages + len(piece)
        return CommitMessage(Landed(token, messages))

    def take(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """The driver: all that the tasks staged, in one transaction."""
        applied(self._options, _landed(messages), batch).tell(batch)
        _tidily(self._arrivals().drop_old)

    def leave(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """The driver gives up, perhaps after a COMMIT whose answer was lost: what is staged goes, and nothing else."""
        tokens = [each.token for each in _landed(messages)]
        _tidily(partial(self._arrivals().drop_now, tokens))

    def _arrivals(self) -> Arrivals:
        settings = self._options.settings()
        engine = link.to(settings.database_url)
        return Arrivals(engine, located(engine, Tables(settings.schema_name, settings.table_prefix)))


class StreamWriter(DataSourceStreamArrowWriter):
    """A streaming query's sink."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:  # type: ignore[override] # it says Row
        """A task."""
        return self._work.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - PySpark's
        """All tasks of a micro-batch are done."""
        self._work.take(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """One of them failed for good, or `commit` did."""
        del batchId
        self._work.leave(messages)


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("idemp").mode("append").save()`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:  # type: ignore[override] # it says Row
        """A task."""
        return self._work.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._work.take(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """One of them failed for good, or `commit` did."""
        self._work.leave(messages)


def _check(schema: StructType, *, overwrite: bool) -> None:
    found = ", ".join(f"{each.name} {each.dataType.simpleString().upper()}" for each in schema)
    if found != MESSAGE:
        raise ConfigurationError(
            f"These are no messages: the columns are {found}, not {MESSAGE}.",
            fix="Say what is what: Columns(id=…, type=…).of(frame).",
        )
    if overwrite:
        raise ConfigurationError("The inbox is never overwritten.", fix='Say mode("append") or outputMode("append").')


def _encoded(piece: pa.RecordBatch) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, piece.schema, options=_COMPRESSED) as stream:
        stream.write_batch(piece)
    return buffer.getvalue().to_pybytes()


def _landed(messages: Sequence[WriterCommitMessage | None]) -> list[Landed]:
    """What tasks staged, in their order; of those that failed nothing is known."""
    return [each.landed for each in messages if isinstance(each, CommitMessage) and each.landed.messages]


def _tidily(delete: Any) -> None:
    """Delete staged messages; what stays is deleted by a later micro-batch, and means nothing until then."""
    try:
        delete()
    except StoreError as error:
        log.warning("staged messages could not be deleted yet: %s", error, extra={"event": "arrivals_kept"})


class _Link:
    """The database that this process stages in: one connection for each Python worker, whatever tasks it runs."""

    def __init__(self) -> None:
        self._url = ""
        self._engine: Engine | None = None

    def to(self, url: str) -> Engine:
        """An engine; that of another database ends."""
        if self._engine is None or url != self._url:
            self.close()
            self._engine, self._url = create_engine_safely(url), url
            free_locks_in_time(self._engine)
        return self._engine

    def close(self) -> None:
        """End the connection."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None


link: Final = _Link()
