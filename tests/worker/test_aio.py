"""The worker of `async def` handlers, as it runs."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, Retry, Settings
from idemp.errors import Unavailable
from idemp.messages import Delivery, MessageRow
from idemp.ports import NewRow
from idemp.sql.scheduler import SqlScheduler
from idemp.worker import Worker, intake
from idemp.worker.intake import Intake
from idemp.worker.tasks import Tasks
from tests.worker.test_loop import wait_for
from tests.world import QUEUE, SINK, Order, Shipped, World, effect

pytestmark = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
POLICY = Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,)))
Handle = Callable[[Order, AsyncContext], Any]


class Plain(BaseModel):
    __message_type__ = "shop.InThread"
    order_id: str


async def insert(message: BaseModel, ctx: AsyncContext) -> None:
    await ctx.connection.execute(effect.insert(), {"what": message.order_id})  # type: ignore[attr-defined]


class Running:
    """An app whose worker runs in a thread."""

    def __init__(self, url: str) -> None:
        self.world = World(url)
        self.app = App(QUEUE, settings=Settings(database_url=url, concurrency=8))
        self.worker: Any = None
        self.error: BaseException | None = None

    def start(self, handle: Handle, batch: int = 1) -> None:
        self.app.handler(Order, policy=replace(POLICY, batch=batch))(handle)  # type: ignore[call-overload]
        worker = Worker(self.app)
        assert isinstance(worker.runner, Tasks)
        self.worker = worker
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.worker.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def settled(self) -> None:
        """Wait until nothing is left but dead letters."""
        wait_for(lambda: all(row.due_at is None for row in self.world.rows()) and not self.world.due())
        wait_for(lambda: not self.worker.runner.in_hand)


@pytest.fixture
def running(url: str) -> Iterator[Running]:
    found = Running(url)
    yield found
    if found.worker is not None:
        found.stop()
        assert found.worker.runner._store.engine.pool.checkedout() == 0
        assert not found.worker.runner.tasks
    found.app.close()
    found.world.close()


def test_so_many_handlers_run_at_once_and_slots_are_filled_again_at_once(running: Running) -> None:
    free = threading.Event()
    now, most = 0, 0

    async def handle(message: Order, ctx: AsyncContext) -> Shipped:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await insert(message, ctx)
        if message.order_id == "slow":
            await asyncio.to_thread(free.wait)
        await asyncio.sleep(0.02)
        now -= 1
        ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)
        return Shipped(order_id=message.order_id, part=1)

    running.world.send("slow", *(str(number) for number in range(60)))
    running.start(handle)
    wait_for(lambda: len(running.world.effects()) == 60)
    assert (most, "slow" in running.world.effects()) == (8, False)
    assert running.worker.status()["running"] == "shop.Order"
    free.set()
    wait_for(lambda: len(running.world.effects()) == 61)
    running.settled()
    assert len(running.world.rows(SINK)) == 61
    assert running.world.claims() == 61


def test_copies_of_an_id_wait_for_each_other_without_a_connection(running: Running) -> None:
    free = threading.Event()
    runs: list[str] = []

    async def handle(message: Order, ctx: AsyncContext) -> None:
        runs.append(message.order_id)
        await insert(message, ctx)
        if message.order_id == "same":
            await asyncio.to_thread(free.wait)

    running.start(handle)
    running.world.send(*["same"] * 5, "other")
    wait_for(lambda: running.world.effects() == {"other": 1} and running.worker.runner.in_hand == 5)
    assert running.worker.runner._store.engine.pool.checkedout() == 1
    free.set()
    running.settled()
    assert (sorted(runs), running.world.effects()) == (["other", "same"], {"other": 1, "same": 1})


def test_plain_handlers_run_in_threads_beside_them(running: Running) -> None:
    threads: dict[str, threading.Thread] = {}
    both = threading.Barrier(2)

    async def handle(message: Order, ctx: AsyncContext) -> None:
        threads["async"] = threading.current_thread()
        await insert(message, ctx)

    @running.app.handler(Plain, policy=POLICY)
    def plain(message: Plain, ctx: Context) -> None:
        threads[message.order_id] = threading.current_thread()
        both.wait(30)  # two at once
        ctx.session.execute(effect.insert(), {"what": message.order_id})

    running.start(handle)
    running.world.send("plain", "plain, too", type="shop.InThread")
    running.world.send("1")
    wait_for(lambda: len(running.world.effects()) == 3)
    assert len(set(threads.values())) == 3
    running.settled()


def test_a_handler_that_blocks_the_event_loop_is_named(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    async def handle(message: Order, ctx: AsyncContext) -> None:
        time.sleep(3)  # noqa: ASYNC251 - what is tested
        await insert(message, ctx)

    running.start(handle)
    running.world.send("1", message_id="the-one")
    wait_for(lambda: running.world.effects() == {"1": 1})
    running.settled()
    (said,) = [each for each in caplog.messages if "event loop" in each]
    assert "shop.Order" in said
    assert "the-one" in said


counted: contextvars.ContextVar[int] = contextvars.ContextVar("counted", default=0)


def test_each_handling_has_a_context_of_its_own(running: Running) -> None:
    seen: list[int] = []

    async def handle(message: Order, ctx: AsyncContext) -> None:
        seen.append(counted.get())
        counted.set(counted.get() + 1)
        async with asyncio.TaskGroup() as group:
            inner = group.create_task(asyncio.sleep(0.01, counted.get()))
        assert inner.result() == 1
        await insert(message, ctx)

    running.start(handle)
    running.world.send(*(str(number) for number in range(30)))
    wait_for(lambda: len(running.world.effects()) == 30)
    assert set(seen) == {0}


async def in_its_own_task(ctx: AsyncContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(10)


async def in_a_task_it_waits_for(ctx: AsyncContext) -> None:
    task = asyncio.ensure_future(asyncio.sleep(10))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def timeout_in_a_sleep(ctx: AsyncContext) -> None:
    async with asyncio.timeout(0.05):
        await asyncio.sleep(10)


async def timeout_in_a_statement(ctx: AsyncContext) -> None:
    async with asyncio.timeout(0.05):
        await ctx.session.execute(text("SELECT pg_sleep(10)"))


async def caught_in_a_statement(ctx: AsyncContext) -> None:
    with suppress(TimeoutError):
        await timeout_in_a_statement(ctx)


async def leaves_a_pipeline(ctx: AsyncContext) -> None:
    driver: Any = (await ctx.connection.get_raw_connection()).driver_connection
    await driver.pipeline().__aenter__()


async def in_a_task_group(ctx: AsyncContext) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(10))
        group.create_task(in_a_task_it_waits_for(ctx))
        raise ValueError("one of them")


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (in_its_own_task, "own task was cancelled"),
        (in_a_task_it_waits_for, "own task was cancelled"),
        (timeout_in_a_sleep, "TimeoutError"),
        (timeout_in_a_statement, "TimeoutError"),
        (caught_in_a_statement, "has caught the error"),
        (leaves_a_pipeline, "left a pipeline open"),
        (in_a_task_group, "ExceptionGroup"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_cancellation_inside_a_handler_is_a_failure_of_its_own(running: Running, fail: Any, said: str, batch: int) -> None:
    runs: list[str] = []

    async def handle(message: Order, ctx: AsyncContext) -> None:
        runs.append(message.order_id)
        await insert(message, ctx)
        if message.order_id == "bad":
            await fail(ctx)

    running.world.send("1", "bad", "2")
    running.start(handle, batch)
    running.settled()
    assert running.world.effects() == {"1": 1, "2": 1}
    (dead,) = running.world.dead()
    assert (dead["rule"], dead["attempts"]) == ("handler", 2)
    assert said in dead["error"]


def test_lists_batches_and_generators(running: Running) -> None:
    class Listed(BaseModel):
        __message_type__ = "shop.Listed"
        order_id: str

    sizes: list[int] = []

    @running.app.handler(Listed, policy=Idempotent(key="order_id", batch=10))
    async def listed(messages: list[Listed], contexts: list[AsyncContext]) -> None:
        sizes.append(len(messages))
        await contexts[0].connection.execute(effect.insert(), [{"what": each.order_id} for each in messages])
        for message, ctx in zip(messages, contexts, strict=True):
            ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)

    async def handle(message: Order, ctx: AsyncContext) -> AsyncIterator[Shipped]:
        await insert(message, ctx)
        for part in range(2):
            ctx.send(Shipped(order_id=message.order_id, part=part), to=SINK)
            yield Shipped(order_id=message.order_id, part=7)

    running.world.send(*(f"l{number}" for number in range(10)), type="shop.Listed")
    running.world.send("1")
    running.start(handle)
    wait_for(lambda: len(running.world.effects()) == 11)
    running.settled()
    assert sum(sizes) == 10
    assert len(sizes) < 10
    assert len(running.world.sent()) == 12


def suspect(world: World, id: str, deaths: int = 2) -> None:
    """Leave a message whose processes have died."""
    delivery = Delivery(QUEUE, {"type": "shop.Order", "message_id": "7"}, json.dumps({"order_id": id}).encode())
    SqlScheduler(world.database, "another").settle([NewRow(delivery, delay=0.0, deaths=deaths)], [])


def test_what_has_ended_two_processes_runs_alone_and_what_has_ended_one_does_not(running: Running) -> None:
    now: set[str] = set()
    met: dict[str, asyncio.Event] = {}  # another one was running beside it

    async def handle(message: Order, ctx: AsyncContext) -> None:
        id = message.order_id
        met[id] = asyncio.Event()
        for other in now:
            met[other].set()
            met[id].set()
        now.add(id)
        await (met[id].wait() if id.startswith("once") else asyncio.sleep(0.02))
        now.remove(id)
        await insert(message, ctx)

    for number in range(5):
        suspect(running.world, f"once {number}", deaths=1)
    for number in range(2):
        suspect(running.world, f"twice {number}")
    running.world.send(*(str(number) for number in range(40)))
    running.start(handle)
    wait_for(lambda: len(running.world.effects()) == 47)
    assert [met[f"twice {number}"].is_set() for number in range(2)] == [False, False]
    running.settled()
    assert running.world.rows() == []


def test_fresh_messages_do_not_wait_until_a_long_handler_makes_room_for_a_suspect(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "PATIENCE", 0.1)
    free, alone, leases, rows = threading.Event(), list[bool](), list[int](), Intake.take

    def counted(intake: Intake, runner: Any, poll: float) -> Any:
        leases.append(0)
        return rows(intake, runner, poll)

    monkeypatch.setattr(Intake, "take", counted)

    async def handle(message: Order, ctx: AsyncContext) -> None:
        if message.order_id == "long":
            await asyncio.to_thread(free.wait)
        if message.order_id == "suspect":
            alone.append(len(running.worker.runner.tasks) == 1)
        await insert(message, ctx)

    running.start(handle)
    running.world.send("long")
    wait_for(lambda: running.worker.running)
    suspect(running.world, "suspect")
    wait_for(lambda: running.worker.intake.solitude._patient_until)
    running.world.send(*(str(number) for number in range(20)))
    wait_for(lambda: len(running.world.effects()) == 20)
    asked = len(leases)
    wait_for(lambda: running.worker.intake.solitude.patience > 0.7)
    assert len(leases) - asked < 50  # it waits for deliveries, and does not ask again and again
    assert alone == []
    free.set()
    running.settled()
    assert (alone, len(running.world.effects())) == ([True], 22)


def test_a_suspect_gives_up_its_process_after_a_while_and_its_death_then_proves_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "ALONE", 0.2)
    free = threading.Event()

    async def handle(message: Order, ctx: AsyncContext) -> None:
        if message.order_id == "suspect":
            await asyncio.to_thread(free.wait)
        await insert(message, ctx)

    suspect(running.world, "suspect")
    running.start(handle)
    wait_for(lambda: running.worker.running)
    running.world.send(*(str(number) for number in range(20)))
    wait_for(lambda: len(running.world.effects()) == 20)
    assert [(row.deaths, row.deliveries) for row in running.world.rows() if row.history is not None] == [(1, 1)]
    free.set()
    running.settled()
    assert len(running.world.effects()) == 21


def test_a_suspect_that_never_finds_its_process_free_runs_in_company(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "PATIENCE", 0.05)
    monkeypatch.setattr(intake, "LONGEST_PATIENCE", 0.1)
    free = threading.Event()

    async def handle(message: Order, ctx: AsyncContext) -> None:
        if message.order_id == "long":
            await asyncio.to_thread(free.wait)
        await insert(message, ctx)

    running.start(handle)
    running.world.send("long")
    wait_for(lambda: running.worker.running)
    suspect(running.world, "suspect")
    wait_for(lambda: running.world.effects() == {"suspect": 1})
    free.set()
    running.settled()


def test_a_suspect_whose_company_could_not_be_noted_stays_in_hand(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is kept by the worker, so nobody else would take it."""
    monkeypatch.setattr(intake, "PATIENCE", 0.05)
    monkeypatch.setattr(intake, "LONGEST_PATIENCE", 0.1)
    free, accompany, failures = threading.Event(), SqlScheduler.accompany, [Unavailable("away")]

    def fail_once(scheduler: SqlScheduler, row: MessageRow) -> None:
        if failures:
            raise failures.pop()
        accompany(scheduler, row)

    async def handle(message: Order, ctx: AsyncContext) -> None:
        if message.order_id == "long":
            await asyncio.to_thread(free.wait)
        await insert(message, ctx)

    monkeypatch.setattr(SqlScheduler, "accompany", fail_once)
    running.start(handle)
    running.world.send("long")
    wait_for(lambda: running.worker.running)
    suspect(running.world, "suspect")
    wait_for(lambda: running.world.effects() == {"suspect": 1})
    assert failures == []
    free.set()
    running.settled()


def test_places_of_plain_handlers_are_free_again(running: Running) -> None:
    """A failing message takes the place of its id again for each retry."""
    runs: list[str] = []

    async def handle(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)

    @running.app.handler(Plain, policy=POLICY)
    def plain(message: Plain, ctx: Context) -> None:
        runs.append(message.order_id)
        if len(runs) == 1:
            raise RuntimeError("boom")
        ctx.session.execute(effect.insert(), {"what": message.order_id})

    running.start(handle)
    running.world.send("1", "1", type="shop.InThread")
    running.settled()
    assert (running.world.effects(), runs, running.worker.runner._places) == ({"1": 1}, ["1", "1"], set())


def test_consumption_pauses_while_the_database_takes_no_work(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def handle(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)

    running.start(handle)
    running.world.send("0")
    wait_for(lambda: running.world.effects() == {"0": 1})
    with running.world.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE idemp_inbox RENAME TO away"))
    running.world.send(*(str(number) for number in range(1, 20)))
    wait_for(lambda: running.worker.status()["obstacle"])
    with running.world.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO idemp_inbox"))
    wait_for(lambda: len(running.world.effects()) == 20)
    running.settled()
    assert (running.world.dead(), set(running.world.effects().values())) == ([], {1})
    seen = [getattr(record, "event", "") for record in caplog.records]
    assert [event for event in seen if event in ("worker.paused", "worker.resumed")] == ["worker.paused", "worker.resumed"]


def test_a_handler_that_exits_ends_the_worker(running: Running) -> None:
    async def handle(message: Order, ctx: AsyncContext) -> None:
        await insert(message, ctx)
        raise SystemExit(5)

    running.start(handle)
    running.world.send("1")
    running.thread.join(60)
    assert isinstance(running.error, SystemExit)
    assert (running.world.effects(), running.world.claims()) == ({}, 0)


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"pool_size": 5, "max_overflow": 4}, True), ({"pool_size": 5, "max_overflow": 5}, False), ({"max_overflow": -1}, False)],
)
def test_a_pool_that_is_too_small_is_refused(url: str, options: dict[str, int], refused: bool) -> None:
    app = App(QUEUE, engine=create_async_engine(url, **options), settings=Settings(concurrency=8))
    app.handler(Order)(insert)  # type: ignore[call-overload]
    if refused:
        with pytest.raises(ConfigurationError, match="pool_size=10, or set IDEMP_CONCURRENCY=7"):
            Worker(app)
    else:
        Worker(app).intake.receiver.close()
    app.close()
