"""The SQL store on SQLite keeps the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import SqlStore, Tables, create_engine_safely, shared_tables
from idemp.testing.store_conformance import SqlEffects, StoreConformance
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.testing.clock import FakeClock


@pytest.fixture(scope="class")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    file = tmp_path_factory.mktemp("store") / "inbox.db"
    made = create_engine_safely(f"sqlite:///{file}", connect_args={"timeout": 1})
    yield made
    kept.dispose(made)


class TestSqlite(StoreConformance):
    one_writer = True

    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables()

    @pytest.fixture
    def store(self, engine: Engine, tables: Tables, clock: FakeClock) -> SqlStore:
        kept.empty(engine, tables)
        return SqlStore(engine, tables=tables, clock=clock)

    @pytest.fixture
    def effects(self, engine: Engine) -> SqlEffects:
        return SqlEffects(engine)

    def reopen(self, store: Any) -> SqlStore:
        return kept.another(store)

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.full_disk()


@pytest.mark.slow
class TestSqliteWithPrefix(TestSqlite):
    @pytest.fixture
    def tables(self) -> Tables:
        return shared_tables(prefix="billing_")
