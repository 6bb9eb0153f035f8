"""The store on a real MySQL, where IDEMP_TEST_MYSQL_URL names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp.inbox.sql import create_engine_safely
from tests.inbox.sql import kept
from tests.inbox.sql.test_store_mariadb import TestMariadb as _OnMariadb
from tests.servers import given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

if given.url_of("MYSQL") is None:
    pytest.skip("no MySQL here: IDEMP_TEST_MYSQL_URL names no server", allow_module_level=True)


class TestMysql(_OnMariadb):
    @pytest.fixture
    def engine(self, mysql_url: str) -> Iterator[Engine]:
        made = create_engine_safely(mysql_url)
        yield made
        kept.dispose(made)
