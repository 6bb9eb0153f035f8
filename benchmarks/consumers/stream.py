"""FastStream, which deduplicates nothing by itself, with an inbox written by hand and asynchronous SQLAlchemy."""

from __future__ import annotations

import asyncio

from faststream import AckPolicy
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from sqlalchemy import String
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.consumers.plain import PREFETCH
from benchmarks.place import DONE, Done, Order, new_id
from benchmarks.seats import Seat


class _Base(DeclarativeBase):
    pass


class _Seen(_Base):
    __tablename__ = "stream_seen"
    message_id: Mapped[str] = mapped_column(String(36), primary_key=True)


class _ToSend(_Base):
    __tablename__ = "stream_to_send"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]
    sent: Mapped[bool] = mapped_column(default=False)


async def opened(seat: Seat) -> None:
    """Wait at the gate without blocking the loop."""
    if not seat.gate.is_set():
        await asyncio.to_thread(seat.gate.wait)


async def main(seat: Seat) -> None:
    place = seat.place
    engine = create_async_engine(place.database, pool_size=PREFETCH)
    async with engine.begin() as connection:
        await connection.run_sync(_Base.metadata.create_all)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    broker = RabbitBroker(place.broker, default_channel=Channel(prefetch_count=PREFETCH), logger=None)

    @broker.subscriber(RabbitQueue(place.queue, declare=False), ack_policy=AckPolicy.MANUAL)
    async def receive(order: Order, message: RabbitMessage) -> None:
        await opened(seat)
        async with sessions() as session:
            if await session.get(_Seen, message.message_id) is None:
                session.add(_Seen(message_id=message.message_id))
                await session.execute(place.insert, {"order_id": order.order_id})
                row = _ToSend(body=Done(order_id=order.order_id).model_dump_json())
                session.add(row)
                await session.commit()
                await broker.publish(
                    row.body.encode(),
                    queue=place.out,
                    persist=True,
                    mandatory=True,
                    message_type=DONE,
                    message_id=new_id(),
                    correlation_id=message.message_id,
                    content_type="application/json",
                )
                row.sent = True
                await session.commit()
        await message.ack()
        seat.settled()

    async with broker:
        await broker.start()
        seat.ready()
        await asyncio.to_thread(seat.stopped.wait)
    await engine.dispose()


def consume(seat: Seat) -> None:
    asyncio.run(main(seat))
