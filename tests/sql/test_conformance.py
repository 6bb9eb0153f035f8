"""The conformance suites, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

from idemp.sql.aio import AsyncSqlStore
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database, open_engine
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.testing import BrokerConformance, SchedulerConformance, StoreConformance
from tests.conftest import every_database, every_path
from tests.world import asynchronous_url, event_loop, unreachable


@pytest.fixture
def open_store(database: Database) -> Callable[[str], SqlStore]:
    def open_store(worker: str) -> SqlStore:
        store = SqlStore(database, worker)
        for consumer in ("billing", "shop"):
            store.register(consumer, ["shop.Pay", "shop.Order"], [])
        return store

    return open_store


@pytest.fixture
def open_scheduler(database: Database) -> Callable[[str], SqlScheduler]:
    return lambda worker: SqlScheduler(database, worker, 30.0)


@pytest.fixture
def open_broker(database: Database) -> Callable[[str], SqlBroker]:
    return lambda worker: SqlBroker(database, worker, 30.0)


@pytest.fixture
def lose(database: Database) -> Callable[[], None]:
    message = database.tables.message

    def lose() -> None:
        with database.short(queues=True) as connection:
            connection.execute(update(message).values(due_at=0.0))

    return lose


class Awaited:
    """A store of `async def` handlers, called from a thread."""

    def __init__(self, store: AsyncSqlStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return partial(self._run, value) if callable(value) else value

    @contextmanager
    def connect(self) -> Iterator[Any]:
        unit = self._store.connect()
        self._run(unit.__enter__)
        try:
            yield unit
        finally:
            self._run(unit.__exit__, None, None, None)

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        call = self._store.run(partial(function, *arguments, **options))
        return asyncio.run_coroutine_threadsafe(call, event_loop()).result()


@pytest.fixture
def open_async_store(url: str, database: Database) -> Iterator[Callable[[str], Any]]:
    opened: list[AsyncSqlStore] = []

    def open_store(worker: str) -> Any:
        store = SqlStore(database, worker)
        opened.append(AsyncSqlStore.beside(store, open_engine(asynchronous_url(url), 5)))
        for consumer in ("billing", "shop"):
            store.register(consumer, ["shop.Pay", "shop.Order"], [])
        return Awaited(opened[-1])

    yield open_store
    for store in opened:
        asyncio.run_coroutine_threadsafe(store.close(), event_loop()).result()


AIOMYSQL = pytest.param("mariadb-aiomysql", marks=pytest.mark.slow)


@every_path
class TestStore(StoreConformance):
    pass


@pytest.mark.parametrize("kind", ["postgresql-psycopg", "postgresql-asyncpg", "sqlite-aiosqlite", AIOMYSQL], indirect=True)
class TestAsyncStore(StoreConformance):
    @pytest.fixture
    def open_store(self, open_async_store: Callable[[str], Any]) -> Callable[[str], Any]:
        return open_async_store


@every_database
class TestScheduler(SchedulerConformance):
    pass


@every_database
class TestBroker(BrokerConformance):
    lease = 30.0

    @pytest.fixture
    def age(self, age: Callable[[float], None]) -> Callable[[float], None]:
        return age

    @pytest.fixture
    def outage(self, database: Database) -> Callable[[], AbstractContextManager[None]]:
        return partial(unreachable, database)
