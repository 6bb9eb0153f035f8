"""Two brokers, one database: outputs go to the broker that they belong to, whichever relay runs."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App, BrokerChanged, ConfirmingPublisher, Context, Idempotent, Inbox, Outcome
from idemp.broker.kombu import KombuBroker
from idemp.broker.local import LocalBroker
from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers.given import GivenRabbitMQ
    from tests.servers.programs import RabbitMQ

OUT = Topology(exchange="idemp", queues=("out",))


@pytest.fixture
def database(postgresql_url: str) -> str:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    engine.dispose()
    return postgresql_url


@pytest.fixture
def urls(rabbitmq: RabbitMQ | GivenRabbitMQ, unique_name: str) -> Iterator[tuple[str, str]]:
    """Two virtual hosts, each with a queue `out`."""
    names = [f"{unique_name}_{letter}" for letter in "ab"]
    made = [rabbitmq.create_vhost(name) for name in names]
    for url in made:
        KombuBroker(url).declare(OUT)
    yield made[0], made[1]
    for name in names:
        rabbitmq.delete_vhost(name)


@pytest.fixture
def app_of(database: str) -> Iterator[Callable[..., App]]:
    """Makes apps on the database, which are closed at the end."""
    with ExitStack() as stack:

        def make(name: str, broker: str, broker_name: str | None = None) -> App:
            app = App(name, database=database, broker=broker, broker_name=broker_name, settings=Settings())
            stack.callback(app.close)

            @app.handler(dict, type=f"{name}.Go", policy=Idempotent())
            def go(message: dict[str, Any], ctx: Context) -> None:
                ctx.send({}, to="out", type="done")

            return app

        yield make


def initiate(app: App) -> None:
    with app.initiate() as unit:
        unit.send({"by": app.name}, to="out", type="done")


@contextmanager
def worker_of(app: App) -> Iterator[Worker]:
    worker = Worker([app])
    running = Background(worker.run)
    try:
        yield worker
    finally:
        worker.stop()
        running.result(60)


def producers(url: str) -> list[str]:
    """Who sent what is in `out`."""
    return [str(message.body, "utf-8")[7:-2] for message in KombuBroker(url).browse("out", 100)]


def test_second_broker_without_a_name_is_refused_at_start(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    app_of("orders", urls[0]).start()
    with pytest.raises(BrokerChanged, match=r"belong to RabbitMQ cluster .*_a'; this is RabbitMQ cluster .*_b'"):
        app_of("billing", urls[1]).start()
    app_of("orders", urls[0]).start()
    app_of("billing", urls[1], "billing").start()


def test_broker_is_the_same_by_another_host_name(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    moved = urls[0].replace("127.0.0.1", "localhost")
    assert moved != urls[0]
    for url in (urls[0], moved, f"pyamqp://127.0.0.1:9/nowhere;{moved}"):
        app_of("orders", url).start()


def test_relay_ships_to_its_own_broker_alone(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    orders, billing = app_of("orders", urls[0]), app_of("billing", urls[1], "billing")
    for app in (orders, billing, orders):
        initiate(app)
    with worker_of(billing):
        wait_until(lambda: producers(urls[1]) == ["billing"], "outputs arrive")
        # What pends is not left to this relay: it ships to another broker.
        assert (orders.store.relay_alive(), billing.store.relay_alive()) == (False, True)
    assert producers(urls[0]) == []
    assert orders.store.upkeep.pending_count() == 2
    with worker_of(orders):
        wait_until(lambda: producers(urls[0]) == ["orders", "orders"], "outputs arrive")
    assert producers(urls[1]) == ["billing"]
    assert orders.store.upkeep.pending_count() == 0


def test_one_worker_serves_apps_of_two_brokers(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    apps = [app_of("orders", urls[0]), app_of("billing", urls[1], "billing")]
    for app in apps:
        initiate(app)
    worker = Worker(apps)
    running = Background(worker.run)
    wait_until(lambda: [producers(url) for url in urls] == [["orders"], ["billing"]], "outputs arrive")
    worker.stop()
    running.result(60)


def test_migration_from_one_broker_to_another(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    """As `docs/how-to/several-brokers.md` has it: a new name for the new broker; a relay empties what the old one has."""
    old = app_of("orders", urls[0])
    old.start()
    initiate(old)
    new = app_of("orders", urls[1], "new")
    initiate(new)
    with worker_of(new):
        wait_until(lambda: len(producers(urls[1])) == 1, "outputs arrive")
        assert producers(urls[0]) == []
        left = app_of("orders", urls[0])
        with worker_of(left):
            wait_until(lambda: len(producers(urls[0])) == 1, "outputs arrive")
    assert new.store.upkeep.pending_count() == 0


def test_wrapped_function_meets_another_broker(
    app_of: Callable[..., App], database: str, urls: tuple[str, str]
) -> None:
    """Its publisher connects with its first message, and not before."""
    app_of("orders", urls[0]).start()
    engine = create_engine_safely(database)

    def pay(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="out", type="done")

    def wrapped(broker_name: str | None) -> Outcome:
        with closing(ConfirmingPublisher(urls[1])) as publisher:
            handle = Inbox(engine, broker_name=broker_name).wrap(
                pay, dict, type="billing.Pay", consumer="billing", policy=Idempotent(key="id"), publisher=publisher
            )
            return handle({"id": 1})

    with pytest.raises(BrokerChanged):
        wrapped(None)
    assert producers(urls[1]) == []
    assert wrapped("billing") is Outcome.HANDLED
    engine.dispose()


def test_embedded_brokers_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """A file that is moved stays the same broker; one that is made anew is another, though its path is the same."""
    path, moved = tmp_path / "queues.db", tmp_path / "moved.db"
    broker = LocalBroker(path)
    identities = [broker.identity(), LocalBroker(path).identity()]
    assert len(set(identities)) == 1
    path.rename(moved)
    assert LocalBroker(moved).identity() == identities[0]
    assert LocalBroker(path).identity() != identities[0]


def test_identity_is_agreed_once_by_many(app_of: Callable[..., App], urls: tuple[str, str]) -> None:
    """Workers of two brokers start at once: one broker gets the name, all others are refused."""
    apps = [app_of(f"app-{number}", urls[number % 2]) for number in range(6)]
    started, refused = [], []
    ready = threading.Barrier(len(apps))

    def start(app: App) -> None:
        ready.wait(60)
        try:
            app.start()
        except BrokerChanged:
            refused.append(app.name)
        else:
            started.append(app.name)

    for each in [Background(lambda app=app: start(app)) for app in apps]:
        each.result(60)
    assert len(started) == len(refused) == 3
    assert len({int(name[-1]) % 2 for name in started}) == 1
