"""event-forge: its inbox and outbox services, over aio-pika and asyncpg."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from event_forge import CreateOutboxMessageDto, InboxConfig, InboxService, OutboxConfig, OutboxService
from event_forge.consumers.aio_pika_consumer import AioPikaConsumer
from event_forge.events import OutboxEvents
from event_forge.publishers.aio_pika_publisher import AioPikaPublisher
from event_forge.repositories.sqlalchemy import (
    Base,
    SQLAlchemyInboxRepository,
    SQLAlchemyOutboxRepository,
)
from kombu import Connection
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.peers.gated import amqp_url, opened, until_stopped
from benchmarks.work import DONE, PREFETCH, Order

if TYPE_CHECKING:
    from event_forge import InboxMessage
    from sqlalchemy.ext.asyncio import AsyncSession

    from benchmarks.outside import Seat

_EXCHANGE: Final = "forge"
_UNTYPED: Final = ""  # it reads a message's type from a header of its own, which ours have not


async def _poll(outbox: OutboxService, seat: Seat) -> None:
    """As its own polling does, but more often, and not while others are measured."""
    while True:
        await opened(seat)
        await outbox.process_message("")
        await asyncio.sleep(0.05)


async def _consume(seat: Seat) -> None:
    place = seat.place(queue_is_declared_elsewhere=True)
    url, rabbit = make_url(seat.database).set(drivername="postgresql+asyncpg"), amqp_url(seat.broker)
    engine = create_async_engine(url, pool_size=PREFETCH)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    publisher = AioPikaPublisher(rabbit, _EXCHANGE)
    options = OutboxConfig(immediate_processing=False, batch_size=100)
    outbox = OutboxService(SQLAlchemyOutboxRepository(sessions), publisher, options)
    inbox = InboxService(SQLAlchemyInboxRepository(sessions), InboxConfig())

    async def handle(message: InboxMessage) -> None:
        await opened(seat)
        order = Order.model_validate(message.payload)

        async def work(session: AsyncSession) -> None:
            await session.execute(place.insert, {"order_id": order.order_id})
            payload = place.done_by(order).model_dump()
            stored = CreateOutboxMessageDto(
                aggregate_type="Order", aggregate_id=order.order_id, event_type=DONE, payload=payload
            )
            await outbox.create_message(stored, session)

        await outbox.with_transaction(work)
        outbox.emit(OutboxEvents.MESSAGE_CREATED, order.order_id)  # after COMMIT: before it, nobody would find the row

    inbox.register_handler(_UNTYPED, handle)
    outbox.on(OutboxEvents.MESSAGE_CREATED, outbox.process_message)
    outbox.on(OutboxEvents.MESSAGE_PUBLISHED, lambda _: seat.settled())
    await publisher.connect()
    with Connection(seat.broker) as binding:
        binding.channel().queue_bind(place.out, _EXCHANGE, "#")
    polling = asyncio.create_task(_poll(outbox, seat))
    consumer = AioPikaConsumer(rabbit, inbox, place.queue, prefetch_count=PREFETCH)
    await consumer.start()
    seat.ready()
    await until_stopped(seat)
    with suppress(asyncio.CancelledError):
        await consumer.stop()
    polling.cancel()
    await publisher.disconnect()
    await engine.dispose()


def consume(seat: Seat) -> None:
    """Until the gate is taken down."""
    asyncio.run(_consume(seat))
