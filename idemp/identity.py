"""What makes two deliveries "the same message": keys, effective ids and derived output ids.

Everything here is a pure function of its arguments and is *versioned*: stored rows and ids on the wire depend on it, so
`tests/test_identity.py` holds golden vectors, and a change of a derivation needs a new version beside the old.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote
from uuid import UUID

from idemp.canonical import encode, encoded_texts, plain_decimal
from idemp.errors import ConfigurationError, InvalidId, MissingId, UnaddressableMessage, UnorderableMessage
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, canonical_json, parse_json

if TYPE_CHECKING:
    from idemp.messages import Message

IDENTITY_VERSION: Final = 1
MAX_ID_BYTES: Final = 255
"""Longest id in UTF-8 bytes. It is checked here, because a database that truncates would make two ids one."""
REPLACEMENT: Final = "\ufffd"
"""The character that stands for bytes that are not UTF-8: a text that contains it can stand for several ids."""

_ID_DERIVATION: Final = f"idemp-id-{IDENTITY_VERSION}"
_OUTPUT_DERIVATION: Final = f"idemp-output-{IDENTITY_VERSION}"
TIME_ORDERED: Final = 7
"""The version of UUIDs that carry their time (RFC 9562)."""
_OWN_DIGEST: Final = 8  # a version of UUIDs, RFC 9562
_UUID_CHARACTERS: Final = 36

KeyValue = str | int | bool | UUID | date | Decimal
Scope = Literal["envelope", "header", "body", "initiation", "prepared"]

_FIELD_SEPARATOR: Final = ","
_LISTED: Final = b"l"
"""What stands before the value of a list of one, which is not that value. No tag of `encode` is the same."""
_OWNERS: Final[Mapping[str, str]] = {"initiation": "initiation", "prepared": "prepared message"}
"""Whose ids are texts alone, as their signatures say."""
_FIXES: Final[Mapping[str, str]] = {
    "header": "Have the producer send the header as text, or as a whole number.",
    "body": "Use text, a whole number, a UUID, a date or a decimal.",
}


@dataclass(frozen=True, slots=True)
class EffectiveId:
    """The id that the inbox counts by, within one consumer.

    Attributes:
        key: 16 bytes: a UUID as itself, else a digest (see `effective_id`).
        text: what a person would call the id; kept beside the key to tell collisions apart.

    Example:
        >>> effective_id("envelope", "order-17").text
        'order-17'
    """

    key: UUID
    text: str


def effective_id(
    scope: Scope, value: KeyValue | tuple[KeyValue, ...] | list[KeyValue], qualifier: str = ""
) -> EffectiveId:
    """The effective id of a key value.

    An id of the envelope that is a UUID in its canonical text is taken as itself, except for version 8, where our own
    digests live (RFC 9562, 5.8). All else becomes a 122-bit SHA-256 digest over a typed, length-prefixed encoding, so
    that `("a", "bc")` and `("ab", "c")`, or `1` and `"1"`, stay apart. A digest of a value that carries time (UUIDv7) is
    laid out as a UUIDv7 of the same time, which keeps the inbox's index append-only.

    Args:
        scope: where the value comes from; the same value from elsewhere is another id.
        value: the key, or several as a tuple; a list is what a header holds as such.
        qualifier: the message type for a body key, type and header for a header's; nothing for the others.

    Raises:
        InvalidId: empty or blank, longer than `MAX_ID_BYTES`, not UTF-8, or of a type that can't be a key; every id is
            checked here, wherever it comes from.

    Example:
        >>> effective_id("envelope", "0192c8a4-7d3e-7000-8000-000000000001").key
        UUID('0192c8a4-7d3e-7000-8000-000000000001')
        >>> effective_id("body", 1, "orders.Place").key == effective_id("body", "1", "orders.Place").key
        False
    """
    values = _checked(value, scope)
    if not values:
        raise InvalidId("The message's id is empty.", fix="Have the producer set it.")
    text = _FIELD_SEPARATOR.join(_key_text(item) for item in values)
    listed = isinstance(value, list) and len(values) == 1
    if listed:
        text = f"[{text}]"
    if scope == "body":
        text = f"{qualifier}#{text}"
    elif scope != "initiation":
        _check_readable(text)
    _check_length(text)
    plain = _as_plain_uuid(values) if scope == "envelope" else None
    if plain is not None:
        return EffectiveId(plain, text)
    told = encoded_texts(_ID_DERIVATION, scope, qualifier) + (_LISTED if listed else b"") + encode(values)
    digest = hashlib.sha256(told).digest()
    time = next((moment for moment in map(time_of, values) if moment is not None), None)
    return EffectiveId(_uuid_from_digest(digest, time), text)


def output_id(namespace: str, consumer: str, effective: UUID, ordinal: int) -> UUID:
    """The id of the output number `ordinal` of a handling: the same in every run, on every machine.

    A UUIDv7 with the input's time where that carries one, else a UUIDv8 (RFC 9562).

    Example:
        >>> output_id("idemp", "orders", UUID("0192c8a4-7d3e-7000-8000-000000000001"), 0)
        UUID('0192c8a4-7d3e-7677-900e-807ddb35411c')
    """
    told = output_beginning(namespace, consumer) + encode((effective, ordinal))
    return _uuid_from_digest(hashlib.sha256(told).digest(), time_of(effective))


def output_beginning(namespace: str, consumer: str) -> bytes:
    """What the ids of all outputs of a consumer are derived from, before their input's key and their ordinal."""
    return encoded_texts(_OUTPUT_DERIVATION, namespace, consumer)


def new_id(now: datetime) -> UUID:
    """A fresh, time-ordered id (UUIDv7) for what has none, such as an initiation.

    Example:
        >>> new_id(datetime(2026, 1, 1, tzinfo=UTC)).version
        7
    """
    return _uuid_from_digest(os.urandom(32), now)


def time_of(value: object) -> datetime | None:
    """The time inside an id, to the millisecond: of a UUIDv7, as a `UUID` or in canonical text.

    Example:
        >>> time_of("0192c8a4-7d3e-7000-8000-000000000001").isoformat()
        '2024-10-26T11:44:36.158000+00:00'
        >>> time_of("order-17") is None
        True
    """
    plain = value if isinstance(value, UUID) else _canonical_uuid(value) if isinstance(value, str) else None
    if plain is None or plain.version != TIME_ORDERED:
        return None
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=plain.int >> 80)
    except OverflowError:  # beyond the year 9999: 48 bits reach further than the calendar
        return None


def made_at(message: Message, body: Any = None, dated_by: Key | None = None) -> datetime | None:
    """When a message was made, as far as it says: the time in its id, else its timestamp; `None` if unknown.

    A timestamp makes no old id new, since whoever sends a message again may stamp it anew. An output is the exception: its
    id has the time of the first message of its chain, and idemp stamps and stores it when it is made.

    Args:
        message: out of its envelope.
        body: parsed, for `dated_by`.
        dated_by: where the policy says that the time stands; what is no time there counts for nothing.

    Example:
        >>> from idemp.messages import Message
        >>> id, stamp = "0192c8a4-7d3e-7000-8000-000000000001", datetime(2026, 1, 1, tzinfo=UTC)
        >>> made_at(Message(body=b"{}", message_id=id, timestamp=stamp)).year
        2024
        >>> made_at(Message(body=b"{}", message_id="order-17", timestamp=stamp)).year
        2026
    """
    if dated_by is not None and (found := _moment(dated_by.read(message, body))) is not None:
        return found
    own, stamped = time_of(message.message_id), _moment(message.timestamp)
    if own is None or stamped is None:
        return own or stamped
    return max(own, stamped) if message.causation_id is not None else own


def _moment(value: object) -> datetime | None:
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and _canonical_uuid(value) is None:
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return time_of(value)


@dataclass(frozen=True, slots=True)
class Key:
    """Where a message's id is read from. Build one with the class methods.

    Attributes:
        scope: "envelope" for ids that belong to the message, "header" and "body" for keys that count within its type.
        name: the key as error messages write it.
        read: takes the message and its parsed body, answers the value, or `None` where it is absent.
        fields: the body fields that it reads, checked against the model at start.
        by_type: `False` for a header's key as earlier releases derived ids from it: one id for all message types.

    Example:
        >>> Key.parse(["tenant", "order.id"]).name
        'field:tenant,order.id'
    """

    scope: Scope
    name: str
    read: Callable[[Message, Any], Any]
    fields: tuple[str, ...] = ()
    by_type: bool = True

    @property
    def descriptor(self) -> str:
        """The key as the stored identity policy writes it.

        Example:
            >>> Key.header("x-id").descriptor, Key.field("id").descriptor
            ('typed-header:x-id', 'field:id')
        """
        return f"typed-{self.name}" if self.scope == "header" and self.by_type else self.name

    @classmethod
    def message_id(cls) -> Key:
        """The message id of the envelope (default); of a CloudEvent, its source and id together."""

        def read(message: Message, _: Any) -> Any:
            source = message.headers.get(CLOUDEVENT_SOURCE_HEADER)
            return (source, message.message_id) if source and message.message_id else message.message_id

        return cls("envelope", "message_id", read)

    @classmethod
    def header(cls, name: str) -> Key:
        """An application header, for ids that outlive a transport's own; they count within the message type."""
        return cls("header", f"header:{name}", lambda message, _: message.headers.get(name))

    @classmethod
    def field(cls, *paths: str) -> Key:
        """One field of the body, or several; dots reach into nested ones.

        A datetime counts as it is written: one instant with two offsets (`Z`, `+01:00`) is two ids.
        """
        if not paths:
            raise ConfigurationError("Key.field() needs the path of a body field.")

        def read(_: Message, body: Any) -> Any:
            values = tuple(_dig(body, path) for path in paths)
            return None if any(value is None for value in values) else values

        return cls("body", f"field:{','.join(paths)}", read, paths)

    @classmethod
    def digest(cls) -> Key:
        """A digest of the whole payload: equal bodies are the same message, layout apart."""

        def read(message: Message, _: Any) -> Any:
            return hashlib.sha256(canonical_json(parse_json(message))).hexdigest()

        return cls("body", "digest", read)

    @classmethod
    def cloudevent(cls) -> Key:
        """CloudEvents identity, required: source and id together (CloudEvents 1.0, section 3.1)."""

        def read(message: Message, _: Any) -> Any:
            source = message.headers.get(CLOUDEVENT_SOURCE_HEADER)
            return (source, message.message_id) if source and message.message_id else None

        return cls("envelope", "cloudevent", read)

    @classmethod
    def call(cls, function: Callable[[Any], Any], name: str = "") -> Key:
        """A function of the parsed body. Give it a name where the stored identity policy must outlive a refactoring.

        Raises:
            ConfigurationError: a function of Python's own without a name, such as `id`: quotes were forgotten.
        """
        if not name and getattr(function, "__module__", None) == "builtins":
            named = getattr(function, "__name__", repr(function))
            raise ConfigurationError(
                f"The function {named}() of Python's own is no key.",
                fix=f'Write key="{named}" for the field of the body, or Key.call({named}, "a name of yours").',
            )
        return cls(
            "body", f"call:{name or f'{function.__module__}.{function.__qualname__}'}", lambda _, body: function(body)
        )

    @classmethod
    def parse(cls, value: object) -> Key:
        """A key from what users write in code or files: a `Key`, a field name, several, a function, or a table.

        Raises:
            ConfigurationError: nothing of these.

        Example:
            >>> Key.parse({"header": "x-id"}).name, Key.parse("message_id()").name
            ('header:x-id', 'message_id')
        """
        match value:
            case Key():
                return value
            case str() if value.endswith("()") and value[:-2] in _PLAIN_KEYS:
                return _PLAIN_KEYS[value[:-2]]()
            case str():
                return cls.field(value)
            case [*paths] if all(isinstance(path, str) for path in paths):
                return cls.field(*map(str, paths))
            case {"header": str(name)} if len(value) == 1:  # type: ignore[arg-type]
                return cls.header(name)
            case {"field": str(path)} if len(value) == 1:  # type: ignore[arg-type]
                return cls.field(path)
            case _ if callable(value):
                return cls.call(value)
        raise ConfigurationError(
            f"{value!r} is no key.",
            fix='Write a body field ("order_id"), a list of them, a function, {header = "x-id"}, or one of '
            + ", ".join(f'"{name}()"' for name in _PLAIN_KEYS)
            + ".",
        )

    def effective(self, message: Message, body: Any, message_type: str) -> EffectiveId:
        """The effective id of one message.

        Raises:
            MissingId: the message has no such key.
            InvalidId: the value can't be a key.
        """
        value = self.read(message, body)
        if value is None or value in ((), []):
            raise MissingId(
                f"The message of type {message_type!r} lacks its id ({self.name}).",
                fix="Have the producer set it, or choose another key in the type's policy; idemp never invents one.",
            )
        qualifier = {"body": message_type, "header": self.name}.get(self.scope, "")
        if self.scope == "header" and self.by_type:
            qualifier = f"{message_type}\x00{self.name}"  # no type's name has a NUL
        if isinstance(value, list) and not (self.scope == "header" and self.by_type):
            value = tuple(
                value
            )  # what a function returns; and earlier releases took a header's list of one for its item
        return effective_id(self.scope, value, qualifier)

    def order(self, message: Message, body: Any, message_type: str) -> bytes:
        """What messages that keep their order have in common: equal for equal values, of whatever type.

        Values count as texts: one type may read a number as such, and another one as text.

        Raises:
            UnorderableMessage: the message has no such value, or one that can't be compared.

        Example:
            >>> from uuid import UUID
            >>> from idemp.messages import Message
            >>> key, message, text = Key.field("id"), Message(body=b""), "3b8d6b4e-6d3e-4d5c-9a7e-0d6d1f3f8b11"
            >>> key.order(message, {"id": text}, "shop.Place") == key.order(message, {"id": UUID(text)}, "shop.Cancel")
            True
        """
        try:
            texts = self._texts(message, body)
        except InvalidId as error:
            raise self._unorderable(message_type, error.message) from error
        if not texts:
            raise self._unorderable(message_type, "There is none.")
        return encode(texts)

    def entity(self, message: Message, body: Any, message_type: str) -> str:
        """The name of the thing that a message is about: equal for equal values, of whatever type.

        Of several values each is percent-encoded (RFC 3986), and slashes stand between them.

        Raises:
            UnaddressableMessage: the message has no such value, or one that can't be a name.

        Example:
            >>> from idemp.messages import Message
            >>> Key.field("id").entity(Message(body=b""), {"id": "order/7"}, "shop.Place")
            'order/7'
            >>> Key.field("tenant", "id").entity(Message(body=b""), {"tenant": "a/b", "id": 7}, "shop.Place")
            'a%2Fb/7'
        """
        try:
            values = self._texts(message, body)
            name = values[0] if len(values) == 1 else "/".join(quote(each, safe="") for each in values)
            _check_length(name)
        except InvalidId as error:
            raise self._unaddressable(message_type, error.message) from error
        if not name:
            raise self._unaddressable(message_type, "There is none.")
        return name

    def _texts(self, message: Message, body: Any) -> list[str]:
        """The values as texts; none if there is no value.

        Raises:
            InvalidId: one can't be compared with those of other messages.
        """
        value = self.read(message, body)
        texts = [_key_text(each) for each in _checked(() if value is None else value, self.scope)]
        if self.scope != "body":
            _check_readable("".join(texts))
        return texts

    def _unaddressable(self, message_type: str, why: str) -> UnaddressableMessage:
        return UnaddressableMessage(
            f"The message of type {message_type!r} does not say what it is about ({self.name}): {why}",
            fix="Have the producer set it, or choose another entity in the type's policy.",
        )

    def _unorderable(self, message_type: str, why: str) -> UnorderableMessage:
        return UnorderableMessage(
            f"The message of type {message_type!r} has no value to order it by ({self.name}): {why}",
            fix="Have the producer set it, or choose another ordered_by in the type's policy.",
        )


_PLAIN_KEYS: Final[Mapping[str, Callable[[], Key]]] = {
    "message_id": Key.message_id,
    "digest": Key.digest,
    "cloudevent": Key.cloudevent,
}


def _checked(value: Any, scope: Scope) -> tuple[KeyValue, ...]:
    several = isinstance(value, list | tuple) and scope not in _OWNERS
    return tuple(_checked_one(item, scope) for item in value) if several else (_checked_one(value, scope),)


def _checked_one(value: Any, scope: Scope) -> KeyValue:
    owner = _OWNERS.get(scope)
    types = str if owner is not None else str | UUID if scope == "envelope" else str | int | UUID | date | Decimal
    if not isinstance(value, types):
        whose = (
            f"the id of an {owner}"
            if scope == "initiation"
            else f"the key of a {owner}"
            if owner
            else "(part of) an id"
        )
        raise InvalidId(
            f"A value of type {type(value).__name__} can't be {whose}.",
            fix=_FIXES.get(scope, "Use a text, or no id at all." if owner else "Have the producer send it as text."),
        )
    if isinstance(value, str) and not value.strip():
        raise InvalidId(
            f"The {owner or 'message'}'s id is empty.",
            fix="Use a text that says which one it is, or no id at all." if owner else "Have the producer set it.",
        )
    if isinstance(value, Decimal) and not value.is_finite():
        raise InvalidId(f"{value} can't be (part of) an id.", fix="Use a number that is one.")
    return value


def _check_readable(text: str) -> None:
    if REPLACEMENT in text:
        raise InvalidId(
            f"The message's id {text!r} has bytes that are not UTF-8 (shown as U+FFFD); other ids may look the same.",
            fix="Have the producer send ids as UTF-8 text, such as the hexadecimal digits of binary ones.",
        )


def _check_length(text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidId("The message's id is no valid Unicode text.", fix="Mend the producer.") from error
    if size > MAX_ID_BYTES:
        raise InvalidId(
            f"The message's id is {size} bytes long; {MAX_ID_BYTES} is the limit.",
            fix="Shorten it, or use Key.digest() or a function as the type's key.",
        )
    if "\x00" in text:
        raise InvalidId("The message's id contains a NUL character.", fix="Mend the producer.")


def _as_plain_uuid(values: Sequence[KeyValue]) -> UUID | None:
    if len(values) != 1:
        return None
    value = values[0]
    plain = value if isinstance(value, UUID) else _canonical_uuid(value) if isinstance(value, str) else None
    return None if plain is None or plain.version == _OWN_DIGEST else plain


def _canonical_uuid(text: str) -> UUID | None:
    # Only the canonical text is the UUID: "{…}", upper case and missing hyphens are other ids.
    if len(text) != _UUID_CHARACTERS or text[8] != "-":
        return None
    try:
        value = UUID(text)
    except ValueError:
        return None
    return value if str(value) == text else None


def _uuid_from_digest(digest: bytes, time: datetime | None) -> UUID:
    number = int.from_bytes(digest[:16], "big")
    version = _OWN_DIGEST
    if time is not None:
        version = TIME_ORDERED
        milliseconds = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
        number = (number & ((1 << 80) - 1)) | (milliseconds << 80)
    number = number & ~(0xF << 76) | (version << 76)
    number = number & ~(0x3 << 62) | (0x2 << 62)
    return UUID(int=number)


def _key_text(value: KeyValue) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return plain_decimal(value)
    return str.__str__(value) if isinstance(value, str) else str(value)


def _dig(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else getattr(body, name, None)
        if body is None:
            return None
    return body
