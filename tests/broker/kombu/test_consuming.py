"""What is not settled comes again; what is settled is settled once, its copy first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest
from amqp.channel import Channel
from amqp.exceptions import NotFound

from idemp import App, Idempotent, Key
from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuReceiver
from idemp.broker.kombu.frames import UNREADABLE_HEADERS
from idemp.broker.port import Ack, Park, Release, Retry, Topology
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError, UnsupportedContentType
from idemp.inbox.memory import InMemoryStore
from idemp.messages import FIRST_SEEN_HEADER, parse_json
from tests.broker.kombu.tools import SOON, an_output, raw_link, received
from tests.servers.process import wait_until

SHORT = timedelta(seconds=0.1)


def publish_raw(broker: KombuBroker, body: bytes = b"{}", routing_key: Any = "work", **properties: Any) -> None:
    """What a stranger's client may send."""
    with raw_link(broker._url) as link:
        link.channel.confirm_select()
        link.channel.basic_publish(amqp.Message(body, **properties), "", routing_key)
        link.channel.wait((60, 80), timeout=SOON)


def test_a_message_arrives_as_it_was_sent(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """Every property, the headers' types, the bytes."""
    sent = an_output(
        "work",
        body=b'{"name": "\xc3\xa9"}',
        type="orders.PlaceOrder",
        content_type="application/vnd.acme+json",
        correlation_id="c-1",
        reply_to="answers",
        headers={"n": 2**40, "f": 1.5, "none": None, "nested": {"list": [1, "a"]}, "traceparent": "00-a-b-01"},
        timestamp=datetime(2026, 3, 1, 12, 0, tzinfo=UTC),
        ttl=60.0,
        priority=4,
    )
    assert publisher.publish([sent], SOON) == [None]
    delivery = received(receiver)
    assert delivery.message == sent.message
    assert (delivery.queue, delivery.attempt, delivery.redelivered) == ("work", 1, False)


def test_nothing_to_receive(receiver: KombuReceiver) -> None:
    """`None` when the time is up, and not long after."""
    begun = time.monotonic()
    assert receiver.receive(0.2) is None
    assert 0.2 <= time.monotonic() - begun < 5.0


def test_acked_messages_are_gone(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Acked ones stay away, the others come again with the broker's hint."""
    publisher.publish([an_output("work", number=number) for number in range(3)], SOON)
    receiver = broker.receiver(["work"], prefetch=10)
    for _ in range(2):
        receiver.settle(received(receiver), Ack())
    received(receiver)
    receiver.close()
    again = broker.receiver(["work"], prefetch=10)
    delivery = received(again)
    assert delivery.message.body == b'{"number": 2}'
    assert delivery.redelivered
    again.settle(delivery, Ack())
    again.close()
    assert broker.depth("work") == 0


def acks_of(receiver: KombuReceiver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The acks that it sends from now on: tags, and whether all below are meant, too."""
    sent: list[tuple[int, bool]] = []
    link = receiver._link
    plain = link.ack

    def ack(tags: Sequence[int], *, up_to: int | None = None) -> None:
        sent.extend([(up_to, True)] if up_to is not None else [])
        sent.extend((tag, False) for tag in tags)
        plain(tags, up_to=up_to)

    monkeypatch.setattr(link, "ack", ack)
    return sent


def test_acks_in_one_word(
    publisher: ConfirmingPublisher, receiver: KombuReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those below everything that is still in hand; the others one by one."""
    publisher.publish([an_output("work", number=number) for number in range(8)], SOON)
    sent = acks_of(receiver, monkeypatch)
    taken = [received(receiver) for _ in range(8)]
    first = taken[0].tag.delivery_tag
    for place in (2, 0, 1, 4, 6):
        receiver.settle(taken[place], Ack())
    assert sent == []
    assert receiver.receive(0.0) is None
    assert sent == [(first + 2, True), (first + 4, False), (first + 6, False)]
    for place in (3, 5, 7):
        receiver.settle(taken[place], Ack())
    receiver.receive(0.0)
    assert sent[3:] == [(first + 7, True)]


@pytest.mark.parametrize("seed", range(5))
def test_in_whatever_order_they_are_settled(broker: KombuBroker, publisher: ConfirmingPublisher, seed: int) -> None:
    """Exactly those that were not acked come again, though many are acked in one word."""
    dice = random.Random(seed)
    publisher.publish([an_output("work", number=number) for number in range(40)], SOON)
    receiver = broker.receiver(["work"], prefetch=25)
    in_hand, acked = [], set()
    for _ in range(60):
        if in_hand and dice.random() < 0.5:
            delivery = in_hand.pop(dice.randrange(len(in_hand)))
            settlement = dice.choice([Ack(), Ack(), Ack(), Release()])
            if isinstance(settlement, Ack):
                acked.add(delivery.message.body)
            receiver.settle(delivery, settlement)
        elif (more := receiver.receive(0.01)) is not None:
            in_hand.append(more)
    receiver.close()
    again = broker.receiver(["work"], prefetch=50)
    left = {received(again).message.body for _ in range(40 - len(acked))}
    assert again.receive(0.1) is None
    assert len(left) == 40 - len(acked)
    assert not left & acked
    again.close()


def test_acks_while_another_thread_gives_back(
    broker: KombuBroker, publisher: ConfirmingPublisher, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps the connection alive has a refused copy in hand: its delivery is not acked along with a later one."""
    with raw_link(rabbitmq_url) as link:
        full = {"x-max-length": 0, "x-overflow": "reject-publish"}
        link.channel.queue_declare("work.delay.5000ms", durable=True, auto_delete=False, arguments=full)
    publisher.publish([an_output("work", number=number) for number in range(2)], SOON)
    receiver = KombuReceiver(rabbitmq_url, ["work"], prefetch=10, delays={"work": [5.0]})
    first, second = received(receiver), received(receiver)
    receiver.settle(first, Retry(timedelta(seconds=5), counted=False))
    outstanding, taken, go = receiver._outstanding, threading.Event(), threading.Event()
    wait_until(lambda: receiver.receive(0.0) is None and bool(outstanding._refused), "the copy is refused")
    take = outstanding.take_refused

    def taking() -> list[int]:
        found = take()
        if found and threading.current_thread() is not threading.main_thread():
            taken.set()
            assert go.wait(20)
        return found

    monkeypatch.setattr(outstanding, "take_refused", taking)

    def keep_alive() -> None:
        while not taken.is_set():
            receiver.keep_alive()

    keeping = threading.Thread(target=keep_alive)
    keeping.start()
    assert taken.wait(20)
    receiver.settle(second, Ack())
    lock = receiver._settling

    class Waited:
        def __enter__(self) -> None:
            go.set()  # it waits its turn
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

        release = lock.release  # by the other thread, which took it before

    monkeypatch.setattr(receiver, "_settling", Waited())
    delivery = received(receiver)
    monkeypatch.undo()
    keeping.join()
    assert delivery.redelivered
    assert delivery.message.body == b'{"number": 0}'
    receiver.close()


def test_prefetch_is_a_limit(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """No more than that in our hands; the next comes after a settlement."""
    publisher.publish([an_output("work", number=number) for number in range(5)], SOON)
    receiver = broker.receiver(["work"], prefetch=2)
    first = received(receiver)
    received(receiver)
    assert receiver.receive(0.2) is None
    assert broker.depth("work") == 3
    receiver.settle(first, Ack())
    assert received(receiver).message.body == b'{"number": 2}'
    receiver.close()


def test_several_queues(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """One receiver, each delivery says where from."""
    broker.declare(Topology(exchange="", queues=("work", "other")))
    publisher.publish([an_output("work"), an_output("other")], SOON)
    receiver = broker.receiver(["work", "other"], prefetch=5)
    assert {received(receiver).queue, received(receiver).queue} == {"work", "other"}
    receiver.close()


def test_a_delivery_is_settled_once(publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """Settling twice is an error of the caller's, and does not cost the connection."""
    publisher.publish([an_output("work"), an_output("work")], SOON)
    delivery = received(receiver)
    receiver.settle(delivery, Ack())
    with pytest.raises(BrokerError, match="already"):
        receiver.settle(delivery, Ack())
    receiver.settle(received(receiver), Ack())


def test_release_gives_it_to_somebody_else(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """At once, untouched."""
    sent = an_output("work", headers={"a": 1})
    publisher.publish([sent], SOON)
    delivery = received(receiver)
    other = broker.receiver(["work"], prefetch=1)
    receiver.settle(delivery, Release())
    receiver.close()
    again = received(other)
    assert again.message == sent.message
    assert again.attempt == 1
    other.close()


@pytest.mark.parametrize(("counted", "attempt"), [(True, 2), (False, 1)], ids=["counted", "not counted"])
def test_retry_comes_back_after_its_delay(
    publisher: ConfirmingPublisher, receiver: KombuReceiver, counted: bool, attempt: int
) -> None:
    """Into the tier that fits; the message is otherwise the same, and would not expire while it waits."""
    sent = an_output("work", headers={"a": 1, "CC": []}, correlation_id="c-1", ttl=30.0)
    publisher.publish([sent], SOON)
    delivery = received(receiver)
    begun = time.monotonic()
    receiver.settle(delivery, Retry(SHORT, counted=counted))
    again = received(receiver)
    assert time.monotonic() - begun >= 0.3
    assert again.attempt == attempt
    assert again.message.body == sent.message.body
    assert (again.message.message_id, again.message.correlation_id) == (str(sent.id), "c-1")
    assert again.message.headers["a"] == 1
    assert not [name for name in again.message.headers if name.startswith("x-")]
    first_seen = again.message.headers[FIRST_SEEN_HEADER]
    assert datetime.fromisoformat(first_seen).tzinfo
    receiver.settle(again, Retry(SHORT, counted=True))
    third = received(receiver)
    assert third.attempt == attempt + 1
    assert third.message.headers[FIRST_SEEN_HEADER] == first_seen


def test_retry_waits_in_the_tier_that_fits(publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """A busy machine may take longer once, but not each time."""
    waited: list[float] = []
    while min(waited, default=1.0) >= 0.9 and len(waited) < 10:
        publisher.publish([an_output("work")], SOON)
        delivery = received(receiver)
        begun = time.monotonic()
        receiver.settle(delivery, Retry(SHORT, counted=True))
        again = received(receiver)
        waited.append(time.monotonic() - begun)
        receiver.settle(again, Ack())
    assert 0.3 <= min(waited) < 0.9, "the tier of 0.3 s"


def test_retries_go_round_without_end(publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """RabbitMQ takes a message that was dead-lettered in a circle for a loop and drops it: not here."""
    publisher.publish([an_output("work")], SOON)
    for attempt in range(1, 5):
        delivery = received(receiver)
        assert delivery.attempt == attempt
        receiver.settle(delivery, Retry(SHORT, counted=True))


def test_a_longer_retry_does_not_hold_up_a_shorter_one(publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """Each tier is a queue of its own."""
    publisher.publish([an_output("work", number=1), an_output("work", number=2)], SOON)
    receiver.settle(received(receiver), Retry(timedelta(seconds=0.9), counted=True))
    receiver.settle(received(receiver), Retry(SHORT, counted=True))
    assert received(receiver).message.body == b'{"number": 2}'
    assert received(receiver).message.body == b'{"number": 1}'


def test_a_retry_does_not_hold_up_what_is_behind_it(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Nobody waits for its time, not even where one message is taken at a time."""
    broker.declare(Topology(exchange="shop", queues=("work",), delays=(15.0,)))
    publisher.publish([an_output("work", number=1), an_output("work", number=2)], SOON)
    with closing(broker.receiver(["work"], prefetch=1)) as receiver:
        begun = time.monotonic()
        receiver.settle(received(receiver), Retry(timedelta(seconds=15), counted=True))
        assert received(receiver).message.body == b'{"number": 2}'
        assert time.monotonic() - begun < 10


def test_tier_that_is_missing_is_declared(rabbitmq_url: str, publisher: ConfirmingPublisher) -> None:
    """A process that never declared anything can retry and park all the same."""
    with raw_link(rabbitmq_url) as link:
        link.channel.queue_delete("work.delay.300ms")
        link.channel.queue_delete("work.dead")
    publisher.publish([an_output("work"), an_output("work")], SOON)
    stranger = KombuBroker(rabbitmq_url)
    receiver = stranger.receiver(["work"], prefetch=5)
    receiver.settle(received(receiver), Retry(timedelta(minutes=5), counted=True))
    receiver.settle(received(receiver), Park("Refuse"))
    receiver.close()
    assert stranger.depth("work.delay.600000ms") == 1
    assert stranger.depth("work.dead") == 1
    assert stranger.depth("work") == 0


def test_parked_message_is_intact(broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """Body, properties and headers as they came, with the story; it never expires there."""
    sent = an_output(
        "work", body=b"\x80\x04pickle", content_type="application/x-python-serialize", headers={"a": 1}, ttl=30.0
    )
    publisher.publish([sent], SOON)
    receiver.settle(received(receiver), Park("UnsupportedContentType", {"idemp-dead-error": "no"}))
    receiver.close()
    (parked,) = broker.browse("work.dead", 10)
    assert (parked.body, parked.content_type) == (sent.message.body, sent.message.content_type)
    assert (parked.type, parked.message_id, parked.ttl) == (sent.message.type, str(sent.id), None)
    assert parked.headers == {
        "a": 1,
        "idemp-dead-reason": "UnsupportedContentType",
        "idemp-dead-error": "no",
        "idemp-dead-expiration": "30000",
    }
    assert broker.depth("work") == 0
    assert broker.depth("work.dead") == 1


@pytest.mark.parametrize("noted", [{}, {"idemp-dead-expiration": "5", "idemp-dead-user-id": "till"}], ids=["no", "yes"])
def test_what_a_copy_cannot_carry_outlives_retries(
    broker: KombuBroker, receiver: KombuReceiver, noted: dict[str, Any]
) -> None:
    """Time to live and sender stand in the dead letter, however often it was retried; what is noted already stays."""
    publish_raw(broker, expiration="30000", user_id="guest", application_headers=noted)
    receiver.settle(received(receiver), Retry(SHORT, counted=False))
    receiver.settle(received(receiver), Retry(SHORT, counted=True))
    delivery = received(receiver)
    assert (delivery.attempt, delivery.message.ttl) == (2, None)
    receiver.settle(delivery, Park("Refuse"))
    receiver.close()
    (parked,) = broker.browse("work.dead", 10)
    wanted = noted or {"idemp-dead-expiration": "30000", "idemp-dead-user-id": "guest"}
    assert {name: parked.headers.get(name) for name in wanted} == wanted


def test_retry_that_says_which_attempt_is_next(publisher: ConfirmingPublisher, receiver: KombuReceiver) -> None:
    """Where more attempts are known of than the message tells; not where it doesn't count."""
    publisher.publish([an_output("work")], SOON)
    for settlement in (
        Retry(SHORT, counted=True, attempt=5),
        Retry(SHORT, counted=False, attempt=9),
        Retry(SHORT, counted=True),
    ):
        receiver.settle(received(receiver), settlement)
    assert received(receiver).attempt == 6


def test_copies_go_nowhere_else(broker: KombuBroker, receiver: KombuReceiver) -> None:
    """A `CC` header would send the copy to further queues, a foreign user id would be refused."""
    with raw_link(broker._url) as link:
        link.channel.queue_declare("elsewhere", durable=True, auto_delete=False)
    publish_raw(broker, application_headers={"CC": ["elsewhere"]}, user_id="guest")
    assert broker.depth("elsewhere") == 1
    receiver.settle(received(receiver), Park("Refuse"))
    receiver.close()
    (parked,) = broker.browse("work.dead", 10)
    assert parked.headers["idemp-cc"] == ["elsewhere"]
    assert parked.headers["idemp-dead-user-id"] == "guest"
    assert broker.depth("elsewhere") == 1


def test_unconfirmed_copy_is_not_acked(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """The dead-letter queue is full: the delivery stays unsettled and comes again."""
    with raw_link(broker._url) as link:
        link.channel.queue_delete("work.dead")
        arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
        link.channel.queue_declare("work.dead", durable=True, auto_delete=False, arguments=arguments)
    publisher.publish([an_output("work")], SOON)
    receiver = broker.receiver(["work"], prefetch=5)
    receiver.settle(received(receiver), Park("Refuse"))
    receiver.close()
    again = broker.receiver(["work"], prefetch=5)
    assert received(again).redelivered
    again.close()


@pytest.mark.parametrize("encoding", ["gzip", "utf-16"])
def test_encoded_body_is_not_taken_for_json(broker: KombuBroker, receiver: KombuReceiver, encoding: str) -> None:
    """The protocol parks it; a copy has its former properties, and so has one that is published again."""
    publish_raw(broker, b"{}", content_type="application/json", content_encoding=encoding)
    delivery = received(receiver)
    assert delivery.message.body == b"{}"
    with pytest.raises(UnsupportedContentType):
        parse_json(delivery.message)
    receiver.settle(delivery, Park("UnsupportedContentType"))
    receiver.close()
    assert encoding in broker.browse("work.dead", 1)[0].content_type
    with raw_link(broker._url) as link:
        raw = link.channel.basic_get("work.dead")
        assert (raw.properties["content_type"], raw.properties["content_encoding"]) == ("application/json", encoding)


def test_absent_properties(broker: KombuBroker, receiver: KombuReceiver) -> None:
    """Nothing is invented but the content type."""
    publish_raw(broker, b"{}")
    message = received(receiver).message
    assert (message.type, message.message_id, message.content_type) == (None, None, "application/json")
    assert message.headers == {}


UNDECODABLE: list[dict[str, Any]] = [
    {"message_id": b"\xff\xfe-id"},
    {"type": b"\xff" * 255},
    {"application_headers": {"when": datetime(1970, 1, 1, tzinfo=UTC), "bytes": b"\xff", b"\xff": 1}},
    {"routing_key": b"work\xff"},
]


@pytest.mark.parametrize("properties", UNDECODABLE, ids=["id", "type", "headers", "routing key"])
def test_text_that_is_no_utf8_does_not_stop_the_consumer(
    broker: KombuBroker, receiver: KombuReceiver, properties: dict[str, Any]
) -> None:
    """Such a message arrives, can be parked, and the next one is served."""
    with raw_link(broker._url) as link:
        link.channel.queue_bind("work", "shop", "#")
        properties = dict(properties)
        routing_key = properties.pop("routing_key", "work")
        # Confirmed: a connection that ends may take what a quorum queue has not written yet with it.
        link.channel.confirm_select()
        link.channel.basic_publish(amqp.Message(b"{}", **properties), "shop", routing_key)
        link.channel.wait((60, 80), timeout=SOON)
        link.channel.basic_publish(amqp.Message(b"{}", message_id="next"), "", "work")
        link.channel.wait((60, 80), timeout=SOON)
    receiver.settle(received(receiver), Park("Refuse"))
    assert received(receiver).message.message_id == "next"
    receiver.close()
    assert len(broker.browse("work.dead", 5)) == 1


UNREADABLE_IDS: list[dict[str, Any]] = [
    {"message_id": b"m-\xff"},
    {"message_id": b"m-\xfe"},
    {"message_id": b"m" * 254 + b"\xff"},
    {"message_id": b"\xff" * 255},
    {"message_id": "m-1", "application_headers": {"x-id": b"\xff"}},
    {"message_id": "m-2", "application_headers": {"x-id": b"\xfe"}},
]


def test_ids_that_are_no_text_are_parked_each(broker: KombuBroker, receiver: KombuReceiver) -> None:
    """None of them is taken for another one's, nor for the text that it begins with."""
    app = App("work", store=InMemoryStore(), broker=broker)
    handled: list[str | None] = []
    for name, policy in (("envelope", Idempotent()), ("header", Idempotent(key=Key.header("x-id")))):
        app.handler(dict, type=name, policy=policy)(lambda message, ctx: handled.append(ctx.message_id))
    protocol = app.protocol(broker.publisher())
    readable: list[dict[str, Any]] = [
        {"message_id": "m" * 254},
        {"message_id": "3", "application_headers": {"x-id": "7"}},
    ]
    for properties in (*UNREADABLE_IDS, *readable):
        publish_raw(broker, b"{}", type="header" if "application_headers" in properties else "envelope", **properties)
    reasons = []
    for _ in (*UNREADABLE_IDS, *readable):
        delivery = received(receiver)
        _, settlement = protocol.handle(delivery)
        reasons.append(getattr(settlement, "reason", None))
        receiver.settle(delivery, settlement)
    assert reasons == ["InvalidId"] * 6 + [None] * 2
    assert handled == ["m" * 254, "7"]


def test_header_date_beyond_all_years(
    broker: KombuBroker, receiver: KombuReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Milliseconds where seconds belong: the headers are kept as bytes, the rest is served."""
    from amqp.utils import str_to_bytes

    table = str_to_bytes("\x04when") + b"T" + (1_800_000_000_000).to_bytes(8, "big")
    with raw_link(broker._url) as link:
        message = amqp.Message(b"{}", message_id="m-1", application_headers={})
        encoded = message._serialize_properties()
        whole = len(table).to_bytes(4, "big") + table
        monkeypatch.setattr(message, "_serialize_properties", lambda: encoded.replace(b"\0\0\0\0", whole, 1))
        link.channel.basic_publish(message, "", "work")
    delivery = received(receiver)
    assert delivery.message.message_id == "m-1"
    assert list(delivery.message.headers) == [UNREADABLE_HEADERS]


def test_headers_too_long_for_a_story(
    broker: KombuBroker, publisher: ConfirmingPublisher, receiver: KombuReceiver
) -> None:
    """AMQP has 128 KiB for all properties: the message is parked with a shortened story, not delivered for ever."""
    publisher.publish([an_output("work", headers={"long": "x" * 130_000})], SOON)
    receiver.settle(received(receiver), Park("HandlerError", {"idemp-dead-error": "e" * 5000}))
    receiver.close()
    (parked,) = broker.browse("work.dead", 5)
    assert parked.headers["idemp-dead-reason"] == "HandlerError"
    assert parked.headers["idemp-dead-headers-dropped"] == 1


def test_missing_queue_is_no_outage(broker: KombuBroker) -> None:
    """No waiting makes it; a worker declares it anew, and a spooler ends."""
    with pytest.raises(ConfigurationError, match=r"no queue 'nowhere'.*Declare it first"):
        broker.receiver(["nowhere"], prefetch=1)


def test_queue_whose_node_is_down_is_an_outage(broker: KombuBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ answers with the same code, and the queue comes back with its node."""
    down = NotFound("NOT_FOUND - home node 'rabbit@b' of durable queue 'work' in vhost '/' is down or inaccessible")

    def raising(*_: object, **__: object) -> None:
        raise down

    monkeypatch.setattr(Channel, "basic_consume", raising)
    monkeypatch.setattr(Channel, "queue_declare", raising)
    for look in (lambda: broker.receiver(["work"], prefetch=1), lambda: broker.depth("work")):
        with pytest.raises(BrokerUnavailable, match="is down or inaccessible"):
            look()


def test_prefetch_without_limit_is_refused(broker: KombuBroker) -> None:
    """AMQP's 0 means everything."""
    with pytest.raises(ConfigurationError):
        broker.receiver(["work"], prefetch=0)


def test_deleted_queue_ends_the_receiver(broker: KombuBroker, receiver: KombuReceiver) -> None:
    """The broker cancels the consumer: silence would last for ever otherwise."""
    with raw_link(broker._url) as link:
        link.channel.queue_delete("work")
    with pytest.raises(BrokerUnavailable):
        receiver.receive(SOON)
    with pytest.raises(BrokerUnavailable):
        receiver.receive(0.1)


def test_heartbeats_while_a_handler_runs(rabbitmq_url: str) -> None:
    """With a heartbeat of 1 s nobody drains for long: kept alive it can be settled, left alone it is lost."""
    broker = KombuBroker(rabbitmq_url, heartbeat=1)
    broker.declare(Topology(exchange="", queues=("kept", "left")))
    publisher = broker.publisher()
    publisher.publish([an_output("kept"), an_output("kept", number=1), an_output("left")], SOON)
    link = publisher._link
    kept = broker.receiver(["kept"], prefetch=1)
    left = broker.receiver(["left"], prefetch=1)
    in_hand, lost = received(kept), received(left)
    handled = threading.Event()

    def keep_alive() -> None:
        while not handled.wait(0.25):
            kept.keep_alive()
            publisher.keep_alive()

    thread = threading.Thread(target=keep_alive)
    thread.start()
    try:
        wait_until(lambda: broker.depth("left") == 1, "the broker gave up the connection that was left alone")
    finally:
        handled.set()
        thread.join()
    kept.settle(in_hand, Ack())
    second = received(kept)
    assert second.message.body == b'{"number": 1}', "the next one came over the same connection"
    assert not second.redelivered
    assert publisher.publish([an_output("kept")], SOON) == [None]
    assert publisher._link is link, "the idle publisher kept its connection, too"
    publisher.close()
    with pytest.raises(BrokerUnavailable):
        left.receive(SOON)
    with pytest.raises(BrokerUnavailable):
        left.settle(lost, Ack())
    kept.close()
    left.close()
