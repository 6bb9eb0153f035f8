"""Case 21: whatever keeps output i of n from being confirmed leaves exactly the unconfirmed pending."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import amqp
import pytest

from idemp import Outcome
from idemp.broker.port import Binding, Topology
from tests.faults.shop import ACK, EXCHANGE, PUBLISH, SOON, STOCK, Shop, a_shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.rabbitmq import RabbitMQ

OUTPUTS = 4
ODD = "odd"
INDEXES = [0, 2, 3]
ALARMED = timedelta(seconds=3)  # a slow machine has to raise the alarm within it, and the broker to tell of it

each_index = pytest.mark.parametrize("index", INDEXES)


def dispatched(shop: Shop, caplog: pytest.LogCaptureFixture, *, odd: tuple[int, str] | None = None) -> list[str]:
    """One message is handled, with an odd destination among the others; the kinds of refusals that were logged."""
    to = [STOCK] * OUTPUTS
    if odd is not None:
        to[odd[0]] = odd[1]
    shop.pretend_a_relay()
    shop.sell("sale", to=to, hasty=True)
    with caplog.at_level(logging.WARNING, "idemp.dispatch"):
        assert shop.consumer.step() is Outcome.PENDING
    shop.consumer.protocol.dispatcher.flush()
    return [record.refusal for record in caplog.records if getattr(record, "event", "") == "output_unconfirmed"]


def recovered(shop: Shop, count: int, *queues: str) -> None:
    """A relay ships exactly what is pending; nothing is left to do."""
    done = shop.relay()
    assert (done.taken, done.confirmed) == (count, count)
    shop.work()
    shop.all_is_well(queues or (STOCK,))


@each_index
def test_refused_by_a_full_queue(shop: Shop, caplog: pytest.LogCaptureFixture, index: int) -> None:
    shop.declare(ODD, {"x-max-length": 1, "x-overflow": "reject-publish"})
    with shop.link() as link:
        link.channel.queue_purge(ODD)
        link.channel.basic_publish(amqp.Message(b"in the way"), routing_key=ODD)
    assert dispatched(shop, caplog, odd=(index, ODD)) == ["nacked"]
    assert shop.pending() == [index]
    with shop.link() as link:
        link.channel.queue_purge(ODD)
    recovered(shop, 1, STOCK, ODD)


@each_index
def test_no_such_queue(shop: Shop, caplog: pytest.LogCaptureFixture, index: int) -> None:
    with shop.link() as link:
        link.channel.queue_delete(ODD)
    assert dispatched(shop, caplog, odd=(index, ODD)) == ["returned"]
    assert shop.pending() == [index]
    shop.declare(ODD, {})
    recovered(shop, 1, STOCK, ODD)
    with shop.link() as link:
        link.channel.queue_delete(ODD)


@each_index
def test_no_such_exchange(shop: Shop, caplog: pytest.LogCaptureFixture, index: int) -> None:
    """The broker closes the whole channel for it."""
    with shop.link() as link:
        link.channel.exchange_delete(EXCHANGE)
    kinds = dispatched(shop, caplog, odd=(index, "*"))
    assert (kinds, shop.pending()) == (["returned"], [index])
    shop.direct.declare(Topology(exchange=EXCHANGE, queues=(STOCK,), bindings=(Binding(STOCK, "stock.#"),)))
    recovered(shop, 1)


def _stall(shop: Shop) -> None:
    shop.to_broker.stall()


def _half_open(shop: Shop) -> None:
    shop.to_broker.half_open()


def _gone(shop: Shop) -> None:
    shop.to_broker.refuse()
    shop.to_broker.cut()


@each_index
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(_stall, "timeout"), (_half_open, "timeout"), (_gone, "closed")],
    ids=["stalled link", "half-dead link", "closed connection"],
)
def test_link_fails(
    shop: Shop, caplog: pytest.LogCaptureFixture, index: int, fault: Callable[[Shop], None], kind: str
) -> None:
    """Just when the broker confirms output i: that one has arrived, those after it were not sent."""
    trigger = shop.to_broker.when(ACK, lambda: fault(shop), direction="to_client", nth=index + 1)
    assert dispatched(shop, caplog) == [kind] * (OUTPUTS - index)
    assert trigger.wait_triggered(SOON)
    assert shop.pending() == list(range(index, OUTPUTS))
    shop.to_broker.heal()
    recovered(shop, OUTPUTS - index)


@pytest.mark.parametrize(
    ("alarm", "index"),
    [("memory", 0), *(pytest.param(*other, marks=pytest.mark.slow) for other in (("disk", 2), ("memory", 3)))],
)
def test_alarm(
    own_rabbitmq: RabbitMQ, postgresql_url: str, caplog: pytest.LogCaptureFixture, alarm: str, index: int
) -> None:
    """It is raised just before output i reaches the broker."""
    with a_shop(postgresql_url, own_rabbitmq.url, haste=ALARMED) as shop:
        trigger = shop.to_broker.when(PUBLISH, getattr(own_rabbitmq, f"raise_{alarm}_alarm"), nth=index + 1)
        assert dispatched(shop, caplog) == ["blocked"] * (OUTPUTS - index)
        assert trigger.wait_triggered(SOON)
        assert shop.pending() == list(range(index, OUTPUTS))
        getattr(own_rabbitmq, f"clear_{alarm}_alarm")()
        recovered(shop, OUTPUTS - index)
