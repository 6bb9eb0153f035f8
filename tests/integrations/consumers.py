"""Consumers of three clients around one handler: `python -m tests.integrations.consumers kombu|pika|aio_pika [publisher] [relay]`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import aio_pika
import pika
from kombu import Connection, Queue
from kombu.mixins import ConsumerMixin
from pydantic import BaseModel
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from idemp import AsyncContext, AsyncInbox, Context, Idempotent, Inbox, Settings
from idemp.brokers.rabbitmq import RabbitBroker
from idemp.integrations import reject
from idemp.integrations.aio_pika import AioPikaCallbacks
from idemp.integrations.kombu import KombuCallbacks
from idemp.integrations.pika import PikaCallbacks
from tests.storm_app import QUEUE, SINK, Begin, Done, effect
from tests.world import View

CLIENTS = ("kombu", "pika", "aio_pika")
PREFETCH = 20

Stop = Callable[[], bool]


def consume(
    client: str,
    database: str,
    broker: str,
    queue: str,
    function: Callable[[Any, Context], Any],
    *,
    stop: Stop = lambda: False,
    dead: Callable[[Any, Exception], Any] = reject,
    pause: float = 0.05,
    **options: Any,
) -> None:
    """Handle the messages of a queue until it is time to stop."""
    if client != "aio_pika":
        engine = create_engine(database)
        made = {"kombu": KombuCallbacks, "pika": PikaCallbacks}[client]
        callbacks = made(Inbox(engine).wrap(function, **options), dead=dead, pause=pause)
        try:
            {"kombu": by_kombu, "pika": by_pika}[client](broker, queue, callbacks, stop)
        finally:
            engine.dispose()
        return

    async def on_loop(message: Any, ctx: AsyncContext) -> Any:
        return await ctx.connection.run_sync(lambda connection: function(message, View(ctx, connection)))  # type: ignore[arg-type]

    async def main() -> None:
        engine = create_async_engine(make_url(database), pool_size=PREFETCH)
        handle = AsyncInbox(engine).wrap(on_loop, **options)
        try:
            await by_aio_pika(broker, queue, AioPikaCallbacks(handle, dead=dead, pause=pause), stop)
        finally:
            await engine.dispose()

    asyncio.run(main())


def by_kombu(broker: str, queue: str, callbacks: Any, stop: Stop, heartbeat: int = 10) -> None:
    class Consuming(ConsumerMixin):  # type: ignore[misc]
        should_stop = property(lambda _: stop())

        def __init__(self) -> None:
            self.connection = Connection(broker, heartbeat=heartbeat)

        def get_consumers(self, Consumer: Any, _channel: Any) -> list[Any]:  # noqa: N803
            options = {"on_message": callbacks.on_message, "on_decode_error": callbacks.on_decode_error}
            return [Consumer([Queue(queue, no_declare=True)], prefetch_count=PREFETCH, **options)]

    Consuming().run(safety_interval=0.02)


def by_pika(broker: str, queue: str, callbacks: Any, stop: Stop) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(queue, callbacks.on_message)
        while not stop():
            connection.process_data_events(time_limit=0.02)


async def by_aio_pika(broker: str, queue: str, callbacks: Any, stop: Stop) -> None:
    connection = await aio_pika.connect_robust(broker)
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(PREFETCH)
        await (await channel.get_queue(queue)).consume(callbacks.on_message)
        while not stop():  # noqa: ASYNC110 - a test says when
            await asyncio.sleep(0.02)


def begin(message: BaseModel, ctx: Context) -> None:
    assert isinstance(message, Begin)
    ctx.connection.execute(effect.insert(), {"number": message.number, "step": 1})
    ctx.send(Done(number=message.number, step=1), to=SINK)


if __name__ == "__main__":
    settings = Settings()
    publisher = RabbitBroker(settings.broker_url).publisher() if "publisher" in sys.argv else None
    wrapped = {"message": Begin, "consumer": QUEUE, "policy": Idempotent(key="number"), "publisher": publisher}
    consume(sys.argv[1], settings.database_url, settings.broker_url, QUEUE, begin, **wrapped)
