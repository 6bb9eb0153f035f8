"""Streams in SQL databases keep the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.errors import CommitUnknown
from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStreams, guard
from idemp.testing.stream_conformance import StreamConformance
from tests.inbox.sql import kept
from tests.servers import given

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from idemp.inbox.stream import StreamInbox
    from idemp.testing.store_bench import Bench


class SqlConformance(StreamConformance):
    """One database for all cases: each has streams and a consumer of its own."""

    @pytest.fixture
    def streams(self, engine: Engine) -> SqlStreams:
        return SqlStreams(engine)

    def reopen_streams(self, streams: Any) -> SqlStreams:
        return SqlStreams(kept._other(streams.engine))

    def failing_commits(self, store: Any) -> AbstractContextManager[None]:
        guard.install(store.streams.engine)  # as the inbox beside it would
        return kept.lost_at_commit(store.streams)

    def test_lost_answer_is_told(self, bench: Bench, store: StreamInbox) -> None:
        """Nobody may take it for an append that did not happen."""
        claim = bench.claim()
        bench.handle(bench.claim())  # its names are known now
        with store.begin([claim]) as unit:
            unit.claim(claim)
            with self.failing_commits(store), pytest.raises(CommitUnknown):
                unit.commit()
        assert bench.handle(claim).verdict is Verdict.CLAIMED


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
