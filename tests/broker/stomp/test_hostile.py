"""What others write badly, name wrongly or leave unanswered: it costs neither the receiver nor a neighbour."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import pytest

from idemp.broker.port import Binding, Park, Retry, Topology
from idemp.broker.stomp import StompBroker
from idemp.broker.stomp.address import Address
from idemp.broker.stomp.link import Link
from idemp.broker.stomp.statistics import Numbers, Statistics
from idemp.broker.stomp.topology import read
from idemp.broker.stomp.wire import message_of
from idemp.errors import ConfigurationError
from idemp.messages import Message
from idemp.testing.store_bench import Background
from tests.broker.kombu.test_tls import certificate
from tests.broker.stomp.test_broker import SOON, an_output, answer
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def broker(activemq_url: str) -> StompBroker:
    return StompBroker(activemq_url)


@pytest.fixture
def queue(broker: StompBroker, unique_name: str) -> str:
    """A declared queue of the test's own."""
    broker.declare(Topology(exchange="", queues=(unique_name,)))
    return unique_name


def send(url: str, queue: str, headers: dict[str, str]) -> None:
    """As somebody without idemp does."""
    with Link(Address.of(url), SOON) as link:
        place = {"destination": f"/queue/{queue}", "persistent": "true"}
        link.call("SEND", {**place, **headers}, b"{}", deadline=time.monotonic() + SOON)


@pytest.mark.parametrize(
    "more",
    [
        "[" * 4000,
        "[1]",
        '{"headers": 5}',
        '{"timestamp": 5}',
        '{"timestamp": "x"}',
        '{"timestamp": "2025-01-01T12:00:00"}',
        '{"type": [1], "message_id": 5, "content_type": null, "correlation_id": {}, "reply_to": 0}',
        '{"priority": true, "ttl": 1e999}',
        '{"priority": "high", "ttl": -1}',
        '{"ttl": 1e300}',
        f'{{"ttl": {"9" * 400}}}',
    ],
)
def test_what_is_written_badly_is_left_out(more: str) -> None:
    headers = {"idemp-message-id": "m-1", "idemp-more-0": more}
    assert message_of(headers, b"") == Message(body=b"", message_id="m-1")


def test_it_can_be_parked_as_others(broker: StompBroker, activemq_url: str, queue: str) -> None:
    """A message that can't be read would come for ever, and take its worker with it."""
    send(activemq_url, queue, {"idemp-more-0": '{"timestamp": "x", "ttl": 1e300}'})
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        for settlement in (Retry(timedelta(0), counted=True), Park("Refuse")):
            delivery = receiver.receive(SOON)
            assert delivery is not None
            receiver.settle(delivery, settlement)
    assert broker.depth(f"{queue}.dead") == 1


def test_long_headers_of_others_can_be_parked(broker: StompBroker, activemq_url: str, queue: str) -> None:
    headers = {f"h{number}": "ü" * 4_600 for number in range(30)}
    send(activemq_url, queue, headers)
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        delivery = receiver.receive(SOON)
        assert delivery is not None
        receiver.settle(delivery, Park("Refuse"))
    (dead,) = broker.browse(f"{queue}.dead", 10)
    assert dead.headers == {**headers, "idemp-dead-reason": "Refuse"}


def test_what_can_not_be_said_comes_again(
    broker: StompBroker, activemq_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Headers that take more than the broker has: its neighbours are handled meanwhile."""
    send(activemq_url, queue, {f"h{number}": "ü" * 4_600 for number in range(100)})
    with closing(broker.receiver([queue], prefetch=2)) as receiver:
        delivery = receiver.receive(SOON)
        assert delivery is not None
        receiver.settle(delivery, Park("Refuse"))
        assert [record.queues for record in caplog.records if getattr(record, "event", "") == "copy_refused"] == [
            [queue]
        ]  # type: ignore[attr-defined]
        assert answer(broker, an_output(queue, b"neighbour")) is None
        bodies = {found.message.body for _ in range(2) if (found := receiver.receive(SOON)) is not None}
        assert bodies == {b"{}", b"neighbour"}


def test_a_header_that_says_end_is_no_end(broker: StompBroker, activemq_url: str, queue: str) -> None:
    """Nobody hides messages from those who look into a queue."""
    for headers in ({"browser": "end"}, {"tenant": "a"}):
        send(activemq_url, queue, headers)
    assert [message.headers for message in broker.browse(queue, 10)] == [{}, {"tenant": "a"}]


@pytest.mark.parametrize("due", ["9" * 5_000, "9" * 400, "-1", "soon"])
def test_what_waits_until_nonsense_comes_at_once(broker: StompBroker, activemq_url: str, queue: str, due: str) -> None:
    send(activemq_url, f"{queue}.waiting-1", {"idemp-due": due})
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        delivery = receiver.receive(SOON)
    assert delivery is not None


def test_headers_too_deep_to_write_come_again(broker: StompBroker, queue: str) -> None:
    """What could just be read need not be writable where the stack is fuller: that must not end the worker."""
    assert answer(broker, an_output(queue)) is None
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        for settlement in (Park("Refuse", {"idemp-dead-story": deep}), Park("Refuse")):
            delivery = receiver.receive(SOON)
            assert delivery is not None
            receiver.settle(delivery, settlement)
    assert broker.depth(f"{queue}.dead") == 1


@pytest.mark.parametrize("headers", [{"title": "漢" * 3_900}, {f"h{number}": "v" for number in range(1_100)}])
def test_headers_that_take_bytes(broker: StompBroker, queue: str, headers: dict[str, str]) -> None:
    """The broker counts bytes and headers; what it cuts the connection for must not look like a neighbour's fault."""
    with closing(broker.publisher()) as publisher:
        larger = an_output(queue, bytes(50_000))
        assert publisher.publish([larger, an_output(queue, headers=headers)], SOON) == [None, None]
    assert [message.headers for message in broker.browse(queue, 10)] == [{}, headers]


def test_an_answer_to_nobody_comes_back(broker: StompBroker, activemq_url: str, queue: str) -> None:
    """A temporary queue is gone with its owner: no time mends that, as a full store's refusal."""
    with Link(Address.of(activemq_url), SOON) as asking:
        asking.subscribe("/temp-queue/answers", deque(), {"ack": "auto"})
        place = {"destination": f"/queue/{queue}", "reply-to": "/temp-queue/answers"}
        asking.call("SEND", place, b"?", deadline=time.monotonic() + SOON)
        (question,) = broker.browse(queue, 1)
        assert question.reply_to is not None
        assert answer(broker, an_output(question.reply_to)) is None
    refused = answer(broker, an_output(question.reply_to))
    assert refused is not None
    assert refused[0] == "returned"


@pytest.mark.parametrize("name", ["*", ">", "a,b", "a?consumer.prefetchSize=1", "", "shop.*"])
def test_one_queue_by_name(broker: StompBroker, name: str) -> None:
    """None of these reaches into several queues at once."""
    for look in (lambda: broker.depth(name), lambda: broker.browse(name, 1), lambda: broker.take(name, None, 1)):
        with pytest.raises(ConfigurationError, match="can't have a queue"):
            look()


@pytest.mark.parametrize("place", ["idemp.topology", "/queue/idemp.topology", "/orders", "/dsub/orders"])
def test_where_no_answer_goes(broker: StompBroker, place: str) -> None:
    """Whoever asks says where the answer goes: not into the registry, nor into a queue that the broker makes for it."""
    refused = answer(broker, an_output(place, b'{"queues": {}, "exchanges": {"shop": [["#", "spy"]]}}'))
    assert refused is not None
    assert refused[0] == "unsendable"


@pytest.mark.parametrize("name", ["/topic/shop", "shop.*", "", "idemp.topology"])
def test_what_is_no_queue_is_not_declared(broker: StompBroker, name: str) -> None:
    with pytest.raises(ConfigurationError, match="can't have a queue"):
        broker.declare(Topology(exchange="", queues=(name,)))


def test_closing_over_tls_does_not_wait_for_a_frozen_broker(tmp_path: Path) -> None:
    """Which never answers the goodbye of TLS."""
    file = certificate(tmp_path, "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    closed = threading.Event()

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(1000)
            connection.sendall(b"CONNECTED\nversion:1.2\n\n\0")
            assert closed.wait(SOON)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Background(serve)
        link = Link(Address.of(f"stomp+ssl://127.0.0.1:{listener.getsockname()[1]}?ssl_ca_certs={file}"), SOON)
        link.fail("cut by the test")
        closed.set()
        server.result(SOON)


@contextmanager
def a_server(*, answers: bool) -> Iterator[int]:
    """Takes connections, and says nothing or hangs up; the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    taken.append(server.accept()[0])
                    if answers:
                        taken[-1].close()
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(SOON)
            for connection in taken:
                connection.close()


@pytest.mark.parametrize("answers", [True, False], ids=["hangs up", "frozen"])
def test_the_next_host_is_tried(activemq_url: str, unique_name: str, answers: bool) -> None:
    """Also where the first one takes the connection and no more, as a stopped process does."""
    with a_server(answers=answers) as port:
        broker = StompBroker(f"stomp://127.0.0.1:{port};{activemq_url}", connect_timeout=0.6)
        broker.declare(Topology(exchange="", queues=(unique_name,)))
    assert StompBroker(activemq_url).depth(unique_name) == 0


def test_the_registry_stays_small(broker: StompBroker, activemq_url: str, unique_name: str) -> None:
    """A policy's `maxBrowsePageSize` would hide what was declared last; what was bound stays bound meanwhile."""
    first = f"{unique_name}.0"
    broker.declare(Topology(exchange=unique_name, queues=(first,), bindings=(Binding(first, "a.#"),)))
    for number in range(1, 25):
        broker.declare(Topology(exchange="", queues=(f"{unique_name}.{number}",), single_active=number % 2 == 1))
    with Link(Address.of(activemq_url), SOON) as link:
        known = read(link, time.monotonic() + SOON)
    assert known.entries <= 22
    assert known.bound(unique_name, "a.b") == [first]
    assert {known.queues[f"{unique_name}.{number}"] for number in range(0, 25, 2)} == {False}
    assert {known.queues[f"{unique_name}.{number}"] for number in range(1, 25, 2)} == {True}


class NoPlugin(ActiveMQ):
    """Answers no questions about its queues."""

    plugins: ClassVar[str] = ""


def test_a_question_that_nobody_answers_keeps_the_deadline() -> None:
    """Whether a queue of others exists is not waited for longer than its output may take."""
    with private(NoPlugin) as server:
        broker = StompBroker(server.url)
        broker.declare(Topology(exchange="", queues=("q",)))
        began = time.monotonic()
        with closing(broker.publisher()) as publisher:
            ours, others = publisher.publish([an_output("q"), an_output("elsewhere")], 0.7)
        assert time.monotonic() - began < 5
        assert others is not None
        assert (ours, others.kind) == (None, "timeout")


def test_a_restart_is_no_missing_plugin(activemq_url: str, unique_name: str) -> None:
    """A connection that ended while the broker was asked is tried again, before outputs come back for that."""
    send(activemq_url, unique_name, {})
    opened: list[Link] = []

    def opens(timeout: float | None) -> Link:
        opened.append(Link(Address.of(activemq_url), SOON))
        if len(opened) == 1:
            opened[0].fail("cut by the test")
        return opened[-1]

    assert Statistics(opens).of(unique_name) == Numbers(size=1, held=0)
