"""Frames that are too large: the broker cuts the connection without naming one, and that costs no other message anything."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING, ClassVar

import pytest

from idemp import App
from idemp.broker.port import Ack, Park, Topology
from idemp.broker.stomp import StompBroker
from idemp.broker.stomp.address import Address
from idemp.broker.stomp.limits import Size
from idemp.broker.stomp.link import Link, Lost
from idemp.errors import BrokerUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.relay import Relay, Round
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from tests.broker.stomp.test_broker import SOON, an_output, answer
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.broker.stomp.receiver import StompReceiver
    from idemp.messages import Output

pytestmark = pytest.mark.slow

LARGEST = 20_000
CUT = "The maximum frame size was exceeded"


class Narrow(ActiveMQ):
    """Takes small frames only."""

    options: ClassVar[str] = f"?wireFormat.maxFrameSize={LARGEST}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with private(Narrow) as server:
        yield server.url


@pytest.fixture
def broker(url: str) -> StompBroker:
    """Knows nothing yet of what is too large."""
    return StompBroker(url)


@pytest.fixture
def queue(broker: StompBroker, unique_name: str) -> str:
    """A declared queue of the test's own."""
    broker.declare(Topology(exchange="", queues=(unique_name,)))
    return unique_name


def guilty(queue: str, kind: str) -> Output:
    """An output that is too large."""
    if kind == "by its headers":
        return an_output(queue, bytes(15_000), headers={"one": "x" * 3_000, "two": "y" * 3_000})
    # The second fills all that the network holds: the broker hangs up while it is being written.
    return an_output(queue, bytes({"by its body": LARGEST, "while it is written": 30_000_000}[kind]))


@pytest.mark.parametrize("kind", ["by its headers", "by its body", "while it is written"])
def test_only_the_one_that_is_too_large_is_refused(broker: StompBroker, queue: str, kind: str) -> None:
    """Among others, some with a larger body; the next time it is not even tried, and nobody loses the connection."""
    outputs = [an_output(queue, bytes(10)), guilty(queue, kind)]
    outputs += [an_output(queue, bytes(1_000)), guilty(queue, kind), an_output(queue, bytes(19_000))]
    with closing(broker.publisher()) as publisher:
        for _ in range(2):
            answers = publisher.publish(outputs, SOON)
            assert [refusal and refusal.kind for refusal in answers] == [None, "unsendable", None, "unsendable", None]
            assert answers[1] is not None
            assert CUT in answers[1].detail
            link = publisher._link
        publisher.publish(outputs[1:2], SOON)
        assert publisher._link is link
    # Some perhaps more than twice: the broker may take what follows a frame for which it cuts the connection.
    assert {message.message_id for message in broker.browse(queue, 100)} == {
        output.message.message_id for output in outputs[::2]
    }


def test_it_is_quarantined_and_the_others_go(broker: StompBroker, queue: str) -> None:
    """One round of a relay, in which all are under way together."""
    app = App("shop", store=InMemoryStore(), broker=broker, settings=Settings())
    with app.initiate() as unit:
        for size in (10, LARGEST, 15_000):
            unit.send({"text": "x" * size}, to=queue, type="stock.Reserve")
    with closing(broker.publisher()) as publisher:
        assert Relay(app.store.upkeep, publisher, max_attempts=1).run_once() == Round(3, 2, 1)
    assert len({message.message_id for message in broker.browse(queue, 10)}) == 2


def test_longer_than_the_brokers_own_limit(activemq_url: str, unique_name: str) -> None:
    """Never sent: ActiveMQ obeys, for a moment, the frames that stand in a body which it refused."""
    broker = StompBroker(activemq_url)
    broker.declare(Topology(exchange="", queues=(unique_name,)))
    kind, detail = answer(broker, an_output(unique_name, bytes(100 * 1024 * 1024 + 1))) or ("", "")
    assert (kind, "data length" in detail) == ("unsendable", True)


def test_no_receipt_after_the_end_is_ours() -> None:
    """One that a frame inside of a refused body asked for would confirm what never arrived."""

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(b"CONNECTED\nversion:1.2\n\n\0")
            received = b""
            while received.count(b"SEND\n") < 2:
                received += connection.recv(10_000)
            said = f"ERROR\nmessage:{CUT}\n\n\0RECEIPT\nreceipt-id:r1\n\n\0ERROR\nreceipt-id:r2\nmessage:no\n\n\0"
            connection.sendall(said.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Background(serve)
        with Link(Address.of(f"stomp://127.0.0.1:{listener.getsockname()[1]}"), SOON) as link:
            posted = [link.post("SEND", {"destination": "/queue/a"}) for _ in range(2)]
            server.result(SOON)
            for receipt in posted:
                with pytest.raises(Lost, match=CUT):
                    link.answer(receipt, time.monotonic() + SOON)


def filling(queue: str, left: int, *, delay: float = 0.0) -> Output:
    """An output whose frame leaves so many bytes of what the broker takes, as far as a publisher's own headers go."""
    headers = {"destination": f"/queue/{queue}", "receipt": "r100", "content-length": "19000", "persistent": "true"}
    headers |= {"idemp-message-id": "m" * 36, "content-type": "application/json", "idemp-more-0": "{}"}
    if delay:
        headers |= {"destination": f"/queue/{queue}.waiting-1", "idemp-due": "1700000000000"}
    return an_output(queue, bytes(LARGEST - left - Size.of("SEND", headers, b"").whole), delay=delay)


def park_all(receiver: StompReceiver, large: Output) -> int:
    """Park the large one, ack its neighbours; how many of them came."""
    neighbours = 0
    while (delivery := receiver.receive(0.2)) is not None:
        if delivery.message.message_id == large.message.message_id:
            receiver.settle(delivery, Park("Refuse", {"idemp-dead-stack": "x" * 1_000}))
        else:
            receiver.settle(delivery, Ack())
            neighbours += 1
    receiver.end_settled()
    return neighbours


def cut_once(broker: StompBroker, queue: str, large: Output) -> None:
    """Until the broker cuts a connection nobody knows how much it takes; what is held then comes again."""
    with closing(broker.receiver([queue], prefetch=3)) as receiver, pytest.raises(BrokerUnavailable, match=CUT):
        park_all(receiver, large)


def test_parked_with_the_reason_alone(broker: StompBroker, queue: str) -> None:
    """Where the story does not fit beside the message."""
    large = filling(queue, left=500)
    assert answer(broker, large) is None
    cut_once(broker, queue, large)
    with closing(broker.receiver([queue], prefetch=3)) as receiver:
        assert park_all(receiver, large) == 0
    (dead,) = broker.browse(f"{queue}.dead", 10)
    assert (dead.message_id, dead.body) == (large.message.message_id, large.message.body)
    assert dead.headers == {"idemp-dead-reason": "Refuse"}
    assert broker.depth(queue) == 0


def test_what_has_no_room_at_all_is_told(broker: StompBroker, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """It comes again after a pause, without costing the connection: its neighbours are handled meanwhile."""
    large = filling(queue, left=0)
    assert answer(broker, large) is None
    for _ in range(2):  # with its story, and without
        cut_once(broker, queue, large)
    assert answer(broker, an_output(queue, b"neighbour")) is None
    with closing(broker.receiver([queue], prefetch=3)) as receiver:
        assert park_all(receiver, large) == 1
    told = [record for record in caplog.records if getattr(record, "event", "") == "copy_refused"]
    assert [(record.kind, record.queues) for record in told] == [("unsendable", [queue])]  # type: ignore[attr-defined]
    assert (broker.depth(queue), broker.depth(f"{queue}.dead")) == (1, 0)


def test_where_an_order_is_kept_it_is_told_too(
    broker: StompBroker, unique_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """There it holds up those behind it, so the receiver ends."""
    broker.declare(Topology(exchange="", queues=(unique_name,), single_active=True))
    large = filling(unique_name, left=0)
    assert answer(broker, large) is None
    for told in (0, 0, 1):
        cut_once(broker, unique_name, large)
        events = [getattr(record, "event", "") for record in caplog.records]
        assert events.count("copy_refused") == told
    assert len(broker.browse(unique_name, 10)) == 1


def test_what_came_later_has_room(broker: StompBroker, queue: str) -> None:
    """Its move takes no larger frame than its way there."""
    later = filling(queue, left=0, delay=0.1)
    assert answer(broker, later) is None
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        found = receiver.receive(SOON)
    assert found is not None
    assert found.message.message_id == later.message.message_id
