"""Idempotent tasks of taskiq: real workers on real RabbitMQ, killed at every turn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from taskiq import AsyncBroker, InMemoryBroker, TaskiqDepends, TaskiqMessage, TaskiqResult
from taskiq.acks import AckableMessage, AcknowledgeType
from taskiq.kicker import AsyncKicker
from taskiq.receiver import Receiver
from taskiq.serializers import PickleSerializer
from taskiq_aio_pika import AioPikaBroker
from taskiq_redis import ListQueueBroker

from idemp import AsyncInbox, ConfigurationError
from idemp.context import BaseContext
from idemp.errors import Conflict
from idemp.integrations.taskiq import Idempotency, install, session
from idemp.sql.engine import Database
from tests.integrations.taskiq_tasks import open_broker
from tests.integrations.test_dramatiq import GRACE, TABLES
from tests.servers import ask
from tests.servers.databases import query
from tests.sql.test_outages import end_sessions, role
from tests.worker.test_loop import wait_for
from tests.world import let_pass

on_postgresql = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
__all__ = ["role"]

TASKS = "tests.integrations.taskiq_tasks"
TOGETHER, WORKERS, ROUNDS = 12, 3, 3  # tasks under way, the workers that are killed at once, and how often


class Shop:
    """A client of the tasks, and their workers."""

    def __init__(self, database: str, vhost: str, folder: Path, **settings: object) -> None:
        results, self.database, self.pids = ask("redis", "create_database"), database, list[int]()
        self._loop, self.client = asyncio.new_event_loop(), open_broker(vhost, results)
        self.run(self.client.startup())
        environment = {**os.environ, "IDEMP_DATABASE_URL": database, "SHOP_BROKER": vhost, "SHOP_BACKEND": results}
        environment |= {f"SHOP_{name.upper()}": repr(value) for name, value in settings.items()}
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", TASKS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    def run(self, wanted: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(wanted)

    def keep(self, workers: int) -> None:
        """Start workers, which have successors if they are killed."""
        assert self._parent.stdin is not None
        print(workers, file=self._parent.stdin, flush=True)
        self.await_workers(workers)

    def await_workers(self, count: int) -> None:
        assert self._parent.stdout is not None
        self.pids[:] = [int(self._parent.stdout.readline()) for _ in range(count)]

    def kill(self) -> None:
        """Kill all workers; wait for their successors."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.await_workers(len(self.pids))

    def close(self) -> None:
        self._parent.communicate()  # the end of its input ends it and its workers
        self.run(self.client.shutdown())
        self._loop.close()

    def send(self, name: str, *arguments: Any, id: str | None = None, **labels: Any) -> str:
        kicker: AsyncKicker[Any, Any] = AsyncKicker(task_name=name, broker=self.client, labels=labels)
        return str(self.run(kicker.with_task_id(id).kiq(*arguments)).task_id)

    def result(self, id: str) -> Any:
        """Wait for the end of a task, and return its result or its error."""
        backend = self.client.result_backend
        try:
            wait_for(lambda: self.run(backend.is_result_ready(id)))
        except AssertionError:
            raise AssertionError((id, self.log.read_text()[-3000:])) from None
        found: TaskiqResult[Any] = self.run(backend.get_result(id))
        return found.error or found.return_value

    def changed(self) -> Counter[str]:
        return Counter(what for (what,) in query(self.database, "SELECT what FROM changed"))

    def arrived(self) -> dict[str, int]:
        """Return under how many task ids each follow-up has arrived."""
        return dict(query(self.database, "SELECT what, count(DISTINCT message) FROM arrived GROUP BY what"))

    @contextmanager
    def locked(self, lock: int) -> Iterator[Callable[[int], None]]:
        """Hold a lock for which tasks wait; yield a function that waits until at least so many do."""
        address = make_url(self.database).set(drivername="postgresql").render_as_string(hide_password=False)
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        with closing(psycopg.connect(address, autocommit=True)) as connection:
            connection.execute("SELECT pg_advisory_lock(%s)", [lock])
            yield lambda count: wait_for(lambda: connection.execute(waiting, [lock]).fetchall() >= [(count,)])


@pytest.fixture
def make_shop(url: str, vhost: str, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make_shop(database: str = url, **settings: object) -> Shop:
        made.append(Shop(database, vhost, tmp_path, **settings))
        return made[-1]

    for table in TABLES:
        query(url, table)
    yield make_shop
    for shop in made:
        shop.close()


@pytest.mark.slow
@on_postgresql
def test_what_a_task_sends_goes_out_after_commit(make_shop: Callable[..., Shop], database: Database) -> None:
    """At once and with a delay, also from a retry, and if the process is killed between COMMIT and send."""
    shop = make_shop()
    shop.keep(2)
    names = [f"{way} killed" if kill else way for kill in (False, True) for way in ("kiq", "delay", "retry")]
    ids = [shop.send("work", name, name.split()[0], name.endswith("killed"), retry_on_error=True) for name in names]
    assert [shop.result(id) for id in ids] == [f"{name}:done" for name in names]
    let_pass(database, GRACE)
    wait_for(lambda: len(shop.arrived()) == len(names))
    assert shop.changed() == Counter(names)
    assert shop.arrived() == dict.fromkeys(names, 1)
    assert (f"{names[0]} as it was",) in query(shop.database, "SELECT message FROM arrived")
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))


@pytest.mark.slow
@on_postgresql
def test_workers_that_are_killed_lose_nothing(make_shop: Callable[..., Shop], database: Database) -> None:
    """With twelve tasks under way: before the change, behind it, and between COMMIT and send."""
    shop, ids = make_shop(), list[str]()
    shop.keep(WORKERS)
    for lock in range(1, ROUNDS + 1):
        with shop.locked(lock) as until:
            ids += [shop.send("storm", len(ids) + number, lock) for number in range(TOGETHER)]
            until(2 * TOGETHER // 3 + 1)  # one task of a process sends at a time
            shop.kill()
    assert [shop.result(id) for id in ids] == [*range(len(ids))]
    let_pass(database, GRACE)
    names = [f"storm {number}" for number in range(len(ids))]
    assert shop.changed() == Counter(names)
    wait_for(lambda: len(shop.arrived()) == len(names))
    assert shop.arrived() == dict.fromkeys(names, 1)
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))


@pytest.mark.slow
@on_postgresql
def test_each_task_ends_once(make_shop: Callable[..., Shop], url: str, role: str) -> None:
    """Duplicates, conflicts, a failed COMMIT, a pool of one connection for four tasks, and an outage of the database."""
    for (table,) in query(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        query(url, f"GRANT ALL ON {table} TO {role}")
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.2}
    shop = make_shop(make_url(url).set(username=role).render_as_string(hide_password=False), pool=pool)
    shop.database = url
    shop.keep(2)
    assert shop.result(shop.send("pay", 7)) == [7, 100]
    assert [shop.result(shop.send("pay", *arguments)) for arguments in ((7, 100), (7, 100, 0))] == [[7, 100]] * 2
    assert "another message" in str(shop.result(shop.send("pay", 7, 200)))
    with shop.locked(1) as until:
        both = [shop.send("pay", 8, 100, 1)]
        until(1)
        both.append(shop.send("pay", 8, 100, 1))
        wait_for(lambda: "is kept, and waits" in shop.log.read_text())
    assert [shop.result(id) for id in both] == [[8, 100]] * 2
    assert shop.result(shop.send("deferred", "one")) == "one"
    assert "duplicate key" in str(shop.result(shop.send("deferred", "one")))
    with shop.locked(2):  # a timeout in the body rolls back
        assert isinstance(shop.result(shop.send("pay", 9, 100, 2, timeout=0.3)), TimeoutError)
    many = [shop.send("pay", 100 + number) for number in range(20)]
    assert [shop.result(id) for id in many] == [[100 + number, 100] for number in range(20)]
    wait_for(lambda: len(shop.arrived()) == 22)
    # The database is away: no result is reported, also if a timeout would end the wait.
    query(url, f"ALTER ROLE {role} NOLOGIN")
    end_sessions(url, role)
    seen = shop.log.read_text().count("is kept, and waits")
    away = [shop.send("pay", 200 + number, timeout=0.3) for number in range(6)]
    wait_for(lambda: shop.log.read_text().count("is kept, and waits") >= seen + 12)
    query(url, f"ALTER ROLE {role} LOGIN")
    assert [shop.result(id) for id in away] == [[200 + number, 100] for number in range(6)]
    paid = [7, 8, *range(100, 120), *range(200, 206)]
    assert shop.changed() == Counter([*(f"paid {number}" for number in paid), "deferred one"])
    wait_for(lambda: len(shop.arrived()) == len(paid))
    assert set(shop.arrived().values()) == {1}


class Spool(InMemoryBroker):
    """A broker in memory whose messages can be acknowledged."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__()
        self.messages, self.acked = messages, list[bytes]()

    async def listen(self) -> AsyncGenerator[Any, None]:
        for message in self.messages:
            yield AckableMessage(data=message, ack=partial(self.acked.append, message))


class Desk:
    """Tasks in the process of a test, as taskiq has it."""

    def __init__(self, url: str) -> None:
        plain = create_engine(url)
        with plain.begin() as connection:
            connection.execute(text(TABLES[0].replace("TABLE", "TABLE IF NOT EXISTS")))
        plain.dispose()
        url = url.replace("sqlite:", "sqlite+aiosqlite:")
        self.engine = create_async_engine(url, connect_args={"timeout": 0.1})
        self.runs, self.broker, self.inbox = list[Any](), Spool(), AsyncInbox(self.engine)
        idempotent = install(self.broker, self.inbox)
        injected = TaskiqDepends(dict, kwargs={"by": object()})  # another one in each process

        @self.broker.task("note")
        async def note(what: str) -> None:
            self.runs.append(what)

        @self.broker.task("pay")
        @idempotent("shop.pay", key="order_id")
        async def pay(order_id: int, cents: int = 100, more: dict[str, object] = injected) -> list[int]:
            self.runs.append(f"pay {order_id}")
            await session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": f"pay {order_id}"})
            await note.kiq(f"sent {order_id}")
            if cents < 0:
                raise ValueError(cents)
            await asyncio.sleep(0 if order_id < 90 else 60)
            return [order_id, cents]

        @self.broker.task("both")
        @idempotent("shop.both")
        async def both() -> list[Any]:
            return [await pay(21), await pay(22)]  # as functions, in one transaction

        self.note, self.pay, self.both = note, pay, both

    def message(self, *arguments: Any, **labels: Any) -> bytes:
        kicker = self.pay.kicker().with_labels(**labels)
        return self.broker.formatter.dumps(kicker._prepare_message(*arguments)).message

    async def receive(self, message: bytes, ack_type: AcknowledgeType) -> None:
        """Run a message as a worker does."""
        self.broker.messages = (message,)
        receiver = Receiver(self.broker, ack_type=ack_type, max_async_tasks=1)
        async for each in self.broker.listen():
            await receiver.callback(each)

    async def until(self, count: int) -> None:
        await asyncio.to_thread(wait_for, lambda: len(self.runs) >= count)

    def run(self, wanted: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await self.broker.startup()
            try:
                await wanted()
            finally:
                await self.broker.shutdown()
                await self.engine.dispose()

        asyncio.run(main())


@pytest.fixture
def desk(url: str) -> Desk:
    return Desk(url)


def test_tasks_in_the_process_of_a_test(desk: Desk) -> None:
    """Results, duplicates, conflicts, failures and functions."""

    async def act() -> None:
        for task in (await desk.pay.kiq(7), await desk.pay.kiq(order_id=7, cents=100)):
            assert (await task.wait_result(timeout=20)).return_value == [7, 100]
        conflict = await (await desk.pay.kiq(7, 200)).wait_result(timeout=20)
        assert isinstance(conflict.error, Conflict)
        failed = await (await desk.pay.kiq(8, -1)).wait_result(timeout=20)
        assert isinstance(failed.error, ValueError)
        both = await (await desk.both.kiq()).wait_result(timeout=20)
        assert both.return_value == [[21, 100], [22, 100]]
        await desk.until(7)
        with pytest.raises(ConfigurationError, match="use .kiq"):
            await desk.pay(1)  # as a function, and no task runs

    desk.run(act)
    assert Counter(desk.runs) == Counter([f"pay {n}" for n in (7, 8, 21, 22, 1)] + [f"sent {n}" for n in (7, 21, 22)])


def test_what_a_worker_injects_is_not_compared(desk: Desk, url: str) -> None:
    async def act() -> None:
        assert (await (await desks[0].pay.kiq(7)).wait_result(timeout=20)).return_value == [7, 100]

    desks = [desk]
    desk.run(act)
    desks[0] = Desk(url)
    desks[0].run(act)
    assert desks[0].runs == []


@pytest.mark.parametrize("ack", list(AcknowledgeType), ids=lambda ack: ack.value)
def test_no_task_is_acknowledged_before_its_commit(desk: Desk, ack: AcknowledgeType) -> None:
    """A receiver of one's own could do so; the message comes back to a worker that does not."""

    async def act() -> None:
        message = desk.message(7)
        if ack is AcknowledgeType.WHEN_RECEIVED:
            with pytest.raises(ConfigurationError, match="use --ack-type when_saved"):
                await desk.receive(message, ack)
            assert desk.runs == []
        else:
            await desk.receive(message, ack)
            await desk.until(2)
        early = ack in (AcknowledgeType.WHEN_RECEIVED, AcknowledgeType.MANUAL)
        assert desk.broker.acked == ([] if early else [message])

    desk.run(act)


def test_a_task_that_is_cancelled_is_not_acknowledged(desk: Desk) -> None:
    """taskiq takes a cancellation for a failure, and acknowledges it."""

    async def act() -> None:
        running = asyncio.create_task(desk.receive(desk.message(91), AcknowledgeType.WHEN_SAVED))
        await desk.until(1)
        running.cancel()
        with pytest.raises(ConfigurationError, match="was not acknowledged"):
            await running
        assert desk.broker.acked == []

    desk.run(act)
    assert desk.runs == ["pay 91"]


def test_a_database_that_is_away_fails_no_task(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite's only write lock is taken meanwhile, for longer than the task's timeout."""

    async def act() -> None:
        async with desk.engine.connect() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            task = await desk.pay.kicker().with_labels(timeout=0.2).kiq(7)
            await asyncio.to_thread(wait_for, lambda: "is kept, and waits" in caplog.text)
        assert (await task.wait_result(timeout=20)).return_value == [7, 100]

    desk.run(act)


def test_a_timeout_ends_the_body_alone(desk: Desk) -> None:
    async def act() -> None:
        late = await (await desk.pay.kicker().with_labels(timeout=0.1).kiq(92)).wait_result(timeout=20)
        assert isinstance(late.error, TimeoutError)

    desk.run(act)
    assert desk.runs == ["pay 92"]


def refused(broker: AsyncBroker, said: str) -> None:
    install(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite:///nowhere.db")))
    broker.is_worker_process = True
    middleware = broker.middlewares[-1]
    with pytest.raises(ConfigurationError, match=said):
        asyncio.run(middleware.startup())  # type: ignore[arg-type]


def test_each_refusal_names_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ListQueueBroker("redis://localhost"), "ListQueueBroker is not supported: use AioPikaBroker")
    refused(InMemoryBroker().with_serializer(PickleSerializer()), "may run code from the queue: use taskiq's JSONSerializer")
    broker = InMemoryBroker()
    broker.task("early", ack_type="when_received")(asyncio.sleep)
    refused(broker, "use --ack-type when_saved")
    monkeypatch.setattr("sys.argv", ["taskiq", "worker", "shop:broker", "--ack-type", "WHEN_RECEIVED"])
    refused(InMemoryBroker(), "use --ack-type when_saved")


def test_what_cannot_be_idempotent_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigurationError, match="give each one an inbox"):
        install(InMemoryBroker(), desk.inbox)
    idempotent = install(InMemoryBroker(), AsyncInbox(create_async_engine("sqlite+aiosqlite:///nowhere.db")))
    with pytest.raises(ConfigurationError, match="has to be an async def function"):
        idempotent("shop.pay")(lambda order_id: None)


@pytest.mark.parametrize(
    ("broker", "identity"),
    [
        (AioPikaBroker("amqp://user:secret@rabbit:5673/shop"), "taskiq:rabbit:5673/shop"),
        (AioPikaBroker(), "taskiq:localhost:5672/"),
        (InMemoryBroker(), "taskiq:InMemoryBroker"),
    ],
)
def test_the_identity_of_a_broker_has_no_password(broker: AsyncBroker, identity: str) -> None:
    assert Idempotency(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite://"))).identity == identity


@pytest.mark.slow
@on_postgresql
def test_a_worker_that_could_lose_tasks_does_not_start(url: str, vhost: str, tmp_path: Path) -> None:
    """taskiq's own command: each process ends with the error."""
    environment = {**os.environ, "SHOP_BROKER": vhost, "SHOP_BACKEND": ask("redis", "create_database"), "IDEMP_DATABASE_URL": url}
    command = [sys.executable, "-m", "taskiq", "worker", f"{TASKS}:broker", "--workers", "1", "--max-fails", "1"]
    done = subprocess.run(
        [*command, "--ack-type", "when_received"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert (
        "ConfigurationError: a task that is acknowledged before its COMMIT may be lost: use --ack-type when_saved" in done.stdout
    )
    assert done.returncode


@pytest.mark.slow
def test_one_output_is_to_blame_and_its_neighbours_are_sent(vhost: str) -> None:
    """One asks for a delay, for which there is no queue; later nothing takes any message."""

    def message(**labels: Any) -> bytes:
        labelled = {name: str(value) for name, value in labels.items()}
        return TaskiqMessage(task_id="7", task_name="note", labels=labelled, args=[], kwargs={}).model_dump_json().encode()

    async def send(*bodies: bytes) -> list[Any]:
        ctx = BaseContext("shop", {}, None, None)
        for body in bodies:
            ctx.forward(body, to="taskiq")
        return [answer and answer.own for answer in await asyncio.to_thread(outlet.publish, ctx.outputs(), 2.0)]

    async def act() -> None:
        await broker.startup()
        assert await send(message(), message(delay=1), message()) == [None, True, None]
        with closing(pika.BlockingConnection(pika.URLParameters(vhost))) as connection:
            connection.channel().queue_delete("taskiq")
        assert await send(message()) == [True]
        await broker.write_conn.close()  # type: ignore[union-attr]
        with pytest.raises(TimeoutError):
            await send(message())
        await broker.shutdown()

    broker = AioPikaBroker(vhost)
    outlet = install(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite:///nowhere.db")))
    asyncio.run(act())
