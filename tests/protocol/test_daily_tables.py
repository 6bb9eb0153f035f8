"""What becomes of a delivery whose id carries a time, where its consumer keeps daily tables."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp import App, Idempotent, Outcome, Previous
from idemp.broker.port import Ack, Delivery, Park
from idemp.dispatch import Dispatcher
from idemp.errors import StoreUnavailable
from idemp.identity import new_id
from idemp.inbox.port import HORIZON_SLACK
from idemp.messages import FORCED_HEADER
from idemp.protocol import Protocol
from idemp.retention import Cleaner
from idemp.settings import Settings
from tests.house import SELL, House, sale, sql_house
from tests.inbox.sql import days

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp import Message

WINDOW = timedelta(days=2)


@contextmanager
def opened(url: str, **policy: object) -> Iterator[House]:
    with sql_house(url) as house:
        house.sells(retention=WINDOW, **policy)
        store = house.store.inner
        store.prepare("shop", [SELL])
        days.open_days(store, house.clock, "shop")
        store.refresh_horizons("shop", [WINDOW])
        yield house


@pytest.fixture
def house(postgresql_url: str) -> Iterator[House]:
    with opened(postgresql_url) as made:
        yield made


def from_now(house: House, **later: float) -> Message:
    """A message whose id was made so much later than now."""
    return sale(str(new_id(house.clock.now() + timedelta(**later))))


def consume(house: House, period: timedelta) -> None:
    """The consumer consumes without a break; then its expired claims are purged."""
    store, started_at = house.store.inner, house.clock.now()
    values = {"started_at": started_at, "ended_at": house.clock.advance(period)}
    with store.engine.begin() as connection:
        connection.execute(
            store.tables.activity.insert(), {"consumer_id": store.names.id("consumer", "shop"), **values}
        )
    store.refresh_horizons("shop", [WINDOW])
    Cleaner(house.app.store.upkeep, "shop", {SELL: WINDOW}).run()


def test_an_id_from_the_future_is_parked_with_the_reason(house: House) -> None:
    outcome, settlement = house.handle(from_now(house, days=30))
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "FutureMessage"
    assert house.sales() == 0


def test_one_of_a_batch_is_from_the_future(postgresql_url: str) -> None:
    """The others are handled."""
    with opened(postgresql_url, batch=10) as house:
        ended = house.together(*(from_now(house, days=ahead) for ahead in (0, 1, 30, 0)))
        assert [outcome for outcome, _ in ended] == [
            Outcome.HANDLED, Outcome.HANDLED, Outcome.PARKED, Outcome.HANDLED
        ]  # fmt: skip
        assert house.sales() == 3


def test_where_nobody_made_the_tables_of_today_consumption_pauses(house: House) -> None:
    house.clock.advance(timedelta(days=5))
    with pytest.raises(StoreUnavailable, match="Run `idemp db partition CONSUMER`"):
        house.handle(message := from_now(house))
    store = house.store.inner
    (layout,) = store.upkeep.daily.layouts("shop")
    store.upkeep.daily.make_ahead(layout)
    assert house.handle(message) == (Outcome.HANDLED, Ack())


def test_an_id_of_a_day_that_was_dropped_is_late(house: House) -> None:
    message = from_now(house)
    assert house.deliver(message) is Outcome.HANDLED
    house.restart()
    consume(house, timedelta(days=4))
    outcome, settlement = house.handle(message)
    assert isinstance(settlement, Park)
    assert (outcome, settlement.reason) == (Outcome.PARKED, "LateMessage")
    assert house.sales() == 1


def lengthened(house: House, **policy: object) -> House:
    """A worker of the next release: its window reaches back past days that were dropped."""
    longer = House(house.store.inner, house.effects, house.clock)
    longer.sells(retention=timedelta(days=30), **policy)
    longer.store.inner.refresh_horizons("shop", [timedelta(days=30)])
    return longer


def test_an_id_of_a_day_that_was_dropped_is_late_whatever_the_window_says(house: House) -> None:
    """Its claim is gone, and a longer window does not bring it back."""
    message = from_now(house)
    assert house.deliver(message) is Outcome.HANDLED
    house.restart()
    consume(house, timedelta(days=4))
    outcome, settlement = lengthened(house).handle(message)
    assert isinstance(settlement, Park)
    assert (outcome, settlement.reason) == (Outcome.PARKED, "LateMessage")
    assert house.sales() == 1


def test_so_it_is_under_a_former_consumer(house: House) -> None:
    """Who took the name over looks for what the former one claimed, and forgot."""
    message = from_now(house)
    assert house.deliver(message) is Outcome.HANDLED
    house.restart()
    consume(house, timedelta(days=4))
    store = house.store.inner
    market = App("market", store=house.store, broker=house.broker, settings=Settings(), clock=house.clock)
    policy = Idempotent(retention=timedelta(days=30), previous=[Previous(consumer="shop")])
    market.handler(dict, type=SELL, policy=policy)(lambda body, ctx: house.effects.write(ctx, "sale"))
    market.registry.build({})
    protocol = Protocol(market.consumer, Dispatcher(house.publisher, house.store, house.clock), pause=lambda _: None)
    store.refresh_horizons("market", [timedelta(days=30)])
    assert protocol.handle(Delivery(message=message, queue="market"))[0] is Outcome.PARKED
    assert house.sales() == 1


def test_where_the_window_was_lengthened_policy_and_force_count_as_ever(house: House) -> None:
    messages = [from_now(house) for _ in range(2)]
    consume(house, timedelta(days=4))
    forced = sale(messages[0].message_id or "", headers={FORCED_HEADER: "1"})
    assert lengthened(house).deliver(forced) is Outcome.HANDLED
    assert lengthened(house, late="handle").deliver(messages[1]) is Outcome.HANDLED


def test_where_the_window_was_lengthened_ids_of_days_that_are_kept_are_no_later_than_before(house: House) -> None:
    consume(house, timedelta(days=4))
    assert lengthened(house).deliver(from_now(house, days=-1)) is Outcome.HANDLED


def test_by_force_a_late_id_is_handled_once_more_and_then_a_duplicate(house: House) -> None:
    message = from_now(house)
    consume(house, timedelta(days=4))
    forced = sale(message.message_id or "", headers={FORCED_HEADER: "1"})
    assert [house.deliver(forced) for _ in range(2)] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert house.sales() == 1


def test_by_policy_a_late_id_is_handled(postgresql_url: str) -> None:
    with opened(postgresql_url, late="handle") as house:
        message = from_now(house)
        consume(house, timedelta(days=4))
        assert [house.deliver(message) for _ in range(2)] == [Outcome.HANDLED, Outcome.REDISPATCHED]


def test_a_worker_that_read_the_window_a_while_ago(house: House) -> None:
    """It would take the id for young enough to have a claim: so claims are kept for as long as anybody goes by that."""
    message = from_now(house)
    assert house.deliver(message) is Outcome.HANDLED
    house.restart()
    store, day_ends = house.store.inner, house.clock.now().replace(hour=0) + timedelta(days=1)
    consume(house, day_ends + WINDOW - house.clock.now() - timedelta(seconds=1))
    horizon = store.late_before("shop", WINDOW)
    consume(house, HORIZON_SLACK)
    assert house.deliver(message) is not Outcome.HANDLED, "its day is kept: somebody may still go by the former horizon"
    assert horizon < day_ends
    consume(house, timedelta(seconds=1))
    assert house.handle(message)[0] is Outcome.PARKED
