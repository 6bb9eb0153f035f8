"""RabbitMQ that refuses, blocks, closes and restarts; and messages of strangers. Their clients are pika and plain py-amqp."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import amqp
import pika
import pytest

from idemp import ConfigurationError, Context, Idempotent, Retry
from idemp.brokers.rabbitmq import RabbitBroker
from idemp.brokers.rabbitmq.broker import ARGUMENTS
from idemp.brokers.rabbitmq.link import PROPERTIES, Link, _properties, addresses
from idemp.context import EXCHANGE
from idemp.testing.conformance import output
from idemp.worker import Worker
from tests.servers import ask
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import Rabbitmq
from tests.test_hostile import hostile
from tests.worker.test_loop import wait_for
from tests.world import Order, World, effect


@pytest.fixture
def broker(vhost: str) -> RabbitBroker:
    broker = RabbitBroker(vhost)
    assert broker.declare("stock", []) == []
    return broker


@pytest.fixture
def publisher(broker: RabbitBroker) -> Iterator[Any]:
    with closing(broker.publisher()) as publisher:
        yield publisher


def plain(url: str) -> Any:
    """Return a connection that shares no code with idemp."""
    return pika.BlockingConnection(pika.URLParameters(url))


def bodies(broker: RabbitBroker, count: int) -> list[bytes]:
    found: list[bytes] = []
    with closing(broker.receiver("stock", 100)) as receiver:
        while len(found) < count and (some := receiver.receive(100, 10.0)):
            receiver.ack(some)
            found += [each.body for each in some]
    return found


def test_one_bad_output_is_found_among_its_neighbours(broker: RabbitBroker, publisher: Any) -> None:
    good = [output(body=b"%d" % number) for number in range(3)]
    bad = output(exchange="nowhere")
    unsendable = output(properties={"message_id": "7", "headers": {"x" * 300: 1}})
    odd = output(properties={"message_id": "7", "headers": {"x": {1, 2}}})
    answers = publisher.publish([good[0], bad, good[1], unsendable, odd, good[2]], 10.0)
    assert [answer is None for answer in answers] == [True, False, True, False, False, True]
    assert all(answer.own for answer in answers if answer)
    assert set(bodies(broker, 3)) == {b"0", b"1", b"2"}  # neighbours may come twice, under their id


@pytest.mark.parametrize("known", [True, False])
def test_headers_that_fit_into_no_frame_are_to_blame_and_their_neighbours_are_not(
    broker: RabbitBroker, publisher: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:  # the broker closes the connection with code 501
        monkeypatch.setattr(Link, "longest_properties", 10**9)
    bad = output(properties={"message_id": "7", "headers": {"tracestate": "x" * 140_000}})
    outputs = [output(body=b"0"), bad, *(output(body=b"%d" % number) for number in range(1, 20))]
    for _ in range(2 if known else 1):
        answers = publisher.publish(outputs, 10.0)
        assert [answer is None for answer in answers] == [each is not bad for each in outputs]
        assert answers[1].own
    found = Counter(bodies(broker, 40 if known else 21))
    assert len(found) == 20
    assert max(found.values()) <= 2  # each call sends a neighbour once more at most


def test_an_output_for_which_the_connection_is_cut_is_found_among_its_neighbours(vhost: str, broker: RabbitBroker) -> None:
    (address,) = addresses(vhost)
    with (
        Proxy(address.port, lambda data: "before" if b"cut here" in data else "") as proxy,
        closing(RabbitBroker(vhost.replace(f":{address.port}", f":{proxy.port}")).publisher()) as publisher,
    ):
        outputs = [output(body=b"0"), output(body=b"cut here"), *(output(body=b"%d" % number) for number in range(1, 20))]
        answers = publisher.publish(outputs, 10.0)
        assert [answer is None for answer in answers] == [number != 1 for number in range(21)]
        assert answers[1] is not None
        assert answers[1].own  # the broker takes all others
        (alone,) = publisher.publish(outputs[1:2], 10.0)
        assert alone is not None
        assert not alone.own  # as far as is known, an outage
    found = Counter(bodies(broker, 20))
    assert len(found) == 20
    assert max(found.values()) <= 2


def test_a_full_queue_is_an_outage(vhost: str, broker: RabbitBroker, publisher: Any) -> None:
    with closing(plain(vhost)) as connection:
        channel = connection.channel()
        arguments = {"x-queue-type": "quorum", "x-max-length": 2, "x-overflow": "reject-publish"}
        channel.queue_declare("full", durable=True, arguments=arguments)

        def publish() -> list[bool]:
            answers = publisher.publish([output(routing_key="full"), output()], 10.0)
            assert not any(answer.own for answer in answers if answer)
            return [answer is None for answer in answers]

        wait_for(lambda: publish() == [False, True])  # the limit of a quorum queue is not exact
        channel.queue_purge("full")
        wait_for(lambda: publish() == [True, True])


def test_an_alarm_blocks_until_it_ends(own_node: Rabbitmq) -> None:
    broker = RabbitBroker(own_node.url)
    broker.declare("stock", [])
    with closing(broker.publisher()) as publisher:
        own_node.alarm("on")
        try:
            (answer,) = publisher.publish([output()], 2.0)
            assert answer is not None
            assert not answer.own
        finally:
            own_node.alarm("off")
        wait_for(lambda: publisher.publish([output()], 5.0) == [None])


def test_a_restart_is_survived(own_node: Rabbitmq) -> None:
    broker = RabbitBroker(own_node.url)
    broker.declare("stock", [])
    with closing(broker.publisher()) as publisher, closing(broker.receiver("stock")) as receiver:
        assert publisher.publish([output(body=b"1")], 10.0) == [None]
        wait_for(lambda: receiver.receive(10, 1.0))
        own_node.restart()
        wait_for(lambda: publisher.publish([output(body=b"2")], 10.0) == [None])
        found: set[bytes] = set()

        def both() -> bool:
            try:
                found.update(each.body for each in receiver.receive(10, 1.0))
            except Exception as error:
                assert "RabbitMQ" in str(error)
            return {b"1", b"2"} <= found

        wait_for(both)


def test_a_deleted_queue_is_declared_again(vhost: str, broker: RabbitBroker, publisher: Any) -> None:
    with closing(broker.receiver("stock")) as receiver, closing(plain(vhost)) as connection:
        assert receiver.receive(1, 0.1) == []
        connection.channel().queue_delete("stock")
        seen: list[Any] = []

        def received() -> bool:
            try:
                seen.extend(receiver.receive(10, 0.5))
            except Exception as error:
                assert "RabbitMQ" in str(error)
            if not seen:
                publisher.publish([output()], 5.0)
            return bool(seen)

        wait_for(received)


def test_another_queue_of_the_name_is_a_finding(vhost: str) -> None:
    with closing(plain(vhost)) as connection:
        channel = connection.channel()
        channel.queue_declare("classic", durable=True)
        channel.queue_declare("low", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 3})
    (finding,) = RabbitBroker(vhost).declare("classic", [])
    assert (finding.level, "not a quorum queue" in finding.text) == ("yellow", True)
    (finding,) = RabbitBroker(vhost).declare("low", [])
    assert (finding.level, "other arguments" in finding.text) == ("red", True), finding.text


@pytest.mark.parametrize(
    ("ours", "others", "level", "text"),
    [
        (True, {"x-single-active-consumer": True}, "yellow", "further arguments (x-single-active-consumer=True)"),
        (True, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "x", "x-max-length": 9}, "yellow", "x-max-length=9"),
        (True, {"x-message-ttl": 1000}, "red", "x-message-ttl=1000"),
        (False, {"x-queue-type": "quorum", "x-max-length": 9}, "red", "no x-delivery-limit"),
        (False, {"x-queue-type": "stream"}, "red", "x-queue-type=stream"),
        (False, {"x-queue-type": "classic", "x-max-priority": 9, "x-message-ttl": 1000}, "yellow", "not a quorum queue"),
        (False, {"x-queue-mode": "lazy"}, "yellow", "not a quorum queue"),
    ],
)
def test_arguments_of_a_queue_are_named(vhost: str, ours: bool, others: Any, level: str, text: str) -> None:
    with closing(plain(vhost)) as connection:
        connection.channel().queue_declare("shop", durable=True, arguments={**(ARGUMENTS if ours else {}), **others})
    (finding,) = RabbitBroker(vhost).declare("shop", [])
    assert (finding.level, text in finding.text) == (level, True), finding


def test_the_permissions_of_the_page_are_enough(vhost: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().replace("\\|", "|")
    patterns = [
        re.findall(rf"^\| {kind} \| `(.*?)`", page, re.MULTILINE)[0].replace("\\", "\\\\")
        for kind in ("configure", "write", "read")
    ]
    name = f"user{os.urandom(4).hex()}"
    texts = ", ".join(f'<<"{pattern}">>' for pattern in patterns)
    made = f'ok = rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{name}">>, <<"test">>), ok = rabbit_auth_backend_internal:set_permissions('
    ask("rabbitmq", "evaluate", f'{made}<<"{name}">>, <<"{vhost.rpartition("/")[2]}">>, {texts}, <<"test">>)')
    broker = RabbitBroker(vhost.replace("guest:guest", f"{name}:{name}"))
    assert broker.declare("billing", ["shop.Pay"]) == []
    sent = [
        output(routing_key="billing"),
        output(exchange=EXCHANGE, routing_key="shop.Pay"),
        output(routing_key="billing.unstorable"),
    ]
    with closing(broker.publisher()) as publisher, closing(broker.receiver("billing")) as receiver:
        assert publisher.publish(sent, 10.0) == [None] * 3
        taken: list[Any] = []
        wait_for(lambda: taken.extend(receiver.receive(10, 0.5)) or len(taken) == 2)
        receiver.ack(taken)
    finding = RabbitBroker(vhost.replace("guest:guest", f"{name}:{name}")).declare("others", [])[0]
    assert (finding.level, "may not be created" in finding.text) == ("red", True)


def test_a_long_handler_keeps_its_connection(vhost: str) -> None:
    broker = RabbitBroker(vhost, heartbeat=3)
    broker.declare("stock", [])
    with closing(broker.publisher()) as publisher, closing(broker.receiver("stock")) as receiver:
        publisher.publish([output()], 10.0)
        held = receiver.receive(1, 30.0)
        ended = threading.Event()

        def keep_alive() -> None:
            while not ended.wait(0.2):
                receiver.keep_alive()

        thread = threading.Thread(target=keep_alive)
        thread.start()
        try:
            time.sleep(7)  # more than two heartbeats
            receiver.ack(held)
            assert publisher.publish([output(body=b"2")], 10.0) == [None]  # by another connection, if the first was lost
            assert [each.body for each in receiver.receive(1, 30.0)] == [b"2"]
            assert not receiver.receive(1, 0.5)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("count", [200, pytest.param(3_000, marks=pytest.mark.slow)])
def test_hostile_messages_are_parked_and_good_ones_handled(url: str, vhost: str, count: int) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    policy = Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,)))
    world = World(url, handle, policy, settings={"broker_url": vhost, "group": 100})
    worker = world.worker()
    chance, good = random.Random(7), max(20, count // 10)
    sent: set[tuple[bytes, bytes]] = set()
    (address,) = addresses(vhost)
    with closing(amqp.Connection(f"{address.host}:{address.port}", virtual_host=address.vhost)) as connection:
        connection.connect()
        channel = connection.channel()
        for number in range(count):
            body, properties = strange(chance)
            sent.add((body, properties))
            message = raw(body, properties)
            channel.basic_publish_confirm(message, "", "shop")
            if number % (count // good) == 0:
                text = json.dumps({"order_id": f"good {number}"}).encode()
                channel.basic_publish_confirm(amqp.Message(text, type="shop.Order", message_id=f"good {number}"), "", "shop")
    expected = {f"good {number}": 1 for number in range(0, count, count // good)}

    def done() -> bool:
        worker.intake.look_again()
        if worker.step(poll=0.05) != 0:
            return False
        world.pass_time(10)
        return len(rows := world.rows()) >= len(sent) and all(row.due_at is None for row in rows)

    wait_for(done, seconds=280)
    assert world.effects() == expected
    assert len(sent) <= len(world.dead()) <= count  # equal ones share a dead letter, if they say an id
    assert all(each["error"] for each in world.dead())
    worker.close()


def strange(chance: random.Random) -> tuple[bytes, bytes]:
    """Return a body and encoded properties that no handler may see."""
    kind = chance.randrange(5)
    if kind == 0:  # an id that is not UTF-8
        return b"{}", struct.pack(">H", 0x0080) + b"\x04\xff\xfe\xfd" + bytes([chance.randrange(256)])
    if kind == 1:  # milliseconds where seconds belong
        table = b"\x01xT" + struct.pack(">Q", 10**15 + chance.randrange(10**6))
        return b"{}", struct.pack(">H", 0x2000) + struct.pack(">I", len(table)) + table
    while True:
        body, properties = hostile(chance)
        if properties.get("type") is None or len(body) > 100_000:
            continue
        try:
            message = amqp.Message(
                body,
                application_headers=properties.get("headers"),
                **{name: value for name, value in properties.items() if name != "headers"},
            )
            return body, message._serialize_properties()
        except Exception:  # which AMQP cannot carry
            continue


def raw(body: bytes, properties: bytes) -> amqp.Message:
    message = amqp.Message(body)
    message._serialize_properties = lambda: properties
    return message


def properties_of(**values: Any) -> bytes:
    """Encode properties as AMQP 0-9-1 says, and as no library would."""
    flags, found = 0, b""
    for bit, (name, kind) in enumerate(PROPERTIES):
        if name in values:
            flags |= 0x8000 >> bit
            value: bytes = values[name]
            found += {"s": bytes([len(value)]), "F": struct.pack(">I", len(value))}.get(kind, b"") + value
    return struct.pack(">H", flags) + found


SECONDS = struct.pack(">q", -1), struct.pack(">Q", 1_700_000_000_000), struct.pack(">Q", 2**64 - 1)
KNOWN = {"type": b"shop.Plain", "message_id": b"m", "timestamp": struct.pack(">Q", 1_700_000_000)}
READ = [*({"application_headers": b"\x01xT" + each} for each in SECONDS), *({"timestamp": each} for each in SECONDS)]
NESTED = {"application_headers": b"\x01yt\x01\x01xF" + struct.pack(">I", 11) + b"\x01zT" + SECONDS[1]}
REFUSED = [  # by RabbitMQ
    {"application_headers": b"\x01yt\x01\x01x?abc"},  # a type that nobody knows
    {"application_headers": b"\x01yt\x01\x01xS" + struct.pack(">I", 100) + b"abc"},  # cut short
    {"application_headers": b"\x01yt\x01\x01xI\x01"},
    {"application_headers": b"\x01yt\x01\x01x"},
    {"application_headers": b"\x01yt\x01\xff"},
    {"application_headers": b"\x02\xff\xfeT" + SECONDS[1] + b"\x01yt\x01"},
    {"application_headers": b"\x02\xff\xfeI\x00\x00\x00\x01\x01yt\x01"},
]
UNREAD = [
    NESTED,
    {"application_headers": b"\x04k\xf6lnS\x00\x00\x00\x01x\x01yt\x01", "message_id": b"\xff\xfe"},  # a name that is not UTF-8
    {"correlation_id": b"\xff\xfe"},
    {"message_id": b"\xff\xfe"},
    {"type": b"\xff\xfe"},
    {"content_type": b"\xff\xfe", "reply_to": b"\xff"},
]


@pytest.mark.parametrize("changes", [NESTED, *REFUSED])
def test_headers_are_read_one_by_one(changes: dict[str, bytes]) -> None:
    found, whole = _properties(properties_of(**{**KNOWN, **changes}))
    assert (found["type"], found["message_id"], found["timestamp"]) == ("shop.Plain", "m", 1_700_000_000)
    assert (found["application_headers"], whole) == ({"y": True}, False)


def test_a_property_that_is_cut_short_is_no_other_one() -> None:
    found, whole = _properties(properties_of(message_id=b"m", type=b"shop.Plain")[:-3])
    assert (found, whole) == ({"message_id": "m"}, False)


def test_what_can_be_read_of_properties_stays_and_no_other_type_runs(url: str, vhost: str) -> None:
    """Header, timestamp, text: what py-amqp cannot decode empties nothing else."""

    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    world = World(url, handle, settings={"broker_url": vhost})
    app = world.app()
    wrong: list[Any] = []

    @app.handler(Order, type="shop.Default", default=True)
    def default(message: Order, ctx: Context) -> None:
        wrong.append(ctx.properties)

    worker = Worker(app)
    (address,) = addresses(vhost)
    with closing(amqp.Connection(f"{address.host}:{address.port}", virtual_host=address.vhost)) as connection:
        connection.connect()
        channel = connection.channel()
        for number, changes in enumerate([*READ, *UNREAD]):
            body = json.dumps({"order_id": str(number)}).encode()
            channel.basic_publish_confirm(raw(body, properties_of(**{**KNOWN, **changes})), "", "shop")
    wait_for(lambda: worker.step(poll=0.1) == 0 and len(world.effects()) + len(world.dead()) == len(READ) + len(UNREAD))
    assert wrong == []
    assert world.effects() == {str(number): 1 for number in range(len(READ))}
    rows = [json.loads(row.headers) for row in world.rows()]
    assert {each["rule"] for each in world.dead()} == {"unreadable"}
    assert sum(row.get("type") == "shop.Plain" for row in rows) == len(UNREAD) - 1  # its own is the one that cannot be read
    assert sum(row.get("headers") == {"y": True} for row in rows) == 2
    assert all(row["unreadable"] for row in rows)
    worker.close()


def test_urls_of_providers() -> None:
    first, second = addresses("amqps://user:p%40ss@one.example/v%2Fhost?ca_certs=/ca.pem;amqp://two.example:5673/v%2Fhost")
    assert (first.host, first.port, first.user, first.password, first.vhost) == ("one.example", 5671, "user", "p@ss", "v/host")
    assert first.tls == {"cert_reqs": 2, "server_hostname": "one.example", "ca_certs": "/ca.pem"}
    assert (second.port, second.tls, second.vhost) == (5673, None, "v/host")
    with pytest.raises(ConfigurationError, match="different virtual hosts"):
        addresses("amqp://one/shop;amqp://two")


def test_headers_that_are_nested_too_deeply_are_a_dead_letter(url: str, vhost: str) -> None:
    world = World(url, settings={"broker_url": vhost})
    worker = world.worker()
    nested = b""
    for _ in range(5_000):
        nested = b"A" + struct.pack(">I", len(nested)) + nested
    table = b"\x01x" + nested
    properties = struct.pack(">H", 0x2000) + struct.pack(">I", len(table)) + table
    (address,) = addresses(vhost)
    with closing(amqp.Connection(f"{address.host}:{address.port}", virtual_host=address.vhost)) as connection:
        connection.connect()
        channel = connection.channel()
        channel.basic_publish_confirm(raw(b"{}", properties), "", "shop")
        channel.basic_publish_confirm(amqp.Message('{"order_id": "1"}', type="shop.Order", message_id="1"), "", "shop")
        wait_for(lambda: worker.step(poll=0.1) == 0 and world.effects() == {"1": 1})
    assert len(world.rows()) == 1
    worker.close()


def test_a_message_keeps_its_time(broker: RabbitBroker, publisher: Any) -> None:
    sent = output()
    sent.properties["timestamp"] = 1_764_000_000.5
    assert publisher.publish([sent], 10.0) == [None]
    with closing(broker.receiver("stock")) as receiver:
        (delivery,) = receiver.receive(1, 10.0)
    assert delivery.properties["timestamp"] == 1_764_000_000  # AMQP has whole seconds


@pytest.mark.parametrize("body", [b"[[7], {}]", b"", b"\x80\xff"])
def test_a_message_of_another_library_arrives_as_it_was_made(
    vhost: str, broker: RabbitBroker, publisher: Any, body: bytes
) -> None:
    made: dict[str, Any] = {
        "content_type": "application/json", "content_encoding": "utf-8", "correlation_id": "c", "reply_to": "answers",
        "priority": 3, "message_id": "its own", "timestamp": 1_764_000_000, "type": "T", "app_id": "shop", "expiration": "60000",
        "headers": {"task": "shop.pack", "timelimit": [None, None], "idemp-fingerprint": "none", "retries": 0, "nested": {"a": [1]}},
    }  # fmt: skip
    ctx = Context("billing", {"message_id": "cause", "correlation_id": "other"}, None, None)
    ctx.forward(body, {**made, "user_id": None, "delivery_mode": 1}, to="stock")
    assert publisher.publish(ctx.outputs(), 10.0) == [None]
    with closing(plain(vhost)) as connection:
        _, properties, arrived = connection.channel().basic_get("stock", auto_ack=True)
    assert arrived == body
    del properties.headers["x-delivery-count"]  # which a quorum queue adds
    assert {name: value for name, value in vars(properties).items() if value is not None} == {**made, "delivery_mode": 2}


def test_a_classic_queue_is_used_with_a_warning(url: str, vhost: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(plain(vhost)) as connection:
        connection.channel().queue_declare("shop", durable=True)
    world = World(url, settings={"broker_url": vhost})
    world.app().declare()
    assert [record.event for record in caplog.records if "not a quorum queue" in record.getMessage()] == ["check.warned"]
