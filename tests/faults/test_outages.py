"""The broker or the database is away for a while: cases 23, 36 and 38."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp import Outcome
from idemp.broker.port import Ack, Park, Release, Retry
from idemp.errors import BrokerError, BrokerUnavailable
from tests.faults.shop import ACK, NAME, PUBLISH, SOON, STOCK, Shop, a_shop
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from idemp.broker.port import Settlement

OUTAGE = 2.0  # seconds for which a database is away


def broker_goes_at_dispatch(shop: Shop) -> None:
    """One message is committed, and then the broker is not there any more."""
    shop.sell("sale")

    def gone() -> None:
        shop.to_broker.refuse()
        shop.to_broker.cut()

    trigger = shop.to_broker.when(PUBLISH, gone)
    shop.consumer.step()
    assert trigger.wait_triggered(SOON)
    assert shop.consumer.outcomes == [Outcome.PENDING]
    assert shop.consumer.step() is None, "it can't connect"
    assert (shop.effects(), shop.pending(), shop.arrived()) == ({"sale": 1}, [0, 1], [])


def test_broker_away_at_dispatch_then_redelivery(shop: Shop) -> None:
    broker_goes_at_dispatch(shop)
    shop.to_broker.heal()
    shop.work()
    assert shop.consumer.outcomes == [Outcome.PENDING, Outcome.REDISPATCHED]
    assert shop.relay().taken == 0
    assert set(shop.all_is_well().values()) == {1}


def test_broker_away_at_dispatch_then_relay(shop: Shop) -> None:
    broker_goes_at_dispatch(shop)
    away = shop.relay()
    assert (away.taken, away.confirmed, away.quarantined) == (2, 0, 0)
    shop.to_broker.heal()
    assert shop.relay().confirmed == 2
    shop.work()
    assert set(shop.all_is_well().values()) == {2}, "under the same ids"


@pytest.mark.parametrize("fault", ["refuse", "stall"])
def test_database_away(postgresql_url: str, rabbitmq_url: str, fault: str) -> None:
    """Case 36: consumption pauses without a hot loop, and goes on; nothing is parked, nothing is an attempt."""
    ids = [f"sale {number}" for number in range(10)]
    with a_shop(postgresql_url, rabbitmq_url, clock=None) as shop:
        with shop.working(through_database_proxy=True):
            shop.sell(*ids[:5])
            wait_until(lambda: len(shop.effects()) == 5, "the worker works")
            if fault == "refuse":
                shop.to_database.refuse(accept=True)
                shop.to_database.cut()
            else:
                shop.to_database.stall()
            before = shop.to_database.connections
            shop.sell(*ids[5:])
            threading.Event().wait(OUTAGE)  # how often it tries in this time is what is measured
            attempts = shop.to_database.connections - before
            assert len(shop.effects()) == 5
            assert shop.direct.depth(f"{NAME}.dead") == 0
            shop.to_database.heal()
            wait_until(lambda: len(shop.effects()) == 10, "the worker works again")
            wait_until(shop.at_rest, "all is recorded")
            # The handling, the relay and the heartbeat try, each with pauses.
            assert attempts <= 20 * OUTAGE, f"{attempts} connections in {OUTAGE:g} s"
            assert attempts >= (fault == "refuse")
        shop.all_is_well()


@pytest.mark.parametrize("settlement", [Ack(), Release(), Retry(timedelta(seconds=5), counted=True), Park("Refuse")])
def test_settling_over_a_link_that_is_gone(shop: Shop, settlement: Settlement) -> None:
    """Case 38: nothing is settled in silence; the message comes again, and no copy of it was made."""
    shop.sell("sale")
    with closing(shop.app.broker.receiver([NAME], prefetch=1)) as receiver:
        delivery = receiver.receive(SOON)
        assert delivery is not None
        shop.to_broker.cut()
        with pytest.raises(BrokerUnavailable):
            receiver.receive(SOON)
        with pytest.raises(BrokerUnavailable) as lost:
            receiver.settle(delivery, settlement)
        assert lost.value.committed == "unknown"
    shop.work()
    assert shop.consumer.outcomes == [Outcome.HANDLED]
    shop.all_is_well()


def test_ack_lost_on_its_way(shop: Shop) -> None:
    """Case 38: the second delivery is settled, too, and each of them once."""
    shop.sell("sale")
    trigger = shop.to_broker.cut_when(ACK)
    shop.consumer.step()
    shop.work()
    assert trigger.wait_triggered(SOON)
    assert shop.consumer.outcomes == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert set(shop.all_is_well().values()) == {2}


def test_a_delivery_is_settled_once(shop: Shop) -> None:
    """Case 38: a second settlement is an error, whatever the link does meanwhile."""
    shop.sell("sale")
    with closing(shop.app.broker.receiver([NAME], prefetch=1)) as receiver:
        delivery = receiver.receive(SOON)
        assert delivery is not None
        shop.to_broker.stall()
        receiver.settle(delivery, Ack())
        with pytest.raises(BrokerError, match="settled already"):
            receiver.settle(delivery, Park("Refuse"))
        shop.to_broker.heal()
        assert receiver.receive(0.2) is None
    assert (shop.left(), shop.direct.depth(f"{NAME}.dead"), shop.arrived(STOCK)) == (0, 0, [])


@pytest.mark.parametrize("settlement", [Retry(timedelta(seconds=5), counted=True), Park("Refuse")])
def test_ack_lost_after_the_copy_was_confirmed(shop: Shop, settlement: Settlement) -> None:
    """Case 38: two copies at worst, never none."""
    shop.sell("sale")
    trigger = shop.to_broker.cut_when(ACK)
    with closing(shop.app.broker.receiver([NAME], prefetch=1)) as receiver:
        delivery = receiver.receive(SOON)
        assert delivery is not None
        receiver.settle(delivery, settlement)

        def lost() -> bool:
            try:
                return receiver.receive(0.05) is not None
            except BrokerUnavailable:
                return True

        wait_until(lost, "the receiver knows")
    assert trigger.wait_triggered(SOON)
    copies = f"{NAME}.dead" if isinstance(settlement, Park) else f"{NAME}.delay.5000ms"
    assert [message.message_id for message in shop.direct.browse(copies, 9)] == ["sale"]
    with shop.link() as link:
        link.channel.queue_purge(f"{NAME}.dead")
    shop.work()
    assert shop.effects() == {"sale": 1}
    shop.all_is_well()
