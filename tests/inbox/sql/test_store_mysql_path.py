"""What the store does on MySQL, forced on MariaDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from tests.inbox.sql.test_store_mariadb import TestMariadb as _OnMariadb
from tests.inbox.sql.test_store_mariadb import engine  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from idemp.inbox.sql import SqlStore
    from idemp.testing.store_bench import Bench


@pytest.mark.slow
class TestMysqlPathOnMariadb(_OnMariadb):
    without_returning = True

    def test_session_keeps_its_own_lock_wait(self, bench: Bench, store: SqlStore) -> None:
        with store.engine.connect() as connection:
            before = connection.scalar(text("SELECT @@innodb_lock_wait_timeout"))
        for _ in range(2):
            bench.handle(bench.claim(wait=1.0))
            with store.engine.connect() as connection:
                assert connection.scalar(text("SELECT @@innodb_lock_wait_timeout")) == before
