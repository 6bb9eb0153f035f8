"""The spool as a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from idemp.inbox.sql import create_engine_safely
from idemp.spark.sources.reading import LogSource
from idemp.spool.store import SpoolStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Engine

    from idemp.columns import Columns

FORMAT: Final = "idemp-spool"


class SpoolSource(LogSource):
    """`spark.readStream.format("idemp-spool").option("queue", "orders")`: what `idemp pipeline spool` has drained."""

    own_options: ClassVar = ("queue",)

    @classmethod
    def name(cls) -> str:
        """The format."""
        return FORMAT

    def open(self) -> SpoolLog:
        """The spool of the queue that the options name."""
        engine = create_engine_safely(self.secrets.database_url.get_secret_value())
        store = SpoolStore(engine, schema=self.secrets.schema, prefix=self.secrets.prefix)
        return SpoolLog(engine, store, self.said.text("queue"))


class SpoolLog:
    """The spool of one queue. What is handled for good is deleted: it has one query, and no other.

    Args:
        engine: the database, disposed of at the end.
        store: its spools.
        queue: which of them.
    """

    def __init__(self, engine: Engine, store: SpoolStore, queue: str) -> None:
        self._engine = engine
        self._store = store
        self._queue = queue

    def partitions(self) -> Sequence[str]:
        """The one queue."""
        return (self._queue,)

    def first(self, partition: str) -> int | None:
        """The offset of the oldest message kept."""
        return self._store.level(partition).first

    def end(self, partition: str) -> int | None:
        """The offset after the newest message."""
        return self._store.level(partition).next

    def read(self, partition: str, start: int, end: int) -> Iterator[Columns]:
        """The messages of a range of offsets."""
        yield from self._store.read(partition, start, end)

    def release(self, offsets: Mapping[str, int]) -> None:
        """Delete what is handled."""
        for partition, end in offsets.items():
            self._store.release(partition, end)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()
