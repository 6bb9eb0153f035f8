"""Idempotent actors of dramatiq: real workers on real RabbitMQ and Redis, killed at every turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, Middleware, Worker
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import AsyncIO, CurrentMessage, MiddlewareError, Retries
from dramatiq.results import ResultFailure, Results
from dramatiq.results.backends import RedisBackend, StubBackend
from dramatiq.results.errors import ResultMissing
from sqlalchemy import create_engine, make_url, text

from idemp import ConfigurationError, Inbox
from idemp.context import BaseContext
from idemp.integrations.dramatiq import IdempotentActors, install, session
from idemp.sql.engine import Database
from tests.integrations.dramatiq_actors import WAYS, follow_ups, open_broker
from tests.integrations.service import TABLES, Workers, broker, every_broker, make_shop, on_postgresql, on_rabbitmq
from tests.servers import ask
from tests.servers.databases import query
from tests.sql.test_outages import end_sessions, role
from tests.worker.test_loop import wait_for
from tests.world import let_pass

__all__ = ["broker", "make_shop", "role"]

ACTORS = "tests.integrations.dramatiq_actors"
TOGETHER, WORKERS = 12, 3  # messages under way, and the workers that are killed at once
ROUNDS = {"rabbitmq": 4, "redis": 1}
GRACE = (
    20.0  # seconds for which relays leave outputs to the process that has stored them, because Redis does not say `redelivered`
)


class Shop(Workers):
    """A client of the actors, and their workers."""

    def __init__(self, database: str, broker: str, folder: Path, **settings: object) -> None:
        results = ask("redis", "create_database")
        self.client, self.backend = open_broker(broker), RedisBackend(url=results)
        said = {f"SHOP_{name.upper()}": repr(value) for name, value in settings.items()}
        said["dramatiq_queue_prefetch"] = "4"  # as many as there are threads
        super().__init__(ACTORS, database, folder, {"SHOP_BROKER": broker, "SHOP_BACKEND": results, **said})

    def keep(self, workers: int) -> None:
        """Start workers, which have successors if they are killed."""
        self.tell(workers)
        self.await_workers(workers)

    def await_workers(self, count: int) -> None:
        self.pids[:] = [self.pid() for _ in range(count)]

    def kill(self) -> None:
        """Kill all workers; wait for their successors."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.await_workers(len(self.pids))

    def close(self) -> None:
        super().close()
        self.client.close()
        self.backend.client.close()
        if isinstance(self.client, RedisBroker):
            self.client.client.close()

    def send(self, name: str, *arguments: Any, id: str | None = None, **options: Any) -> Message[Any]:
        message: Message[Any] = Message("default", name, arguments, {}, options, **({"message_id": id} if id else {}))
        self.client.enqueue(message)
        return message

    def result(self, message: Message[Any]) -> Any:
        """Wait for the end of a message, and return its result or its error."""
        found: list[Any] = []

        def ended() -> bool:
            with suppress(ResultMissing):
                try:
                    found.append(message.get_result(backend=self.backend))
                except ResultFailure as error:
                    found.append(error)
            return bool(found)

        try:
            wait_for(ended)
        except AssertionError:
            raise AssertionError((message, self.log.read_text()[-3000:])) from None
        return found[0]


@pytest.mark.slow
@on_postgresql
@every_broker
def test_what_an_actor_sends_goes_out_after_commit(make_shop: Callable[..., Shop], broker: str, database: Database) -> None:
    """By each way, and also if the process is killed between COMMIT and send."""
    shop = make_shop()
    shop.keep(2)
    expected: list[tuple[Message[Any], str]] = []
    names, arrivals = list[str](), list[str]()
    ways = [*WAYS, "retry", "error", "piped", "on_success"]
    for kill in (False, True):
        for way in ["send", "piped"] if kill and broker.startswith("redis") else ways:
            name = f"{way} killed" if kill else way
            piped = {"pipe_target": Message("default", "arrive", (), {}, {}).asdict()} if way == "piped" else {}
            called = {"on_success": "arrive"} if way == "on_success" else {}
            expected.append((shop.send("work", name, way, kill, **piped, **called), f"{name}:done"))
            names.append(name)
            arrivals += follow_ups(way, name)
    assert [shop.result(message) for message, _ in expected] == [result for _, result in expected]
    if broker.startswith("redis"):
        let_pass(database, GRACE)
    wait_for(lambda: len(shop.arrived()) >= len(arrivals), 60)
    assert shop.changed() == Counter(names)
    assert shop.arrived() == dict.fromkeys(arrivals, 1)
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))


@pytest.mark.slow
@on_postgresql
@every_broker
def test_workers_that_are_killed_lose_nothing(make_shop: Callable[..., Shop], broker: str, database: Database) -> None:
    """With twelve messages under way: before the change, behind it, and between COMMIT and send."""
    shop, messages = make_shop(pool={"pool_size": 10}), list[Message[Any]]()
    shop.keep(WORKERS)
    for lock in range(1, ROUNDS["redis" if broker.startswith("redis") else "rabbitmq"] + 1):
        with shop.locked(lock) as until:
            messages += [shop.send("storm", len(messages) + number, lock) for number in range(TOGETHER)]
            until(TOGETHER)
            shop.kill()
    assert [shop.result(message) for message in messages] == [*range(len(messages))]
    if broker.startswith("redis"):
        let_pass(database, GRACE)
    names = [f"storm {number}" for number in range(len(messages))]
    assert shop.changed() == Counter(names)
    wait_for(lambda: len(shop.arrived()) == len(names))
    assert shop.arrived() == dict.fromkeys(names, 1)
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))


@pytest.mark.slow
@on_postgresql
@on_rabbitmq
def test_each_message_ends_once(make_shop: Callable[..., Shop], url: str, role: str) -> None:
    """Duplicates, conflicts, failures, a pool of one connection for four threads, and an outage of the database.

    The actors have no retries, so that each one that is counted makes a dead letter.
    """
    for (table,) in query(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        query(url, f"GRANT ALL ON {table} TO {role}")
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.2}
    shop = make_shop(make_url(url).set(username=role).render_as_string(hide_password=False), pool=pool)
    shop.database = url
    shop.keep(2)
    # A duplicate returns the result of the first run, and sends nothing new.
    first = shop.send("pay", 7)
    assert shop.result(first) == [7, 100]
    shop.backend.client.flushdb()
    shop.send("pay", 7, id=first.message_id)
    assert shop.result(first) == [7, 100]
    # The key is an argument. With the default, which may be sent, it is the same message; another amount is a conflict.
    assert [shop.result(shop.send("pay", 7, *more)) for more in ((), (100,))] == [[7, 100]] * 2
    assert "Conflict" in str(shop.result(shop.send("pay", 7, 200)))
    # Another one holds the claim: the second waits, and has the result of the first.
    with shop.locked(1) as until:
        both = [shop.send("pay", 8, 100, 1, time_limit=60_000)]
        until(1)
        both.append(shop.send("pay", 8, 100, 1))
        wait_for(lambda: "is kept, and waits" in shop.log.read_text())
    assert [shop.result(message) for message in both] == [[8, 100]] * 2
    # A COMMIT that fails is no success.
    assert shop.result(shop.send("deferred", "one")) == "one"
    assert "duplicate key" in str(shop.result(shop.send("deferred", "one")))
    # A time limit in the body rolls back.
    assert "TimeLimitExceeded" in str(shop.result(shop.send("slow", 2)))
    # All threads want the one connection of their process.
    many = [shop.send("pay", 100 + number) for number in range(8)]
    assert [shop.result(message) for message in many] == [[100 + number, 100] for number in range(8)]
    # The database is away for longer than the time limit: no result is reported, and no message is rejected.
    query(url, f"ALTER ROLE {role} NOLOGIN")
    end_sessions(url, role)
    away = [shop.send("pay", 200 + number) for number in range(4)]
    seen = shop.log.read_text().count("is kept, and waits")
    wait_for(
        lambda: shop.log.read_text().count("is kept, and waits") >= seen + 16
    )  # each waits for 0.1 s, then for twice as long, and so on
    query(url, f"ALTER ROLE {role} LOGIN")
    assert [shop.result(message) for message in away] == [[200 + number, 100] for number in range(4)]
    paid = [7, 8, *range(100, 108), *range(200, 204)]
    assert shop.changed() == Counter([*(f"paid {number}" for number in paid), "deferred one"])
    wait_for(lambda: len(shop.arrived()) == len(paid))
    assert set(shop.arrived().values()) == {1}
    assert shop.client.get_queue_message_counts("default")[2] == 3  # the conflict, the COMMIT and the time limit


@pytest.mark.slow
@on_postgresql
@on_rabbitmq
def test_a_worker_that_could_lose_messages_does_not_start(broker: str, url: str, tmp_path: Path) -> None:
    """dramatiq's own command ends, with the error; so it does if the tables belong to another broker."""
    (tmp_path / "shop.py").write_text(
        "import dramatiq, os\n"
        "from dramatiq.brokers.rabbitmq import RabbitmqBroker\n"
        "from sqlalchemy import create_engine\n"
        "from idemp import Inbox\n"
        "from idemp.integrations.dramatiq import install\n"
        "broker = RabbitmqBroker(url=os.environ['SHOP_BROKER'], confirm_delivery='SHOP_CONFIRMS' in os.environ)\n"
        "dramatiq.set_broker(broker)\n"
        "install(broker, Inbox(create_engine(os.environ['IDEMP_DATABASE_URL'])))\n"
    )

    def start(**settings: str) -> str:
        environment = {**os.environ, "SHOP_BROKER": broker, "IDEMP_DATABASE_URL": url, "PYTHONPATH": str(Path.cwd()), **settings}
        command = [sys.executable, "-m", "dramatiq", "shop", "-p", "1", "-t", "1"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 1, done.stdout
        return done.stdout

    assert "a lost message counts as sent: pass confirm_delivery=True to RabbitmqBroker" in start()
    assert "the relay of this worker cannot start" in start(
        SHOP_CONFIRMS="1", IDEMP_DATABASE_URL="postgresql+psycopg://127.0.0.1:1/x"
    )


class Failing(StubBroker):
    """A broker that sends no retry for a while."""

    failures = 0
    failure: Exception = ConnectionClosed("away")

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        if "retries" in message.options and delay is not None and self.failures:
            self.failures -= 1
            raise self.failure
        return super().enqueue(message, delay=delay)


class Desk:
    """Actors in the process of a test, as dramatiq has it."""

    def __init__(self, url: str) -> None:
        self.runs, self.engine = list[Any](), create_engine(url, connect_args={"timeout": 0.1})
        self.broker, self.backend = Failing(), StubBackend()
        self.broker.add_middleware(Results(backend=self.backend, store_results=True))
        self.inbox = Inbox(self.engine)
        self.idempotent = idempotent = install(self.broker, self.inbox)
        with self.engine.begin() as connection:
            connection.execute(text(TABLES[0]))

        @dramatiq.actor(broker=self.broker)
        def note(*what: Any) -> None:
            self.runs.append(what[-1])

        @dramatiq.actor(broker=self.broker, min_backoff=1, max_backoff=2, max_retries=1)
        @idempotent("shop.pay", key="order_id")
        def pay(order_id: int, cents: int = 100) -> list[int]:
            self.runs.append(f"pay {order_id}")
            session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": f"pay {order_id}"})
            if order_id < 0 and self.runs.count(f"pay {order_id}") == 1:
                note.send("never")
                raise LookupError(order_id)
            note.send(f"sent {order_id}")
            note.send_with_options(args=(f"delayed {order_id}",), delay=10)
            return [order_id, cents]

        @dramatiq.actor(broker=self.broker, max_retries=0)
        @idempotent("shop.both")
        def both() -> list[Any]:
            return [pay(21), pay(22)]  # as functions, in one transaction

        self.note, self.pay, self.both = note, pay, both

    @contextmanager
    def working(self) -> Iterator[None]:
        worker = Worker(self.broker, worker_timeout=10, worker_threads=2)
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    def close(self) -> None:
        self.broker.close()
        self.engine.dispose()


@pytest.fixture
def desk(url: str) -> Iterator[Desk]:
    desk = Desk(url)
    yield desk
    desk.close()


def test_actors_in_the_process_of_a_test(desk: Desk, url: str) -> None:
    """Results, pipelines, callbacks, duplicates, conflicts and functions."""
    with desk.working():
        first, second = desk.pay.message(7), desk.pay.message(order_id=7)
        for message in (first, first, second):
            desk.broker.enqueue(message)
        dramatiq.pipeline([desk.pay.message(8), desk.note.message()], broker=desk.broker).run()
        desk.pay.send_with_options(args=(9,), on_success=desk.note)
        both = desk.both.send()
        assert both.get_result(backend=desk.backend, block=True) == [[21, 100], [22, 100]]
        expected = Counter([f"pay {number}" for number in (7, 8, 9, 21, 22)])
        expected += Counter([f"{how} {number}" for number in (7, 8, 9, 21, 22) for how in ("sent", "delayed")])
        wait_for(lambda: len(desk.runs) >= 17)
        assert Counter(str(run) for run in desk.runs) == expected + Counter(["[8, 100]", "[9, 100]"])
        for message in (first, second):
            assert message.get_result(backend=desk.backend, block=True) == [7, 100]
        conflict = desk.pay.send(7, 200)
        with pytest.raises(ResultFailure, match="Conflict"):
            conflict.get_result(backend=desk.backend, block=True)
        dead = [(message.message_id, message.options["retries"]) for message in desk.broker.dead_letters]
        assert dead == [(conflict.message_id, 1)]  # at the first failure, which dramatiq counts, too
    with pytest.raises(ConfigurationError, match="use .send"):
        desk.pay(1)  # as a function, and no actor runs


def test_a_retry_that_cannot_be_sent_keeps_its_message(desk: Desk) -> None:
    """dramatiq would log the error of the broker, and acknowledge the message."""
    desk.broker.failures = 3
    with desk.working():
        message = desk.pay.send(-1)
        assert message.get_result(backend=desk.backend, block=True, timeout=60_000) == [-1, 100]
        assert desk.broker.failures == 0
        wait_for(lambda: "delayed -1" in desk.runs)
    assert Counter(desk.runs) == Counter({"pay -1": 2, "sent -1": 1, "delayed -1": 1})


def test_a_database_that_is_away_uses_up_no_retry(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """The actor has none; SQLite's only write lock is taken meanwhile."""
    with desk.working():
        with desk.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            message = desk.both.send()
            wait_for(lambda: caplog.text.count("is kept, and waits") >= 2)
        assert message.get_result(backend=desk.backend, block=True) == [[21, 100], [22, 100]]
    assert desk.broker.dead_letters == []


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def Refund(desk: Desk) -> Any:  # noqa: N802 - it makes a class
    """Return an actor that is a class."""

    class Refund(dramatiq.GenericActor):
        class Meta:
            broker, max_retries = desk.broker, 0

        @logged
        @desk.idempotent("shop.refund", key="order_id")
        def perform(self, order_id: int) -> None:
            desk.runs.append(f"refund {order_id}")
            desk.note.send("sent")
            if order_id < 0:
                raise LookupError(order_id)

    return Refund


def audited(desk: Desk) -> Any:
    """Return an actor whose method is bound."""

    class Books:
        @desk.idempotent("shop.audit", key="order_id")
        def audit(self, order_id: int) -> None:
            desk.runs.append(f"audit {order_id}")
            desk.note.send("sent")
            if order_id < 0:
                raise LookupError(order_id)

    return dramatiq.actor(broker=desk.broker, max_retries=0)(Books().audit)


def shipped(desk: Desk) -> Any:
    """Return an actor with another decorator between."""

    @dramatiq.actor(broker=desk.broker, max_retries=0)
    @logged
    @logged
    @desk.idempotent("shop.ship", key="order_id")
    def ship(order_id: int) -> None:
        desk.runs.append(f"ship {order_id}")
        desk.note.send("sent")
        if order_id < 0:
            raise LookupError(order_id)

    return ship


@pytest.mark.parametrize("make", [Refund, audited, shipped])
def test_methods_and_decorators_between(desk: Desk, make: Callable[[Desk], Any]) -> None:
    """Other keys than the message id, a failure and duplicates."""
    actor = make(desk)
    with desk.working():
        for message in (actor.message(-1), first := actor.message(1), first, actor.message(order_id=1)):
            desk.broker.enqueue(message)
        desk.broker.join("default", fail_fast=False, timeout=60_000)
        wait_for(lambda: "sent" in desk.runs)
    assert Counter(run.split()[-1] for run in desk.runs) == Counter({"-1": 1, "1": 1, "sent": 1})
    assert [message.args for message in desk.broker.dead_letters] == [(-1,)]


def test_a_worker_refuses_what_no_actor_runs(desk: Desk) -> None:
    """Idempotency would be switched off without a word."""

    def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(function)

    def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def call(*args: Any) -> Any:
            return function(*args)

        return call

    desk.idempotent("shop.alone")(lambda: None)
    for name, between in (("hidden", hidden), ("awaited", awaited)):
        desk.broker.add_middleware(AsyncIO()) if name == "awaited" else None
        dramatiq.actor(broker=desk.broker, actor_name=name)(between(desk.idempotent(f"shop.{name}")(lambda: None)))
    with pytest.raises(ConfigurationError, match="no actor runs shop.alone, shop.awaited, shop.hidden: mark it right below"):
        Worker(desk.broker).start()


def test_a_retry_has_the_arguments_that_came(desk: Desk) -> None:
    """What the body has put into them could not be sent, and would be a conflict."""

    @dramatiq.actor(broker=desk.broker, min_backoff=1, max_backoff=2, max_retries=3)
    @desk.idempotent("shop.stamp")
    def stamp(order: dict[str, Any], *, more: list[Any]) -> None:
        desk.runs.append(f"{order} {more}")
        order["at"] = datetime.now(UTC)
        more.append(order)
        if len(desk.runs) < 3:
            raise LookupError

    with desk.working():
        stamp.send({}, more=[])
        wait_for(lambda: len(desk.runs) == 3)
    assert desk.runs == ["{} []"] * 3
    assert desk.broker.dead_letters == []


def test_a_retry_that_can_never_be_sent_is_dead(desk: Desk) -> None:
    """It would be acknowledged, or keep its thread for good."""
    desk.broker.failures, desk.broker.failure = 1, TypeError("not JSON")
    with desk.working():
        message = desk.pay.send(-1)
        wait_for(lambda: desk.broker.dead_letters != [])
    assert [each.message_id for each in desk.broker.dead_letters] == [message.message_id]
    assert desk.runs == ["pay -1"]


def test_a_message_under_its_own_id_waits_for_commit(desk: Desk) -> None:
    """A copy of the running message is no retry of it."""
    desk.broker.add_middleware(CurrentMessage())

    @dramatiq.actor(broker=desk.broker, max_retries=0)
    @desk.idempotent("shop.pass_on")
    def pass_on(number: int) -> None:
        message: Any = CurrentMessage.get_current_message()
        desk.broker.enqueue(message.copy(actor_name="note"))
        if number < 0:
            raise LookupError(number)

    with desk.working():
        pass_on.send(-1)
        wait_for(lambda: desk.broker.dead_letters != [])
        pass_on.send(1)
        wait_for(lambda: 1 in desk.runs)
    assert desk.runs == [1]


def test_a_conflict_is_dead_at_once_whatever_retry_when_says(desk: Desk) -> None:
    @dramatiq.actor(broker=desk.broker, min_backoff=1, max_backoff=2, retry_when=lambda retries, _: retries < 4)
    @desk.idempotent("shop.price", key="article")
    def price(article: int, cents: int) -> None:
        desk.runs.append(cents)

    with desk.working():
        price.send(1, 100)
        wait_for(lambda: desk.runs == [100])
        price.send(1, 200)
        wait_for(lambda: desk.broker.dead_letters != [])
    assert [message.options["retries"] for message in desk.broker.dead_letters] == [1]
    assert desk.runs == [100]


def test_a_deploy_that_adds_an_argument_with_a_default(url: str) -> None:
    """A message that was handled before is a duplicate, not a conflict."""
    engine, backend = create_engine(url), StubBackend()

    def before(order_id: int) -> str:
        return f"before {order_id}"

    def after(order_id: int, currency: str = "EUR") -> str:
        return f"after {order_id} {currency}"

    message = Message("default", "pay", (7,), {}, {})
    for function in (before, after):
        broker = StubBroker(middleware=[Retries(max_retries=0), Results(backend=backend, store_results=True)])
        dramatiq.actor(broker=broker, actor_name="pay")(install(broker, Inbox(engine))("shop.pay", key="order_id")(function))
        broker.enqueue(message)
        worker = Worker(broker, worker_timeout=10, worker_threads=1)
        worker.start()
        try:
            assert message.get_result(backend=backend, block=True) == "before 7"
            broker.join("default", timeout=60_000)
        finally:
            worker.stop()
        backend.results.clear()
    engine.dispose()


FAULTS: list[tuple[Callable[[], Any], str]] = [
    (RabbitmqBroker, "pass confirm_delivery=True"),
    (lambda: RabbitmqBroker(confirm_delivery=True, middleware=[]), "without the middleware Retries"),
]


@pytest.mark.parametrize(("make", "said"), FAULTS)
def test_each_refusal_names_its_fix(make: Callable[[], Any], said: str) -> None:
    broker = make()
    install(broker, Inbox(create_engine("sqlite:///nowhere.db")))
    with pytest.raises(ConfigurationError, match=said):
        Worker(broker).start()


def test_another_encoder_than_json_is_refused(desk: Desk) -> None:
    dramatiq.set_encoder(dramatiq.PickleEncoder())
    try:
        with pytest.raises(ConfigurationError, match="may run code from the queue"):
            Worker(desk.broker).start()
    finally:
        dramatiq.set_encoder(dramatiq.JSONEncoder())


def test_gevent_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemp.integrations.dramatiq.is_gevent_active", lambda: True)
    with pytest.raises(ConfigurationError, match="gevent is not supported"):
        Worker(desk.broker).start()


def test_what_cannot_be_idempotent_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigurationError, match="give each one an inbox"):
        install(StubBroker(), desk.inbox)
    broker = StubBroker()
    idempotent = install(broker, Inbox(create_engine("sqlite:///nowhere.db")))
    with pytest.raises(ConfigurationError, match="no argument 'order', which is its key"):
        idempotent("shop.pay", key="order")(lambda order_id: None)
    with pytest.raises(ConfigurationError, match="retention"):
        idempotent("shop.pay", retention="often")

    async def pay() -> None: ...

    with pytest.raises(ConfigurationError, match="pay is async def: .* has to be a plain function"):
        idempotent("shop.pay")(pay)
    for actor in (desk.pay, Refund(desk)):
        with pytest.raises(ConfigurationError, match="is an actor already: put this decorator below @dramatiq.actor"):
            idempotent("shop.pay")(actor)
    with pytest.raises(ConfigurationError, match="pay has the name 'shop.pay': give .* another one"):
        desk.idempotent("shop.pay")(lambda order_id: None)


@pytest.mark.parametrize(
    ("broker", "identity"),
    [
        (RabbitmqBroker(url="amqp://user:secret@rabbit:5673/shop"), "rabbitmq:shop"),
        (RabbitmqBroker(url=["amqp://one/%2F", "amqp://two/%2F"]), "rabbitmq:/"),
        (RedisBroker(url="redis://:secret@cache:6380/2", namespace="shop"), "redis:cache:6380/2/shop"),
        (StubBroker(), "dramatiq:StubBroker"),
    ],
)
def test_the_identity_of_a_broker_has_no_password(broker: Any, identity: str) -> None:
    assert IdempotentActors(broker, Inbox(create_engine("sqlite://"))).identity == identity


class Closed(Middleware):
    """Refuses the messages of one actor."""

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        if message.actor_name == "closed":
            raise MiddlewareError("closed")


def test_one_output_is_to_blame_and_its_neighbours_are_sent() -> None:
    broker = StubBroker()
    broker.declare_queue("default")
    broker.add_middleware(Closed())
    outlet, ctx = IdempotentActors(broker, Inbox(create_engine("sqlite://"))), BaseContext("shop", {}, None, None)
    for queue, actor in (("default", "note"), ("nowhere", "note"), ("default", "closed"), ("default", "note")):
        ctx.forward(Message(queue, actor, (), {}, {}).encode(), to=queue)
    assert [answer and answer.own for answer in outlet.publish(ctx.outputs(), 1.0)] == [None, True, True, None]


@pytest.mark.slow
def test_a_broker_that_is_away_is_nobodys_fault() -> None:
    outlet = IdempotentActors(RabbitmqBroker(url="amqp://127.0.0.1:1", confirm_delivery=True), Inbox(create_engine("sqlite://")))
    ctx = BaseContext("shop", {}, None, None)
    ctx.forward(Message("default", "note", (), {}, {}).encode(), to="default")
    with pytest.raises(ConnectionClosed):
        outlet.publish(ctx.outputs(), 1.0)
