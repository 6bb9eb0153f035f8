"""What the conformance suite needs of each source: messages put in, a log opened, the oldest of it gone."""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from amqp import Connection
from confluent_kafka import Producer
from sqlalchemy import make_url

from idemp.broker.kombu import ConfirmingPublisher
from idemp.broker.kombu.streams import StreamQueues
from idemp.columns import columns_of
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message, Output, OutputKind
from idemp.spark.sources.kafka import KafkaLog
from idemp.spark.sources.planning import Log
from idemp.spark.sources.rabbitmq import StreamLog
from idemp.spark.sources.spool import SpoolLog
from idemp.spark.testing import mock_kafka
from idemp.spool import Level, SpoolStore
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Engine

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LARGE = b"[" + b"1" * 899_998 + b"]"


def message(number: int, *, body: bytes | None = None) -> Message:
    """A message that says which one it is."""
    return Message(
        body=b'{"number": %d}' % number if body is None else body,
        type="shop.Order",
        message_id=f"m-{number}",
        headers={"tenant": "north"},
        timestamp=MOMENT,
    )


def messages(count: int, first: int = 0) -> list[Message]:
    """Some of them, in order."""
    return [message(number) for number in range(first, first + count)]


class Ground(Protocol):
    """One kind of source.

    Attributes:
        format: what Spark calls it.
        partition: its only partition.
        options: for Spark.
        secrets: arguments of `sources.register`.
        secret: a password among them, which must show nowhere.
    """

    format: str
    partition: str
    options: Mapping[str, str]
    secrets: Mapping[str, object]
    secret: str

    def put(self, sent: Sequence[Message]) -> None:
        """Add messages; returns when they are there for good."""
        ...

    def open(self) -> Log:
        """A log of its own connections."""
        ...

    def trim(self) -> None:
        """Let the oldest message go; what was put before this stands at the beginning."""
        ...

    def close(self) -> None:
        """End."""
        ...


class StreamGround:
    """A stream queue of RabbitMQ."""

    format = "idemp-stream"
    secret = "guest:guest"

    def __init__(self, url: str, queue: str = "orders") -> None:
        self._url = url
        self.partition = queue
        self.options = {"queues": queue}
        self.secrets = {"broker": url}
        self._publisher = ConfirmingPublisher(url)
        declare_stream(url, queue, {"x-stream-max-segment-size-bytes": 500_000, "x-max-length-bytes": 1_000_000})

    def put(self, sent: Sequence[Message]) -> None:
        outputs = [
            Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=self.partition, message=each)
            for each in sent
        ]
        assert self._publisher.publish(outputs, 20) == [None] * len(outputs)

    def open(self) -> Log:
        return StreamLog(StreamQueues(self._url), [self.partition])

    def trim(self) -> None:
        """The broker drops segments when it begins a new one."""

        def trimmed() -> bool:
            self.put([message(10_000, body=LARGE)])
            with closing(self.open()) as log:
                return (log.first(self.partition) or 0) > 0

        wait_until(trimmed, "the stream's first segment to go")

    def close(self) -> None:
        self._publisher.close()


class SpoolGround:
    """A spool in PostgreSQL."""

    format = "idemp-spool"
    partition = "orders"

    def __init__(self, url: str) -> None:
        self._url = url
        self.options = {"queue": self.partition}
        self.secrets = {"database": url}
        self.secret = make_url(url).password or url
        self._engine = create_engine_safely(url)
        self._store = SpoolStore(self._engine)
        self._store.create(self.partition)

    def put(self, sent: Sequence[Message]) -> None:
        assert self._store.append(self.partition, [columns_of(each, "") for each in sent])

    def open(self) -> Log:
        engine: Engine = create_engine_safely(self._url)
        return SpoolLog(engine, SpoolStore(engine), self.partition)

    def trim(self) -> None:
        level = self._store.level(self.partition)
        assert self._store.release(self.partition, level.first + 1) == 1

    def level(self) -> Level:
        """What it holds."""
        return self._store.level(self.partition)

    def close(self) -> None:
        self._engine.dispose()


class KafkaGround:
    """A partition of librdkafka's own mock cluster."""

    format = "idemp-kafka"
    secret = "kafka-secret"

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.partition = f"{topic}/0"
        self.options = {"topics": topic}
        self._stack = ExitStack()
        self._kafka = self._stack.enter_context(mock_kafka())  # it ends with the last who holds it
        self._servers = {"bootstrap.servers": self._kafka.servers}
        # Not used without SASL; it must show nowhere all the same.
        self.secrets = {"kafka": {**self._servers, "sasl.password": self.secret}}
        self._producer = Producer({**self._servers, "linger.ms": 0})
        self._producer.list_topics(topic, timeout=10)  # makes it

    def put(self, sent: Sequence[Message]) -> None:
        for each in sent:
            named = {"id": each.message_id, "type": each.type, **each.headers}
            self._producer.produce(
                self._topic,
                each.body,
                partition=0,
                headers=[(name, str(value).encode()) for name, value in named.items()],
                timestamp=int(MOMENT.timestamp() * 1000),
            )
        assert self._producer.flush(20) == 0

    def open(self) -> Log:
        return KafkaLog(self._servers, [self._topic], id_from="header:id", type_from="header:type")

    def trim(self) -> None:
        """The mock cluster keeps 5 MiB of each partition."""
        self.put([message(10_000 + number, body=LARGE) for number in range(8)])

    def close(self) -> None:
        del self._producer
        self._stack.close()


def declare_stream(url: str, queue: str, arguments: Mapping[str, object]) -> None:
    """Make a stream queue."""
    declare(url, queue, {"x-queue-type": "stream", **arguments})


def declare(url: str, queue: str, arguments: Mapping[str, object]) -> None:
    """Make a durable queue."""
    parts = make_url(url)
    connecting = Connection(
        f"{parts.host}:{parts.port}", userid=parts.username, password=parts.password, virtual_host=parts.database or "/"
    )
    with closing(connecting) as connection:
        connection.connect()
        connection.channel().queue_declare(queue, durable=True, auto_delete=False, arguments=dict(arguments))
