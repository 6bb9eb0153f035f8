"""The work that all variants do: parse an order with pydantic, insert one row, send one message, ack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from idemp import Message, Output
from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Topology
from idemp.messages import OutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

ORDER: Final = "bench.Order"
DONE: Final = "bench.Done"
PREFETCH: Final = 50
_SECONDS: Final = 60.0


class Order(BaseModel):
    """What arrives: 240 bytes of JSON."""

    order_id: str
    sku: str
    quantity: int
    note: str


class Done(BaseModel):
    """What is sent: 110 bytes of JSON."""

    order_id: str
    note: str


def effects_of(variant: str) -> Table:
    """The table that a variant inserts its row into."""
    return Table(
        f"effect_{variant}", MetaData(), Column("id", Integer, primary_key=True), Column("order_id", String(36))
    )


def done_by(order: Order) -> Done:
    """What is sent for an order."""
    return Done(order_id=order.order_id, note="y" * 40)


class Place:
    """Servers, and what they hold for one variant: an input queue, an output queue, a table of effects.

    Args:
        name: the variant.
        engine: the database.
        broker_url: RabbitMQ.
    """

    def __init__(self, name: str, engine: Engine, broker_url: str) -> None:
        self.name = name
        self.engine = engine
        self.broker_url = broker_url
        self.broker = KombuBroker(broker_url)
        self.queue, self.out = f"bench-{name}", f"bench-{name}-out"
        self.effects = effects_of(name)
        self.effects.metadata.create_all(engine)
        self.insert = insert(self.effects)
        self.broker.declare(Topology(exchange="idemp", queues=(self.queue, self.out)))
        self._publisher = self.broker.publisher()
        self.sent: set[str] = set()

    def send(self, count: int) -> list[str]:
        """Put so many new orders into the input queue; their ids."""
        ids = [str(uuid4()) for _ in range(count)]
        self.send_again(ids)
        return ids

    def send_again(self, ids: Sequence[str]) -> None:
        """Put orders into the input queue, whether they were there before or not."""
        refusals = self._publisher.publish([self._arrival(each) for each in ids], _SECONDS)
        if any(refusals):
            raise RuntimeError(f"the broker did not take the orders: {refusals}")
        self.sent.update(ids)

    def _arrival(self, order_id: str) -> Output:
        order = {"order_id": order_id, "sku": "A-1", "quantity": 2, "note": "x" * 150}
        message = Message(body=json.dumps(order).encode(), type=ORDER, message_id=order_id)
        return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=self.queue, message=message)

    def conserved(self) -> str:
        """What is wrong: each order has one effect, and its output is in the queue; empty if nothing is."""
        with self.engine.connect() as connection:
            effects = connection.scalar(select(func.count()).select_from(self.effects))
            orders = connection.scalar(select(func.count(self.effects.c.order_id.distinct())))
        outputs = {
            json.loads(message.body)["order_id"] for message in self.broker.browse(self.out, 2 * len(self.sent) + 100)
        }
        left = self.broker.depth(self.queue)
        if (effects, orders, outputs, left) == (len(self.sent), len(self.sent), self.sent, 0):
            return ""
        return (
            f"{self.name}: {len(self.sent)} orders, {effects} effects of {orders} orders, "
            f"outputs of {len(outputs)}, {left} left in the queue"
        )

    def empty(self) -> None:
        """Take the outputs out, once they are counted, so that no queue ages."""
        with self.broker.take(self.out, None, 10_000_000) as taken:
            for index in range(len(taken.messages)):
                taken.accept(index)

    def close(self) -> None:
        """Close what is open."""
        self._publisher.close()
