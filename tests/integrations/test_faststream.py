"""Idempotent subscribers of FastStream: in its test broker, and in processes that are killed, on real RabbitMQ and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import AckMessage
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue, TestRabbitBroker
from faststream.redis import RedisBroker
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from idemp import AsyncInbox, ConfigurationError
from idemp.errors import BlockEnded, Conflict, Unreadable
from idemp.integrations.faststream import Session, install
from tests.servers.databases import query

CHANNEL = Channel(prefetch_count=2)
NACK: Any = {"ack_policy": AckPolicy.NACK_ON_ERROR, "channel": CHANNEL}


class Pay(BaseModel):
    order_id: int
    cents: int = 100


class Shop:
    """Subscribers in the process of a test."""

    def __init__(self, url: str) -> None:
        self.ran, self.arrived, self.reader = list[str](), list[tuple[Any, str]](), create_engine(url)
        self.query("CREATE TABLE changed (what TEXT)")
        self.engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        self.broker = broker = RabbitBroker("amqp://localhost/shop")
        self.idempotent = idempotent = install(broker, AsyncInbox(self.engine), consumer="shop")

        @broker.subscriber(RabbitQueue("orders"), **NACK)
        @broker.publisher("parcels")
        @idempotent("shop.Pay")
        async def pay(order: Pay, session: Session) -> dict[str, int]:
            await self.change(session, f"pay {order.order_id}")
            await broker.publish({"order": order.order_id}, "notes", headers={"by": "pay"}, expiration=60)
            if order.cents < 0:
                raise ValueError("negative")
            if order.cents == 0:
                raise AckMessage
            return {"parcel": order.order_id}

        @broker.subscriber(RabbitQueue("parcels"), **NACK)
        @idempotent("shop.Pack", key=lambda message: message.body.decode())
        async def pack(parcel: dict[str, int], session: Session) -> None:
            await self.change(session, f"pack {parcel['parcel']}")

        @broker.subscriber("notes")
        async def note(body: dict[str, int], message: RabbitMessage) -> None:
            self.arrived.append((body["order"], message.message_id))

    async def change(self, session: AsyncSession, what: str) -> None:
        self.ran.append(what)
        await session.execute(text("INSERT INTO changed VALUES (:what)"), {"what": what})

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.reader.begin() as connection:
            found = connection.execute(text(statement))
            return [tuple(row) for row in found] if found.returns_rows else []

    def run(self, steps: Callable[[RabbitBroker], Coroutine[Any, Any, None]]) -> list[str]:
        """Run steps in the test broker, and return what is committed."""

        async def run() -> None:
            async with TestRabbitBroker(self.broker) as broker:
                await steps(broker)
            await self.engine.dispose()

        asyncio.run(run())
        return [what for (what,) in self.query("SELECT what FROM changed")]


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    shop.reader.dispose()


def test_what_a_subscriber_publishes_arrives_after_commit(shop: Shop) -> None:
    async def steps(broker: RabbitBroker) -> None:
        for _ in range(2):
            await broker.publish(Pay(order_id=7), "orders", message_id="seven")

    assert shop.run(steps) == ["pay 7", "pack 7"]
    assert shop.ran == ["pay 7", "pack 7"]
    assert [order for order, _ in shop.arrived] == [7]
    assert shop.query("SELECT 1 FROM idemp_pending") == []


def test_a_subscriber_that_fails_publishes_nothing(shop: Shop) -> None:
    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(ValueError, match="negative"):
            await broker.publish(Pay(order_id=7, cents=-1), "orders", message_id="seven")
        await broker.publish(Pay(order_id=8, cents=0), "orders", message_id="eight")  # acknowledged, so committed

    assert shop.run(steps) == ["pay 8"]
    assert [order for order, _ in shop.arrived] == [8]
    assert shop.query("SELECT count(*) FROM idemp_inbox") == [(1,)]
