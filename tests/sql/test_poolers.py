"""Behind PgBouncer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from idemp import App, AsyncContext, AsyncInbox, ConfigurationError, Idempotent, Inbox, Settings, Verdict
from idemp.worker import Worker
from tests.servers.pgbouncer import Pgbouncer
from tests.world import QUEUE, Order, World, effect

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["postgresql"], indirect=True)]


@pytest.fixture
def pooled(url: str) -> Iterator[Callable[[str], str]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-pgbouncer-")))
        folder.chmod(0o755)
        yield lambda mode: stack.enter_context(Pgbouncer(folder / mode, url, mode)).url


async def insert(message: Order, ctx: AsyncContext) -> None:
    await ctx.session.execute(effect.insert(), {"what": message.order_id})


def test_psycopg_works_behind_transaction_pooling(url: str, pooled: Callable[[str], str]) -> None:
    world = World(url)
    engine = create_async_engine(pooled("transaction"), connect_args={"prepare_threshold": None})

    async def main() -> None:
        handle = AsyncInbox(engine).wrap(insert, message=Order, consumer="billing", policy=Idempotent(key="order_id"))
        found = await asyncio.gather(*(handle({"order_id": str(number % 60)}) for number in range(120)))
        assert sum(each.verdict is Verdict.CLAIMED for each in found) == 60
        await engine.dispose()

    asyncio.run(main())
    assert world.effects() == {str(number): 1 for number in range(60)}


def test_asyncpg_is_refused_behind_transaction_pooling(url: str, pooled: Callable[[str], str]) -> None:
    world = World(url)

    async def once(engine: AsyncEngine) -> None:
        handle = AsyncInbox(engine).wrap(insert, message=Order, consumer="billing", policy=Idempotent(key="order_id"))
        try:
            assert (await handle({"order_id": "1"})).verdict is Verdict.CLAIMED
        finally:
            await engine.dispose()

    by_transaction = pooled("transaction").replace("psycopg", "asyncpg")
    with pytest.raises(ConfigurationError, match="a pooler in transaction mode"):
        asyncio.run(once(create_async_engine(by_transaction)))
    app = App(QUEUE, settings=Settings(database_url=by_transaction))
    app.handler(Order)(insert)
    worker = Worker(app)
    with pytest.raises(ConfigurationError, match="a pooler in transaction mode"):
        worker.run()
    worker.close()
    app.close()
    asyncio.run(once(create_async_engine(pooled("session").replace("psycopg", "asyncpg"))))
    assert world.effects() == {"1": 1}


REFUSED = pytest.raises(ConfigurationError, match="there is a pooler, .* create the engine with connect_args")


def test_an_engine_that_names_statements_is_refused_behind_a_pooler(url: str, pooled: Callable[[str], str]) -> None:
    behind = pooled("transaction")
    policy = Idempotent(key="order_id")

    def handle(engine: Any) -> Any:
        return Inbox(engine).wrap(lambda message: None, message=Order, consumer="billing", policy=policy)

    naming, careful = create_engine(behind), create_engine(behind, connect_args={"prepare_threshold": None})
    app = App(QUEUE, engine=naming, settings=Settings(database_url=behind))
    for call in (app.adapters, lambda: handle(naming)({"order_id": "1"})):
        with REFUSED:
            call()
    assert handle(careful)({"order_id": "1"}).verdict is Verdict.CLAIMED
    naming.dispose()
    careful.dispose()

    async def main() -> None:
        engine = create_async_engine(behind)
        with REFUSED:
            await AsyncInbox(engine).wrap(insert, message=Order, consumer="billing", policy=policy)({"order_id": "2"})
        with REFUSED:
            async with App(QUEUE, engine=engine, settings=Settings(database_url=behind)).initiate():
                pass
        await engine.dispose()

    asyncio.run(main())
