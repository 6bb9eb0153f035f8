"""When a statement of ours, which goes past SQLAlchemy, finds its connection lost, the pool gives out none of its age."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

import pytest
from sqlalchemy import text

from idemp.errors import StoreUnavailable
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, create_engine_safely
from tests.inbox.sql.kept import make_tables

OTHERS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "


def test_the_pool_is_emptied(postgresql_url: str) -> None:
    engine, elsewhere = create_engine_safely(postgresql_url), create_engine_safely(postgresql_url)
    make_tables(engine)
    store = SqlStore(engine)
    claim = Claim(
        consumer="shop",
        id=effective_id("envelope", "A-1"),
        message_type="T",
        fingerprint=None,
        wait=timedelta(seconds=1),
    )
    store.prepare("shop", ["T"])
    with ExitStack() as several:
        for _ in range(4):
            several.enter_context(engine.connect()).execute(text("SELECT 1"))
    with elsewhere.connect() as connection:
        connection.execute(text(f"{OTHERS} pg_backend_pid()"))
    with pytest.raises(StoreUnavailable), store.begin([claim]) as unit:
        unit.claim(claim)
    with ExitStack() as several:
        for _ in range(4):
            assert several.enter_context(engine.connect()).scalar(text("SELECT 1")) == 1
    with store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
    store.close()
    engine.dispose()
    elsewhere.dispose()
