"""Streams in a real MySQL, where IDEMP_TEST_MYSQL_URL names one."""

from __future__ import annotations

import pytest

from tests.inbox.stream.test_sql import SqlConformance
from tests.servers import given

if given.url_of("MYSQL") is None:
    pytest.skip("no MySQL here: IDEMP_TEST_MYSQL_URL names no server", allow_module_level=True)


class TestMysql(SqlConformance):
    kind = "mysql"
