"""The example in `examples/orders`: each order is handled once, whatever the broker does."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from examples.orders import app as orders
from examples.orders import create_tables, drop_tables, stock
from examples.orders.models import IN_STOCK, Order, Reservation, Stock
from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Topology
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message, Output, OutputKind
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

    from sqlalchemy import Engine
from uuid import uuid4


@dataclass
class World:
    """Both consumers on one database and one broker."""

    engine: Engine
    broker: InMemoryBroker
    apps: tuple[App, ...]

    def send(self, body: dict[str, Any], type: str, to: str = "orders", **properties: Any) -> UUID:
        output_id = uuid4()
        message = replace(Message(body=json.dumps(body).encode(), type=type, message_id=str(output_id)), **properties)
        output = Output(id=output_id, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=to, message=message)
        assert self.broker.publisher().publish([output], 1) == [None]
        return output_id

    def work(self) -> None:
        """Until both queues are empty."""
        busy = True
        while busy:
            busy = False
            for app in self.apps:
                receiver = self.broker.receiver([app.queue], prefetch=10)
                protocol = app.protocol(self.broker.publisher())
                while (delivery := receiver.receive(0)) is not None:
                    busy = True
                    receiver.settle(delivery, protocol.handle(delivery)[1])
                protocol.dispatcher.flush()
                receiver.close()

    def all(self, model: type[Any]) -> list[Any]:
        with Session(self.engine) as session:
            return list(session.scalars(select(model)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    engine = create_engine_safely(f"sqlite:///{tmp_path}/shop.db")
    make_tables(engine)
    create_tables(engine)
    create_tables(engine)  # harmless
    broker = InMemoryBroker()
    apps = []
    for example in (orders, stock):
        app = App(example.name, database=engine, broker=broker, queue=example.queue, settings=Settings())
        app.registry = example.registry
        app.start()
        apps.append(app)
    bindings = (Binding("audit", "orders.*"),)
    broker.declare(Topology(exchange="idemp", queues=("audit", "answers"), bindings=bindings))
    yield World(engine, broker, tuple(apps))
    drop_tables(engine)
    engine.dispose()


PLACE = {"order_id": 42, "sku": "sku-1", "quantity": 3}


def test_an_order_is_confirmed(world: World) -> None:
    world.send(PLACE, "orders.PlaceOrder")
    world.work()
    (order,) = world.all(Order)
    assert (order.order_id, order.status, order.confirmations) == (42, "confirmed", 1)
    assert [reservation.quantity for reservation in world.all(Reservation)] == [3]
    events = world.broker.browse("audit", 10)
    assert [event.type for event in events] == ["orders.OrderPlaced", "orders.OrderConfirmed"]


def test_the_same_order_under_other_message_ids_is_one_order(world: World) -> None:
    for _ in range(3):
        world.send(PLACE, "orders.PlaceOrder")
        world.work()
    assert [order.confirmations for order in world.all(Order)] == [1]
    assert len(world.all(Reservation)) == 1
    left = {article.sku: article.quantity for article in world.all(Stock)}
    assert left["sku-1"] == IN_STOCK - 3
    assert len({event.message_id for event in world.broker.browse("audit", 100)}) == 2


def test_what_is_sold_out_is_parked(world: World) -> None:
    world.send({**PLACE, "quantity": IN_STOCK + 1}, "orders.PlaceOrder")
    world.work()
    (letter,) = world.broker.browse("stock.dead", 10)
    assert letter.headers["idemp-dead-reason"] == "Refuse"
    assert world.all(Reservation) == []
    assert [order.status for order in world.all(Order)] == ["placed"]


def test_a_question_is_answered_at_each_delivery(world: World) -> None:
    world.send(PLACE, "orders.PlaceOrder")
    world.work()
    for order_id in (42, 42, 43):
        world.send({"order_id": order_id}, "orders.GetOrder", reply_to="answers")
    world.work()
    answers = [json.loads(answer.body)["status"] for answer in world.broker.browse("answers", 10)]
    assert answers == ["confirmed", "confirmed", "unknown"]
