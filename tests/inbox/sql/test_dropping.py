"""A day goes whole, once nobody can need it; what somebody does need stays, and nobody waits."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date, timedelta
from functools import partial
from random import Random
from threading import Barrier
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, select, text, update

from idemp import App, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.identity import new_id
from idemp.inbox.port import Mark, Verdict
from idemp.inbox.sql import SqlStore, create_engine_safely, ddl, dropping, shared_tables
from idemp.inbox.sql.daily import AHEAD, Daily
from idemp.inbox.sql.days import first_key
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import Background, make_outputs
from idemp.twophase.sql import SqlDecisions
from tests.inbox.sql import days, kept
from tests.inbox.sql.test_daily import FIRST, at, claim_of, handle, place_of, stale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.slow

__all__ = ["stale"]

WINDOW = {"orders.Place": timedelta(days=2)}
OTHERS = timedelta(days=2)
SECOND = FIRST + timedelta(days=1)


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql) as made:
        yield made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(engine: Engine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlStore]:
    """On the first of its days, at noon; its cleaner makes few days ahead, because each takes its time."""
    monkeypatch.setattr(Daily.make_ahead, "__defaults__", (4,))
    kept.empty(engine, shared_tables())
    made = SqlStore(engine, clock=clock)
    made.upkeep.daily.open("orders", ahead=4)
    clock.advance(timedelta(days=2, hours=12))
    made.places.look()
    yield made
    made.close()
    days.clear(engine, shared_tables())


def consume(store: SqlStore, **period: float) -> None:
    """The consumer consumes without a break, so that its window moves along."""
    clock: Any = store.clock
    started_at, ended_at = clock.now(), clock.advance(timedelta(**period))
    with store.engine.begin() as connection:
        values = {"consumer_id": store.names.id("consumer", "orders"), "started_at": started_at, "ended_at": ended_at}
        connection.execute(store.tables.activity.insert(), values)
    store.refresh_horizons("orders", [OTHERS])


def purge(store: SqlStore) -> int:
    return store.upkeep.purge("orders", WINDOW, 100, others=OTHERS)


def kept_days(store: SqlStore) -> list[str]:
    """The days that have an inbox."""
    named = [name.split("_") for name in days.parts(store.engine, store.tables)]
    return [day for kind, _, day in named if kind == "inbox" and day != "late"]


class TestWhen:
    def test_a_day_goes_when_all_of_it_is_past_the_window(self, store: SqlStore) -> None:
        keys = [at(FIRST, number) for number in range(5)]
        for key in keys:
            handle(store, key)
        handle(store, at(SECOND))
        consume(store, days=2, hours=11)
        assert purge(store) == 0, "two days after its end, and not before"
        assert handle(store, keys[0]) is Verdict.DUPLICATE
        assert store.upkeep.purge_lag("orders", WINDOW, others=OTHERS) == timedelta(0)
        consume(store, hours=2)
        assert store.upkeep.purge_lag("orders", WINDOW, others=OTHERS) == timedelta(hours=1)
        assert purge(store) == 5
        assert "20260103" not in kept_days(store)
        assert handle(store, at(SECOND)) is Verdict.DUPLICATE
        assert store.upkeep.purge_lag("orders", WINDOW, others=OTHERS) == timedelta(0)

    def test_days_are_made_ahead_by_the_cleaner(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Daily.make_ahead, "__defaults__", (AHEAD,))
        consume(store, days=3)
        purge(store)
        assert kept_days(store)[-1] == "20260120"
        assert handle(store, at(date(2026, 1, 20))) is Verdict.CLAIMED

    def test_a_standstill_does_not_count(self, store: SqlStore, clock: FakeClock) -> None:
        handle(store, at(FIRST))
        consume(store, hours=3)
        clock.advance(timedelta(days=20))
        assert purge(store) == 0
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE

    def test_where_nothing_is_said_of_other_types_days_stay(self, store: SqlStore) -> None:
        handle(store, at(FIRST))
        consume(store, days=9)
        assert store.upkeep.purge("orders", WINDOW, 100) == 0
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE

    def test_the_plain_tables_are_cleaned_as_before(self, store: SqlStore) -> None:
        without = [uuid4() for _ in range(3)]
        for key in without:
            handle(store, key)
        handle(store, timed := at(FIRST))
        consume(store, days=2, hours=1)
        assert purge(store) == 3, "its claim is past the window, its day is not"
        assert handle(store, timed) is Verdict.DUPLICATE


class TestWhatGoesWrong:
    """The batched DELETE, of plain tables and late ids, goes on."""

    def test_an_owner_that_may_make_no_tables(self, store: SqlStore, caplog: pytest.LogCaptureFixture) -> None:
        handle(store, uuid4())
        name = f"owner_{uuid4().hex[:8]}"
        ours = [*store.tables.names, *(f"idemp_{part}" for part in days.parts(store.engine, store.tables))]
        with store.engine.begin() as connection:
            former = connection.scalar(text("SELECT current_user"))
            connection.exec_driver_sql(
                f"CREATE ROLE {name} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA public TO {name}"
            )
            for table in ours:
                connection.exec_driver_sql(f"ALTER TABLE {table} OWNER TO {name}")
        consume(store, days=9)
        owner = SqlStore(
            create_engine_safely(store.engine.url.set(username=name, password="secret")), clock=store.clock
        )
        try:
            assert purge(owner) == 1
        finally:
            owner.engine.dispose()
            with store.engine.begin() as connection:
                connection.exec_driver_sql(
                    f'REASSIGN OWNED BY {name} TO "{former}"; DROP OWNED BY {name}; DROP ROLE {name}'
                )
        assert [record.event for record in caplog.records if hasattr(record, "event")] == ["daily_not_ours"]

    def test_a_day_that_can_not_be_made(self, store: SqlStore, caplog: pytest.LogCaptureFixture) -> None:
        """Here since something else has its name."""
        handle(store, uuid4())
        consume(store, days=9)
        number = store.names.id("consumer", "orders")
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE VIEW idemp_inbox_{number}_20260112 AS SELECT 1 AS one")
        try:
            assert purge(store) == 1
        finally:
            with store.engine.begin() as connection:
                connection.exec_driver_sql(f"DROP VIEW idemp_inbox_{number}_20260112")
        assert "daily_failed" in [getattr(record, "event", "") for record in caplog.records]

    def test_a_day_with_many_claims_is_not_counted(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server's statistics say about how many there were."""
        monkeypatch.setattr(ddl, "MOST_COUNTED", 3)
        for number in range(5):
            handle(store, at(FIRST, number))
        part = f"idemp_inbox_{store.names.id('consumer', 'orders')}_20260103"
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"ANALYZE {part}")
        for number in range(5, 7):
            handle(store, at(FIRST, number))
        consume(store, days=3)
        assert purge(store) == 5


class TestWhatIsNeeded:
    @pytest.mark.parametrize("quarantined", [False, True])
    def test_what_pends_is_kept_among_late_ids(self, store: SqlStore, quarantined: bool) -> None:
        outputs = make_outputs(2)
        key, gone = at(FIRST), at(FIRST, 1)
        handle(store, key, outputs)
        handle(store, gone, other := make_outputs(1))
        store.record([Mark(claim_of(key), (outputs[0].id,)), Mark(claim_of(gone), (other[0].id,))])
        if quarantined:
            store.upkeep.quarantine({outputs[1].id: "returned"})
        consume(store, days=4)
        assert purge(store) == 1
        assert place_of(store, key) == [f"inbox_{store.names.id('consumer', 'orders')}_late"]
        store.places.look()
        with store.begin([claim_of(key)]) as unit:
            found = unit.claim(claim_of(key))
        assert [(stored.output, stored.pending) for stored in found.outputs] == list(
            zip(outputs, [False, True], strict=True)
        )
        if quarantined:
            store.upkeep.release_quarantined([outputs[1].id])
        (leased,) = store.upkeep.take_pending(10, timedelta(minutes=1))
        assert leased.output == outputs[1]
        store.upkeep.settle_pending([outputs[1].id], {}, timedelta(0))
        assert purge(store) == 1, "it is past its window, and waits for nothing any more"
        assert place_of(store, key) == []

    def test_what_other_databases_may_have_prepared_is_kept_among_late_ids(self, store: SqlStore) -> None:
        """Recovery goes by the claim: gone, it would have them roll back what was committed."""
        key, decisions = at(FIRST), SqlDecisions(store)
        claim, number = claim_of(key), store.names.id("consumer", "orders")
        with store.begin([claim]) as unit:
            unit.claim(claim)
            decisions.note(unit, number, key, b"12345678", [])
            unit.commit()
        handle(store, at(FIRST, 1))
        consume(store, days=4)
        assert purge(store) == 1
        assert place_of(store, key) == [f"inbox_{number}_late"]
        assert purge(store) == 0
        (decision,) = decisions.unfinished()
        decisions.finished(decision)
        assert purge(store) == 1
        assert place_of(store, key) == []

    def test_a_claim_of_the_window_is_kept_among_late_ids(self, store: SqlStore) -> None:
        """A message of that day, which was handled by force or by policy long after."""
        consume(store, days=4)
        handle(store, key := at(FIRST))
        assert purge(store) == 0
        assert "20260103" not in kept_days(store)
        assert handle(store, key) is Verdict.DUPLICATE

    def test_more_than_can_be_moved_keeps_the_day(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dropping, "MOST_MOVED", 2)
        for number in range(3):
            handle(store, at(FIRST, number), make_outputs(1))
        consume(store, days=4)
        assert purge(store) == 0
        assert kept_days(store)[0] == "20260103"
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE

    def test_a_late_id_is_new_once(self, store: SqlStore) -> None:
        consume(store, days=4)
        purge(store)
        key = at(FIRST)
        assert [handle(store, key) for _ in range(2)] == [Verdict.CLAIMED, Verdict.DUPLICATE]
        assert place_of(store, key) == [f"inbox_{store.names.id('consumer', 'orders')}_late"]
        consume(store, days=2, hours=1)
        assert purge(store) == 1
        assert place_of(store, key) == []

    def test_new_commands_about_things_of_a_day_that_is_gone(self, store: SqlStore, clock: FakeClock) -> None:
        """Each is handled once, whatever the time in its key; before the day is gone, and after."""
        handled: list[str] = []
        app = App("orders", store=store, broker=InMemoryBroker(clock), clock=clock)
        app.handler(dict, type="orders.Place", policy=Idempotent(key="order", retention="2d"))(
            lambda message: handled.append(message["order"])
        )
        protocol = app.protocol(app.broker.publisher())

        def deliver(order: UUID) -> Outcome:
            body = json.dumps({"order": str(order)}).encode()
            return protocol.process(Message(body=body, type="orders.Place", message_id=str(new_id(clock.now()))))

        consume(store, days=4)
        before, after = at(FIRST), at(FIRST, 1)
        assert [deliver(before), deliver(before)] == [Outcome.HANDLED, Outcome.SKIPPED]
        purge(store)
        assert "20260103" not in kept_days(store)
        assert [deliver(before), deliver(after), deliver(after)] == [Outcome.SKIPPED, Outcome.HANDLED, Outcome.SKIPPED]
        assert handled == [str(before), str(after)]


class TestNobodyWaits:
    def test_a_claim_that_runs_keeps_its_day(self, store: SqlStore) -> None:
        consume(store, days=4)
        claim = claim_of(at(FIRST))
        with store.begin([claim]) as unit:
            assert unit.claim(claim).verdict is Verdict.CLAIMED
            assert purge(store) == 0
            assert kept_days(store)[0] == "20260103"
            unit.commit()
        assert handle(store, claim.id.key) is Verdict.DUPLICATE
        purge(store)
        assert "20260103" not in kept_days(store)
        assert handle(store, claim.id.key) is Verdict.DUPLICATE

    def test_a_duplicate_that_is_looked_at_keeps_its_day(self, store: SqlStore) -> None:
        handle(store, key := at(FIRST))
        consume(store, days=4)
        with store.begin([claim_of(key)]) as unit:
            assert unit.claim(claim_of(key)).verdict is Verdict.DUPLICATE
            assert purge(store) == 0
        assert purge(store) == 1

    def test_claims_of_other_days_and_of_plain_ids_go_on(self, store: SqlStore) -> None:
        """While a day is being dropped, whatever lock that has; those of that very day are told to run again."""
        handle(store, at(FIRST))
        consume(store, days=3)
        part = f"idemp_inbox_{store.names.id('consumer', 'orders')}_20260103"
        with store.engine.begin() as dropper:
            (layout,) = store.upkeep.daily.layouts("orders")
            before = store.upkeep.late_before("orders", OTHERS)
            assert dropping.Dropping(store.tables).drop(dropper, layout, FIRST, before) == 1
            assert [handle(store, key) for key in (at(SECOND), uuid4())] == [Verdict.CLAIMED] * 2
            late = Background(lambda: handle(store, at(FIRST)))
            waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST(:inbox AS regclass)")
            with store.engine.connect() as looking:
                while late.running and not looking.scalar(waits, {"inbox": part}):
                    looking.rollback()
            assert late.running
        assert late.result(30) is Verdict.CLAIMED, "nobody knows of it any more: its age is what parks it"
        assert place_of(store, at(FIRST))[0].endswith("_late")

    def test_two_cleaners(self, store: SqlStore) -> None:
        for day in (FIRST, SECOND):
            for number in range(3):
                handle(store, at(day, number))
        consume(store, days=6)
        both = [Background(lambda: purge(store)) for _ in range(2)]
        assert sum(each.result(30) for each in both) + purge(store) == 6
        assert kept_days(store)[0] > "20260104"

    def test_claims_and_drops_at_once(self, store: SqlStore, stale: SqlStore) -> None:
        """Late ids are claimed again and again by four threads, two of which look only when told, while their days go."""
        keys = [at(day, number) for day in (FIRST, SECOND) for number in range(40)]
        consume(store, days=6)
        stale.places.look()
        begin = Barrier(5)

        def deliveries(worker: SqlStore, seed: int) -> Counter[UUID]:
            mine = Random(seed).sample(keys, len(keys))
            begin.wait(30)
            return Counter(key for key in mine if handle(worker, key) is Verdict.CLAIMED)

        threads = [Background(partial(deliveries, (store, stale)[seed % 2], seed)) for seed in range(4)]
        begin.wait(30)
        while kept_days(store)[0] <= "20260104" or any(thread.running for thread in threads):
            purge(store)
        handled = sum((thread.result(60) for thread in threads), Counter[UUID]())
        assert handled == dict.fromkeys(keys, 1)
        assert all(place_of(store, key)[0].endswith("_late") for key in keys)


class TestWhoRemembersTheDay:
    def test_a_worker_that_has_not_heard_of_its_end(self, store: SqlStore, stale: SqlStore) -> None:
        handle(store, at(FIRST))
        consume(store, days=4)
        stale.places.look()
        assert purge(store) == 1
        assert handle(store, at(FIRST, 1)) is Verdict.CLAIMED
        assert handle(stale, at(FIRST, 1)) is Verdict.DUPLICATE

    def test_nobody_makes_a_day_again_that_is_gone(self, store: SqlStore) -> None:
        """Else whoever remembers it would claim there."""
        (before,) = store.upkeep.daily.layouts("orders")
        handle(store, at(FIRST))
        consume(store, days=3)
        assert purge(store) == 1
        store.upkeep.daily.mend(before)
        assert kept_days(store)[0] == "20260104"

    def test_nor_one_that_was_given_up(self, store: SqlStore) -> None:
        (before,) = store.upkeep.daily.layouts("orders")
        store.upkeep.daily.close("orders", FIRST + timedelta(days=2))
        store.upkeep.daily.mend(before)
        store.upkeep.daily.make_ahead(before)
        assert kept_days(store) == ["20260103", "20260104"]

    def test_marks_of_a_day_that_is_gone(self, store: SqlStore, stale: SqlStore) -> None:
        """Its outputs stop pending all the same; its history goes with late ids, and their cleaner."""
        kept_output, gone_output = make_outputs(2)
        handle(store, at(SECOND), [kept_output])
        handle(store, at(FIRST))
        consume(store, days=3)
        stale.places.look()
        purge(store)
        stale.record([Mark(claim_of(at(FIRST)), (gone_output.id,)), Mark(claim_of(at(SECOND)), (kept_output.id,))])
        assert store.upkeep.pending_count() == 0
        history = store.tables.history
        with store.engine.connect() as connection:
            keys = set(connection.scalars(select(history.c.message_key)))
        assert keys == {at(FIRST), at(SECOND)}


class TestCrashes:
    STEPS = (
        "UPDATE public.idemp_daily", "LOCK TABLE", "INSERT INTO public.idemp_output", "INSERT INTO public.idemp_inbox",
        "DROP TABLE",
    )  # fmt: skip

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("when", ["before_cursor_execute", "after_cursor_execute"])
    def test_in_any_step(self, store: SqlStore, step: str, when: Any) -> None:
        """The server ends the cleaner's connection there: either nothing has happened, or all of it; another goes on."""
        outputs = make_outputs(1)
        handle(store, at(FIRST), outputs)
        handle(store, at(FIRST, 1))
        consume(store, days=3)
        other = kept.another(store)
        hit = []

        def end(connection: Any, _: Any, statement: str, *rest: Any) -> None:
            if step in " ".join(statement.split()) and not hit:
                number = connection.connection.driver_connection.info.backend_pid
                hit.append(number)
                with other.engine.connect() as killer:
                    killer.execute(text(f"SELECT pg_terminate_backend({number}, 10000)"))

        event.listen(store.engine, when, end)
        try:
            with pytest.raises(Exception, match="can't be reached"):
                purge(store)
        finally:
            event.remove(store.engine, when, end)
        assert hit
        assert kept_days(other)[0] == "20260103"
        assert handle(other, at(FIRST)) is Verdict.DUPLICATE
        assert purge(other) == 1
        assert handle(other, at(FIRST)) is Verdict.DUPLICATE
        assert [pending.output for pending in other.upkeep.take_pending(5, timedelta(minutes=1))] == outputs
        other.close()


def test_the_oldest_day_decides_by_its_end(store: SqlStore) -> None:
    """An id of the last millisecond is as safe as one of the first."""
    last = UUID(int=(first_key(SECOND).int - (1 << 80)) | (7 << 76) | (2 << 62))
    handle(store, last)
    assert place_of(store, last)[0].endswith("20260103")
    with store.engine.begin() as connection:
        connection.execute(update(store.tables.inbox).values(claimed_at=store.clock.now() - timedelta(days=1)))
    consume(store, days=2, hours=11)
    assert purge(store) == 0
    assert handle(store, last) is Verdict.DUPLICATE
