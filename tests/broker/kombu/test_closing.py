"""An orderly end: what was acked is gone, however much it was just before."""

from __future__ import annotations

import pytest

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuReceiver, consuming
from idemp.broker.port import Ack, Delivery, Topology
from idemp.testing import FaultProxy
from tests.broker.kombu.tools import SOON, an_output, raw_link, received, within
from tests.servers.process import wait_until

# Each time without luck about two thirds of the acks are forgotten; some times there is luck.
TIMES = 5
MESSAGES = 120


def refill(broker: KombuBroker, publisher: ConfirmingPublisher, *queues: str) -> None:
    """Exactly so many messages in each queue."""
    with raw_link(broker._url) as link:
        for queue in queues:
            link.channel.queue_purge(queue)
    outputs = [an_output(queue, number=number) for queue in queues for number in range(MESSAGES)]
    assert set(publisher.publish(outputs, SOON)) == {None}


def taken(broker: KombuBroker, count: int, *queues: str) -> tuple[KombuReceiver, list[Delivery]]:
    receiver = broker.receiver(queues or ("work",), prefetch=MESSAGES)
    return receiver, [received(receiver) for _ in range(count)]


def left(broker: KombuBroker, expected: int, queue: str = "work") -> int:
    """How many came back; they do at once, when the broker sees the end of the connection."""
    wait_until(lambda: broker.depth(queue) >= expected, "what was not acked is back")
    return broker.depth(queue)


@pytest.mark.parametrize("cancelled", [False, True], ids=["consuming", "cancelled before"])
def test_many_acks_right_before_the_end(broker: KombuBroker, publisher: ConfirmingPublisher, cancelled: bool) -> None:
    """Quorum queues get at most 32 at once, and the channel forgets what it kept back."""
    for _ in range(TIMES):
        refill(broker, publisher, "work")
        receiver, deliveries = taken(broker, 100)
        if cancelled:
            receiver.cancel()
        for delivery in deliveries:
            receiver.settle(delivery, Ack())
        receiver.close()
        assert left(broker, MESSAGES - 100) == MESSAGES - 100


def test_ack_after_much_was_given_back(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """The last handler of a worker ends right after everything ahead of it was given back."""
    for _ in range(TIMES):
        refill(broker, publisher, "work")
        receiver, (delivery,) = taken(broker, 1)
        wait_until(lambda: broker.depth("work") == 0, "all are on their way here")
        assert receiver._is_alive(delivery.tag)
        receiver.cancel()
        receiver.settle(delivery, Ack())
        receiver.close()
        assert left(broker, MESSAGES - 1) == MESSAGES - 1


@pytest.mark.parametrize("cancelled", [False, True], ids=["consuming", "cancelled before"])
def test_acks_of_several_queues(broker: KombuBroker, publisher: ConfirmingPublisher, cancelled: bool) -> None:
    """Each queue has a backlog of its own."""
    broker.declare(Topology(exchange="", queues=("work", "other")))
    for _ in range(TIMES):
        refill(broker, publisher, "work", "other")
        receiver, deliveries = taken(broker, 2 * MESSAGES, "work", "other")
        if cancelled:
            receiver.cancel()
        for delivery in deliveries:
            if delivery.message.body != b'{"number": 7}':
                receiver.settle(delivery, Ack())
        receiver.close()
        assert (left(broker, 1, "work"), left(broker, 1, "other")) == (1, 1)


@pytest.mark.parametrize("cancelled", [False, True], ids=["consuming", "cancelled before"])
def test_a_link_that_fell_silent_holds_nobody_up(
    broker: KombuBroker,
    publisher: ConfirmingPublisher,
    rabbitmq_url: str,
    cancelled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queues are asked, and their answer is waited for no longer than is allowed; nothing is raised."""
    monkeypatch.setattr(consuming, "_SURE_SECONDS", 0.5)
    refill(broker, publisher, "work")
    host, port = rabbitmq_url.partition("@")[2].partition("/")[0].split(":")
    with FaultProxy(host, int(port)) as proxy:
        receiver, deliveries = taken(KombuBroker(proxy.through(rabbitmq_url)), 100)
        if cancelled:
            receiver.cancel()
        proxy.half_open()
        for delivery in deliveries:
            receiver.settle(delivery, Ack())
        with within(1.5):
            receiver.close()


def test_many_accepted_right_before_the_end(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """What was replayed or discarded does not come back."""
    for _ in range(TIMES):
        refill(broker, publisher, "work")
        with broker.take("work", None, MESSAGES) as taken_messages:
            taken_messages.accept_all(range(100))
        assert left(broker, MESSAGES - 100) == MESSAGES - 100
