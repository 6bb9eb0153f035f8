"""The inbox around `async def` handlers, and initiations in `async with`; on each asynchronous driver."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from idemp import (
    App,
    AsyncContext,
    AsyncInbox,
    ConfigurationError,
    Conflict,
    Context,
    DispatchIncomplete,
    Idempotent,
    Inbox,
    InFlight,
    Settings,
    TransactionEnded,
    Verdict,
)
from idemp.errors import Unavailable
from idemp.sql import checks as sql_checks
from idemp.sql import sqlite
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from tests.world import QUEUE, SINK, Order, Shipped, World, asynchronous_url, effect

SERVERS = ["postgresql-psycopg", "postgresql-asyncpg", pytest.param("mariadb-aiomysql", marks=pytest.mark.slow)]
every_driver = pytest.mark.parametrize("kind", [*SERVERS, "sqlite-aiosqlite"], indirect=True)
every_server = pytest.mark.parametrize("kind", SERVERS, indirect=True)
POLICY = Idempotent(key="order_id")


@pytest.fixture
def world(url: str) -> Any:
    return World(url)


def on_loop(url: str, test: Callable[[AsyncEngine], Awaitable[Any]]) -> None:
    """Run a test on a new event loop; nothing that it opened may be left."""

    async def main() -> None:
        engine = create_async_engine(asynchronous_url(url))
        try:
            await test(engine)
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            assert len(asyncio.all_tasks()) == 1
        finally:
            await engine.dispose()

    asyncio.run(main())


def body(id: str, **fields: Any) -> bytes:
    return json.dumps({"order_id": id, **fields}).encode()


async def insert(message: Order, ctx: AsyncContext) -> None:
    await ctx.connection.execute(effect.insert(), {"what": message.order_id})


def wrapped(inbox: AsyncInbox, function: Callable[..., Any] = insert, **options: Any) -> Callable[..., Awaitable[Any]]:
    return inbox.wrap(function, message=Order, consumer="billing", **{"policy": POLICY, **options})


@every_driver
def test_a_message_is_handled_once(world: World) -> None:
    runs: Counter[str] = Counter()

    async def handle(message: Order, ctx: AsyncContext) -> Shipped:
        runs[message.order_id] += 1
        await ctx.session.execute(effect.insert(), {"what": message.order_id})
        await asyncio.sleep(0.01)
        return Shipped(order_id=message.order_id, part=0)

    async def test(engine: AsyncEngine) -> None:
        SqlScheduler(world.database, "a relay").beat("relay")
        call = wrapped(AsyncInbox(engine), handle)
        outcomes = await asyncio.gather(*(call(body(str(number % 5))) for number in range(10)))
        assert Counter(each.verdict for each in outcomes) == {Verdict.CLAIMED: 5, Verdict.DUPLICATE: 5}
        assert (await call({"order_id": "3"})).verdict is Verdict.DUPLICATE
        with pytest.raises(Conflict):
            await call(body("3", price=7))

    on_loop(world.url, test)
    assert set(world.effects().values()) == set(runs.values()) == {1}
    assert world.pending() == 5


@every_driver
def test_outputs_are_sent_by_a_publisher_or_wait_for_a_relay(world: World) -> None:
    async def send(message: Order, ctx: AsyncContext) -> None:
        ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)

    async def test(engine: AsyncEngine) -> None:
        inbox = AsyncInbox(engine)
        with pytest.raises(DispatchIncomplete, match="handled and committed"):
            await wrapped(inbox, send)(body("1"))
        call = wrapped(inbox, send, publisher=world.broker.publisher())
        outcomes = await asyncio.gather(*(call(body(str(number))) for number in range(2, 10)))
        assert {each.outputs for each in outcomes} == {1}
        world.pass_time(-60)  # the output of the first one is not due, however loaded the machine is
        with pytest.raises(DispatchIncomplete):
            await call(body("1"))
        SqlScheduler(world.database, "a relay").beat("relay")
        again = await call(body("1"))
        assert (again.verdict, again.outputs) == (Verdict.DUPLICATE, 0)

    on_loop(world.url, test)
    assert (len(world.rows(SINK)), world.pending()) == (8, 1)


@pytest.mark.parametrize("kind", ["sqlite-aiosqlite"], indirect=True)
def test_a_redelivery_sends_at_once_what_is_pending(world: World) -> None:
    async def send(message: Order, ctx: AsyncContext) -> None:
        ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)

    async def test(engine: AsyncEngine) -> None:
        for publisher in (None, world.broker.publisher()):
            call = wrapped(AsyncInbox(engine), send, publisher=publisher)
            with pytest.raises(DispatchIncomplete):
                await call(body("1"))
            world.pass_time(-60)  # it is not due, however loaded the machine is
        assert (await call(body("1"), redelivered=True)).outputs == 1

    on_loop(world.url, test)
    assert (len(world.rows(SINK)), world.pending()) == (1, 0)


@every_driver
@pytest.mark.parametrize(
    ("end", "refused"),
    [
        (lambda ctx: ctx.session.commit(), True),
        (lambda ctx: ctx.session.rollback(), True),
        (lambda ctx: ctx.session.close(), True),
        (lambda ctx: ctx.connection.commit(), True),
        (lambda ctx: ctx.session.execute(text("COMMIT")), True),
        (lambda ctx: ctx.connection.rollback(), False),
        (lambda ctx: in_driver(ctx, "ROLLBACK"), False),
    ],
    ids=["session.commit", "session.rollback", "session.close", "connection.commit", "text", "connection.rollback", "driver"],
)
@pytest.mark.parametrize("caught", [True, False])
def test_a_handler_cannot_end_the_transaction(world: World, end: Any, refused: bool, caught: bool) -> None:
    async def handle(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)
        try:
            await end(ctx)
        except Exception:
            if not caught:
                raise

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(TransactionEnded):
            await wrapped(AsyncInbox(engine), handle)(body("1"))
        assert (await wrapped(AsyncInbox(engine))(body("1"))).verdict is Verdict.CLAIMED

    on_loop(world.url, test)
    assert world.effects() == {"1": 1}


async def in_driver(ctx: AsyncContext, statement: str) -> None:
    driver: Any = (await ctx.connection.get_raw_connection()).driver_connection
    await (driver.query if ctx.connection.dialect.name == "mysql" else driver.execute)(statement)


@every_server
def test_a_commit_of_the_driver_is_found(world: World) -> None:
    async def handle(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)
        await in_driver(ctx, "COMMIT")

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(TransactionEnded) as found:
            await wrapped(AsyncInbox(engine), handle)(body("1"))
        assert found.value.committed

    on_loop(world.url, test)
    assert (world.effects(), world.claims()) == ({"1": 1}, 1)


@every_driver
def test_a_claim_in_a_transaction_of_ones_own(world: World) -> None:
    async def test(engine: AsyncEngine) -> None:
        inbox, seen = AsyncInbox(engine), []
        for attempt in ("fails", "commits", "duplicate"):
            async with AsyncSession(engine) as session:
                with suppress(ZeroDivisionError):
                    async with inbox.claim(session, body("1"), consumer="billing", type="shop.Order", policy=POLICY) as unit:
                        seen.append(unit.duplicate)
                        if not unit.duplicate:
                            await unit.session.execute(effect.insert(), {"what": "1"})
                            await unit.connection.execute(effect.insert(), {"what": "2"})
                        assert attempt != "fails" or 1 / 0
                await session.commit()
        assert seen == [False, False, True]

    on_loop(world.url, test)
    assert world.effects() == {"1": 1, "2": 1}


@every_driver
@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_whose_block_is_cancelled_is_not_committed_by_its_caller(world: World, times: int) -> None:
    async def claim(inbox: AsyncInbox, session: AsyncSession, began: asyncio.Event) -> None:
        try:
            async with inbox.claim(session, body("1"), consumer="billing", type="shop.Order", policy=POLICY):
                await session.execute(effect.insert(), {"what": "1"})
                began.set()
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            await session.commit()

    async def test(engine: AsyncEngine) -> None:
        inbox, began = AsyncInbox(engine), asyncio.Event()
        async with AsyncSession(engine) as session:
            task = asyncio.ensure_future(claim(inbox, session, began))
            await began.wait()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with suppress(asyncio.CancelledError):
                await task

    on_loop(world.url, test)
    assert (world.claims(), world.effects()) == (0, {})


@pytest.mark.parametrize("kind", ["postgresql-asyncpg", "postgresql-psycopg", "sqlite-aiosqlite"], indirect=True)
def test_a_claim_in_a_session_that_commits_each_statement_is_refused(world: World) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            with pytest.raises(ConfigurationError, match="commits each statement"):
                async with AsyncInbox(engine).claim(session, body("1"), consumer="billing", type="shop.Order", policy=POLICY):
                    raise AssertionError

    on_loop(world.url, test)
    assert world.claims() == 0


@every_driver
def test_an_initiation_commits_changes_and_messages_once(world: World) -> None:
    async def test(engine: AsyncEngine) -> None:
        app = App(QUEUE, engine=engine)
        seen = []
        for _ in range(2):
            async with app.initiate("nightly") as unit:
                await unit.session.execute(effect.insert(), {"what": "1"})
                unit.send(Shipped(order_id="1", part=0), to=SINK)
                seen.append(unit.duplicate)
        with pytest.raises(ZeroDivisionError):
            async with app.initiate("failing") as unit:
                await unit.connection.execute(effect.insert(), {"what": "2"})
                _ = 1 / 0
        await asyncio.gather(*(one(app, str(number)) for number in range(5)))
        assert seen == [False, True]
        await app.aclose()

    async def one(app: App, id: str) -> None:
        async with app.initiate(id) as unit:
            await unit.session.execute(effect.insert(), {"what": f"one {id}"})
            unit.send(Shipped(order_id=id, part=1), to=SINK)

    on_loop(world.url, test)
    assert set(world.effects()) == {"1", *(f"one {number}" for number in range(5))}
    assert len(world.rows(SINK)) == 6


def test_what_does_not_fit_is_refused(url: str) -> None:
    def plain(message: Order, ctx: Context) -> None: ...

    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    with pytest.raises(ConfigurationError, match="wrap it by an Inbox"):
        wrapped(AsyncInbox(engine), plain)
    for kind, given in ((AsyncInbox, engine.sync_engine), (Inbox, engine)):
        with pytest.raises(ConfigurationError, match="is for"):
            kind(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="wrap it by an AsyncInbox"):
        Inbox(engine.sync_engine).wrap(insert, message=Order, consumer="billing")
    other = App(QUEUE, engine=engine, settings=Settings(database_url="sqlite:///other.db"))
    with pytest.raises(ConfigurationError, match="lead to different databases"):
        other.adapters()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_server_that_is_away_at_first_use_is_unavailable(driver: str) -> None:
    async def main() -> None:
        engine = create_async_engine(f"postgresql+{driver}://nobody@127.0.0.1:1/nowhere")
        with pytest.raises(Unavailable):
            await wrapped(AsyncInbox(engine))(body("1"))
        await engine.dispose()

    asyncio.run(main())


@every_driver
def test_a_cancelled_task_rolls_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sleep, in a statement, and in a claim that waits for another transaction."""
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 1)
    began = asyncio.Event()

    async def sleeps(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)
        began.set()
        await asyncio.sleep(60)

    async def queries(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)
        began.set()
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        await ctx.session.execute(text("SELECT sleep(1)" if ctx.connection.dialect.name == "mysql" else endless))

    async def test(engine: AsyncEngine) -> None:
        inbox = AsyncInbox(engine)
        for function in (sleeps, queries):
            began.clear()
            task = asyncio.ensure_future(wrapped(inbox, function)(body("1")))
            await began.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        began.clear()
        holder = asyncio.ensure_future(wrapped(inbox, sleeps)(body("1")))
        await began.wait()
        waiting = asyncio.ensure_future(wrapped(inbox)(body("1")))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        holder.cancel()
        with suppress(asyncio.CancelledError):
            await holder
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await wrapped(inbox, sleeps)(body("1"))
        assert (await wrapped(inbox)(body("1"))).verdict is Verdict.CLAIMED

    on_loop(world.url, test)
    assert world.effects() == {"1": 1}


@pytest.mark.parametrize("kind", ["postgresql-asyncpg"], indirect=True)
def test_a_first_use_that_is_cancelled_leaves_nothing_on_a_connection(world: World) -> None:
    """Behind a BEGIN that was cancelled, asyncpg takes a transaction for a savepoint of another one."""

    async def test(_: AsyncEngine) -> None:
        for number in range(15):
            engine = create_async_engine(asynchronous_url(world.url), pool_size=1, max_overflow=0)
            async with engine.connect():
                pass
            first = asyncio.ensure_future(wrapped(AsyncInbox(engine))(body("1")))
            for _ in range(number % 5):
                await asyncio.sleep(0.0005)
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
            async with engine.connect() as connection:
                driver: Any = (await connection.get_raw_connection()).driver_connection
                assert not driver.is_in_transaction()
                async with driver.transaction():
                    pass
            await engine.dispose()

    on_loop(world.url, test)


@pytest.mark.parametrize("kind", ["postgresql-asyncpg"], indirect=True)
def test_a_transaction_that_was_left_on_a_connection_is_no_handling(world: World) -> None:
    async def test(_: AsyncEngine) -> None:
        engine = create_async_engine(asynchronous_url(world.url), pool_size=1, max_overflow=0)
        call = wrapped(AsyncInbox(engine))
        await call(body("1"))
        async with engine.connect() as connection:
            await (await connection.get_raw_connection()).driver_connection.transaction().start()  # type: ignore[union-attr]
        await call(body("2"))
        await engine.dispose()

    on_loop(world.url, test)
    assert world.effects() == {"1": 1, "2": 1}


@every_server
def test_a_claim_that_waits_too_long_is_in_flight(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()

    async def sleeps(message: Order, ctx: AsyncContext) -> None:
        began.set()
        await asyncio.sleep(60)

    async def test(engine: AsyncEngine) -> None:
        holder = asyncio.ensure_future(wrapped(AsyncInbox(engine), sleeps)(body("1")))
        await began.wait()
        with pytest.raises(InFlight):
            await wrapped(AsyncInbox(engine))(body("1"))
        holder.cancel()
        with suppress(asyncio.CancelledError):
            await holder

    on_loop(world.url, test)


@pytest.mark.slow
@every_server
def test_messages_under_random_cancellations_and_timeouts(world: World) -> None:
    """Each is delivered until it is acknowledged. Nothing is lost or doubled, and nothing leaks (see `on_loop`)."""
    few = "150"  # where each cancellation costs a connection, and a wait for the server to notice
    chance, messages, workers = (
        random.Random(7),
        int(os.environ.get("IDEMP_TEST_MESSAGES", few if "mysql" in world.url else "400")),
        12,
    )
    ended: Counter[str] = Counter()

    async def handle(message: Order, ctx: AsyncContext) -> Shipped:
        await insert(message, ctx)
        await asyncio.sleep(chance.random() * 0.004)
        await ctx.session.execute(text("SELECT 1"))
        return Shipped(order_id=message.order_id, part=0)

    async def deliver(call: Callable[..., Awaitable[Any]], ids: list[str]) -> None:
        while ids:
            id = ids.pop()
            task = asyncio.ensure_future(call(body(id)))
            way = chance.random()
            try:
                if way < 0.2:
                    await asyncio.sleep(chance.random() * 0.02)
                    task.cancel()
                elif way < 0.4:
                    async with asyncio.timeout(chance.random() * 0.02):
                        await task
                elif way < 0.45:
                    await asyncio.sleep(chance.random() * 0.01)
                    for _ in range(2):  # while the first cancellation is being dealt with
                        task.cancel()
                        await asyncio.sleep(0)
                await task
                ended["acknowledged"] += 1
            except (asyncio.CancelledError, TimeoutError, InFlight, DispatchIncomplete) as error:
                ended[type(error).__name__] += 1
                ids.insert(chance.randrange(len(ids) + 1), id)

    async def test(engine: AsyncEngine) -> None:
        SqlScheduler(world.database, "a relay").beat("relay")
        call = wrapped(AsyncInbox(engine), handle)
        ids = [str(number) for number in range(messages)]
        beat = asyncio.ensure_future(beats())
        await asyncio.gather(*(deliver(call, ids) for _ in range(workers)))
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat

    async def beats() -> None:
        while True:
            await asyncio.sleep(5)
            await asyncio.to_thread(SqlScheduler(world.database, "a relay").beat, "relay")

    on_loop(world.url, test)
    assert world.effects() == {str(number): 1 for number in range(messages)}
    assert world.pending() == messages
    assert ended["acknowledged"] == messages
    assert ended["CancelledError"] + ended["TimeoutError"] > messages / 10


@every_server
def test_the_first_of_many_tasks_opens_for_all_and_its_error_is_its_own(
    url: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, register = list[Any](), SqlStore.register

    def counted(database: Any) -> list[Any]:
        checks.append(database)
        return check(database)

    def refuse(store: SqlStore, consumer: str, *arguments: Any, **options: Any) -> None:
        if consumer == "refused":
            raise ConfigurationError("another identity")
        register(store, consumer, *arguments, **options)

    check = sql_checks.check_database
    monkeypatch.setattr(sql_checks, "check_database", counted)
    monkeypatch.setattr(SqlStore, "register", refuse)

    async def test(engine: AsyncEngine) -> None:
        inbox = AsyncInbox(engine)
        refused = inbox.wrap(insert, message=Order, consumer="refused", policy=POLICY)
        handle = wrapped(inbox)
        answers = await asyncio.gather(
            refused(body("0")), *(handle(body(str(number))) for number in range(1, 20)), return_exceptions=True
        )
        assert isinstance(answers[0], ConfigurationError)
        assert [answer.verdict for answer in answers[1:]] == [Verdict.CLAIMED] * 19  # type: ignore[union-attr]

    on_loop(url, test)
    assert len(checks) == 1


@every_driver
def test_an_initiation_joins_a_session(world: World) -> None:
    app = App("shop", settings=Settings(database_url=world.url))
    SqlScheduler(world.database, "relay").beat("relay")

    async def main(engine: AsyncEngine) -> None:
        if engine.dialect.name == "sqlite":
            app.adapters()  # before a session has the only write lock

        async def place(id: str | None = None, *, fails: bool = False, cancels: bool = False) -> bool:
            async with AsyncSession(engine) as session:
                if id is None:  # else the block is the first to use the session
                    await session.execute(effect.insert(), {"what": "before"})
                with suppress(ZeroDivisionError, asyncio.CancelledError):
                    async with app.initiate(id, session=session) as unit:
                        if not unit.duplicate:
                            await unit.connection.execute(effect.insert(), {"what": "within"})
                            unit.send({"order_id": "1", "part": 0}, to=SINK, type="shop.Shipped")
                        if fails:
                            1 / 0
                        if cancels:
                            raise asyncio.CancelledError
                await session.commit()
                return unit.duplicate

        assert [await place("7"), await place("7")] == [False, True]
        await place(fails=True)
        await place(cancels=True)
        with pytest.raises(TransactionEnded, match=r"session\.commit\(\)"):
            async with AsyncSession(engine) as session, app.initiate(session=session) as unit:
                unit.send({"order_id": "1", "part": 0}, to=SINK, type="shop.Shipped")
                await session.commit()

    on_loop(world.url, main)
    assert (world.effects(), world.pending()) == ({"within": 1}, 1)
    app.close()
