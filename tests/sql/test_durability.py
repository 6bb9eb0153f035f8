"""PostgreSQL that dies between lazy commits and its disk: nothing is acked, and no output sent, that is lost with it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from idemp import App, AsyncInbox, Context, Idempotent, Inbox, Settings, Verdict
from idemp.bulk import Answer, Bulk, Row, SqlSet
from idemp.handling import Handling
from idemp.identity import uuid7
from idemp.messages import Delivery, Output
from idemp.prepared import SqlBarrier
from idemp.prepared.ports import Prepared
from idemp.sql import postgresql
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from idemp.testing.app import busy, step
from idemp.worker import Worker
from tests import world as worlds
from tests.servers.databases import create_database, drop_database, query
from tests.servers.postgresql import Unwritten
from tests.servers.process import wait_until
from tests.world import Order, World, insert_and_send

POLICY = Idempotent(key="order_id")


@pytest.fixture(scope="module")
def server() -> Iterator[Unwritten]:
    with TemporaryDirectory(prefix="idemp-") as folder:
        Path(folder).chmod(0o755)  # the server has a user of its own
        with Unwritten(Path(folder) / "postgresql") as server:
            database = Database(server.url)
            upgrade(database)
            database.close()
            yield server


@pytest.fixture
def url(server: Unwritten) -> Iterator[str]:
    url = create_database(server.url, server.url)
    yield url
    drop_database(url)


class Shop(World):
    """A world whose other worker commits lazily, and stands still before it waits for the disk."""

    position = ""

    def signal_writer(self, number: signal.Signals) -> bool:
        """Stop, or let go on, the process that writes lazy commits to disk each 10 s; return whether there is one."""
        found = query(self.url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        for (pid,) in found:
            os.kill(pid, number)
        return bool(found)

    def on_disk(self) -> bool:
        """Return whether the commit of the other worker is on disk."""
        return bool(query(self.url, "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", self.position)[0][0])

    def other(self) -> Worker:
        way, worlds.asynchronous = worlds.asynchronous, ""
        try:
            return self.worker()
        finally:
            worlds.asynchronous = way

    def committed(self) -> None:
        self.position = query(self.url, "SELECT pg_current_wal_insert_lsn()")[0][0]
        assert not self.on_disk()

    def commit_lazily(self, worker: Worker, id: str = "1") -> Handling:
        executor = worker.protocol.executor
        executor.lazy = True
        handling = executor.accept(Delivery("shop", {"type": "shop.Order", "message_id": uuid7()}, body(id)))
        executor.execute([[handling]])
        assert handling.lazy
        self.committed()
        return handling


def body(id: str) -> bytes:
    return json.dumps({"order_id": id}).encode()


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url, policy=POLICY)
    wait_until(lambda: shop.signal_writer(signal.SIGSTOP), "the start of the process that writes what is lazy")
    yield shop
    shop.signal_writer(signal.SIGCONT)
    shop.close()


def worked(shop: Shop, *, batch: int = 1, **settings: Any) -> bool:
    """Let a worker take copies of orders that the other one commits meanwhile; return whether they were on disk at the ack."""
    seen: list[bool] = []
    other = shop.other()
    shop.settings, shop.policy = {"commits": "each", **settings}, Idempotent(key="order_id", batch=batch)
    worker = shop.worker()
    executor, receiver = worker.protocol.executor, worker.intake.receiver
    accept, ack = executor.accept, receiver.ack

    def accepts(delivery: Delivery) -> Handling:
        shop.commit_lazily(other, json.loads(delivery.body)["order_id"])
        return accept(delivery)

    def acks(deliveries: Sequence[Delivery]) -> None:
        seen.append(shop.on_disk())
        ack(deliveries)

    executor.accept, receiver.ack = accepts, acks  # type: ignore[method-assign]
    worker.app.handlers["shop.Order"].ran(0.001)  # so that they share a group
    shop.send(*map(str, range(batch)))
    step(worker, relay=False)
    return seen == [True]


def worked_async(shop: Shop, driver: str) -> bool:
    worlds.asynchronous = driver
    try:
        found = worked(shop)
        shop.close()
        return found
    finally:
        worlds.asynchronous = ""


def wrapped(shop: Shop) -> bool:
    engine, other = create_engine(shop.url), shop.other()
    handle = Inbox(engine).wrap(insert_and_send, message=Order, consumer="shop", policy=POLICY)
    handle(body("warm"))
    shop.commit_lazily(other)
    assert handle(body("1")).verdict is Verdict.DUPLICATE
    engine.dispose()
    return shop.on_disk()


def wrapped_async(shop: Shop, driver: str) -> bool:
    async def run() -> bool:
        other, engine = shop.other(), create_async_engine(f"postgresql+{driver}{shop.url.removeprefix('postgresql+psycopg')}")

        async def nothing(message: Order) -> None: ...

        handle = AsyncInbox(engine).wrap(nothing, message=Order, consumer="shop", policy=POLICY)
        await handle(body("warm"))
        shop.commit_lazily(other)
        assert (await handle(body("1"))).verdict is Verdict.DUPLICATE
        await engine.dispose()
        return shop.on_disk()

    return asyncio.run(run())


def claimed(shop: Shop) -> bool:
    engine, other = create_engine(shop.url), shop.other()
    inbox = Inbox(engine)
    for id in ("warm", "1"):
        if id == "1":
            shop.commit_lazily(other)
        with Session(engine) as session:
            with inbox.claim(session, body(id), consumer="shop", type="shop.Order", policy=POLICY) as unit:
                assert unit.duplicate is (id == "1")
            session.commit()
    engine.dispose()
    return shop.on_disk()


def claimed_async(shop: Shop, driver: str) -> bool:
    async def run() -> bool:
        other, engine = shop.other(), create_async_engine(f"postgresql+{driver}{shop.url.removeprefix('postgresql+psycopg')}")
        inbox = AsyncInbox(engine)
        for id in ("warm", "1"):
            if id == "1":
                shop.commit_lazily(other)
            async with AsyncSession(engine) as session:
                async with inbox.claim(session, body(id), consumer="shop", type="shop.Order", policy=POLICY) as unit:
                    assert unit.duplicate is (id == "1")
                await session.commit()
        await engine.dispose()
        return shop.on_disk()

    return asyncio.run(run())


def in_bulk(shop: Shop, **options: Any) -> bool:
    other = shop.other()
    rows = [Row(body("1"), id="1", type="shop.Order")]
    with Bulk(shop.app(), **options) as bulk:
        shop.commit_lazily(other)
        report = bulk.run(rows)
    assert report.counts == {Answer.DUPLICATE: 1}
    return shop.on_disk()


def initiated(shop: Shop) -> bool:
    lazy = App("shop", settings=Settings(database_url=f"{shop.url}?options=-csynchronous_commit%3Doff"))
    app = App("shop", settings=Settings(database_url=shop.url))
    with app.initiate():
        pass
    with lazy.initiate("1"):
        pass
    shop.committed()
    with app.initiate("1") as unit:
        assert unit.duplicate
    for each in (lazy, app):
        each.close()
    return shop.on_disk()


def asked(shop: Shop) -> bool:
    """Ask a barrier whose row a handler has committed lazily."""
    lazy, engine = create_engine(f"{shop.url}?options=-csynchronous_commit%3Doff"), create_engine(shop.url)
    SqlBarrier(engine).create()
    prepared = Prepared("shop", "1", Output(str(uuid7()), "send", "", "stock", {"type": "stock.Reserve"}, b"{}"))
    assert SqlBarrier(lazy).do(prepared, lambda session: None) == "unknown"
    shop.committed()
    assert SqlBarrier(engine).ask(prepared) == "commit"
    for each in (lazy, engine):
        each.dispose()
    return shop.on_disk()


@pytest.mark.parametrize(
    "path",
    [
        worked,
        partial(worked, batch=3),
        partial(worked, fast_path=False),
        partial(worked_async, driver="psycopg"),
        partial(worked_async, driver="asyncpg"),
        wrapped,
        partial(wrapped_async, driver="psycopg"),
        partial(wrapped_async, driver="asyncpg"),
        claimed,
        partial(claimed_async, driver="psycopg"),
        partial(claimed_async, driver="asyncpg"),
        in_bulk,
        partial(in_bulk, adopt=True),
        partial(in_bulk, sets={Order: SqlSet(effects=[])}),
        initiated,
        asked,
    ],
    ids=lambda path: getattr(path, "__name__", "") or "-".join([path.func.__name__, *map(str, path.keywords.items())]),
)
def test_no_duplicate_is_acked_before_its_claim_is_on_disk(shop: Shop, path: Callable[[Shop], bool]) -> None:
    assert path(shop)


@pytest.mark.parametrize("path", [wrapped, claimed])
def test_a_duplicate_that_was_acked_is_there_after_a_crash(server: Unwritten, shop: Shop, path: Callable[[Shop], bool]) -> None:
    path(shop)
    server.kill()
    server.start()
    assert query(shop.url, "SELECT what FROM effect WHERE what = '1'") == [("1",)]
    shop.database.close()


@pytest.mark.parametrize("commits", ["group", "each"])
def test_a_group_waits_for_the_disk_once(shop: Shop, commits: str) -> None:
    seen: list[bool] = []

    def handle(message: Order, ctx: Context) -> None:
        if shop.position:
            seen.append(shop.on_disk())
        insert_and_send(message, ctx)
        shop.position = query(shop.url, "SELECT pg_current_wal_insert_lsn()")[0][0]

    shop.handle, shop.settings = handle, {"commits": commits}
    worker = shop.worker()
    publisher = worker.protocol.dispatcher.publisher
    assert publisher is not None
    publish = publisher.publish

    def publishes(outputs: Sequence[Output], timeout: float) -> Any:
        seen.append(shop.on_disk())
        return publish(outputs, timeout)

    publisher.publish = publishes  # type: ignore[method-assign]
    worker.app.handlers["shop.Order"].ran(0.001)
    shop.send("1", "2", "3", "4")
    worker.step(poll=0.0)
    assert seen == [commits == "each"] * 3 + [True]
    assert shop.effects() == dict.fromkeys("1234", 1)


def end_a_session(server: Unwritten) -> None:
    server.end_a_session()


def end_the_server(server: Unwritten) -> None:
    server.kill()
    server.start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of connections that have ended with the server
@pytest.mark.parametrize("end", [end_a_session, end_the_server])
@pytest.mark.parametrize("way", ["group", "batch", "psycopg"])
def test_commits_that_are_lost_are_made_again(
    server: Unwritten, url: str, monkeypatch: pytest.MonkeyPatch, end: Callable[[Unwritten], None], way: str
) -> None:
    """The server ends when some of ten orders are committed lazily, and with ten more until one is lost; it is back at once."""
    lost: list[int] = []

    def count() -> int:
        return int(query(url, "SELECT count(*) FROM effect")[0][0])

    def hook(name: str, handling: Handling) -> None:
        if name == "after_commit" and int(handling.message.order_id) % 10 > 3 and not any(lost):
            before = count()
            end(server)
            lost.append(before - count())  # 0, if one that was alone has just waited for the disk

    monkeypatch.setattr(worlds, "asynchronous", way if way == "psycopg" else "")
    shop = Shop(url, policy=Idempotent(key="order_id", batch=2 if way == "batch" else 1), settings={"concurrency": 10})
    query(url, "CHECKPOINT")
    worker = shop.worker()
    worker.app.handlers["shop.Order"].ran(0.001)
    executor = worker.protocol.executor
    read_back, executor.hook = executor.read_back, hook

    def reads_back(handlings: Sequence[Handling]) -> bool:
        wait_until(lambda: any(lost) or not getattr(worker.runner, "tasks", ()), "the end of the server, or of all tasks")
        return read_back(handlings)

    def handled() -> bool:
        step(worker)
        return not shop.due() and not busy(worker)

    executor.read_back = reads_back  # type: ignore[method-assign]
    orders = list[str]()
    while not any(lost) and len(orders) < 100:
        orders += (more := [str(len(orders) + n) for n in range(10)])
        shop.send(*more)
        wait_until(handled, "the end", 60)
    shop.pass_time(60)  # what could not be sent, because the database was away, is the relay's
    wait_until(handled, "the end", 60)
    assert any(lost)
    assert shop.effects() == dict.fromkeys(orders, 1)
    assert set(shop.sent()) == {(id, part) for id in orders for part in range(2)}
    shop.close()
    gc.collect()


def hold_again(shop: Shop, worker: Worker, handling: Handling, other: Worker) -> Handling:
    """Let the server lose the claim of a handling, and a worker make it anew; the handling is held, then run again."""
    for table in ("inbox", "output", "pending"):
        query(shop.url, f"DELETE FROM idemp_{table}")
    assert handling.claim is not None
    assert worker.adapters.store.read_back([replace(handling.claim)]) == [False]
    executor, anew = worker.protocol.executor, shop.commit_lazily(other)
    assert executor.read_back([handling])
    assert handling.held
    executor.renew(handling)
    executor.execute([[handling]])
    assert (handling.verdict, executor.read_back([handling, anew])) == (Verdict.DUPLICATE, False)
    return handling


def test_what_was_claimed_anew_by_another_handling_is_claimed_again(shop: Shop) -> None:
    """Its outputs may be others than those that were read or made before, although the same worker has claimed it."""
    other, worker = shop.other(), shop.worker()
    own = shop.commit_lazily(worker)
    hold_again(shop, worker, own, worker)
    theirs = worker.protocol.executor.accept(Delivery("shop", {"type": "shop.Order", "message_id": uuid7()}, body("1")))
    worker.protocol.executor.execute([[theirs]])
    hold_again(shop, worker, theirs, other)


def test_a_claim_that_looks_like_a_later_one_waits_for_the_disk(shop: Shop) -> None:
    """The time of a claim is that of its message, if that is in the future."""
    worker = shop.worker()
    executor = worker.protocol.executor
    executor.lazy = True
    ahead = {"type": "shop.Order", "message_id": "x", "timestamp": time.time() + 60}
    executor.execute([[executor.accept(Delivery("shop", ahead, body("1")))]])
    shop.position = query(shop.url, "SELECT pg_current_wal_insert_lsn()")[0][0]
    assert shop.on_disk()


def test_the_read_waits_for_its_table_some_seconds_only(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "TABLE_SECONDS", 0.1)
    worker = shop.worker()
    handling = shop.commit_lazily(worker)
    with psycopg.connect(make_url(shop.url).set(drivername="postgresql").render_as_string(hide_password=False)) as locking:
        locking.execute("LOCK TABLE idemp_inbox IN ACCESS EXCLUSIVE MODE")
        assert worker.protocol.executor.read_back([handling])
    assert "lock timeout" in handling.obstacle
    worker.protocol.executor.renew(handling)
    worker.protocol.executor.execute([[handling]])
    assert not worker.protocol.executor.read_back([handling])


def test_a_database_need_not_be_in_utf8(server: Unwritten) -> None:
    query(server.url, "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = make_url(server.url).set(database="latin").render_as_string(hide_password=False)
    database = Database(url)
    upgrade(database)
    database.close()
    shop = Shop(url, policy=POLICY)
    with Bulk(shop.app(), run="Nachtrag im März") as bulk:
        bulk.run([Row(body("1"), id="1", type="shop.Order")])
    shop.send("1", "2")
    shop.work(shop.worker(), relay=False)
    assert shop.effects() == {"1": 1, "2": 1}
    shop.close()
    drop_database(url)
