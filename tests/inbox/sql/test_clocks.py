"""Hosts whose clocks are wrong: what they claim is kept for its window, and what they leave to others is due in time."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import time_machine
from sqlalchemy import insert, select, update

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.clock import SystemClock
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.inbox.sql.liveness import ACTIVITY_GAP
from idemp.inbox.sql.times import DatabaseClock
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Tables

WINDOW, SKEW, LEASE = timedelta(hours=2), timedelta(hours=3), timedelta(seconds=30)
TYPE = "shop.Sell"
AHEAD = timedelta(minutes=5)  # less than what shows by itself that a clock was wrong


@contextmanager
def host(by: timedelta) -> Iterator[None]:
    """A host whose clock is wrong by so much; the database's server is another host."""
    with time_machine.travel(datetime.now(UTC) + by, tick=True):
        yield


class Host:
    """A process of the consumer on a machine of its own."""

    def __init__(self, engine: Engine) -> None:
        broker = InMemoryBroker()
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        self.app = App("shop", database=engine, broker=broker, settings=Settings(relay_after="0s"))
        self.app.handler(dict, type=TYPE, policy=Idempotent(retention=WINDOW))(self.sell)
        self.app.start()
        self.store: Any = self.app.store
        self.protocol = self.app.protocol(broker.publisher())
        self.handled = 0

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        self.handled += 1

    def deliver(self, message_id: str) -> Outcome:
        return self.protocol.process(Message(body=b"{}", type=TYPE, message_id=message_id))

    def purge(self) -> int:
        deleted: int = self.store.upkeep.purge("shop", {TYPE: WINDOW}, 100)
        return deleted


def consumed_for(store: SqlStore, period: timedelta) -> None:
    """The consumer has consumed without a pause until now."""
    now = store.clock.now()
    row = {"consumer_id": store.names.id("consumer", "shop"), "started_at": now - period, "ended_at": now}
    with store.engine.begin() as connection:
        connection.execute(insert(store.tables.activity), row)


@pytest.fixture(params=["postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def two_engines(database_url: str) -> Iterator[tuple[Engine, Engine]]:
    engines = create_engine_safely(database_url), create_engine_safely(database_url)
    make_tables(engines[0])
    yield engines
    for engine in engines:
        engine.dispose()


def test_a_claim_of_a_host_that_is_behind_is_kept_for_its_window(two_engines: tuple[Engine, Engine]) -> None:
    right = Host(two_engines[1])
    consumed_for(right.store, timedelta(days=1))
    with host(-SKEW):
        wrong = Host(two_engines[0])
        assert wrong.deliver("sale-1") is Outcome.HANDLED
    right.store.refresh_horizons("shop", [WINDOW])
    assert right.purge() == 0
    assert right.deliver("sale-1") is not Outcome.HANDLED
    assert (wrong.handled, right.handled) == (1, 0)


def test_a_cleaner_of_a_host_that_is_ahead_deletes_nothing_early(two_engines: tuple[Engine, Engine]) -> None:
    right = Host(two_engines[1])
    assert right.deliver("sale-1") is Outcome.HANDLED
    consumed_for(right.store, timedelta(days=1))
    with host(SKEW):
        wrong = Host(two_engines[0])
        wrong.store.upkeep.beat(relay=False, consumers=["shop"])
        assert wrong.purge() == 0


def test_a_clock_that_steps_while_the_process_runs(two_engines: tuple[Engine, Engine]) -> None:
    right, stepping = Host(two_engines[1]), Host(two_engines[0])
    consumed_for(right.store, timedelta(days=1))
    assert stepping.deliver("sale-1") is Outcome.HANDLED
    for by in (-SKEW, SKEW):
        with host(by):
            assert stepping.deliver(f"sale {by}") is Outcome.HANDLED
            assert abs(stepping.store.clock.now() - right.store.clock.now()) < timedelta(minutes=1)
    assert right.purge() == 0


def test_what_a_host_that_is_ahead_leaves_to_others_is_due_at_once(two_engines: tuple[Engine, Engine]) -> None:
    right = Host(two_engines[1])
    with host(AHEAD):
        wrong = Host(two_engines[0])
        with wrong.app.initiate() as unit:
            unit.send({}, to="stock", type="stock.Reserve")
    assert len(right.store.upkeep.take_pending(10, LEASE)) == 1


def test_so_are_its_effects(two_engines: tuple[Engine, Engine]) -> None:
    right = Host(two_engines[1])
    with host(AHEAD):
        app = App("mail", database=two_engines[0], broker=InMemoryBroker(), settings=Settings())
        app.effect("mail.Send", dict)(print)
        app.start()
        with app.initiate() as unit:
            unit.effect("mail.Send", {})
    assert len(right.store.upkeep.take_effects("mail", 10, LEASE)) == 1


def test_an_initiation_is_not_dated_by_its_host(two_engines: tuple[Engine, Engine]) -> None:
    with host(-SKEW):
        wrong = Host(two_engines[0])
        with wrong.app.initiate() as unit:
            unit.send({}, to="stock", type="stock.Reserve")
        store = wrong.store
    with store.engine.connect() as connection:
        original = connection.scalar(select(store.tables.inbox.c.message_key))
    made_at = datetime.fromtimestamp((uuid.UUID(str(original)).int >> 80) / 1000, UTC)
    assert abs(made_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_servers_clock_is_read_once_in_a_while(two_engines: tuple[Engine, Engine]) -> None:
    """And not by a delivery's transaction."""
    store = SqlStore(two_engines[0], clock=(clock := Slow()))
    assert abs(store.clock.now() - datetime.now(UTC)) < timedelta(minutes=1)
    assert isinstance(store.clock, DatabaseClock)
    store.clock.set(datetime(2020, 1, 1, tzinfo=UTC))  # as if the server's clock had been set meanwhile
    store.upkeep.beat("host-1", relay=False, consumers=[])
    assert store.clock.now().year == 2020
    clock.seconds += 3600
    store.upkeep.beat("host-1", relay=False, consumers=[])
    assert abs(store.clock.now() - datetime.now(UTC)) < timedelta(minutes=1)


class Slow(SystemClock):
    """A host whose clock is a day behind, with a monotonic clock that tests move."""

    seconds = 0.0

    def now(self) -> datetime:
        return super().now() - timedelta(days=1)

    def monotonic(self) -> float:
        return self.seconds


class TestAnyDatabase:
    """What also holds where the only clock is the host's."""

    @pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
    def database_url(self, request: pytest.FixtureRequest, tmp_path: Any) -> str:
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path}/inbox.db"
        url: str = request.getfixturevalue(f"{request.param}_url")
        return url

    def test_a_step_is_no_time_of_consuming(self, two_engines: tuple[Engine, Engine]) -> None:
        """A step that is shorter than a pause between beats does not shorten the window."""
        clock = Stepping()
        store = SqlStore(two_engines[0], clock=clock)
        store.upkeep.beat("host-1", relay=False, consumers=["shop"])
        for step in (timedelta(0), ACTIVITY_GAP - timedelta(seconds=10), timedelta(0)):
            clock.goes(5, step)
            store.upkeep.beat("host-1", relay=False, consumers=["shop"])
        # Of 15 seconds those between the two beats around the step are not counted: the window is longer, not shorter.
        assert store.upkeep.late_before("shop", timedelta(seconds=10)) < clock.now() - timedelta(seconds=15)
        assert store.upkeep.late_before("shop", timedelta(seconds=5)) == clock.now() - timedelta(seconds=5)

    def test_a_relay_that_beat_before_a_step_back_is_not_alive(self, two_engines: tuple[Engine, Engine]) -> None:
        clock = Stepping()
        store = SqlStore(two_engines[0], clock=clock)
        store.upkeep.beat("host-1", relay=True, consumers=[])
        assert store.relay_alive()
        clock.goes(60, timedelta(hours=-1))
        assert not store.relay_alive()
        assert not any(worker.alive for worker in store.upkeep.workers())

    def test_what_is_due_by_a_clock_that_was_wrong_does_not_wait_for_it(
        self, two_engines: tuple[Engine, Engine], tables: Tables
    ) -> None:
        there = Host(two_engines[0])
        with there.app.initiate() as unit:
            unit.send({}, to="stock", type="stock.Reserve")
        pending = tables.pending
        with two_engines[0].begin() as connection:
            later = {"due_at": there.store.clock.now() + timedelta(minutes=54), "attempts": 1}
            connection.execute(update(pending).values(later))
        assert len(there.store.upkeep.take_pending(10, LEASE)) == 1


class Stepping:
    """A clock that steps where a test says so."""

    def __init__(self) -> None:
        self._now, self._monotonic = datetime(2026, 3, 1, 12, tzinfo=UTC), 0.0

    def goes(self, seconds: float, step: timedelta) -> None:
        self._monotonic += seconds
        self._now += timedelta(seconds=seconds) + step

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic
