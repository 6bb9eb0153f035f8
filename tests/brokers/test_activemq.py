"""The conformance suite, on ActiveMQ, and what is its own."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from unittest.mock import ANY
from urllib.parse import urlsplit

import pytest
import stomp

from idemp import App, Idempotent, Retry, Settings
from idemp.brokers.activemq import ActivemqBroker
from idemp.brokers.activemq.broker import REGISTRY
from idemp.brokers.activemq.link import Arrival, addresses
from idemp.brokers.activemq.receiver import properties_of
from idemp.messages import Delivery, Output, encode
from idemp.testing import BrokerConformance, CrashPoints
from idemp.testing.conformance import output
from idemp.worker import Worker
from tests.servers.activemq import Activemq
from tests.servers.proxy import Proxy
from tests.test_kills import insert_send_and_fail_once, run_until, some
from tests.world import SINK, Order, Shipped, World

pytestmark = pytest.mark.slow
QUEUES = [REGISTRY, *(f"{name}{suffix}" for name in ("stock", "audit", "other") for suffix in ("", ".unstorable"))]


class Recording(ActivemqBroker):
    """Remembers what is to be closed after a test."""

    opened: ClassVar[list[Any]] = []

    def receiver(self, queue: str, prefetch: int = 40) -> Any:
        self.opened.append(super().receiver(queue, prefetch))
        return self.opened[-1]

    def publisher(self) -> Any:
        self.opened.append(super().publisher())
        return self.opened[-1]


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A broker of this process's own: its queues have the same names in all tests."""
    with tempfile.TemporaryDirectory(prefix="idemp-activemq-") as folder, Activemq(Path(folder) / "node") as node:
        yield node.url


@pytest.fixture
def url(node: str) -> str:
    """A broker whose queues are empty."""
    receivers = [ActivemqBroker(node).receiver(queue, 1000) for queue in QUEUES]
    while any(found := [receiver.receive(1000, 0.05) for receiver in receivers]):
        for receiver, deliveries in zip(receivers, found, strict=True):
            receiver.ack(deliveries)
    for receiver in receivers:
        receiver.close()
    return node


@pytest.fixture
def brokers() -> list[ActivemqBroker]:
    return []


@pytest.fixture
def open_broker(url: str, brokers: list[ActivemqBroker]) -> Iterator[Callable[[str], ActivemqBroker]]:
    def open_broker(worker: str) -> ActivemqBroker:
        brokers.append(Recording(url))
        return brokers[-1]

    yield open_broker
    while Recording.opened:
        Recording.opened.pop().close()


@pytest.fixture
def lose() -> Callable[[], None]:
    def lose() -> None:
        for each in Recording.opened:
            if each._link is not None:
                each._link.drop()

    return lose


@pytest.fixture
def outage(
    brokers: list[ActivemqBroker], lose: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def outage() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for each in brokers:
                patch.setattr(each, "_hosts", addresses("stomp://127.0.0.1:1"))
            lose()
            yield

    return outage


class TestBroker(BrokerConformance):
    lease = math.inf
    flags_returned = True


class Small(Activemq):
    """Refuses what it has no space for, and commits a transaction whose other sends have failed."""

    attributes = 'rollbackOnlyOnAsyncException="false"'
    usage = (
        '<systemUsage><systemUsage sendFailIfNoSpace="true"><storeUsage><storeUsage limit="16 mb"/></storeUsage></systemUsage>'
        "</systemUsage>"
    )


class Naive(stomp.ConnectionListener):  # type: ignore[misc]
    """A producer that asks for the receipt of its transaction alone."""

    def __init__(self, url: str) -> None:
        self.receipts: SimpleQueue[str] = SimpleQueue()
        self._client = stomp.StompConnection12([("127.0.0.1", urlsplit(url).port)])
        self._client.set_listener("naive", self)
        self._client.connect(wait=True)

    def on_receipt(self, frame: Any) -> None:
        self.receipts.put(frame.headers["receipt-id"])

    def send(self, queue: str, bodies: list[bytes]) -> str:
        self._client.begin("all")
        for body in bodies:
            self._client.send(f"/queue/{queue}", body, headers={"persistent": "true"}, transaction="all")
        self._client.commit("all", receipt="committed")
        receipt = self.receipts.get(timeout=30)
        self._client.transport.disconnect_socket()
        return receipt


def received(broker: ActivemqBroker, queue: str) -> list[Delivery]:
    receiver, found = broker.receiver(queue, 1000), list[Delivery]()
    while some := receiver.receive(1000, 1.0):
        found += some
        receiver.ack(some)
    receiver.close()
    return found


def test_a_broker_without_space_loses_messages_of_others_and_none_of_ours(tmp_path: Path) -> None:
    bodies = [bytes([number]) + bytes(100_000) for number in range(250)]
    with Small(tmp_path / "small") as small:
        broker = ActivemqBroker(small.url)
        broker.declare("stock", [])
        assert Naive(small.url).send("naive", bodies) == "committed"
        assert len(received(broker, "naive")) < len(bodies)  # although its transaction was committed
        todo = {each: output(body=each) for each in bodies}
        publisher, taken, rounds = broker.publisher(), list[bytes](), 0
        while todo:
            answers = publisher.publish(list(todo.values()), 30.0)
            refused = [answer for answer in answers if answer is not None]
            assert not any(refusal.own for refusal in refused)
            todo = {body: sent for (body, sent), answer in zip(list(todo.items()), answers, strict=True) if answer is not None}
            taken += [each.body for each in received(broker, "stock")]
            rounds += 1
        publisher.close()
        assert rounds > 1
        assert set(taken) == set(bodies)


def test_messages_of_other_producers_have_their_properties(url: str) -> None:
    client = stomp.StompConnection12([("127.0.0.1", urlsplit(url).port)])
    client.connect(wait=True)
    headers = {"type": "shop.Order", "correlation-id": "c", "reply-to": "/queue/answers", "message_id": "7", "x-trace": "a:b"}
    client.send("/queue/stock", '{"order_id": 1}', content_type="application/json", headers=headers)
    client.disconnect()
    receiver = ActivemqBroker(url).receiver("stock")
    (found,) = receiver.receive(1, 10.0)
    receiver.close()  # else it takes the messages of other tests
    expected = {"message_id": "7", "type": "shop.Order", "correlation_id": "c", "content_type": "application/json"}
    assert found.properties == {**expected, "reply_to": "answers", "headers": {"x-trace": "a:b"}, "timestamp": ANY}
    assert time.time() - 60 < found.properties["timestamp"] < time.time() + 60


@pytest.mark.parametrize("changes", [{"body": bytes(50_000_001)}, {"properties": {"headers": {"x": "y" * 10_000}}}])
def test_what_is_too_long_is_refused_by_itself(url: str, changes: dict[str, Any]) -> None:
    broker = ActivemqBroker(url)
    broker.declare("stock", [])
    publisher = broker.publisher()
    refused, taken = publisher.publish([output(**changes), output()], 10.0)
    publisher.close()
    assert refused is not None
    assert (refused.own, taken) == (True, None)


def test_an_output_for_which_the_connection_is_cut_keeps_no_neighbour_back(url: str) -> None:
    broker, port = ActivemqBroker(url), urlsplit(url).port
    broker.declare("stock", [])
    with Proxy(port or 0, lambda data: "before" if b"cut here" in data else "") as proxy:
        publisher = ActivemqBroker(f"stomp://127.0.0.1:{proxy.port}").publisher()
        outputs = [output(body=body) for body in (b"1", b"cut here", b"2", b"3")]
        answers = publisher.publish(outputs, 30.0)
        publisher.close()
    assert [answer is None for answer in answers] == [True, False, True, True]
    receiver, found = broker.receiver("stock"), Counter[bytes]()
    while some := receiver.receive(10, 2.0):
        receiver.ack(some)
        found.update(each.body for each in some)
    receiver.close()
    assert set(found) == {b"1", b"2", b"3"}
    assert max(found.values()) <= 2


def test_properties_that_are_no_json_are_unreadable_and_no_other_type() -> None:
    found = properties_of(Arrival("message", {"idemp": "{", "message-id": "7", "ack": "1"}))
    assert found == {"unreadable": "ew=="}


def test_no_host_answers() -> None:
    broker = ActivemqBroker("stomp://127.0.0.1:1;stomp://127.0.0.1:2")
    (refused,) = broker.publisher().publish([output()], 1.0)
    assert refused is not None
    assert refused.own is False
    assert refused.reason.startswith("Unavailable: ActiveMQ cannot be reached: 127.0.0.1:1: ")


def settled(world: World) -> bool:
    """Return whether both orders were handled, and only their delayed outputs wait."""
    return (len(world.effects()), world.pending(), world.rows("stock")) == (2, 2, [])


def run_to_the_end(points: CrashPoints, url: str, broker_url: str) -> None:
    app = App("stock", settings=Settings(database_url=url, broker_url=broker_url))
    app.handler(Order, policy=Idempotent(key="order_id", retry=Retry(attempts=3, delays=(0.0,))))(insert_send_and_fail_once)
    app.process.opened = points.wrap_adapters(app.adapters())
    worker, idle, world = Worker(app), 0, World(url)
    worker.upkeep()
    while idle < 3 or not settled(world):
        worker.intake.look_again()
        taken = worker.step(poll=0.3)
        worker.relay.turn()
        idle = 0 if taken else idle + 1
    worker.close()
    app.close()


def test_a_process_is_killed_at_each_crash_point(url: str, new_url: Callable[[], str]) -> None:
    broker = ActivemqBroker(url)
    for queue in ("stock", SINK):
        broker.declare(queue, [])
    received(broker, SINK)
    for at in some(15):
        world = World(new_url())
        publisher = broker.publisher()
        sent = [
            Output("", "send", "", "stock", {"message_id": id, "type": "shop.Order"}, b'{"order_id": "%d"}' % number)
            for id, number in (("a", 1), ("b", 2), ("a", 1))
        ]
        assert publisher.publish(sent, 10.0) == [None] * 3
        publisher.close()
        name = run_until(at, run_to_the_end, world.url, url)
        world.pass_time(60)
        run_to_the_end(CrashPoints(), world.url, url)
        outputs = {(each.body, each.properties["message_id"]) for each in received(broker, SINK)}
        assert world.effects() == {"1": 1, "2": 1}, name
        bodies = Counter(body for body, _ in outputs)  # once under each id
        assert bodies == {encode(Shipped(order_id=id, part=part)): 1 for id in "12" for part in (0, 1)}, name
        assert (world.rows("stock"), world.pending()) == ([], 2), name  # the delayed ones
        world.close()
        if not name:
            break
    assert at > 30
