"""What becomes of an effect: done once, tried again, given up; and what a crash leaves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event

from idemp import App, Context, Idempotent, Outcome, Previous
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Row
from idemp.effects import EffectLater, EffectRefused, EffectRun, EffectRunner
from idemp.effects.runner import reason_of
from idemp.errors import StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.telemetry import Telemetry
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MemoryEffects
from idemp.worker import Worker
from tests.house import House, sale
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until


class Doing:
    """An effect's function that says what it was asked, and raises what it is told to."""

    def __init__(self) -> None:
        self.runs: list[EffectRun] = []
        self.raises: list[BaseException | None] = []
        self.hold: threading.Event | None = None

    def __call__(self, value: dict[str, Any], run: EffectRun) -> None:
        self.runs.append(run)
        if self.hold is not None:
            self.hold.wait(10)
        error = self.raises.pop(0) if self.raises else None
        if error is not None:
            raise error


class Seen(Telemetry):
    def __init__(self) -> None:
        self.results: list[str] = []

    def effect(self, name: str, result: str, seconds: float) -> None:
        self.results.append(result)


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    clock = FakeClock()
    store: Any
    if request.param == "memory":
        store = InMemoryStore(clock)
    else:
        engine = create_engine_safely(
            f"sqlite:///{tmp_path}/inbox.db"
        )  # one in memory has one connection for all threads
        store = SqlStore(engine, tables=make_tables(engine), clock=clock)
    yield House(store, MemoryEffects(InMemoryStore()), clock)
    store.close()


@pytest.fixture
def doing(house: House) -> Doing:
    made = Doing()
    house.app.effect("ping", dict, retry=["10s", "60s"], max_attempts=4, timeout="5s")(made)

    @house.app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {"sku": "A-1"})

    return made


def runner(house: House, **options: Any) -> EffectRunner:
    return EffectRunner(house.store.upkeep, "shop", house.app.registry.effects, **options)


def states(house: House) -> tuple[int, int]:
    state = house.store.upkeep.pending_state()
    return state.count, state.quarantined


def test_done_once_however_often_its_message_comes(house: House, doing: Doing) -> None:
    house.deliver()
    assert house.deliver() is Outcome.SKIPPED, "there is nothing to redispatch"
    seen = Seen()
    running = runner(house, telemetry=seen)
    assert running.run_once().done == 1
    assert house.deliver() is Outcome.SKIPPED
    assert running.run_once().taken == house.relay().taken == 0
    (run,) = doing.runs
    assert (run.attempt, run.name, run.consumer, run.causation_id) == (1, "ping", "shop", "sale-1")
    assert states(house) == (0, 0)
    assert seen.results == ["done"]


def test_failures_wait_longer_each_time_then_it_is_given_up(house: House, doing: Doing) -> None:
    house.deliver()
    doing.raises = [OSError("away")] * 4
    running, waited, pauses = runner(house), 0, []
    while len(doing.runs) < 4 and waited < 200:
        if running.run_once().taken:
            pauses.append(waited)
            waited = 0
        house.clock.advance(timedelta(seconds=1))
        waited += 1
    first, *pauses = pauses
    assert first == 0
    for pause, expected in zip(pauses, (10, 60, 60), strict=True):
        assert 0.75 * expected - 1 <= pause <= 1.25 * expected + 2
    assert states(house) == (1, 1)
    house.clock.advance(timedelta(days=9))
    assert running.run_once().taken == 0
    assert len({run.id for run in doing.runs}) == 1
    assert [run.attempt for run in doing.runs] == [1, 2, 3, 4]


def test_refused_is_given_up_at_once_and_can_be_released(
    house: House, doing: Doing, caplog: pytest.LogCaptureFixture
) -> None:
    house.deliver()
    doing.raises = [EffectRefused("550 no such mailbox")]
    with caplog.at_level(logging.WARNING, "idemp"):
        runner(house).run_once()
    (record,) = [each for each in caplog.records if getattr(each, "event", "") == "effect_quarantined"]
    assert (record.effect, record.reason, record.message_id) == ("ping", "550 no such mailbox", "sale-1")  # type: ignore[attr-defined]
    assert states(house) == (1, 1)
    assert house.store.upkeep.release_quarantined([doing.runs[0].id]) == 1
    assert runner(house).run_once().done == 1
    assert doing.runs[1].id == doing.runs[0].id
    assert states(house) == (0, 0)


def test_the_other_side_says_when(house: House, doing: Doing) -> None:
    house.deliver()
    doing.raises = [EffectLater("503", after=timedelta(seconds=90)), EffectLater("503", after=timedelta(days=90))]
    running = runner(house)
    running.run_once()
    house.clock.advance(timedelta(seconds=89))
    assert running.run_once().taken == 0
    house.clock.advance(timedelta(seconds=1))
    assert running.run_once().taken == 1
    house.clock.advance(timedelta(days=1))
    assert running.run_once().done == 1, "nobody is put off for longer than a day"


def test_unknown_effects_stay_pending_and_are_told_once(
    house: House, doing: Doing, caplog: pytest.LogCaptureFixture
) -> None:
    """A deploy that forgot a function, or an older process beside a newer one."""
    for name in ("sale-1", "sale-2"):
        house.deliver(sale(name))
    older = EffectRunner(house.store.upkeep, "shop", {})
    with caplog.at_level(logging.ERROR, "idemp"):
        for _ in range(30):
            older.run_once()
            house.clock.advance(timedelta(minutes=1))
    assert [getattr(each, "event", "") for each in caplog.records] == ["effect_unknown"]
    assert states(house) == (2, 0)
    newer = runner(house)
    assert newer.run_once().done == newer.run_once().done == 1
    assert [run.attempt for run in doing.runs] == [1, 1], "nobody had tried it"


def test_a_renamed_consumer_runs_what_is_left_under_its_former_name(house: House, doing: Doing) -> None:
    """The former one's comes first: it can only become less, and the other never ends, perhaps."""
    house.deliver()
    kiosk = App("kiosk", store=house.store, broker=house.broker, clock=house.clock)
    kiosk.effect("ping", dict)(doing)
    with kiosk.initiate() as unit:
        unit.effect("ping", {"sku": "B-1"})
    renamed = EffectRunner(house.store.upkeep, "kiosk", kiosk.registry.effects, former=["shop"])
    assert renamed.run_once().done == renamed.run_once().done == 1
    assert [run.consumer for run in doing.runs] == ["shop", "kiosk"]
    assert renamed.run_once().taken == 0
    assert states(house) == (0, 0)


def test_what_a_former_name_alone_knows_does_not_wait(
    house: House, doing: Doing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type that moved to another app: its former consumer lives on, with effects of its own."""
    monkeypatch.setattr("idemp.effects.runner._REST_SECONDS", 60.0)
    house.deliver()
    kiosk = EffectRunner(house.store.upkeep, "kiosk", {}, former=["shop"])
    assert [kiosk.run_once().taken for _ in range(2)] == [1, 0]
    assert runner(house).run_once().done == 1
    assert [run.attempt for run in doing.runs] == [1]


def test_a_former_name_that_is_busy_does_not_keep_the_present_one_waiting(house: House, doing: Doing) -> None:
    with house.app.initiate() as unit:
        for number in range(3):
            unit.effect("ping", {"sku": f"A-{number}"})
    kiosk = App("kiosk", store=house.store, broker=house.broker, clock=house.clock)
    kiosk.effect("ping", dict)(doing)
    with kiosk.initiate() as unit:
        unit.effect("ping", {"sku": "B-1"})
    renamed = EffectRunner(house.store.upkeep, "kiosk", kiosk.registry.effects, former=["shop"])
    for _ in range(4):
        renamed.run_once()
    assert [run.consumer for run in doing.runs] == ["shop", "kiosk", "shop", "shop"]


def test_workers_of_a_renamed_app_run_its_former_effects(house: House, doing: Doing) -> None:
    house.deliver()
    app = App("kiosk", store=house.store, broker=house.broker)
    app.effect("ping", dict)(doing)
    app.handler(dict, type="shop.Sell", policy=Idempotent(previous=(Previous(consumer="shop"),)))(lambda message: None)
    worker = Worker([app], threads=1, relay=False)
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        wait_until(lambda: states(house) == (0, 0), "its effect")
    finally:
        worker.stop()
        running.join(20)
    assert [run.consumer for run in doing.runs] == ["shop"]


def test_values_that_no_longer_fit_are_given_up(house: House, doing: Doing) -> None:
    from pydantic import BaseModel

    class Parcel(BaseModel):
        weight: int

    house.deliver()
    fresh = App("shop", store=house.store, broker=house.broker)
    fresh.effect("ping", Parcel)(print)
    EffectRunner(house.store.upkeep, "shop", fresh.registry.effects).run_once()
    assert states(house) == (1, 1)


@pytest.mark.parametrize("error", [KeyError("DEM"), SystemExit(3)])
def test_whatever_a_validator_raises_is_a_failure_of_the_effect(
    house: House, doing: Doing, error: BaseException
) -> None:
    """A newer release reads what an older one stored: the runner's thread, and its worker, go on."""
    from pydantic import BaseModel, field_validator

    class Price(BaseModel):
        sku: str

        @field_validator("sku")
        @classmethod
        def known(cls, value: str) -> str:
            raise error

    house.deliver()
    fresh = App("shop", store=house.store, broker=house.broker)
    fresh.effect("ping", Price, max_attempts=2, retry="10s")(print)
    running = EffectRunner(house.store.upkeep, "shop", fresh.registry.effects)
    assert running.run_once().taken == 1
    assert states(house) == (1, 0)
    house.clock.advance(timedelta(minutes=1))
    assert running.run_once().taken == 1
    assert states(house) == (1, 1)


def test_runs_that_do_not_end_are_told_when_they_hold_up_others(house: House, caplog: pytest.LogCaptureFixture) -> None:
    stuck = Doing()
    stuck.hold = threading.Event()
    house.app.effect("ping", dict, timeout="10ms", retry="1h")(stuck)

    @house.app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})

    for number in range(11):
        house.deliver(sale(f"sale-{number}"))
    running = runner(house)
    worker = Worker([house.app])
    worker._effect_runners.append(running)
    with caplog.at_level(logging.ERROR, "idemp"):
        for _ in range(9):
            assert running.run_once().taken == 1
        assert worker.health().alive
        assert running.run_once().taken == 1
        for _ in range(3):
            assert running.run_once().taken == 0, "one more would hold one more thread"
    assert [getattr(each, "event", "") for each in caplog.records] == ["effects_held_up"]
    assert worker.health().problems == ["so many effects run on past their timeouts that others don't begin"]
    stuck.hold.set()

    def goes_on() -> bool:
        running.run_once()
        return worker.health().alive

    wait_until(goes_on, "the others ended")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_before_or_after_it_costs_one_run_more(house: House, doing: Doing, when: str) -> None:
    """The runner is gone, its lease ends, and the next one has the same id; it can't know on which side of the effect."""
    house.deliver()
    if when == "before":
        house.store.upkeep.take_effects("shop", 1, timedelta(seconds=20))
    else:
        doing.raises = [None]
        dying = runner(house)
        dying._upkeep = Dying(house.store.upkeep)  # type: ignore[assignment]
        with pytest.raises(Died):
            dying.run_once()
    running = runner(house)
    assert running.run_once().taken == 0
    house.clock.advance(timedelta(seconds=20))
    assert running.run_once().done == 1
    assert [run.attempt for run in doing.runs] == ([2] if when == "before" else [1, 2])
    assert len({run.id for run in doing.runs}) == 1
    house.clock.advance(timedelta(days=1))
    assert running.run_once().taken == 0


def test_what_ends_each_process_is_given_up(house: House, doing: Doing) -> None:
    house.deliver()
    for _ in range(4):
        assert house.store.upkeep.take_effects("shop", 1, timedelta(seconds=20))  # and dies in it
        house.clock.advance(timedelta(seconds=20))
    assert runner(house).run_once().taken == 1
    assert not doing.runs
    assert states(house) == (1, 1)


def test_what_had_its_only_attempt_can_be_released(house: House) -> None:
    """Whoever releases it wants it to be run once more; what dies again in it is given up without another run."""
    doing = Doing()
    house.app.effect("ping", dict, max_attempts=1)(doing)
    with house.app.initiate() as unit:
        id_ = unit.effect("ping", {})
    doing.raises = [OSError("away"), OSError("away"), None]
    for runs in (1, 2):
        assert runner(house).run_once().taken == 1
        assert (len(doing.runs), states(house)) == (runs, (1, 1))
        house.store.upkeep.release_quarantined([id_])
    house.store.upkeep.take_effects("shop", 1, timedelta(seconds=20))  # and dies in it
    house.clock.advance(timedelta(seconds=20))
    assert runner(house).run_once().taken == 1
    assert (len(doing.runs), states(house)) == (2, (1, 1))
    house.store.upkeep.release_quarantined([id_])
    assert runner(house).run_once().done == 1
    assert [run.attempt for run in doing.runs] == [1, 2, 2], "it may have been done before"


def test_what_is_only_begun_is_not_done(house: House) -> None:
    """Wrapped, it is known by its answer only."""

    async def ping(value: dict[str, Any]) -> None: ...

    def pong(value: dict[str, Any]) -> Iterator[None]:
        yield None

    def wrapped(function: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
        return lambda value: function({**value})

    house.app.effect("ping", dict)(wrapped(ping))
    house.app.effect("pong", dict)(wrapped(pong))
    with house.app.initiate() as unit:
        unit.effect("ping", {})
        unit.effect("pong", {})
    running = runner(house)
    assert [running.run_once().done for _ in range(2)] == [0, 0]
    assert states(house) == (2, 0)


def test_a_run_is_given_to_who_has_a_default_for_it(house: House) -> None:
    seen: list[EffectRun | None] = []

    @house.app.effect("ping")
    def ping(value: dict[str, Any], run: EffectRun | None = None, times: int = 1) -> None:
        seen.append(run)

    with house.app.initiate() as unit:
        id_ = unit.effect("ping", {})
    assert runner(house).run_once().done == 1
    assert [run and run.id for run in seen] == [id_]


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("and nobody can say what happened")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no file caf\udce9"), r"OSError: no file caf\udce9"),
        (OSError("a\x00b"), r"OSError: a\x00b"),
        (Odd(), "Odd: (RuntimeError while it was to be shown)"),
        (EffectRefused(None), "None"),  # type: ignore[arg-type]
    ],
)
def test_reasons_that_no_database_stores(house: House, doing: Doing, error: Exception, reason: str) -> None:
    """They would end the worker, and the effect would be run again by the next one."""
    house.deliver()
    doing.raises = [error]
    assert runner(house).run_once().taken == 1
    assert reason_of(error) == reason
    house.clock.advance(timedelta(minutes=1))
    assert len(doing.runs) == 1
    assert runner(house).run_once().done == (not isinstance(error, EffectRefused))


def test_a_wait_that_is_none_is_a_failure_of_the_effect(house: House, doing: Doing) -> None:
    house.deliver()
    for after in (30, "30s"):
        with pytest.raises(TypeError, match="timedelta"):
            EffectLater("503", after=after)  # type: ignore[arg-type]


def test_a_lease_begins_when_its_turn_has_come(tmp_path: Path) -> None:
    """SQLite's writers wait for each other, for longer than a lease outlasts what it is for."""
    clock, engine = FakeClock(), create_engine_safely(f"sqlite:///{tmp_path}/shop.db")
    app = App("shop", store=SqlStore(engine, tables=make_tables(engine), clock=clock), broker=InMemoryBroker(clock))
    app.effect("ping", dict)(Doing())
    with app.initiate() as unit:
        unit.effect("ping", {})

    @event.listens_for(engine, "before_cursor_execute", once=True)
    def waits(*_: Any) -> None:
        clock.advance(timedelta(seconds=20))

    upkeep, lease = app.store.upkeep, timedelta(seconds=45)
    assert len(upkeep.take_effects("shop", 1, lease)) == 1
    clock.advance(lease - timedelta(seconds=1))
    assert not upkeep.take_effects("shop", 1, lease)
    app.close()
    engine.dispose()


class Died(BaseException):
    pass


class Dying:
    """The upkeep of a process that dies before it records."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle_pending(self, *_: Any, **__: Any) -> None:
        raise Died


class Away(Dying):
    """One that does not reach its database for some calls."""

    times = 2

    def settle_pending(self, *arguments: Any, **options: Any) -> None:
        if self.times:
            self.times -= 1
            raise StoreUnavailable("away")
        self._inner.settle_pending(*arguments, **options)


def test_done_while_the_database_is_away_is_recorded_later(house: House, doing: Doing) -> None:
    house.deliver()
    running = runner(house)
    running._upkeep = Away(house.store.upkeep)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            running.run_once()
    house.clock.advance(timedelta(days=1))
    assert running.run_once().taken == 0, "recorded before anything else is taken"
    assert len(doing.runs) == 1
    assert states(house) == (0, 0)


def test_too_slow_is_left_behind_and_counts_if_it_ends_well(house: House) -> None:
    slow = Doing()
    slow.hold = threading.Event()
    house.app.effect("ping", dict, timeout="50ms", retry="10s")(slow)

    @house.app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})

    house.deliver()
    running = runner(house)
    assert running.run_once().done == 0
    house.clock.advance(timedelta(seconds=30))
    assert running.run_once().done == 0
    assert len(slow.runs) == 1, "not beside the one that has not ended"
    slow.hold.set()
    deadline = time.monotonic() + 5
    while states(house)[0] and time.monotonic() < deadline:
        running.run_once()
    assert states(house) == (0, 0)
    assert len(slow.runs) == 1


def test_initiations_and_chunks_leave_effects_to_the_workers(house: House, doing: Doing) -> None:
    with house.app.initiate("request-1") as unit:
        told = unit.effect("ping", {})
    running = runner(house)
    assert running.run_once().done == 1
    rows = [Row(body=b"{}", type="shop.Sell", id=f"m-{number}") for number in range(3)]
    Bulk(house.app).run(rows)
    while running.run_once().taken:
        pass
    assert doing.runs[0].id == told
    assert len({run.id for run in doing.runs}) == len(doing.runs) == 4


def test_late_claims_and_batches(house: House) -> None:
    doing = Doing()
    house.app.effect("ping", dict)(doing)

    @house.app.handler(dict, type="shop.Sell", policy=Idempotent(claim="late"))
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})

    @house.app.handler(dict, type="shop.Buy", policy=Idempotent(batch=10))
    def buy(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})
        ctx.send({}, to="stock", type="stock.Reserve")

    house.deliver()
    house.together(*(sale(f"b-{number}", type="shop.Buy") for number in range(5)))
    running = runner(house)
    while running.run_once().taken:
        pass
    assert len({run.id for run in doing.runs}) == len(doing.runs) == 6
    assert len(house.publisher.sent) == 5


def test_a_worker_starts_it_within_milliseconds() -> None:
    """Not after a second's polling: woken by the COMMIT. And what it has begun ends before the worker does."""
    store, broker = InMemoryStore(), InMemoryBroker()
    app = App("shop", store=store, broker=broker)
    begun: dict[UUID, float] = {}
    three = threading.Event()

    @app.effect("ping")
    def ping(value: dict[str, Any], run: EffectRun) -> None:
        begun[run.id] = time.monotonic()
        if len(begun) == 3:
            three.set()

    @app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None: ...

    worker = Worker([app])
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    committed: dict[UUID, float] = {}
    for _ in range(3):
        with app.initiate() as unit:
            id_ = unit.effect("ping", {})
        committed[id_] = time.monotonic()
    assert three.wait(10)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert min(begun[id_] - committed[id_] for id_ in committed) < 0.3
    assert store.pending_count() == 0
