"""Messages as they travel, outputs as they are stored, and the JSON both are made of."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import UUID

from idemp.errors import UndecodableMessage, UnsupportedContentType
from idemp.exact import ExactEncoder, read_number, write_canonically

if TYPE_CHECKING:
    from collections.abc import Iterable

JSON_CONTENT_TYPE: Final = "application/json"

# Headers that idemp adds. Everything else in `headers` belongs to the user.
HEADER_PREFIX: Final = "idemp-"
CAUSATION_HEADER: Final = "idemp-causation-id"
REDISPATCHED_HEADER: Final = "idemp-redispatched"
UNSTORED_HEADER: Final = "idemp-unstored"
ATTEMPT_HEADER: Final = "idemp-attempt"
FIRST_SEEN_HEADER: Final = "idemp-first-seen"
DEFERRED_HEADER: Final = "idemp-deferred"
HOPS_HEADER: Final = "idemp-hops"
FORCED_HEADER: Final = "idemp-forced"
RETURN_CODE_HEADER: Final = "idemp-return-code"
DEAD_PREFIX: Final = "idemp-dead-"
COMPRESSION_HEADER: Final = "compression"
"""Where kombu says how it compressed a body."""
CLOUDEVENT_SOURCE_HEADER: Final = "cloudEvents_source"
BAGGAGE_HEADERS: Final = ("baggage",)
TRACE_HEADERS: Final = ("traceparent", "tracestate", *BAGGAGE_HEADERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as it arrives or leaves: opaque body bytes and the properties beside them.

    Attributes:
        body: the payload, as it is on the wire.
        type: the message type name, `None` when the producer gave none.
        message_id: the id that the producer or the broker gave.
        content_type: media type of `body`.
        correlation_id: groups messages of one conversation.
        reply_to: the queue where an answer is expected.
        headers: application headers; values are JSON values.
        timestamp: when the producer says that it made the message.
        ttl: seconds after which the broker may drop it, `None` for never.
        priority: 0 (lowest) to 255.

    Example:
        >>> Message(body=b'{"sku": "A-1"}', type="stock.Reserve", message_id="m-1").content_type
        'application/json'
    """

    body: bytes
    type: str | None = None
    message_id: str | None = None
    content_type: str = JSON_CONTENT_TYPE
    correlation_id: str | None = None
    reply_to: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    timestamp: datetime | None = None
    ttl: float | None = None
    priority: int | None = None

    @property
    def causation_id(self) -> str | None:
        """The id of the message whose handling produced this one."""
        value = self.headers.get(CAUSATION_HEADER)
        return value if isinstance(value, str) else None

    @property
    def hops(self) -> int:
        """How many messages, each caused by the one before, led to this one; 0 for one that none of ours caused.

        Example:
            >>> Message(body=b"", headers={"idemp-hops": 3}).hops, Message(body=b"").hops
            (3, 0)
        """
        return counter(self.headers, HOPS_HEADER)

    @property
    def redispatched(self) -> bool:
        """Whether the sender says that this is a copy of an output that it sent before."""
        return bool(self.headers.get(REDISPATCHED_HEADER))

    def with_headers(self, **changes: Any) -> Message:
        """A copy with headers set; underscores in names stand for hyphens, `None` removes.

        Example:
            >>> Message(body=b"{}").with_headers(idemp_attempt=2).headers
            {'idemp-attempt': 2}
        """
        named = {name.replace("_", "-"): value for name, value in changes.items()}
        merged = {**self.headers, **named}
        return replace(self, headers={name: value for name, value in merged.items() if value is not None})


class OutputKind(enum.StrEnum):
    """How an output leaves.

    Example:
        >>> OutputKind.RETURN
        <OutputKind.RETURN: 'return'>
    """

    PUBLISH = "publish"  #: to whoever subscribed to its type
    SEND = "send"  #: to one queue
    REPLY = "reply"  #: to the `reply_to` of the message being handled
    RETURN = "return"  #: a status code only, to `reply_to`
    EFFECT = "effect"  #: no message: work outside the database, done after COMMIT by the function of this name


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A message that a handling produced, with where it goes and under which id.

    Attributes:
        id: derived from the input's id, the same however often the input is handled.
        ordinal: position in emission order, from 0.
        kind: publish, send, reply, return or effect.
        exchange: the broker's exchange, `""` for "straight to the queue `routing_key`".
        routing_key: message type for a publish, the effect's name, queue name otherwise.
        message: what is sent; `message.message_id` is `str(id)`.
        mandatory: whether a publish that no queue takes is a failure.
        delay: seconds that the broker holds it back, 0 for none.

    Example:
        >>> message = Message(body=b"{}", type="stock.Reserve", message_id="0192c8a4-7d3e-7000-8000-000000000001")
        >>> where = {"kind": OutputKind.SEND, "exchange": "", "routing_key": "stock"}
        >>> output = Output(id=UUID(message.message_id), ordinal=0, message=message, **where)
        >>> output.marked_redispatched().message.redispatched
        True
    """

    id: UUID
    ordinal: int
    kind: OutputKind
    exchange: str
    routing_key: str
    message: Message
    mandatory: bool = True
    delay: float = 0.0

    @property
    def is_effect(self) -> bool:
        """Whether it is work to be done instead of a message to be sent: no publisher ever gets it."""
        return self.kind is OutputKind.EFFECT

    def marked_redispatched(self) -> Output:
        """The same output, saying that it may have been sent before."""
        return replace(self, message=self.message.with_headers(idemp_redispatched=1))

    def envelope(self) -> str:
        """Everything but the body as one JSON text, as the stores keep it."""
        message = self.message
        values: dict[str, Any] = {
            "type": message.type,
            "content_type": message.content_type,
            "correlation_id": message.correlation_id,
            "reply_to": message.reply_to,
            "headers": dict(message.headers),
            "timestamp": message.timestamp.isoformat() if message.timestamp else None,
            "ttl": message.ttl,
            "priority": message.priority,
            "mandatory": self.mandatory,
            "delay": self.delay,
        }
        return json.dumps({name: value for name, value in values.items() if value not in (None, {})})

    @classmethod
    def restored(
        cls, id: UUID, ordinal: int, kind: str, exchange: str, routing_key: str, envelope: str, body: bytes
    ) -> Output:
        """An output read back from a store: the same destination, properties and bytes."""
        values: dict[str, Any] = json.loads(envelope)
        timestamp = values.get("timestamp")
        message = Message(
            body=bytes(body),
            type=values.get("type"),
            message_id=str(id),
            content_type=values["content_type"],
            correlation_id=values.get("correlation_id"),
            reply_to=values.get("reply_to"),
            headers=values.get("headers", {}),
            timestamp=datetime.fromisoformat(timestamp) if timestamp else None,
            ttl=values.get("ttl"),
            priority=values.get("priority"),
        )
        return cls(
            id=id,
            ordinal=ordinal,
            kind=OutputKind(kind),
            exchange=exchange,
            routing_key=routing_key,
            message=message,
            mandatory=values["mandatory"],
            delay=values["delay"],
        )


def counter(headers: Mapping[str, Any], name: str) -> int:
    """A header that counts something; 0 without a usable one.

    Example:
        >>> [counter(headers, "n") for headers in ({"n": 2}, {}, {"n": "2"}, {"n": -1}, {"n": True})]
        [2, 0, 0, 0, 0]
    """
    value = headers.get(name)
    return value if type(value) is int and value > 0 else 0


def is_erased(envelope: str) -> bool:
    """Whether a stored output was erased: its key stays, its bytes are gone, and it is never sent again.

    Example:
        >>> is_erased('{"erased": true}'), is_erased('{"mandatory": true}')
        (True, False)
    """
    return json.loads(envelope).get("erased") is True


def is_json(content_type: str) -> bool:
    """Whether a media type says JSON.

    Example:
        >>> is_json("application/vnd.acme+json; charset=utf-8"), is_json("application/x-python-serialize")
        (True, False)
    """
    media = content_type.partition(";")[0].strip().lower()
    return media in {JSON_CONTENT_TYPE, "text/json"} or media.endswith("+json")


def parse_json(message: Message) -> Any:
    """The body of a message as JSON value; see `parse_canonically`.

    Raises:
        MessageError: as there.

    Example:
        >>> parse_json(Message(body=b'{"a": 1}'))
        {'a': 1}
    """
    return parse_canonically(message)[0]


def parse_canonically(message: Message) -> tuple[Any, bytes]:
    """The body of a message as JSON value, by RFC 8259 taken strictly, and as `canonical_json`.

    Duplicate keys, `NaN` and `Infinity`, lone surrogates, numbers beyond a float's range and nesting beyond Python's
    limit are errors: two readers would understand such a body differently. A number with more digits than a float holds
    is a `Decimal`.

    Raises:
        UnsupportedContentType: the content type is not JSON.
        UndecodableMessage: the body is no strict JSON.

    Example:
        >>> parse_canonically(Message(body=b'{"a": 1}'))
        ({'a': 1}, b'{"a":1}')
    """
    if not is_json(message.content_type):
        raise UnsupportedContentType(
            f"Content type {message.content_type!r} is not JSON, and idemp decodes nothing else.",
            fix="Send application/json; pickled bodies are never read.",
        )
    try:
        return parse_body(message.body)
    except UndecodableMessage as error:
        if (compression := message.headers.get(COMPRESSION_HEADER)) is None:
            raise
        raise UndecodableMessage(
            f"The body ({len(message.body)} bytes) is compressed, as the header {COMPRESSION_HEADER}={compression!r} says; "
            "idemp decompresses nothing.",
            fix="Have the producer publish without compression.",
        ) from error


def parse_body(body: bytes) -> tuple[Any, bytes]:
    """`parse_canonically` of a body that is known to be JSON.

    Raises:
        UndecodableMessage: it is no strict JSON.

    Example:
        >>> parse_body(b'{"b": 1, "a": 2}')
        ({'b': 1, 'a': 2}, b'{"a":2,"b":1}')
    """
    try:
        value = read_strictly(body)
        canonical = canonical_json(value)  # finds what only encoding can: lone surrogates
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UndecodableMessage(
            f"The body ({len(body)} bytes) is no strict JSON: {reason}.", fix="Mend the producer."
        ) from error
    return value, canonical


def read_strictly(body: bytes) -> Any:
    """Return the value of a JSON body.

    Raises:
        ValueError: the body is no strict JSON: a key stands twice in an object, or a number is none that JSON has.
        RecursionError: it is nested too deeply.

    Example:
        >>> read_strictly(b'{"a": [1.5]}')
        {'a': [1.5]}
    """
    return _STRICT.decode(body.decode("utf-8"))


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal for bodies that differ in layout only.

    Example:
        >>> canonical_json({"b": 1, "a": [1.0, "é"]}).decode()
        '{"a":[1.0,"é"],"b":1}'
    """
    return _CANONICAL.encode(value).encode("utf-8")


def _unique_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} stands twice in one object")
        result[name] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# Made once: `json.loads` and `json.dumps` with options make one each time.
_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant, parse_float=read_number
)
_CANONICAL: Final = ExactEncoder(
    write_canonically, sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False
)
