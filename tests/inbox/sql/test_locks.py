"""What other sessions lock, while a delivery is under way on PostgreSQL."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

import pytest
from sqlalchemy import text

from idemp import Outcome
from idemp.errors import TransientStoreError
from idemp.inbox.sql import create_engine_safely
from tests.inbox.sql.kept import make_tables
from tests.inbox.sql.test_guard import Shop
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

WAITS_LONG = """
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    AND clock_timestamp() - query_start > interval '2500 ms'
"""


@pytest.fixture
def engine(postgresql_url: str) -> Iterator[Engine]:
    """A database with idemp's tables."""
    made = create_engine_safely(postgresql_url)
    make_tables(made)
    yield made
    made.dispose()


def test_an_index_is_being_built(engine: Engine) -> None:
    """The claim waits for the table for as long as it takes: `claim_wait`, two seconds, is for others who hold the id."""
    shop = Shop(engine)
    outcomes: list[Outcome] = []
    with engine.connect() as other:
        other.execute(text("LOCK TABLE idemp_inbox IN SHARE MODE"))
        delivering = threading.Thread(target=lambda: outcomes.append(shop.deliver()))
        delivering.start()
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
            wait_until(
                lambda: watching.scalar(text(WAITS_LONG)) == 1, "the claim has waited for longer than a claim may"
            )
        other.rollback()
        delivering.join()
    assert outcomes == [Outcome.HANDLED]


@pytest.mark.parametrize("claim", ["early", "late"])
def test_a_lock_timeout_of_the_table_is_not_in_flight(postgresql_url: str, claim: Literal["early", "late"]) -> None:
    """The id is held by no other delivery: the database asks to try again, and the message is not delayed for a twin."""
    engine = create_engine_safely(postgresql_url, connect_args={"options": "-c lock_timeout=200"})
    make_tables(engine)
    shop = Shop(engine, claim=claim)
    try:
        with engine.connect() as other:
            other.execute(text("LOCK TABLE idemp_inbox IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(TransientStoreError, match="lock timeout"):
                shop.deliver()
        assert shop.deliver() is Outcome.HANDLED
    finally:
        engine.dispose()
