"""A small service whose inbox chunks and deliveries share: in memory, and on each kind of database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, shared_tables
from idemp.inbox.sql.engine import create_engine_safely
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MemoryEffects, SqlEffects
from tests.house import House
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

DATABASES = ("sqlite", "postgresql", "mariadb")


@pytest.fixture(scope="module", params=("memory", *DATABASES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine | None]:
    """One for all tests of a module; none for the inbox in memory."""
    if request.param == "memory":
        yield None
    elif request.param == "sqlite":
        made = create_engine_safely(f"sqlite:///{tmp_path_factory.mktemp('bulk')}/inbox.db")
        yield made
        made.dispose()
    else:
        with kept.database(request.getfixturevalue(request.param)) as made:
            yield made


@pytest.fixture
def house(engine: Engine | None) -> Iterator[House]:
    """One consumer on an empty inbox."""
    clock = FakeClock()
    if engine is None:
        store = InMemoryStore(clock)
        yield House(store, MemoryEffects(store), clock)
        return
    kept.empty(engine, shared_tables())
    made = SqlStore(engine, clock=clock)
    yield House(made, SqlEffects(engine), clock)
    made.close()
