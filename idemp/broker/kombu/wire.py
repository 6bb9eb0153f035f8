"""Messages as AMQP properties and back. Bodies stay bytes: nothing is decoded, and nothing is ever unpickled."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote, unquote

from amqp.exceptions import AMQPError

from idemp.broker.kombu.encoding import encoded
from idemp.messages import ATTEMPT_HEADER, JSON_CONTENT_TYPE, Message, is_json

if TYPE_CHECKING:
    from idemp.messages import Output

PERSISTENT: Final = 2
#: Bytes that the name of a queue or exchange, or a routing key, may have.
SHORT_STRING: Final = 255
#: The content type under which a body arrives that is compressed or in another charset; no codec takes it.
ENCODED_CONTENT_TYPE: Final = "application/x-encoded"

_PLAIN_ENCODINGS = frozenset({"", "utf-8", "utf8", "us-ascii", "ascii", "identity", "binary"})
_LARGEST_HEADER_FRAME = 131_072 - 64  # RabbitMQ closes the connection over a larger one
_LONGEST_TTL_MS = 2**32 - 1
# What brokers write about a message's way; copies must not carry it on (RabbitMQ would see a loop and drop them).
_BROKERS_OWN = frozenset({"x-death", "x-delivery-count", "x-acquired-count", "x-opt-deaths"})
_BROKERS_PREFIXES = ("x-first-death-", "x-last-death-")


@dataclass(frozen=True, slots=True)
class Content:
    """A body with its properties, encoded already, so that a bad value is found before anything is sent.

    Attributes:
        body: the body.
        properties: what is known about it.
        encoded: the properties as bytes; all must fit into one frame.
    """

    body: bytes
    properties: Mapping[str, Any]
    encoded: bytes


class Declarable(Protocol):
    """A queue that we know how to declare."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    def declare(self, channel: Any) -> None:
        """Make sure that it exists."""
        ...


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message with its destination, ready for the wire.

    Attributes:
        exchange: where to, `""` for the queue named by `routing_key`.
        routing_key: the routing key.
        mandatory: whether the broker must say so if no queue takes it.
        content: the encoded message.
        hop: the queue that it goes to, where it can be declared if it is missing.
        delay: seconds that a transport without delay tiers holds it back.
    """

    exchange: str
    routing_key: str
    mandatory: bool
    content: Content
    hop: Declarable | None = None
    delay: float = 0.0

    @property
    def address(self) -> tuple[str, str, str | None]:
        """By what a returned message is recognised."""
        return (self.exchange, self.routing_key, self.content.properties.get("message_id"))


def parcel(exchange: str, routing_key: str, body: bytes, properties: Mapping[str, Any], *, mandatory: bool) -> Parcel:
    """Encode a message.

    Raises:
        ValueError: AMQP has no way to say it: a name over 255 bytes, a header that is no JSON value.

    Example:
        >>> parcel("", "q" * 300, b"", {}, mandatory=True)
        Traceback (most recent call last):
        ...
        ValueError: the routing key has 300 bytes, AMQP takes 255
    """
    check_names(exchange, routing_key)
    try:
        content = Content(body, properties, encoded(properties))
    except (struct.error, AMQPError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"a property or header can't be encoded for AMQP: {error}") from error
    if len(content.encoded) > _LARGEST_HEADER_FRAME:
        raise ValueError(
            f"properties and headers have {len(content.encoded)} bytes, AMQP takes {_LARGEST_HEADER_FRAME}"
        )
    return Parcel(exchange, routing_key, mandatory, content)


def check_names(exchange: str, routing_key: str) -> None:
    """Raise ValueError where a name has more bytes than AMQP takes."""
    for what, name in (("exchange", exchange), ("routing key", routing_key)):
        size = len(name.encode("utf-8", "surrogatepass"))
        if size > SHORT_STRING:
            raise ValueError(f"the {what} has {size} bytes, AMQP takes {SHORT_STRING}")


def parcel_of(output: Output) -> Parcel:
    """Encode an output as it stands; its delay is the topology's matter.

    Raises:
        ValueError: AMQP has no way to say it.
    """
    properties = properties_of(output.message)
    return parcel(output.exchange, output.routing_key, output.message.body, properties, mandatory=output.mandatory)


def properties_of(message: Message) -> dict[str, Any]:
    """A message as AMQP properties, persistent.

    Example:
        >>> sent = properties_of(Message(body=b"{}", type="stock.Reserve", message_id="m-1", ttl=1.5))
        >>> sent["type"], sent["message_id"], sent["expiration"], sent["delivery_mode"]
        ('stock.Reserve', 'm-1', '1500', 2)
    """
    content_type, encoding = _outgoing_type(message.content_type)
    return {
        "content_type": content_type,
        "content_encoding": encoding,
        "application_headers": dict(message.headers),
        "delivery_mode": PERSISTENT,
        "priority": message.priority,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "expiration": None if message.ttl is None else str(max(0, min(round(message.ttl * 1000), _LONGEST_TTL_MS))),
        "message_id": message.message_id,
        "timestamp": None if message.timestamp is None else int(message.timestamp.timestamp()),
        "type": message.type,
    }


def message_of(properties: Mapping[str, Any], headers: Mapping[Any, Any], body: bytes | str | None) -> Message:
    """A message from AMQP properties, whatever a stranger may have put there; raises nothing.

    Example:
        >>> message_of({"type": "t", "expiration": "1500"}, {"trace": b"00-ab", "x-death": []}, b"{}")
        Message(body=b'{}', type='t', message_id=None, content_type='application/json', correlation_id=None, \
reply_to=None, headers={'trace': '00-ab'}, timestamp=None, ttl=1.5, priority=None)
        >>> message_of({"content_encoding": "gzip"}, {}, b"...").content_type
        'application/x-encoded;encoding=gzip;type=application%2Fjson'
    """
    encoding = str(properties.get("content_encoding") or "")
    priority = properties.get("priority")
    return Message(
        body=bytes_of(body, encoding),
        type=_text_or_none(properties.get("type")),
        message_id=_text_or_none(properties.get("message_id")),
        content_type=_incoming_type(properties.get("content_type"), encoding),
        correlation_id=_text_or_none(properties.get("correlation_id")),
        reply_to=_text_or_none(properties.get("reply_to")),
        headers=users_headers(headers),
        timestamp=_timestamp(properties.get("timestamp")),
        ttl=_ttl(properties.get("expiration")),
        priority=priority if isinstance(priority, int) else None,
    )


def attempt_of(headers: Mapping[str, Any]) -> int:
    """Which attempt a delivery is; 1 unless its header says more.

    Example:
        >>> attempt_of({}), attempt_of({"idemp-attempt": 3}), attempt_of({"idemp-attempt": "x"})
        (1, 3, 1)
    """
    value = headers.get(ATTEMPT_HEADER)
    return value if isinstance(value, int) and value > 1 else 1


def bytes_of(body: bytes | str | memoryview | None, encoding: str = "") -> bytes:
    """A body as bytes, though a client library may have decoded it."""
    if isinstance(body, str):
        try:
            return body.encode(encoding or "utf-8")
        except (LookupError, ValueError):
            return body.encode("utf-8", "surrogatepass")
    return b"" if body is None else bytes(body)


def users_headers(headers: Mapping[Any, Any]) -> dict[str, Any]:
    """Headers as JSON values, without what brokers wrote there."""
    return {
        name: _json_value(value)
        for name, value in ((_text(key), value) for key, value in headers.items())
        if not _is_brokers_own(name)
    }


def copied_headers(headers: Mapping[Any, Any]) -> dict[str, Any]:
    """Headers for a copy to another queue, their values as they are, without what would steer the copy elsewhere.

    Example:
        >>> copied_headers({"a": b"1", "x-death": [], "CC": ["other"]})
        {'a': b'1', 'idemp-cc': ['other']}
    """
    named = {_text(key): value for key, value in headers.items()}
    return {
        # RabbitMQ sends a message with these headers to more queues than the one it is published to.
        f"idemp-{name.lower()}" if name in {"CC", "BCC"} else name: value
        for name, value in named.items()
        if not _is_brokers_own(name)
    }


def _is_brokers_own(name: str) -> bool:
    return name in _BROKERS_OWN or name.startswith(_BROKERS_PREFIXES)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # as JavaScript writes it in JSON; a text could be another message's id
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _text(value)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {_text(name): _json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    return str(value)


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace") if isinstance(value, bytes | bytearray | memoryview) else str(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _timestamp(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if not isinstance(value, int | float):
        return None
    try:
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _ttl(value: Any) -> float | None:
    try:
        return None if value is None else int(value) / 1000
    except (TypeError, ValueError):
        return None


def _incoming_type(content_type: Any, encoding: str) -> str:
    plain = _text(content_type) if content_type else JSON_CONTENT_TYPE
    if encoding.strip().lower() in _PLAIN_ENCODINGS:
        return plain
    return f"{ENCODED_CONTENT_TYPE};encoding={quote(encoding, safe='')};type={quote(plain, safe='')}"


def _outgoing_type(content_type: str) -> tuple[str, str | None]:
    if not content_type.startswith(f"{ENCODED_CONTENT_TYPE};"):
        return content_type, "utf-8" if is_json(content_type) else None
    parts = dict(part.partition("=")[::2] for part in content_type.split(";")[1:])
    return unquote(parts.get("type", "")), unquote(parts.get("encoding", "")) or None
