"""Messages: properties, a body of JSON text, and the destinations of outputs."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel

from idemp.errors import ConfigurationError, Unreadable, UnusableOutput

__all__ = [
    "BOM",
    "FORWARD",
    "ORDINARY",
    "RESULT",
    "SPOILT",
    "UNREADABLE",
    "Delivery",
    "MessageRow",
    "Output",
    "Refusal",
    "check_list",
    "check_media",
    "check_text",
    "encode",
    "media_type",
    "member_text",
    "parse",
    "read_history",
    "read_properties",
    "type_name",
]

FORWARD: Final = "forward"
"""Kind of an output that another library has made: its bytes and properties are sent as they are."""
RESULT: Final = "result"
"""Kind of an output that is sent to no queue: duplicates get it."""
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
LONGEST_NAME: Final = 255  # bytes; AMQP's short strings
SUSPICIOUS: Final = 2  # deaths after which a row is leased alone
ORDINARY: Final = (None, "application/json")
"""Content types that need no further check."""
JSON_TYPES: Final = frozenset({"", "application/json", "text/json"})
ENCODINGS: Final = frozenset({"", "utf-8", "utf8", "us-ascii", "ascii", "identity"})
BOM: Final = "\ufeff"  # a byte order mark, with which some producers begin UTF-8
PUNCTUATION: Final = re.compile(r"[\s,:]*")
ENTRY: Final[Mapping[str, Any]] = {"rule": str, "times": int, "at": (int, float)}  # the fields of a failure that are read
YEAR_5138: Final = 1e11  # seconds since 1970, beyond which nothing was logged
SPOILT: Final = {"rule": "spoilt", "times": 0, "at": 0.0, "phase": "accept", "worker": "", "error": "its history cannot be read"}
"""Replaces a history that another program has damaged."""
UNREADABLE: Final = "unreadable"
"""Property that marks a delivery with unreadable properties: their bytes in Base64. Such a delivery becomes a dead letter."""


@dataclass(slots=True)
class MessageRow:
    """The `message` row that a delivery was leased from. Every settle names its id and delivery number.

    Attributes:
        attempts: Runs that failed and count.
        deaths: Processes that ended while they held the row, or that may have.
        history: Failures so far, oldest first.

    Example:
        >>> MessageRow(id=1, deliveries=1, attempts=0, deaths=2, history=[]).suspect
        True
    """

    id: int
    deliveries: int
    attempts: int
    deaths: int
    history: list[dict[str, Any]]

    @property
    def suspect(self) -> bool:
        """True if the row runs alone in its process: one death proves nothing, but a second one may be the message's fault."""
        return self.deaths >= SUSPICIOUS

    @property
    def deaths_alone(self) -> int:
        """Processes that ended while they ran nothing but this row."""
        return max(0, self.deaths - SUSPICIOUS)


@dataclass(slots=True)
class Delivery:
    """One arrival of a message at one consumer.

    Attributes:
        queue: The queue that the message came from.
        properties: `message_id`, `type`, `timestamp` (seconds), `correlation_id`, `reply_to`, `content_type`,
            `content_encoding` and `headers`, as far as the producer set them.
        body: JSON text in UTF-8.
        redelivered: Whether the broker has delivered the message before.
        tag: Reference by which the broker's receiver acknowledges the delivery; None for a leased row.
        row: The leased row; None if it came from the broker.

    Example:
        >>> Delivery("billing", {"type": "shop.Pay", "message_id": "7"}, b"{}").redelivered
        False
    """

    queue: str
    properties: dict[str, Any]
    body: bytes
    redelivered: bool = False
    tag: Any = None
    row: MessageRow | None = None


@dataclass(slots=True)
class Output:
    """A message to be sent. Its id and bytes stay the same each time it is sent.

    Attributes:
        kind: `publish`, `send`, `reply`, `forward` or `result`.
        exchange: Topic exchange; empty to address a queue by name.
        routing_key: Type of a published message, or the name of a queue.
        delay: Seconds after COMMIT before it is due; None for at once.
        mandatory: Whether the broker has to refuse it if no queue takes it.
        sendable: Whether dispatch sends it now; false for delayed outputs and for those of another dispatcher.

    Example:
        >>> Output("1", "send", "", "stock", {"type": "shop.Reserve"}, b"{}").sendable
        True
    """

    id: str
    kind: str
    exchange: str
    routing_key: str
    properties: dict[str, Any]
    body: bytes
    delay: float | None = None
    mandatory: bool = True
    sendable: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a broker did not take an output.

    Attributes:
        own: Whether the output itself is to blame (returned or unsendable), not an outage.

    Example:
        >>> Refusal("no queue takes 'stock'", own=True).own
        True
    """

    reason: str
    own: bool = False


@lru_cache(1024)
def type_name(model: type) -> str:
    """Return the type name of a message class: `__message_type__`, else package and class.

    Raises:
        ConfigurationError: The class is defined in a script, so its name depends on how that is started.

    Example:
        >>> from idemp.policy import Retry
        >>> type_name(Retry)
        'idemp.Retry'
    """
    if name := getattr(model, "__message_type__", None):
        return check_text(name, "__message_type__")
    package = model.__module__.partition(".")[0]
    if package == "__main__":
        raise ConfigurationError(
            f"{model.__qualname__} is defined in the script that runs, so its type would be __main__.{model.__qualname__}: "
            f"give it a name of its own, such as __message_type__ = 'shop.{model.__qualname__}'"
        )
    return f"{package}.{model.__qualname__}"


def check_text(value: object, where: str, error: type[Exception] = ConfigurationError) -> str:
    """Return an id or a name if every broker and database keeps it unchanged.

    Raises:
        ConfigurationError: The text is blank, longer than 255 bytes, or has NUL, a lone surrogate or U+FFFD.

    Example:
        >>> check_text("orders", "queue")
        'orders'
        >>> check_text(" ", "queue")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: queue has to be text of 1 to 255 bytes without NUL or replaced characters, not ' '
    """
    if isinstance(value, str) and value and not value.isspace() and "\0" not in value and "\ufffd" not in value:
        try:
            if len(value.encode()) <= LONGEST_NAME:
                return value
        except UnicodeEncodeError:
            pass
    shown = ascii(value)
    shown = shown if len(shown) <= 80 else f"{shown[:79]}…"
    raise error(f"{where} has to be text of 1 to 255 bytes without NUL or replaced characters, not {shown}")


def media_type(content: object) -> str:
    """Return a media type without its parameters, in small letters: case means nothing in it (RFC 9110, section 8.3.1).

    Example:
        >>> media_type("Application/JSON; charset=UTF-8"), media_type(None)
        ('application/json', '')
    """
    return "" if content is None else str(content).partition(";")[0].strip().lower()


def check_media(properties: Mapping[str, Any], body: bytes) -> None:
    """Refuse a body whose properties say that it is not JSON text in UTF-8. ASCII passes under any declared charset.

    Raises:
        Unreadable: The body has another media type or encoding, or is compressed.

    Example:
        >>> check_media({"content_type": "application/vnd.api+json; charset=utf-8", "content_encoding": "UTF-8"}, b"{}")
        >>> check_media({"content_type": "text/xml"}, b"<a/>")
        Traceback (most recent call last):
        idemp.errors.Unreadable: content type 'text/xml' is not JSON: send application/json
    """
    content, encoding = properties.get("content_type"), properties.get("content_encoding")
    media = media_type(content)
    if media not in JSON_TYPES and not media.endswith("+json"):
        raise Unreadable(f"content type {content!r} is not JSON: send application/json")
    if encoding is not None and str(encoding).strip().lower() not in ENCODINGS:
        raise Unreadable(f"content encoding {encoding!r}: the body is compressed or in another encoding: send JSON text in UTF-8")
    for parameter in str(content).split(";")[1:]:
        name, _, value = parameter.partition("=")
        other = name.strip().lower() == "charset" and value.strip().strip("\"'").lower() not in ENCODINGS
        if other and not body.isascii():
            raise Unreadable(f"content type {content!r}: the body is in another encoding: send JSON text in UTF-8")


def check_list(value: object, where: str) -> None:
    """Refuse text or bytes where a list is expected: each character would count as an item.

    Raises:
        ConfigurationError: The value is text or bytes.

    Example:
        >>> check_list("clock", "allow")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: allow='clock' has to be a list: write allow=['clock']
    """
    if isinstance(value, str | bytes):
        raise ConfigurationError(f"{where}={value!r} has to be a list: write {where}=[{value!r}]")


def parse(body: bytes) -> Any:
    """Read JSON strictly, with exact numbers. A byte order mark before it is skipped.

    Whole numbers are integers, so that 1, 1.0 and 1e0 are one value.

    Raises:
        Unreadable: The body is too large, not UTF-8 or not JSON, has a key twice, NaN, a lone surrogate,
            or a fraction with more digits than a float keeps.

    Example:
        >>> parse(b'{"id": 7, "price": 1.50}')
        {'id': 7, 'price': 1.5}
        >>> parse(b"[1e23, 3.3e+23]")
        [100000000000000000000000, 330000000000000000000000]
        >>> parse(b'{"id": 7, "id": 8}')
        Traceback (most recent call last):
        idemp.errors.Unreadable: the body is not JSON: an object has the key 'id' twice
    """
    if len(body) > MAX_BODY_BYTES:
        raise Unreadable(f"the body has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are read")
    try:
        text = body.decode()
        document = _decode(text.removeprefix(BOM))
        if "\\u" in text:  # an escape may be a lone surrogate, which no database stores
            json.dumps(document, ensure_ascii=False).encode()
    except (ArithmeticError, ValueError, RecursionError) as error:  # a decimal exponent may be beyond all bounds
        raise Unreadable(f"the body is not JSON: {error}") from None
    return document


def member_text(body: bytes, name: str) -> bytes | None:
    """Return the JSON text of a member of an object that `parse` has read; None if the object has no such member.

    Example:
        >>> member_text(b'{"id": 7, "data": {"x": 1E0}}', "data")
        b'{"x": 1E0}'
    """
    text, skip = body.decode(), PUNCTUATION.match
    at = text.index("{") + 1
    while (start := skip(text, at)) and text[start.end()] != "}":
        key, at = _decoder.raw_decode(text, start.end())
        colon = skip(text, at)
        assert colon is not None
        _, at = _decoder.raw_decode(text, colon.end())
        if key == name:
            return text[colon.end() : at].encode()
    return None


def encode(message: BaseModel | Mapping[str, Any]) -> bytes:
    """Return the JSON text of a message, as a strict reader takes it.

    Raises:
        UnusableOutput: The text could not be read back: NaN, infinity, equal keys or a body that is too large.

    Example:
        >>> encode({"order_id": 7})
        b'{"order_id": 7}'
        >>> encode({"price": float("nan")})
        Traceback (most recent call last):
        idemp.errors.UnusableOutput: the message cannot be read back: the body is not JSON: NaN is not JSON
    """
    try:
        if isinstance(message, BaseModel):
            body = message.model_dump_json(by_alias=True).encode()
            if b"null" in body and not _is_finite(message.model_dump()):
                raise UnusableOutput(f"a {type(message).__name__} has NaN or infinity, which JSON cannot hold: use None or text")
        else:
            body = json.dumps(message, ensure_ascii=False).encode()
        parse(body)
    except UnusableOutput:
        raise
    except Exception as error:
        raise UnusableOutput(f"the message cannot be read back: {error}") from error
    return body


def read_properties(data: bytes) -> dict[str, Any]:
    """Return properties from their stored bytes; `UNREADABLE` alone if another program wrote something else.

    Example:
        >>> read_properties(b'{"type": "shop.Pay"}'), read_properties(b"[]")
        ({'type': 'shop.Pay'}, {'unreadable': 'W10='})
    """
    try:
        properties = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        properties = None
    if isinstance(properties, dict):
        return properties
    raw = data if isinstance(data, bytes) else str(data).encode("utf-8", "replace")  # SQLite stores values of any type
    return {UNREADABLE: b64encode(raw).decode()}


def read_history(data: bytes) -> list[dict[str, Any]]:
    """Return the failures of a message from their stored bytes; `SPOILT` alone if these are damaged.

    Example:
        >>> read_history(b"[]"), read_history(b"{") == [SPOILT]
        ([], True)
    """
    try:
        history = json.loads(data)
        entries = [{"at": 0.0} | entry for entry in history]
        fits = (isinstance(entry[name], kind) for entry in entries for name, kind in ENTRY.items())
        if isinstance(history, list) and all(fits) and all(entry["times"] >= 0 <= entry["at"] < YEAR_5138 for entry in entries):
            return history
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    return [dict(SPOILT)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return document


def _number(text: str) -> float | int:
    value, exact = float(text), Decimal(text)
    if not math.isinf(value):
        if exact == exact.to_integral_value():
            return int(exact)
        if exact == Decimal(repr(value)):
            return value
    raise ValueError("a number has more digits than a float keeps: send it as text")


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_decoder: Final = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)
_decode: Final = _decoder.decode


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple | set | frozenset) else True
