"""What is noted of deletions, and deleting exactly what an archive has."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp.inbox.sql import SqlStore
from idemp.twophase.sql import SqlDecisions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from idemp.inbox.sql.upkeep import SqlUpkeep
    from tests.inbox.sql.conftest import MovedClock
    from tests.inbox.sql.rows import Rows

WEEK = timedelta(days=7)
RETENTION = {"orders.Place": WEEK}


@pytest.fixture
def store(engine: Engine, clock: MovedClock) -> Iterator[SqlStore]:
    made = SqlStore(engine, clock=clock)
    yield made
    made.close()


@pytest.fixture
def upkeep(store: SqlStore) -> SqlUpkeep:
    return store.upkeep


class TestNote:
    def test_nothing_was_ever_deleted(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        rows.claim()
        rows.consumed(clock, days=1)
        assert upkeep.purge("orders", RETENTION, 10) == 0
        assert upkeep.purged_before("orders") is None
        assert upkeep.purged_before("nobody") is None

    def test_a_purge_says_how_far_it_went(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        rows.claim()
        rows.consumed(clock, days=8)
        assert upkeep.purge("orders", RETENTION, 10) == 1
        assert upkeep.purged_before("orders") == clock.now() - WEEK

    def test_what_no_archive_has_moves_it_on_in_any_case(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        """A guard of that archive must not pass for complete."""
        key = rows.claim()
        rows.claim()
        rows.consumed(clock, days=8)
        assert upkeep.purge_archived("orders", [key], clock.now()) == 1
        assert upkeep.purged_before("orders") == clock.now()
        assert upkeep.purge("orders", RETENTION, 10) == 1
        noted = upkeep.purged_before("orders")
        assert noted is not None
        assert noted > clock.now()

    def test_is_seen_by_a_claim_of_what_was_deleted(self, store: SqlStore, clock: MovedClock, rows: Rows) -> None:
        """Both come with one COMMIT."""
        rows.claim()
        rows.consumed(clock, days=8)
        store.upkeep.purge("orders", RETENTION, 10)
        store.prepare("orders")
        with store.begin() as unit:
            assert unit.purged_before("orders") == clock.now() - WEEK


class TestArchived:
    def test_nothing_but_those(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        archived = [rows.claim(outputs=2, pending=False) for _ in range(3)]
        other = rows.claim(outputs=1, pending=False)
        rows.consumed(clock, days=8)
        assert upkeep.purge_archived("orders", archived, clock.now()) == 3
        assert rows.keys() == {other}
        assert rows.count(rows.tables.output) == 1
        assert upkeep.purge_archived("orders", archived, clock.now()) == 0  # repeated

    def test_not_what_was_claimed_anew(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        """Purged and replayed by force since: the archive has another handling under that id."""
        rows.consumed(clock, days=8)
        until = clock.now() - timedelta(days=1)
        again = rows.claim(at=until)
        assert upkeep.purge_archived("orders", [again], until) == 0
        assert rows.keys() == {again}

    def test_not_what_pends(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        waiting = rows.claim(outputs=1)
        rows.consumed(clock, days=8)
        assert upkeep.purge_archived("orders", [waiting], clock.now()) == 0
        assert rows.keys() == {waiting}

    def test_not_what_other_databases_may_have_prepared(
        self, store: SqlStore, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        unfinished, decisions = rows.claim(), SqlDecisions(store)
        number = store.names.id("consumer", "orders")
        with store.begin() as unit:
            decisions.note(unit, number, unfinished, b"12345678", [])
            unit.commit()
        rows.consumed(clock, days=8)
        assert upkeep.purge_archived("orders", [unfinished], clock.now()) == 0
        assert upkeep.purge("orders", RETENTION, 10) == 0
        assert upkeep.purge_lag("orders", RETENTION) == timedelta(0)
        (decision,) = decisions.unfinished()
        decisions.finished(decision)
        assert upkeep.purge("orders", RETENTION, 10) == 1

    def test_not_of_others(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        theirs = rows.claim(consumer="billing")
        rows.claim()
        rows.consumed(clock, days=8)
        assert upkeep.purge_archived("orders", [theirs], clock.now()) == 0
        assert upkeep.purge_archived("nobody", [theirs], clock.now()) == 0
        assert theirs in set(rows.keys())

    def test_starts_that_never_ended_go(self, store: SqlStore, clock: MovedClock, rows: Rows) -> None:
        key = rows.claim()
        store.note_start("orders", key)
        clock.move(days=2)
        store.upkeep.tidy_archived("orders", clock.now())
        assert rows.count(rows.tables.unfinished) == 0
