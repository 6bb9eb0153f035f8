"""Relays, and claims that are taken back, use the tables that they need alone: days cost nobody else anything."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import event

from idemp.inbox.port import Verdict
from idemp.inbox.sql import SqlStore, shared_tables
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import make_outputs
from tests.inbox.sql import days, kept
from tests.inbox.sql.test_daily import FIRST, at, claim_of, handle, place_of, stale
from tests.inbox.sql.test_dropping import OTHERS, SECOND, consume, purge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

__all__ = ["stale"]

_LOCKED = (
    "SELECT c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
    "WHERE l.pid = pg_backend_pid() AND c.relkind = 'r' AND c.relname LIKE 'idemp%'"
)
LEASE = timedelta(minutes=1)


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql) as made:
        yield made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(engine: Engine, clock: FakeClock) -> Iterator[SqlStore]:
    kept.empty(engine, shared_tables())
    made = SqlStore(engine, clock=clock)
    yield made
    made.close()
    days.clear(engine, shared_tables())


def begin_days(store: SqlStore) -> int:
    """It is noon of the first day that has tables; the consumer's number."""
    layout = store.upkeep.daily.open("orders", ahead=4)
    clock: Any = store.clock
    clock.advance(timedelta(days=2, hours=12))
    store.places.look()
    return layout.consumer_id


@contextmanager
def locks(engine: Engine) -> Iterator[set[str]]:
    """The tables that were locked right after any statement."""
    found: set[str] = set()

    def look(connection: Any, *rest: Any) -> None:
        with connection.connection.driver_connection.cursor() as cursor:
            found.update(name for (name,) in cursor.execute(_LOCKED))

    event.listen(engine, "after_cursor_execute", look)
    try:
        yield found
    finally:
        event.remove(engine, "after_cursor_execute", look)


class TestRelays:
    def test_it_touches_the_days_of_what_it_sends(self, store: SqlStore, clock: FakeClock) -> None:
        number = begin_days(store)
        keys = [at(FIRST), uuid4()]
        for key in keys:
            handle(store, key, make_outputs(2))
        clock.advance(LEASE)
        store.upkeep.take_pending(10, timedelta(0))  # it has looked where the days are
        with locks(store.engine) as locked:
            assert len(store.upkeep.take_pending(10, LEASE)) == 4
        assert locked == {"idemp_pending", "idemp_output", f"idemp_output_{number}_20260103"}

    def test_in_the_order_of_ids_wherever_they_are(self, store: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        keys = sorted([at(FIRST), at(SECOND), at(FIRST, 1), *(uuid4() for _ in range(3))])
        outputs = {key: make_outputs(2) for key in keys}
        for key in reversed(keys):
            handle(store, key, outputs[key])
        clock.advance(LEASE)
        taken = store.upkeep.take_pending(20, LEASE)
        assert [pending.output.id for pending in taken] == [output.id for key in keys for output in outputs[key]]

    def test_one_that_has_not_heard_of_the_days(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        handle(store, at(FIRST), outputs := make_outputs(2))
        clock.advance(LEASE)
        assert [pending.output for pending in stale.upkeep.take_pending(10, LEASE)] == outputs

    def test_one_that_has_not_heard_of_the_newest_day(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        stale.places.look()
        (layout,) = store.upkeep.daily.layouts("orders")
        clock.advance(timedelta(days=4))
        store.upkeep.daily.make_ahead(layout)
        store.places.look()
        assert handle(store, at(layout.made), outputs := make_outputs(1)) is Verdict.CLAIMED
        clock.advance(LEASE)
        assert [pending.output for pending in stale.upkeep.take_pending(10, LEASE)] == outputs

    def test_one_that_has_not_heard_of_a_days_end(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        handle(store, at(FIRST), outputs := make_outputs(2))
        stale.places.look()
        consume(store, days=4)
        purge(store)
        assert place_of(store, at(FIRST))[0].endswith("_late")
        assert [pending.output for pending in stale.upkeep.take_pending(10, LEASE)] == outputs

    def test_what_was_confirmed_since_it_was_leased_is_left_out(self, store: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        handle(store, at(FIRST), outputs := make_outputs(2))
        clock.advance(LEASE)
        other = kept.another(store)

        def confirm(connection: Any, _: Any, statement: str, *rest: Any) -> None:
            if "JOIN" in statement:
                other.upkeep.settle_pending([outputs[0].id], {}, LEASE)

        event.listen(store.engine, "before_cursor_execute", confirm)
        try:
            taken = store.upkeep.take_pending(10, LEASE)
        finally:
            event.remove(store.engine, "before_cursor_execute", confirm)
        assert [pending.output for pending in taken] == outputs[1:]
        other.close()


class TestTakingBack:
    """A handler committed behind idemp's back: its claim goes."""

    @staticmethod
    def rows(store: SqlStore, *keys: Any) -> list[dict[str, Any]]:
        """Claims that were made now."""
        for key in keys:
            handle(store, key, make_outputs(1))
        return [store.inbox_row(claim_of(key), store.clock.now()) for key in keys]

    def test_it_touches_its_own_day(self, store: SqlStore) -> None:
        number = begin_days(store)
        rows = self.rows(store, at(FIRST))
        with locks(store.engine) as locked:
            assert store.withdraw(rows, told=True)
        part = f"{number}_20260103"
        assert locked == {"idemp_decision", "idemp_pending", f"idemp_inbox_{part}", f"idemp_output_{part}"}
        assert place_of(store, at(FIRST)) == []
        assert store.upkeep.pending_count() == 0

    def test_somebody_elses_claim_stays(self, store: SqlStore, clock: FakeClock) -> None:
        begin_days(store)
        rows = self.rows(store, at(FIRST))
        assert not store.withdraw([{**rows[0], "claimed_at": clock.now() - LEASE}], told=True)
        assert store.upkeep.pending_count() == 1
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE

    def test_where_the_day_went_meanwhile(self, store: SqlStore, stale: SqlStore) -> None:
        begin_days(store)
        consume(store, days=4)
        stale.places.look()
        rows = self.rows(stale, at(FIRST), uuid4())
        purge(store)
        assert place_of(store, at(FIRST))[0].endswith("_late")
        assert stale.withdraw(rows, told=True)
        assert place_of(store, at(FIRST)) == []
        assert store.upkeep.pending_count() == 0
        assert store.upkeep.purge("orders", {}, 10, others=OTHERS) == 0
