"""Moving a consumer to daily tables and back: at no moment an id has two homes, whatever a worker remembers."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from alembic import command
from sqlalchemy import event, exc, func, select, text

from idemp.errors import (
    ConfigurationError,
    FutureMessage,
    SchemaError,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
)
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Mark, Verdict
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely, rights, schema, shared_tables
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.erasing import Erasing
from idemp.inbox.sql.queries import Queries
from idemp.messages import Output
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import Background, make_outputs
from tests.inbox.sql import days, kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

FIRST = date(2026, 1, 3)
WAIT = timedelta(seconds=10)


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql) as made:
        yield made


@pytest.fixture
def tables() -> Tables:
    return shared_tables()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(engine: Engine, tables: Tables, clock: FakeClock) -> Iterator[SqlStore]:
    kept.empty(engine, tables)
    made = SqlStore(engine, tables=tables, clock=clock)
    yield made
    made.close()
    days.clear(engine, tables)


@pytest.fixture
def stale(store: SqlStore) -> SqlStore:
    """A worker that looked before anything was changed, and does not look again by itself."""
    made = SqlStore(store.engine, tables=store.tables, clock=StandingClock(store.clock))
    made.places.look()
    return made


class StandingClock:
    """The time goes on; what was read stays fresh."""

    def __init__(self, clock: Any) -> None:
        self.now = clock.now

    def monotonic(self) -> float:
        return 1.0


def at(day: date, number: int = 0) -> UUID:
    """An id of this day."""
    return UUID(int=days.new_id_at(datetime(day.year, day.month, day.day, 12, tzinfo=UTC)).int + number)


def claim_of(key: UUID, consumer: str = "orders") -> Claim:
    return Claim(
        consumer=consumer,
        id=effective_id("envelope", str(key)),
        message_type="orders.Place",
        fingerprint=None,
        wait=WAIT,
    )


def handle(store: SqlStore, key: UUID, outputs: Sequence[Output] = ()) -> Verdict:
    """A whole handling; again where the store asks for it, as the protocol does."""
    claim = claim_of(key)
    for _ in range(3):
        try:
            with store.begin([claim]) as unit:
                claimed = unit.claim(claim)
                if claimed.verdict is Verdict.CLAIMED:
                    unit.store_outputs(claim, outputs, timedelta(seconds=30))
                    unit.commit()
                return claimed.verdict
        except TransientStoreError:
            continue
    raise AssertionError("asked to run again and again")


def place_of(store: SqlStore, key: UUID) -> list[str]:
    """The tables that have a claim of this key: never more than one."""
    inbox = store.tables.inbox
    found = select(text("tableoid::regclass::text")).select_from(inbox).where(inbox.c.message_key == key)
    with store.engine.connect() as connection:
        return [name.removeprefix(store.tables.prefix) for name in connection.scalars(found)]


@contextmanager
def waited_for(engine: Engine, tables: Tables) -> Iterator[None]:
    """Once somebody waits for the plain inbox."""
    waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST(:inbox AS regclass)")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            if connection.scalar(waits, {"inbox": qualified(tables.inbox)}):
                yield
                return
    raise AssertionError("nobody waits for the inbox")


class TestSwitchingOn:
    def test_it_begins_the_day_after_tomorrow(self, store: SqlStore, clock: FakeClock) -> None:
        layout = store.upkeep.daily.open("orders")
        assert (layout.since, layout.dropped) == (FIRST, FIRST)
        assert layout.made == FIRST + timedelta(days=14)
        assert [layout] == list(store.upkeep.daily.layouts("orders"))
        number = layout.consumer_id
        names = [f"inbox_{number}_{day}" for day in (*days.names_of(layout.days), "late")]
        assert [name for name in days.parts(store.engine, store.tables) if name.startswith("inbox")] == names

    def test_ids_of_before_and_ids_without_time_stay(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        without, before, after = uuid4(), at(FIRST - timedelta(days=1)), at(FIRST)
        assert [handle(store, key) for key in (without, before, after)] == [Verdict.CLAIMED] * 3
        number = store.names.id("consumer", "orders")
        assert [place_of(store, key) for key in (without, before, after)] == [
            ["inbox"], ["inbox"], [f"inbox_{number}_20260103"]
        ]  # fmt: skip
        assert [handle(store, key) for key in (without, before, after)] == [Verdict.DUPLICATE] * 3

    def test_other_consumers_stay(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("billing", ahead=6)
        clock.advance(timedelta(days=3))
        key = at(FIRST)
        handle(store, key)
        assert place_of(store, key) == ["inbox"]

    def test_a_worker_that_has_not_heard_of_it(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        """It would take what another worker handled in the day's table for new."""
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        key = at(FIRST)
        assert handle(store, key) is Verdict.CLAIMED
        assert handle(stale, key) is Verdict.DUPLICATE
        assert handle(stale, at(FIRST, 1)) is Verdict.CLAIMED
        assert handle(store, at(FIRST, 1)) is Verdict.DUPLICATE

    def test_a_whole_batch_of_such_a_worker(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        handle(store, at(FIRST))
        claims = [claim_of(key) for key in (at(FIRST), at(FIRST, 1), at(FIRST + timedelta(days=1)), uuid4())]
        with pytest.raises(TransientStoreError, match="not as this worker remembered"), stale.begin(claims) as unit:
            unit.claim_all(claims, WAIT)
        with stale.begin(claims) as unit:
            verdicts = [claimed.verdict for claimed in unit.claim_all(claims, WAIT)]
        assert verdicts == [Verdict.DUPLICATE, *[Verdict.CLAIMED] * 3]

    def test_a_claim_that_runs_meanwhile(self, store: SqlStore, tables: Tables) -> None:
        """It is waited for; others claim all the same."""
        running = claim_of(at(date(2026, 1, 1)))
        with store.begin([running]) as unit:
            unit.claim(running)
            opening = Background(lambda: store.upkeep.daily.open("orders", ahead=2))
            with waited_for(store.engine, tables):
                assert opening.running
            assert [handle(store, uuid4()) for _ in range(3)] == [Verdict.CLAIMED] * 3
            assert not days.guards(store.engine, tables)
            unit.commit()
        assert opening.result(30).since == FIRST
        assert days.guards(store.engine, tables)

    def test_claims_at_once(self, store: SqlStore, stale: SqlStore) -> None:
        """Two workers get each id while the layout is noted; those of the first day are early, and may prevent it."""
        keys = [at(day, number) for day in (FIRST - timedelta(days=2), FIRST) for number in range(60)]

        def deliveries(worker: SqlStore) -> list[UUID]:
            return [key for key in keys if handle(worker, key) is Verdict.CLAIMED]

        threads = [Background(partial(deliveries, worker)) for worker in (store, stale)]
        with suppress(ConfigurationError):  # the first of them were claimed in the plain table
            store.upkeep.daily.open("orders", ahead=2)
        assert sorted(key for thread in threads for key in thread.result(60)) == sorted(keys)

    def test_refused_where_ids_of_that_time_were_claimed(self, store: SqlStore, tables: Tables) -> None:
        handle(store, at(FIRST + timedelta(days=40)))
        with pytest.raises(ConfigurationError, match="was claimed already"):
            store.upkeep.daily.open("orders", ahead=6)
        assert not days.guards(store.engine, tables)
        assert store.upkeep.daily.open("orders", FIRST + timedelta(days=41)).since == FIRST + timedelta(days=41)

    @pytest.mark.parametrize("since", [date(2025, 12, 31), date(2026, 1, 1)])
    def test_refused_where_it_is_near(self, store: SqlStore, since: date) -> None:
        with pytest.raises(ConfigurationError, match=r"begins too early.*such as 2026-01-03"):
            store.upkeep.daily.open("orders", since)

    def test_refused_twice(self, store: SqlStore) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        with pytest.raises(ConfigurationError, match="that day already"):
            store.upkeep.daily.open("orders", FIRST + timedelta(days=9))

    def test_refused_elsewhere(self) -> None:
        elsewhere = SqlStore(create_engine_safely("sqlite://"))
        with pytest.raises(ConfigurationError, match="deleted in batches"):
            elsewhere.upkeep.daily.open("orders", ahead=6)


class TestDowngrade:
    def test_refused_while_there_is_a_layout(self, store: SqlStore, tables: Tables) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        config = schema._config(tables)
        refused = pytest.raises(ConfigurationError, match=r"nothing was changed.*--until DAY")
        with refused, store.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, "0002")
        assert list(store.upkeep.daily.layouts("orders")) == [layout]
        schema.check(store.engine, tables)

    def test_a_guard_without_a_layout_is_told_with_what_mends_it(self, store: SqlStore, tables: Tables) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        (guard,) = days.guards(store.engine, tables)
        with store.engine.begin() as connection:
            connection.execute(tables.daily.delete())
        with pytest.raises(SchemaError, match=rf"{guard}.*no layout") as raised:
            schema.check(store.engine, tables)
        (statement,) = re.findall(r"`(ALTER TABLE [^`]*)`", raised.value.fix)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(statement)
        schema.check(store.engine, tables)
        assert not days.guards(store.engine, tables)


class TestSchemas:
    """`"$user", public` is what PostgreSQL looks through by default."""

    @pytest.fixture
    def own(self, store: SqlStore) -> Iterator[str]:
        """A schema of the owner's name, which comes before that of the tables."""
        with store.engine.begin() as connection:
            name = str(connection.scalar(text("SELECT quote_ident(current_user)")))
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        yield name
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")

    def test_parts_are_where_the_plain_tables_are(self, store: SqlStore, own: str, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        where = text("SELECT DISTINCT relnamespace::regnamespace::text FROM pg_class WHERE relname LIKE 'idemp%'")
        with store.engine.connect() as connection:
            assert connection.scalars(where).all() == ["public"]
        with least_privileged(store) as worker:
            store.upkeep.daily.mend(*store.upkeep.daily.layouts("orders"))
            assert handle(worker, at(FIRST)) is Verdict.CLAIMED
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE

    def test_a_table_of_that_name_elsewhere_is_not_taken_for_a_part(
        self, store: SqlStore, own: str, clock: FakeClock
    ) -> None:
        """It is not looked at, though names without a schema would mean it."""
        number = store.names.id("consumer", "orders")
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE {own}.idemp_output_{number}_20260104 (LIKE idemp_output)")
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        assert handle(store, at(FIRST)) is Verdict.CLAIMED
        assert handle(store, at(FIRST)) is Verdict.DUPLICATE
        with store.engine.connect() as connection:
            strange = connection.scalar(text(f"SELECT count(*) FROM {own}.idemp_output_{number}_20260104"))
        assert strange == 0

    def test_a_table_of_that_name_is_not_taken_for_a_part(self, store: SqlStore) -> None:
        number = store.names.id("consumer", "orders")
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE idemp_output_{number}_20260104 (LIKE idemp_output)")
        with pytest.raises(ConfigurationError, match=rf"idemp_output_{number}_20260104 .* does not inherit"):
            store.upkeep.daily.open("orders", ahead=6)
        assert not store.upkeep.daily.layouts("orders")
        assert not days.guards(store.engine, store.tables)


class TestSwitchingOff:
    UNTIL = date(2026, 1, 6)

    def test_from_then_on_ids_are_in_the_plain_tables(self, store: SqlStore, clock: FakeClock) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        assert store.upkeep.daily.close("orders", self.UNTIL).days == layout.days[:3]
        last, first = at(self.UNTIL - timedelta(days=1)), at(self.UNTIL)
        handle(store, last)
        handle(store, first)
        assert place_of(store, first) == ["inbox"]
        assert place_of(store, last) == [f"inbox_{layout.consumer_id}_20260105"]

    def test_a_worker_that_has_not_heard_of_it(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        stale.places.look()
        store.upkeep.daily.close("orders", self.UNTIL)
        assert handle(store, at(self.UNTIL)) is Verdict.CLAIMED
        assert handle(stale, at(self.UNTIL)) is Verdict.DUPLICATE
        assert handle(stale, at(self.UNTIL, 1)) is Verdict.CLAIMED
        assert handle(store, at(self.UNTIL, 1)) is Verdict.DUPLICATE

    def test_a_worker_that_has_heard_of_neither(self, store: SqlStore, stale: SqlStore) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        store.upkeep.daily.close("orders", self.UNTIL)
        handle(store, at(FIRST))
        assert handle(stale, at(FIRST)) is Verdict.DUPLICATE

    def test_refused_where_ids_of_that_time_were_claimed(self, store: SqlStore) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        handle(store, at(self.UNTIL))
        with pytest.raises(ConfigurationError, match="were claimed already"):
            store.upkeep.daily.close("orders", self.UNTIL)
        assert list(store.upkeep.daily.layouts("orders")) == [layout]
        assert handle(store, at(self.UNTIL)) is Verdict.DUPLICATE

    @pytest.mark.parametrize("until", [FIRST - timedelta(days=1), date(2026, 1, 1), date(2099, 1, 1)])
    def test_refused_where_there_is_nothing_to_end(self, store: SqlStore, until: date) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        with pytest.raises(ConfigurationError, match=r"keeps no daily tables|begins too early"):
            store.upkeep.daily.close("orders", until)

    def test_one_that_has_not_begun_is_called_off(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        stale.places.look()
        store.upkeep.daily.close("orders", FIRST)
        assert not store.upkeep.daily.layouts("orders")
        clock.advance(timedelta(days=3))
        assert handle(store, at(FIRST)) is Verdict.CLAIMED
        assert handle(stale, at(FIRST)) is Verdict.DUPLICATE
        assert place_of(store, at(FIRST)) == ["inbox"]

    def test_and_on_again(self, store: SqlStore, clock: FakeClock, tables: Tables) -> None:
        daily = store.upkeep.daily
        daily.open("orders", ahead=6)
        daily.close("orders", self.UNTIL)
        again = daily.open("orders", self.UNTIL + timedelta(days=1))
        clock.advance(timedelta(days=8))
        keys = [at(FIRST + timedelta(days=number)) for number in range(6)]
        assert [handle(store, key) for key in keys] == [Verdict.CLAIMED] * 6
        assert [place_of(store, key)[0].rpartition("_")[2] for key in keys] == [
            "20260103", "20260104", "20260105", "inbox", "20260107", "20260108"
        ]  # fmt: skip
        assert len(days.guards(store.engine, tables)) == 2
        assert again.since == self.UNTIL + timedelta(days=1)


class TestIdsFromTheFuture:
    def test_beyond_all_tables_they_are_refused(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        claim = claim_of(at(FIRST + timedelta(days=30)))
        with pytest.raises(FutureMessage, match=r"2026-02-02T12:00:00\+00:00, which is in the future") as raised:
            store.begin([claim])
        assert raised.value.committed == "no"
        with store.engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(store.tables.inbox)) == 0

    def test_of_a_producer_whose_clock_is_ahead_a_little(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        assert handle(store, at(FIRST + timedelta(days=3))) is Verdict.CLAIMED

    def test_nobody_made_the_tables_of_today(self, store: SqlStore, clock: FakeClock) -> None:
        """That is no fault of the message: it waits, until they are there."""
        (layout,) = [store.upkeep.daily.open("orders", ahead=6)]
        clock.advance(timedelta(days=20))
        claim = claim_of(at(date(2026, 1, 21)))
        with pytest.raises(StoreUnavailable, match="Run `idemp db partition CONSUMER`"):
            store.begin([claim])
        assert store.upkeep.daily.make_ahead(layout) == 27
        assert handle(store, claim.id.key) is Verdict.CLAIMED

    def test_tables_that_were_made_meanwhile(self, store: SqlStore, stale: SqlStore, clock: FakeClock) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        stale.places.look()
        clock.advance(timedelta(days=20))
        store.upkeep.daily.make_ahead(layout)
        assert handle(stale, at(date(2026, 1, 21))) is Verdict.CLAIMED


class TestPeople:
    """What is read goes through the plain tables, and sees all."""

    def test_lists_stories_and_what_pends(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        keys = [at(FIRST), at(FIRST + timedelta(days=1)), uuid4()]
        outputs = [make_outputs(2) for _ in keys]
        for key, own in zip(keys, outputs, strict=True):
            handle(store, key, own)
        store.record([Mark(claim_of(key), (own[0].id,)) for key, own in zip(keys, outputs, strict=True)])
        queries = Queries(store.engine, store.tables)
        assert {row.key for row in queries.list_inbox("orders")} == set(keys)
        assert {row.key for row in queries.list_inbox("orders", pending_only=True)} == set(keys)
        assert {row.output_id for row in queries.list_pending("orders")} == {own[1].id for own in outputs}
        stories = queries.stories(keys, "orders")
        assert {story.claim.key: [output.state for output in story.outputs] for story in stories} == {
            key: ["confirmed", "pending"] for key in keys
        }
        assert [[entry.confirmed for entry in story.history] for story in stories] == [[1]] * 3
        clock.advance(timedelta(minutes=1))
        taken = store.upkeep.take_pending(10, timedelta(minutes=1))
        assert {pending.output.id for pending in taken} == {own[1].id for own in outputs}
        assert store.upkeep.pending_state().oldest_seconds == 60

    def test_erasing(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        key, outputs = at(FIRST), make_outputs(2)
        handle(store, key, outputs)
        store.record([Mark(claim_of(key), tuple(output.id for output in outputs))])
        queries, erasing = Queries(store.engine, store.tables), Erasing(store.engine, store.tables)
        assert erasing.erase("orders", key) == 2
        (story,) = queries.stories([key])
        assert [output.erased for output in story.outputs] == [True, True]
        assert handle(store, key) is Verdict.DUPLICATE

    def test_discarding(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        key, outputs = at(FIRST), make_outputs(2)
        handle(store, key, outputs)
        store.upkeep.quarantine({outputs[1].id: "returned"})
        assert Erasing(store.engine, store.tables).discard("orders", key) == 1
        (story,) = Queries(store.engine, store.tables).stories([key])
        assert [output.state for output in story.outputs] == ["pending", "discarded"]
        assert store.upkeep.pending_count() == 1


def test_a_claim_and_a_duplicate_lock_their_own_day_only(store: SqlStore, clock: FakeClock) -> None:
    """However many days there are: no routing, and nothing that a day's end would have to wait for."""
    layout = store.upkeep.daily.open("orders", ahead=6)
    clock.advance(timedelta(days=3))
    part = f"{layout.consumer_id}_20260103"
    of_day = {f"idemp_{name}_{part}" for name in ("inbox", "output")}
    held = text(
        "SELECT DISTINCT c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
        "WHERE l.pid = pg_backend_pid() AND c.relkind = 'r' AND c.relname LIKE 'idemp%'"
    )
    for _ in range(7):  # psycopg prepares a statement after five executions; then plans may be generic
        claim = claim_of(at(FIRST))
        with store.begin([claim]) as unit:
            verdict = unit.claim(claim).verdict
            locked = set(unit.connection.execute(held).scalars())
            if verdict is Verdict.CLAIMED:
                unit.commit()
                assert locked == {f"idemp_inbox_{part}"}
            else:
                assert locked == {*of_day, "idemp_pending", "idemp_message_type"}
    plain = claim_of(uuid4())
    for verdict in (Verdict.CLAIMED, Verdict.DUPLICATE):
        with store.begin([plain]) as unit:
            assert unit.claim(plain).verdict is verdict
            locked = set(unit.connection.execute(held).scalars())
            if verdict is Verdict.CLAIMED:
                unit.commit()
        assert locked <= {"idemp_inbox", "idemp_output", "idemp_pending", "idemp_message_type"}


@contextmanager
def least_privileged(store: SqlStore) -> Iterator[SqlStore]:
    """A user with the rights of docs/how-to/least-privilege.md, but on the plain tables alone."""
    name = f"worker_{uuid4().hex[:8]}"
    updated = (
        "pending", "worker", "activity", "identity", "consumer", "unfinished", "queue", "prepared", "barrier", "broker",
    )  # fmt: skip
    plain = ", ".join([*sorted(store.tables.names), "idemp_alembic_version"])
    statements = [
        f"CREATE ROLE {name} LOGIN PASSWORD 'secret'",
        f"GRANT USAGE ON SCHEMA public TO {name}",
        f"GRANT SELECT, INSERT, DELETE ON {plain} TO {name}",
        f"GRANT UPDATE ON {', '.join(f'idemp_{table}' for table in updated)} TO {name}",
        f"GRANT UPDATE (worker_id) ON idemp_inbox TO {name}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {name}",
    ]
    with store.engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine = create_engine_safely(store.engine.url.set(username=name, password="secret"))
    yield SqlStore(engine, tables=store.tables, clock=store.clock)
    engine.dispose()
    with store.engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}"))
        connection.execute(text(f"DROP ROLE {name}"))


class TestAnotherUser:
    """Workers need not own the tables: they use what the owner made."""

    @pytest.fixture
    def worker(self, store: SqlStore) -> Iterator[SqlStore]:
        with least_privileged(store) as made:
            yield made

    def test_it_claims_sends_and_cleans(
        self, store: SqlStore, worker: SqlStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        outputs, key = make_outputs(1), at(FIRST)
        assert [handle(worker, key, outputs) for _ in range(2)] == [Verdict.CLAIMED, Verdict.DUPLICATE]
        worker.record([Mark(claim_of(key), (outputs[0].id,))])
        window = timedelta(days=1)
        with store.engine.begin() as connection:
            activity = {"consumer_id": layout.consumer_id, "started_at": clock.now()}
            values = {**activity, "ended_at": clock.advance(timedelta(days=4))}
            connection.execute(store.tables.activity.insert(), values)
        for _ in range(2):
            assert worker.upkeep.purge("orders", {}, 10, others=window) == 0
        (told,) = (record for record in caplog.records if getattr(record, "event", "") == "daily_not_ours")
        assert (told.consumer, told.made_until) == ("orders", "2026-01-09")  # type: ignore[attr-defined]
        assert store.upkeep.purge("orders", {}, 10, others=window) == 1
        assert handle(worker, key) is Verdict.CLAIMED, "late, and nobody here looks at its age"
        assert worker.upkeep.purge("orders", {}, 10, others=window) == 0
        with store.engine.begin() as connection:
            values = {**activity, "started_at": clock.now(), "ended_at": clock.advance(timedelta(days=2))}
            connection.execute(store.tables.activity.insert(), values)
        assert worker.upkeep.purge("orders", {}, 10, others=window) == 1, "late ones go in batches, by any worker"

    @pytest.mark.parametrize("way", ["mend", "make_ahead"])
    def test_one_that_came_after_the_days(self, store: SqlStore, clock: FakeClock, way: str) -> None:
        """Whoever runs `idemp db partition`, or the owner's own cleaner, passes its rights on: on late ids' tables, too."""
        layout = store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        with least_privileged(store) as worker:
            with pytest.raises(SchemaError, match=r"has no SELECT, .* on 7 daily tables of idemp_inbox;"):
                worker.verify()
            with worker.engine.connect() as connection:
                found = rights.look(connection, worker.tables)
            assert found.verdict == "failed"
            getattr(store.upkeep.daily, way)(layout)
            worker.verify()
            with worker.engine.connect() as connection:
                assert rights.look(connection, worker.tables).verdict == "ok"
            assert handle(worker, at(FIRST)) is Verdict.CLAIMED
            with store.engine.connect() as connection:
                late = {"table": f"idemp_inbox_{layout.late}", "role": worker.engine.url.username}
                may = text("SELECT has_column_privilege(:role, CAST(:table AS text), 'worker_id', 'UPDATE')")
                assert connection.scalar(may, late)

    def test_what_doctor_says_mends_it(self, store: SqlStore, clock: FakeClock) -> None:
        store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        with least_privileged(store) as worker:
            with worker.engine.connect() as connection:
                found = rights.look(connection, worker.tables)
            with store.engine.begin() as connection:
                for step in found.commands:
                    connection.execute(text(step.text))
            worker.verify()
            assert handle(worker, at(FIRST), make_outputs(1)) is Verdict.CLAIMED

    def test_nothing_is_granted_where_nothing_lacks(self, store: SqlStore) -> None:
        """Each grant writes to the catalog, and cleaners come round all the time."""
        layout = store.upkeep.daily.open("orders", ahead=20)
        with least_privileged(store):
            store.upkeep.daily.mend(layout)
            granted: list[str] = []

            def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
                granted.extend([statement] if "GRANT" in statement else [])

            event.listen(store.engine, "before_cursor_execute", note)
            try:
                store.upkeep.daily.mend(layout)
                store.upkeep.daily.make_ahead(layout)
            finally:
                event.remove(store.engine, "before_cursor_execute", note)
            assert granted == []

    @pytest.mark.parametrize(
        ("right", "table"), [("INSERT", "inbox"), ("SELECT", "inbox"), ("SELECT", "output"), ("INSERT", "output")]
    )
    def test_a_right_that_lacks_is_no_fault_of_the_message(
        self, store: SqlStore, worker: SqlStore, clock: FakeClock, right: str, table: str
    ) -> None:
        layout = store.upkeep.daily.open("orders", ahead=6)
        clock.advance(timedelta(days=3))
        handled, fresh = at(FIRST), at(FIRST, 1)
        handle(worker, handled)
        with store.engine.begin() as connection:
            part = f"idemp_{table}_{layout.part_on(FIRST)}"
            connection.execute(text(f"REVOKE {right} ON {part} FROM {worker.engine.url.username}"))
        with pytest.raises(StoreUnavailable, match=rf"permission denied for table {part}.*least-privilege") as raised:
            handle(worker, handled if right == "SELECT" else fresh, make_outputs(1))
        assert raised.value.committed == "no"
        assert handle(store, fresh) is Verdict.CLAIMED

    def test_one_that_the_handler_lacks_is_its_own(
        self, store: SqlStore, worker: SqlStore, clock: FakeClock, tables: Tables
    ) -> None:
        """Even where the server finds out at COMMIT, in the message that stores the outputs."""
        role = worker.engine.url.username
        own = (
            "CREATE TABLE secret (id int)",
            "CREATE TABLE sale (id int)",
            """
            CREATE FUNCTION spend() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN INSERT INTO secret VALUES (1); RETURN NULL; END'
            """,
            """
            CREATE CONSTRAINT TRIGGER spends AFTER INSERT ON sale DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION spend()
            """,
            f"GRANT INSERT ON sale TO {role}",
        )
        with store.engine.begin() as connection:
            for statement in own:
                connection.exec_driver_sql(statement)
        claim = claim_of(uuid4())
        try:
            denied = pytest.raises(exc.ProgrammingError, match="permission denied for table secret")
            with denied, worker.begin([claim]) as unit:
                unit.claim(claim)
                unit.connection.execute(text("INSERT INTO sale VALUES (1)"))
                unit.store_outputs(claim, make_outputs(1), timedelta(seconds=30))
                unit.commit()
        finally:
            with store.engine.begin() as connection:
                connection.exec_driver_sql("DROP TABLE secret, sale; DROP FUNCTION spend")

    def test_it_can_not_switch(self, store: SqlStore, worker: SqlStore) -> None:
        with pytest.raises(StoreError, match=r"must be owner of table|permission denied"):
            worker.upkeep.daily.open("orders", ahead=2)
        assert not days.parts(store.engine, store.tables)


def test_a_former_layout_gets_its_days_while_a_later_one_waits(store: SqlStore, clock: FakeClock) -> None:
    """The cleaner makes days for whatever layout needs them."""
    daily = store.upkeep.daily
    daily.open("orders", ahead=1)
    daily.close("orders", FIRST + timedelta(days=5))
    daily.open("orders", FIRST + timedelta(days=9), ahead=1)
    store.upkeep.purge("orders", {}, 10, others=timedelta(days=1))
    clock.advance(timedelta(days=6))
    assert [handle(store, at(FIRST + timedelta(days=number))) for number in (0, 4, 5)] == [Verdict.CLAIMED] * 3
