"""What is refused when a handler or a policy is declared, and how a message reaches its handler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import AliasChoices, BaseModel, Field, field_validator

from idemp import (
    App,
    AsyncContext,
    ConfigurationError,
    Context,
    HandlerError,
    Idempotent,
    Key,
    Policy,
    Retry,
    Settings,
    Unreadable,
)
from idemp.handlers import Handler
from idemp.messages import Delivery


class Customer(BaseModel):
    id: UUID


class Size(Enum):
    SMALL = "small"


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    order_id: int = Field(alias="orderId")
    customer: Customer | None = None
    price: float = 0.0
    tags: list[str] = []
    size: Size = Size.SMALL
    due: datetime | None = None
    more: dict[str, Any] = {}
    other: int = Field(0, validation_alias=AliasChoices("other", "another"))

    @field_validator("order_id")
    @classmethod
    def check(cls, value: int) -> int:
        if value == 13:
            raise RuntimeError("validators may raise anything")
        return value


def handler(key: Any = "orderId", function: Callable[..., Any] = lambda message: None, **options: Any) -> Handler:
    return Handler("billing", Pay, function, Idempotent(key=key), **options)


@pytest.mark.parametrize(
    "key", ["orderId", "customer.id", "size", "due", "more.id", "another", ("orderId", "size"), Key.digest()]
)
def test_a_key_that_can_be_an_id_is_taken(key: Any) -> None:
    assert handler(key).opted_in


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("order_id", "is no field of Pay on the wire: it has"),
        ("customer", "is an object: name a field in it, such as 'customer.id'"),
        ("customer.name", "is no field of Customer"),
        ("price", "may be float"),
        ("tags", "may be list"),
        ("more", "may be dict"),
        (id, "is no key"),
        ("", "is no key"),
        ((), "is no key"),
        (lambda message: message.order_id, "is no key"),
    ],
)
def test_a_key_that_cannot_be_an_id_is_refused(key: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        handler(key)


async def takes_context(message: Pay, ctx: Context) -> None: ...


def takes_async_context(message: Pay, ctx: AsyncContext) -> None: ...


@pytest.mark.parametrize("function", [takes_context, takes_async_context, lambda: None, lambda a, b, c: None])
def test_a_function_that_cannot_be_a_handler_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError):
        handler(function=function)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attempts": 0}, "attempts=0"),
        ({"attempts": True}, "attempts=True"),
        ({"delays": ()}, "delays="),
        ({"delays": "1s"}, "delays='1s'"),
        ({"delays": 5}, "delays=5 has to be a list of durations"),
        ({"retry_on": OSError}, r"retry_on=<class 'OSError'> has to be a tuple of exceptions, such as \(OSError,\)"),
        ({"refuse_on": "OSError"}, "refuse_on='OSError' has to be a tuple of exceptions"),
        ({"delays": ("soon",)}, "'soon' is no duration"),
        ({"jitter": 2}, "jitter=2"),
        ({"retry_on": (OSError,), "refuse_on": (OSError,)}, "both name OSError"),
        ({"retry_on": (KeyboardInterrupt,)}, "no class of exceptions"),
    ],
)
def test_a_retry_of_no_use_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Retry(**options)


def test_the_nearest_base_class_decides_about_retries() -> None:
    retry = Retry(retry_on=(LookupError,), refuse_on=(KeyError,), delays=("10s",))
    assert [retry.retries(error) for error in (IndexError(), KeyError(), ValueError())] == [True, False, False]
    assert all(8 <= retry.pause(attempt) <= 12 for attempt in range(1, 50))
    assert Retry(delays=(timedelta(minutes=1), "2m"), jitter=0).pause(9) == 120.0


def test_a_message_is_decoded_and_identified() -> None:
    found = handler()
    body = b'{"orderId": 7, "price": 1.0}'
    message, claim = found.accept(Delivery("billing", {"timestamp": 1_700_000_000}, body))
    assert isinstance(message, Pay)
    assert message.order_id == 7
    assert claim is not None
    assert (claim.original, claim.made_at, claim.resends) == ("i:7", 1.7e9, "grace")
    again = found.accept(Delivery("billing", {}, b'{"price": 1, "orderId": 7}', redelivered=True))[1]
    assert again is not None
    assert (again.key, again.fingerprint, again.resends) == (claim.key, claim.fingerprint, "pending")


@pytest.mark.parametrize(
    ("properties", "body", "reason"),
    [
        ({"content_type": "application/x-python-serialize"}, b"\x80\x04.", "is no JSON"),
        ({"content_encoding": "gzip"}, b"{}", "compressed or in another encoding"),
        ({"headers": {"compression": "application/x-gzip"}}, b"{}", "compressed"),
        ({}, b'{"orderId": "secret"}', r"the body is no shop.Pay: orderId: Input should be a valid integer"),
        ({}, b'{"orderId": null}', "field 'orderId' is null, which is no usable id: text of 1 to 255 bytes"),
        ({}, b'{"orderId": 1.5}', "field 'orderId' is a fraction, which is no usable id"),
        ({}, b'{"order_id": 7, "a": 1}', "the message has no field 'orderId', which its key names: the body has a, order_id$"),
        ({}, b"{}", "has no field 'orderId', which its key names: the body has none"),
        ({}, b"[]", "has no field 'orderId', which its key names: the body is an array, no object"),
    ],
)
def test_what_cannot_be_read_says_why_and_shows_no_values(properties: dict[str, Any], body: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason) as caught:
        handler().accept(Delivery("billing", properties, body))
    assert "secret" not in str(caught.value)


def test_a_validator_may_raise_anything() -> None:
    with pytest.raises(RuntimeError):
        handler().accept(Delivery("billing", {}, b'{"orderId": 13}'))


def outputs(function: Callable[..., Any], **options: Any) -> list[tuple[str, str]]:
    context = Context("billing", {"reply_to": "shop"}, None, None)
    return [
        (output.kind, output.routing_key) for output in handler(function=function, **options).call([Pay(orderId=7)], [context])[0]
    ]


def generate(message: Pay) -> Iterator[Pay]:
    yield message
    yield message


def test_what_a_handler_returns_or_yields_is_emitted() -> None:
    assert outputs(lambda message: message) == [("publish", "shop.Pay")]
    assert outputs(lambda message: [message, message]) == outputs(generate) == [("publish", "shop.Pay")] * 2
    assert outputs(lambda message: None) == outputs(lambda message: []) == []
    assert outputs(lambda message, ctx: message, replies=True) == [("reply", "shop")]
    for wrong in (0, "", {}, False, {"a": 1}):
        with pytest.raises(HandlerError, match="returns or yields pydantic models"):
            outputs(Returns(wrong))
    with pytest.raises(HandlerError, match="returned an awaitable"):
        outputs(lambda message: Awaitable())


class Returns:
    __qualname__ = "returns"

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, message: Pay) -> Any:
        return self.value


class Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


def test_an_app_refuses_two_handlers_of_a_type_and_leaves_functions_alone() -> None:
    app = App("billing", policy=Policy())

    @app.handler(Pay)
    def pay(message: Pay) -> int:
        return message.order_id

    assert pay(Pay(orderId=7)) == 7
    with pytest.raises(ConfigurationError, match="'shop.Pay' have two handlers"):
        app.handler(Pay)(pay)
    app.handler(Pay, type="shop.Other")(pay)
    assert sorted(app.handlers) == ["shop.Other", "shop.Pay"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("IDEMP_DATABSE_URL", "x", "IDEMP_DATABSE_URL is no setting: did you mean IDEMP_DATABASE_URL?"),
        ("IDEMP_LEASE", "5 parsecs", "lease .*is no duration"),
        ("IDEMP_GROUP", "0", "group .*greater than or equal to 1"),
        ("IDEMP_TABLE_PREFIX", "x; DROP", "table_prefix"),
        ("IDEMP_PUBLISH_TIMEOUT", "20s", "publish_timeout"),
    ],
)
def test_a_setting_of_no_use_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        Settings()
    assert value not in str(caught.value) or value in ("0", "x", "5 parsecs")


def test_arguments_come_before_the_environment_and_services_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDEMP_SERVICE_HOST", "IDEMP_SERVICE_PORT_HTTP", "IDEMP_PORT", "IDEMP_PORT_5432_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    monkeypatch.setenv("IDEMP_LEASE", "2m")
    assert (Settings().lease, Settings(lease=5).lease) == (120.0, 5.0)


def test_what_is_a_handler_of_lists() -> None:
    pays = list[Pay]

    def plain(message: Pay) -> None: ...
    def builtin(messages: list[Pay], contexts: list[Context]) -> None: ...
    def alias(messages: pays) -> None: ...
    def sequence(messages: Sequence[Pay]) -> None: ...
    def annotated(messages: Annotated[list[Pay], "fresh"]) -> None: ...
    def unknown(messages: list[Unknown]) -> None: ...  # noqa: F821
    def wrong(messages: tuple[Pay, ...]) -> None: ...

    for function in (plain, builtin, sequence, unknown):
        assert Handler("shop", Pay, function, Policy()).takes_list is (function is not plain)
    for function in (alias, annotated):  # names of a function cannot be looked up
        function.__annotations__["messages"] = list[Pay]
        assert Handler("shop", Pay, function, Policy()).takes_list
    with pytest.raises(ConfigurationError, match=r"takes tuple.*list\[Model\]"):
        Handler("shop", Pay, wrong, Policy())
