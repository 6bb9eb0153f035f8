"""Connections to RabbitMQ: TLS, several hosts, few rights, half frames, and handlers that outlast a server's patience."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pika
import pytest

from idemp import Context, Idempotent, Retry
from idemp.brokers.rabbitmq import RabbitBroker
from idemp.errors import Unavailable
from idemp.testing.conformance import output
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import Rabbitmq
from tests.worker.test_loop import wait_for
from tests.world import Order, World, insert_and_send


@pytest.fixture
def channel(own_node: Rabbitmq) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    with closing(pika.BlockingConnection(pika.URLParameters(own_node.url))) as connection:
        yield connection.channel()


def round_trip(broker: RabbitBroker) -> bool:
    assert broker.declare("stock", ["shop.Order"]) == []
    with closing(broker.publisher()) as publisher, closing(broker.receiver("stock")) as receiver:
        assert publisher.publish([output(body=b"7" * 300_000)], 10.0) == [None]  # many records of TLS
        (delivery,) = receiver.receive(1, 10.0)
        receiver.ack([delivery])
        return len(delivery.body) == 300_000


def test_tls_is_verified(own_node: Rabbitmq) -> None:
    port, authority = own_node.tls_port, f"ca_certs={own_node.authority}"
    assert round_trip(RabbitBroker(f"amqps://guest:guest@localhost:{port}/?{authority}"))
    for url in (f"amqps://guest:guest@localhost:{port}/", f"amqps://guest:guest@127.0.0.1:{port}/?{authority}"):
        with pytest.raises(Unavailable, match="certificate verify failed"):
            RabbitBroker(url).declare("stock", [])


def test_the_next_host_is_tried(own_node: Rabbitmq) -> None:
    nobody = f"amqp://127.0.0.1:{free_port()}"
    assert round_trip(RabbitBroker(f"{nobody};{own_node.url}"))
    with pytest.raises(Unavailable, match="Connection refused"):
        RabbitBroker(f"{nobody};{nobody}").declare("stock", [])


def test_a_host_that_hangs_keeps_no_output_back(own_node: Rabbitmq) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"amqp://127.0.0.1:{silent.getsockname()[1]}"
        broker = RabbitBroker(f"{hanging};{own_node.url}")
        RabbitBroker(own_node.url).declare("stock", [])
        with closing(broker.publisher()) as publisher:
            (answer,) = publisher.publish([output()], 0.5)
            assert answer is not None
            assert publisher.publish([output()], 5.0) == [None]  # by the connection that was opened too late


def test_a_reply_reaches_who_waits_without_a_queue(own_node: Rabbitmq, channel: object) -> None:
    broker, replies = RabbitBroker(own_node.url), []
    broker.declare("asked", [])
    channel.basic_consume("amq.rabbitmq.reply-to", lambda *reply: replies.append(reply[-1]), auto_ack=True)
    channel.basic_publish("", "asked", b"?", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
    with closing(broker.receiver("asked")) as receiver, closing(broker.publisher()) as publisher:
        (question,) = receiver.receive(1, 10.0)
        receiver.ack([question])
        assert publisher.publish([output(routing_key=question.properties["reply_to"], body=b"!")], 10.0) == [None]
    wait_for(lambda: channel.connection.process_data_events(0.1) or replies)
    assert replies == [b"!"]


def test_a_wrong_password_is_said_and_not_shown(own_node: Rabbitmq) -> None:
    with pytest.raises(Unavailable, match="ACCESS_REFUSED") as raised:
        RabbitBroker(f"amqp://guest:geheim@127.0.0.1:{own_node.port}/").declare("stock", [])
    assert "geheim" not in str(raised.value)


def test_who_may_not_configure_uses_what_is_there(url: str, own_node: Rabbitmq, channel: object) -> None:
    own_node.add_user("worker", configure="^$")
    address = own_node.url.replace("guest:guest", "worker:worker")
    (finding, *_) = RabbitBroker(address).declare("nowhere", [])
    assert (finding.level, "does not exist and may not be created" in finding.text) == ("red", True), finding
    RabbitBroker(own_node.url).declare("shop", ["shop.Order"])
    RabbitBroker(own_node.url).declare("sink", [])
    findings = RabbitBroker(address).declare("shop", ["shop.Order"])
    assert {finding.level for finding in findings} == {"yellow"}
    world = World(url, settings={"broker_url": address})
    worker = world.worker()
    channel.basic_publish(
        "idemp.events", "shop.Order", b'{"order_id": "1"}', pika.BasicProperties(message_id="1", type="shop.Order")
    )
    wait_for(lambda: worker.step(poll=0.1) and world.effects() == {"1": 1})
    assert channel.queue_declare("sink", passive=True).method.message_count == 2
    worker.close()


def test_half_a_frame_holds_nobody_up(own_node: Rabbitmq) -> None:
    body = b"<half of this>"
    with Proxy(own_node.port, hold=lambda data: data.index(body) + 5 if body in data else None) as proxy:
        broker = RabbitBroker(own_node.url.replace(str(own_node.port), str(proxy.port)))
        RabbitBroker(own_node.url).declare("half", [])
        with closing(RabbitBroker(own_node.url).publisher()) as publisher:
            assert publisher.publish([output(routing_key="half", body=body)], 10.0) == [None]
        with closing(broker.receiver("half")) as receiver:
            assert receiver.receive(1, 1.0) == []
            proxy.released.set()
            (delivery,) = receiver.receive(1, 10.0)
            assert delivery.body == body
            receiver.ack([delivery])


def test_a_handler_outlasts_the_consumer_timeout(url: str, own_node: Rabbitmq, channel: object) -> None:
    """The broker closes the channel and gives the messages back; the redelivery is a row, which waits for no acknowledgement."""

    def handle(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id == "slow" and world.runs["slow"] == 1:
            wait_for(lambda: "has timed out waiting for delivery acknowledgement" in (own_node.base / "log").read_text())

    channel.queue_delete("shop")
    own_node.consumer_timeout(1_000)
    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))), {"broker_url": own_node.url})
    try:
        worker = world.worker()
        RabbitBroker(own_node.url).declare("sink", [])
        for id in ("1", "slow", "2", "3"):
            properties = pika.BasicProperties(message_id=id, type="shop.Order")
            channel.basic_publish("", "shop", b'{"order_id": "%s"}' % id.encode(), properties)

        def left() -> int:
            return int(channel.queue_declare("shop", passive=True).method.message_count) + len(world.rows())

        def done() -> bool:
            worker.intake.look_again()
            return worker.step(poll=0.1) == 0 and len(world.effects()) == 4 and not left()

        wait_for(done)
        assert (world.effects(), world.runs["slow"]) == (dict.fromkeys(["1", "slow", "2", "3"], 1), 1)
        worker.close()
        assert left() == 0
    finally:
        own_node.consumer_timeout(1_800_000)
        world.close()
