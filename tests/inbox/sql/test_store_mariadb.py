"""The SQL store on MariaDB keeps the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import SqlStore, shared_tables
from idemp.testing.store_conformance import SqlEffects, StoreConformance
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.testing.clock import FakeClock


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, mariadb: Any) -> Iterator[Engine]:
    with kept.database(mariadb, isolation_level=request.cls.isolation) as made:
        yield made


class TestMariadb(StoreConformance):
    isolation = "READ COMMITTED"
    without_returning = False

    @pytest.fixture
    def store(self, engine: Engine, clock: FakeClock) -> SqlStore:
        kept.empty(engine, shared_tables())
        return SqlStore(engine, clock=clock, without_returning=self.without_returning)

    @pytest.fixture
    def effects(self, engine: Engine) -> SqlEffects:
        return SqlEffects(engine)

    def reopen(self, store: Any) -> SqlStore:
        return kept.another(store, isolation_level=self.isolation, without_returning=self.without_returning)

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.lost_at_commit(store, isolation_level=self.isolation)


@pytest.mark.slow
class TestMariadbRepeatableRead(TestMariadb):
    isolation = "REPEATABLE READ"
    asks_again = True
