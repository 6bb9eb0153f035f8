"""Stream queues of RabbitMQ as a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from idemp.broker.kombu.streams import StreamQueues
from idemp.columns import check_source, columns_of, position
from idemp.spark.sources.reading import LogSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.columns import Columns

FORMAT: Final = "idemp-stream"
_PREFETCH: Final = 500


class StreamSource(LogSource):
    """`spark.readStream.format("idemp-stream").option("queues", "orders")`: each queue is a partition."""

    own_options: ClassVar = ("queues", "prefetch")

    @classmethod
    def name(cls) -> str:
        """The format."""
        return FORMAT

    def open(self) -> StreamLog:
        """The queues that the options name."""
        queues = StreamQueues(
            self.secrets.broker_url.get_secret_value(), prefetch=self.said.number("prefetch") or _PREFETCH
        )
        return StreamLog(queues, self.said.texts("queues"))


class StreamLog:
    """Some stream queues of one broker.

    Args:
        queues: the broker's.
        names: which of them.

    Raises:
        ConfigurationError: a name is too long for a position.
    """

    def __init__(self, queues: StreamQueues, names: Sequence[str]) -> None:
        for name in names:
            check_source(name)
        self._queues = queues
        self._names = tuple(names)

    def partitions(self) -> Sequence[str]:
        """The queues' names."""
        return self._names

    def first(self, partition: str) -> int | None:
        """The offset of the oldest message."""
        return self._queues.first(partition)

    def end(self, partition: str) -> int | None:
        """The offset after the newest message."""
        return self._queues.end(partition)

    def read(self, partition: str, start: int, end: int) -> Iterator[Columns]:
        """The messages of a range of offsets."""
        for offset, message in self._queues.read(partition, start, end):
            yield columns_of(message, position(partition, offset))

    def release(self, offsets: Mapping[str, int]) -> None:
        """Nothing: the stream's own retention says how long it keeps messages."""

    def close(self) -> None:
        """Close all connections."""
        self._queues.close()
