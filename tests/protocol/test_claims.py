"""Cases 1 to 16d: one message, however often it arrives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from idemp import App, Context, Idempotent, Key, Message, Outcome, Policy
from idemp.broker.port import Ack, Park, Retry
from idemp.errors import (
    MissingId,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
    UnknownMessageType,
)
from idemp.identity import effective_id
from idemp.inbox.sql import SqlStore
from idemp.settling import IN_FLIGHT_DELAY
from idemp.testing.store_bench import Background
from tests.house import SELL, House, memory_house, sale

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("claim", ["early", "late"])
def test_one_after_the_other(house: House, claim: str) -> None:
    """Case 1."""
    house.sells(outputs=3, claim=claim)
    assert [house.deliver() for _ in range(3)] == [Outcome.HANDLED, Outcome.REDISPATCHED, Outcome.REDISPATCHED]
    sent = house.sent()
    assert sent[:3] == sent[3:6] == sent[6:]
    assert len({id_ for id_, _ in sent}) == 3
    assert (house.sales(), house.pending()) == (1, 0)


def test_three_overlapping_deliveries_of_a_slow_handler() -> None:
    """Case 2: one execution, 100 output ids; the others wait, then redispatch."""
    house = memory_house()
    entered, go = threading.Event(), threading.Event()

    def slow(message: dict[str, Any], ctx: Context) -> None:
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        entered.set()
        assert go.wait(30)
        for number in range(100):
            ctx.send({"n": number}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(claim_wait="30s"))(slow)
    workers = [house.app.protocol(house.broker.publisher()) for _ in range(3)]
    first = Background(lambda: workers[0].process(sale()))
    assert entered.wait(30)
    others = [Background(lambda worker=worker: worker.process(sale())) for worker in workers[1:]]
    go.set()
    assert first.result(30) is Outcome.HANDLED
    assert [other.result(30) for other in others] == [Outcome.REDISPATCHED] * 2
    assert house.sales() == 1
    arrived = [message.message_id for message in house.broker.browse("stock", 1000)]
    assert (len(arrived), len(set(arrived))) == (300, 100)


def test_in_flight_goes_back_by_a_delay() -> None:
    """Longer than the claim waits: no failure, no attempt, no dead letter."""
    memory = memory_house()
    entered, go = threading.Event(), threading.Event()

    def slow(message: dict[str, Any], ctx: Context) -> None:
        entered.set()
        assert go.wait(30)

    memory.app.handler(dict, type=SELL, policy=Idempotent(claim_wait="50ms"))(slow)
    first = Background(lambda: memory.app.protocol(memory.broker.publisher()).process(sale()))
    assert entered.wait(30)
    assert memory.handle() == (Outcome.IN_FLIGHT, Retry(IN_FLIGHT_DELAY, counted=False))
    go.set()
    assert first.result(30) is Outcome.HANDLED
    assert memory.deliver() is Outcome.SKIPPED


def test_one_event_two_consumers(house: House) -> None:
    """Case 5: one database, one broker, each with outputs of its own."""
    house.sells(outputs=1)
    other = App("audit", store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)

    @other.handler(dict, type=SELL, policy=Idempotent())
    def audit(message: dict[str, Any], ctx: Context) -> None:
        house.effects.write(ctx, "audit")  # type: ignore[arg-type]
        ctx.send({}, to="stock", type="audit.Done")

    assert house.deliver() is Outcome.HANDLED
    assert other.protocol(house.publisher).process(sale()) is Outcome.HANDLED
    assert (house.sales(), house.effects.count("audit")) == (1, 1)
    assert len({id_ for id_, _ in house.sent()}) == 2


def test_handler_that_emits_nothing(house: House) -> None:
    """Case 7."""
    house.sells(outputs=0)
    assert [house.deliver(), house.deliver()] == [Outcome.HANDLED, Outcome.SKIPPED]
    assert house.sales() == 1


def test_no_id_and_no_policy_for_it(house: House) -> None:
    """Case 8: an error and a dead letter; nothing is invented."""
    house.sells()
    with pytest.raises(MissingId, match="message_id"):
        house.deliver(Message(body=b"{}", type=SELL))
    outcome, settlement = house.handle(Message(body=b"{}", type=SELL))
    assert (outcome, settlement.reason) == (Outcome.PARKED, "MissingId")  # type: ignore[union-attr]
    assert house.sales() == 0


@pytest.mark.parametrize(
    ("key", "properties"),
    [(Key.header("x-id"), {"headers": {"x-id": "original"}}), (Key.field("sku"), {}), (Key.digest(), {})],
    ids=["header", "body", "digest"],
)
def test_broker_gives_a_new_transport_id(house: House, key: Key, properties: dict[str, Any]) -> None:
    """Case 9."""
    house.sells(key=key)
    outcomes = [house.deliver(sale(f"transport-{number}", **properties)) for number in range(2)]
    assert outcomes == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert house.sales() == 1


def test_other_payload_under_the_same_id(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Case 10: nothing executed, dead letter."""
    house.sells()
    house.deliver(sale(body={"a": 1, "b": [1, 2]}))
    sent = house.sent()
    with pytest.raises(PayloadConflict, match="sale-1"):
        house.deliver(sale(body={"a": 2, "b": [1, 2]}))
    assert (house.sales(), house.sent()) == (1, sent)
    outcome, settlement = house.handle(sale(body={"a": 2}))
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.headers["idemp-dead-reason"] == "PayloadConflict"


@pytest.mark.parametrize("batch", [1, 10])
def test_spelling_is_no_other_payload(house: House, batch: int) -> None:
    """Numbers and UUIDs that producers write in several ways, in keys, too."""

    class Sell(BaseModel):
        id: UUID
        amount: float

    house.app.handler(Sell, type=SELL, policy=Idempotent(key="id", batch=batch))(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    text = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    assert house.deliver(sale(body={"id": text, "amount": 1})) is Outcome.HANDLED
    for spelling in (text.upper(), f"{{{text}}}", text.replace("-", ""), f"urn:uuid:{text}"):
        assert house.deliver(sale(body={"id": spelling, "amount": 1.0})) is Outcome.SKIPPED
    with pytest.raises(PayloadConflict):
        house.deliver(sale(body={"id": text, "amount": 1.5}))
    assert house.sales() == 1


def test_layout_is_no_other_payload(house: House) -> None:
    """Case 10: key order and white space do not make a conflict."""
    house.sells()
    house.deliver(sale(body=b'{"a": 1, "b": [1, 2]}'))
    assert house.deliver(sale(body=b'{"b":[1,2],\n "a":1}')) is Outcome.REDISPATCHED


def test_conflict_by_policy_redispatches_the_first(house: House) -> None:
    house.sells(on_conflict="redispatch")
    house.deliver(sale(body={"a": 1}))
    first = house.sent()
    assert house.deliver(sale(body={"a": 2})) is Outcome.REDISPATCHED
    assert house.sent() == first * 2
    assert house.sales() == 1


def test_two_ids_of_one_digest_are_no_duplicates_whatever_the_policy(house: House) -> None:
    """Nothing was handled under the second one: its message is parked, even where conflicts are redispatched."""
    house.sells(on_conflict="redispatch", late="handle")
    first = "0192c8a4-7d3e-7000-8000-000000000001"
    attributes = {"specversion": "1.0", "id": first, "source": "//till", "type": SELL}
    house.deliver(sale(first, headers={f"cloudEvents_{name}": value for name, value in attributes.items()}))
    same_digest = str(effective_id("envelope", ("//till", first)).key)
    with pytest.raises(PayloadConflict, match="digest"):
        house.deliver(sale(same_digest))
    assert house.sales() == 1


def test_fingerprint_of_some_fields(house: House) -> None:
    house.sells(fingerprint={"except": ["sent_at"]})
    house.deliver(sale(body={"a": 1, "sent_at": 1}))
    assert house.deliver(sale(body={"a": 1, "sent_at": 2})) is Outcome.REDISPATCHED
    with pytest.raises(PayloadConflict):
        house.deliver(sale(body={"a": 2, "sent_at": 1}))


@pytest.mark.parametrize("fault", [TransientStoreError("busy"), StoreUnavailable("down")])
def test_failed_insert_is_not_remembered(house: House, fault: StoreError) -> None:
    """Case 12: the database was down, then it is back and the message redelivered: processed."""
    house.sells()
    house.script.store_faults = [fault] * 6
    with pytest.raises(type(fault)):
        house.deliver()
    assert house.deliver() is Outcome.HANDLED
    assert house.sales() == 1


def test_type_without_a_handler_leaves_no_row(house: House) -> None:
    """Case 14."""
    house.sells()
    with pytest.raises(UnknownMessageType, match="Did you mean"):
        house.deliver(sale(type="shop.Sel"))
    assert "begin" not in house.script.calls


def test_purged_meanwhile_is_no_duplicate(tmp_path: Path) -> None:
    """Case 16c: a trigger stands for whatever swallows an INSERT: claimed again, bounded, then an error."""
    from tests.house import sql_house

    with sql_house(f"sqlite:///{tmp_path}/shop.db") as house:
        house.sells()
        store = house.store.inner
        assert isinstance(store, SqlStore)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER swallow BEFORE INSERT ON idemp_inbox BEGIN SELECT RAISE(IGNORE); END"
            )
        with pytest.raises(StoreError, match="neither accepted nor found"):
            house.deliver()
        assert house.sales() == 0
        with store.engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER swallow")
        assert house.deliver() is Outcome.HANDLED


def test_late_claim_fails_on_its_own_earlier_effect(house: House) -> None:
    """Case 16d: "out of stock", because it took the last piece itself: a duplicate, no failure."""

    sold: list[str | None] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        if sold:
            raise ValueError("out of stock")
        sold.append(ctx.message_id)
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        ctx.send({}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(claim="late"))(sell)
    assert [house.deliver(), house.deliver()] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    with pytest.raises(ValueError, match="out of stock"):
        house.deliver(sale("sale-2"))
    assert house.sales() == 1


def test_two_types_with_equal_body_keys(house: House) -> None:
    """Case 25b: one consumer, both handled."""
    for name in ("shop.Place", "shop.Cancel"):
        house.app.handler(dict, type=name, policy=Idempotent(key="order_id"))(
            lambda message, ctx: house.effects.write(ctx, "sale")
        )
    for name in ("shop.Place", "shop.Cancel"):
        assert house.deliver(sale("m", {"order_id": 1}, type=name)) is Outcome.HANDLED
    assert house.deliver(sale("n", {"order_id": 1}, type="shop.Place")) is Outcome.SKIPPED
    assert house.sales() == 2


def test_aliases_share_the_scope(house: House) -> None:
    house.app.handler(dict, type="shop.Place", aliases=["shop.OldPlace"], policy=Idempotent(key="id"))(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    assert house.deliver(sale("1", {"id": 1}, type="shop.OldPlace")) is Outcome.HANDLED
    assert house.deliver(sale("2", {"id": 1}, type="shop.Place")) is Outcome.SKIPPED


def test_not_opted_in_runs_each_time_and_leaves_no_row(house: House) -> None:
    house.app.handler(dict, type=SELL, policy=Policy())(lambda message, ctx: house.effects.write(ctx, "sale"))
    assert [house.handle(), house.handle()] == [(Outcome.HANDLED, Ack())] * 2
    assert house.sales() == 2
    assert "claim" not in house.script.calls
