"""Handlers that are right, of which nothing may be said."""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import sqlite3
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from django.utils.functional import SimpleLazyObject
from pydantic import BaseModel
from sqlalchemy import String, create_engine, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from idemp import AsyncContext, Context


class Pay(BaseModel):
    __message_type__ = "idioms.Pay"
    id: int
    account: int
    email: str
    tags: list[str] = ["red", "green", "blue"]


MESSAGE = Pay(id=7, account=1, email="me@example.org")


class Paid(BaseModel):
    __message_type__ = "idioms.Paid"
    id: int
    value: Any = None


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "idiom_account"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="new")
    balance: Mapped[int] = mapped_column(default=0)


class Payment(Base):
    __tablename__ = "idiom_payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class Customer(Base):
    __tablename__ = "idiom_customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(100), unique=True)


def setup(session: Session) -> None:
    session.add(Account(id=1))


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Settings:
    @cached_property
    def limits(self) -> dict[str, int]:
        return {"orders": 3}


class Client:
    def __init__(self) -> None:
        self.timeout = 30


settings = Settings()
lazy = SimpleLazyObject(Client)
client: Client | None = None
timeout: int | None = None
limits: dict[str, Any] = {}
senders: dict[str, object] = {}
request_id: ContextVar[str] = ContextVar("request_id")
pool = ThreadPoolExecutor(1)
other = create_engine("sqlite://")
log = logging.getLogger("idioms")
log_file = Path(tempfile.gettempdir(), "idemp-idioms.log")
log.addHandler(logging.FileHandler(log_file, delay=True))


def adds_a_payment(message: Pay, ctx: Context) -> None:
    ctx.session.add(Payment(account=message.account))


def reads_settings(message: Pay) -> Paid:
    return Paid(id=message.id, value=settings.limits["orders"])


def makes_a_client(message: Pay) -> Paid:
    global client  # noqa: PLW0603
    client = client or Client()
    return Paid(id=message.id, value=client.timeout)


def sets_a_number_once(message: Pay) -> Paid:
    global timeout  # noqa: PLW0603
    timeout = timeout or 30
    return Paid(id=message.id, value=timeout)


def fills_a_dict_once(message: Pay, ctx: Context) -> None:
    if not limits:
        limits.update(orders=3, hosts=["a"])


def registers_once(message: Pay, ctx: Context) -> None:
    senders.setdefault("mail", object())


def uses_djangos_lazy_object(message: Pay) -> Paid:
    return Paid(id=message.id, value=lazy.timeout)


@lru_cache
def domain(email: str) -> str:
    return email.partition("@")[2]


def uses_a_cache_of_functools(message: Pay) -> Paid:
    return Paid(id=message.id, value=domain(message.email))


def names_its_request(message: Pay, ctx: Context) -> None:
    request_id.set(str(ctx.message_id))


def compares_and_sets(message: Pay, ctx: Context) -> None:
    unpaid = update(Account).where(Account.id == message.account, Account.status == "new")
    if ctx.connection.execute(unpaid.values(status="paid")).rowcount == 1:
        ctx.session.add(Payment(account=message.account))


def locks_what_it_looks_at(message: Pay, ctx: Context) -> None:
    account = ctx.session.get_one(Account, message.account, with_for_update=True)
    if account.status == "new":
        account.status = "paid"
        ctx.session.add(Payment(account=message.account))


def looks_behind_a_unique_key(message: Pay, ctx: Context) -> None:
    if ctx.session.scalars(select(Customer).where(Customer.email == message.email)).first() is None:
        ctx.session.add(Customer(email=message.email))


def takes_the_conflict_for_the_answer(message: Pay, ctx: Context) -> None:
    with suppress(IntegrityError), ctx.session.begin_nested():
        ctx.session.add(Customer(email=message.email))


def tries_again(message: Pay, ctx: Context) -> None:
    for _ in range(2):
        with suppress(OperationalError), ctx.session.begin_nested():
            ctx.session.execute(update(Account).values(balance=Account.balance + 10))
            return


def inserts_on_no_conflict(message: Pay, ctx: Context) -> None:
    made = postgresql.insert if ctx.connection.dialect.name == "postgresql" else sqlite.insert
    ctx.session.execute(made(Customer).values(email=message.email).on_conflict_do_nothing())


def sends_what_the_database_made(message: Pay, ctx: Context) -> None:
    payment = Payment(account=message.account)
    ctx.session.add(payment)
    ctx.session.flush()
    ctx.send({"payment": payment.id}, to="mail", type="idioms.Paid")


def adds_to_a_balance(message: Pay, ctx: Context) -> None:
    ctx.session.get_one(Account, message.account).balance += 10


def logs(message: Pay, ctx: Context) -> None:
    begun = time.perf_counter()
    log.warning("handled %s in %.3f s", message.id, time.perf_counter() - begun)


def works_in_a_temporary_folder(message: Pay, ctx: Context) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "part").write_text("x")
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as other:
        file.write(b"x")
        other.write(b"x")


def reads_a_file_and_a_database(message: Pay) -> Paid:
    with closing(sqlite3.connect(":memory:")) as connection:
        found = connection.execute("SELECT 3").fetchone()[0]
    return Paid(id=message.id, value=[found, "import" in Path(__file__).read_text()])


def reads_on_a_second_connection(message: Pay, ctx: Context) -> None:
    with other.connect() as connection:
        connection.execute(text("WITH one AS (SELECT 1 AS n) SELECT n FROM one"))


def sorts_a_set(message: Pay) -> Iterator[Paid]:
    yield from (Paid(id=message.id, value=tag) for tag in sorted(set(message.tags)))


def derives_an_id(message: Pay) -> Paid:
    return Paid(id=message.id, value=str(uuid.uuid5(uuid.NAMESPACE_URL, message.email)))


def seeds_its_generator(message: Pay) -> Paid:
    return Paid(id=message.id, value=random.Random(message.id).random())


def combines_flags(message: Pay) -> Paid:
    return Paid(id=message.id, value=(Rights.READ | Rights.WRITE).value)


def reckons_in_a_pool(message: Pay) -> Paid:
    return Paid(id=message.id, value=pool.submit(sum, [1, 2]).result())


def waits_for_its_threads(message: Pay) -> Paid:
    found: list[int] = []
    thread = threading.Thread(target=found.append, args=[message.id])
    thread.start()
    thread.join()
    with ThreadPoolExecutor(2) as own:
        return Paid(id=message.id, value=[found, *own.map(abs, [-1, -2])])


def delays_and_replies(message: Pay, ctx: Context) -> None:
    ctx.send({"id": message.id}, to="mail", type="idioms.Remind", delay="1h")
    ctx.reply({"ok": True}, type="idioms.Done")


def catches_what_is_no_error_of_the_database(message: Pay) -> Paid:
    try:
        value = int(message.email)
    except ValueError:
        value = 0
    return Paid(id=message.id, value=value)


bound = partial(lambda limit, message, ctx: ctx.send({"limit": limit}, to="mail", type="idioms.Limit"), 3)


def uses_a_partial(message: Pay, ctx: Context) -> None:
    bound(message, ctx)


class Service:
    def __init__(self) -> None:
        self.settings: dict[str, int] | None = None

    def __call__(self, message: Pay, ctx: Context) -> None:
        self.settings = self.settings or {"limit": 3}
        ctx.session.add(Payment(account=message.account))


def pays(limit: int, message: Pay, ctx: Context) -> None:
    ctx.session.add(Payment(account=message.account))


async def awaits_its_tasks(message: Pay, ctx: AsyncContext) -> AsyncIterator[Paid]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.to_thread(sum, [1, 2]))
    ctx.session.add(Payment(account=message.account))
    yield Paid(id=message.id, value=task.result())


ON_TABLES: list[Callable[..., Any]] = [
    adds_a_payment,
    compares_and_sets,
    locks_what_it_looks_at,
    looks_behind_a_unique_key,
    takes_the_conflict_for_the_answer,
    inserts_on_no_conflict,
    tries_again,
    sends_what_the_database_made,
    adds_to_a_balance,
    awaits_its_tasks,
]

IDIOMS: list[Callable[..., Any]] = [
    *ON_TABLES,
    reads_settings,
    makes_a_client,
    sets_a_number_once,
    fills_a_dict_once,
    registers_once,
    uses_djangos_lazy_object,
    uses_a_cache_of_functools,
    names_its_request,
    logs,
    works_in_a_temporary_folder,
    reads_a_file_and_a_database,
    reads_on_a_second_connection,
    sorts_a_set,
    derives_an_id,
    seeds_its_generator,
    combines_flags,
    reckons_in_a_pool,
    waits_for_its_threads,
    delays_and_replies,
    catches_what_is_no_error_of_the_database,
    uses_a_partial,
    Service(),
    partial(pays, 3),
]
