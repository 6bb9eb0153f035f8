"""Relays share pending outputs, cleaners keep to the window, heartbeats tell who lives."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
import time_machine
from sqlalchemy import Engine, delete, select, text, update

from idemp.clock import SystemClock
from idemp.errors import ConfigurationError, StoreError, StoreUnavailable
from idemp.inbox.port import Identity
from idemp.inbox.sql.due import EFFECTS_LATER
from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.erasing import Erasing
from idemp.inbox.sql.liveness import ACTIVITY_GAP, BEAT_INTERVAL, FAR_PAST, RELAY_ALIVE_WITHIN
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.queries import Queries
from idemp.inbox.sql.tables import Tables
from idemp.inbox.sql.upkeep import SqlUpkeep
from idemp.inbox.sql.wakeup import pending_channel
from idemp.testing.store_bench import Background
from tests.inbox.sql.rows import Rows
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.inbox.sql.conftest import MovedClock

LEASE = timedelta(seconds=30)
WEEK = timedelta(days=7)
RETENTION = {"orders.Place": WEEK}


@pytest.fixture
def upkeep(engine: Engine, tables: Tables, clock: MovedClock) -> Iterator[SqlUpkeep]:
    with closing(SqlUpkeep(engine, tables, clock, "host-1")) as made:
        yield made


@pytest.fixture
def erasing(engine: Engine, tables: Tables) -> Erasing:
    return Erasing(engine, tables)


@pytest.fixture
def queries(engine: Engine, tables: Tables) -> Queries:
    return Queries(engine, tables)


def an_hour(*, behind: bool) -> time_machine.travel:
    """This process's clock, on a host that keeps bad time."""
    return time_machine.travel(datetime.now(UTC) + timedelta(hours=-1 if behind else 1), tick=True)


class TestPending:
    def test_two_relays_at_once_take_disjoint_work(
        self, engine: Engine, tables: Tables, clock: MovedClock, rows: Rows
    ) -> None:
        for _ in range(10):
            rows.claim(outputs=6)
        relays = [SqlUpkeep(engine, tables, clock, f"relay-{number}") for number in range(4)]
        start = threading.Barrier(len(relays))

        def relay(one: SqlUpkeep) -> list[object]:
            start.wait(10)
            taken: list[object] = []
            while batch := one.take_pending(7, LEASE):
                taken += [pending.output.id for pending in batch]
            return taken

        with ThreadPoolExecutor(len(relays)) as pool:
            taken = [id_ for ids in pool.map(relay, relays) for id_ in ids]
        # Rows that another relay held just then were passed over, and are due still: nothing twice, nothing lost.
        taken += [pending.output.id for pending in relays[0].take_pending(100, LEASE)]
        assert len(taken) == len(set(taken)) == 60

    @pytest.mark.parametrize("shared_engine", ["postgresql", "mariadb"], indirect=True, scope="module")
    def test_rows_that_another_relay_is_taking_are_passed_over(
        self, engine: Engine, tables: Tables, upkeep: SqlUpkeep, rows: Rows
    ) -> None:
        rows.claim(outputs=3)
        held = select(tables.pending.c.output_id).limit(1).with_for_update()
        with engine.connect() as connection, connection.begin():
            first = connection.scalars(held).one()
            taken = upkeep.take_pending(10, LEASE)  # does not wait
        assert len(taken) == 2
        assert first not in {pending.output.id for pending in taken}

    def test_work_of_a_dead_relay_is_taken_over_after_its_lease(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        rows.claim(outputs=2)
        first = upkeep.take_pending(10, LEASE)
        clock.move(seconds=LEASE.total_seconds() - 0.001)
        assert upkeep.take_pending(10, LEASE) == []  # a slow one is not stolen from
        clock.move(seconds=0.001)
        second = upkeep.take_pending(10, LEASE)
        assert [pending.output for pending in second] == [pending.output for pending in first]
        assert [(one.attempts, two.attempts) for one, two in zip(first, second, strict=True)] == [(1, 2), (1, 2)]

    @pytest.mark.parametrize("shared_engine", ["postgresql"], indirect=True, scope="module")
    def test_a_lease_is_counted_from_after_the_wait_for_its_turn(
        self, engine: Engine, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        """The table is locked for longer than a lease (an index is built, say): it must not be over when it is given."""
        rows.claim(outputs=2)
        waits = text("SELECT count(*) FROM pg_locks WHERE relation = 'idemp_pending'::regclass AND NOT granted")
        with engine.connect() as other, engine.connect() as looking:
            other.execute(text("LOCK TABLE idemp_pending IN ACCESS EXCLUSIVE MODE"))
            taking = Background(lambda: upkeep.take_pending(10, LEASE))
            wait_until(lambda: looking.scalar(waits) == 1, "the relay waits for the table")
            clock.move(seconds=3 * LEASE.total_seconds())
            other.rollback()
            assert len(taking.result(60)) == 2
        assert upkeep.take_pending(10, LEASE) == []

    @pytest.mark.parametrize("shared_engine", ["postgresql", "mariadb"], indirect=True, scope="module")
    @pytest.mark.parametrize("what", ["messages", "effects"])
    def test_a_lease_is_counted_by_the_databases_clock(self, engine: Engine, tables: Tables, what: str) -> None:
        """Neither does a host whose clock is ahead take what another one has in hand, nor wait one whose clock is behind."""
        clock = SystemClock()
        with closing(SqlUpkeep(engine, tables, clock, "host-1")) as upkeep:
            Rows(engine, tables, clock).claim(outputs=2)
            take = partial(upkeep.take_pending, 10, LEASE)
            if what == "effects":
                take = partial(upkeep.take_effects, "orders", 10, LEASE)
                with engine.begin() as connection:
                    connection.execute(update(tables.pending).values(due_at=clock.now() + EFFECTS_LATER))
            with an_hour(behind=True):
                leased = take()
                assert len(leased) == 2
            refused, quarantined = (pending.output.id for pending in leased)
            with an_hour(behind=False):
                assert take() == []
                upkeep.settle_pending([], {refused: "nacked"}, LEASE)
                upkeep.quarantine({quarantined: "returned"})
            assert take() == []
            with an_hour(behind=False):
                assert upkeep.release_quarantined([quarantined]) == 1
                upkeep.settle_pending([], {refused: "nacked"}, timedelta(0))
            assert {pending.output.id for pending in take()} == {refused, quarantined}

    @pytest.mark.parametrize(
        "shared_engine", ["postgresql", "mariadb"], indirect=True, scope="module"
    )  # SQLite has one writer
    def test_rows_that_commit_late_are_not_skipped(self, engine: Engine, upkeep: SqlUpkeep, rows: Rows) -> None:
        rows.claim()  # interns the names
        with engine.connect() as slow, slow.begin():
            late = rows.claim(outputs=1, connection=slow)
            early = rows.claim(outputs=1)
            assert len(upkeep.take_pending(10, LEASE)) == 1
        (taken,) = upkeep.take_pending(10, LEASE)
        assert taken.attempts == 1
        assert late != early

    def test_outputs_come_back_as_they_were_stored_and_in_order(self, upkeep: SqlUpkeep, rows: Rows) -> None:
        rows.claim(outputs=12)
        taken = [pending.output for pending in upkeep.take_pending(100, LEASE)]
        assert [output.ordinal for output in taken] == list(range(12))
        assert taken[3].message.body == b'{"at": 3}'
        assert (taken[3].exchange, taken[3].routing_key, taken[3].message.headers) == (
            "events",
            "orders.Placed",
            {"customer": "Ada"},
        )
        assert taken[3].message.message_id == str(taken[3].id)

    def test_outputs_wait_for_their_time(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        rows.claim(outputs=1)
        clock.move(seconds=-1)
        assert upkeep.take_pending(10, LEASE) == []

    def test_settling(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows, queries: Queries) -> None:
        rows.claim(outputs=3)
        first, second, third = (pending.output.id for pending in upkeep.take_pending(10, LEASE))
        upkeep.settle_pending([first], {second: "nack"}, timedelta(seconds=5))
        upkeep.settle_pending([first], {second: "nack"}, timedelta(seconds=5))  # repeating it is harmless
        assert upkeep.pending_count() == 2
        clock.move(seconds=5)
        (again,) = upkeep.take_pending(10, LEASE)
        assert (again.output.id, again.attempts) == (second, 2)
        assert {row.output_id: row.reason for row in queries.list_pending()} == {second: "nack", third: None}

    def test_counts_end_within_a_small_integer(
        self, engine: Engine, tables: Tables, upkeep: SqlUpkeep, rows: Rows
    ) -> None:
        """An output may be refused for weeks."""
        rows.claim(outputs=1)
        with engine.begin() as connection:
            connection.execute(update(tables.pending).values(attempts=29_999, refusals=29_999))
        for _ in range(3):
            (taken,) = upkeep.take_pending(10, LEASE)
            upkeep.settle_pending([], {taken.output.id: "returned"}, timedelta(0), refused=True)
        (taken,) = upkeep.take_pending(10, LEASE)
        assert (taken.attempts, taken.refusals) == (30_000, 30_000)

    def test_output_confirmed_meanwhile_is_not_sent_by_the_relay(
        self, engine: Engine, tables: Tables, upkeep: SqlUpkeep, rows: Rows
    ) -> None:
        rows.claim(outputs=1)
        with engine.begin() as connection:
            connection.execute(delete(tables.pending))
        assert upkeep.take_pending(10, LEASE) == []
        assert upkeep.pending_count() == 0

    def test_quarantine_and_release(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows, queries: Queries) -> None:
        key = rows.claim(outputs=2)
        first, second = (pending.output.id for pending in upkeep.take_pending(10, LEASE))
        upkeep.quarantine({first: "unroutable: no queue is bound"})
        upkeep.settle_pending([], {first: "later"}, timedelta(0))  # a slow relay does not bring it back
        clock.move(days=400)
        assert [pending.output.id for pending in upkeep.take_pending(10, LEASE)] == [second]
        assert upkeep.pending_count() == 2
        (row,) = queries.list_pending("orders", quarantined_only=True)
        assert (row.output_id, row.key, row.original_id, row.destination) == (
            first,
            key,
            str(key),
            "events/orders.Placed",
        )
        assert row.reason == "unroutable: no queue is bound"
        assert row.quarantined_at is not None
        assert upkeep.release_quarantined([first, second]) == 1
        (again,) = upkeep.take_pending(10, LEASE)
        assert (again.output.id, again.attempts) == (first, 2)  # it may have been sent before


class TestWakeup:
    def test_waiting_ends_with_its_time(self, upkeep: SqlUpkeep) -> None:
        upkeep.wait_for_pending(0.01)  # PostgreSQL answers the first one: it had not listened before
        assert upkeep.wait_for_pending(0.05) is False

    def test_announcement_wakes_a_relay(self, upkeep: SqlUpkeep) -> None:
        upkeep.wait_for_pending(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(upkeep.wait_for_pending, 30)
            upkeep.announce_pending()
            started = time.monotonic()
            assert waiting.result() is True
        assert time.monotonic() - started < 10

    def test_announcement_before_the_wait_is_not_lost(self, upkeep: SqlUpkeep) -> None:
        upkeep.wait_for_pending(0.01)
        upkeep.announce_pending()
        assert upkeep.wait_for_pending(30) is True
        assert upkeep.wait_for_pending(0.01) is False

    def test_closing_wakes_whoever_waits(self, upkeep: SqlUpkeep) -> None:
        upkeep.wait_for_pending(0.01)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(upkeep.wait_for_pending, 30) for _ in range(2)]
            upkeep.close()
            started = time.monotonic()
            for one in waiting:
                one.result()
        assert time.monotonic() - started < 10

    @pytest.mark.parametrize("shared_engine", ["postgresql"], indirect=True, scope="module")
    def test_unit_of_work_wakes_relays_by_its_commit(self, engine: Engine, tables: Tables, upkeep: SqlUpkeep) -> None:
        upkeep.wait_for_pending(0.01)
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": pending_channel(tables)})
            assert upkeep.wait_for_pending(0.2) is False
        assert upkeep.wait_for_pending(30) is True

    @pytest.mark.parametrize("shared_engine", ["postgresql"], indirect=True, scope="module")
    def test_lost_connection_is_waited_out_and_replaced(
        self, engine: Engine, upkeep: SqlUpkeep, caplog: pytest.LogCaptureFixture
    ) -> None:
        upkeep.wait_for_pending(0.01)
        with engine.begin() as connection:
            listening = "query LIKE 'LISTEN%' AND datname = current_database()"
            others = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listening}"
            assert connection.execute(text(others)).scalars().all() == [True]
        started = time.monotonic()
        assert upkeep.wait_for_pending(0.3) is False
        assert time.monotonic() - started >= 0.3  # no hot loop
        assert "polling until the database answers again" in caplog.text
        assert upkeep.wait_for_pending(30) is True  # what was announced meanwhile could not be heard
        upkeep.announce_pending()
        assert upkeep.wait_for_pending(30) is True


class TestRetention:
    def test_window_is_exact(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        past = rows.claim(at=clock.now() - timedelta(microseconds=1), outputs=2, pending=False)
        inside = rows.claim(at=clock.now(), outputs=1, pending=False)
        rows.consumed(clock, days=7)
        assert upkeep.purge("orders", RETENTION, 100) == 1
        assert rows.keys() == {inside} != {past}
        assert rows.count(rows.tables.output) == 1

    def test_types_that_nobody_takes_are_told_for_a_window(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        def untaken(*current: Identity, former: tuple[Identity, ...] = (), consumer: str = "orders") -> list[str]:
            covered = {current[0].message_type: former}
            return list(upkeep.unhandled_types(consumer, current, covered, {current[0].message_type: WEEK}))

        place, sell = Identity("orders.Place", "field:number"), Identity("orders.Sell", "field:number")
        assert untaken(place) == []  # of a consumer that nobody knows
        for consumer in ("orders", "billing"):
            upkeep.agree_identities(consumer, consumer, [place, sell], {}, {})
        assert untaken(sell) == []  # of what was never claimed
        rows.claim(message_type="orders.Place")
        assert untaken(place) == untaken(sell, consumer="billing") == []
        assert untaken(sell) == untaken(Identity("orders.New", "off")) == ["orders.Place"]
        assert untaken(Identity("orders.New", "field:number", aliases=("orders.Place",))) == []
        assert untaken(Identity("orders.New", "field:number"), former=(place,)) == []
        rows.consumed(clock, days=7)
        assert untaken(sell) == ["orders.Place"]
        rows.consumed(clock, minutes=1)
        assert untaken(sell) == []

    def test_everything_that_belongs_to_a_claim_goes_with_it(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        key = rows.claim(at=clock.now() - WEEK, outputs=1, pending=False)
        with rows.engine.begin() as connection:
            values = {"consumer_id": rows.names.id("consumer", "orders"), "message_key": key, "worker_id": 1}
            connection.execute(
                rows.tables.history.insert(), {**values, "at": clock.now(), "confirmed": 1, "redelivered": 0}
            )
        rows.consumed(clock, days=8)
        assert upkeep.purge("orders", RETENTION, 100) == 1
        assert [rows.count(table) for table in (rows.tables.inbox, rows.tables.output, rows.tables.history)] == [
            0,
            0,
            0,
        ]

    def test_claims_with_pending_outputs_are_never_purged(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        waiting = rows.claim(outputs=1)
        quarantined = rows.claim(outputs=1)
        upkeep.quarantine({pending.output.id: "unroutable" for pending in upkeep.take_pending(1, LEASE)})
        rows.claim(outputs=1, pending=False)
        rows.consumed(clock, days=30)
        assert upkeep.purge("orders", RETENTION, 100) == 1
        assert rows.keys() == {waiting, quarantined}

    def test_claims_that_cannot_be_purged_do_not_block_those_behind_them(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        for _ in range(5):
            rows.claim(outputs=1)
        clock.move(seconds=1)
        rows.claim(outputs=1, pending=False)
        rows.consumed(clock, days=30)
        assert upkeep.purge("orders", RETENTION, 2) == 1

    def test_batches_are_bounded(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        for number in range(7):
            rows.claim(message_type=f"orders.T{number % 2}")
        clock.move(seconds=1)
        rows.consumed(clock, days=8)
        both = {"orders.T0": WEEK, "orders.T1": WEEK}
        assert [upkeep.purge("orders", both, 3) for _ in range(4)] == [3, 3, 1, 0]

    def test_each_type_has_its_window_and_unnamed_ones_are_kept(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        rows.claim(message_type="orders.Short")
        long = rows.claim(message_type="orders.Long")
        gone = rows.claim(message_type="orders.Gone")
        foreign = rows.claim(consumer="billing", message_type="orders.Short")
        clock.move(seconds=1)
        rows.consumed(clock, days=3)
        windows = {"orders.Short": timedelta(days=2), "orders.Long": WEEK}
        assert upkeep.purge("orders", windows, 100) == 1
        assert rows.keys() == {long, gone, foreign}
        assert upkeep.purge("orders", windows, 100, others=timedelta(days=3)) == 1
        assert rows.keys() == {long, foreign}

    def test_downtime_is_not_counted(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        rows.claim()
        clock.move(seconds=1)
        for _ in range(3):
            rows.consumed(clock, days=2)
            clock.move(days=10)
        assert upkeep.late_before("orders", WEEK) == FAR_PAST
        assert upkeep.purge("orders", RETENTION, 100) == 0
        rows.consumed(clock, days=1)
        assert upkeep.purge("orders", RETENTION, 100) == 1

    def test_beats_extend_an_interval_until_a_gap(self, upkeep: SqlUpkeep, clock: MovedClock) -> None:
        started = clock.now()
        for _ in range(61):  # beats are closer together in life, but only their gaps count
            upkeep.beat(relay=False, consumers=["orders"])
            clock.move(minutes=1)
        clock.move(minutes=-1)
        clock.move(seconds=ACTIVITY_GAP.total_seconds() + 1)
        upkeep.beat(relay=False, consumers=["orders"])
        clock.move(seconds=BEAT_INTERVAL.total_seconds())
        upkeep.beat(relay=False, consumers=["orders"])
        second = clock.now() - BEAT_INTERVAL
        assert upkeep.late_before("orders", BEAT_INTERVAL) == second
        assert upkeep.late_before("orders", timedelta(seconds=6)) == second - ACTIVITY_GAP - timedelta(seconds=2)
        assert upkeep.late_before("orders", timedelta(hours=1) + BEAT_INTERVAL) == started
        assert upkeep.late_before("orders", timedelta(hours=1, seconds=6)) == FAR_PAST

    def test_workers_that_consume_at_once_are_counted_once(
        self, engine: Engine, tables: Tables, clock: MovedClock
    ) -> None:
        workers = [SqlUpkeep(engine, tables, clock, f"host-{number}") for number in range(4)]
        start = threading.Barrier(len(workers))

        def beat(one: SqlUpkeep) -> None:
            start.wait(10)
            one.beat(relay=False, consumers=["orders"])

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(beat, workers))
        clock.move(seconds=5)
        for one in workers:
            one.beat(relay=False, consumers=["orders"])
        assert workers[0].late_before("orders", timedelta(seconds=6)) == FAR_PAST

    def test_intervals_that_overlap_count_once(
        self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows, engine: Engine, tables: Tables
    ) -> None:
        """From 0 to 10 h and from 5 to 10 h the consumer has consumed for ten hours, not for fifteen."""
        began = clock.now()
        upkeep.beat(relay=False, consumers=["orders"])
        with engine.begin() as connection:
            consumer = connection.execute(select(tables.consumer.c.id)).scalar_one()
            connection.execute(delete(tables.activity))
            connection.execute(
                tables.activity.insert(),
                [
                    {
                        "consumer_id": consumer,
                        "started_at": began + timedelta(hours=hours),
                        "ended_at": began + timedelta(hours=10),
                    }
                    for hours in (0, 5)
                ],
            )
        clock.move(hours=10)
        assert upkeep.late_before("orders", timedelta(hours=8)) == began + timedelta(hours=2)
        assert upkeep.late_before("orders", timedelta(hours=11)) == FAR_PAST

    def test_unknown_consumers_have_no_window(self, upkeep: SqlUpkeep) -> None:
        assert upkeep.late_before("nobody", WEEK) == FAR_PAST
        assert upkeep.purge("nobody", RETENTION, 100) == 0

    def test_old_activity_is_forgotten(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows) -> None:
        for _ in range(3):
            rows.consumed(clock, days=300)
        upkeep.purge("orders", RETENTION, 100)
        assert rows.count(rows.tables.activity) == 2

    @pytest.mark.parametrize("shared_engine", ["postgresql", "mariadb"], indirect=True, scope="module")
    def test_second_cleaner_leaves_at_once(
        self, engine: Engine, tables: Tables, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        from idemp.inbox.sql.locks import cluster_lock

        rows.claim()
        clock.move(seconds=1)
        rows.consumed(clock, days=8)
        with engine.begin() as first, cluster_lock(first, tables, "purge", wait_seconds=0) as locked:
            assert locked
            assert upkeep.purge("orders", RETENTION, 100) == 0
        assert upkeep.purge("orders", RETENTION, 100) == 1

    def test_cleaners_at_once_do_not_collide(
        self, engine: Engine, tables: Tables, clock: MovedClock, rows: Rows
    ) -> None:
        for _ in range(20):
            rows.claim(outputs=1, pending=False)
        clock.move(seconds=1)
        rows.consumed(clock, days=8)
        cleaners = [SqlUpkeep(engine, tables, clock, f"host-{number}") for number in range(3)]

        def clean(one: SqlUpkeep) -> int:
            return sum(one.purge("orders", RETENTION, 3) for _ in range(7))

        with ThreadPoolExecutor(len(cleaners)) as pool:
            deleted = sum(pool.map(clean, cleaners))
        assert deleted + rows.count(tables.inbox) == 20
        assert rows.count(tables.output) == rows.count(tables.inbox)

    @pytest.mark.parametrize("shared_engine", ["postgresql", "mariadb"], indirect=True, scope="module")
    def test_claim_that_somebody_looks_at_is_left_for_the_next_round(
        self, engine: Engine, tables: Tables, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows
    ) -> None:
        held, _ = rows.claim(), rows.claim()
        clock.move(seconds=1)
        rows.consumed(clock, days=8)
        with engine.connect() as connection, connection.begin():
            connection.execute(select(tables.inbox).where(tables.inbox.c.message_key == held).with_for_update())
            assert upkeep.purge("orders", RETENTION, 100) == 1  # does not wait
        assert rows.keys() == {held}
        assert upkeep.purge("orders", RETENTION, 100) == 1


class TestHeartbeats:
    def test_relay_is_alive_for_three_beats(self, upkeep: SqlUpkeep, clock: MovedClock) -> None:
        assert upkeep.relay_alive() is False
        upkeep.beat(relay=True, consumers=[])
        clock.move(seconds=RELAY_ALIVE_WITHIN.total_seconds())
        assert upkeep.relay_alive() is True
        clock.move(seconds=0.001)
        assert upkeep.relay_alive() is False

    def test_worker_that_is_no_relay_is_none(self, upkeep: SqlUpkeep) -> None:
        upkeep.beat(relay=False, consumers=["orders"])
        assert upkeep.relay_alive() is False

    def test_clean_end_takes_the_heartbeat_back(self, upkeep: SqlUpkeep, clock: MovedClock) -> None:
        started = clock.now()
        upkeep.beat(relay=True, consumers=[])
        clock.move(seconds=5)
        upkeep.beat(relay=True, consumers=[])
        (worker,) = upkeep.workers()
        assert (worker.name, worker.started_at, worker.seen_at, worker.alive) == ("host-1", started, clock.now(), True)
        upkeep.retire()
        assert upkeep.relay_alive() is False
        assert [(worker.seen_at, worker.alive) for worker in upkeep.workers()] == [(None, False)]
        upkeep.beat(relay=False, consumers=[])  # the next process under this name
        assert upkeep.workers()[0].started_at == clock.now()


class TestNames:
    def test_threads_that_intern_at_once_agree(self, engine: Engine, tables: Tables) -> None:
        start = threading.Barrier(8)

        def intern(_: int) -> list[int]:
            names = Names(engine, tables)  # each with a memory of its own, as processes have
            start.wait(10)
            return [names.id("consumer", f"consumer-{number}") for number in range(5)]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(intern, range(8)))
        assert all(answer == answers[0] for answer in answers)
        assert len(set(answers[0])) == 5

    def test_names_differ_by_case_and_accent(self, rows: Rows) -> None:
        names = ["orders", "Orders", "ördérs", "orders2"]
        assert len({rows.names.id("message_type", name) for name in names}) == 4
        assert [rows.names.name("message_type", rows.names.id("message_type", name)) for name in names] == names

    @pytest.mark.parametrize("name", ["", " orders", "orders ", "x" * 256, "é" * 128, "a\x00b"])
    def test_name_that_a_database_would_change_is_refused(self, rows: Rows, name: str) -> None:
        with pytest.raises(ConfigurationError, match="can't be the name of a message type"):
            rows.names.id("message_type", name)

    def test_longest_name(self, rows: Rows, engine: Engine, tables: Tables) -> None:
        name = "é" * 127
        assert rows.names.id("consumer", name) == Names(engine, tables).known("consumer", name)

    def test_unknown_number(self, rows: Rows) -> None:
        with pytest.raises(KeyError):
            rows.names.name("worker", 99)

    def test_failure_is_not_remembered(self, engine: Engine, tables: Tables) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE idemp_consumer RENAME TO elsewhere"))
        names = Names(engine, tables)
        with pytest.raises(Exception, match="idemp_consumer"):
            names.id("consumer", "orders")
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE elsewhere RENAME TO idemp_consumer"))
        assert names.id("consumer", "orders") == Names(engine, tables).id("consumer", "orders")


class TestQueries:
    def test_story(self, upkeep: SqlUpkeep, clock: MovedClock, rows: Rows, queries: Queries) -> None:
        key = rows.claim(outputs=3)
        first, second, third = (pending.output.id for pending in upkeep.take_pending(10, LEASE))
        upkeep.settle_pending([first], {second: "nack"}, LEASE)
        upkeep.quarantine({third: "unroutable"})
        with rows.engine.begin() as connection:
            ids = {"consumer_id": rows.names.id("consumer", "orders"), "worker_id": rows.names.id("worker", "host-1")}
            connection.execute(
                rows.tables.history.insert(),
                {**ids, "message_key": key, "at": clock.now(), "confirmed": 1, "redelivered": 2},
            )
        (story,) = queries.stories([key])
        assert (story.claim.consumer, story.claim.key, story.claim.original_id) == ("orders", key, str(key))
        assert (story.claim.message_type, story.claim.claimed_at, story.claim.worker) == (
            "orders.Place",
            clock.now(),
            "host-1",
        )
        assert [(output.id, output.state, output.reason) for output in story.outputs] == [
            (first, "confirmed", None),
            (second, "pending", "nack"),
            (third, "quarantined", "unroutable"),
        ]
        assert (story.outputs[0].size, story.outputs[0].message_type) == (len(b'{"at": 0}'), "orders.Placed")
        assert [(entry.confirmed, entry.redelivered, entry.worker) for entry in story.history] == [(1, 2, "host-1")]
        assert queries.stories([key], "billing") == queries.stories([]) == []

    def test_lists(self, clock: MovedClock, rows: Rows, queries: Queries) -> None:
        keys = []
        for number in range(6):
            clock.move(seconds=1)
            names = {"consumer": ("orders", "billing")[number % 2], "message_type": ("A", "B", "C")[number % 3]}
            keys.append(rows.claim(outputs=1, pending=number < 3, **names))  # type: ignore[arg-type]
        assert [row.key for row in queries.list_inbox()] == keys[::-1]
        assert [row.key for row in queries.list_inbox(limit=2)] == [keys[5], keys[4]]
        assert [row.key for row in queries.list_inbox("orders")] == [keys[4], keys[2], keys[0]]
        assert [row.key for row in queries.list_inbox("orders", "B")] == [keys[4]]
        assert [row.key for row in queries.list_inbox(since=clock.now() - timedelta(seconds=1))] == [keys[5], keys[4]]
        assert [row.key for row in queries.list_inbox(pending_only=True)] == [keys[2], keys[1], keys[0]]
        assert len(queries.list_pending()) == 3
        assert len(queries.list_pending("billing")) == 1
        assert queries.list_pending("nobody") == []

    def test_erasing_keeps_the_key(self, rows: Rows, queries: Queries, erasing: Erasing) -> None:
        key = rows.claim(outputs=2, pending=False)
        assert erasing.erase("orders", key) == 2
        (story,) = queries.stories([key])
        assert [(output.erased, output.size) for output in story.outputs] == [(True, 0), (True, 0)]
        with rows.engine.connect() as connection:
            envelopes = connection.scalars(select(rows.tables.output.c.envelope)).all()
        assert "Ada" not in "".join(envelopes)

    def test_what_is_discarded_pends_no_more(
        self, rows: Rows, upkeep: SqlUpkeep, queries: Queries, erasing: Erasing
    ) -> None:
        """Only what is in quarantine; and its story never says that it was confirmed."""
        key, other = rows.claim(outputs=3), rows.claim(outputs=1)
        (story, others) = queries.stories([key]) + queries.stories([other])
        _, given_up, tried = (output.id for output in story.outputs)
        upkeep.quarantine({given_up: "returned", tried: "returned", others.outputs[0].id: "returned"})
        assert upkeep.release_quarantined([tried]) == 1
        assert [erasing.discard("orders", key) for _ in range(2)] == [1, 0]
        (story,) = queries.stories([key])
        assert [output.state for output in story.outputs] == ["pending", "discarded", "pending"]
        assert [row.key for row in queries.list_pending(quarantined_only=True)] == [other]
        assert upkeep.release_quarantined([given_up]) == 0
        with pytest.raises(StoreError, match="2 of its outputs still wait"):
            erasing.erase("orders", key)
        with pytest.raises(StoreError, match="no claim with the key"):
            erasing.discard("billing", key)

    def test_what_is_pending_or_unknown_is_not_erased(self, rows: Rows, erasing: Erasing) -> None:
        key = rows.claim(outputs=2)
        with pytest.raises(StoreError, match="2 of its outputs still wait"):
            erasing.erase("orders", key)
        with pytest.raises(StoreError, match="no claim with the key"):
            erasing.erase("billing", key)


def test_prefixes_are_independent(empty_engine: Engine, clock: MovedClock) -> None:
    from idemp.inbox.sql.schema import upgrade
    from tests.inbox.sql.rows import Rows

    several = [Tables(), Tables(prefix="billing_")]
    for one in several:
        upgrade(empty_engine, one)
    Rows(empty_engine, several[0], clock).claim(outputs=1)
    counts = [SqlUpkeep(empty_engine, one, clock, "host-1").pending_count() for one in several]
    assert counts == [1, 0]


@pytest.mark.parametrize("shared_engine", ["mariadb"], indirect=True, scope="module")
def test_deadlock_is_tried_again(engine: Engine, tables: Tables, clock: MovedClock, rows: Rows) -> None:
    """Two that settle the same outputs in one order after another made the database choose a victim."""
    rows.claim(outputs=1)
    rows.claim(outputs=1)
    upkeep = SqlUpkeep(engine, tables, clock, "host-1")
    first, second = sorted(pending.output.id for pending in upkeep.take_pending(10, LEASE))
    touch = update(tables.pending).values(reason="other")
    with ThreadPoolExecutor(1) as pool, engine.connect() as other, other.begin():
        # The other holds the second and then wants the first, which the relay holds, waiting for the second.
        other.execute(touch.where(tables.pending.c.output_id == second))
        settling = pool.submit(upkeep.settle_pending, [], {first: "nack", second: "nack"}, LEASE)
        waits_here = "db = DATABASE() AND info LIKE 'UPDATE idemp_pending%'"
        waiting = text(f"SELECT count(*) FROM information_schema.processlist WHERE {waits_here}")

        def waits() -> bool:
            with engine.connect() as looking:
                return bool(looking.scalar(waiting))

        wait_until(waits, "the relay waits for the row")
        try:
            other.execute(touch.where(tables.pending.c.output_id == first))
        except Exception:  # the database chose the other one
            other.rollback()
        else:
            other.commit()
        settling.result(30)
    assert {row.reason for row in Queries(engine, tables).list_pending()} <= {"nack", "other"}


def test_database_that_is_down_is_unavailable(tables: Tables, clock: MovedClock) -> None:
    engine = create_engine_safely("postgresql://me@127.0.0.1:1/shop")
    upkeep = SqlUpkeep(engine, tables, clock, "host-1")
    with pytest.raises(StoreUnavailable):
        upkeep.take_pending(10, LEASE)
    started = time.monotonic()
    assert upkeep.wait_for_pending(0.2) is False
    assert time.monotonic() - started >= 0.2
    upkeep.close()
