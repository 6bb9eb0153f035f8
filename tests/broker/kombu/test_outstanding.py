"""A retried or parked delivery ends when the broker has confirmed its copy; nobody waits for that."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuReceiver, consuming
from idemp.broker.kombu.posting import Post
from idemp.broker.kombu.wire import parcel_of
from idemp.broker.port import Ack, Park, Retry, Topology
from idemp.errors import BrokerError, BrokerUnavailable
from idemp.testing import FaultProxy
from tests.broker.kombu.tools import SOON, an_output, full, raw_link, received, within
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.rabbitmq import RabbitMQ

PATIENCE = 1.0  # seconds that a copy may take here
PARK = Park("Refuse")


@contextmanager
def receiving(broker: KombuBroker, copies_over: str, *, prefetch: int = 10) -> Iterator[KombuReceiver]:
    """A receiver of `work` whose copies take another way than its deliveries."""
    receiver = broker.receiver(["work"], prefetch=prefetch)
    assert isinstance(receiver, KombuReceiver)
    receiver._settle_timeout = receiver._outstanding._timeout = PATIENCE
    receiver._post._url = receiver._publisher._url = copies_over
    try:
        yield receiver
    finally:
        receiver.close()


def send(publisher: ConfirmingPublisher, count: int, first: int = 0) -> None:
    outputs = [an_output("work", number=number) for number in range(first, first + count)]
    assert publisher.publish(outputs, SOON) == [None] * count


def test_connection_of_copies_is_not_used_again_after_a_timeout(
    broker: KombuBroker, proxy: FaultProxy, rabbitmq_url: str
) -> None:
    """A late confirm must not be taken for the next copy's."""
    post = Post(proxy.through(rabbitmq_url), connect_timeout=1.0)
    post.send(1, parcel_of(an_output("work")))
    wait_until(lambda: post.answers() == {1: None}, "the copy is confirmed")
    proxy.stall("to_client")
    post.send(2, parcel_of(an_output("work")))
    post.give_up()
    assert {key: refusal.kind for key, refusal in post.answers().items() if refusal} == {2: "timeout"}
    with pytest.raises(BrokerUnavailable):
        post.send(3, parcel_of(an_output("work")))
    proxy.heal()
    post.close()


def ended(receiver: KombuReceiver) -> bool:
    """Whether all settled deliveries are acked; looks as the heartbeats' thread does while a handler runs."""
    thread = threading.Thread(target=receiver.keep_alive)
    thread.start()
    thread.join()
    return receiver._outstanding.idle


def refusals(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == "copy_refused"]


def test_nobody_waits_for_a_confirm_and_nothing_is_acked_without_it(
    broker: KombuBroker, publisher: ConfirmingPublisher, proxy: FaultProxy, rabbitmq_url: str
) -> None:
    """The way of the copies stalls: deliveries go on, and the parked one ends when its confirm comes."""
    send(publisher, 4)
    with receiving(broker, proxy.through(rabbitmq_url)) as receiver:
        receiver._settle_timeout = receiver._outstanding._timeout = SOON
        receiver.settle(received(receiver), PARK)  # opens the connection
        wait_until(lambda: ended(receiver), "the first is parked and acked")
        proxy.stall()
        stalled = received(receiver)
        with within(0.5):
            receiver.settle(stalled, PARK)
            receiver.settle(received(receiver), Ack())
            receiver.settle(received(receiver), Ack())
        with pytest.raises(BrokerError, match="already"):
            receiver.settle(stalled, Ack())
        assert receiver.receive(0.2) is None
        assert len(receiver._outstanding) == 1
        proxy.heal()
    assert (broker.depth("work"), broker.depth("work.dead")) == (0, 2)


def test_close_waits_for_the_confirms(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """Many at once; each has its copy, none comes again."""
    send(publisher, 200)
    receiver.close()
    receiver = broker.receiver(["work"], prefetch=200)  # type: ignore[assignment]
    for delivery in [received(receiver) for _ in range(200)]:
        receiver.settle(delivery, PARK)
    receiver.close()
    wait_until(lambda: broker.depth("work.dead") == 200, "all are parked")
    assert broker.depth("work") == 0


def test_copy_without_answer_is_refused_in_time(
    broker: KombuBroker,
    publisher: ConfirmingPublisher,
    proxy: FaultProxy,
    rabbitmq_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half-dead link: the message comes again over the same receiver, and is parked once the link is back."""
    send(publisher, 2)
    with receiving(broker, proxy.through(rabbitmq_url)) as receiver:
        receiver.settle(received(receiver), PARK)
        wait_until(lambda: ended(receiver), "the first is parked and acked")
        proxy.half_open()
        begun = time.monotonic()
        receiver.settle(received(receiver), PARK)
        again = received(receiver)
        assert PATIENCE <= time.monotonic() - begun < PATIENCE + 8
        assert (again.redelivered, again.attempt) == (True, 1)
        (refusal,) = refusals(caplog)
        assert (refusal.kind, refusal.queues, refusal.levelno) == ("timeout", ["work.dead"], logging.WARNING)
        assert refusal.message_ids == [again.message.message_id]
        proxy.heal()
        receiver.settle(again, PARK)
    assert (broker.depth("work"), broker.depth("work.dead")) == (0, 2)


def test_lost_connection_of_copies_costs_nothing(
    broker: KombuBroker, publisher: ConfirmingPublisher, proxy: FaultProxy, rabbitmq_url: str
) -> None:
    """Cut while idle, and cut between a copy and its confirm: it is sent again, and no handler runs again for it."""
    send(publisher, 3)
    with receiving(broker, proxy.through(rabbitmq_url)) as receiver:
        receiver.settle(received(receiver), PARK)
        wait_until(lambda: ended(receiver), "the first is parked and acked")
        proxy.cut(reset=True)
        receiver.settle(received(receiver), PARK)
        last = received(receiver)
        wait_until(lambda: receiver.receive(0) is None and ended(receiver), "the second is parked")
        trigger = proxy.cut_when(b'{"number": 2}', before=False)
        receiver.settle(last, PARK)
        assert receiver.receive(0.3) is None
        assert trigger.wait_triggered(SOON)
    assert broker.depth("work") == 0
    parked = Counter(message.body for message in broker.browse("work.dead", 10))
    assert parked.keys() == {b'{"number": 0}', b'{"number": 1}', b'{"number": 2}'}
    assert (parked[b'{"number": 0}'], parked[b'{"number": 1}']) == (1, 1)


def test_refused_copy_gives_the_message_back_after_a_pause(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The dead-letter queue is full: healthy messages go on, the poison comes round slowly, and is parked in the end."""
    full(broker, "work.dead")
    send(publisher, 6)
    runs: Counter[bytes] = Counter()
    begun = time.monotonic()
    while time.monotonic() - begun < 2.0:
        delivery = receiver.receive(0.1)
        if delivery is not None:
            runs[delivery.message.body] += 1
            receiver.settle(delivery, PARK if delivery.message.body == b'{"number": 0}' else Ack())
    assert len(runs) == 6
    assert runs.pop(b'{"number": 0}') in {2, 3}, "after 0.5 s, and 1 s after that"
    assert set(runs.values()) == {1}
    assert {(each.kind, each.count) for each in refusals(caplog)} == {("nacked", 1)}
    assert [each.pause for each in refusals(caplog)][:2] == [0.5, 1.0]
    with raw_link(broker._url) as link:
        link.channel.queue_delete("work.dead")
    broker.declare(Topology(exchange="", queues=("work",)))
    receiver.settle(received(receiver), PARK)
    receiver.close()
    assert (broker.depth("work"), broker.depth("work.dead")) == (0, 1)


def test_confirmed_and_refused_copies_are_kept_apart(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Retries are taken, dead letters are not, some deliveries stay in hand: each message is still there, once."""
    broker.declare(Topology(exchange="shop", queues=("work",), delays=(600.0,)))
    full(broker, "work.dead")
    send(publisher, 40)
    receiver = broker.receiver(["work"], prefetch=40)
    calls, begun = 0, time.monotonic()
    while time.monotonic() - begun < 2.0:
        delivery = receiver.receive(0.05)
        if delivery is not None and calls % 5:
            receiver.settle(delivery, PARK if calls % 2 else Retry(timedelta(minutes=5), counted=True))
        calls += 1
        receiver.keep_alive()
    receiver.close()
    wait_until(lambda: broker.depth("work") + broker.depth("work.delay.600000ms") == 40, "nothing is in our hands")
    found = Counter(message.body for queue in ("work", "work.delay.600000ms") for message in broker.browse(queue, 100))
    assert found.total() == len(found) == 40
    assert broker.depth("work.delay.600000ms") >= 10
    assert broker.depth("work") >= 5


def test_ack_of_one_does_not_take_an_earlier_one_that_was_refused(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """Both end in the same turn: the later one is acked, the earlier one given back."""
    broker.declare(Topology(exchange="shop", queues=("work",), delays=(600.0,)))
    full(broker, "work.dead")
    send(publisher, 2)
    receiver.close()
    receiver = broker.receiver(["work"], prefetch=10)  # type: ignore[assignment]
    first, second = received(receiver), received(receiver)
    receiver.settle(first, PARK)
    wait_until(lambda: receiver.keep_alive() or bool(receiver._outstanding._refused), "the first is refused")
    due = receiver._outstanding._refused[0][0]
    receiver.settle(second, Retry(timedelta(minutes=5), counted=True))
    wait_until(lambda: time.monotonic() > due, "the first is due")
    wait_until(lambda: broker.depth("work.delay.600000ms") == 1, "the copy of the second has arrived")
    receiver.close()
    wait_until(lambda: broker.depth("work") == 1, "the first is back")
    assert broker.browse("work", 5)[0].message_id == first.message.message_id


def test_ack_of_one_does_not_take_an_earlier_one_that_is_still_in_hand(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """Settled out of order: what is not settled comes again."""
    send(publisher, 2)
    first, second = received(receiver), received(receiver)
    receiver.settle(second, PARK)
    receiver.close()
    wait_until(lambda: broker.depth("work") == 1, "the first is back")
    assert broker.browse("work", 5)[0].message_id == first.message.message_id
    assert broker.depth("work.dead") == 1


def test_copies_are_confirmed_when_the_limit_of_their_queue_is_gone(
    own_rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """Dead-letter queue and delay tier were full by a policy: without it, the same receiver parks and retries."""
    broker = KombuBroker(own_rabbitmq.url)
    broker.declare(Topology(exchange="", queues=("work",), delays=(600.0,)))
    limit = '{"max-length": 1, "overflow": "reject-publish"}'
    own_rabbitmq.ctl("set_policy", "short", "^work.(dead|delay)", limit, "--apply-to", "queues")
    settlements = PARK, Retry(timedelta(minutes=5), counted=True)
    queues = ["work.dead", "work.delay.600000ms"]
    with closing(broker.publisher()) as publisher, closing(broker.receiver(["work"], prefetch=20)) as receiver:
        assert isinstance(receiver, KombuReceiver)
        send(publisher, 10)
        for settlement in settlements * 5:
            receiver.settle(received(receiver), settlement)
            wait_until(lambda: receiver.keep_alive() or not receiver._outstanding, "its copy has an answer")
            if {each.queues[0] for each in refusals(caplog)} == set(queues):
                break
        else:
            pytest.fail("no limit was met")
        link = receiver._post._link
        own_rabbitmq.ctl("clear_policy", "short")
        time.sleep(1.0)  # no channel is replaced sooner
        caplog.clear()
        before = [broker.depth(queue) for queue in queues]
        for settlement in settlements:
            receiver.settle(received(receiver), settlement)
            wait_until(lambda: ended(receiver), "its delivery has ended")
        assert refusals(caplog) == []
        assert [broker.depth(queue) for queue in queues] == [1 + depth for depth in before]
        assert receiver._post._link is link, "over the same connection"


@pytest.mark.slow
def test_copies_wait_out_an_alarm(own_rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture) -> None:
    """A broker that takes no messages for now: refused as blocked, and parked when the alarm is over."""
    broker = KombuBroker(own_rabbitmq.url)
    broker.declare(Topology(exchange="", queues=("work",)))
    with broker.publisher() as publisher:
        send(publisher, 1)
    with receiving(broker, own_rabbitmq.url) as receiver:
        delivery = received(receiver)
        own_rabbitmq.raise_memory_alarm()
        receiver.settle(delivery, PARK)
        again = received(receiver)
        assert {each.kind for each in refusals(caplog)} == {"blocked"}
        own_rabbitmq.clear_memory_alarm()
        receiver.settle(again, PARK)
    assert broker.depth("work") == 0
    assert broker.depth("work.dead") in {1, 2}, "the blocked copy may have arrived all the same"


def test_copies_of_what_cannot_be_acked_are_not_sent_again(
    broker: KombuBroker, publisher: ConfirmingPublisher, proxy: FaultProxy, rabbitmq_url: str
) -> None:
    """Both connections are lost: one more copy would only double what comes again anyway."""
    send(publisher, 2)
    host, port = rabbitmq_url.partition("@")[2].partition("/")[0].split(":")
    with FaultProxy(host, int(port)) as own_way:
        through = KombuBroker(own_way.through(rabbitmq_url))
        with receiving(through, proxy.through(rabbitmq_url), prefetch=1) as receiver:
            receiver.settle(received(receiver), PARK)
            wait_until(lambda: ended(receiver), "the first is parked and acked")
            delivery = received(receiver)  # so the queue has got that ack
            proxy.half_open("to_server")
            own_way.half_open("to_server")
            receiver.settle(delivery, PARK)
            own_way.cut()
            own_way.heal()
            proxy.cut(reset=True)  # returns when it is cut; `heal` alone would do it soon
            proxy.heal()
            with pytest.raises(BrokerUnavailable):
                receiver.receive(SOON)
            with within(1.0):
                receiver.close()
    wait_until(lambda: broker.depth("work") == 1, "it is back")
    assert broker.depth("work.dead") == 1


def test_confirms_are_taken_while_a_handler_runs(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """By the heartbeats' thread: a process that dies in a long handler does not take earlier settlements with it."""
    send(publisher, 2)
    receiver = broker.receiver(["work"], prefetch=10)
    assert isinstance(receiver, KombuReceiver)
    receiver.settle(received(receiver), PARK)
    received(receiver)

    wait_until(lambda: ended(receiver), "the confirm is taken and the delivery acked")
    receiver._link.discard()  # the process dies
    again = broker.receiver(["work"], prefetch=10)
    assert received(again).message.body == b'{"number": 1}'
    assert again.receive(0.2) is None
    again.close()
    receiver.close()


def test_number_of_outstanding_copies_is_bounded(
    broker: KombuBroker, publisher: ConfirmingPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever settles one more waits for one of them."""
    monkeypatch.setattr(consuming, "MOST_OUTSTANDING", 3)
    send(publisher, 30)
    receiver = broker.receiver(["work"], prefetch=30)
    assert isinstance(receiver, KombuReceiver)
    most = 0
    for delivery in [received(receiver) for _ in range(30)]:
        receiver.settle(delivery, Retry(timedelta(minutes=5), counted=True))
        most = max(most, len(receiver._outstanding))
    receiver.close()
    assert most == 3
    assert broker.depth("work") == 0
    assert broker.depth("work.delay.900ms") == 30


def test_cancelled_receiver_gives_back_what_it_held_ahead(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """At once, while a handler still runs; its own delivery is settled over the same connection."""
    send(publisher, 8)
    in_hand = received(receiver)
    thread = threading.Thread(target=receiver.cancel)
    thread.start()
    thread.join()
    wait_until(lambda: broker.depth("work") == 7, "the others are back")
    assert receiver.receive(0.1) is None
    receiver.settle(in_hand, Ack())
    receiver.cancel()
    receiver.close()
    receiver.cancel()
    assert broker.depth("work") == 7


def test_cancelling_while_receiving(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Each message is either handed out or back in the queue, however the two threads meet."""
    send(publisher, 30)
    for _ in range(20):
        receiver = broker.receiver(["work"], prefetch=30)
        held = [received(receiver)]
        thread = threading.Thread(target=receiver.cancel)
        thread.start()
        while (delivery := receiver.receive(0)) is not None:
            held.append(delivery)
        thread.join()
        back = 30 - len(held)
        wait_until(lambda back=back: broker.depth("work") == back, "the rest is back")  # type: ignore[misc]
        receiver.close()
        wait_until(lambda: broker.depth("work") == 30, "all are back")


def test_post_without_a_broker() -> None:
    """Nothing was sent, and it says so at once."""
    post = Post("pyamqp://guest:guest@127.0.0.1:1//", connect_timeout=0.5)
    with pytest.raises(BrokerUnavailable, match="No connection"):
        post.send(1, None)  # type: ignore[arg-type]
    assert post.answers() == {}
    post.close()
