"""A small world: an app on SQLite, a sink that takes its outputs, processes that crash, and a judge."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, UniqueConstraint, event, func, make_url, select

from idemp import App, AsyncContext, Context, Idempotent, Policy, Retry, Settings
from idemp.identity import uuid7
from idemp.messages import Output, encode
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.testing import Crash, CrashPoints
from idemp.testing.app import SteppedWorker, busy, event_loop, let_pass, step
from idemp.worker import Worker

asynchronous = ""  # the driver, where the handlers of worlds are `async def`
metadata = MetaData()
effect = Table("effect", metadata, Column("row", Integer, primary_key=True), Column("what", String(50)))
unique = Table("one", metadata, Column("row", Integer, primary_key=True), Column("what", String(50)), UniqueConstraint("what"))

QUEUE, SINK = "shop", "sink"


class Order(BaseModel):
    __message_type__ = "shop.Order"
    order_id: str


class Plain(Order):
    __message_type__ = "shop.Plain"


class Shipped(BaseModel):
    __message_type__ = "shop.Shipped"
    order_id: str
    part: int


Handle = Callable[[Order, Context], Any]


def insert_and_send(message: Order, ctx: Context) -> None:
    """The usual handler: an effect and three outputs, one of them delayed."""
    ctx.connection.execute(effect.insert(), {"what": message.order_id})
    for part in range(3):
        ctx.send(Shipped(order_id=message.order_id, part=part), to=SINK, delay="10m" if part == 2 else None)


@contextmanager
def unreachable(database: Database) -> Iterator[None]:
    """Let connections for queues be lost, and no new ones be opened: the driver finds no server, or no file."""
    engine = database.queue_engine

    def mislead(dialect: Any, _record: Any, arguments: list[str], options: dict[str, Any]) -> Any:
        files = [f"{each}/nowhere" for each in arguments]
        return dialect.connect(*files, **(options if files else {**options, "port": 1}))

    event.listen(engine, "do_connect", mislead)
    engine.dispose()
    yield
    event.remove(engine, "do_connect", mislead)


def asynchronous_url(url: str) -> str:
    made = make_url(url)
    made = made.set(drivername=f"{made.get_backend_name()}+{asynchronous}" if asynchronous else made.drivername)
    return made.render_as_string(hide_password=False)


class View:
    """The context of an `async def` handler as a plain one sees it."""

    def __init__(self, ctx: AsyncContext, connection: Connection) -> None:
        self._ctx, self.connection = ctx, connection

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ctx, name)
        return found.sync_session if name == "session" else found


still_open: list[World] = []


@dataclass
class World:
    """Everything that outlives a process, and what to look at in it."""

    url: str
    handle: Handle = insert_and_send
    policy: Policy = field(default_factory=lambda: Idempotent(key="order_id", retry=Retry(attempts=3, delays=(0.0,))))
    settings: dict[str, Any] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    apps: list[App] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)
    rescuer: Worker | None = None

    def __post_init__(self) -> None:
        still_open.append(self)
        self.database = Database(self.url)
        with self.database.short() as connection:
            metadata.create_all(connection)
        self.broker = SqlBroker(self.database, "producer")
        for queue in (QUEUE, SINK):
            self.broker.declare(queue, [])

    # Given

    def send(self, *ids: str, type: str = "shop.Order", message_id: str | None = None, **fields: Any) -> None:
        """Let a producer send orders to the queue of the app."""
        for id in ids:
            properties = {"message_id": message_id or uuid7(), "type": type, "reply_to": SINK}
            body = encode({"order_id": id, **fields})
            self.send_raw(body, properties)

    def send_raw(self, body: bytes, properties: dict[str, Any]) -> None:
        answers = self.broker.publisher().publish([Output("", "send", "", QUEUE, properties, body)], 10.0)
        assert answers == [None]

    def app(self) -> App:
        app = App(QUEUE, settings=Settings(database_url=asynchronous_url(self.url), **self.settings))
        self.apps.append(app)

        def order(message: Order, ctx: Context) -> Any:
            self.runs[message.order_id] += 1
            return self.handle(message, ctx)

        async def async_order(message: Order, ctx: AsyncContext) -> Any:
            self.runs[message.order_id] += 1
            return await ctx.connection.run_sync(lambda connection: self.handle(message, View(ctx, connection)))  # type: ignore[arg-type]

        function: Any = async_order if asynchronous else order
        app.handler(Order, policy=self.policy)(function)
        app.handler(Plain, policy=Policy(retry=self.policy.retry))(function)
        return app

    # When

    def worker(self, points: CrashPoints | None = None) -> Worker:
        """Start a process of the app."""
        app = self.app()
        parts = app.adapters()
        if points is not None:
            app.process.opened = points.wrap_adapters(parts)
        worker = SteppedWorker(app) if asynchronous else Worker(app)
        self.receivers.append(worker.intake.receiver)
        worker.upkeep()
        return worker

    def work(self, worker: Worker, *, relay: bool = True, limit: float = 60.0) -> None:
        """Let a process run until nothing is due."""
        deadline = time.monotonic() + limit
        while (self.due() or busy(worker)) and time.monotonic() < deadline:
            step(worker, relay=relay)
        assert not self.due(), "something is still due"

    def crash(self, at: int) -> str:
        """Let a process crash at a point; return the name of the point, or "" if it has ended before it. Nothing is closed."""
        points = CrashPoints(at)
        try:
            self.work(self.worker(points))
        except Crash as crash:
            return str(crash)
        assert len(points.names) <= at, f"the crash at {points.names[at]} was swallowed"
        return ""

    def recover(self, seconds: float = 60) -> None:
        """Let leases and graces run out, and another process do the rest; the same one, if there is more later."""
        let_pass(self.database, seconds)
        self.rescuer = self.rescuer or self.worker()
        self.work(self.rescuer)

    def pass_time(self, seconds: float) -> None:
        let_pass(self.database, seconds)

    # Then

    def due(self) -> int:
        tables, now = self.database.tables, self.database.dialect.now
        message, pending = tables.message, tables.pending
        with self.database.queue_engine.connect() as connection:
            rows = connection.execute(select(func.count()).where(message.c.queue == QUEUE, message.c.due_at <= now)).scalar_one()
        with self.database.engine.connect() as connection:
            late = (pending.c.due_at <= now, pending.c.quarantined_at.is_(None))
            return int(rows + connection.execute(select(func.count()).where(*late)).scalar_one())

    def effects(self) -> dict[str, int]:
        with self.database.engine.connect() as connection:
            rows = connection.execute(select(effect.c.what, func.count()).group_by(effect.c.what)).all()
        return dict(rows)

    def claims(self) -> int:
        return self._count(self.database.tables.inbox)

    def claimed(self) -> set[str]:
        """Return the orders that are claimed."""
        with self.database.engine.connect() as connection:
            rows = connection.scalars(select(self.database.tables.inbox.c.original_id)).all()
        return {row.decode().removeprefix("s:") for row in rows}

    def pending(self) -> int:
        return self._count(self.database.tables.pending)

    def sent(self) -> dict[tuple[str, int], set[tuple[str, bytes]]]:
        """Return ids and bodies of each output that reached the sink."""
        found: dict[tuple[str, int], set[tuple[str, bytes]]] = {}
        for row in self.rows(SINK):
            body = json.loads(row.body)
            found.setdefault((body["order_id"], body["part"]), set()).add((json.loads(row.headers)["message_id"], row.body))
        return found

    def rows(self, queue: str = QUEUE) -> Any:
        message = self.database.tables.message
        with self.database.queue_engine.connect() as connection:
            return connection.execute(select(message).where(message.c.queue == queue).order_by(message.c.id)).all()

    def dead(self) -> list[dict[str, Any]]:
        """Return the last failure of each dead letter, and its counts."""
        rows = [row for row in self.rows() if row.due_at is None]
        return [{**(json.loads(row.history) or [{}])[-1], "attempts": row.attempts, "deaths": row.deaths} for row in rows]

    def _count(self, table: Table) -> int:
        with self.database.engine.connect() as connection:
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    def close(self) -> None:
        """Close what the processes have left open."""
        still_open[:] = [each for each in still_open if each is not self]
        for receiver in self.receivers:
            if receiver._woken >= 0:
                getattr(receiver, "leased", {}).clear()
                receiver.close()
        for app in self.apps:
            asyncio.run_coroutine_threadsafe(app.aclose(), event_loop()).result() if asynchronous else app.close()
        self.database.close()
