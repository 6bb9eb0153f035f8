"""20 handlers at once on an event loop: aio-pika with asyncpg or with SQLAlchemy, without a framework, and idemp."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aio_pika
import asyncpg
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.place import DONE, Done, Order, new_id, plain
from benchmarks.seats import Seat
from idemp import App, AsyncContext, Idempotent, Settings
from idemp.worker import Worker

CONCURRENCY = 20


async def consume(seat: Seat, effect: Callable[[str], Awaitable[None]]) -> None:
    """One transaction, which is the effect, one confirmed publish, one ack; no deduplication."""
    connection = await aio_pika.connect(seat.place.broker)
    incoming, outgoing = await connection.channel(), await connection.channel(publisher_confirms=True)
    await incoming.set_qos(CONCURRENCY)

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        while not seat.gate.is_set():  # noqa: ASYNC110 - the gate is another process's
            await asyncio.sleep(0.001)
        order = Order.model_validate_json(message.body)
        await effect(order.order_id)
        body = Done(order_id=order.order_id).model_dump_json().encode()
        done = aio_pika.Message(
            body,
            content_type="application/json",
            type=DONE,
            message_id=new_id(),
            correlation_id=message.message_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await outgoing.default_exchange.publish(done, seat.place.out, mandatory=True)
        await message.ack()
        seat.settled()

    queue = await incoming.get_queue(seat.place.queue, ensure=False)
    await queue.consume(on_message)
    seat.ready()
    await asyncio.to_thread(seat.stopped.wait)
    await connection.close()


async def by_asyncpg(seat: Seat) -> None:
    pool = await asyncpg.create_pool(plain(seat.place.database), min_size=CONCURRENCY, max_size=CONCURRENCY)
    insert = f"INSERT INTO {seat.place.table.name} (order_id) VALUES ($1)"

    async def effect(order_id: str) -> None:
        async with pool.acquire() as database, database.transaction():
            await database.execute(insert, order_id)

    await consume(seat, effect)
    await pool.close()


async def by_sqlalchemy(seat: Seat, driver: str) -> None:
    """Run the very statement of idemp's handler."""
    engine = create_async_engine(_on(driver, seat), pool_size=CONCURRENCY, max_overflow=0)

    async def effect(order_id: str) -> None:
        async with engine.begin() as database:
            await database.execute(seat.place.insert, {"order_id": order_id})

    await consume(seat, effect)
    await engine.dispose()


def bare(seat: Seat, driver: str = "") -> None:
    asyncio.run(by_sqlalchemy(seat, driver) if driver else by_asyncpg(seat))


class Seated(Worker):
    """Consumes while the gate is open."""

    seat: Seat

    def step(self, *, poll: float = 0.05) -> int:
        self.seat.gate.wait()
        if self.seat.stopped.is_set():
            self.stop()
        return super().step(poll=poll)


def own(seat: Seat, driver: str) -> None:
    settings = Settings(database_url=_on(driver, seat), broker_url=seat.place.broker, concurrency=CONCURRENCY)
    app = App(seat.place.queue, settings=settings)

    @app.handler(Order, policy=Idempotent())
    async def place_order(order: Order, ctx: AsyncContext) -> None:
        await ctx.connection.execute(seat.place.insert, {"order_id": order.order_id})
        ctx.send(Done(order_id=order.order_id), to=seat.place.out)

    worker = Seated(app)
    worker.seat = seat
    receiver: Any = worker.intake.receiver
    ack = receiver.ack

    def counted(deliveries: Sequence[Any]) -> None:
        ack(deliveries)
        seat.settled(len(deliveries))

    receiver.ack = counted
    gc.freeze()  # as `idemp worker` does
    seat.ready()
    worker.run()


def _on(driver: str, seat: Seat) -> str:
    return make_url(seat.place.database).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
