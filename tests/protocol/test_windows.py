"""Cases 15 and 16b: messages older than the window, and identities that a deploy changed inside of it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App, Idempotent, Key, Message, Outcome, Previous
from idemp.errors import (
    LateMessage,
)
from idemp.identity import new_id
from tests.house import SELL, House, sale

if TYPE_CHECKING:
    pass


class TestLate:
    """Case 15: older than the window, so that nobody knows whether it was handled."""

    @pytest.fixture
    def old(self, house: House) -> Message:
        """A message from before the window, of a consumer that consumed for longer than it."""
        made = sale(str(new_id(house.clock.now())))
        house.consume_for_ten_minutes()
        return made

    def test_parked(self, house: House, old: Message) -> None:
        house.sells(retention="5m")
        with pytest.raises(LateMessage, match="are not kept"):
            house.deliver(old)
        assert house.sales() == 0
        assert house.deliver(sale("no time in this one")) is Outcome.HANDLED

    def test_handled_by_policy_and_said_in_the_log(
        self, house: House, old: Message, caplog: pytest.LogCaptureFixture
    ) -> None:
        house.sells(retention="5m", late="handle")
        with caplog.at_level(logging.WARNING, "idemp.protocol"):
            assert house.deliver(old) is Outcome.HANDLED
        assert [record.event for record in caplog.records] == ["late_message_handled"]  # type: ignore[attr-defined]

    @pytest.mark.parametrize("zone", [UTC, None])
    def test_by_the_timestamp_that_its_producer_declared(self, house: House, old: Message, zone: Any) -> None:
        house.sells(retention="5m")
        with pytest.raises(LateMessage):
            house.deliver(sale("sale-2", timestamp=datetime(2025, 12, 31, tzinfo=zone)))

    def test_forced_replay(self, house: House, old: Message) -> None:
        house.sells(retention="5m")
        assert house.deliver(old.with_headers(idemp_forced=1)) is Outcome.HANDLED

    def test_a_known_duplicate_is_one_however_old(self, house: House, old: Message) -> None:
        house.sells(retention="5m", late="handle")
        house.deliver(old)
        assert house.deliver(old) is Outcome.REDISPATCHED


class TestPrevious:
    """Case 16b: what the former version handled is a duplicate for the new one."""

    @pytest.mark.parametrize(
        ("now", "former"),
        [
            ({"key": "sku"}, Previous(key=Key.message_id())),
            ({"key": "sku"}, Previous(key="order_no")),
            ({}, Previous(consumer="old-shop")),
        ],
    )
    @pytest.mark.parametrize("claim", ["early", "late"])
    def test_former_identity_counts(self, house: House, now: dict[str, Any], former: Previous, claim: str) -> None:
        old = App(former.consumer or "shop", store=house.store, broker=house.broker, settings=house.app.settings)
        old.handler(dict, type=SELL, policy=Idempotent(key=former.key or Key.message_id()))(lambda message: None)
        body = {"sku": "A-1", "order_no": 7}
        assert old.protocol(house.publisher).process(sale(body=body)) is Outcome.HANDLED
        house.sells(**now, previous=[former], claim=claim)
        assert house.deliver(sale(body=body)) is Outcome.SKIPPED
        assert house.sales() == 0
        new = sale("sale-2", {"sku": "B-2", "order_no": 8})
        assert [house.deliver(new), house.deliver(new)] == [Outcome.HANDLED, Outcome.REDISPATCHED]
        # An instance of the former version finds the new version's claim in turn, though not its outputs.
        assert old.protocol(house.publisher).process(new) is Outcome.SKIPPED
        assert house.sales() == 1

    @pytest.mark.parametrize("claim", ["early", "late"])
    def test_two_former_identities_that_come_to_one_id(self, house: House, claim: str) -> None:
        """Claimed twice, the second claim would meet the first one's row, and the message would pass for a duplicate."""
        former = [Previous(consumer="old-shop"), Previous(consumer="old-shop", type="shop.Sold")]
        house.sells(previous=former, claim=claim)
        assert [house.deliver(), house.deliver()] == [Outcome.HANDLED, Outcome.REDISPATCHED]
        assert house.sales() == 1

    def test_not_opted_in_before(self, house: House) -> None:
        house.sells(previous=[Previous(opted_in=False)])
        assert [house.deliver(), house.deliver()] == [Outcome.HANDLED, Outcome.REDISPATCHED]
