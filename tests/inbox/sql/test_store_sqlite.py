"""The SQL store on SQLite keeps the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.testing.store_conformance import SqlEffects, StoreConformance
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sqlalchemy import Engine

    from idemp.testing.clock import FakeClock


class TestSqlite(StoreConformance):
    one_writer = True

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        made = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db", connect_args={"timeout": 1})
        yield made
        kept.dispose(made)

    @pytest.fixture
    def tables(self) -> Tables:
        return Tables()

    @pytest.fixture
    def store(self, engine: Engine, tables: Tables, clock: FakeClock) -> SqlStore:
        upgrade(engine, tables)
        return SqlStore(engine, tables=tables, clock=clock)

    @pytest.fixture
    def effects(self, engine: Engine) -> SqlEffects:
        return SqlEffects(engine)

    def reopen(self, store: Any) -> SqlStore:
        return kept.another(store)

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.full_disk()


class TestSqliteWithPrefix(TestSqlite):
    @pytest.fixture
    def tables(self) -> Tables:
        return Tables(prefix="billing_")
