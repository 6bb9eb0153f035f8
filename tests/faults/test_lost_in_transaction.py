"""The broker refuses, in the middle of the night, what the database has committed: nothing may vanish in silence.

In each story a worker meets the refusal and is stopped in the middle of it. Then every message must still be there: in
its queue or a delay tier, or with all its outputs confirmed, or, where a relay lives, with its outputs pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.port import Binding, Topology
from tests.faults.shop import EXCHANGE, NAME, STOCK, Shop, a_shop
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from idemp import Message
    from tests.servers.rabbitmq import RabbitMQ

NARROW = "narrow"
HASTE = timedelta(seconds=0.75)  # whatever keeps an output from being confirmed: it waits for it again and again

with_and_without_relay = pytest.mark.parametrize("relay", [False, True], ids=["no relay", "relay"])


@contextmanager
def a_night_shop(database: str, broker: str, *, relay: bool) -> Iterator[Shop]:
    """A shop with a clock that goes, and a relay that looks often."""
    options: dict[str, Any] = {
        "haste": HASTE,
        "relay": relay,
        "relay_after": 0.2,
        "relay_interval": 0.1,
        "relay_lease": 1,
        "grace": 10,
    }
    with a_shop(database, broker, clock=None, **options) as shop:
        yield shop


def story(shop: Shop, *, relay: bool, heal: Callable[[], object], drain: Callable[[], None] = lambda: None) -> None:
    """A worker meets the refusal and is stopped; the refusal ends; another worker brings all to its end."""
    with shop.working():
        wait_until(lambda: set(shop.effects()) == set(shop.sent), "all handled")
    nothing_vanished(shop, relay=relay)
    assert shop.pending(), "it was refused"
    heal()
    with shop.working():

        def rest() -> bool:
            drain()
            shop.pass_delays()
            return shop.at_rest()

        wait_until(rest, "all sent")
    drain()


def nothing_vanished(shop: Shop, *, relay: bool) -> None:
    """What is neither in a queue nor confirmed is pending, and a relay is there to see to it.

    A message may be on its way from one queue to the next while both are looked at: then it is there at another look.
    """
    missing: set[str] = set()

    def all_there() -> bool:
        waiting = {message.message_id for queue in (NAME, *shop.delays()) for message in shop.arrived(queue)}
        confirmed = {message.message_id for queue in (STOCK, NARROW) for message in shop.arrived(queue)}
        pending = shop.pending_ids()
        missing.clear()
        for sale in shop.sent:
            outputs = {str(id_) for id_ in shop.expected(sale)}
            assert outputs <= confirmed | pending, "all are known somewhere"
            if not (outputs <= confirmed or sale in waiting or (relay and outputs - confirmed <= pending)):
                missing.add(sale)
        return not missing

    wait_until(all_there, "every message is in a queue, or done", seen=lambda: f"missing: {sorted(missing)}")


@with_and_without_relay
def test_output_queue_is_full(postgresql_url: str, rabbitmq_url: str, relay: bool) -> None:
    """A length limit with reject-publish, and the consumer of that queue has stopped."""
    with a_night_shop(postgresql_url, rabbitmq_url, relay=relay) as shop:
        shop.declare(NARROW, {"x-max-length": 3, "x-overflow": "reject-publish"})
        shop.sell(*(f"sale {number}" for number in range(10)), to=[STOCK, NARROW], hasty=True)
        drained: list[Message] = []
        story(shop, relay=relay, heal=lambda: None, drain=lambda: drained.extend(shop.taken(NARROW)))
        shop.all_is_well((STOCK,), beside=drained)


@with_and_without_relay
@pytest.mark.parametrize("alarm", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
def test_alarm(own_rabbitmq: RabbitMQ, postgresql_url: str, alarm: str, relay: bool) -> None:
    with a_night_shop(postgresql_url, own_rabbitmq.url, relay=relay) as shop:
        shop.declare(NARROW, {})
        shop.sell("sale 1", "sale 2", to=[STOCK, NARROW], hasty=True)
        getattr(own_rabbitmq, f"raise_{alarm}_alarm")()
        story(shop, relay=relay, heal=getattr(own_rabbitmq, f"clear_{alarm}_alarm"))
        shop.all_is_well((STOCK, NARROW))


@with_and_without_relay
def test_exchange_deleted_and_declared_again(postgresql_url: str, rabbitmq_url: str, relay: bool) -> None:
    """While the worker runs; it declares the exchange itself when it starts anew, but nobody's bindings."""
    topology = Topology(exchange=EXCHANGE, queues=(STOCK,), bindings=(Binding(STOCK, "stock.#"),))
    with a_night_shop(postgresql_url, rabbitmq_url, relay=relay) as shop:
        shop.declare(NARROW, {})
        shop.in_handler = lambda: deleted(shop)
        shop.sell(*(f"sale {number}" for number in range(10)), to=["*", NARROW])

        def heal() -> None:
            shop.in_handler = lambda: None
            shop.direct.declare(topology)

        story(shop, relay=relay, heal=heal)
        shop.all_is_well((STOCK, NARROW))


def deleted(shop: Shop) -> None:
    with shop.link() as link:
        link.channel.exchange_delete(EXCHANGE)
