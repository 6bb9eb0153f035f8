"""Reading and writing messages strictly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import time_machine
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from idemp import App, ConfigurationError, Context, HandlerError, Inbox, Settings, Unreadable
from idemp.context import BaseContext
from idemp.errors import UnusableOutput, describe_error, describe_trace
from idemp.identity import made_at
from idemp.messages import MAX_BODY_BYTES, encode, parse, type_name


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "has the key 'b' twice"),
        (b"NaN", "NaN is not JSON"),
        (b"[1, -Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "more digits than a float keeps"),
        (b"[0.12345678901234567890]", "more digits than a float keeps"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b"\xff\xfe", "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (b"1" * 5_000, "digits"),
        (b"\x1f\x8b\x08", "can't decode byte"),
        (b" " * (MAX_BODY_BYTES + 1), "at most 16,777,216 are read"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_what_is_no_json_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        parse(body)


def test_numbers_are_equal_however_they_are_written() -> None:
    assert parse(b"[1.0, 1e3, 0.1, 1.50, -0.0]") == [1, 1000, 0.1, 1.5, 0]
    assert all(type(value) is int for value in parse(b"[1.0, 1e3, -0.0]"))


class Price(BaseModel):
    value: float | None = None
    more: dict[Any, Any] = {}


@pytest.mark.parametrize(
    "message", [{"a": float("nan")}, {1: 1, "1": 2}, {"a": object()}, {"a": "\ud800"}, Price(value=float("inf")), Price(more={1: 1, "1": 2}), Price(more={"deep": [float("nan")]})]
)  # fmt: skip
def test_what_could_not_be_read_back_is_refused(message: Any) -> None:
    with pytest.raises(UnusableOutput):
        encode(message)


def test_none_is_written_as_null() -> None:
    assert encode(Price()) == b'{"value":null,"more":{}}'


def test_a_type_has_a_name_that_does_not_depend_on_the_start() -> None:
    assert type_name(Price) == "tests.Price"
    assert type_name(type("Named", (), {"__message_type__": "shop.Pay"})) == "shop.Pay"
    with pytest.raises(ConfigurationError, match="__message_type__ = 'shop.Script'"):
        type_name(type("Script", (), {"__module__": "__main__"}))
    with pytest.raises(ConfigurationError, match="__message_type__ has to be text"):
        type_name(type("Blank", (), {"__message_type__": " "}))


def context(**properties: Any) -> Context:
    return Context("billing", properties, None, None)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda ctx: ctx.send({}, to="stock"), "has no type"),
        (lambda ctx: ctx.send({}, to="", type="shop.Pay"), "to has to be text"),
        (lambda ctx: ctx.send({}, to="x" * 256, type="shop.Pay"), "to has to be text of 1 to 255 bytes"),
        (lambda ctx: ctx.send({}, to="stock", type="a\0b"), "type has to be text"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", headers={"x": {1, 2}}), "headers cannot be sent"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", headers={"x": (1, 2)}), "headers would come back changed"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", headers={"x": float("nan")}), "headers cannot be sent"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", headers={"x": "\ud800"}), "headers cannot be sent"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", delay=-1), "not a duration"),
        (lambda ctx: ctx.send({}, to="stock", type="shop.Pay", delay=float("inf")), "not a duration"),
        (lambda ctx: ctx.reply({}, type="shop.Pay"), "no reply_to"),
        (lambda ctx: ctx.publish({}, type="shop.Pay", mandatory="true,NULL);COMMIT;--"), "has to be true or false"),
    ],
)
def test_an_output_that_could_not_be_sent_is_refused_at_once(emit: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        emit(context())


def test_outputs_carry_correlation_and_cause_and_no_control_headers_of_others() -> None:
    ctx = context(
        message_id="7", correlation_id="c", headers={"idemp-causation-id": "old", "idemp-attempt": 9, "x": 1}, reply_to="shop"
    )
    ctx.send({"a": 1}, to="stock", type="shop.Pay", headers=ctx.headers)
    ctx.reply({"a": 1}, type="shop.Pay")
    first, reply = ctx.outputs()
    assert first.properties["headers"] == {"x": 1, "idemp-causation-id": "7", "idemp-fingerprint": "none"}
    assert (first.properties["correlation_id"], first.properties["message_id"]) == ("c", first.id)
    assert (reply.routing_key, reply.exchange, reply.kind) == ("shop", "", "reply")
    with pytest.raises(UnusableOutput):
        context(reply_to="\ufffd").reply({}, type="shop.Pay")
    with pytest.raises(HandlerError, match="would never be stored"):
        ctx.send({}, to="stock", type="shop.Pay")


def test_a_delayed_message_is_dated_by_the_time_at_which_it_is_due() -> None:
    ctx = context(message_id="7")
    ctx.send({}, to="stock", type="shop.Pay")
    ctx.send({}, to="stock", type="shop.Pay", delay="30d")
    now, later = (output.properties["timestamp"] for output in ctx.outputs())
    assert 0 <= later - now - 30 * 86_400 < 60


def test_a_delayed_message_of_a_type_that_is_not_opted_in_is_no_older_by_its_id() -> None:
    ctx = BaseContext("billing", {"message_id": "7"}, None, None)
    ctx.send({}, to="stock", type="shop.Pay", delay="30d")
    (output,) = ctx.outputs()
    with time_machine.travel(output.properties["timestamp"] + 60):
        assert made_at(output.properties) == pytest.approx(output.properties["timestamp"], abs=0.01)


class Boxed(BaseModel):
    __message_type__ = "shop.Boxed"
    __cloudevent__ = "structured"
    text: str


def test_what_a_broker_could_not_take_is_refused_before_it_is_stored() -> None:
    for headers in ({"x": "y" * 9_000}, {"x": ":" * 4_500}, {"x": "\u00fc" * 2_000}, {f"x{number}": 1 for number in range(900)}):
        with pytest.raises(
            UnusableOutput, match=r"the properties have .* at most 9,000 are sent: put long headers into the body"
        ):
            context().send({}, to="stock", type="shop.Pay", headers=headers)
    ctx = context(headers={"tracestate": "x" * 200_000, "traceparent": "00-1"}, correlation_id="c" * 300, message_id="m" * 300)
    ctx.send({}, to="stock", type="shop.Pay", headers={"x": "y" * 7_000})
    (output,) = ctx.outputs()
    assert output.properties["headers"] == {"traceparent": "00-1", "x": "y" * 7_000, "idemp-fingerprint": "none"}
    assert output.properties["correlation_id"] == output.id
    for received in ({"tracestate": ":" * 512}, {"tracestate": "\x01" * 512, "traceparent": "\x01" * 512}):
        ctx = context(headers=received)
        ctx.send({}, to="stock", type="shop.Pay", headers={"x": "y" * 8_000})  # no message of a stranger makes it fail
        assert "tracestate" not in ctx.outputs()[0].properties["headers"]
    for headers in ({"x": {"y" * 256: 1}}, {"x": [2**63]}, {"x": {"y": -(2**63) - 1}}):
        with pytest.raises(UnusableOutput):
            context().send({}, to="stock", type="shop.Pay", headers=headers)
    ctx = context()
    ctx.send(Boxed(text="x" * (16 * 1024 * 1024 - 20)), to="stock")
    with pytest.raises(UnusableOutput, match=r"the event has .* at most 16,777,216 are read"):
        ctx.outputs()


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_an_integer_that_no_broker_takes_is_refused_on_each_path(number: int, url: str) -> None:
    """Headers reach a broker from a handler, an initiation, a claim, and as those of the message that is handled."""
    app, headers = App("shop", settings=Settings(database_url=url)), {"x": [{"y": number}]}
    received = context(headers={"x": number}, reply_to="shop")
    paths: list[Callable[[], object]] = [
        lambda: received.send({}, to="stock", type="shop.Pay", headers=received.headers),
        lambda: received.publish({}, type="shop.Pay", headers=headers),
        lambda: received.reply({}, type="shop.Pay", headers=headers),
    ]

    def initiate() -> None:
        with app.initiate() as unit:
            unit.send({}, to="stock", type="shop.Pay", headers=headers)

    def claim() -> None:
        with (
            Session(engine) as session,
            Inbox(engine).claim(session, b"{}", consumer="a", type="b", properties={"message_id": "7"}) as unit,
        ):
            unit.send({}, to="stock", type="shop.Pay", headers=headers)

    engine = create_engine(url)
    for emit in (*paths, initiate, claim):
        with pytest.raises(UnusableOutput, match="^headers cannot be sent: an integer has more than 64 bits; send it as text"):
            emit()
    received.send({}, to="stock", type="shop.Pay", headers={"x": [2**63 - 1, -(2**63)]})
    app.close()
    engine.dispose()


def test_errors_are_described_whatever_they_are() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert describe_error(Hostile()) == "Hostile: (its text cannot be read)"
    assert describe_error(ValueError("\ud800\0")) == "ValueError: \\ud800\\x00"
    assert describe_error(ValueError("a\nERROR forged\r\nb")) == "ValueError: a ERROR forged b"
    assert len(describe_error(ValueError("x" * 10_000))) == 2_000
    try:
        raise KeyError("x")
    except KeyError as error:
        assert "test_messages.py" in describe_trace(error)
