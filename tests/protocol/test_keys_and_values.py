"""Cases 44 to 46: what may be a key, and values that others take for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from idemp import Context, Idempotent, Key, Outcome
from idemp.errors import InvalidId, MissingId, PayloadConflict
from idemp.messages import CLOUDEVENT_SOURCE_HEADER
from tests.house import House, sale

TYPED = "shop.Typed"


class Inner(BaseModel):
    number: int


class Typed(BaseModel):
    __message_type__ = TYPED

    id: UUID = UUID(int=1)
    number: int = 0
    day: date = date(2026, 1, 1)
    moment: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    price: Decimal = Decimal(0)
    name: str | None = "n"
    inner: Inner = Inner(number=0)


def bodies(house: House, key: Any, first: dict[str, Any], second: dict[str, Any]) -> list[Outcome]:
    house.app.handler(Typed, policy=Idempotent(key=key, fingerprint="off"))(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    return [house.deliver(sale("1", first, type=TYPED)), house.deliver(sale("2", second, type=TYPED))]


@pytest.mark.parametrize(
    ("key", "first", "same", "other"),
    [
        ("id", {"id": str(UUID(int=7))}, {"id": str(UUID(int=7))}, {"id": str(UUID(int=8))}),
        ("number", {"number": 0}, {}, {"number": 1}),
        ("day", {"day": "2026-02-01"}, {"day": "2026-02-01"}, {"day": "2026-02-02"}),
        ("moment", {"moment": "2026-02-01T00:00:00Z"}, {"moment": "2026-02-01T00:00:00+00:00"}, {}),
        ("price", {"price": "1.50"}, {"price": 1.5}, {"price": "1.51"}),
        ("inner.number", {"inner": {"number": 3}}, {"inner": {"number": 3}}, {"inner": {"number": 4}}),
        (["name", "number"], {"name": "a"}, {"name": "a"}, {"name": "a", "number": 1}),
        (lambda typed: typed.name.upper(), {"name": "a"}, {"name": "A"}, {"name": "b"}),
        (lambda typed: (typed.name, typed.number), {"name": "a"}, {"name": "a"}, {"name": "b"}),
    ],
)  # fmt: skip
def test_keys_of_every_kind(house: House, key: Any, first: Any, same: Any, other: Any) -> None:
    """Case 45."""
    assert bodies(house, key, first, same) == [Outcome.HANDLED, Outcome.SKIPPED]
    assert house.deliver(sale("3", other, type=TYPED)) is Outcome.HANDLED
    assert house.sales() == 2


@pytest.mark.parametrize(("key", "body"), [("name", {"name": None}), (["number", "name"], {"name": None})])
def test_missing_key(house: House, key: Any, body: dict[str, Any]) -> None:
    with pytest.raises(MissingId):
        bodies(house, key, body, body)
    assert house.sales() == 0


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, " ", "", "x" * 300])
def test_values_that_cannot_be_keys(house: House, value: Any) -> None:
    house.app.handler(dict, type=TYPED, policy=Idempotent(key="id"))(lambda message: None)
    with pytest.raises(InvalidId):
        house.deliver(sale("1", {"id": value}, type=TYPED))


@pytest.mark.parametrize(("first", "second"), [(1, "1"), (0, False), (1, True), ("a", "A"), ("\u00e9", "e\u0301")])
def test_values_that_stay_apart(house: House, first: Any, second: Any) -> None:
    house.app.handler(dict, type=TYPED, policy=Idempotent(key="id"))(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    outcomes = [house.deliver(sale("m", {"id": value}, type=TYPED)) for value in (first, second, first)]
    assert outcomes == [Outcome.HANDLED, Outcome.HANDLED, Outcome.SKIPPED]


def test_key_is_taken_before_the_handler_changes_the_message(house: House) -> None:
    def change(message: Typed, ctx: Context) -> None:
        message.number = 99
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]

    house.app.handler(Typed, policy=Idempotent(key="number"))(change)
    assert [house.deliver(sale("m", {"number": 1}, type=TYPED)) for _ in range(2)] == [
        Outcome.HANDLED,
        Outcome.SKIPPED,
    ]
    assert house.deliver(sale("m", {"number": 99}, type=TYPED)) is Outcome.HANDLED


def test_message_id_of_a_cloudevent_counts_with_its_source(house: House) -> None:
    house.sells(outputs=0)
    for source in ("/a", "/b"):
        headers = {"cloudEvents_id": "1", "cloudEvents_source": source, "cloudEvents_specversion": "1.0"}
        headers |= {"cloudEvents_type": "shop.Sell"}
        outcomes = [house.deliver(sale("transport", headers=headers)) for _ in range(2)]
        assert outcomes == [Outcome.HANDLED, Outcome.SKIPPED]
    assert house.sales() == 2
    assert CLOUDEVENT_SOURCE_HEADER in headers


def test_cloudevent_key_is_required(house: House) -> None:
    house.sells(key=Key.cloudevent())
    with pytest.raises(MissingId, match="cloudevent"):
        house.deliver()


@dataclass
class Falsy:
    __message_type__ = "shop.Falsy"

    number: int = 0
    text: str = ""
    flag: bool = False
    nothing: None = None


@pytest.mark.parametrize("value", [{}, {"a": 0}, {"a": ""}, {"a": []}, {"a": {}}, {"a": None}, {"a": False}, Falsy()])
def test_falsy_values_replay_as_themselves(house: House, value: Any) -> None:
    """Case 44."""
    house.app.handler(dict, type=TYPED, policy=Idempotent())(
        lambda message, ctx: ctx.send(value, to="stock", type="stock.Falsy", headers={"zero": 0, "no": False}) and None
    )
    assert [house.deliver(sale(type=TYPED)) for _ in range(2)] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    first, second = house.publisher.sent
    assert first.message.body == second.message.body
    assert first.marked_redispatched() == second


@pytest.mark.parametrize("value", [None, [], (), iter(())])
def test_nothing_returned_is_nothing_sent(house: House, value: Any) -> None:
    house.app.handler(dict, type=TYPED, policy=Idempotent())(lambda message: value)
    assert [house.deliver(sale(type=TYPED)) for _ in range(2)] == [Outcome.HANDLED, Outcome.SKIPPED]


def test_null_and_absent_are_not_the_same_payload(house: House) -> None:
    house.sells(outputs=0)
    house.deliver(sale(body={"a": None}))
    with pytest.raises(PayloadConflict):
        house.deliver(sale(body={}))


@pytest.mark.parametrize("size", [0, 1024 * 1024, 8 * 1024 * 1024 - 10])
def test_bodies_up_to_the_limit(house: House, size: int) -> None:
    """Case 46."""
    house.sells(outputs=0)
    body = b'{"a":"' + b"x" * size + b'"}'
    assert [house.deliver(sale(body=body)) for _ in range(2)] == [Outcome.HANDLED, Outcome.SKIPPED]


def test_deep_but_not_too_deep(house: House) -> None:
    house.sells(outputs=1)
    assert house.deliver(sale(body=b'{"a":' * 200 + b"1" + b"}" * 200)) is Outcome.HANDLED
