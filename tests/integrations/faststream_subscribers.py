"""The subscribers of the tests of FastStream. `python -m tests.integrations.faststream_subscribers` runs them until it is killed."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitExchange, RabbitQueue
from pydantic import BaseModel
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from idemp import AsyncInbox
from idemp.brokers.rabbitmq.publisher import RabbitPublisher
from idemp.integrations.faststream import Session, install
from idemp.worker.relay_thread import RelayThread

URL = os.environ.get("IDEMP_DATABASE_URL", "postgresql://")
TOGETHER = 8
unsent, unacked = list[int](), list[int]()
"""Locks for which the relay waits between COMMIT and send, and subscribers between COMMIT and ack."""
sending, waking = RabbitPublisher.publish, RelayThread.wake


def wait_apart(locks: list[int]) -> None:
    with suppress(IndexError):
        lock = locks.pop()
        with create_engine(URL).connect() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": lock})


def publish(self: RabbitPublisher, outputs: Any, timeout: float) -> Any:
    wait_apart(unsent)
    return sending(self, outputs, timeout)


def wake(self: RelayThread) -> None:
    waking(self)
    wait_apart(unacked)


engine = create_async_engine(make_url(URL).set(drivername="postgresql+psycopg"), pool_size=2 * TOGETHER)
broker = RabbitBroker(os.environ.get("SHOP_BROKER"), reconnect_interval=0.2)
idempotent = install(broker, AsyncInbox(engine), consumer="shop")
app = FastStream(broker)


class Work(BaseModel):
    number: int
    lock: int = 0
    fails: str = ""


def queue(name: str) -> RabbitQueue:
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-delivery-limit": 1000}
    return RabbitQueue(name, queue_type=QueueType.QUORUM, durable=True, arguments=dead)


async def wait(session: AsyncSession, lock: int) -> None:
    await session.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": lock})


async def change(session: AsyncSession, what: str) -> None:
    await session.execute(text("INSERT INTO changed VALUES (:what)"), {"what": what})


@broker.subscriber(queue("storm"), ack_policy=AckPolicy.NACK_ON_ERROR, channel=Channel(prefetch_count=TOGETHER))
@broker.publisher("returned")
@idempotent("shop.Storm")
async def storm(work: Work, session: Session) -> dict[str, int]:
    """Wait at one of four points: before the change, behind it, and behind COMMIT before what is sent, or the ack."""
    if work.number % 4 == 0:
        await wait(session, work.lock)
    await change(session, f"storm {work.number}")
    await broker.publish({"number": work.number}, "published")
    await broker.publish({"number": work.number}, "fan", RabbitExchange("amq.fanout"), mandatory=False)
    if work.number % 4 == 1:
        await wait(session, work.lock)
    if work.number % 4 == 2:
        unsent.append(work.lock)
    if work.number % 4 == 3:
        unacked.append(work.lock)
    return {"number": work.number}


@broker.subscriber(queue("work"), ack_policy=AckPolicy.REJECT_ON_ERROR, channel=Channel(prefetch_count=TOGETHER))
@idempotent("shop.Work")
async def work(work: Work, session: Session) -> None:
    await change(session, f"work {work.number}")
    await broker.publish({"number": work.number}, "published")
    if work.lock:
        await wait(session, work.lock)
    if work.fails == "body":
        raise ValueError("fails")
    if work.fails == "commit":
        await session.execute(text("INSERT INTO once VALUES ('taken'), ('taken')"))


if __name__ == "__main__":
    RabbitPublisher.publish, RelayThread.wake = publish, wake  # type: ignore[method-assign]
    asyncio.run(app.run())
