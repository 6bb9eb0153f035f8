"""Around a kombu consumer of the user's own."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuSettler
from idemp.broker.port import Ack, Park, Release, Retry
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.messages import parse_json
from tests.broker.kombu.tools import SOON, an_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Next = Callable[[], Any]


@contextmanager
def consuming(url: str, *, no_ack: bool = False) -> Iterator[Next]:
    """The user's consumer of queue `work`; gives a function that waits for the next kombu message."""
    came: list[Any] = []
    with Connection(url) as connection, connection.channel() as channel:
        consumer = Consumer(channel, [Queue("work", no_declare=True)], on_message=came.append, no_ack=no_ack)
        consumer.qos(prefetch_count=1)
        consumer.consume()

        def following() -> Any:
            deadline = time.monotonic() + SOON
            while not came:
                assert time.monotonic() < deadline, "nothing came"
                connection.drain_events(timeout=SOON)
            return came.pop(0)

        yield following


@pytest.fixture
def settler(publisher: ConfirmingPublisher) -> KombuSettler:
    """A settler with one short tier, which nobody declared."""
    return KombuSettler(publisher, "work", delays=(0.2,))


def test_what_kombu_producers_send(rabbitmq_url: str, broker: KombuBroker, settler: KombuSettler) -> None:
    """JSON by kombu's own serializer, with its properties; acked once."""
    with Connection(rabbitmq_url) as connection:
        Producer(connection.channel()).publish(
            {"name": "é"}, routing_key="work", message_id="m-1", type="t", headers={"a": 1}, correlation_id="c"
        )
    with consuming(rabbitmq_url) as following:
        delivery = settler.delivery(following())
        assert parse_json(delivery.message) == {"name": "é"}
        assert (delivery.message.message_id, delivery.message.type, delivery.message.correlation_id) == (
            "m-1",
            "t",
            "c",
        )
        assert delivery.message.headers == {"a": 1}
        assert (delivery.queue, delivery.attempt) == ("work", 1)
        settler.settle(delivery, Ack())
    assert broker.depth("work") == 0


def test_compressed_by_kombu(rabbitmq_url: str, broker: KombuBroker, settler: KombuSettler) -> None:
    """kombu decompresses what its producers compressed; a copy is not marked as compressed any more."""
    with Connection(rabbitmq_url) as connection:
        Producer(connection.channel()).publish({"much": "x" * 999}, routing_key="work", compression="zlib")
    with consuming(rabbitmq_url) as following:
        settler.settle(settler.delivery(following()), Retry(timedelta(seconds=0.1), counted=True))
        delivery = settler.delivery(following())
        assert parse_json(delivery.message) == {"much": "x" * 999}
        assert delivery.attempt == 2
        settler.settle(delivery, Park("Refuse"))
    (parked,) = broker.browse("work.dead", 5)
    assert parse_json(parked) == {"much": "x" * 999}


@pytest.mark.parametrize("settlement", [Park("Refuse"), Retry(timedelta(minutes=5), counted=True)])
def test_copy_without_a_confirm_is_no_ack(
    rabbitmq_url: str, broker: KombuBroker, publisher: ConfirmingPublisher, settlement: Park | Retry
) -> None:
    """The broker has no time to answer: an error, and the message comes again."""
    hasty = KombuSettler(publisher, "work", timeout=0.0)
    publisher.publish([an_output("work")], SOON)
    with consuming(rabbitmq_url) as following, pytest.raises(BrokerUnavailable, match="not confirmed"):
        hasty.settle(hasty.delivery(following()), settlement)
    with consuming(rabbitmq_url) as following:
        again = hasty.delivery(following())
        assert again.redelivered
        hasty.settle(again, Ack())
    assert broker.depth("work.dead") == 0


def test_pickle_is_never_read(rabbitmq_url: str, broker: KombuBroker, settler: KombuSettler) -> None:
    """It arrives as bytes, and is parked as bytes."""
    with Connection(rabbitmq_url) as connection:
        Producer(connection.channel()).publish({"a": 1}, routing_key="work", serializer="pickle")
    with consuming(rabbitmq_url) as following:
        delivery = settler.delivery(following())
        assert delivery.message.content_type == "application/x-python-serialize"
        settler.settle(delivery, Park("UnsupportedContentType"))
    (parked,) = broker.browse("work.dead", 5)
    assert parked.body == delivery.message.body


def test_release(rabbitmq_url: str, publisher: ConfirmingPublisher, settler: KombuSettler) -> None:
    """Back to the queue."""
    publisher.publish([an_output("work")], SOON)
    with consuming(rabbitmq_url) as following:
        settler.settle(settler.delivery(following()), Release())
        again = settler.delivery(following())
        assert again.redelivered
        settler.settle(again, Ack())


def test_acked_by_the_callback_itself(rabbitmq_url: str, publisher: ConfirmingPublisher, settler: KombuSettler) -> None:
    """An error that says what to change; a copy is not made."""
    publisher.publish([an_output("work")], SOON)
    with consuming(rabbitmq_url) as following:
        message = following()
        message.ack()
        with pytest.raises(ConfigurationError, match="no_ack"):
            settler.settle(settler.delivery(message), Park("Refuse"))


def test_lost_connection(rabbitmq_url: str, publisher: ConfirmingPublisher, settler: KombuSettler) -> None:
    """Settling over a connection that is gone says so."""
    publisher.publish([an_output("work")], SOON)
    with consuming(rabbitmq_url) as following:
        message = following()
    with pytest.raises(BrokerUnavailable):
        settler.settle(settler.delivery(message), Ack())
