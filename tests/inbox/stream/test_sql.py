"""Streams in SQL databases keep the port's promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp.errors import CommitUnknown, StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStreams, create_engine_safely, guard
from idemp.inbox.stream import StreamInbox
from idemp.testing.stream_conformance import StreamConformance
from tests.inbox.sql import kept
from tests.inbox.sql.rows import alter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

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

    @pytest.mark.parametrize("right", ["SELECT", "INSERT"])
    def test_lacking_right_is_no_fault_of_the_message(
        self, streams: SqlStreams, bench: Bench, unique_name: str, right: str
    ) -> None:
        """Consumption pauses, and nothing is parked for it."""
        bench.handle(bench.claim())
        granted = {"SELECT", "INSERT"} - {right}
        alter(
            streams.engine,
            f"CREATE ROLE {unique_name} LOGIN",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {unique_name}",
            f"REVOKE SELECT ON idemp_commit FROM {unique_name}",
            f"GRANT {', '.join(granted)} ON idemp_commit TO {unique_name}",
        )
        engine = create_engine_safely(streams.engine.url.set(username=unique_name))
        claim, store = bench.claim(), StreamInbox(SqlStreams(engine), InMemoryStore())
        with pytest.raises(StoreUnavailable, match="lacks a right"), store.begin([claim]) as unit:
            unit.claim(claim)
            unit.commit()
        engine.dispose()
        alter(streams.engine, f"DROP OWNED BY {unique_name}", f"DROP ROLE {unique_name}")


class TestMariadb(SqlConformance):
    kind = "mariadb"
