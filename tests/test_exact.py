"""JSON numbers that a float can't hold: two messages stay two, from the body's bytes to the handler and the outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import combinations
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from idemp import Context, Idempotent, Key, Message, Outcome
from idemp.bulk import Bulk, Came, Row
from idemp.cloudevents import unwrap
from idemp.codecs import Codec
from idemp.errors import OutputError, PayloadConflict, UndecodableMessage
from idemp.exact import read_number
from idemp.fingerprint import Fingerprint, fingerprints_conflict
from idemp.messages import canonical_json, parse_canonically, parse_json
from tests.house import House, memory_house, sale

PAY = "shop.Pay"
ALIKE = [
    ("0.1234567890123456789", "0.1234567890123456788"),
    ("100000000000000000.25", "100000000000000000.75"),
    ("100000000000000000.25", "100000000000000000"),
    ("100000000000000000000.1", "100000000000000000000.2"),
    ("0.1", "0.1000000000000000000000001"),
    ("1e23", "99999999999999991611392"),
    ("1e300", "1.0000000000000000000001e300"),
]
"""Numbers that are two, and one float."""
ONE = [
    ("1", "1.0", "1e0", "10e-1", "1.000000000000000000000"),
    ("0.1234567890123456789", "0.12345678901234567890", "1234567890123456789e-19", "12.34567890123456789E-2"),
    ("100000000000000000001", "100000000000000000001.0", "1.00000000000000000001e20"),
    ("0", "0.0", "-0.0", "0e9", "0e-99999999999999999999"),
]
"""Spellings of one number."""
BEYOND = ("1e400", "-1e400", "1e-400", "1e-999999999", "-0.1e-99999999999999999999", "NaN", "Infinity")


class Pay(BaseModel):
    __message_type__ = PAY

    amount: Decimal


@dataclass
class Payment:
    amount: Decimal
    at: datetime | None = None


def pay(id_: str, amount: str, name: str = "amount") -> Message:
    return sale(id_, f'{{"{name}": {amount}}}'.encode(), type=PAY)


@pytest.fixture
def house() -> House:
    return memory_house()


# Identities


@pytest.mark.parametrize(("one", "other"), ALIKE)
@pytest.mark.parametrize("key", ["amount", "digest()"])
def test_two_numbers_are_two_messages(house: House, key: str, one: str, other: str) -> None:
    given_: list[Decimal] = []
    house.app.handler(Pay, policy=Idempotent(key=key))(lambda message, ctx: given_.append(message.amount))
    assert [house.deliver(pay(str(n), text)) for n, text in enumerate((one, other))] == [Outcome.HANDLED] * 2
    assert given_ == [Decimal(one), Decimal(other)]
    assert [house.deliver(pay(str(n), text)) for n, text in enumerate((one, other))] == [Outcome.SKIPPED] * 2


@pytest.mark.parametrize(("one", "other"), ALIKE)
@pytest.mark.parametrize("cls", [Pay, dict, Payment])
def test_another_number_under_an_id_is_a_conflict(house: House, cls: type[Any], one: str, other: str) -> None:
    house.app.handler(cls, type=PAY, policy=Idempotent())(lambda message: None)
    for first, second in ((one, other), (other, one)):
        assert house.deliver(pay(first, first)) is Outcome.HANDLED
        with pytest.raises(PayloadConflict):
            house.deliver(pay(first, second))


@pytest.mark.parametrize("spellings", ONE)
def test_spellings_of_a_number_are_one(house: House, spellings: tuple[str, ...]) -> None:
    house.app.handler(Pay, policy=Idempotent(key="amount"))(lambda message: None)
    came = [house.deliver(pay(str(number), text)) for number, text in enumerate(spellings)]
    assert came == [Outcome.HANDLED, *[Outcome.SKIPPED] * (len(spellings) - 1)]
    prints = [Fingerprint().of(*parse_canonically(pay("1", text))) for text in spellings]
    assert not any(fingerprints_conflict(one, other) for one, other in combinations(prints, 2))


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_rows_have_the_ids_of_deliveries(house: House, one: str, other: str) -> None:
    house.app.handler(Pay, policy=Idempotent(key="amount"))(lambda message: None)
    house.deliver(pay("online", one))
    rows = [Row(id=text, type=PAY, body=f'{{"amount": {text}}}'.encode()) for text in (one, other)]
    report = Bulk(house.app).run(rows)
    assert (report.counts[Came.DUPLICATE], report.counts[Came.NEW]) == (1, 1)


def test_earlier_releases_rounded() -> None:
    """What they stored of ordinary numbers is compared as before."""
    plain = Fingerprint().of(*parse_canonically(pay("1", "19.99")))
    assert plain == bytes.fromhex("028e3b") + plain[3:]
    assert Fingerprint().of(*parse_canonically(pay("1", "0.1234567890123456789")))[:1] == b"\x03"  # type: ignore[index]


def test_data_of_an_event_keeps_its_digits() -> None:
    digits = "0.1234567890123456789"
    attributes = '"specversion": "1.0", "id": "1", "source": "/till", "type": "shop.Pay"'
    body = f'{{{attributes}, "rate": {digits}, "data": {{"amount": {digits}}}}}'.encode()
    event = unwrap(Message(body=body, content_type="application/cloudevents+json"))
    assert parse_json(event) == {"amount": Decimal(digits)}
    assert json.dumps(dict(event.headers))  # numbers in headers are what brokers carry


def test_structured_events_go_out_with_all_digits() -> None:
    house = memory_house(wire="cloudevents-structured")
    house.app.handler(dict, type=PAY, policy=Idempotent())(
        lambda message, ctx: [ctx.send({"paid": message["amount"]}, to="stock", type="shop.Paid")][1:]
    )
    house.deliver(pay("1", "100000000000000000.25"))
    (sent,) = house.publisher.sent
    assert parse_json(unwrap(sent.message)) == {"paid": Decimal("100000000000000000.25")}


# Numbers


@pytest.mark.parametrize("text", BEYOND)
def test_numbers_beyond_a_float_are_refused(text: str) -> None:
    with pytest.raises(UndecodableMessage, match=r"number|compliant"):
        parse_json(pay("1", text))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_stays_one(value: float) -> None:
    for text in (repr(value), f"{value!r}".upper()):
        if "." in text or "E" in text.upper():
            assert (read_number(text), type(read_number(text))) == (value, float)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40, places=25))
def test_no_digit_is_lost(value: Decimal) -> None:
    text = f"{value:f}"
    found = read_number(text if "." in text else f"{text}.0")
    assert Decimal(repr(found) if isinstance(found, float) else found) == value
    again = parse_json(Message(body=canonical_json(found)))
    assert (again, type(again)) == (found, type(found))


# Classes


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    id: UUID
    at: datetime
    amount: Decimal
    rate: float


def test_a_strict_class_takes_them() -> None:
    body = {
        "id": str(UUID(int=7)),
        "at": "2026-01-01T00:00:00Z",
        "amount": Decimal("0.1234567890123456789"),
        "rate": 1.5,
    }
    found = Codec(Strict).decode(body)
    assert found == Strict(id=UUID(int=7), at=datetime(2026, 1, 1, tzinfo=UTC), amount=body["amount"], rate=1.5)
    with pytest.raises(UndecodableMessage, match="rate"):
        Codec(Strict).decode({**body, "rate": "1.5"})


def test_a_float_field_rounds_as_it_says() -> None:
    class Measured(BaseModel):
        value: float

    assert Codec(Measured).decode({"value": Decimal("0.10000000000000001")}).value == 0.1


def test_a_whole_number_is_not_rounded() -> None:
    class Count(BaseModel):
        number: int

    with pytest.raises(UndecodableMessage, match=r"more digits than a float holds.*number"):
        Codec(Count).decode({"number": Decimal("100000000000000000.25")})


def test_encoded_bytes_beside_such_a_number_are_refused() -> None:
    """Pydantic decodes them from JSON alone, and takes the number from Python alone."""

    class Signed(BaseModel):
        model_config = ConfigDict(val_json_bytes="base64")

        amount: Decimal
        signature: bytes

    assert Codec(Signed).decode({"amount": 1.5, "signature": "YQ=="}).signature == b"a"
    with pytest.raises(UndecodableMessage, match="base64"):
        Codec(Signed).decode({"amount": Decimal("0.1234567890123456789"), "signature": "YQ=="})


# Outputs


def test_a_dict_passes_numbers_on(house: House) -> None:
    def forward(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({**message, "list": [message["amount"]], "n": 1}, to="stock", type="shop.Paid")

    house.app.handler(dict, type=PAY, policy=Idempotent(key=Key.digest()))(forward)
    house.deliver(pay("1", "0.1234567890123456789"))
    ((_, body),) = house.sent()
    assert body == b'{"amount":0.1234567890123456789,"list":[0.1234567890123456789],"n":1}'


@pytest.mark.parametrize("value", [Decimal("NaN"), Decimal("Infinity"), [Decimal("sNaN")]])
def test_what_is_no_number_is_no_output(value: Any) -> None:
    from idemp.codecs import Types

    with pytest.raises(OutputError):
        Types().encode({"amount": value}, "shop.Paid")


def test_names_are_written_as_json_writes_them() -> None:
    value = {True: [Decimal("1.10"), (None,)], None: {"ä\n": Decimal("2E+3")}}
    assert Codec(dict).encode(value).decode() == '{"true":[1.10,[null]],"null":{"ä\\n":2E+3}}'
