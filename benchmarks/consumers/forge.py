"""event-forge: its inbox and outbox services, over aio-pika and asyncpg.

Its inbox row commits before the effect, so a crash between the two loses the message. Its outbox sends 10 a second by default; here
it sends after each COMMIT, and 100 each 50 ms. Versions 1.3 to 1.5 lack a method of the repository for SQLAlchemy.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from event_forge import CreateOutboxMessageDto, InboxConfig, InboxMessage, InboxService, OutboxConfig, OutboxService
from event_forge.consumers.aio_pika_consumer import AioPikaConsumer
from event_forge.events import OutboxEvents
from event_forge.publishers.aio_pika_publisher import AioPikaPublisher
from event_forge.repositories.sqlalchemy import Base, SQLAlchemyInboxRepository, SQLAlchemyOutboxRepository
from kombu import Connection
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.consumers.plain import PREFETCH
from benchmarks.consumers.stream import opened
from benchmarks.place import DONE, Done, Order
from benchmarks.seats import Seat

EXCHANGE = "forge"
UNTYPED = ""  # it reads a message's type from a header of its own


async def main(seat: Seat) -> None:
    place = seat.place
    engine = create_async_engine(make_url(place.database).set(drivername="postgresql+asyncpg"), pool_size=PREFETCH)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    publisher = AioPikaPublisher(place.broker, EXCHANGE)
    options = OutboxConfig(immediate_processing=False, batch_size=100)
    outbox = OutboxService(SQLAlchemyOutboxRepository(sessions), publisher, options)
    inbox = InboxService(SQLAlchemyInboxRepository(sessions), InboxConfig())

    async def handle(message: InboxMessage) -> None:
        await opened(seat)
        order = Order.model_validate(message.payload)

        async def work(session: AsyncSession) -> None:
            await session.execute(place.insert, {"order_id": order.order_id})
            payload = Done(order_id=order.order_id).model_dump()
            stored = CreateOutboxMessageDto(aggregate_type="Order", aggregate_id=order.order_id, event_type=DONE, payload=payload)
            await outbox.create_message(stored, session)

        await outbox.with_transaction(work)
        outbox.emit(OutboxEvents.MESSAGE_CREATED, order.order_id)

    async def poll() -> None:
        while True:
            await opened(seat)
            await outbox.process_message("")
            await asyncio.sleep(0.05)

    inbox.register_handler(UNTYPED, handle)
    outbox.on(OutboxEvents.MESSAGE_CREATED, outbox.process_message)
    outbox.on(OutboxEvents.MESSAGE_PUBLISHED, lambda _: seat.settled())
    await publisher.connect()
    with Connection(place.broker) as binding:
        binding.channel().queue_bind(place.out, EXCHANGE, "#")
    polling = asyncio.create_task(poll())
    consumer = AioPikaConsumer(place.broker, inbox, place.queue, prefetch_count=PREFETCH)
    await consumer.start()
    seat.ready()
    await asyncio.to_thread(seat.stopped.wait)
    with suppress(asyncio.CancelledError):
        await consumer.stop()
    polling.cancel()
    await publisher.disconnect()
    await engine.dispose()


def consume(seat: Seat) -> None:
    asyncio.run(main(seat))
