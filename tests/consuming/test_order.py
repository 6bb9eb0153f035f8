"""A worker whose types keep an order: what failed holds back its own key, and nothing of a key is overtaken."""

from __future__ import annotations

import json
import logging
import threading
from itertools import product
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from idemp import App, Context, Idempotent
from idemp.broker.kombu import KombuBroker
from idemp.broker.memory import InMemoryBroker
from idemp.messages import Message, Output, OutputKind
from idemp.ordering import ORDERED_PREFETCH
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.broker.kombu.tools import raw_link
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers.rabbitmq import RabbitMQ

QUEUE = "ordered"
NEVER, ONCE, ALWAYS = "never", "once", "always"


class Shop:
    """Handles messages of several keys, which fail as they say.

    Attributes:
        runs: the handler's runs, in order: key, number and attempt.
    """

    def __init__(self, database: str, broker: Any, *, prefetch: int | None = None, **policy: Any) -> None:
        self.engine = create_engine(database)
        make_tables(self.engine)
        self.broker = broker
        self.runs: list[tuple[str, int, int]] = []
        self.during: Callable[[dict[str, Any], Context], object] = lambda message, ctx: None
        settings = Settings() if prefetch is None else Settings(prefetch=prefetch)
        self.app = App(QUEUE, database=self.engine, broker=broker, settings=settings)
        given = {"ordered_by": "key", "attempts": 3, "retry_delays": [0.2], **policy}
        for name in ("a", "b"):
            self.app.handler(dict, type=name, policy=Idempotent(**given))(self._handle)
        self.app.start()

    def _handle(self, message: dict[str, Any], ctx: Context) -> None:
        self.runs.append((message["key"], message["number"], ctx.attempt))
        self.during(message, ctx)
        if message["fails"] == ALWAYS or (message["fails"] == ONCE and ctx.attempt == 1):
            raise ValueError(message)

    def send(self, *bodies: dict[str, Any]) -> None:
        outputs = [output(number, body) for number, body in enumerate(bodies)]
        publisher = self.broker.publisher()
        assert publisher.publish(outputs, 30) == [None] * len(outputs)
        publisher.close()

    def working(self, threads: int = 1) -> Working:
        return Working(self.app, threads=threads)

    def of(self, key: str) -> list[tuple[int, int]]:
        """The runs of a key: number and attempt."""
        return [(number, attempt) for each, number, attempt in self.runs if each == key]


class Working:
    """A worker during the block; it ends in good order."""

    def __init__(self, *apps: App, threads: int = 1) -> None:
        self._worker = Worker(apps, threads=threads)

    def __enter__(self) -> None:
        self._running = Background(self._worker.run)

    def __exit__(self, *_: object) -> None:
        self._worker.stop()
        self._running.result(40)


def output(number: int, body: dict[str, Any], queue: str = QUEUE, exchange: str = "") -> Output:
    id_ = uuid4()
    message = Message(
        body=json.dumps({"fails": NEVER, "number": number, **body}).encode(),
        type="ab"[number % 2],
        message_id=str(id_),
    )
    kind = OutputKind.PUBLISH if exchange else OutputKind.SEND
    return Output(id=id_, ordinal=0, kind=kind, exchange=exchange, routing_key=queue, message=message)


@pytest.fixture(params=["memory", "rabbitmq"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**policy: Any) -> Shop:
        if request.param == "memory":
            made.append(Shop(f"sqlite:///{tmp_path}/shop.db", InMemoryBroker(), **policy))
        else:
            broker = KombuBroker(request.getfixturevalue("rabbitmq_url"))
            made.append(Shop(request.getfixturevalue("postgresql_url"), broker, **policy))
        return made[-1]

    yield make
    for each in made:
        each.app.close()
        each.engine.dispose()


def test_holds_back_its_own_key(shop: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """What comes after a failing message waits for it, whatever its type; other keys are handled meanwhile."""
    caplog.set_level(logging.INFO, "idemp")
    made = shop()
    made.send(
        {"key": "x"}, {"key": "x", "fails": ONCE}, {"key": "x"}, {"key": "y"}, {"key": "x"}, {"key": "y"}, {"key": "z"}
    )
    with made.working():
        wait_until(lambda: len(made.runs) == 8 and made.broker.depth(QUEUE) == 0, "all ran")
    assert made.runs[-3:] == [("x", 1, 2), ("x", 2, 1), ("x", 4, 1)], "after all other keys"
    assert made.of("x") == [(0, 1), (1, 1), (1, 2), (2, 1), (4, 1)]
    told = {
        record.event: record  # type: ignore[attr-defined]
        for record in caplog.records
        if getattr(record, "event", "") in {"key_held", "key_let_go"}
    }
    assert list(told) == ["key_held", "key_let_go"]
    assert told["key_let_go"].waiting == 2  # type: ignore[attr-defined]


def test_what_is_parked_lets_go(shop: Callable[..., Shop]) -> None:
    made = shop()
    made.send({"key": "x", "fails": ALWAYS}, {"key": "x", "fails": ALWAYS}, {"key": "x"}, {"key": "y"})
    with made.working():
        wait_until(lambda: len(made.runs) == 8, "all ran")
        wait_until(lambda: made.broker.depth(f"{QUEUE}.dead") == 2, "two are parked")
    assert made.of("x") == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1)]
    assert [letter.headers["idemp-dead-attempts"] for letter in made.broker.browse(f"{QUEUE}.dead", 5)] == [3, 3]
    assert made.broker.depth(QUEUE) == 0


def test_the_next_worker_goes_on(rabbitmq_url: str, postgresql_url: str) -> None:
    """One is told to stop while it holds a message and what is behind it: the other, which waited, handles them in order."""
    shop = Shop(postgresql_url, KombuBroker(rabbitmq_url), retry_delays=["2m"])
    held = {"key": "x", "fails": ONCE}
    with shop.working():
        shop.send({"key": "w"})
        wait_until(lambda: len(shop.runs) == 1, "this one is it")
        with shop.working():  # waits, and ends first
            shop.send(held, *[{"key": key} for key in "xyxyxz"])
            wait_until(lambda: len(shop.runs) == 5, "all but the held ones ran")
    assert shop.of("x") == [(0, 1)]
    assert shop.broker.depth(QUEUE) == 4, "held, and nobody else's"
    shop.during = lambda message, ctx: message.update(fails=NEVER)
    with shop.working(threads=2):
        wait_until(lambda: shop.broker.depth(QUEUE) == 0 and len(shop.runs) == 9, "the others ran")
    assert shop.of("x") == [(0, 1), (0, 1), (1, 1), (3, 1), (5, 1)], "its attempts are counted anew"
    shop.app.close()
    shop.engine.dispose()


def test_whatever_the_prefetch(rabbitmq_url: str, postgresql_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Workers with several settings end one after the other while they hold all, and the last one begins with the oldest."""
    broker, shops = KombuBroker(rabbitmq_url), []
    for prefetch in (20, 4, 7, 30):
        shop = Shop(postgresql_url, broker, prefetch=prefetch, retry_delays=["2m"])
        if not shops:
            shop.send(*[{"key": "x", "fails": ONCE}] * 12)
        if len(shops) == 3:
            shop.during = lambda message, ctx: message.update(fails=NEVER)
        shops.append(shop)
        with shop.working():
            wait_until(lambda: len(shops) < 4 or len(shops[3].runs) == 12, "the last one handles all")
            left = max(0, 12 - prefetch)
            wait_until(lambda most=left: shops[-1].runs and broker.depth(QUEUE) <= most, "its hand is full")  # type: ignore[misc]
        shop.app.close()
        shop.engine.dispose()
    assert [shop.of("x") for shop in shops[:3]] == [[(0, 1)]] * 3
    assert [number for number, _ in shops[3].of("x")] == list(range(12))
    told = [record for record in caplog.records if getattr(record, "event", "") == "prefetch_fixed"]
    assert {record.prefetch for record in told} == {ORDERED_PREFETCH}  # type: ignore[attr-defined]


BY_KEY = "orders.by-key"
PARTITIONS = ("ordered.0", "ordered.1", "ordered.2")


@pytest.fixture
def hashing(own_rabbitmq: RabbitMQ) -> Iterator[RabbitMQ]:
    """A node with the plugin that spreads messages over queues by a hash of their routing key."""
    if own_rabbitmq.container:
        pytest.skip("plugins can be switched on only in a local server")
    switch_plugins(own_rabbitmq, "rabbitmq_consistent_hash_exchange")
    yield own_rabbitmq
    own_rabbitmq.reset()  # nothing may need the plugin any more
    switch_plugins(own_rabbitmq, "")


def switch_plugins(server: RabbitMQ, names: str) -> None:
    file = server.base / "enabled_plugins"
    file.write_text(f"[{names}].\n")
    wait_until(lambda: "ok" in server.evaluate(f'rabbit_plugins:ensure("{file}")'), "the node has the plugins")


def test_partitions(hashing: RabbitMQ, postgresql_url: str) -> None:
    """Several queues, each with an order of its own, are one consumer: workers handle as many messages at once."""
    engine = create_engine(postgresql_url)
    make_tables(engine)
    broker = KombuBroker(hashing.url)
    runs: list[tuple[int, int]] = []
    threads: set[int] = set()

    def handle(message: dict[str, Any], ctx: Context) -> None:
        threads.add(threading.get_ident())
        wait_until(lambda: len(threads) == len(PARTITIONS), "all of them handle messages at the same time")
        if message["number"] % 15 == 3 and ctx.attempt == 1:
            raise ValueError(message)
        runs.append((message["key"], message["number"]))

    apps = [App(QUEUE, queue=each, subscribe=False, database=engine, broker=broker) for each in PARTITIONS]
    for app, name in product(apps, ("a", "b")):
        app.handler(dict, type=name, policy=Idempotent(ordered_by="key", retry_delays=["100ms"]))(handle)
    for app in apps:
        app.start()
    with raw_link(hashing.url) as link:
        link.channel.exchange_declare(BY_KEY, "x-consistent-hash", durable=True, auto_delete=False)
        for queue in PARTITIONS:
            link.channel.queue_bind(queue, BY_KEY, "1")
    outputs = [output(number, {"key": number % 30}, str(number % 30), BY_KEY) for number in range(120)]
    with broker.publisher() as publisher, Working(*apps):  # type: ignore[union-attr]
        assert publisher.publish(outputs, 30) == [None] * 120
        wait_until(lambda: len(runs) == 120, "all are handled")
    assert sorted(runs) == sorted(runs, key=lambda run: run[0]), "of each key in the order of their numbers"
    engine.dispose()
