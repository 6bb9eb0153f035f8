"""Handlers with the classic faults, each with the kind of fault that it has to get and words of the cause."""

from __future__ import annotations

import asyncio
import os
import random
import smtplib
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemp import App, AsyncContext, Context, Idempotent

app = App("classic", policy=Idempotent())
FOLDER = Path(tempfile.gettempdir(), f"idemp-classic-{os.getpid()}")


class Place(BaseModel):
    __message_type__ = "classic.Place"
    id: int
    sku: str
    tags: list[str]


MESSAGE = Place(id=7, sku="A-1", tags=["red", "green", "blue", "amber"])


class Placed(BaseModel):
    __message_type__ = "classic.Placed"
    id: int
    value: Any = None


class Base(DeclarativeBase):
    pass


class Order(Base):
    """Nothing says that there is one of each number."""

    __tablename__ = "classic_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    sku: Mapped[str]


def ledger() -> Engine:
    FOLDER.mkdir(exist_ok=True)
    return create_engine(f"sqlite:///{FOLDER}/ledger.db")


handled = 0
cache: dict[int, str] = {}
numbers: list[int] = []


class Service:
    def __init__(self) -> None:
        self.seen: set[int] = set()

    def handle(self, message: Place, ctx: Context) -> None:
        if message.id not in self.seen:
            self.seen.add(message.id)
            ctx.session.add(Order(number=message.id, sku=message.sku))


service = Service()
mailer = Mock()


def writes_on_a_second_connection(message: Place, ctx: Context) -> None:
    engine = ledger()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS ledger (number INTEGER)"))
        connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": message.id})
    engine.dispose()


def commits_each_statement(message: Place, ctx: Context) -> None:
    engine = create_engine(ledger().url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS ledger (number INTEGER)"))
    engine.dispose()


@app.handler(Place)
def initiates_inside(message: Place, ctx: Context) -> None:
    with app.initiate() as unit:
        unit.send({"id": message.id}, to="mail", type="classic.Placed")


def counts_in_a_global(message: Place, ctx: Context) -> None:
    global handled  # noqa: PLW0603
    handled += 1
    ctx.session.add(Order(number=handled, sku=message.sku))


def fills_a_cache(message: Place, ctx: Context) -> None:
    cache.setdefault(message.id, message.sku)
    ctx.session.add(Order(number=message.id, sku=cache[message.id]))


def sends_by_a_fake(message: Place, ctx: Context) -> None:
    mailer.send(message.sku)


def sends_an_email(message: Place, ctx: Context) -> None:
    mail = EmailMessage()
    with smtplib.SMTP("127.0.0.1", 1, timeout=1) as server:
        server.send_message(mail)


def tells_the_time(message: Place, ctx: Context) -> None:
    ctx.send({"at": datetime.now(UTC).isoformat()}, to="mail", type="classic.Placed")


def tells_the_day(message: Place) -> Placed:
    return Placed(id=message.id, value=time.strftime("%Y-%m-%d"))


def refuses_at_night(message: Place, ctx: Context) -> None:
    if datetime.now(UTC) > STARTED:
        raise ValueError


STARTED = datetime.fromtimestamp(time.time() + 86_400, UTC)


def invents_an_id(message: Place, ctx: Context) -> None:
    ctx.send({"reservation": str(uuid.uuid4())}, to="stock", type="classic.Reserve")


def sends_rarely(message: Place, ctx: Context) -> None:
    if random.random() < 0.001:
        ctx.send({"audit": message.id}, to="audit", type="classic.Audit")


def draws_from_a_generator_of_its_own(message: Place) -> Placed:
    return Placed(id=message.id, value=random.Random().random())


def looks_before_it_inserts(message: Place, ctx: Context) -> None:
    if ctx.session.scalars(select(Order).where(Order.number == message.id)).first() is None:
        ctx.session.add(Order(number=message.id, sku=message.sku))


def swallows_errors(message: Place, ctx: Context) -> None:
    try:
        ctx.session.execute(insert(Order).values(number=message.id, sku=message.sku))
    except SQLAlchemyError:
        ctx.send({"id": message.id}, to="mail", type="classic.Failed")


def writes_a_file(message: Place, ctx: Context) -> None:
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "letter.txt").open("a") as file:
        file.write(message.sku)


def deletes_a_file(message: Place, ctx: Context) -> None:
    (FOLDER / "upload.txt").unlink(missing_ok=True)


def starts_a_thread(message: Place, ctx: Context) -> None:
    threading.Thread(target=numbers.count, args=[message.id], name="mailer").start()


def writes_in_a_pool(message: Place, ctx: Context) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(writes_a_file, message, ctx).result()


def starts_a_program(message: Place, ctx: Context) -> None:
    subprocess.run(["/bin/true"], check=True)


def goes_through_a_set(message: Place, ctx: Context) -> None:
    for tag in set(message.tags):
        ctx.send({"tag": tag}, to="tags", type="classic.Tagged")


def yields_from_a_set(message: Place) -> Iterator[Placed]:
    yield from (Placed(id=message.id, value=tag) for tag in {*message.tags})


def lists_a_set(message: Place) -> Placed:
    return Placed(id=message.id, value=list(frozenset(message.tags)))


def names_its_process(message: Place) -> Placed:
    return Placed(id=message.id, value=os.getpid())


def trusts_in_the_attempt(message: Place, ctx: Context) -> None:
    if ctx.attempt == 1:
        ctx.session.add(Order(number=message.id, sku=message.sku))


def commits(message: Place, ctx: Context) -> None:
    ctx.session.add(Order(number=message.id, sku=message.sku))
    ctx.session.commit()


def commits_the_connection(message: Place, ctx: Context) -> None:
    ctx.session.add(Order(number=message.id, sku=message.sku))
    ctx.connection.commit()


def commits_below(message: Place, ctx: Context) -> None:
    ctx.session.execute(insert(Order).values(number=message.id, sku=message.sku))
    ctx.connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]


async def awaits_a_second_connection(message: Place, ctx: AsyncContext) -> None:
    await asyncio.to_thread(writes_on_a_second_connection, message, ctx)  # type: ignore[arg-type]


async def leaves_a_task(message: Place, ctx: AsyncContext) -> None:
    task = asyncio.create_task(asyncio.sleep(0.05), name="mailer")
    assert not task.done()


async def yields_the_time(message: Place, ctx: AsyncContext) -> AsyncIterator[Placed]:
    yield Placed(id=message.id, value=time.time())


def changes_more_each_time(message: Place, ctx: Context) -> None:
    ctx.session.add(Order(number=message.id, sku=message.sku))


CLASSIC: list[tuple[Callable[..., Any], str, str]] = [
    (writes_on_a_second_connection, "connection", "CREATE TABLE IF NOT EXISTS ledger"),
    (commits_each_statement, "connection", "in autocommit mode, CREATE TABLE"),
    (counts_in_a_global, "memory", "tests.testing.classic.handled"),
    (fills_a_cache, "memory", "tests.testing.classic.cache"),
    (service.handle, "memory", "Service.seen"),
    (sends_by_a_fake, "memory", "tests.testing.classic.mailer"),
    (sends_an_email, "network", "smtplib.connect"),
    (tells_the_time, "clock", "output 1 to mail has another $.at"),
    (tells_the_day, "clock", "output 1 to classic.Placed has another $.value"),
    (refuses_at_night, "clock", "it fails: ValueError()"),
    (invents_an_id, "chance", "another $.reservation"),
    (sends_rarely, "chance", "with low random values, it sends 1 messages, not 0"),
    (draws_from_a_generator_of_its_own, "chance", "in a second run that is alike"),
    (looks_before_it_inserts, "race", "INSERT INTO classic_order"),
    (swallows_errors, "swallowed", "statement 1 of 1"),
    (writes_a_file, "file", "letter.txt"),
    (writes_in_a_pool, "file", "letter.txt"),
    (deletes_a_file, "file", "os.remove"),
    (starts_a_thread, "thread", "the thread 'mailer'"),
    (starts_a_program, "program", "subprocess.Popen /bin/true"),
    (goes_through_a_set, "order", "in another process"),
    (yields_from_a_set, "order", "in another process"),
    (lists_a_set, "order", "in another process"),
    (names_its_process, "process", "another $.value"),
    (trusts_in_the_attempt, "attempt", "as a second attempt, it writes by 0 statements, not 1"),
    (commits, "commit", "session.commit()"),
    (commits_the_connection, "commit", "connection.commit()"),
    (commits_below, "commit", "below SQLAlchemy"),
    (awaits_a_second_connection, "connection", "ledger"),
    (leaves_a_task, "thread", "the task 'mailer'"),
    (yields_the_time, "clock", "another $.value"),
]

PLAIN: list[tuple[Callable[..., Any], str, str]] = [
    (changes_more_each_time, "repeated", "a second delivery changed"),
]
"""Handlers that are not opted in."""
