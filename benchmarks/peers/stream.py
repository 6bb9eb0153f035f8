"""FastStream with an inbox written by hand: the articles' one, with asynchronous SQLAlchemy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

from faststream import AckPolicy
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.peers.gated import amqp_url, opened, until_stopped
from benchmarks.work import DONE, PREFETCH, Order, Place

if TYPE_CHECKING:
    from benchmarks.outside import Seat


class _Base(DeclarativeBase):
    pass


class _Seen(_Base):
    __tablename__ = "stream_seen"
    message_id: Mapped[str] = mapped_column(primary_key=True)


class _ToSend(_Base):
    __tablename__ = "stream_to_send"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]
    sent: Mapped[bool] = mapped_column(default=False)


class Inbox:
    """As the naive variant does it.

    Args:
        place: queues and table.
        broker: publishes.
        sessions: of the database.
    """

    def __init__(self, place: Place, broker: RabbitBroker, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._place = place
        self._broker = broker
        self._sessions = sessions

    async def handle(self, order: Order, message: RabbitMessage) -> None:
        """Look, insert, COMMIT, publish, mark, COMMIT."""
        async with self._sessions() as session:
            if await session.get(_Seen, message.message_id) is not None:
                return
            session.add(_Seen(message_id=message.message_id))
            await session.execute(self._place.insert, {"order_id": order.order_id})
            row = _ToSend(body=self._place.done_by(order).model_dump_json())
            session.add(row)
            await session.commit()
            await self._publish(row.body, message.message_id)
            row.sent = True
            await session.commit()

    async def _publish(self, body: str, correlation_id: str) -> None:
        await self._broker.publish(
            body.encode(),
            queue=self._place.out,
            persist=True,
            mandatory=True,
            message_type=DONE,
            message_id=str(uuid4()),
            correlation_id=correlation_id,
            content_type="application/json",
        )


async def _consume(seat: Seat) -> None:
    place = seat.place()
    engine = create_async_engine(seat.database, pool_size=PREFETCH)
    async with engine.begin() as connection:
        await connection.run_sync(_Base.metadata.create_all)
    broker = RabbitBroker(amqp_url(seat.broker), default_channel=Channel(prefetch_count=PREFETCH), logger=None)
    inbox = Inbox(place, broker, async_sessionmaker(engine, expire_on_commit=False))

    @broker.subscriber(RabbitQueue(place.queue, declare=False), ack_policy=AckPolicy.MANUAL)
    async def receive(order: Order, message: RabbitMessage) -> None:
        await opened(seat)
        await inbox.handle(order, message)
        await message.ack()
        seat.settled()

    async with broker:
        await broker.start()
        seat.ready()
        await until_stopped(seat)
    await engine.dispose()


def consume(seat: Seat) -> None:
    """Until the gate is taken down."""
    asyncio.run(_consume(seat))
