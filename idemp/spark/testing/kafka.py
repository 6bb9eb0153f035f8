"""A Kafka for tests: the mock cluster that librdkafka has built in, reached through confluent-kafka."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Producer

_SECONDS: Final = 10.0


class MockKafka:
    """A cluster of one broker, in this process; clients in other processes reach it as any other.

    Topics appear when something is sent to them, or asked of them. It keeps 5 MiB of each partition, and drops the oldest
    beyond that, as a cluster does with what is older than its retention.

    Attributes:
        servers: its addresses, for `bootstrap.servers`; loopback only.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        brokers = producer.list_topics(timeout=_SECONDS).brokers.values()
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def send(
        self,
        topic: str,
        values: Sequence[bytes],
        *,
        key: bytes | None = None,
        partition: int = 0,
        headers: dict[str, str] | None = None,
    ) -> list[str]:
        """Send messages to one partition, in order.

        Returns:
            The position of each, `TOPIC/PARTITION#OFFSET`.

        Raises:
            RuntimeError: not all were confirmed.
        """
        positions: list[str] = []

        def confirmed(error: Any, message: Any) -> None:
            if error is not None:
                raise RuntimeError(f"Kafka did not take a message: {error}")
            positions.append(f"{message.topic()}/{message.partition()}#{message.offset()}")

        for value in values:
            self._producer.produce(
                topic,
                value=value,
                key=key,
                partition=partition,
                headers=[*(headers or {}).items()],
                on_delivery=confirmed,
            )
        if self._producer.flush(_SECONDS):
            raise RuntimeError(f"Kafka confirmed {len(positions)} of {len(values)} messages within {_SECONDS:g} s.")
        return positions


@contextmanager
def mock_kafka() -> Iterator[MockKafka]:
    """A Kafka that is there while the block runs.

    Raises:
        ConfigurationError: confluent-kafka is missing.

    Example:
        >>> with mock_kafka() as kafka:
        ...     kafka.send("orders", [b"1", b"2"])
        ['orders/0#0', 'orders/0#1']
    """
    try:
        from confluent_kafka import Producer
    except ModuleNotFoundError as error:
        raise ConfigurationError("The mock Kafka needs confluent-kafka.", fix="pip install confluent-kafka") from error
    yield MockKafka(Producer({"test.mock.num.brokers": 1}))
