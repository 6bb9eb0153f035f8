"""Cases 15 and 16b: messages older than the window, and identities that a deploy changed inside of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from idemp import App, Idempotent, Key, Message, Outcome, Previous
from idemp.broker.port import Ack, Delivery, Retry
from idemp.errors import LateMessage
from idemp.identity import new_id
from idemp.inbox.sql.erasing import Erasing
from idemp.settling import UNCONFIRMED_DELAY
from tests.house import SELL, House, sale


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

    @pytest.mark.parametrize("claim", ["early", "late"])
    def test_a_new_timestamp_makes_no_old_id_new(self, house: House, old: Message, claim: str) -> None:
        """A producer, or a broker, that sends again may stamp anew; the claim may be purged all the same."""
        house.sells(retention="5m", claim=claim)
        with pytest.raises(LateMessage):
            house.deliver(replace(old, timestamp=house.clock.now()))
        assert house.sales() == 0

    @pytest.mark.parametrize("key", ["order", Key.header("x-order")], ids=["body", "header"])
    def test_a_new_message_about_an_old_thing_is_new(self, house: House, old: Message, key: Any) -> None:
        """The time in a key of the body or a header is that of the thing, not of the message."""
        house.sells(retention="5m", key=key)
        for number, text in enumerate((str(new_id(house.clock.now())), "no time in this one", None)):
            order = str(new_id(house.clock.now() - timedelta(minutes=10, seconds=number)))
            made = replace(sale(body={"order": order}, headers={"x-order": order}), message_id=text)
            assert house.deliver(made) is Outcome.HANDLED
            assert house.deliver(made) is Outcome.REDISPATCHED
        new_thing = {"body": {"order": "7"}, "headers": {"x-order": "7"}}
        with pytest.raises(LateMessage):
            house.deliver(sale(str(old.message_id), **new_thing))

    @pytest.mark.parametrize(
        "dated_by", ["made_at", Key.header("x-made-at"), Key.header("x-id"), lambda body: body["made_at"]]
    )
    def test_by_what_the_policy_names(self, house: House, old: Message, dated_by: Any) -> None:
        """Where a broker gives ids of its own, the message's time is in its body or in a header."""
        house.sells(retention="5m", key="order", dated_by=dated_by)
        begun = house.clock.now() - timedelta(minutes=10)
        for number, moment in enumerate((house.clock.now(), begun)):
            made = sale(
                str(new_id(house.clock.now())),
                {"order": number, "made_at": moment.isoformat()},
                headers={"x-made-at": moment.isoformat(), "x-id": str(new_id(moment))},
            )
            if moment == begun:
                with pytest.raises(LateMessage):
                    house.deliver(made)
            else:
                assert house.deliver(made) is Outcome.HANDLED

    def test_a_chain_that_is_older_than_the_window_goes_on(self, house: House) -> None:
        """Ids of outputs carry the time of the chain's first message, so that they are the same in each run."""
        house.sells(retention="5m", outputs=1)
        message = sale(str(new_id(house.clock.now())))
        for _ in range(5):
            assert house.deliver(message) is Outcome.HANDLED
            message = replace(house.publisher.sent[-1].message, type=SELL)
            for _ in range(6):  # three minutes
                house.clock.advance(timedelta(seconds=30))
                house.app.store.upkeep.beat("w", relay=False, consumers=["shop"])
            house.app.store.refresh_horizons("shop", [timedelta(minutes=5)])
        house.consume_for_ten_minutes()
        with pytest.raises(LateMessage):
            house.deliver(message)

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
        # An instance of the former version finds the new version's claim in turn, and its outputs.
        assert old.protocol(house.publisher).process(new) is Outcome.REDISPATCHED
        assert house.sent()[-2:] == house.sent()[:2]
        assert house.sales() == 1

    @pytest.mark.parametrize("claim", ["early", "late"])
    @pytest.mark.parametrize("former", [Previous(key=Key.message_id()), Previous(consumer="old-shop")])
    def test_former_release_acks_nothing_that_is_unconfirmed(
        self, any_sql_house: House, former: Previous, claim: str
    ) -> None:
        """No relay runs. The new release dies before its outputs go out, and the former one gets the redelivery."""
        house = any_sql_house
        name = former.consumer or "shop"
        old = App(name, store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)
        old.handler(dict, type=SELL, policy=Idempotent(key=Key.message_id()))(lambda message: None)
        house.sells(key="sku" if former.key else Key.message_id(), previous=[former], claim=claim)
        with house.crashing():
            house.script.crash_before = "publish"
            house.deliver()
        again = Delivery(message=sale(), queue="shop", redelivered=True)
        house.script.answers = ["nacked", "nacked"]
        assert old.protocol(house.publisher).handle(again) == (
            Outcome.PENDING,
            Retry(UNCONFIRMED_DELAY, counted=False),
        )
        assert old.protocol(house.publisher).handle(again) == (Outcome.REDISPATCHED, Ack())
        assert len(set(house.sent())) == 2
        assert house.sales() == 1

    def test_copies_under_a_former_id_are_erased_with_the_outputs(self, any_sql_house: House) -> None:
        house = any_sql_house
        house.sells(key="sku", previous=[Previous(key=Key.message_id()), Previous(consumer="old-shop")])
        house.deliver(sale(body={"sku": "secret"}))
        house.restart()
        tables, engine = house.store.inner.tables, house.store.inner.engine
        with engine.connect() as connection:
            bodies = connection.scalars(select(tables.output.c.body)).all()
            keys = connection.execute(select(tables.consumer.c.name, tables.inbox.c.message_key).join_from(
                tables.inbox, tables.consumer, tables.consumer.c.id == tables.inbox.c.consumer_id
            )).all()  # fmt: skip
        assert len(bodies) == 6
        for name, key in keys[:1]:
            assert Erasing(engine, tables).erase(name, key) == 2
        with engine.connect() as connection:
            assert connection.scalars(select(tables.output.c.body)).all() == [b""] * 6

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
