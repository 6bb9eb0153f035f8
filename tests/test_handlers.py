"""What is refused when a handler or a policy is declared, and how a message reaches its handler."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any, Generic, NoReturn, Protocol, TypeVar
from uuid import UUID

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict

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
from idemp.cloudevents import read_event
from idemp.context import BaseContext
from idemp.handlers import AnyMessage, Handler, function_name
from idemp.messages import Delivery

T = TypeVar("T")
Named = TypeVar("Named", bound=BaseModel)


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
        ("order_id", "is not a field of Pay on the wire: it has"),
        ("customer", "is an object: name a field in it, such as 'customer.id'"),
        ("customer.name", "is not a field of Customer"),
        ("price", "may be float"),
        ("tags", "may be list"),
        ("more", "may be dict"),
        (id, "is not a key"),
        ("", "is not a key"),
        ((), "is not a key"),
        (lambda message: message.order_id, "is not a key"),
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
        ({"delays": ("soon",)}, "'soon' is not a duration"),
        ({"jitter": 2}, "jitter=2"),
        ({"retry_on": (OSError,), "refuse_on": (OSError,)}, "both name OSError"),
        ({"retry_on": (KeyboardInterrupt,)}, "is not an exception class"),
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
    assert (claim.original, claim.made_at, claim.resends) == ("i:7", 1.7e9, "due")
    again = found.accept(Delivery("billing", {}, b'{"price": 1, "orderId": 7}', redelivered=True))[1]
    assert again is not None
    assert (again.key, again.fingerprint, again.resends) == (claim.key, claim.fingerprint, "pending")


@pytest.mark.parametrize(
    ("content", "encoding", "body"),
    [
        (None, "UTF-8", b""),
        ("", "UTF8", b""),
        ("Application/JSON", "Utf-8", b""),
        ("application/vnd.api+json; charset=utf-8", None, b""),
        ("APPLICATION/VND.API+JSON", "US-ASCII", b""),
        ("text/json; charset=utf-8", "identity", b""),
        ('application/json;charset="UTF-8"; version=1', None, b"\xef\xbb\xbf"),
        (" application/json ; Charset = us-ascii", None, b""),
        ("application/cloudevents; charset=UTF-8", None, None),
        ("application/CloudEvents+JSON; charset=UTF-8", "UTF-8", b"\xef\xbb\xbf"),
    ],
)
def test_media_types_and_encodings_have_no_case(content: str | None, encoding: str | None, body: bytes | None) -> None:
    document = '{"orderId": 7, "a": "\u00fc"}'
    event = f'{{"specversion": "1.0", "id": "1", "source": "/a", "type": "shop.Pay", "data": {document}}}'
    text = event if content and "loud" in content else document
    delivery = Delivery("billing", {"content_type": content, "content_encoding": encoding}, (body or b"") + text.encode())
    if body is None:  # neither an event in JSON nor JSON
        with pytest.raises(Unreadable, match="is not a CloudEvent in JSON"):
            read_event(delivery)
        return
    message, claim = handler().accept(read_event(delivery))
    assert isinstance(message, Pay)
    assert claim is not None
    assert (message.order_id, claim.fingerprint) == (7, handler().accept(Delivery("", {}, document.encode()))[1].fingerprint)


def test_another_encoding_is_read_as_far_as_it_is_ascii() -> None:
    latin = {"content_type": "application/json; charset=ISO-8859-1"}
    assert handler().accept(Delivery("billing", latin, b'{"orderId": 7}'))[0] == Pay(orderId=7)
    with pytest.raises(Unreadable, match="in another encoding: send JSON text in UTF-8"):
        handler().accept(Delivery("billing", latin, '{"orderId": 7, "a": "\u00c3\u00bc"}'.encode()))


@pytest.mark.parametrize(
    ("properties", "body", "reason"),
    [
        ({"content_type": "application/x-python-serialize"}, b"\x80\x04.", "is not JSON"),
        ({"content_encoding": "gzip"}, b"{}", "compressed or in another encoding"),
        ({"headers": {"compression": "application/x-gzip"}}, b"{}", "compressed"),
        ({}, b'{"orderId": "secret"}', r"the body is not a valid shop.Pay: orderId: Input should be a valid integer"),
        ({}, b'{"orderId": null}', "field 'orderId' is null, which is not a usable id: text of 1 to 255 bytes"),
        ({}, b'{"orderId": 1.5}', "field 'orderId' is a fraction, which is not a usable id"),
        ({}, b'{"order_id": 7, "a": 1}', "the message has no field 'orderId', which its key names: the body has a, order_id$"),
        ({}, b"{}", "has no field 'orderId', which its key names: the body has none"),
        ({}, b"[]", "has no field 'orderId', which its key names: the body is an array, not an object"),
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
        outputs(lambda message: Awaited())


class Returns:
    __qualname__ = "returns"

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, message: Pay) -> Any:
        return self.value


class Awaited:
    def __await__(self) -> Iterator[None]:
        yield


def test_an_app_refuses_two_handlers_of_a_type_and_leaves_functions_alone() -> None:
    app = App("billing", policy=Policy())

    @app.handler(Pay)
    def pay(message: Pay) -> Pay:
        return message

    assert pay(Pay(orderId=7)).order_id == 7
    with pytest.raises(ConfigurationError, match="'shop.Pay' have two handlers"):
        app.handler(Pay)(pay)
    app.handler(Pay, type="shop.Other")(pay)
    assert sorted(app.handlers) == ["shop.Other", "shop.Pay"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("IDEMP_DATABSE_URL", "x", "IDEMP_DATABSE_URL is not a setting: did you mean IDEMP_DATABASE_URL?"),
        ("IDEMP_LEASE", "5 parsecs", "lease .*is not a duration"),
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


class Refund(Pay):
    __message_type__ = "shop.Refund"


class Wrapped(BaseModel, Generic[T]):
    data: T


class Marker: ...


class Marked(Marker, BaseModel): ...


class Payable(Protocol):
    order_id: int


@dataclass
class Row:
    id: int


class Typed(TypedDict):
    id: int


class Handles:
    def __call__(self, message: Pay) -> None: ...

    def method(self, message: Refund, ctx: Context) -> list[Pay]: ...

    async def stream(self, message: Refund) -> AsyncIterator[Pay]:
        yield message


def right() -> Iterator[Callable[..., Any]]:
    def base(message: Pay) -> Pay | None: ...
    def optional(message: Refund | None, ctx: Context | AsyncContext) -> tuple[Pay, ...]: ...
    def union(message: Pay | Row) -> Iterator[Pay]: ...
    def protocol(message: Payable) -> Payable: ...
    def local(message: Unknown, ctx: Context) -> Unknown: ...  # noqa: F821
    def anything(message: Any, ctx: Any) -> Any: ...
    def general(message: object, ctx: BaseContext) -> object: ...
    def generator(message: BaseModel) -> Generator[Pay | Refund, None, int]: ...
    def iterable(message: Pay) -> Iterable[Pay]: ...
    def marker(message: Pay) -> Marker: ...
    def variable(message: Named) -> Named: ...
    def with_default(message: Pay, times: int = 3) -> NoReturn: ...
    def keyword(message: Pay, *, times: int = 3) -> Wrapped[int]: ...
    def messages(messages: list[Pay], contexts: list[Context]) -> list[Pay | None]: ...
    def bound(times: int, message: Pay) -> None: ...
    async def coroutine(message: Pay, ctx: AsyncContext) -> list[Pay]: ...
    async def asynchronous(message: Pay) -> AsyncGenerator[Pay, None]:
        yield message

    @wraps(base)
    def decorated(*arguments: Any) -> Any: ...

    yield from (value for value in list(locals().values()) if value is not bound)
    yield from (partial(bound, 1), Handles(), Handles().method, Handles().stream, decorated, lambda message: message)


@pytest.mark.parametrize("function", list(right()), ids=function_name)
def test_a_function_whose_types_fit_is_taken(function: Callable[..., Any]) -> None:
    Handler("shop", Refund, function, Policy())


def wrong() -> Iterator[tuple[Callable[..., Any], str]]:
    def derived(message: Refund) -> None: ...
    def another(message: Customer) -> None: ...
    def neither(message: Row | None) -> None: ...
    def others(messages: list[Customer]) -> None: ...
    def text(message: str) -> None: ...
    def session(message: Pay, session: Row) -> None: ...
    def unknown_context(message: Customer, ctx: Unknown) -> None: ...  # noqa: F821
    def number(message: Pay) -> int: ...
    def maybe(message: Pay) -> Pay | bool: ...
    def row(message: Pay) -> Row: ...
    def table(message: Pay) -> dict[str, Pay]: ...
    def numbers(message: Pay) -> Iterator[int]: ...
    def pair(message: Pay) -> tuple[Pay, str]: ...
    def nothing_inside(message: Pay) -> list[Pay | None]: ...
    def promised(message: Pay) -> Awaitable[None]: ...
    async def awaited(message: Pay) -> Annotated[str, "text"]: ...
    async def not_iterated(message: Pay) -> AsyncIterator[Pay]: ...
    async def yields(message: Pay) -> AsyncIterator[int]:
        yield 1

    class Called:
        def __call__(self, message: Pay) -> int: ...

    yield from [
        (derived, r"takes Refund, and is registered for Pay: name the class that it takes, as in @app.handler\(Refund\)"),
        (another, "takes Customer"), (neither, "takes .*Row.*, and is registered for Pay"), (others, "takes Customer"),
        (text, "takes <class 'str'>: a handler takes a message"), (partial(another), "takes Customer"),
        (session, "is a plain function, so its second parameter is its Context, not Row"), (unknown_context, "takes Customer"),
        (number, r"may return int, which cannot be published: return or yield pydantic models, or use ctx.publish\(…, type=…\)"),
        (maybe, "may return bool"), (row, "may return Row"), (table, r"may return dict\[str"), (numbers, "may return int"),
        (pair, "may return str"), (nothing_inside, "may return NoneType"), (promised, "may return .*Awaitable"),
        (awaited, "may return str"), (not_iterated, "may return .*AsyncIterator"), (yields, "may return int"),
        (Called(), "may return int"),
    ]  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), list(wrong()))
def test_a_function_whose_types_could_only_fail_later_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Handler("shop", Pay, function, Policy())


def test_a_default_of_a_second_parameter_is_no_context() -> None:
    seen = []

    def pay(message: Pay, times: int = 3) -> None:
        seen.append(times)

    outputs(pay)
    assert seen == [3]


def test_a_decorator_without_parentheses_and_a_policy_that_is_a_class_are_refused() -> None:
    app: Any = App("billing")
    with pytest.raises(ConfigurationError, match=r"takes_context is not a pydantic model: write @app.handler\(Model\)"):
        app.handler(takes_context)
    with pytest.raises(ConfigurationError, match=r"policy=<class '.*Idempotent'> is not a policy: write Idempotent\(…\)"):
        app.handler(Pay, policy=Idempotent)(lambda message: None)


def wired(model: Any, key: str) -> str:
    try:
        Handler("shop", model, lambda message: None, Idempotent(key=key), type="shop.Wired")
    except ConfigurationError as error:
        return str(error)
    return "taken"


def test_keys_are_named_as_pydantic_reads_them() -> None:
    bodies = {
        "a": '{"a": 1}',
        "order_id": '{"order_id": 1}',
        "b": '{"b": 1}',
        "data.id": '{"data": {"id": 1}}',
        "orderId": '{"orderId": 1}',
    }
    for config in (
        {},
        {"validate_by_name": True},
        {"validate_by_name": True, "validate_by_alias": False},
        {"populate_by_name": True},
        {"alias_generator": to_camel},
    ):
        for field in (
            {"alias": "a"},
            {"alias": "a", "validation_alias": "b"},
            {"validation_alias": AliasPath("data", "id")},
            {"serialization_alias": "a"},
            {"validation_alias": AliasChoices("a", AliasPath("data", "id"))},
            {},
        ):
            model = create_model("Wired", __config__=ConfigDict(**config), order_id=(int, Field(**field)))  # type: ignore[call-overload]
            for key, body in bodies.items():
                try:
                    read = bool(model.model_validate_json(body))
                except ValidationError:
                    read = False
                assert (wired(model, key) == "taken") is read, (config, field, key, wired(model, key))


def test_what_a_key_leads_into() -> None:
    class Inner(BaseModel):
        id: int
        model_config = {"validate_by_name": True, "alias_generator": to_camel}

    class Outer(BaseModel):
        inner: Inner = Field(validation_alias=AliasPath("data", "inner"))
        text: str
        typed: Typed
        listed: int = Field(validation_alias=AliasPath("items", 0))

    assert [wired(Outer, key) for key in ("data.inner.id", "typed.id", "text")] == ["taken"] * 3
    assert "is an object: name a field in it, such as 'data.inner'" in wired(Outer, "data")
    assert "is an object: name a field in it, such as 'data.inner.id'" in wired(Outer, "data.inner")
    assert "not a field of Outer on the wire: it has data.inner, text, typed" in wired(Outer, "inner.id")
    assert "names a field of str, which has none" in wired(Outer, "text.id")
    assert wired(RootModel[Inner], "id") == wired(RootModel[dict[str, int]], "id") == "taken"
    assert "is not a field of Inner on the wire: it has id" in wired(RootModel[Inner], "root")
    assert wired(Inner, "message_id").endswith(
        "it has id; write Key.message_id(), in a file {message_id = true}, for the id of the envelope"
    )
    assert wired(AnyMessage, "message_id") == "taken"
