"""What is peculiar to stream queues: other queues are refused, properties, entries of the broker's own, idle connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from amqp import Connection
from amqp import Message as AmqpMessage
from sqlalchemy import make_url

from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.streams import StreamQueues
from idemp.cloudevents import unwrap
from idemp.columns import columns_of, message_of
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.messages import Message
from idemp.testing import FaultProxy
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.spark.sources.grounds import StreamGround, declare, messages

pytestmark = pytest.mark.slow

EVENT = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "shop.Placed"}


@pytest.fixture
def ground(rabbitmq_url: str) -> Iterator[StreamGround]:
    made = StreamGround(rabbitmq_url)
    yield made
    made.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., StreamQueues]]:
    made: list[StreamQueues] = []

    def opened(url: str, **options: Any) -> StreamQueues:
        made.append(StreamQueues(url, **options))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[FaultProxy]:
    host, port = rabbitmq_url.partition("@")[2].partition("/")[0].split(":")
    with FaultProxy(host, int(port)) as proxy:
        yield proxy


def publish(url: str, queue: str, body: bytes, **properties: Any) -> None:
    """As any producer does it."""
    parts = make_url(url)
    where = f"{parts.host}:{parts.port}"
    connecting = Connection(
        where,
        userid=parts.username,
        password=parts.password,
        virtual_host=parts.database,
        confirm_publish=True,
    )
    with closing(connecting) as connection:
        connection.connect()
        connection.channel().basic_publish(AmqpMessage(body, **properties), routing_key=queue)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_queue_that_is_no_stream_is_refused_and_keeps_its_messages(
    rabbitmq_url: str, opened: Callable[..., StreamQueues], kind: str
) -> None:
    declare(rabbitmq_url, "plain", {"x-queue-type": kind})
    publish(rabbitmq_url, "plain", b"{}")
    queues = opened(rabbitmq_url)
    for asking in (queues.first, queues.end, lambda queue: list(queues.read(queue, 0, 1))):
        with pytest.raises(ConfigurationError, match=r"'plain'.*can't be read as a stream.*idemp pipeline spool"):
            asking("plain")
    wait_until(lambda: KombuBroker(rabbitmq_url).depth("plain") == 1, "the message to be back")


def test_queue_that_is_missing(rabbitmq_url: str, opened: Callable[..., StreamQueues]) -> None:
    with pytest.raises(ConfigurationError, match="no queue 'nowhere'") as raised:
        opened(rabbitmq_url).end("nowhere")
    assert "guest:guest" not in str(raised.value)


def test_broker_that_is_away(opened: Callable[..., StreamQueues]) -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        opened("pyamqp://guest:guest@127.0.0.1:1").first("orders")


@pytest.mark.parametrize(
    "properties",
    [
        {
            "message_id": "m-1",
            "type": "t",
            "correlation_id": "c",
            "reply_to": "till",
            "priority": 3,
            "expiration": "9000",
        },
        {
            "timestamp": int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()),
            "content_type": "text/plain",
            "content_encoding": "gzip",
        },
        {"application_headers": {"text": "É", "number": 7, "big": 2**40, "yes": True, "none": None, "real": 1.5}},
        {"application_headers": {f"cloudEvents:{name}": value for name, value in EVENT.items()}},
        {},
    ],
)
def test_message_is_what_a_consumer_sees(
    rabbitmq_url: str, ground: StreamGround, opened: Callable[..., StreamQueues], properties: dict[str, Any]
) -> None:
    """The same message in a classic queue, received by a worker's receiver."""
    declare(rabbitmq_url, "plain", {"x-queue-type": "classic"})
    body = b'{"a": "\xc3\x89"}'
    for queue in ("plain", ground.partition):
        publish(rabbitmq_url, queue, body, **properties)
    with closing(KombuBroker(rabbitmq_url).receiver(["plain"], prefetch=1)) as receiver:
        delivery = receiver.receive(10)
    assert delivery is not None
    ((offset, message),) = opened(rabbitmq_url).read(ground.partition, 0, 1)
    assert (offset, message) == (0, delivery.message)
    row = columns_of(message, "orders#0")
    arrived = unwrap(delivery.message)
    back = message_of(*row[:5])
    # A row has no time to live and no priority: the broker has done with them.
    assert back == Message(**{**{name: getattr(arrived, name) for name in fields()}, "ttl": None, "priority": None})


def fields() -> list[str]:
    from dataclasses import fields

    return [field.name for field in fields(Message)]


def test_structured_cloudevent(rabbitmq_url: str, ground: StreamGround, opened: Callable[..., StreamQueues]) -> None:
    body = b'{"specversion":"1.0","id":"e-1","source":"/shop","type":"shop.Placed","data":{"sku":"A"}}'
    publish(rabbitmq_url, ground.partition, body, content_type="application/cloudevents+json")
    ((_, message),) = opened(rabbitmq_url).read(ground.partition, 0, 1)
    row = columns_of(message, "orders#0")
    assert (row.id, row.type, row.body) == ("e-1", "shop.Placed", b'{"sku":"A"}')
    assert unwrap(message_of(*row[:5])) == message_of(*row[:5]), "whoever takes it apart once more finds the same"


def test_entries_of_the_brokers_own_are_gaps(
    rabbitmq: object, unique_name: str, ground: StreamGround, opened: Callable[..., StreamQueues], rabbitmq_url: str
) -> None:
    """A consumer's stored offset stands in the stream itself: it is no message, and nothing is lost."""
    if not isinstance(rabbitmq, RabbitMQ):
        pytest.skip("needs to look into the node")
    ground.put(messages(3))
    rabbitmq.evaluate(
        f'Name = rabbit_misc:r(<<"{unique_name}">>, queue, <<"{ground.partition}">>), '
        "{ok, Q} = rabbit_amqqueue:lookup(Name), "
        'osiris:write_tracking(amqqueue:get_pid(Q), <<"reader">>, 2)'
    )
    ground.put(messages(3, first=3))
    queues = opened(rabbitmq_url)
    end = queues.end(ground.partition)
    assert end == 7, "six messages and one entry"
    found = list(queues.read(ground.partition, 0, end))
    assert [message.message_id for _, message in found] == [f"m-{number}" for number in range(6)]
    assert [offset for offset, _ in found] == [0, 1, 2, 4, 5, 6]
    assert [offset for offset, _ in queues.read(ground.partition, 2, 4)] == [2]
    assert [offset for offset, _ in queues.read(ground.partition, 3, 5)] == [4]


def test_slow_reader_keeps_its_connection(
    rabbitmq_url: str, ground: StreamGround, opened: Callable[..., StreamQueues]
) -> None:
    """Nobody takes messages for longer than RabbitMQ waits for a heartbeat."""
    ground.put(messages(300))
    reading = opened(rabbitmq_url, heartbeat=1, prefetch=10).read(ground.partition, 0, 300)
    taken = [next(reading)]
    assert not threading.Event().wait(4)
    taken += reading
    assert [offset for offset, _ in taken] == list(range(300))


def test_watching_goes_on_after_a_lost_connection(
    ground: StreamGround, proxy: FaultProxy, rabbitmq_url: str, opened: Callable[..., StreamQueues]
) -> None:
    queues = opened(proxy.through(rabbitmq_url))
    ground.put(messages(5))
    assert queues.end(ground.partition) == 5
    proxy.cut()
    ground.put(messages(5, first=5))
    assert queues.end(ground.partition) == 10
    proxy.refuse()
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        queues.end(ground.partition)


def test_reader_that_lost_its_connection_says_so(
    ground: StreamGround, proxy: FaultProxy, rabbitmq_url: str, opened: Callable[..., StreamQueues]
) -> None:
    ground.put(messages(300))
    queues = opened(proxy.through(rabbitmq_url), prefetch=10)
    reading = queues.read(ground.partition, 0, 300)
    taken = [next(reading)]
    proxy.cut()
    with pytest.raises(BrokerUnavailable, match="read again"):
        taken += reading
    assert [offset for offset, _ in queues.read(ground.partition, 0, 300)] == list(range(300))
    assert len(taken) < 300


def test_no_more_is_sent_ahead_than_was_asked_for(
    ground: StreamGround, proxy: FaultProxy, rabbitmq_url: str, opened: Callable[..., StreamQueues]
) -> None:
    """Each message here is a chunk of its own."""
    body = b"x" * 10_000
    for number in range(60):
        ground.put([Message(body=body, message_id=str(number))])
    end = opened(rabbitmq_url).end(ground.partition)
    assert end is not None
    reading = opened(proxy.through(rabbitmq_url), prefetch=10).read(ground.partition, 0, end)
    next(reading)
    assert not threading.Event().wait(0.5)
    assert proxy.bytes_to_client < 25 * len(body)
    assert len(list(reading)) == 59
