"""Whatever a worker loses while it consumes, it finds again; each message has its effect once, and none is lost."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis as Client

from idemp import worker as worker_module
from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Binding, Topology
from idemp.messages import Message, Output, OutputKind
from idemp.testing import FaultProxy
from tests.broker.kombu.tools import SOON, an_output, raw_link
from tests.poison.mill import FINE, QUEUE, TYPE, Mill
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers.rabbitmq import RabbitMQ
    from tests.servers.redis import Redis


class Held:
    """Keeps the first run of the first message in its handler until it is told to go on."""

    def __init__(self, mill: Mill) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._first = threading.Lock()
        mill.during = self._hold

    def _hold(self, message: dict[str, Any], run: int) -> None:
        if self._first.acquire(blocking=False):
            self.begun.set()
            assert self.go.wait(20)


@pytest.fixture
def mill(postgresql_url: str) -> Iterator[Callable[..., Mill]]:
    """Makes a mill on a broker."""
    made: list[Mill] = []

    def make(broker: KombuBroker, **options: Any) -> Mill:
        made.append(Mill(postgresql_url, broker, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[FaultProxy]:
    host, port = rabbitmq_url.partition("@")[2].partition("/")[0].split(":")
    with FaultProxy(host, int(port)) as proxy:
        yield proxy


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == name]


def all_handled(shop: Mill, ids: set[str | None]) -> None:
    """Each message had its effect once, its output arrived, and none is left or parked."""
    wait_until(lambda: shop.effects().keys() == ids and shop.outputs().keys() == ids, "all are handled")
    wait_until(lambda: shop.depth(QUEUE) == 0, "the queue is empty")
    assert set(shop.effects().values()) == {1}
    assert shop.depth(f"{QUEUE}.dead") == 0


def ids_of(sent: dict[str, list[Message]]) -> set[str | None]:
    return {message.message_id for messages in sent.values() for message in messages}


def test_connection_lost_in_a_handler(
    mill: Callable[..., Mill], proxy: FaultProxy, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is committed and said; its next delivery is a duplicate, and those that had been sent ahead come again, too."""
    shop = mill(KombuBroker(proxy.through(rabbitmq_url)))
    held = Held(shop)
    ids = ids_of(shop.send([FINE] * 10))
    with shop.working(threads=1):
        assert held.begun.wait(20)
        proxy.cut(reset=True)
        held.go.set()
        all_handled(shop, ids)
    assert Counter(item for item, _ in shop.runs) == Counter(ids)
    assert len(events(caplog, "delivery_lost")) == 1
    assert len(events(caplog, "outage")) == 1


@pytest.mark.parametrize("batch", [1, 10])
def test_connection_lost_again_and_again(
    mill: Callable[..., Mill], proxy: FaultProxy, rabbitmq_url: str, batch: int
) -> None:
    """Ten cuts under load, three threads: effects once, and nothing is left behind."""
    shop = mill(KombuBroker(proxy.through(rabbitmq_url)), batch=batch)
    ids: set[str | None] = set()
    publishing = KombuBroker(rabbitmq_url)
    shop.broker, through = publishing, shop.broker
    with shop.working(threads=3):
        for number in range(10):
            ids |= ids_of(shop.send([FINE] * 20))
            wait_until(lambda seen=20 * number: len(shop.runs) > seen, "the worker is at it again")  # type: ignore[misc]
            proxy.cut(reset=bool(number % 2))
        all_handled(shop, ids)
    shop.broker = through


@contextmanager
def impatient(server: RabbitMQ) -> Iterator[None]:
    """New channels of this broker are closed that do not ack within a second."""
    server.evaluate("application:set_env(rabbit, consumer_timeout, 1000)")
    server.evaluate("application:set_env(rabbit, channel_tick_interval, 250)")
    try:
        yield
    finally:
        server.evaluate("application:set_env(rabbit, consumer_timeout, 1800000)")
        server.evaluate("application:set_env(rabbit, channel_tick_interval, 60000)")


@contextmanager
def idle_publisher(url: str) -> Iterator[None]:
    """One that publishes before and after the block, over the same connection if it can."""
    broker = KombuBroker(url)
    broker.declare(Topology(exchange="idemp", queues=("idle",)))
    with broker.publisher() as publisher:  # type: ignore[union-attr]
        assert publisher.publish([an_output("idle")], SOON) == [None]
        yield
        assert publisher.publish([an_output("idle")], SOON) == [None]


@pytest.mark.slow
def test_broker_closes_the_channel_of_a_slow_consumer_and_restarts(
    mill: Callable[..., Mill], own_rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """Consumer timeout: the message of the slow handler comes again; then the broker restarts, and work goes on.

    The restart costs a publisher that is idle meanwhile no failure.
    """
    with FaultProxy("127.0.0.1", own_rabbitmq.port) as proxy, impatient(own_rabbitmq):
        shop = mill(KombuBroker(proxy.through(own_rabbitmq.url)), settings={"prefetch": 1})
        held = Held(shop)
        ids = ids_of(shop.send([FINE] * 3))
        closed = proxy.when(b"timed out", lambda: None, direction="to_client")
        with shop.working(threads=1):
            assert held.begun.wait(20)
            assert closed.wait_triggered(20)
            held.go.set()
            all_handled(shop, ids)
            assert Counter(item for item, _ in shop.runs) == Counter(ids)
            assert len(events(caplog, "delivery_lost")) == 1
            with idle_publisher(own_rabbitmq.url):
                own_rabbitmq.restart()
            ids |= ids_of(shop.send([FINE] * 20))
            all_handled(shop, ids)
    assert Counter(item for item, _ in shop.runs) == Counter(ids)


def test_queue_and_exchange_deleted_under_a_worker(mill: Callable[..., Mill], rabbitmq_url: str) -> None:
    """The broker cancels the consumer: the worker declares everything anew, with its bindings, and goes on."""
    shop = mill(KombuBroker(rabbitmq_url))
    assert Binding(QUEUE, TYPE) in shop.app.topology().bindings
    ids = ids_of(shop.send([FINE]))
    with shop.working(threads=2):
        all_handled(shop, ids)
        with raw_link(rabbitmq_url) as link:
            link.channel.exchange_delete("idemp")
            for name in (f"{QUEUE}.dead", QUEUE):  # that queue last: the worker declares everything when it has gone
                link.channel.queue_delete(name)
        ids |= ids_of(_sent_when_declared(shop))
        event = an_output(TYPE, exchange="idemp", type=TYPE, body=b'{"fails": "fine"}')
        with KombuBroker(rabbitmq_url).publisher() as publisher:  # type: ignore[union-attr]
            wait_until(lambda: publisher.publish([event], 10) == [None], "published, and bound to the queue")
        ids.add(event.message.message_id)
        all_handled(shop, ids)
    assert shop.depth(f"{QUEUE}.dead") == 0


def test_redis_emptied_under_a_worker(
    mill: Callable[..., Mill], own_redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It cancels no consumer: the worker finds that its queue is gone, says so, declares everything anew, and goes on."""
    caplog.set_level(logging.INFO, "idemp.worker")
    shop = mill(KombuBroker(own_redis.url, allow_at_most_once=True))
    ids = ids_of(shop.send([FINE]))
    with shop.working(threads=1), closing(Client.from_url(own_redis.url)) as client:
        all_handled(shop, ids)
        client.flushdb()
        ids |= ids_of(_sent_when_declared(shop))
        wait_until(lambda: shop.effects().keys() == ids, "all are handled")
        wait_until(lambda: bool(events(caplog, "outage_over")), "the worker says that it is over")
    assert [each.levelno for each in events(caplog, "outage")] == [logging.WARNING]


def _sent_when_declared(shop: Mill) -> dict[str, list[Message]]:
    sent: dict[str, list[Message]] = {}

    def arrived() -> bool:
        try:
            sent.update(shop.send([FINE]))
        except AssertionError:  # returned: there is no queue yet
            return False
        return True

    wait_until(arrived, "the queue is there again")
    return sent


def test_handler_longer_than_two_heartbeats(
    mill: Callable[..., Mill], rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is kept alive: the message is settled over the connection that it came by, and runs once."""
    monkeypatch.setattr(worker_module, "_KEEP_ALIVE_SECONDS", 0.3)
    shop = mill(KombuBroker(rabbitmq_url, heartbeat=1))
    long = threading.Event()
    shop.during = lambda message, run: long.wait(3.3)
    ids = ids_of(shop.send([FINE]))
    with shop.working(threads=1):
        all_handled(shop, ids)
    assert [run for _, run in shop.runs] == [1]
    assert not events(caplog, "outage")


def test_body_beyond_the_limit_is_parked_undecoded(mill: Callable[..., Mill], rabbitmq_url: str) -> None:
    """The handler does not run, nobody looks into the body, and the next message is handled."""
    shop = mill(KombuBroker(rabbitmq_url), settings={"max_body_bytes": 100_000})
    body = b"\xff" * 3_000_000  # no JSON: decoding it would give another reason
    message = Message(body=body, type=TYPE, message_id="3b8d6b4e-6d3e-4d5c-9a7e-0d6d1f3f8b11")
    output = an_output(QUEUE)
    large = Output(
        id=output.id, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=QUEUE, message=message, mandatory=True
    )
    with KombuBroker(rabbitmq_url).publisher() as publisher:  # type: ignore[union-attr]
        assert publisher.publish([large], 10) == [None]
    ids = ids_of(shop.send([FINE]))
    with shop.working(threads=1):
        wait_until(lambda: shop.effects().keys() == ids, "the next one is handled")
        wait_until(lambda: shop.depth(f"{QUEUE}.dead") == 1, "the large one is parked")
    (parked,) = shop.broker.browse(f"{QUEUE}.dead", 5)
    assert parked.headers["idemp-dead-reason"] == "OversizedMessage"
    assert parked.body == body
    assert len(shop.runs) == 1
