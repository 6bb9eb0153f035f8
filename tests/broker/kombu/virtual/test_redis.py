"""Redis, and kombu's own memory, keep to the broker port; what only Redis can do to messages stands here as well."""

from __future__ import annotations

import re
import shutil
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kombu import Connection, Exchange, Producer, Queue
from redis import Redis as Client
from sqlalchemy import make_url

from idemp.broker.guarantees import SUPPORTED, guarantees_of, markdown
from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.virtual.inspecting import inspect
from idemp.broker.port import Ack, Binding, Park, Release, Retry, Topology
from idemp.errors import BrokerUnavailable, ConfigurationError, GuaranteeError
from idemp.messages import parse_json
from idemp.testing.broker_conformance import BrokerConformance
from tests.broker.kombu.test_tls import Proxy, certificate
from tests.broker.kombu.tools import SOON, an_output, frozen, kinds, received, within
from tests.broker.kombu.virtual.processes import consume, hold
from tests.servers.forked import forking
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.redis import Redis

TOPOLOGY = Topology(
    exchange="shop", queues=("work", "other"), bindings=(Binding("work", "orders.#"), Binding("other", "orders.#"))
)
VISIBLE = 1.0


def a_broker(url: str, **options: Any) -> KombuBroker:
    """A broker with queues `work` and `other`."""
    broker = KombuBroker(url, allow_at_most_once=True, **options)
    broker.declare(TOPOLOGY)
    return broker


@pytest.fixture
def broker(redis_url: str) -> KombuBroker:
    """On the run's Redis, with a short visibility timeout."""
    return a_broker(redis_url, visibility_timeout=VISIBLE)


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """To do what no application of ours does."""
    with closing(Client.from_url(redis_url)) as client:
        yield client


def publish(broker: KombuBroker, *outputs: Any, timeout: float = SOON) -> list[str | None]:
    """What each was refused for."""
    with closing(broker.publisher()) as publisher:
        return kinds(publisher.publish(outputs, timeout))


class TestRedis(BrokerConformance):
    """All cases, over a real one."""

    delay = 0.3

    @pytest.fixture
    def broker(self, redis_url: str) -> KombuBroker:
        """Nobody else uses its database."""
        return KombuBroker(redis_url, allow_at_most_once=True)

    def reopen(self, broker: Any) -> KombuBroker:
        """With connections of its own."""
        return KombuBroker(broker._url, allow_at_most_once=True)


class TestMemory(BrokerConformance):
    """The same over kombu's own memory."""

    delay = 0.1
    quiet = 0.1
    outlives_process = False

    @pytest.fixture
    def broker(self) -> KombuBroker:
        """All of this process share its queues."""
        return KombuBroker("memory://", allow_at_most_once=True)


# What is taken at all


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "memory://"])
def test_has_to_be_asked_for(url: str) -> None:
    """Refused, with the word that allows it; then it can still not keep all promises, and says so."""
    with pytest.raises(GuaranteeError, match="ALLOW_AT_MOST_ONCE"):
        KombuBroker(url)
    assert not KombuBroker(url, allow_at_most_once=True).guarantees.at_least_once


def test_the_table_says_what_is_lost() -> None:
    """When, and what has no effect."""
    assert {"redis", "memory"} <= SUPPORTED
    row = guarantees_of("redis://h")
    for word in ("visibility_timeout", "crash", "failover", "eviction", "ttl", "priorities"):
        assert word in row.remarks
    assert re.search(r"`redis` \| yes \| \*\*no\*\* \| \*\*no\*\* \| no \| a sorted set \| 1 h", markdown())


def test_the_horizon_is_the_visibility_timeout() -> None:
    """One hour unless told otherwise."""
    assert KombuBroker("redis://h", allow_at_most_once=True).guarantees.horizon_seconds == 3600
    longer = KombuBroker("redis://h", allow_at_most_once=True, visibility_timeout=7200)
    assert longer.guarantees.horizon_seconds == 7200


@pytest.mark.parametrize("url", ["sentinel://h", "redis://a;redis://b", "kafka://h"])
def test_without_an_adapter(url: str) -> None:
    """Still refused."""
    with pytest.raises(GuaranteeError, match="no adapter"):
        KombuBroker(url, allow_at_most_once=True)


# Errors


def test_password_is_never_shown(own_redis: Redis) -> None:
    """Neither of a URL that can't be read, nor by a Redis that refuses it."""
    with closing(Client.from_url(own_redis.url)) as client:
        client.config_set("requirepass", "right")
    place = own_redis.url.removeprefix("redis://")
    for url in (f"redis://:sec/ret@{place}", f"redis://:secret@{place}", f"redis://u:secret@{place}", own_redis.url):
        with pytest.raises(ConfigurationError) as caught:
            a_broker(url)
        assert "sec" not in f"{caught.value!r} {caught.value} {caught.value.__cause__}"
    broker = KombuBroker(f"redis://:secret@{place}", allow_at_most_once=True)
    with closing(broker.publisher()) as publisher:
        (refusal,) = publisher.publish([an_output("work")], SOON)
    assert refusal is not None
    assert refusal.kind == "closed"
    assert "secret" not in f"{refusal} {broker!r}"
    assert a_broker(f"redis://:right@{place}").depth("work") == 0


def test_nobody_there() -> None:
    """Every verb says so."""
    broker = KombuBroker("redis://:secret@127.0.0.1:9/0", allow_at_most_once=True)
    for verb in (
        lambda: broker.declare(TOPOLOGY),
        lambda: broker.receiver(["work"]),
        lambda: broker.depth("work"),
        lambda: broker.browse("work", 1),
        lambda: broker.take("work", None, 1),
    ):
        with pytest.raises(BrokerUnavailable, match="refused") as caught:
            verb()
        assert "secret" not in str(caught.value)
    assert publish(broker, an_output("work"), an_output("work")) == ["closed", "closed"]


def test_missing_queue(broker: KombuBroker) -> None:
    """What was never declared is no empty queue."""
    for look in (broker.depth, lambda name: broker.browse(name, 1), lambda name: broker.take(name, None, 1)):
        with pytest.raises(ConfigurationError, match="no queue 'nowhere'"):
            look("nowhere")
    with pytest.raises(BrokerUnavailable, match="no queue 'nowhere'"):
        broker.receiver(["nowhere"])


def test_flushed_while_it_is_consumed(own_redis: Redis) -> None:
    """The receiver says that its queue is gone, and another one of the broker's declared anew gets what is sent then."""
    broker = a_broker(own_redis.url)
    with closing(broker.receiver(["work"])) as receiver, closing(Client.from_url(own_redis.url)) as client:
        assert receiver.receive(0) is None
        client.flushall()
        assert publish(broker, an_output("work")) == ["returned"]
        with pytest.raises(BrokerUnavailable, match="no queue 'work' any more"):
            receiver.receive(SOON)
        broker.declare(TOPOLOGY)
        with closing(broker.receiver(["work"])) as again:
            assert publish(broker, an_output("orders.Placed", exchange="shop")) == [None]
            received(again)


def test_queue_that_only_its_messages_show(broker: KombuBroker, client: Client) -> None:
    """A list that nobody declared is consumed until it is empty, and after that."""
    with closing(broker.publisher()) as publisher:
        assert publisher.publish([an_output("loose", mandatory=False)], SOON) == [None]
    with closing(broker.receiver(["loose"])) as receiver:
        receiver.settle(received(receiver), Ack())
        assert not client.exists("loose")
        assert receiver.receive(2.5) is None


def test_killed_and_started_again(own_redis: Redis) -> None:
    """While it is away everything fails; afterwards the same publisher goes on, and what was held comes at once."""
    broker = a_broker(own_redis.url)
    with closing(broker.publisher()) as publisher, closing(broker.receiver(["work"])) as receiver:
        assert kinds(publisher.publish([an_output("work", number=1)], SOON)) == [None]
        held = received(receiver)
        own_redis.kill()
        assert kinds(publisher.publish([an_output("work")] * 2, SOON)) == ["closed", "closed"]
        with pytest.raises(BrokerUnavailable):
            receiver.receive(0)
        for settlement in (Ack(), Release(), Park("Refuse"), Retry(timedelta(seconds=1), counted=True)):
            with pytest.raises(BrokerUnavailable):
                receiver.settle(held, settlement)
        receiver.keep_alive()
        own_redis.start()
        assert kinds(publisher.publish([an_output("work", number=2)], SOON)) == [None]
        receiver.close()
        with closing(broker.receiver(["work"])) as another:
            assert [parse_json(received(another).message) for _ in range(2)] == [{"number": 1}, {"number": 2}]


def test_a_redis_that_stands_still(own_redis: Redis) -> None:
    """The deadline of a publish holds, and closing takes no longer than a second or two."""
    broker = a_broker(own_redis.url, connect_timeout=1.0)
    publisher, receiver = broker.publisher(), broker.receiver(["work"])
    assert kinds(publisher.publish([an_output("work")], SOON)) == [None]
    received(receiver)
    with frozen(own_redis):
        with within(2.5):
            assert set(kinds(publisher.publish([an_output("work")] * 3, 1.0))) <= {"closed", "timeout"}
        with within(4), pytest.raises(BrokerUnavailable):
            receiver.receive(0.5)
        with within(4):
            receiver.close()
            publisher.close()
    assert kinds(publisher.publish([an_output("work")], SOON)) == [None]
    publisher.close()


def test_a_full_redis_refuses(own_redis: Redis) -> None:
    """Publishing is refused, message by message; what is there can be consumed."""
    broker = a_broker(own_redis.url)
    assert publish(broker, an_output("work")) == [None]
    with closing(Client.from_url(own_redis.url)) as client:
        client.config_set("maxmemory", 1)
    assert publish(broker, an_output("work"), an_output("work")) == ["nacked", "nacked"]
    with closing(broker.receiver(["work"])) as receiver:
        receiver.settle(received(receiver), Release())
        receiver.settle(received(receiver), Ack())


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificates")
@pytest.mark.parametrize(("host", "trusted"), [("IP:127.0.0.1", True), ("IP:127.0.0.1", False), ("DNS:a.b", True)])
def test_tls_looks_at_the_certificate(redis_url: str, tmp_path: Path, host: str, trusted: bool) -> None:
    """One that nobody vouches for, or of another host, is refused, though kombu's own default takes any."""
    file = certificate(tmp_path, host)
    with closing(Proxy(file, make_url(redis_url).port)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/{make_url(redis_url).database}"
        if trusted and host.startswith("IP"):
            broker = a_broker(f"{url}?ssl_ca_certs={file}")
            assert publish(broker, an_output("work")) == [None]
            assert broker.depth("work") == 1
        else:
            with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
                a_broker(f"{url}?ssl_ca_certs={file}" if trusted else url)


def test_an_answer_that_came_too_late(own_redis: Redis) -> None:
    """A message that was taken, though nobody heard of it, comes back when its receiver is closed."""
    broker = a_broker(own_redis.url, connect_timeout=0.5)
    with closing(broker.receiver(["work"])) as receiver:
        assert receiver.receive(0) is None
        assert publish(broker, an_output("work")) == [None]
        receiver._tended = float("inf")  # the next command takes
        with frozen(own_redis), pytest.raises(BrokerUnavailable):
            receiver.receive(1)
        with closing(Client.from_url(own_redis.url)) as client:
            wait_until(lambda: client.hlen("idemp.unacked") == 1, "Redis reads what stands in its socket")
    with closing(broker.receiver(["work"])) as receiver:
        received(receiver)


# Dead and slow workers


def test_a_killed_worker_loses_nothing(broker: KombuBroker, redis_url: str) -> None:
    """What it held comes again after the visibility timeout."""
    assert publish(broker, an_output("work")) == [None]
    context = forking()
    holding = context.Event()
    worker = context.Process(target=hold, args=(redis_url, VISIBLE, holding))
    worker.start()
    try:
        assert holding.wait(SOON)
    finally:
        worker.kill()
        worker.join()
    assert broker.depth("work") == 0
    with closing(broker.receiver(["work"])) as receiver:
        again = received(receiver)
        assert (again.redelivered, again.attempt) == (True, 1)
        receiver.settle(again, Ack())
        assert receiver.receive(1.5 * VISIBLE) is None


@pytest.mark.slow
def test_workers_killed_while_they_consume(broker: KombuBroker, redis_url: str, tmp_path: Path) -> None:
    """Every message is handled, whenever the kill comes."""
    log = tmp_path / "log"
    log.touch()
    outputs = [an_output("work", number=number) for number in range(2000)]
    assert publish(broker, *outputs, timeout=60) == [None] * len(outputs)

    def handled() -> int:
        return len(set(log.read_text().splitlines()))

    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        worker = forking().Process(target=consume, args=(redis_url, VISIBLE, str(log)))
        worker.start()
        try:
            wait_until(lambda share=share: handled() >= share * len(outputs), f"{share:.0%} are handled")
        finally:
            worker.kill()
            worker.join()
    assert broker.depth("work") == broker.depth("work.dead") == 0


def test_a_long_handler_keeps_its_message(broker: KombuBroker) -> None:
    """As long as somebody calls `keep_alive`; a settlement after the visibility timeout says that it came too late."""
    assert publish(broker, an_output("work")) == [None]
    with closing(broker.receiver(["work"])) as slow, closing(broker.receiver(["work"])) as other:
        held = received(slow)
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(VISIBLE / 10):
                slow.keep_alive()

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            assert other.receive(2.5 * VISIBLE) is None
        finally:
            stop.set()
            thread.join()
        again = received(other)
        with pytest.raises(BrokerUnavailable, match="visibility timeout"):
            slow.settle(held, Ack())
        other.settle(again, Ack())
    assert broker.depth("work") == 0


def test_what_is_not_settled_comes_back_in_order(broker: KombuBroker) -> None:
    """Before what was published later."""
    outputs = [an_output("work", number=number) for number in range(4)]
    assert publish(broker, *outputs[:3]) == [None] * 3
    with closing(broker.receiver(["work"])) as receiver:
        held = [received(receiver) for _ in range(3)]
        receiver.settle(held[1], Ack())
        assert publish(broker, outputs[3]) == [None]
    assert [parse_json(message)["number"] for message in broker.browse("work", 9)] == [0, 2, 3]


# Delays


def test_time_to_live_outlives_retries(broker: KombuBroker) -> None:
    """The copies have none; the dead letter tells what it was."""
    with broker.publisher() as publisher:
        assert publisher.publish([an_output("work", ttl=30.0)], SOON) == [None]
    with closing(broker.receiver(["work"], prefetch=1)) as receiver:
        for settlement in (Retry(timedelta(0), counted=False), Retry(timedelta(0), counted=True, attempt=4)):
            receiver.settle(received(receiver), settlement)
        delivery = received(receiver)
        assert (delivery.attempt, delivery.message.ttl) == (4, None)
        receiver.settle(delivery, Park("Refuse"))
    (parked,) = broker.browse("work.dead", 5)
    assert parked.headers["idemp-dead-expiration"] == "30000"


def test_two_receivers_move_what_is_due(broker: KombuBroker, client: Client) -> None:
    """All of it, each message once, however they meet."""
    outputs = [an_output("work", number=number, delay=0.4) for number in range(300)]
    assert publish(broker, *outputs) == [None] * 300
    assert broker.depth("work") == 0
    found: list[Any] = []

    deadline = time.monotonic() + SOON

    def take_all() -> None:
        with closing(broker.receiver(["work"])) as receiver:
            while len(found) < len(outputs) and time.monotonic() < deadline:
                if (delivery := receiver.receive(0.1)) is not None:
                    found.append(delivery.message.message_id)
                    receiver.settle(delivery, Ack())

    threads = [threading.Thread(target=take_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(str(output.id) for output in outputs)
    assert client.zcard("work.delay") == 0
    assert client.hlen("idemp.unacked") == client.zcard("idemp.unacked_index") == 0


def test_delayed_outputs_through_an_exchange(broker: KombuBroker) -> None:
    """They wait beside each queue that is bound when they are published."""
    assert publish(broker, an_output("orders.Placed", exchange="shop", delay=0.4)) == [None]
    with closing(broker.receiver(["work", "other"])) as receiver:
        assert receiver.receive(0.2) is None
        assert {received(receiver).queue for _ in range(2)} == {"work", "other"}


# In company


def test_beside_other_users_of_kombu(broker: KombuBroker, redis_url: str, client: Client) -> None:
    """What kombu sends through an exchange arrives, and comes back to no queue but its own; both ways it is readable."""
    with Connection(redis_url) as connection, connection.channel() as channel:
        exchange = Exchange("shop", "topic", channel=channel)
        exchange.declare()
        for name in ("work", "other"):
            Queue(name, exchange, routing_key="orders.#", channel=channel).declare()
        Producer(channel, exchange).publish(
            {"name": "é"}, routing_key="orders.eu", message_id="m-1", type="t", headers={"a": 1}, priority=5
        )
        for _ in range(2):
            with closing(broker.receiver(["work"])) as receiver:
                delivery = received(receiver)
        assert parse_json(delivery.message) == {"name": "é"}
        assert (delivery.message.message_id, delivery.message.type, delivery.message.headers) == ("m-1", "t", {"a": 1})
        assert (broker.depth("work"), broker.depth("other")) == (1, 1)
        assert client.keys("unacked*") == []
        client.delete("work")
        assert publish(broker, an_output("other", number=7)) == [None]
        assert Queue("other", channel=channel).get().payload == {"number": 7}


def test_a_queue_of_other_users_of_kombu(broker: KombuBroker, redis_url: str) -> None:
    """Answers reach a queue that idemp did not declare, though it is empty."""
    assert publish(broker, an_output("answers")) == ["returned"]
    with Connection(redis_url) as connection, closing(connection.SimpleQueue("answers")) as queue:
        assert publish(broker, an_output("answers", number=1)) == [None]
        assert queue.get(timeout=SOON).payload == {"number": 1}


@pytest.mark.parametrize("junk", [b"junk\n{", b"[]", b'{"properties": {}}', b'{"body": 1, "properties": 2}'])
def test_what_is_no_message_is_parked(broker: KombuBroker, client: Client, junk: bytes) -> None:
    """Byte for byte; those behind it come."""
    client.lpush("work", junk)
    assert publish(broker, an_output("work", number=1)) == [None]
    with closing(broker.receiver(["work"])) as receiver:
        delivery = received(receiver)
        assert parse_json(delivery.message) == {"number": 1}
        receiver.settle(delivery, Ack())
    (dead,) = broker.browse("work.dead", 9)
    assert (dead.body, dead.headers["idemp-dead-reason"]) == (junk, "Unreadable")
    assert client.hlen("idemp.unacked") == 0


def test_declared_with_another_type(broker: KombuBroker, redis_url: str) -> None:
    """A direct exchange takes no patterns."""
    with Connection(redis_url) as connection, connection.channel() as channel:
        Queue("letters", Exchange("post", "direct"), routing_key="a", channel=channel).declare()
    with pytest.raises(ConfigurationError, match="'post' exists with another type"):
        broker.declare(Topology(exchange="post", queues=("work",)))


def test_taking_while_others_consume(broker: KombuBroker) -> None:
    """What is taken by id leaves the others in place and in order; what was not accepted goes to the front."""
    outputs = [an_output("work", number=number) for number in range(5)]
    assert publish(broker, *outputs) == [None] * 5
    with broker.take("work", [str(outputs[3].id), str(outputs[1].id)], 9) as taken:
        assert [parse_json(message)["number"] for message in taken.messages] == [1, 3]
        assert [parse_json(message)["number"] for message in broker.browse("work", 9)] == [0, 2, 4]
        taken.accept(0)
    wait_until(lambda: broker.depth("work") == 4, "it is back")
    assert [parse_json(message)["number"] for message in broker.browse("work", 9)] == [3, 0, 2, 4]


def test_an_option_of_the_url_that_nobody_knows_is_refused(redis_url: str) -> None:
    url = f"{redis_url}?visibility_timeout=60"
    looks = (lambda: KombuBroker(url, allow_at_most_once=True).depth("stock"), lambda: inspect(url, timeout=5))
    for look in looks:
        with pytest.raises(ConfigurationError, match=r"visibility_timeout.*out of the URL") as caught:
            look()
        assert caught.value.fix
