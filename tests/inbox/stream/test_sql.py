"""Streams in SQL databases keep the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import SqlStreams
from idemp.testing.stream_conformance import StreamConformance
from tests.inbox.sql import kept
from tests.servers import given

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine


class SqlConformance(StreamConformance):
    """One database for all cases: each has streams and a consumer of its own."""

    @pytest.fixture
    def streams(self, engine: Engine) -> SqlStreams:
        return SqlStreams(engine)

    def reopen_streams(self, streams: Any) -> SqlStreams:
        return SqlStreams(kept._other(streams.engine))

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.lost_at_commit(store.streams)


class TestSqlite(SqlConformance):
    kind = "sqlite"

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        return kept.full_disk()


class TestPostgresql(SqlConformance):
    kind = "postgresql"


class TestMariadb(SqlConformance):
    kind = "mariadb"


@pytest.mark.skipif(given.url_of("MYSQL") is None, reason="IDEMP_TEST_MYSQL_URL names no server")
class TestMysql(SqlConformance):
    kind = "mysql"
