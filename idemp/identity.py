"""Keys, fingerprints and output ids. All come from the JSON text or the properties of a message, never from a model.

Each value here is stored for a retention window, and released versions compare their values with stored ones:
the golden vectors in the tests must never change.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, Final, Literal
from uuid import UUID

from idemp.cloudevents import SOURCE, says_id
from idemp.errors import ConfigurationError, Unreadable
from idemp.messages import Delivery, check_text

__all__ = [
    "Identify",
    "Key",
    "event_id",
    "fingerprint",
    "key_scope",
    "made_at",
    "message_digest",
    "message_key",
    "name_number",
    "one_case",
    "output_id",
    "toml",
    "uuid7",
]

Identify = Callable[[Mapping[str, Any], Any], tuple[str, UUID]]
"""Reads original id and message key from the properties and the JSON document of a message."""

EARLIEST: Final = 1_577_836_800.0  # 2020: an earlier time is taken for something else
DAY: Final = 86_400.0
LARGEST: Final = 1e15  # a greater timestamp is ignored: an integer may be too large for a float
ADDED: Final = re.compile(r"x-(?:delivery-count|acquired-count|death|first-death-.*|last-death-.*)")
"""Headers that RabbitMQ adds to a message on its way."""
EVENTS: Final = "cloudevent"
"""Scope of the ids of CloudEvents; other scopes have a `#`."""
KINDS: Final = {
    int: "an integer", float: "a fraction", str: "text", bool: "a boolean", list: "an array", dict: "an object"
}  # fmt: skip
CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
CANONICAL_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
UUID_TEXT: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
UPPER_CASE_UUID: Final = re.compile(r'"(?=[^"]*[A-F])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"')


def digest(*parts: str | bytes) -> bytes:
    """Return 16 bytes that identify a list of parts; each part is prefixed with its length.

    Example:
        >>> digest("ab", "c") == digest("a", "bc")
        False
    """
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big") + data)
    return state.digest()


_BODY: Final = blake2b(b"\0" * 7 + b"\x0aidemp.body", digest_size=16)
"""The state of `digest` behind its first part, `idemp.body`."""


def uuid7(at: float | None = None) -> str:
    """Return a new time-ordered UUID as text (RFC 9562, version 7).

    Args:
        at: Its time, in seconds since 1970; by default now.

    Example:
        >>> UUID(uuid7()).version, uuid7(1713691951.104)[:13]
        (7, '018f0000-0000')
    """
    milliseconds = time.time_ns() // 1_000_000 if at is None else round(at * 1000)
    raw = bytearray(milliseconds.to_bytes(6, "big") + os.urandom(10))
    raw[6], raw[8] = 0x70 | raw[6] & 0x0F, 0x80 | raw[8] & 0x3F
    return str(UUID(bytes=bytes(raw)))


def made_at(properties: Mapping[str, Any]) -> float | None:
    """Return when a message was made, in seconds since 1970: the time in its UUIDv7, else its timestamp.

    Of both, only a plausible time counts, from 2020 to tomorrow: other layouts and digests look like a UUIDv7, too, and some
    producers write milliseconds.

    Example:
        >>> made_at({"message_id": "018f0000-0000-7000-8000-000000000000"})
        1713691951.104
        >>> made_at({"message_id": "7", "timestamp": 1.7e9}), made_at({"timestamp": 1.7e12}), made_at({"timestamp": 5})
        (1700000000.0, 1700000000.0, None)
    """
    id, stamp = properties.get("message_id"), properties.get("timestamp")
    latest = time.time() + DAY
    if (
        isinstance(id, str)
        and _version(id.lower()) == "7"
        and EARLIEST <= (moment := int(id[:8] + id[9:13], 16) / 1000) <= latest
    ):
        return moment
    if isinstance(stamp, int | float) and not isinstance(stamp, bool) and abs(stamp) < LARGEST:
        for moment in (stamp, stamp / 1000):
            if EARLIEST <= moment <= latest:
                return float(moment)
    return None


def message_key(original: str, text: str, scope: str | None) -> UUID:
    """Return the key under which an id is claimed.

    A canonical lower-case UUID other than version 8 is its own key. Anything else becomes a digest in a UUIDv8 (RFC 9562), so no
    producer can choose an id that equals another's digest. The first 48 bits of a UUIDv7 or UUIDv8 are kept, so that keys stay
    ordered by time.

    Args:
        original: The id with its JSON type, as `Key` writes it.
        text: The bare id.
        scope: Scope of the key, from `key_scope`.

    Example:
        >>> message_key("s:018f0000-0000-7000-8000-000000000000", "018f0000-0000-7000-8000-000000000000", None)
        UUID('018f0000-0000-7000-8000-000000000000')
        >>> message_key("i:7", "7", "shop.Pay")
        UUID('db6aa3b9-cba9-8f8c-b3ae-490a2d9a1922')
    """
    version = _version(text)
    if scope is None and version is not None and version != "8":
        return UUID(int=int(text.replace("-", ""), 16))
    ordered = bytes.fromhex(text[:8] + text[9:13]) if version is not None and version in "78" else None
    return _version8(digest("idemp.message", scope or "", original), ordered)


def key_scope(type: str, descriptor: str) -> str | None:
    """Return the scope of a key: type and place of the id, so that ids under a former key of a type never equal present ones.

    Ids of envelopes share one scope.

    Example:
        >>> key_scope("shop.Pay", "body:id"), key_scope("shop.Pay", "header:x-id"), key_scope("shop.Pay", "message_id:")
        ('shop.Pay#body:id', 'shop.Pay#header:x-id', None)
    """
    return None if descriptor == "message_id:" else f"{type}#{descriptor}"


def output_id(consumer: str, key: UUID, ordinal: int) -> str:
    """Return the id of an output: the same for each execution of one message.

    The digest is SHA-256, because databases can compute it: `idemp.bulk` gives a chunk of outputs its ids there.

    Args:
        consumer: Name of the consumer.
        key: Key of the handled message.
        ordinal: Position among its outputs, from 0.

    Example:
        >>> output_id("billing", UUID("018f0000-0000-7000-8000-000000000000"), 0)
        '018f0000-0000-893c-8a9d-fd6e7c861d12'
    """
    ordered = key.bytes[:6] if key.version in (7, 8) else None
    number = str(ordinal).encode()
    data = b"".join((output_scope(consumer), key.bytes, len(number).to_bytes(8, "big"), number))
    return str(_version8(sha256(data).digest()[:16], ordered))


@lru_cache(maxsize=64)
def output_scope(consumer: str) -> bytes:
    """Return the first part of the bytes that an output id digests; key, length of the ordinal and ordinal follow.

    Example:
        >>> output_scope("billing")[8:20]
        b'idemp.output'
    """
    parts = [b"idemp.output", consumer.encode()]
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts) + (16).to_bytes(8, "big")


def fingerprint(document: Any) -> bytes:
    """Return the digest of a JSON document: order of keys, white space and the case of UUIDs do not matter.

    Example:
        >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
        True
    """
    text = CANONICAL(document)
    if UPPER_CASE_UUID.search(text):  # seldom, so that most documents are encoded once
        text = CANONICAL(_in_one_case(document))
    data, state = text.encode(), _BODY.copy()
    state.update(len(data).to_bytes(8, "big") + data)
    return state.digest()


def message_digest(delivery: Delivery, kind: Literal["moved", "failed"]) -> bytes | None:
    """Return the identity of a row of `message` whose claim is not known: all that the producer wrote; None without an id.

    Headers that a broker adds to a copy do not count. A `moved` row and a `failed` row never have one identity.

    Example:
        >>> message_digest(Delivery("billing", {"message_id": "7"}, b"{}"), "failed").hex()
        '5dbaa1841529a1f2bd8355adbcf0fbe1'
        >>> message_digest(Delivery("billing", {}, b"{}"), "failed") is None
        True
    """
    written = dict(delivery.properties)
    if not written.get("message_id") and not says_id(written):
        return None
    if isinstance(headers := written.pop("headers", None), Mapping):
        headers = {name: value for name, value in headers.items() if not ADDED.fullmatch(str(name))}
    if headers:
        written["headers"] = headers
    text = json.dumps(written, sort_keys=True, default=str)
    return digest(f"idemp.{kind}", delivery.queue, text, delivery.body)


@lru_cache(maxsize=1024)
def name_number(kind: str, name: str) -> int:
    """Return the number of a consumer's or a type's name in the tables: positive, of 31 bits.

    The number is computed from the name, so that a database restored from an older copy cannot give it to another name.

    Example:
        >>> name_number("consumer", "billing")
        174019997
    """
    return int.from_bytes(digest("idemp.name", kind, name)[:4], "big") % (2**31 - 1) + 1


@dataclass(frozen=True)
class Key:
    """The place of the id in a message.

    A policy takes `Key.message_id()`, `Key.header("x-id")`, `Key.digest()`, the name of a JSON field, or a tuple of names.
    Fields are named as they are on the wire; a dot leads into an object. `str()` returns the key as a configuration file has it.

    Example:
        >>> Key.of("customer.id"), Key.of(("shop", "order_id")).descriptor
        (Key(kind='body', names=('customer.id',)), 'body:shop,order_id')
        >>> print(Key.of("order_id"), Key.header("x-id"), Key.message_id())
        "order_id" {header = "x-id"} {message_id = true}
    """

    kind: str
    names: tuple[str, ...] = ()

    @staticmethod
    def message_id() -> Key:
        """Return the key that reads the id of the envelope (AMQP's `message_id`).

        Example:
            >>> Key.message_id().descriptor
            'message_id:'
        """
        return Key("message_id")

    @staticmethod
    def header(name: str) -> Key:
        """Return the key that reads a header.

        Raises:
            ConfigurationError: The name is not usable; see `check_text`.

        Example:
            >>> Key.header("x-id").descriptor
            'header:x-id'
        """
        return Key("header", (check_text(name, "the header of a key"),))

    @staticmethod
    def digest() -> Key:
        """Return the key that digests the whole body: equal payloads are one message.

        Example:
            >>> Key.digest().descriptor
            'digest:'
        """
        return Key("digest")

    @staticmethod
    def of(value: object) -> Key:
        """Return the key that a policy names.

        Raises:
            ConfigurationError: The value is neither a key nor names of fields.

        Example:
            >>> Key.of(id)
            Traceback (most recent call last):
            idemp.errors.ConfigurationError: key=<built-in function id> is not a key: write a JSON field, a tuple of them, or Key.…()
        """
        if isinstance(value, Key):
            return value
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigurationError(f"key={value!r} is not a key: write a JSON field, a tuple of them, or Key.…()")
        return Key("body", tuple(names))

    @staticmethod
    def described(descriptor: str) -> Key:
        """Return the key with a descriptor.

        Example:
            >>> Key.described("body:shop,order_id").names
            ('shop', 'order_id')
        """
        kind, _, names = descriptor.partition(":")
        return Key(kind, tuple(names.split(",") if kind == "body" else filter(None, [names])))

    @property
    def descriptor(self) -> str:
        """Text that is stored with a consumer and compared at start."""
        return f"{self.kind}:{','.join(self.names)}"

    @property
    def option(self) -> str | list[str] | dict[str, Any]:
        """Value of the option `key` that configures this key."""
        if self.kind == "body":
            return self.names[0] if len(self.names) == 1 else list(self.names)
        return {self.kind: self.names[0] if self.names else True}

    def __str__(self) -> str:
        return toml(self.option)

    def reader(self, type: str) -> Identify:
        """Return the function that identifies messages of a type.

        Example:
            >>> Key.of("id").reader("shop.Pay")({}, {"id": 7})
            ('i:7', UUID('db4d038d-fd64-8489-af45-6154bcc5641c'))
            >>> Key.of("id").reader("shop.Pay")({}, {"id": None})
            Traceback (most recent call last):
            idemp.errors.Unreadable: field 'id' is null, which is not a usable id: text of 1 to 255 bytes, an integer or a boolean is
            >>> Key.of("id").reader("shop.Pay")({}, {"payment_id": 7})
            Traceback (most recent call last):
            idemp.errors.Unreadable: the message has no field 'id', which its key names: the body has payment_id
        """
        scope = key_scope(type, self.descriptor)
        if self.kind == "body":
            return _body_reader(self.names, scope)
        if self.kind == "header":
            return _header_reader(self.names[0], scope)
        return _envelope_id if self.kind == "message_id" else _digest_reader(scope)


def toml(value: Any) -> str:
    """Return a value as a configuration file has it.

    Example:
        >>> print(toml(["shop", "order_id"]), toml({"type": "shop.Pay", "key": {"message_id": True}}))
        ["shop", "order_id"] {type = "shop.Pay", key = {message_id = true}}
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {toml(member)}' for name, member in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def event_id(source: str, id: str) -> tuple[str, UUID]:
    """Return original id and message key of a CloudEvent, whose id is one of its source.

    Example:
        >>> event_id("/shop", "1")
        ('["s:/shop", "s:1"]', UUID('a90f2bb0-0f66-84f2-a3ae-4af7629ff123'))
    """
    id = one_case(id)
    original = json.dumps([f"s:{source}", f"s:{id}"], ensure_ascii=False)
    return original, message_key(original, id, EVENTS)


def _envelope_id(properties: Mapping[str, Any], _document: Any) -> tuple[str, UUID]:
    if (value := properties.get("message_id")) is None:
        raise Unreadable(
            "the message has no message_id: let its producer set one, or name another key, such as a field of the body"
        )
    text = check_text(value, "the message id", Unreadable)
    if SOURCE in properties:
        return event_id(properties[SOURCE], text)
    text = one_case(text)
    return f"s:{text}", message_key(f"s:{text}", text, None)


def _header_reader(name: str, scope: str | None) -> Identify:
    def read(properties: Mapping[str, Any], _document: Any) -> tuple[str, UUID]:
        headers = properties.get("headers") or {}
        if (value := headers.get(name)) is None:
            raise Unreadable(f"the message has no header {name!r}, which its key names: {_members(headers, 'there are headers')}")
        original, text = typed_id(value, f"header {name!r}")
        return original, message_key(original, text, scope)

    return read


def _digest_reader(scope: str | None) -> Identify:
    def read(_properties: Mapping[str, Any], document: Any) -> tuple[str, UUID]:
        original = f"d:{fingerprint(document).hex()}"
        return original, message_key(original, original, scope)

    return read


def _body_reader(names: tuple[str, ...], scope: str | None) -> Identify:
    paths = [(f"field {name!r}", name.split(".")) for name in names]

    def read(_properties: Mapping[str, Any], document: Any) -> tuple[str, UUID]:
        ids = []
        for where, path in paths:
            value = document
            for step in path:
                value = value.get(step) if isinstance(value, dict) else None
            if value is None:
                raise _missing(where, path, document)
            ids.append(typed_id(value, where))
        if len(ids) == 1:
            return ids[0][0], message_key(*ids[0], scope)
        original = json.dumps([original for original, _ in ids], ensure_ascii=False)
        return original, message_key(original, original, scope)

    return read


def typed_id(value: object, where: str) -> tuple[str, str]:
    """Return an id with and without its JSON type: text, an integer or a boolean. UUIDs are returned in lower case.

    Raises:
        Unreadable: The value is anything else, or text that not every database keeps.

    Example:
        >>> typed_id(True, "field 'paid'"), typed_id(7, "field 'id'"), typed_id("7", "field 'id'")
        (('b:true', 'true'), ('i:7', '7'), ('s:7', '7'))
    """
    if isinstance(value, bool):  # before int, because a bool is an int in Python
        text = "true" if value else "false"
        return f"b:{text}", text
    if isinstance(value, int) and -(10**100) < value < 10**100:
        return f"i:{value}", str(value)
    if isinstance(value, str):
        text = one_case(check_text(value, where, Unreadable))
        return f"s:{text}", text
    kind = "an integer of more than 100 digits" if isinstance(value, int) else _kind(value)
    raise Unreadable(f"{where} is {kind}, which is not a usable id: text of 1 to 255 bytes, an integer or a boolean is")


def _missing(where: str, path: list[str], document: Any) -> Unreadable:
    """Return the error about a field of a key that has no value: its name, and what the message has instead."""
    value, looked_at = document, "the body"
    for step in path:
        if not isinstance(value, dict):
            return Unreadable(f"the message has no {where}, which its key names: {looked_at} is {_kind(value)}, not an object")
        if step not in value:
            return Unreadable(f"the message has no {where}, which its key names: {_members(value, f'{looked_at} has')}")
        value, looked_at = value[step], f"its {step!r}"
    return Unreadable(f"{where} is null, which is not a usable id: text of 1 to 255 bytes, an integer or a boolean is")


def _members(mapping: Mapping[Any, Any], intro: str) -> str:
    names = ", ".join(map(str, sorted(mapping, key=str)[:20]))
    return f"{intro} {names if len(names) <= 400 else f'{names[:399]}…'}" if names else f"{intro} none"


def _kind(value: object) -> str:
    return "null" if value is None else KINDS.get(type(value), f"of the type {type(value).__name__}")


def one_case(text: str) -> str:
    """Return a UUID in lower case, as fingerprints have it; other text as it is.

    Example:
        >>> one_case("018F0000-0000-7000-8000-00000000000A"), one_case("A")
        ('018f0000-0000-7000-8000-00000000000a', 'A')
    """
    return text.lower() if len(text) == 36 and _version(text) is None and UUID_TEXT.fullmatch(text) else text


def _in_one_case(value: Any) -> Any:
    if isinstance(value, str):
        return one_case(value)
    if isinstance(value, dict):
        return {one_case(name): _in_one_case(each) for name, each in value.items()}
    return [_in_one_case(each) for each in value] if isinstance(value, list) else value


@lru_cache(maxsize=4)  # an id is asked for several times in a row
def _version(text: str) -> str | None:
    """Return the version of a canonical lower-case UUID; `-` for another variant than that of RFC 9562, None for any other text."""
    if len(text) != 36 or CANONICAL_UUID.fullmatch(text) is None:
        return None
    return text[14] if text[19] in "89ab" else "-"


def _version8(value: bytes, ordered: bytes | None) -> UUID:
    raw = bytearray((ordered or value[:6]) + value[6:])
    raw[6], raw[8] = 0x80 | raw[6] & 0x0F, 0x80 | raw[8] & 0x3F
    return UUID(bytes=bytes(raw))
