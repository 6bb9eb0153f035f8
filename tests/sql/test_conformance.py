"""The conformance suites, on each database."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import update

from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.testing import BrokerConformance, SchedulerConformance, StoreConformance
from tests.conftest import every_database, every_path


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


@every_path
class TestStore(StoreConformance):
    pass


@every_database
class TestScheduler(SchedulerConformance):
    pass


@every_database
class TestBroker(BrokerConformance):
    pass
