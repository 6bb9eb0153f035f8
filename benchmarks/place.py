"""The work of all consumers: parse an order of 240 bytes, insert one row, send one message of 110 bytes, ack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from uuid import uuid4

import amqp
import psycopg
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, make_url

from idemp.brokers.rabbitmq import RabbitBroker
from idemp.brokers.rabbitmq.link import addresses
from idemp.identity import uuid7

ORDER = "bench.Order"
DONE = "bench.Done"
NOTE = "y" * 40


class Order(BaseModel):
    __message_type__ = ORDER
    order_id: str
    sku: str
    quantity: int
    note: str


class Done(BaseModel):
    __message_type__ = DONE
    order_id: str
    note: str = NOTE


class Place:
    """Queues and a table of effects of one consumer.

    Args:
        name: Name of the consumer.
        classic: Whether the consumer declares its queue itself, and so as a classic one.
    """

    def __init__(self, name: str, database: str, broker: str, *, classic: bool = False) -> None:
        self.queue, self.out, self.database, self.broker = f"bench-{name}", f"bench-{name}-out", database, broker
        self.table = Table(
            f"effect_{name.replace('-', '_')}",
            MetaData(),
            Column("id", Integer, primary_key=True),
            Column("order_id", String(36)),
        )
        self.insert = insert(self.table)
        self.classic = classic
        self.sent: list[str] = []

    def make(self) -> None:
        """Create the table and the queues."""
        self._query(f"CREATE TABLE IF NOT EXISTS {self.table.name} (id serial PRIMARY KEY, order_id varchar(36) NOT NULL)")
        for queue in (self.out,) if self.classic else (self.queue, self.out):
            RabbitBroker(self.broker).declare(queue, [])

    def load(self, count: int, *, again: bool = False) -> None:
        """Put orders into the queue; the latest ones again, or new ones. Returns when the broker has them all."""
        ids = self.sent[-count:] if again else [uuid7() for _ in range(count)]
        with closing(self._connect()) as connection:
            channel = connection.channel()
            channel.confirm_select()
            waiting = set(range(1, count + 1))
            channel.events["basic_ack"].add(
                lambda tag, multiple: waiting.difference_update(range(1, tag + 1) if multiple else [tag])
            )
            for id in ids:
                order = Order(order_id=id, sku="A-1", quantity=2, note="x" * 150)
                properties = {"message_id": id, "type": ORDER, "content_type": "application/json", "delivery_mode": 2}
                channel._basic_publish(amqp.Message(order.model_dump_json(), **properties), "", self.queue)
            while waiting:
                connection.drain_events(timeout=60)
        self.sent += () if again else ids

    def check(self) -> None:
        """Check that each order has exactly one effect and at least one output, and that no message is left.

        Raises:
            RuntimeError: Something was lost or doubled.
        """
        rows = [row[0] for row in self._query(f"SELECT order_id FROM {self.table.name}")]
        outputs, left = set(self._outputs()), self._left()
        wrong = {"effects": len(rows), "orders": len(set(rows)), "outputs": len(outputs), "left": left}
        right = {"effects": len(self.sent), "orders": len(self.sent), "outputs": len(self.sent), "left": 0}
        if wrong != right:
            raise RuntimeError(f"{self.queue}: {wrong} instead of {right}")

    def _outputs(self) -> Iterator[str]:
        with closing(self._connect()) as connection:
            channel = connection.channel()
            while message := channel.basic_get(self.out, no_ack=True):
                body = json.loads(message.body)
                yield body.get("payload", body)["order_id"]  # event-forge wraps it

    def _left(self) -> int:
        with closing(self._connect()) as connection:
            return int(connection.channel().queue_declare(self.queue, passive=True).message_count)

    def _connect(self) -> amqp.Connection:
        address = addresses(self.broker)[0]
        connection = amqp.Connection(
            f"{address.host}:{address.port}", userid=address.user, password=address.password, virtual_host=address.vhost
        )
        connection.connect()
        return connection

    def _query(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(plain(self.database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def plain(url: str) -> str:
    """Return the URL as psycopg takes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def new_id() -> str:
    return str(uuid4())
