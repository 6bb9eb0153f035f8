"""Idempotent tasks of Celery: real prefork workers on real RabbitMQ and Redis, killed at every turn."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import celery as canvas
import kombu.exceptions
import pytest
from celery import Celery
from celery.app.trace import trace_task
from celery.contrib.testing.worker import start_worker
from sqlalchemy import create_engine, make_url, text

from idemp import ConfigurationError, Inbox
from idemp.context import BaseContext
from idemp.errors import Conflict
from idemp.integrations._capture import capturing, current
from idemp.integrations.celery import CeleryBroker, IdempotentTask, install, session
from idemp.sql.engine import Database
from tests.integrations.celery_tasks import WAYS, follow_ups
from tests.integrations.service import TABLES, Workers, broker, every_broker, make_shop, on_postgresql, on_rabbitmq
from tests.servers import ask
from tests.servers.databases import query
from tests.servers.process import has_ended
from tests.sql.test_outages import end_sessions, role
from tests.worker.test_loop import wait_for
from tests.world import let_pass

pytestmark = pytest.mark.slow
__all__ = ["broker", "make_shop", "role"]

TASKS = "tests.integrations.celery_tasks"
TOGETHER, WORKERS = 12, 4  # tasks under way, and the workers that are killed at once
ROUNDS = {"rabbitmq": 3, "redis": 2}
VISIBILITY = 8  # seconds, after which Redis delivers again what a killed worker had


class Shop(Workers):
    """A client of the tasks, and their workers."""

    def __init__(self, database: str, broker: str, folder: Path, **settings: object) -> None:
        results = ask("redis", "create_database")
        self.client, self.backend = (
            Celery(broker=broker, set_as_current=False),
            Celery(backend=results, set_as_current=False).backend,
        )
        self.client.conf.broker_transport_options = {"confirm_publish": True}
        said = {name: repr(value) for name, value in settings.items()}
        super().__init__(TASKS, database, folder, {"SHOP_BROKER": broker, "SHOP_BACKEND": results, **said})

    def begin(self, concurrency: int) -> int:
        """Start a worker, and return its process id."""
        self.tell("-c", concurrency, "-l", "INFO", "-n", f"worker{len(self.pids)}@shop")
        self.pids.append(self.pid())
        return self.pids[-1]

    def kill(self, pid: int) -> None:
        """Kill a worker with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        self.client.close()
        self.client.pool.force_close_all()
        self.backend.client.close()

    def send(self, name: str, *arguments: Any, id: str | None = None, **options: Any) -> str:
        return str(self.client.send_task(f"{TASKS}.{name}", arguments, task_id=id or str(uuid.uuid4()), **options).id)

    def meta(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.backend.get_task_meta(id)
        self.backend._cache.clear()
        return found

    def result(self, id: str) -> Any:
        """Wait for the end of a task, and return its result or its error."""
        try:
            wait_for(lambda: self.meta(id)["status"] in ("SUCCESS", "FAILURE"))
        except AssertionError:
            raise AssertionError((self.meta(id), self.log.read_text()[-3000:])) from None
        return self.meta(id)["result"]


@on_postgresql
@every_broker
def test_what_a_task_sends_goes_out_after_commit(make_shop: Callable[..., Shop]) -> None:
    """By each way, and also if the process is killed between COMMIT and send."""
    shop = make_shop()
    shop.begin(4)
    expected: dict[str, Any] = {}
    changes, arrivals = Counter[str](), list[str]()
    for kill in (False, True):
        for way in [*WAYS, "retry", "autoretry", "replace", "again", "outside"]:
            name = f"{way} killed" if kill else way
            link = shop.client.signature(f"{TASKS}.arrive", ["/linked"]) if way == "outside" else None
            expected[shop.send("work", name, way, kill, link=link)] = f"{name}/replaced''" if way == "replace" else f"{name}:done"
            changes[name] = 2 if way == "again" else 1
            arrivals += follow_ups(way, name)
    assert {id: shop.result(id) for id in expected} == expected
    wait_for(lambda: len(shop.arrived()) >= len(arrivals))
    assert shop.changed() == changes
    gathered = [what for what in arrivals if "+" in what]  # was called as a function, without an id
    assert shop.arrived() == dict.fromkeys(arrivals, 1) | dict.fromkeys(gathered, 0)
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))
    assert shop.log.read_text().count("SIGKILL") >= len(WAYS)


@on_postgresql
@on_rabbitmq
def test_each_task_ends_once(make_shop: Callable[..., Shop], url: str, role: str) -> None:
    """Duplicates, conflicts, failures, and outages of the database."""
    for (table,) in query(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        query(url, f"GRANT ALL ON {table} TO {role}")
    shop = make_shop(make_url(url).set(username=role).render_as_string(hide_password=False))
    shop.database = url
    shop.begin(4)
    # A duplicate finds the result of the first run, and sends nothing new.
    first = shop.send("work", "twice", "delay")
    assert shop.result(first) == "twice:done"
    shop.backend.forget(first)
    shop.send("work", "twice", "delay", id=first)
    assert shop.result(first) == "twice:done"
    # An own key: positional or by name, and with a default, it is the same; another amount is a conflict.
    assert [shop.result(shop.send("pay", 7, **more)) for more in ({}, {"kwargs": {"cents": 100}}, {})] == [[7, 100]] * 3
    assert shop.result(shop.send("pay", kwargs={"order_id": 7})) == [7, 100]
    key = uuid.uuid4()
    assert [shop.result(shop.send("pay", key)) for _ in range(2)] == [[key, 100]] * 2
    # What cannot be claimed fails, and does not go round.
    assert "cannot be read back" in str(shop.result(shop.send("pay", "\ud800")))
    other = shop.send("pay", 7, 200)
    assert "another message" in str(shop.result(other))
    assert shop.meta(other)["status"] == "FAILURE"
    # Another one holds the claim: the second waits, and has the result of the first.
    with shop.locked(1) as until:
        both = [shop.send("pay", 8, 100, 1)]
        until(1)
        both.append(shop.send("pay", 8, 100, 1))
        wait_for(lambda: b"is kept, and waits" in shop.log.read_bytes())
    assert [shop.result(id) for id in both] == [[8, 100]] * 2
    # A result that no backend can store, of a task whose result nobody wants.
    shop.send("quiet", "quiet", ignore_result=True)
    wait_for(lambda: shop.arrived().get("quiet"))
    # A COMMIT that fails is no success.
    assert shop.result(shop.send("deferred", "one")) == "one"
    failed = shop.send("deferred", "one")
    assert "duplicate key" in str(shop.result(failed))
    assert shop.meta(failed)["status"] == "FAILURE"
    # A soft time limit in the body rolls back, and the claim does not stay.
    with shop.locked(2) as until:
        slow = shop.send("slow", 2)
        assert "SoftTimeLimitExceeded" in repr(shop.result(slow))
    shop.backend.forget(slow)
    shop.send("slow", 2, id=slow)
    assert shop.result(slow) == "slow"
    # The database is away: the tasks stay in hand, and no result is reported.
    query(url, f"ALTER ROLE {role} NOLOGIN")
    end_sessions(url, role)
    away = [shop.send("work", f"away {number}", "delay") for number in range(6)]
    seen = shop.log.read_bytes().count(b"is kept, and waits")
    wait_for(lambda: shop.log.read_bytes().count(b"is kept, and waits") >= seen + 4)
    assert {shop.meta(id)["status"] for id in away} == {"PENDING"}
    query(url, f"ALTER ROLE {role} LOGIN")
    assert [shop.result(id) for id in away] == [f"away {number}:done" for number in range(6)]
    once = [
        "twice",
        "paid 7",
        f"paid {key}",
        "paid 8",
        "quiet",
        "deferred one",
        "slow",
        *(f"away {number}" for number in range(6)),
    ]
    assert shop.changed() == Counter(once)
    wait_for(lambda: len(shop.arrived()) == 8)
    assert set(shop.arrived().values()) == {1}


@on_postgresql
@every_broker
def test_workers_that_are_killed_lose_nothing(make_shop: Callable[..., Shop], broker: str) -> None:
    """With twelve tasks under way: before the change, behind it, and between COMMIT and send."""
    options = {"confirm_publish": True, "visibility_timeout": VISIBILITY}
    shop = make_shop(task_time_limit=VISIBILITY - 1, broker_transport_options=options)
    redis, ids = broker.startswith("redis"), list[str]()
    for lock in range(1, ROUNDS["redis" if redis else "rabbitmq"] + 1):
        workers = [shop.begin(TOGETHER // WORKERS) for _ in range(WORKERS)]
        with shop.locked(lock) as until:
            ids += [shop.send("storm", len(ids) + number, lock) for number in range(TOGETHER)]
            until(TOGETHER)
            for worker in workers:
                shop.kill(worker)
    if redis:  # a worker that starts looks for what is due
        killed = time.monotonic()
        wait_for(lambda: time.monotonic() > killed + VISIBILITY)
    shop.begin(WORKERS)
    assert [shop.result(id) for id in ids] == [*range(len(ids))]
    names = [f"storm {number}" for number in range(len(ids))]
    assert shop.changed() == Counter(names)
    wait_for(lambda: len(shop.arrived()) == len(names))
    assert shop.arrived() == dict.fromkeys(names, 1)
    wait_for(lambda: not query(shop.database, "SELECT 1 FROM idemp_pending"))


@on_postgresql
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_the_relay_of_a_worker_needs_no_redelivery(make_shop: Callable[..., Shop], database: Database) -> None:
    """Redis delivers again after a minute; what was committed goes out before."""
    shop = make_shop()
    worker = shop.begin(1)
    with shop.locked(1) as until:
        id = shop.send("storm", 2, 1)
        until(1)  # between COMMIT and send
        shop.kill(worker)
    let_pass(database, 20.0)  # for which relays leave it to the process that has stored it
    shop.begin(1)
    wait_for(lambda: shop.arrived() == {"storm 2": 1})
    assert shop.meta(id)["status"] == "PENDING"


@on_postgresql
@on_rabbitmq
def test_a_worker_that_could_lose_tasks_does_not_start(make_shop: Callable[..., Shop]) -> None:
    """A signal's handler could not stop it: Celery logs what it raises, and goes on."""
    shop = make_shop(broker_transport_options={}, task_protocol=1)
    worker = shop.begin(1)
    wait_for(lambda: has_ended(worker))
    log = shop.log.read_text()
    assert "idemp.errors.ConfigurationError: task_protocol is 1: set it to 2; without publisher confirms" in log
    assert "ready" not in log


FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"task_protocol": 1}, {}, "task_protocol is 1: set it to 2"),
    ({"worker_deduplicate_successful_tasks": True}, {}, "sends callbacks twice: leave it off"),
    ({"broker_transport_options": {}}, {}, r"set broker_transport_options=\{'confirm_publish': True\}"),
    ({"broker_url": "redis://localhost"}, {}, "set time_limit below visibility_timeout, 3600 s"),
    ({"broker_url": "redis://localhost"}, {"time_limit": 3600}, "set time_limit below visibility_timeout, 3600 s"),
    ({"broker_url": "redis://localhost", "broker_transport_options": {"visibility_timeout": 60}}, {"time_limit": 61}, "60 s"),
    ({"broker_url": "filesystem://"}, {}, "the transport filesystem is not supported: use RabbitMQ or Redis"),
    ({}, {"acks_late": False}, "would be lost with its process: leave out acks_late"),
    ({}, {"reject_on_worker_lost": False}, "would be lost with its process"),
    ({}, {"serializer": "pickle"}, "has the serializer pickle: set it to json"),
    ({"task_serializer": "yaml"}, {}, "has the serializer yaml: set it to json"),
    ({}, {"idempotency_key": "order"}, "has no argument 'order', which is its idempotency_key"),
]


@pytest.mark.parametrize(("settings", "options", "said"), FAULTS)
def test_each_refusal_names_its_fix(settings: dict[str, Any], options: dict[str, Any], said: str) -> None:
    def begin(settings: dict[str, Any], options: dict[str, Any]) -> object:
        app = Celery("shop", set_as_current=False)
        app.conf.update({"broker_url": "amqp://localhost", "broker_transport_options": {"confirm_publish": True}} | settings)
        base = install(app, Inbox(create_engine("sqlite:///nowhere.db")))

        @app.task(shared=False, base=base, **options)
        def pay(order_id: int) -> None: ...

        app.finalize()
        (step,) = app.steps["worker"]
        return step.create(None, None)

    with pytest.raises(ConfigurationError, match=said):
        begin(settings, options)
    assert begin({}, {}) is not None
    assert begin({"broker_url": "redis://localhost"}, {"time_limit": 60}) is not None


def test_what_is_not_installed_for_an_app_of_its_own_is_refused() -> None:
    inbox = Inbox(create_engine("sqlite:///nowhere.db"))
    install(Celery("shop", set_as_current=False), inbox)
    app = Celery("other", set_as_current=False)
    with pytest.raises(ConfigurationError, match="give each app an inbox"):
        install(app, inbox)
    with pytest.raises(ConfigurationError, match="use the one that install"):

        @app.task(shared=False, base=IdempotentTask)
        def pay() -> None: ...

        app.finalize()


def test_a_context_whose_outputs_go_to_another_broker_captures_nothing() -> None:
    ours, theirs = (CeleryBroker(Celery(set_as_current=False)) for _ in range(2))
    with capturing(BaseContext("shop", {}, None, None), ours):
        assert current(ours) is not None
        assert current(theirs) is None


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_is_silent_keeps_nothing_waiting(scheme: str) -> None:
    """It takes the connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        broker = CeleryBroker(Celery(broker=f"{scheme}://127.0.0.1:{server.getsockname()[1]}/0", set_as_current=False))
        ctx = BaseContext("shop", {}, None, None)
        ctx.forward(b"[]", to="celery")
        with pytest.raises(kombu.exceptions.OperationalError, match="[Tt]ime"):
            broker.publish(ctx.outputs(), 0.5)
        broker.close()


@on_postgresql
def test_a_task_whose_outputs_would_wait_for_ever_is_delivered_again(url: str) -> None:
    """The broker is away, and no relay is alive: its changes are committed, and the task is neither failed nor acknowledged."""
    query(url, TABLES[0])
    engine = create_engine(url)
    app = Celery("shop", broker="amqp://127.0.0.1:1", set_as_current=False)
    idempotent = install(app, Inbox(engine))

    @app.task(shared=False, base=idempotent)
    def pay() -> None:
        session().execute(text("INSERT INTO changed (what) VALUES ('paid')"))
        app.send_task("shop.note")

    app.finalize()
    for _ in range(2):
        _, traced, *_ = trace_task(pay, "7", (), {}, {"id": "7", "children": [], "delivery_info": {}}, app=app)
        assert (traced.state, traced.retval.requeue) == ("REJECTED", True)
        assert "none is alive" in str(traced.retval)
    assert query(url, "SELECT what FROM changed") == [("paid",)]
    engine.dispose()


def test_one_output_is_to_blame_and_its_neighbours_are_sent(vhost: str) -> None:
    app = Celery(broker=vhost, set_as_current=False)
    app.conf.broker_transport_options = {"confirm_publish": True}
    broker = CeleryBroker(app)
    ctx = BaseContext("shop", {}, None, None)
    for number, exchange in enumerate(["", "nowhere", ""]):
        ctx.forward(b"[]", {"message_id": str(number)}, to="celery", exchange=exchange)
    ctx.forward(b"[]", {"correlation_id": "x" * 300}, to="celery")
    ctx.forward(b"[]", {"expiration": "60000"}, to="celery")
    answers = broker.publish(ctx.outputs(), 10.0)
    broker.close()
    assert [answer and answer.own for answer in answers] == [None, True, None, True, None]


def test_a_retention_that_is_no_duration_is_refused() -> None:
    app = Celery("shop", set_as_current=False)
    base = install(app, Inbox(create_engine("sqlite:///nowhere.db")))

    @app.task(shared=False, base=base, retention="often")
    def pay() -> None: ...

    with pytest.raises(ConfigurationError):
        app.finalize()


@pytest.mark.parametrize(
    ("url", "identity"),
    [
        ("amqp://user:secret@rabbit:5673/shop", "rabbitmq:shop"),
        ("amqp://rabbit", "rabbitmq:/"),
        ("redis://:secret@cache:6380/2", "redis:cache:6380/2"),
        ("redis://cache", "redis:cache:6379/0"),
    ],
)
def test_the_identity_of_a_broker_has_no_password(url: str, identity: str) -> None:
    assert CeleryBroker(Celery(broker=url, set_as_current=False)).identity == identity


@pytest.fixture
def eager(url: str) -> Iterator[SimpleNamespace]:
    """An app without a broker, in the process of a test, as `celery.contrib.testing` has it."""
    engine = create_engine(url)
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    idempotent = install(app, Inbox(engine))
    tasks = SimpleNamespace(app=app, runs=list[str](), idempotent=idempotent)
    query(url, TABLES[0])

    def change(what: str) -> None:
        tasks.runs.append(what)
        session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": what})

    @app.task(shared=False, base=idempotent, bind=True, idempotency_key="order_id")
    def pay(self: Any, order_id: int, cents: int = 100) -> tuple[int, int]:
        change(f"pay {order_id}")
        pack.delay(order_id)
        return order_id, cents

    @app.task(shared=False, base=idempotent)
    def pack(order_id: int) -> str:
        change(f"pack {order_id}")
        if order_id == 13:
            app.send_task("shop.note", [13])
            raise ValueError("fragile")
        return f"packed {order_id}"

    @app.task(shared=False, base=idempotent, bind=True)
    def chores(self: Any, order_id: int, depth: int = 1) -> list[Any]:
        """Call tasks as functions, itself too, and by each canvas."""
        found = [
            pack(order_id),
            canvas.chain(pack.si(order_id), pack.si(order_id)).apply_async().get(disable_sync_subtasks=False),
        ]
        found += canvas.group(pack.si(order_id), pack.si(order_id)).apply_async().get(disable_sync_subtasks=False)
        return [*found, *(chores(order_id, depth - 1) if depth else [])]

    @app.task(shared=False, base=idempotent, bind=True, max_retries=1)
    def again(self: Any, name: str) -> str:
        change(name)
        if not self.request.retries:
            raise self.retry(countdown=60)
        return name

    tasks.pay, tasks.pack, tasks.chores, tasks.again = pay, pack, chores, again
    app.finalize()
    yield tasks
    app.close()
    engine.dispose()


@on_postgresql
def test_eager_tasks_are_claimed_as_others_are(eager: SimpleNamespace, url: str) -> None:
    eager.app.conf.task_always_eager = True
    assert eager.pay.delay(7).get() == (7, 100)  # as it was returned
    assert eager.pay.delay(7).get() == [7, 100]  # as it was stored
    assert eager.runs == ["pay 7", "pack 7"]
    assert isinstance(eager.pay.delay(7, 200).result, Conflict)
    failed = eager.pay.delay(13)  # what it sends joins its transaction, and is undone alone
    assert (failed.state, failed.get()) == ("SUCCESS", (13, 100))
    assert query(url, "SELECT 1 FROM idemp_output WHERE kind = 'forward'") == []
    assert eager.again.delay("again").get() == "again"
    assert eager.runs.count("again") == 2
    assert eager.chores.delay(8).get() == ["packed 8"] * 8
    linked = eager.pack.apply_async((9,), link=eager.again.si("linked"))
    assert linked.get() == "packed 9"
    changes = Counter(what for (what,) in query(url, "SELECT what FROM changed"))
    assert changes == Counter({"pay 7": 1, "pack 7": 1, "pay 13": 1, "again": 1, "pack 8": 10, "pack 9": 1, "linked": 1})
    with pytest.raises(ConfigurationError, match="use .delay"):
        eager.pack(1)  # as a function, and no task runs


@on_postgresql
def test_a_worker_in_a_thread_of_a_test(eager: SimpleNamespace, url: str) -> None:
    eager.app.conf.update(broker_transport_options={"polling_interval": 0.02}, worker_hijack_root_logger=False)
    quiet = {"perform_ping_check": False, "loglevel": "WARNING"}  # by default the root logger's, and for good, is ERROR
    with start_worker(eager.app, shutdown_timeout=30, **quiet):
        assert eager.pay.delay(7).get(timeout=30) == [7, 100]
        wait_for(lambda: "pack 7" in eager.runs)
    assert eager.runs == ["pay 7", "pack 7"]
    eager.app.conf.task_protocol = 1
    with pytest.raises(ConfigurationError, match="task_protocol"), start_worker(eager.app, **quiet):
        pass
