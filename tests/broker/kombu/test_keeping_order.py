"""Queues with one active consumer at a time: nobody gets a later message while an earlier one is in another's hands."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuReceiver
from idemp.broker.kombu.topology import main_queue
from idemp.broker.port import Ack, Delivery, OrderedReceiver, Park, Release, Topology
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.testing import FaultProxy
from tests.broker.kombu.tools import SOON, an_output, raw_link, received

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT, MANY = 8, 300
TIMES = 10
"""Each time without luck most acks are forgotten that nobody made sure of; some times there is luck."""
TOPOLOGY = Topology(exchange="", queues=("ordered",), single_active=True)


def declared(url: str) -> KombuBroker:
    broker = KombuBroker(url)
    broker.declare(TOPOLOGY)
    return broker


@pytest.fixture
def ordered(rabbitmq_url: str) -> KombuBroker:
    """A broker with such a queue, and messages in it."""
    broker = declared(rabbitmq_url)
    with closing(broker.publisher()) as publisher:
        assert isinstance(publisher, ConfirmingPublisher)
        assert publisher.publish([an_output("ordered", number=n) for n in range(COUNT)], SOON) == [None] * COUNT
    return broker


def opened(broker: KombuBroker, prefetch: int = COUNT) -> KombuReceiver:
    receiver = broker.receiver(["ordered"], prefetch=prefetch)
    assert isinstance(receiver, KombuReceiver)
    return receiver


def number_of(delivery: Delivery) -> int:
    return int(json.loads(delivery.message.body)["number"])


def taken(receiver: KombuReceiver, count: int) -> list[Delivery]:
    deliveries = [received(receiver) for _ in range(count)]
    assert receiver.receive(0.3) is None
    return deliveries


def cancel(receiver: KombuReceiver, held: list[Delivery]) -> None:
    receiver.cancel()


def release(receiver: KombuReceiver, held: list[Delivery]) -> None:
    for delivery in reversed(held[1::2]):
        receiver.settle(delivery, Release())


def settle_some(receiver: KombuReceiver, held: list[Delivery]) -> None:
    receiver.settle(held[0], Ack())
    receiver.settle(held[2], Ack())
    receiver.settle(held[3], Park("Refuse"))
    receiver.end_settled()


@pytest.mark.parametrize(
    ("act", "left"),
    [(cancel, range(COUNT)), (release, range(COUNT)), (settle_some, (1, 4, 5, 6, 7))],
    ids=["cancelled", "released", "settled"],
)
def test_the_next_one_begins_where_it_ended(
    ordered: KombuBroker, act: Callable[[KombuReceiver, list[Delivery]], None], left: range | tuple[int, ...]
) -> None:
    """And not before its end, whatever it was told."""
    with closing(opened(ordered, prefetch=6)) as first:
        held = [received(first) for _ in range(6)]
        with closing(opened(ordered)) as second:
            act(first, held)
            assert second.receive(0.3) is None
            first.close()
            assert [number_of(each) for each in taken(second, len(left))] == list(left)


def test_what_ended_cannot_come_again(rabbitmq_url: str) -> None:
    """Neither the parked one nor those that were acked before it, though the connection breaks at once."""
    port = int(rabbitmq_url.rpartition(":")[2].partition("/")[0])
    with FaultProxy("127.0.0.1", port) as proxy, closing(declared(rabbitmq_url).publisher()) as publisher:
        through = declared(proxy.through(rabbitmq_url))
        for _ in range(TIMES):
            publisher.publish([an_output("ordered", number=n) for n in range(MANY)], SOON)
            broken = opened(through, prefetch=MANY)
            held = [received(broken) for _ in range(MANY)]
            for delivery in held[1:-1]:  # one by one, since an earlier one is held; RabbitMQ keeps most of them back
                broken.settle(delivery, Ack())
            broken.settle(held[-1], Park("Refuse"))
            assert isinstance(broken, OrderedReceiver)
            broken.end_settled()
            proxy.cut(reset=True)
            broken.close()
            with closing(opened(KombuBroker(rabbitmq_url))) as receiver:
                (again,) = taken(receiver, 1)
                assert number_of(again) == 0
                receiver.settle(again, Ack())


@pytest.mark.parametrize("go_on", [KombuReceiver.end_settled, lambda receiver: receiver.receive(SOON)])
def test_a_refused_copy_costs_the_connection(rabbitmq_url: str, ordered: KombuBroker, go_on: Any) -> None:
    """Its message would be put behind those that came after it."""
    with raw_link(rabbitmq_url) as link:
        link.channel.queue_delete("ordered.dead")
        full = {"x-max-length": 0, "x-overflow": "reject-publish"}
        link.channel.queue_declare("ordered.dead", durable=True, auto_delete=False, arguments=full)
    with closing(opened(ordered, prefetch=6)) as first:
        first.settle([received(first) for _ in range(6)][1], Park("Refuse"))
        with pytest.raises(BrokerUnavailable):
            go_on(first)
    with closing(opened(ordered)) as second:
        assert [number_of(each) for each in taken(second, COUNT)] == list(range(COUNT))


def test_a_queue_for_all_has_to_be_made_anew(rabbitmq_url: str) -> None:
    with raw_link(rabbitmq_url) as link:
        main_queue("ordered").declare(link.open_channel())
    with pytest.raises(
        ConfigurationError, match=r"x-single-active-consumer.*idemp broker rebuild MODULE:APP --queue ordered"
    ):
        declared(rabbitmq_url)
    broker = KombuBroker(rabbitmq_url)
    with closing(broker.publisher()) as publisher:
        publisher.publish([an_output("ordered", number=n) for n in range(COUNT)], SOON)
    assert broker.rebuild(TOPOLOGY, "ordered").back == COUNT
    broker.declare(TOPOLOGY)
    with closing(opened(broker)) as receiver:
        assert [number_of(each) for each in taken(receiver, COUNT)] == list(range(COUNT))
