"""What ActiveMQ and STOMP can do to messages beside what every broker can."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest
import stomp

from idemp.broker.guarantees import SUPPORTED, guarantees_of
from idemp.broker.making import make_broker
from idemp.broker.port import Ack, Binding, Park, Retry, Topology
from idemp.broker.stomp import StompBroker
from idemp.broker.stomp.address import Address
from idemp.broker.stomp.link import Link, Lost, Refused
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.messages import Message, Output, OutputKind
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from tests.broker.kombu.test_tls import Proxy, certificate
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private
from tests.servers.process import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SOON = 10.0


class Reticent(ActiveMQ):
    """Wants a password, tells no numbers, and stops reading where it has no space."""

    plugins: ClassVar[str] = (
        '<simpleAuthenticationPlugin><users><authenticationUser username="shop" password="s3cret" groups="all"/>'
        "</users></simpleAuthenticationPlugin>"
        "<authorizationPlugin><map><authorizationMap><authorizationEntries>"
        '<authorizationEntry queue="q.>" read="all" write="all" admin="all"/>'
        '<authorizationEntry queue="idemp.>" read="all" write="all" admin="all"/>'
        '<authorizationEntry queue="ActiveMQ.>" read="all" write="all" admin="all"/>'
        '<authorizationEntry queue="secret" read="nobody" write="nobody" admin="nobody"/>'
        '<authorizationEntry topic=">" read="all" write="all" admin="all"/>'
        "</authorizationEntries></authorizationMap></map></authorizationPlugin>"
    )
    usage: ClassVar[str] = (
        '<systemUsage><systemUsage><storeUsage><storeUsage limit="2 mb"/></storeUsage></systemUsage></systemUsage>'
    )

    @property
    def url(self) -> str:
        """With its only user."""
        return f"stomp://shop:s3cret@127.0.0.1:{self.port}"


class Forgetful(ActiveMQ):
    """Keeps messages in memory only."""

    attributes: ClassVar[str] = 'persistent="false"'


@pytest.fixture(scope="module")
def reticent() -> Iterator[str]:
    with private(Reticent) as server:
        yield server.url


@pytest.fixture(scope="module")
def silent(reticent: str) -> StompBroker:
    """Knows after its first question that nobody answers, which takes seconds."""
    broker = StompBroker(reticent)
    broker.declare(Topology(exchange="", queues=("q",)))
    return broker


@pytest.fixture
def broker(activemq_url: str) -> StompBroker:
    return StompBroker(activemq_url)


@pytest.fixture
def queue(broker: StompBroker, unique_name: str) -> str:
    """A declared queue of the test's own."""
    broker.declare(
        Topology(exchange="shop", queues=(unique_name,), bindings=(Binding(unique_name, f"{unique_name}.#"),))
    )
    return unique_name


def an_output(queue: str, body: bytes = b"{}", *, delay: float = 0.0, **properties: object) -> Output:
    message = Message(body=body, message_id=str(uuid4()), **properties)  # type: ignore[arg-type]
    return Output(
        id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message, delay=delay
    )


def answer(broker: StompBroker, output: Output, timeout: float = SOON) -> tuple[str, str] | None:
    with closing(broker.publisher()) as publisher:
        (refusal,) = publisher.publish([output], timeout)
        return refusal and (refusal.kind, refusal.detail)


def test_made_by_its_scheme() -> None:
    broker = make_broker("stomp+ssl://shop:s3cret@broker", Settings())
    assert repr(broker) == "StompBroker('stomp+ssl://***@broker')"
    assert "stomp" in SUPPORTED
    assert guarantees_of("stomp+ssl://h").at_least_once


@pytest.mark.parametrize(
    "url",
    [
        "stomp://u:s3/cret@h:1x",
        "stomp://u:s3cret@h;stomp+ssl://h",
        "stomp+tls://u:s3cret@h",
        "stomp://a;stomp://u:s3cret@b",
        "stomp://u:s3cret@h?ssl_ca_certs=/etc/ca.pem",
        "stomp+ssl://u:s3cret@h?ssl_ca_cert=/etc/ca.pem",
    ],
)
def test_urls_that_can_not_be_used(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_broker(url, Settings())
    assert "cret" not in str(caught.value)


def test_without_the_client() -> None:
    """The error names the extra that brings it."""
    code = "import sys; sys.modules['stomp'] = None\nfrom idemp import App\nApp('shop', broker='stomp://h').broker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'idemp[activemq]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("tls", [False, True])
def test_nobody_reads_from_what_is_closed(activemq_url: str, unique_name: str, tmp_path: Path, tls: bool) -> None:
    """The next connection has the same number in this process, and over TLS lost bytes to the thread of the one before."""
    file = certificate(tmp_path, "IP:127.0.0.1")
    before = set(threading.enumerate())
    with closing(Proxy(file, Address.of(activemq_url).hosts[0][1])) as proxy:
        broker = StompBroker(f"stomp+ssl://127.0.0.1:{proxy.port}?ssl_ca_certs={file}" if tls else activemq_url)
        broker.declare(Topology(exchange="", queues=(unique_name,)))
        for _ in range(10):
            with closing(broker.publisher()) as publisher:
                assert publisher.publish([an_output(unique_name)], SOON) == [None]
                assert "idemp-stomp" in {thread.name for thread in set(threading.enumerate()) - before}
            with closing(broker.receiver([unique_name], prefetch=10)):
                pass
            assert "idemp-stomp" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_nobody_there() -> None:
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"No connection.*refused"):
        StompBroker(f"stomp://u:s3cret@127.0.0.1:{free_port()}").declare(Topology(exchange="", queues=()))
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(("host", "trusted"), [("IP:127.0.0.1", True), ("IP:127.0.0.1", False), ("DNS:else", True)])
def test_tls_looks_at_the_certificate(
    activemq_url: str, unique_name: str, tmp_path: Path, host: str, trusted: bool
) -> None:
    """One that nobody vouches for, or of another host, is refused."""
    file = certificate(tmp_path, host)
    with closing(Proxy(file, Address.of(activemq_url).hosts[0][1])) as proxy:
        url = f"stomp+ssl://127.0.0.1:{proxy.port}"
        broker = StompBroker(f"{url}?ssl_ca_certs={file}" if trusted else url)
        if not trusted or host.startswith("DNS"):
            with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
                broker.declare(Topology(exchange="", queues=(unique_name,)))
            return
        broker.declare(Topology(exchange="", queues=(unique_name,)))
        bodies = [bytes([number]) * 700 * number for number in range(100)]
        with closing(broker.publisher()) as publisher:
            assert set(publisher.publish([an_output(unique_name, body) for body in bodies], SOON)) == {None}
        with closing(broker.receiver([unique_name], prefetch=10)) as receiver:
            for body in bodies:
                delivery = receiver.receive(SOON)
                assert delivery is not None
                assert delivery.message.body == body
                receiver.settle(delivery, Ack())
        assert broker.depth(unique_name) == 0


def test_the_end_of_a_tls_connection_is_seen(tmp_path: Path) -> None:
    """At once: stomp.py itself would ask for more without a pause, until no heartbeat came."""
    file = certificate(tmp_path, "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    connected = threading.Event()

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(1000)
            connection.sendall(b"CONNECTED\nversion:1.2\n\n\0")
            connected.wait(SOON)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Background(serve)
        url = f"stomp+ssl://127.0.0.1:{listener.getsockname()[1]}?ssl_ca_certs={file}"
        with Link(Address.of(url), SOON) as link, pytest.raises(Lost, match="closed the connection"):
            connected.set()
            link.wait(lambda: None, time.monotonic() + 5.0)
        server.result(SOON)


def test_wrong_password(reticent: str) -> None:
    with pytest.raises(ConfigurationError, match="password is wrong") as caught:
        StompBroker(reticent.replace("s3cret", "guessed")).declare(Topology(exchange="", queues=("q",)))
    assert "guessed" not in str(caught.value)


def test_wrong_password_of_one_who_is_slow(reticent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker has hung up before the socket is looked at again; it is the password all the same."""
    connect = stomp.StompConnection12.connect

    def slowly(client: Any, *arguments: Any, **options: Any) -> None:
        connect(client, *arguments, **options)
        wait_until(lambda: client.transport.socket is None, "the broker hung up")

    monkeypatch.setattr(stomp.StompConnection12, "connect", slowly)
    with pytest.raises(ConfigurationError, match="password is wrong"):
        StompBroker(reticent.replace("s3cret", "guessed")).declare(Topology(exchange="", queues=("q",)))


def test_what_this_user_may_not_do(silent: StompBroker) -> None:
    """Is said at once, and is no fault of the connection."""
    silent.declare(Topology(exchange="", queues=("secret",)))
    kind, detail = answer(silent, an_output("secret")) or ("", "")
    assert (kind, "not authorized" in detail) == ("unsendable", True)
    with pytest.raises(ConfigurationError, match="not authorized"):
        silent.receiver(["secret"], prefetch=1)


def test_an_error_fails_exactly_its_unit(activemq_url: str, queue: str) -> None:
    """A frame that the broker refuses costs neither its neighbours nor the connection."""
    with Link(Address.of(activemq_url), SOON) as link:
        deadline = time.monotonic() + SOON
        place = {"destination": f"/queue/{queue}", "persistent": "true"}
        first = link.post("SEND", place, b"1")
        wrong = link.post("ACK", {"id": "nobody's"})
        last = link.post("SEND", place, b"2")
        link.answer(first, deadline)
        with pytest.raises(Refused, match="Unexpected ACK"):
            link.answer(wrong, deadline)
        link.answer(last, deadline)
        assert link.lost is None


def test_queues_of_others(broker: StompBroker, activemq_url: str, unique_name: str) -> None:
    """What exists takes messages, but holds none back: nobody there would hand it on."""
    assert answer(broker, an_output(unique_name)) == ("returned", f"there is no queue '{unique_name}'")
    with Link(Address.of(activemq_url), SOON) as link:  # as a service with JMS makes it
        link.call("SEND", {"destination": f"/queue/{unique_name}"}, b"x", deadline=time.monotonic() + SOON)
    assert answer(broker, an_output(unique_name)) is None
    refused = answer(broker, an_output(unique_name, delay=1.0))
    assert refused is not None
    assert refused[0] == "unsendable"
    assert answer(broker, an_output("orders.*"))[0] == "unsendable"  # type: ignore[index]


def test_messages_of_others(broker: StompBroker, activemq_url: str, queue: str) -> None:
    """Their id is the broker's, also when it was tried again and parked."""
    with Link(Address.of(activemq_url), SOON) as link:
        place = {"destination": f"/queue/{queue}", "persistent": "true"}
        headers = {
            **place,
            "type": "shop.Sell",
            "tenant": "münchen: ✓\n",
            "priority": "7",
            "reply-to": "/queue/answers",
        }
        link.call("SEND", headers, b"{}", deadline=time.monotonic() + SOON)
    with closing(broker.receiver([queue], prefetch=5)) as receiver:
        first = receiver.receive(SOON)
        assert first is not None
        message = first.message
        assert (message.type, message.headers, message.priority) == ("shop.Sell", {"tenant": "münchen: ✓\n"}, 7)
        assert (message.reply_to, message.ttl, message.timestamp is None) == ("answers", None, False)
        receiver.settle(first, Retry(first.message.timestamp - first.message.timestamp, counted=True))  # type: ignore[operator]
        again = receiver.receive(SOON)
        assert again is not None
        assert (again.message.message_id, again.attempt) == (message.message_id, 2)
        receiver.settle(again, Park("Refuse"))
    (dead,) = broker.browse(f"{queue}.dead", 10)
    assert dead.message_id == message.message_id
    assert dead.timestamp == message.timestamp


def test_headers_of_any_size(broker: StompBroker, queue: str) -> None:
    """The broker takes 10 KiB a header, and a thousand of them; what can't be said is the output's own fault."""
    story = {"long": "ü: \n" * 10_000, "AMQ_SCHEDULED_DELAY": "100000", "destination": "/queue/else"}
    assert answer(broker, an_output(queue, headers=story)) is None
    assert broker.browse(queue, 1)[0].headers == story
    assert answer(broker, an_output(queue, headers={"huge": "x" * 2_000_000}))[0] == "unsendable"  # type: ignore[index]


def test_what_comes_due_while_a_handler_runs(broker: StompBroker, queue: str) -> None:
    """It waits in the hands of a receiver whose thread is busy; the heartbeats' thread moves it, and another takes it."""
    with closing(broker.receiver([queue], prefetch=1)) as busy:
        assert answer(broker, an_output(queue, b"long")) is None
        assert busy.receive(SOON) is not None
        assert answer(broker, an_output(queue, b"later", delay=0.2)) is None
        with closing(broker.receiver([queue], prefetch=1)) as other:
            found = None
            deadline = time.monotonic() + SOON
            while found is None and time.monotonic() < deadline:
                busy.keep_alive()
                found = other.receive(0.05)
            assert found is not None
            assert found.message.body == b"later"


def test_expired_messages_do_not_come(broker: StompBroker, queue: str) -> None:
    """The broker drops what is older than its ttl; a dead letter has no age."""
    assert answer(broker, an_output(queue, b"old", ttl=0.001)) is None
    assert answer(broker, an_output(queue, b"new", ttl=60.0)) is None
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        found = receiver.receive(SOON)
        assert found is not None
        assert found.message.body == b"new"
        receiver.settle(found, Park("Refuse"))
    (dead,) = broker.browse(f"{queue}.dead", 10)
    assert dead.ttl == 60.0


def test_a_publisher_outlives_its_connection(broker: StompBroker, queue: str) -> None:
    with closing(broker.publisher()) as publisher:
        assert publisher.publish([an_output(queue)], SOON) == [None]
        publisher._link.fail("cut by the test")  # type: ignore[union-attr]
        assert publisher.publish([an_output(queue)], SOON) == [None]
    assert broker.depth(queue) == 2


def test_a_receiver_says_that_its_connection_is_lost(broker: StompBroker, queue: str) -> None:
    assert answer(broker, an_output(queue)) is None
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        held = receiver.receive(SOON)
        assert held is not None
        assert held.alive()
        receiver._link.fail("cut by the test")
        assert not held.alive()
        with pytest.raises(BrokerUnavailable, match="cut by the test"):
            receiver.settle(held, Ack())
    with closing(broker.receiver([queue], prefetch=1)) as receiver:
        again = receiver.receive(SOON)
        assert again is not None
        assert again.message.message_id == held.message.message_id


def test_a_broker_that_tells_no_numbers(silent: StompBroker) -> None:
    """Depths count what is held, too; queues that nobody declared take nothing."""
    broker = silent
    assert [answer(broker, an_output("q")) for _ in range(3)] == [None] * 3
    assert broker.depth("q") == 3
    kind, detail = answer(broker, an_output("elsewhere")) or ("", "")
    assert (kind, "statisticsBrokerPlugin" in detail) == ("returned", True)
    assert {check.name: check.verdict for check in broker.inspect()} == {"broker": "ok", "statistics": "warning"}
    with broker.take("q", None, 10) as taken:
        assert len(taken.messages) == 3
        for index in range(3):
            taken.accept(index)
    assert broker.depth("q") == 0


def test_a_broker_that_stops_reading(silent: StompBroker) -> None:
    """Without sendFailIfNoSpace nobody says no: the deadline holds all the same, and what was confirmed is there."""
    broker = silent
    began = time.monotonic()
    with closing(broker.publisher()) as publisher:
        answers = publisher.publish([an_output("q", bytes(100_000)) for _ in range(300)], 1.5)
    assert time.monotonic() - began < 15
    kinds = {refusal.kind for refusal in answers if refusal is not None}
    assert kinds <= {"timeout", "closed"}
    assert "timeout" in kinds
    with broker.take("q", None, 100) as taken:
        assert len(taken.messages) >= answers.count(None) > 5
        for index in range(len(taken.messages)):
            taken.accept(index)


def test_what_doctor_finds(broker: StompBroker) -> None:
    topology = Topology(exchange="", queues=("never.declared",))
    found = {check.name: (check.verdict, check.detail) for check in broker.inspect(topology)}
    assert found["broker"][0] == "ok"
    assert "ActiveMQ/5." in found["broker"][1]
    assert found["store"][0] == "ok"
    assert found["queue"] == ("warning", "Not declared yet: never.declared.")


def test_doctor_finds_a_broker_that_forgets() -> None:
    with private(Forgetful) as server:
        found = {check.name: check.verdict for check in StompBroker(server.url).inspect()}
    assert found["store"] == "failed"
