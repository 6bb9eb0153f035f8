"""A service that is wired, and used, where it is imported; then its process is forked."""

from __future__ import annotations

import os

from pydantic import BaseModel
from sqlalchemy import Connection, create_engine

from idemp import App, Context, Idempotent, Inbox, Settings
from idemp.brokers.rabbitmq.broker import RabbitBroker
from tests.forks import QUEUE, SINK, effect


class Count(BaseModel):
    __message_type__ = "forks.Count"
    number: int


class Counted(BaseModel):
    __message_type__ = "forks.Counted"
    number: int


def insert(connection: Connection, number: int) -> None:
    connection.execute(effect.insert(), {"number": number, "pid": os.getpid()})


def count(message: Count, ctx: Context) -> None:
    insert(ctx.connection, message.number)
    ctx.send(Counted(number=message.number), to=SINK)


broker_url = os.environ.get("IDEMP_BROKER_URL", "amqp://127.0.0.1")
settings = Settings(broker_url=broker_url)
engine = create_engine(settings.database_url)
publisher = RabbitBroker(broker_url).publisher()
handle = Inbox(engine).wrap(count, message=Count, consumer="forks", policy=Idempotent(key="number"), publisher=publisher)
app = App(QUEUE, engine=engine, settings=settings)


def initiate(number: int) -> None:
    with app.initiate(id=str(number)) as unit:
        if not unit.duplicate:
            insert(unit.connection, number)
            unit.send(Counted(number=number), to=SINK)


def use() -> None:
    """Open all that there is to open."""
    handle({"number": -1})
    initiate(-2)


if os.environ.get("FORKS_USED"):
    use()
