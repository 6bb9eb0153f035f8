"""The work that all variants do: parse an order with pydantic, insert one row, send one message, ack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from idemp import Message, Output
from idemp.broker.making import make_broker
from idemp.broker.port import Topology
from idemp.messages import OutputKind
from idemp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

ORDER: Final = "bench.Order"
DONE: Final = "bench.Done"
PREFETCH: Final = 50
SETTINGS: Final = Settings(prefetch=PREFETCH, allow_at_most_once=True)  # Redis promises no more
_SECONDS: Final = 60.0
_POISON: Final = "poison"


class Order(BaseModel):
    """What arrives: 240 bytes of JSON."""

    order_id: str
    sku: str
    quantity: int
    note: str

    @property
    def is_poison(self) -> bool:
        """Whether its handler is to raise."""
        return self.note.startswith(_POISON)


class Done(BaseModel):
    """What is sent: 110 bytes of JSON, unless the note is to be longer."""

    order_id: str
    note: str


def effects_of(variant: str) -> Table:
    """The table that a variant inserts its row into."""
    return Table(
        f"effect_{variant}", MetaData(), Column("id", Integer, primary_key=True), Column("order_id", String(36))
    )


def done_output(done: Done, correlation_id: str | None, queue: str) -> Output:
    """The message that is sent for an order."""
    output_id = uuid4()
    message = Message(
        body=done.model_dump_json().encode(), type=DONE, message_id=str(output_id), correlation_id=correlation_id
    )
    return Output(id=output_id, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message)


class Place:
    """Servers, and what they hold for one variant: an input queue, an output queue, a table of effects.

    Args:
        name: the variant.
        engine: the database.
        broker_url: RabbitMQ, Redis, or a file of ours.
        failing: the share of orders whose handler raises.
        note: bytes of the note in what is sent.
        queue_is_declared_elsewhere: by a consumer that takes no queue but its own.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        broker_url: str,
        *,
        failing: float = 0.0,
        note: int = 40,
        queue_is_declared_elsewhere: bool = False,
    ) -> None:
        self.name = name
        self.engine = engine
        self.broker_url = broker_url
        self.broker = make_broker(broker_url, SETTINGS)
        self.queue, self.out = f"bench-{name}", f"bench-{name}-out"
        self.effects = effects_of(name)
        self.effects.metadata.create_all(engine)
        self.insert = insert(self.effects)
        queues = (self.out,) if queue_is_declared_elsewhere else (self.queue, self.out)
        self.broker.declare(Topology(exchange="idemp", queues=queues))
        self._publisher = self.broker.publisher()
        self._failing = failing
        self._note = "y" * note
        self._sent: set[str] = set()
        self._poison: set[str] = set()

    def done_by(self, order: Order) -> Done:
        """What is sent for an order."""
        return Done(order_id=order.order_id, note=self._note)

    def send(self, count: int) -> list[str]:
        """Put so many new orders into the input queue; their ids."""
        ids = [str(uuid4()) for _ in range(count)]
        failing = round(count * self._failing)
        self._poison.update(ids[number * count // failing] for number in range(failing))
        self.send_again(ids)
        return ids

    def send_again(self, ids: Sequence[str]) -> None:
        """Put orders into the input queue, whether they were there before or not."""
        refusals = [each for each in self._publisher.publish([self._arrival(each) for each in ids], _SECONDS) if each]
        if refusals:
            raise RuntimeError(f"the broker did not take {len(refusals)} orders: {refusals[0]}")
        self._sent.update(ids)

    def _arrival(self, order_id: str) -> Output:
        note = _POISON if order_id in self._poison else ""
        order = Order(order_id=order_id, sku="A-1", quantity=2, note=note.ljust(150, "x"))
        message = Message(body=order.model_dump_json().encode(), type=ORDER, message_id=order_id)
        return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=self.queue, message=message)

    def conserved(self) -> str:
        """What is wrong; empty if each order has one effect and its output is in the queue, and poison is parked."""
        good = self._sent - self._poison
        with self.engine.connect() as connection:
            effects = connection.scalar(select(func.count()).select_from(self.effects))
            orders = set(connection.scalars(select(self.effects.c.order_id).distinct()))
        outputs = {_order_of(message.body) for message in self.broker.browse(self.out, 3 * len(self._sent) + 100)}
        left = self.broker.depth(self.queue)
        parked = self.broker.depth(f"{self.queue}.dead") if self._poison else 0
        if (effects, orders, outputs, left, parked) == (len(good), good, good, 0, len(self._poison)):
            return ""
        return (
            f"{self.name}: {len(good)} orders, {effects} effects of {len(orders)} orders, outputs of {len(outputs)}, "
            f"{left} left in the queue, {parked} of {len(self._poison)} parked"
        )

    def close(self) -> None:
        """Close what is open."""
        self._publisher.close()


def _order_of(body: bytes) -> str:
    found = json.loads(body)
    return str(found.get("payload", found)["order_id"])  # some put an envelope of their own around it
