"""A producer that knows nothing of idemp: bare py-amqp, with `type` and `message_id` properties only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import amqp
import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from examples.orders import create_tables
from examples.orders.models import Order
from idemp.classification import MAX_DEFERRALS
from idemp.inbox.sql import create_engine_safely
from idemp.messages import DEFERRED_HEADER
from tests.inbox.sql.kept import make_tables
from tests.servers.forked import Forked
from tests.servers.process import wait_until

ROOT = Path(__file__).parents[2]


class Client:
    """What a service in any language would do with its own AMQP client."""

    def __init__(self, url: str) -> None:
        parts = make_url(url)
        self._connection = amqp.Connection(
            host=f"{parts.host}:{parts.port}",
            userid=parts.username,
            password=parts.password,
            virtual_host=parts.database or "/",
            confirm_publish=True,  # else a queue that has just been declared may lose what comes first
        )
        self._connection.connect()
        self.channel = self._connection.channel()

    def put(self, queue: str, message_type: str, message_id: str, body: bytes, **properties: Any) -> None:
        message = amqp.Message(body, type=message_type, message_id=message_id, **properties)

        def accepted() -> bool:
            # A quorum queue that has just been declared refuses what comes before it has its leader.
            with suppress(amqp.exceptions.MessageNacked):
                self.channel.basic_publish(message, exchange="", routing_key=queue, mandatory=True)
                return True
            return False

        wait_until(accepted, f"{queue} accepts a message")

    def get(self, queue: str, count: int) -> list[amqp.Message]:
        found: list[amqp.Message] = []

        def enough() -> bool:
            while (message := self.channel.basic_get(queue, no_ack=True)) is not None:
                found.append(message)
            return len(found) >= count

        wait_until(enough, f"{count} messages in {queue}")
        return found

    def exists(self, queue: str) -> bool:
        channel = self._connection.channel()
        try:
            channel.queue_declare(queue, passive=True)
        except amqp.NotFound:
            return False
        channel.close()
        return True

    def close(self) -> None:
        self._connection.close()


@contextmanager
def worker(database: str, broker: str) -> Iterator[None]:
    environment = {**os.environ, "IDEMP_DATABASE_URL": database, "IDEMP_BROKER_URL": broker}
    arguments = ["worker", "examples.orders:app", "--log-level", "warning"]
    process = Forked(arguments, folder=ROOT, environment=environment)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture
def engine(postgresql_url: str) -> Iterator[Engine]:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def client(rabbitmq_url: str) -> Iterator[Client]:
    client = Client(rabbitmq_url)
    yield client
    client.close()


def orders(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(Order)) or 0


def test_sent_twice_executed_once_outputs_twice_under_the_same_ids(
    client: Client, engine: Engine, postgresql_url: str, rabbitmq_url: str
) -> None:
    client.channel.queue_declare("stock", durable=True, auto_delete=False)
    client.channel.queue_declare("audit", durable=True, auto_delete=False)
    client.channel.exchange_declare("idemp", "topic", durable=True, auto_delete=False)
    client.channel.queue_bind("audit", "idemp", "orders.OrderPlaced")
    with worker(postgresql_url, rabbitmq_url):
        wait_until(lambda: client.exists("orders"), "the worker's queue")
        body = json.dumps({"order_id": 17, "sku": "sku-1", "quantity": 2}).encode()
        for _ in range(2):
            client.put("orders", "orders.PlaceOrder", "order-17", body)
        commands, events = client.get("stock", 2), client.get("audit", 2)
    assert orders(engine) == 1
    for messages, message_type in ((commands, "stock.ReserveStock"), (events, "orders.OrderPlaced")):
        assert {message.properties["type"] for message in messages} == {message_type}
        assert len({message.properties["message_id"] for message in messages}) == 1
        assert len({message.body for message in messages}) == 1
        assert {message.properties["content_type"] for message in messages} == {"application/json"}
        assert {message.properties["correlation_id"] for message in messages} == {"order-17"}
        assert {message.headers["idemp-causation-id"] for message in messages} == {"order-17"}
        assert {message.properties["delivery_mode"] for message in messages} == {2}
    assert json.loads(commands[0].body) == {"order_id": 17, "sku": "sku-1", "quantity": 2}
    assert [message.headers.get("idemp-redispatched") for message in commands] == [None, 1]


def test_a_question_is_answered_to_reply_to_under_its_correlation_id(
    client: Client, engine: Engine, postgresql_url: str, rabbitmq_url: str
) -> None:
    del engine  # it has made the tables
    client.channel.queue_declare("answers", durable=True, auto_delete=False)
    with worker(postgresql_url, rabbitmq_url):
        wait_until(lambda: client.exists("orders"), "the worker's queue")
        client.put("orders", "orders.GetOrder", "q-1", b'{"order_id": 1}', reply_to="answers", correlation_id="talk-1")
        (answer,) = client.get("answers", 1)
    assert json.loads(answer.body) == {"order_id": 1, "status": "unknown"}
    assert answer.properties["correlation_id"] == "talk-1"
    assert answer.properties["type"] == "orders.OrderView"


def test_a_message_of_unknown_type_waits_in_the_dead_letter_queue_with_the_reason(
    client: Client, engine: Engine, postgresql_url: str, rabbitmq_url: str
) -> None:
    """Once the queue is known to be the app's own, and the message has gone round often enough."""
    del engine
    gone_round = {"application_headers": {DEFERRED_HEADER: MAX_DEFERRALS}}
    client.channel.queue_declare("answers", durable=True, auto_delete=False)
    with worker(postgresql_url, rabbitmq_url):
        wait_until(lambda: client.exists("orders"), "the worker's queue")
        client.put("orders", "orders.PlaceOrdr", "m-0", b'{"order_id": 1}', **gone_round)
        client.put("orders", "orders.GetOrder", "q-1", b'{"order_id": 1}', reply_to="answers", correlation_id="talk-1")
        client.get("answers", 1)
        client.put("orders", "orders.PlaceOrdr", "m-1", b'{"order_id": 1}', **gone_round)
        (dead,) = client.get("orders.dead", 1)
    assert dead.headers["idemp-dead-reason"] == "UnknownMessageType"
    assert "orders.PlaceOrder" in dead.headers["idemp-dead-error"]
    assert dead.properties["message_id"] == "m-1"
