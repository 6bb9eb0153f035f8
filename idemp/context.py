"""Contexts of handlers: the session of the claim, and methods that send messages."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from idemp.cloudevents import PREFIX, Mode, event_mode, event_source, write_event
from idemp.errors import HandlerError, UnusableOutput
from idemp.identity import output_id, uuid7
from idemp.messages import FORWARD, LONGEST_NAME, MAX_BODY_BYTES, RESULT, Output, check_text, encode, type_name
from idemp.policy import Duration, seconds
from idemp.ports import Claim

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["AsyncContext", "BaseContext", "Context", "inherit", "inherits_id_alone"]

EXCHANGE: Final = "idemp.events"
CONTROL: Final = "idemp-"  # prefix of headers that idemp itself reads; never passed on from a handler
CAUSATION: Final = f"{CONTROL}causation-id"
FINGERPRINT: Final = f"{CONTROL}fingerprint"
TRACE: Final = ("traceparent", "tracestate")  # W3C Trace Context: passed on from a handled message
LONGEST_TRACE: Final = 512  # characters of either that are passed on; the recommendation asks for no more
FOREIGN: Final = frozenset(
    {"app_id", "cluster_id", "content_encoding", "content_type", "correlation_id", "delivery_mode", "expiration", "message_id"}
    | {"priority", "reply_to", "timestamp", "type", "user_id"}
)
"""Properties of AMQP 0-9-1, besides headers."""
LONGEST_PROPERTIES: Final = 9_000  # bytes of a message's properties as JSON, with what STOMP escapes: each broker takes them

OVER: Final = "the handling is over, so this message would never be stored: emit it before the handler returns"
NOT_BOOLEAN: Final = "mandatory={!r} has to be true or false"

HEADERS: Final = {
    CAUSATION: "id of the message whose handling emitted this one",
    FINGERPRINT: "`none`: the payload is not compared, because another run may word it differently",
    "traceparent": "the span that this message belongs to; passed on to outputs (W3C Trace Context)",
    "tracestate": "passed on to outputs (W3C Trace Context)",
    f"{PREFIX}NAME": "an attribute of a CloudEvent; `cloudEvents:NAME`, `ce-NAME` and `ce_NAME` are read, too",
}
"""All headers that idemp reads or writes, and their meaning."""

Message = BaseModel | Mapping[str, Any]


class BaseContext:
    """Context of one handling: the properties of its message, and the messages that it emits.

    Emitted messages are only buffered. They are stored in the handler's transaction and sent after COMMIT.

    Attributes:
        consumer: Name of the consumer.
        properties: Properties of the handled message; see `Delivery`.
        attempt: Number of this run, from 1; runs that do not count repeat a number.
        duplicate: Whether the message or the id was handled before. No handler runs then, but a block of `App.initiate` does, and its
            changes are rolled back, or one of `Inbox.claim`: skip the business logic, then commit or roll back.
        result: Bytes for the caller, which are stored with the claim and sent to no queue. For a duplicate, those of the first
            handling; None if it had none, or they were erased.
        stored: Of a block of `Inbox.claim`: the outputs that `Inbox.dispatch` sends. After the block, what it emitted; for a
            duplicate, what is unconfirmed.

    Example:
        >>> ctx = BaseContext("billing", {"message_id": "7", "reply_to": "shop"}, None, None)
        >>> ctx.send({"order_id": 7}, to="stock", type="shop.ReserveStock", delay="5m")
        >>> ctx.reply({"ok": True}, type="billing.Paid")
        >>> [(output.kind, output.routing_key, output.delay) for output in ctx.outputs()]
        [('send', 'stock', 300.0), ('reply', 'shop', None)]
    """

    __slots__ = (
        "_claim", "_closed", "_emitted", "_events", "_tx", "attempt", "consumer", "duplicate", "properties", "result", "stored"
    )  # fmt: skip

    def __init__(self, consumer: str, properties: Mapping[str, Any], tx: Any, claim: Claim | None, attempt: int = 1) -> None:
        self.consumer, self.attempt, self.duplicate = consumer, attempt, False
        self.properties = dict(properties)  # a copy: a retry stores the properties as they came
        if "headers" in properties:
            self.properties["headers"] = deepcopy(properties["headers"])
        self._tx, self._claim, self._closed = tx, claim, False
        self.result: bytes | None = None
        self.stored: Sequence[Output] = ()
        self._emitted: list[Output] = []
        self._events: list[tuple[Output, Mode, str]] = []

    @property
    def message_id(self) -> str | None:
        """Id of the envelope, as the producer wrote it."""
        return self.properties.get("message_id")

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers of the handled message."""
        return self.properties.get("headers") or {}

    def publish(
        self,
        message: Message,
        *,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        delay: Duration | None = None,
        mandatory: bool = True,
    ) -> None:
        """Publish a message to every queue that takes its type.

        Args:
            message: A pydantic model, or a mapping with `type=`.
            type: Type name; by default the model's.
            headers: Text, numbers, booleans, lists and mappings of them.
            delay: Time after COMMIT before it is sent.
            mandatory: Whether a message that no queue takes is kept in quarantine; else the broker drops it.

        Raises:
            UnusableOutput: The message could not be published or read back.
        """
        name = self._type(message, type)
        self._emit("publish", EXCHANGE, name, name, message, headers, delay, mandatory=mandatory)

    def send(
        self,
        message: Message,
        to: str,
        *,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        delay: Duration | None = None,
    ) -> None:
        """Send a message to one queue.

        Args:
            message: A pydantic model, or a mapping with `type=`.
            to: Name of the queue, which is the name of the app that takes it.
            type: Type name; by default the model's.
            headers: Text, numbers, booleans, lists and mappings of them.
            delay: Time after COMMIT before it is sent.

        Raises:
            UnusableOutput: The message could not be sent or read back.
        """
        self._emit("send", "", check_text(to, "to", UnusableOutput), self._type(message, type), message, headers, delay)

    def reply(self, message: Message, *, type: str | None = None, headers: Mapping[str, Any] | None = None) -> None:
        """Answer to the queue that the handled message names in `reply_to`.

        Raises:
            UnusableOutput: The message names no queue, or the answer could not be sent or read back.
        """
        to = self.properties.get("reply_to")
        if to is None:
            raise UnusableOutput("the message has no reply_to, so there is nowhere to reply: use send(…, to=…)")
        check_text(to, "reply_to", UnusableOutput)
        self._emit("reply", "", to, self._type(message, type), message, headers, None)

    def forward(
        self,
        body: bytes,
        properties: Mapping[str, Any] | None = None,
        *,
        to: str,
        exchange: str = "",
        mandatory: bool = True,
        delay: Duration | None = None,
    ) -> None:
        """Send a message as another library has made it: its bytes, properties and headers reach the queue as they are.

        idemp adds nothing, so its consumer finds the id that the other library gave it. Any relay of idemp sends it by AMQP.

        Args:
            body: At most 16 MiB.
            properties: Properties of AMQP, and `headers` with text, numbers, booleans, None, lists and mappings of them.
                It is always sent as persistent.
            to: Routing key, which may be empty; with the default exchange the name of a queue.
            exchange: Name of the exchange.
            mandatory: Whether a message that no queue takes is kept in quarantine; else the broker drops it.
            delay: Time after COMMIT before it is sent.

        Raises:
            UnusableOutput: The body is no bytes or too large, or the properties are not AMQP's or would come back changed.

        Example:
            >>> ctx = BaseContext("billing", {}, None, None)
            >>> ctx.forward(b"[[7], {}]", {"content_type": "application/json", "headers": {"task": "shop.pack"}}, to="celery")
            >>> [(output.kind, output.routing_key, output.body) for output in ctx.outputs()]
            [('forward', 'celery', b'[[7], {}]')]
        """
        if not isinstance(body, bytes | bytearray | memoryview) or len(body) > MAX_BODY_BYTES:
            raise UnusableOutput(f"a forwarded body has to be bytes, at most {MAX_BODY_BYTES:,}")
        kept = {name: value for name, value in (properties or {}).items() if value is not None}
        own = _unchanged(kept.pop("headers", None) or {})
        if strange := sorted(set(kept) - FOREIGN):
            raise UnusableOutput(f"{', '.join(strange)}: not a property of AMQP: put it into the headers")
        kept.pop("delivery_mode", None)
        kept = {**_unchanged(kept), "headers": own}
        if (size := _size(kept)) > LONGEST_PROPERTIES:
            raise UnusableOutput(f"the properties have {size:,} bytes as JSON; at most {LONGEST_PROPERTIES:,} are sent")
        if not isinstance(mandatory, bool):
            raise UnusableOutput(NOT_BOOLEAN.format(mandatory))
        if self._closed:
            raise HandlerError(OVER)
        wait = None if delay is None else seconds(delay, "delay")
        if to or not exchange:  # a fanout needs no key
            check_text(to, "to", UnusableOutput)
        self._emitted.append(Output("", FORWARD, exchange, to, kept, bytes(body), wait, mandatory, wait is None))

    @property
    def closed(self) -> bool:
        """Whether the handling is over, so that it takes no more messages."""
        return self._closed

    def close(self) -> None:
        """Take no more messages."""
        self._closed = True

    def outputs(self) -> list[Output]:
        """Close the context and return the emitted outputs; a second execution gives them the same ids.

        If the context has a result, it is the last one, of the kind `result`.
        """
        self._closed = True
        if self.result is not None:
            if not isinstance(self.result, bytes) or len(self.result) > MAX_BODY_BYTES:
                raise UnusableOutput(f"a result has to be bytes, at most {MAX_BODY_BYTES:,}")
            self._emitted.append(Output("", RESULT, "", "", {"headers": {}}, self.result, sendable=False))
        for ordinal, output in enumerate(self._emitted):
            due_at = output.properties.get("timestamp")
            output.id = output_id(self.consumer, self._claim.key, ordinal) if self._claim else uuid7(due_at)
            if output.kind not in (FORWARD, RESULT):
                output.properties["message_id"] = output.id
                output.properties.setdefault("correlation_id", output.id)
        while self._events:
            output, mode, source = self._events.pop()
            write_event(output, mode, source)
            if len(output.body) > MAX_BODY_BYTES:
                raise UnusableOutput(f"the event has {len(output.body):,} bytes; at most {MAX_BODY_BYTES:,} are read")
        return self._emitted

    def _type(self, message: Message, type: str | None) -> str:
        if type is not None:
            return check_text(type, "type", UnusableOutput)
        if not isinstance(message, BaseModel):
            raise UnusableOutput(f"a {message.__class__.__name__} has no type: pass type='package.Name' or a pydantic model")
        return type_name(message.__class__)

    def _emit(
        self,
        kind: str,
        exchange: str,
        routing_key: str,
        type: str,
        message: Message,
        headers: Mapping[str, Any] | None,
        delay: Duration | None,
        *,
        mandatory: bool = True,
    ) -> None:
        if not isinstance(mandatory, bool):
            raise UnusableOutput(NOT_BOOLEAN.format(mandatory))
        if self._closed:
            raise HandlerError(OVER)
        wait = None if delay is None else seconds(delay, "delay")
        # A delayed message is dated by the time at which it is due, so that a long delay does not make it late.
        properties: dict[str, Any] = {
            "type": type, "timestamp": round(time.time() + (wait or 0.0), 3), "content_type": "application/json"
        }  # fmt: skip
        own = _headers(headers) if headers else {}
        if self._claim is None:  # another run may word this message differently
            own[FINGERPRINT] = "none"
        inherit(self.properties, properties, own)
        if headers and (size := _size(properties)) > LONGEST_PROPERTIES:
            raise UnusableOutput(
                f"the properties have {size:,} bytes as JSON; at most {LONGEST_PROPERTIES:,} are sent: put long headers into the body"
            )
        self._emitted.append(Output("", kind, exchange, routing_key, properties, encode(message), wait, mandatory, wait is None))
        if hasattr(message, "__cloudevent__") and (mode := event_mode(model := message.__class__)):
            self._events.append((self._emitted[-1], mode, event_source(model, self.consumer)))


class Context(BaseContext):
    """The context of a plain handler.

    Example:
        >>> Context("billing", {"message_id": "7"}, None, None).message_id
        '7'
    """

    __slots__ = ()

    @property
    def session(self) -> Session:
        """SQLAlchemy session in the transaction of the claim. It flushes, and refuses to commit, roll back or close."""
        session: Session = self._tx.session
        return session

    @property
    def connection(self) -> Connection:
        """SQLAlchemy connection of the same transaction."""
        connection: Connection = self._tx.connection
        return connection


class AsyncContext(BaseContext):
    """The context of an `async def` handler.

    Example:
        >>> AsyncContext("billing", {"message_id": "7"}, None, None).message_id
        '7'
    """

    __slots__ = ()

    @property
    def session(self) -> AsyncSession:
        """SQLAlchemy session in the transaction of the claim. It flushes, and refuses to commit, roll back or close."""
        session: AsyncSession = self._tx.async_session
        return session

    @property
    def connection(self) -> AsyncConnection:
        """SQLAlchemy connection of the same transaction."""
        connection: AsyncConnection = self._tx.async_connection
        return connection


def _is_id(value: Any, longest: int = LONGEST_NAME) -> bool:
    """Return whether a text of another producer can be passed on, because every broker and database keeps it unchanged."""
    try:
        return isinstance(value, str) and len(value.encode()) <= longest and bool(value) and "\0" not in value
    except UnicodeEncodeError:
        return False


def inherits_id_alone(received: Mapping[str, Any]) -> bool:
    """Return whether all that outputs take over from a message is its id, as correlation id and causation id; see `inherit`.

    Example:
        >>> inherits_id_alone({"message_id": "7"}), inherits_id_alone({"message_id": "7", "headers": {"traceparent": "00-1-2-01"}})
        (True, False)
    """
    return not received.get("headers") and received.get("correlation_id") is None and _is_id(received.get("message_id"))


def inherit(received: Mapping[str, Any], properties: dict[str, Any], headers: dict[str, Any]) -> None:
    """Add to an output what it takes over from the handled message: correlation id, causation id and trace, if there is room for it.

    Args:
        received: Properties of the handled message.
        properties: Properties of the output, without headers.
        headers: Its own headers.

    Example:
        >>> output = {"type": "shop.Reserve"}
        >>> inherit({"message_id": "7", "headers": {"traceparent": "00-1-2-01"}}, output, {})
        >>> output["correlation_id"], output["headers"]
        ('7', {'traceparent': '00-1-2-01', 'idemp-causation-id': '7'})
    """
    cause, correlation = received.get("message_id"), received.get("correlation_id")
    if _is_id(cause):
        headers[CAUSATION] = properties["correlation_id"] = cause
    if correlation is not None and _is_id(correlation):
        properties["correlation_id"] = correlation
    if headers:
        properties["headers"] = headers
    if theirs := received.get("headers"):
        trace = {name: theirs[name] for name in TRACE if _is_id(theirs.get(name), LONGEST_TRACE)}
        if trace and _size(together := properties | {"headers": trace | headers}) <= LONGEST_PROPERTIES:
            properties["headers"] = together["headers"]


def _size(properties: Mapping[str, Any]) -> int:
    text = json.dumps(properties)
    return len(text) + sum(map(text.count, ":\\"))


def _headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    return _unchanged({name: value for name, value in headers.items() if not str(name).startswith(CONTROL)})


def _unchanged(kept: Any) -> dict[str, Any]:
    """Return headers or properties that JSON gives back as they are."""
    if not isinstance(kept, Mapping):
        raise UnusableOutput(f"headers are a mapping, not a {kept.__class__.__name__}")
    unchanged = dict(kept)
    try:
        _check_header(unchanged)
        text = json.dumps(unchanged, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnusableOutput:
        raise
    except (TypeError, ValueError) as error:
        raise UnusableOutput(f"headers cannot be sent: {error}") from None
    if json.loads(text) != unchanged:
        raise UnusableOutput("headers would come back changed: use text, numbers, booleans, and lists and mappings of them")
    return unchanged


def _check_header(value: Any) -> None:
    """Refuse names and numbers that AMQP does not have."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_text(name, "the name of a header", UnusableOutput)
            _check_header(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_header(each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UnusableOutput("headers cannot be sent: an integer has more than 64 bits; send it as text")
