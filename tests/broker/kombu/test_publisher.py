"""A confirm is the broker's word for that very message; what has none fails, and nothing else does."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker
from idemp.broker.kombu.topology import delay_name, exchange_delay_name
from idemp.broker.port import Ack, Binding, Topology
from idemp.errors import BrokerUnavailable, ConfigurationError
from tests.broker.kombu.tools import (
    SOON,
    Sending,
    an_output,
    answers_to,
    declared,
    frozen,
    full,
    kinds,
    meanwhile,
    raw_link,
    received,
    within,
)
from tests.lanes import mostly_slow
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.broker.kombu import KombuReceiver
    from idemp.broker.port import Delivery
    from idemp.testing import FaultProxy
    from tests.servers.rabbitmq import RabbitMQ


PURGE = '{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)), rabbit_amqqueue:purge(Q)'


def nested(levels: int) -> dict[str, Any]:
    """A dict in a dict in a dict."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


@pytest.fixture(params=["publish", "send"])
def publisher(broker: KombuBroker, request: pytest.FixtureRequest) -> Iterator[ConfirmingPublisher | Sending]:
    """A publisher that is waited for at once, or only when all is sent."""
    with closing(broker.publisher()) as publisher:
        yield publisher if request.param == "publish" else Sending(publisher)


def test_confirmed_messages_are_in_the_queue(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """No refusal, and they are there."""
    outputs = [an_output("work", number=number) for number in range(3)]
    assert publisher.publish(outputs, SOON) == [None] * 3
    assert [message.message_id for message in broker.browse("work", 10)] == [str(output.id) for output in outputs]


def test_publishing_nothing(publisher: ConfirmingPublisher) -> None:
    """No outputs, no connection, no refusals."""
    assert publisher.publish([], SOON) == []


def test_order_is_kept_with_2000_in_flight(broker: KombuBroker) -> None:
    """All are sent before the first confirm is waited for, and arrive in order."""
    with KombuBroker(broker._url, max_in_flight=2000).publisher() as publisher:
        assert set(publisher.publish([an_output("work", number=number) for number in range(2000)], SOON)) == {None}
    bodies = [message.body for message in broker.browse("work", 3000)]
    assert bodies == [b'{"number": %d}' % number for number in range(2000)]


def test_a_window_smaller_than_the_batch(broker: KombuBroker) -> None:
    """Seven in flight at most, all arrive in order."""
    with KombuBroker(broker._url, max_in_flight=7).publisher() as publisher:
        assert publisher.publish([an_output("work", number=number) for number in range(50)], SOON) == [None] * 50
    assert [message.body for message in broker.browse("work", 99)] == [b'{"number": %d}' % n for n in range(50)]


def test_unroutable_among_good_ones(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Exactly those that no queue takes are returned; one that need not arrive is fine."""
    outputs = [
        an_output("work"),
        an_output("nowhere"),
        an_output("nobody.listens", exchange="shop"),
        an_output("nobody.listens", exchange="shop", mandatory=False),
        an_output("work"),
    ]
    assert kinds(publisher.publish(outputs, SOON)) == [None, "returned", "returned", None, None]
    assert broker.depth("work") == 2


def test_unroutable_copies_under_one_id(publisher: ConfirmingPublisher) -> None:
    """The same output twice in one call: both are returned."""
    output = an_output("nowhere")
    assert kinds(publisher.publish([output, output], SOON)) == ["returned", "returned"]


def test_published_types_reach_bound_queues(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Through the topic exchange, by pattern."""
    broker.declare(Topology(exchange="shop", queues=("work",), bindings=(Binding("work", "orders.*"),)))
    outputs = [an_output("orders.Placed", exchange="shop"), an_output("stock.Moved", exchange="shop")]
    assert kinds(publisher.publish(outputs, SOON)) == [None, "returned"]


def test_full_queue_nacks(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """`x-overflow=reject-publish`: the messages over the limit are nacked, those elsewhere are not."""
    with raw_link(broker._url) as link:
        arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
        link.channel.queue_declare("small", durable=True, auto_delete=False, arguments=arguments)
    outputs = [an_output("small"), an_output("work"), an_output("small"), an_output("small"), an_output("work")]
    assert kinds(publisher.publish(outputs, SOON)) == [None, None, None, "nacked", None]
    assert kinds(publisher.publish([an_output("small"), an_output("work")], SOON)) == ["nacked", None]


def test_missing_exchange_among_good_ones(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """The broker closes the channel over it; all others still get their confirm, each once in the queue or more."""
    outputs = [an_output("work", number=number) for number in range(20)]
    bad = [an_output("key", exchange="no-such"), an_output("key", exchange="no-such-either")]
    refusals = publisher.publish([*outputs[:10], bad[0], *outputs[10:], bad[1]], SOON)
    assert kinds(refusals) == [None] * 10 + ["returned"] + [None] * 10 + ["returned"]
    assert "no exchange 'no-such'" in str(refusals[10])
    assert {message.message_id for message in broker.browse("work", 99)} == {str(output.id) for output in outputs}


def test_refused_message_among_good_ones_is_found(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """A property over which the broker closes the channel without naming the message."""
    good = [an_output("work", number=number) for number in range(5)]
    internal = an_output("key", exchange="internal-only")
    with raw_link(broker._url) as link:
        # An internal exchange takes no messages from clients: 403.
        arguments = {"durable": True, "auto_delete": False}
        link.channel.send_method(
            (40, 10), "BssbbbbbF", (0, "internal-only", "topic", False, True, False, True, False, {})
        )
        link.channel.exchange_declare("internal-only", "topic", passive=True, **arguments)
    refusals = publisher.publish([*good[:3], internal, *good[3:]], SOON)
    assert kinds(refusals) == [None, None, None, "unsendable", None, None]
    assert "ACCESS_REFUSED" in str(refusals[3])


@pytest.mark.parametrize(
    "bad",
    [
        an_output("q" * 256),
        an_output("work", type="t" * 256),
        an_output("work", headers={"set": {1, 2}}),
        an_output("work", headers={"much": "x" * 140_000}),
        an_output("work", priority=256),
        an_output("work", delay=5e6),
        an_output("work", headers={"deep": nested(900)}),
    ],
    ids=["routing key", "type", "header value", "headers", "priority", "delay", "nested headers"],
)
def test_what_amqp_cannot_say_is_refused_alone(publisher: ConfirmingPublisher, bad) -> None:
    """It never leaves; the others do."""
    refusals = publisher.publish([an_output("work"), bad, an_output("work")], SOON)
    assert kinds(refusals) == [None, "unsendable", None]
    assert "never sent" in str(refusals[1])


def test_oversized_body_among_good_ones(own_rabbitmq: RabbitMQ) -> None:
    """Over the broker's `max_message_size`: refused alone."""
    broker = declared(own_rabbitmq)
    own_rabbitmq.evaluate("application:set_env(rabbit, max_message_size, 100000)")
    try:
        with broker.publisher() as publisher:
            outputs = [an_output("work"), an_output("work", body=b"x" * 300_000), an_output("work")]
            assert kinds(publisher.publish(outputs, SOON)) == [None, "unsendable", None]
    finally:
        own_rabbitmq.evaluate("application:set_env(rabbit, max_message_size, 134217728)")


def test_large_bodies_arrive_whole(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Bodies of many frames, several in flight."""
    outputs = [an_output("work", body=bytes([number]) * 1_000_003) for number in range(5)]
    assert publisher.publish(outputs, SOON) == [None] * 5
    assert [message.body for message in broker.browse("work", 9)] == [output.message.body for output in outputs]


def test_blocked_fails_exactly_the_unconfirmed(own_rabbitmq: RabbitMQ) -> None:
    """Memory alarm in the middle of a call: what was confirmed stays so, the rest fails at the deadline as blocked."""
    broker = declared(own_rabbitmq)
    outputs = [an_output("work", number=number) for number in range(20_000)]

    def starve() -> None:
        wait_until(lambda: broker.depth("work") >= 50, "some are there")
        own_rabbitmq.raise_memory_alarm()

    with KombuBroker(own_rabbitmq.url, max_in_flight=1).publisher() as publisher:
        begun = time.monotonic()
        with meanwhile(starve):
            refusals = publisher.publish(outputs, 2.0)
        assert time.monotonic() - begun < 15
        confirmed = refusals.count(None)
        assert 50 <= confirmed < len(outputs)
        assert kinds(refusals) == [None] * confirmed + ["blocked"] * (len(outputs) - confirmed)
        assert kinds(publisher.publish(outputs[:1], 0.5)) == ["blocked"], "still starved, over a new connection"
        own_rabbitmq.clear_memory_alarm()
        assert publisher.publish([an_output("work")], SOON) == [None], "and it recovers"
    arrived = {message.message_id for message in broker.browse("work", len(outputs))}
    assert {str(output.id) for output in outputs[:confirmed]} <= arrived


def test_alarm_that_ends_in_time_is_no_failure(own_rabbitmq: RabbitMQ) -> None:
    """Blocked at first, confirmed after the alarm is over, within the deadline; nothing of it when already blocked."""
    broker = declared(own_rabbitmq)
    with broker.publisher() as publisher:
        assert publisher.publish([an_output("work")], SOON) == [None]
        own_rabbitmq.raise_memory_alarm()
        publishing = threading.Event()

        def relieve() -> None:
            assert publishing.wait(SOON)
            wait_until(lambda: publisher._link is not None and publisher._link.blocked, "the publisher is blocked")
            own_rabbitmq.clear_memory_alarm()

        with meanwhile(relieve):
            publishing.set()
            assert publisher.publish([an_output("work"), an_output("work")], 20.0) == [None, None]


def test_broker_killed_midway_then_restarted(own_rabbitmq: RabbitMQ) -> None:
    """Unconfirmed outputs fail as closed; what was confirmed survives the kill; the same publisher recovers.

    A receiver says that it is lost, in receive and in settle, and closes without waiting; a new one gets the unsettled.
    """
    broker = declared(own_rabbitmq, "held")
    outputs = [an_output("work", number=number) for number in range(20_000)]

    def kill() -> None:
        wait_until(lambda: broker.depth("work") >= 50, "some are there")
        own_rabbitmq.kill()

    with KombuBroker(own_rabbitmq.url, max_in_flight=10).publisher() as publisher:
        assert publisher.publish([an_output("held", number=1), an_output("held", number=2)], SOON) == [None, None]
        receiver = broker.receiver(["held"], prefetch=1)
        delivery = received(receiver)
        with meanwhile(kill):
            refusals = publisher.publish(outputs, 30.0)
        assert set(kinds(refusals)) == {None, "closed"}
        confirmed = {str(output.id) for output, refusal in zip(outputs, refusals, strict=True) if refusal is None}
        assert kinds(publisher.publish(outputs[:1], 2.0)) == ["closed"], "nobody listens"
        lost_with_the_broker(receiver, delivery)
        with pytest.raises(BrokerUnavailable):
            broker.receiver(["held"], prefetch=1)
        own_rabbitmq.start()
        assert publisher.publish([an_output("work")], SOON) == [None]
    assert confirmed <= {message.message_id for message in broker.browse("work", len(outputs))}
    with closing(broker.receiver(["held"], prefetch=5)) as again:
        assert {received(again).message.body, received(again).message.body} == {b'{"number": 1}', b'{"number": 2}'}


def lost_with_the_broker(receiver: KombuReceiver, delivery: Delivery) -> None:
    """It says so, in receive and in settle, and closes without waiting."""
    with pytest.raises(BrokerUnavailable):
        receiver.receive(SOON)
    with pytest.raises(BrokerUnavailable):
        receiver.settle(delivery, Ack())
    with within(2.0):
        receiver.keep_alive()
        receiver.close()


def test_frozen_broker_holds_up_nobody(own_rabbitmq: RabbitMQ) -> None:
    """The node stands still with its sockets open: publishing, connecting and closing keep to their deadlines."""
    broker = declared(own_rabbitmq)
    publisher, receiver = broker.publisher(), broker.receiver(["work"], prefetch=1)
    assert publisher.publish([an_output("work")], SOON) == [None]
    delivery = received(receiver)
    with frozen(own_rabbitmq):
        for outputs in ([an_output("work")], [an_output("work", body=b"x" * 10_000_000)] * 3):
            with within(2.5):
                assert set(kinds(publisher.publish(outputs, 1.0))) <= {"timeout", "closed"}
        assert kinds(publisher.publish([an_output("work")], 0.5)) == ["closed"], "it can't even connect"
        with within(2.5):
            assert receiver.receive(0.5) is None
            receiver.keep_alive()
            receiver.settle(delivery, Ack())
            receiver.close()
        with within(2.5):
            publisher.close()
    assert publisher.publish([an_output("work")], SOON) == [None]
    publisher.close()


@pytest.mark.parametrize("size", [10, 10_000_000], ids=["buffered", "more than buffers hold"])
def test_frozen_broker_is_a_timeout(own_rabbitmq: RabbitMQ, size: int) -> None:
    """No confirm in time, on a connection that was good."""
    broker = declared(own_rabbitmq)
    with broker.publisher() as publisher:
        assert publisher.publish([an_output("work")], SOON) == [None]
        with frozen(own_rabbitmq), within(2.5):
            assert kinds(publisher.publish([an_output("work", body=b"x" * size)] * 3, 1.0)) == ["timeout"] * 3


@pytest.mark.parametrize("way", ["publish", "send"])
def test_channel_is_not_used_again_after_a_timeout(
    broker: KombuBroker, proxy: FaultProxy, rabbitmq_url: str, way: str
) -> None:
    """Its late confirms, or the second half of a message, would be taken for those of the next one."""

    def published() -> list[str | None]:
        if way == "publish":
            return kinds(publisher.publish([an_output("work")], 1.0))
        publisher.send([an_output("work")], 1.0)
        ((_, answers),) = publisher.answered(60.0)
        return kinds(answers)

    with closing(KombuBroker(proxy.through(rabbitmq_url)).publisher()) as publisher:
        assert published() == [None]
        proxy.stall("to_client")
        assert published() == ["timeout"]
        assert published() == ["closed"], "the next one opens a connection, which gets no answer"
        proxy.heal()
        assert publisher.publish([an_output("work")], SOON) == [None]


def test_queues_of_an_app_drop_nothing_where_an_operator_limits_them(own_rabbitmq: RabbitMQ) -> None:
    """A policy may set a limit for all queues: what is over it is nacked, and what was confirmed before stays."""
    broker = KombuBroker(own_rabbitmq.url)
    broker.declare(Topology(exchange="shop", queues=("work",), delays=(3600.0,)))
    own_rabbitmq.ctl("set_policy", "short", ".*", '{"max-length": 2}', "--apply-to", "queues")
    for queue in ("work", delay_name("work", 3_600_000)):
        with closing(broker.publisher()) as publisher:
            answers = [publisher.publish([an_output(queue)], SOON)[0] for _ in range(30)]
        assert {answer.kind for answer in answers if answer is not None} == {"nacked"}
        assert broker.depth(queue) == answers.count(None)


def test_queue_that_was_full_once_is_confirmed_when_its_limit_is_gone(own_rabbitmq: RabbitMQ) -> None:
    """RabbitMQ goes on nacking the channel that it nacked, so the same publisher opens another one."""
    broker = declared(own_rabbitmq, "other")
    with closing(broker.publisher()) as waited, closing(broker.publisher()) as inner:
        publishers = waited, Sending(inner)
        own_rabbitmq.ctl("set_policy", "short", "^work$", '{"max-length": 2}', "--apply-to", "queues")
        for publisher in publishers:
            refusals = [publisher.publish([an_output("work")], SOON)[0] for _ in range(9)]
            assert kinds(refusals)[-3:] == ["nacked"] * 3
        links = waited._link, inner._link
        own_rabbitmq.ctl("clear_policy", "short")
        own_rabbitmq.evaluate(PURGE.format(queue="work"))
        time.sleep(1.0)  # no channel is replaced sooner
        for publisher in publishers:
            assert publisher.publish([an_output("work"), an_output("other")], SOON) == [None, None]
        assert (waited._link, inner._link) == links, "over the same connection"
    assert (broker.depth("work"), broker.depth("other")) == (2, 2)


@pytest.mark.parametrize("way", mostly_slow(["send", "publish"]))
def test_nacks_cost_few_channels_and_no_answer(broker: KombuBroker, way: str) -> None:
    """A queue stays full for long, beside one that takes everything: a channel a second at most, each answer its own."""
    full(broker, "small")
    opened: list[object] = []
    with closing(broker.publisher()) as publisher:
        sender = publisher if way == "publish" else Sending(publisher)
        begun = time.monotonic()
        while (took := time.monotonic() - begun) < 2.5:
            outputs = [an_output(queue) for queue in ("small", "work") * 10]
            assert kinds(sender.publish(outputs, SOON)) == ["nacked", None] * 10
            assert publisher._link is not None
            if publisher._link.channel not in opened:
                opened.append(publisher._link.channel)
    assert 2 <= len(opened) <= 1 + took


def test_channel_is_kept_until_all_on_it_is_answered(broker: KombuBroker, proxy: FaultProxy, rabbitmq_url: str) -> None:
    """What was sent over a nacked channel still gets its own answer; what comes after it goes over that channel, too."""
    full(broker, "small")
    with closing(KombuBroker(proxy.through(rabbitmq_url)).publisher()) as publisher:
        assert kinds(publisher.publish([an_output("small")], SOON)) == ["nacked"]
        assert publisher._link is not None
        wait_until(lambda: publisher._confirms.should_move, "the channel has been used for a while")
        channel = publisher._link.channel
        proxy.stall("to_client")
        publisher._confirms._nacked = False
        first = publisher.send([an_output("work")], SOON)
        publisher._confirms._nacked = True
        with meanwhile(lambda: (time.sleep(1.0), proxy.heal())):
            second = publisher.send([an_output("work")], SOON)
        assert publisher._link.channel is channel
        assert answers_to(publisher, [first, second]) == {first: [None], second: [None]}
    assert broker.depth("work") == 2


def test_no_time_no_publish(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """A deadline in the past: timeout for all, nothing sent."""
    assert kinds(publisher.publish([an_output("work")], 0.0)) == ["timeout"]
    assert broker.depth("work") == 0


def test_nobody_listens_there() -> None:
    """No broker at all: closed, with what the system said."""
    refusals = ConfirmingPublisher("pyamqp://guest:secret@127.0.0.1:9/x", connect_timeout=1.0).publish(
        [an_output("q")], 1
    )
    assert kinds(refusals) == ["closed"]
    assert "refused" in str(refusals[0])
    assert "secret" not in str(refusals[0])


def test_delayed_output_to_a_queue(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """The broker holds it back; the delay tier is declared when it is missing, and again after it was deleted."""
    receiver = broker.receiver(["work"], prefetch=5)
    begun = time.monotonic()
    assert publisher.publish([an_output("work", delay=0.5, ttl=0.001), an_output("work", number=7)], SOON) == [
        None,
        None,
    ]
    assert receiver.receive(SOON).message.body == b'{"number": 7}'
    assert receiver.receive(SOON).message.body == b'{"number": 0}'
    assert time.monotonic() - begun >= 0.5
    with raw_link(broker._url) as link:
        link.channel.queue_delete("work.delay.500ms")
    assert publisher.publish([an_output("work", delay=0.5)], SOON) == [None]
    assert receiver.receive(SOON) is not None
    receiver.close()


def test_delayed_publish_keeps_its_routing_key(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Through the exchange after the delay, to whoever is bound by then."""
    broker.declare(Topology(exchange="shop", queues=("work",), bindings=(Binding("work", "orders.*"),)))
    assert publisher.publish([an_output("orders.Placed", exchange="shop", delay=0.2)], SOON) == [None]
    receiver = broker.receiver(["work"], prefetch=5)
    assert receiver.receive(SOON) is not None
    receiver.close()


@pytest.mark.parametrize("mandatory", mostly_slow([True, False]))
def test_delayed_publishes_that_no_queue_takes_hold_up_their_own_type_only(
    broker: KombuBroker, mandatory: bool
) -> None:
    """More of them than RabbitMQ hands on at once; they wait for somebody who takes them."""
    broker.declare(Topology(exchange="shop", queues=("work",), bindings=(Binding("work", "orders.*"),)))
    lost = [an_output("nobody.listens", exchange="shop", delay=0.2, mandatory=mandatory) for _ in range(40)]
    with closing(broker.publisher()) as publisher, closing(broker.receiver(["work"], prefetch=5)) as receiver:
        assert publisher.publish(lost, SOON) == [None] * 40
        assert publisher.publish([an_output("orders.Placed", exchange="shop", delay=0.2, number=7)], SOON) == [None]
        assert received(receiver).message.body == b'{"number": 7}'


def test_a_tier_of_the_former_release_runs_empty(broker: KombuBroker) -> None:
    """One for all types of an exchange: what waits in it arrives, and it is in no newer tier's way."""
    broker.declare(Topology(exchange="shop", queues=("work",), bindings=(Binding("work", "orders.*"),)))
    former = "shop.delay.500ms"
    arguments = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "shop",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-message-ttl": 500,
    }
    with raw_link(broker._url) as link:
        link.channel.queue_declare(former, durable=True, auto_delete=False, arguments=arguments)
        link.channel.exchange_declare(former, "fanout", durable=True, auto_delete=False)
        link.channel.queue_bind(former, former)
    outputs = [
        an_output("orders.Placed", exchange=former, number=1),
        an_output("orders.Placed", exchange="shop", delay=0.5, number=2),
    ]
    with closing(broker.publisher()) as publisher, closing(broker.receiver(["work"], prefetch=5)) as receiver:
        assert publisher.publish(outputs, SOON) == [None, None]
        assert {received(receiver).message.body for _ in outputs} == {b'{"number": 1}', b'{"number": 2}'}


def test_names_of_delay_tiers_never_collide() -> None:
    """Dots belong to exchanges and routing keys as well, and what is too long is cut; nothing else has such a name."""
    names = [
        exchange_delay_name(exchange, key, 1500)
        for exchange, key in [
            ("shop", "a.delay.1500ms.b"),
            ("shop.delay.1500ms.a", "b"),
            ("shop", "é" * 127),
            ("shop", "é" * 126 + "e"),
            ("x" * 255, "a"),
            ("x" * 255, "b"),
        ]
    ]
    assert len(set(names)) == len(names)
    assert max(len(name.encode()) for name in names) == 255
    assert not any(name.endswith("ms") for name in names)


def test_a_delayed_publish_with_too_long_a_routing_key_is_refused(publisher: ConfirmingPublisher) -> None:
    """As without delay, though the name of its tier is cut to what fits."""
    refusals = publisher.publish([an_output("x" * 256, exchange="shop", delay=1)], SOON)
    assert kinds(refusals) == ["unsendable"]


def test_keep_alive_discards_a_dead_connection(own_rabbitmq: RabbitMQ) -> None:
    """It never raises."""
    broker = declared(own_rabbitmq)
    publisher = broker.publisher()
    publisher.keep_alive()
    assert publisher.publish([an_output("work")], SOON) == [None]
    own_rabbitmq.kill()

    def discarded() -> bool:
        publisher.keep_alive()
        return publisher._link is None

    wait_until(discarded, "the dead connection is discarded")
    publisher.close()


def test_threads_take_turns(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Heartbeats from another thread while publishing."""
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            publisher.keep_alive()

    with meanwhile(beat):
        try:
            for _ in range(20):
                assert set(publisher.publish([an_output("work") for _ in range(50)], SOON)) == {None}
        finally:
            done.set()
    assert broker.depth("work") == 1000


@pytest.mark.parametrize(
    "url", ["amqp://guest:hunter2@h/v", "http://guest:hunter2@h/v", "pyamqp://guest:hun:ter2@h:x/v"]
)
def test_unusable_urls(url: str) -> None:
    """Refused at start, without the password."""
    with pytest.raises(ConfigurationError) as caught:
        ConfirmingPublisher(url)
    assert "pyamqp://" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)


def test_password_is_never_shown(rabbitmq_url: str) -> None:
    """Neither in a repr nor in what a refused login says."""
    url = rabbitmq_url.replace("guest:guest", "guest:hunter2")
    publisher = ConfirmingPublisher(url)
    refusals = publisher.publish([an_output("work")], SOON)
    assert kinds(refusals) == ["closed"]
    assert "hunter2" not in f"{publisher!r} {refusals}"
    with pytest.raises(ConfigurationError, match="ACCESS_REFUSED") as caught:
        KombuBroker(url).declare(Topology(exchange="", queues=("work",)))
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__!r} {caught.value.__cause__.__cause__!r}"


def test_failover_to_the_next_host(broker: KombuBroker) -> None:
    """The first host of the list is not there."""
    with ConfirmingPublisher(f"pyamqp://127.0.0.1:9;{broker._url}") as publisher:
        assert publisher.publish([an_output("work")], SOON) == [None]
