"""Time-outs of handlers: what ends them, and that each counts."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from idemp import AsyncContext, AsyncInbox, ConfigurationError, Context, Idempotent, Inbox, Policy, Retry
from idemp.errors import TimedOut
from idemp.policy import configured
from idemp.sql.records.failures import DeadLetters, FailedMessage
from idemp.sql.store import SqlStore
from tests.servers.databases import query
from tests.world import Order, World, asynchronous_url, effect

RETRY = Retry(attempts=2, delays=(0.0,))
LONG: dict[str, str] = {
    "postgresql": "SELECT pg_sleep(60)",
    "mysql": "SELECT SLEEP(60)",
}


every_server = pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)


def policy(seconds: Any, made: type[Policy] = Idempotent) -> Any:
    return made(retry=RETRY, timeout=seconds, **({"key": "order_id"} if made is Idempotent else {}))


def dead(world: World) -> list[FailedMessage]:
    return DeadLetters(world.database).find()


@every_server
def test_the_database_ends_a_long_statement_and_the_limits_do_not_stay(url: str) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id == "long":
            ctx.connection.execute(text(LONG[ctx.connection.dialect.name.replace("mariadb", "mysql")]))

    world = World(url, handle, policy(0.3))
    world.send("long", "short")
    start = time.monotonic()
    worker = world.worker()
    world.work(worker)
    assert time.monotonic() - start < 30
    assert (world.effects(), world.runs) == ({"short": 1}, {"long": 2, "short": 1})
    (letter,) = dead(world)
    assert (letter.rule, letter.failures, letter.attempts) == ("handler", 2, 2)
    unlimited = {
        "postgresql": "SELECT extract(epoch FROM current_setting('statement_timeout')::interval)",
        "mysql": "SELECT @@session.max_statement_time + @@session.idle_transaction_timeout",
    }
    with worker.adapters.database.engine.connect() as connection:  # one of those that were limited
        assert connection.scalar(text(unlimited[connection.dialect.name.replace("mariadb", "mysql")])) == 0


@every_server
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_transaction_that_is_idle_for_too_long_is_ended_and_counts(url: str, goes_on: bool) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(text("UPDATE held SET number = 1"))
        with other.connect() as connection:  # waits for that row lock, until the server takes it away
            connection.execute(text("UPDATE held SET number = 2"))
            connection.commit()
        if goes_on:  # on a connection that is lost
            ctx.connection.execute(effect.insert(), {"what": message.order_id})

    other = create_engine(url)
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE held (number INTEGER)"))
        connection.execute(text("INSERT INTO held VALUES (0)"))
    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=1), timeout=1))
    world.send("1")
    world.work(world.worker())
    assert query(url, "SELECT number FROM held")[0] == (2,)
    assert (world.effects(), world.runs, [letter.rule for letter in dead(world)]) == ({}, {"1": 1}, ["handler"])
    other.dispose()


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_shorter_limit_of_the_role_stays(url: str) -> None:
    found: list[Any] = []

    def handle(message: Order, ctx: Context) -> None:
        found.append(ctx.connection.scalar(text("SELECT current_setting('statement_timeout')")))
        ctx.connection.execute(text("SET LOCAL statement_timeout = '7s'"))  # the handler's own comes last

    for seconds in (30, "30d"):  # the latter is more than the server takes
        world = World(f"{url}?options=-cstatement_timeout%3D250ms", handle, policy(seconds))
        world.send(str(seconds))
        world.work(world.worker())
        assert (found.pop(), dead(world)) == ("250ms", [])


@pytest.mark.parametrize("made", [Idempotent, Policy])
def test_a_plain_handler_that_takes_too_long_counts_when_it_ends(made: type[Policy], url: str) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        end = time.monotonic() + 0.15
        while time.monotonic() < end:  # computes
            pass

    world = World(url, handle, policy(0.1, made))
    world.send("1")
    world.work(world.worker())
    (letter,) = dead(world)
    assert (world.effects(), letter.attempts) == ({}, 2)
    assert letter.error.startswith("TimedOut: the handler ran for 0.")
    assert "its time-out is 0.1 s: its transaction was rolled back" in letter.error


def test_a_handler_that_runs_for_too_long_is_named_while_it_runs(url: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = threading.Event()

    def handle(message: Order, ctx: Context) -> None:
        assert seen.wait(30)

    def notice(record: Any) -> bool:
        if getattr(record, "event", "") == "handler.slow":
            seen.set()
        return True

    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=1), timeout=0.3))
    world.send("1")
    worker = world.worker()
    caplog.handler.addFilter(notice)
    thread = threading.Thread(target=watch, args=(worker, seen))
    thread.start()
    world.work(worker)
    thread.join()
    caplog.handler.removeFilter(notice)
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "handler.slow"]
    assert (
        record.getMessage() == "handler.slow: shop.Order has been running for 0.3 s (id None)" or "0.3 s" in record.getMessage()
    )
    assert "TimedOut" in dead(world)[0].error


def watch(worker: Any, seen: threading.Event) -> None:
    while not seen.wait(0.05):
        worker.watch(time.monotonic())


DRIVERS = [
    "postgresql-psycopg",
    "postgresql-asyncpg",
    "sqlite-aiosqlite",
    pytest.param("mariadb-aiomysql", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", DRIVERS, indirect=True)
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_async_handler_is_cancelled_and_counts(url: str, stubborn: bool) -> None:
    world, cancelled = World(url), list[str]()

    async def handle(message: Order, ctx: AsyncContext) -> None:
        await ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id == "computes":
            time.sleep(0.55)  # noqa: ASYNC251 - without an await, nothing can cancel it
            return
        try:
            await asyncio.sleep(60 if message.order_id == "long" else 0)
        except asyncio.CancelledError:
            cancelled.append(message.order_id)
            if not stubborn:
                raise

    async def own(message: Order, ctx: AsyncContext) -> None:
        raise TimeoutError("the shop did not answer")

    async def main() -> None:
        engine = create_async_engine(asynchronous_url(url))
        inbox = AsyncInbox(engine)
        options: dict[str, Any] = {"message": Order, "consumer": "billing", "policy": policy(0.5)}
        take = inbox.wrap(handle, **options)
        with pytest.raises(TimedOut, match=r"the handler ran for \d\.\d s, and its time-out is 0.5 s"):
            await take(b'{"order_id": "long"}')
        await take(b'{"order_id": "short"}')
        with pytest.raises(TimedOut):
            await take(b'{"order_id": "computes"}')
        with pytest.raises(TimeoutError, match="the shop did not answer"):
            await inbox.wrap(own, **options)(b'{"order_id": "own"}')
        await engine.dispose()

    asyncio.run(main())
    assert (world.effects(), cancelled, world.claims()) == ({"short": 1}, ["long"], 1)


@pytest.mark.parametrize("kind", ["postgresql-psycopg"], indirect=True)
def test_a_statement_of_an_async_handler_is_cancelled_too(url: str) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id == "long":
            ctx.connection.execute(text("SELECT pg_sleep(60)"))

    world = World(url, handle, policy(0.3))
    world.send("long", "short")
    world.work(world.worker())
    (letter,) = dead(world)
    assert (world.effects(), letter.failures, letter.error[:9]) == ({"short": 1}, 2, "TimedOut:")


def test_a_time_out_does_not_count_while_the_database_takes_no_work(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [False, True]

    def handle(message: Order, ctx: Context) -> None:
        end = time.monotonic() + (0.15 if len(world.runs) == sum(world.runs.values()) else 0)
        while time.monotonic() < end:
            pass
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    monkeypatch.setattr(SqlStore, "probe", lambda _: probes.pop(0) if probes else True)
    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=1), timeout=0.1))
    world.send("1")
    world.work(world.worker())
    assert (world.effects(), world.runs, dead(world)) == ({"1": 1}, {"1": 2}, [])


def test_the_time_out_is_an_option_of_files_too(url: str) -> None:
    changed = configured(Policy(retry=RETRY), {"timeout": "1m"}, "shop.Order")
    assert (type(changed), changed.timeout, changed.retry) == (Policy, "1m", RETRY)
    assert configured(policy(3), {"batch": 5}, "shop.Order").timeout == 3
    assert configured(policy(3), {"idempotent": False}, "shop.Order").timeout == 3
    assert configured(Policy(timeout=3), {"key": "order_id"}, "shop.Order").timeout == 3
    for wrong in (0, "0s", -1, "soon", True):
        with pytest.raises(ConfigurationError, match="timeout"):
            policy(wrong)  # type: ignore[arg-type]
    slow = Inbox(create_engine(url)).wrap(
        lambda message: time.sleep(0.02), message=Order, consumer="billing", policy=Policy(timeout=0.01)
    )
    with pytest.raises(TimedOut):
        slow(b'{"order_id": "1"}')
