"""From Python objects to message bodies and back: pydantic models, dataclasses and plain dicts, all as JSON."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from idemp.encodings import check_key_fields, encoding_of
from idemp.errors import ConfigurationError, OutputError, UndecodableMessage
from idemp.exact import ExactEncoder, has_decimals
from idemp.key_types import check_key_types
from idemp.messages import canonical_json, read_strictly
from idemp.showing import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_COMPACT: Final = ExactEncoder(str, separators=(",", ":"), ensure_ascii=False)


class Codec:
    """Decodes and encodes bodies of one message class.

    Args:
        cls: a pydantic model, a dataclass, or `dict`.

    Raises:
        ConfigurationError: a class of another kind.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Reserve:
        ...     sku: str
        >>> codec = Codec(Reserve)
        >>> codec.encode(codec.decode({"sku": "A-1"}))
        b'{"sku":"A-1"}'
    """

    def __init__(self, cls: type[Any]) -> None:
        if not is_message_class(cls):
            raise ConfigurationError(
                f"{getattr(cls, '__name__', cls)!r} is no message class.",
                fix="Use a pydantic model, a dataclass or dict.",
            )
        self.cls = cls
        self._adapter: TypeAdapter[Any] | None = None if cls is dict else TypeAdapter(cls)

    @property
    def adapter(self) -> TypeAdapter[Any] | None:
        """Pydantic's adapter, `None` for dicts."""
        return self._adapter

    def decode(self, payload: Any, canonical: bytes | None = None) -> Any:
        """An object of the class from a JSON value, whose `canonical_json` the caller may have.

        Raises:
            UndecodableMessage: it does not fit; the error names the fields, never their values.
        """
        if self._adapter is None:
            if isinstance(payload, dict):
                return payload
            raise UndecodableMessage(f"The body is a JSON {type(payload).__name__}, not an object.")
        text = canonical_json(payload) if canonical is None else canonical
        try:
            # As JSON, so that a strict model still takes a UUID or a date from the text that JSON has for them.
            value = self._adapter.validate_json(text)
        except ValidationError as error:
            raise UndecodableMessage(
                f"The body does not fit {self.cls.__name__}: {_findings(error)}.",
                fix="Mend the producer or the message class.",
            ) from None
        return self._decode_exactly(self._adapter, payload) if has_decimals(payload, text) else value

    def _decode_exactly(self, adapter: TypeAdapter[Any], payload: Any) -> Any:
        """Decode a payload that fits as JSON from Python values: from JSON, pydantic rounds numbers to floats."""
        refusal = f"The body has numbers with more digits than a float holds, which {self.cls.__name__} can't take"
        fix = "Have the producer send them as text, or declare their fields as Decimal or float."
        if self._bytes_are_encoded:  # pydantic decodes them in JSON only
            raise UndecodableMessage(f"{refusal} beside bytes in base64 or hex.", fix=fix)
        try:
            return adapter.validate_python(payload, strict=False)
        except ValidationError as error:
            raise UndecodableMessage(f"{refusal}: {_findings(error)}.", fix=fix) from None

    @cached_property
    def _bytes_are_encoded(self) -> bool:
        return self._adapter is not None and _has_encoded_bytes(self._adapter.core_schema, set())

    def encode(self, value: Any) -> bytes:
        """Return the JSON body of an object: one that every consumer of idemp can read.

        Raises:
            ValueError: there is none. Two keys are the same in JSON, as 1 and "1" are, or a number is not finite, or
                beyond the range of a float.
            TypeError: JSON has no such value.
        """
        if self._adapter is None:
            body = _COMPACT.encode(value).encode("utf-8")
            read_strictly(body)
            return body
        body = self._adapter.dump_json(value, by_alias=True)
        written = read_strictly(body)
        # Pydantic writes null for numbers that JSON does not have, and the number would be lost.
        if b"null" in body and _is_lost(self._adapter.dump_python(value, by_alias=True), written):
            raise ValueError("a number is not finite, and JSON has no NaN and no infinity")
        return body

    def check_fields(self, paths: Iterable[str]) -> None:
        """See that body fields which a key names exist in the class; nested ones are checked to their first level.

        Raises:
            ConfigurationError: one does not.
        """
        known = field_names(self.cls)
        if known is None:
            return
        for path in paths:
            name = path.partition(".")[0]
            if name not in known:
                raise ConfigurationError(
                    f"{self.cls.__name__} has no field {name!r}, which the policy names as key.",
                    fix=f"Its fields are {', '.join(sorted(known))}.",
                )

    def check_key(self, paths: Iterable[str]) -> None:
        """See that a key's fields exist and can hold an id, and that no default makes up another id each time.

        Raises:
            ConfigurationError: one does not, can't, or has a `default_factory`.
        """
        paths = tuple(paths)
        self.check_fields(paths)
        check_key_fields(self.cls, paths)
        check_key_types(self.cls, paths)

    def encoding(self, paths: Iterable[str]) -> str:
        """Return how body fields become part of an id; see `idemp.encodings`."""
        return encoding_of(self.cls, paths)


class Types:
    """Names of message classes, both ways, and their codecs.

    Example:
        >>> types = Types()
        >>> types.register(dict, "stock.Reserve").encode({"sku": "A-1"})
        b'{"sku":"A-1"}'
    """

    def __init__(self) -> None:
        self._codecs: dict[type[Any], Codec] = {}
        self._names: dict[type[Any], str] = {}

    def register(self, cls: type[Any], name: str) -> Codec:
        """Make a class known under a type name."""
        if cls is not dict:
            self._names.setdefault(cls, name)
        return self.codec(cls)

    def codec(self, cls: type[Any]) -> Codec:
        """The codec of a class, made at its first use."""
        found = self._codecs.get(cls)
        if found is None:
            found = self._codecs[cls] = Codec(cls)
        return found

    def name_of(self, cls: type[Any]) -> str:
        """The type name of a class: registered, else `__message_type__`, else `package.Class` with a warning."""
        found = self._names.get(cls)
        if found is None:
            found = self._names[cls] = type_name(cls)
        return found

    def encode(self, value: Any, name: str | None) -> tuple[str, bytes]:
        """Type name and body of an outgoing message.

        Raises:
            OutputError: no message, or a dict without a type name.
        """
        cls = dict if isinstance(value, Mapping) else type(value)
        if not is_message_class(cls):
            raise OutputError(
                f"A value of type {cls.__name__} is no message.",
                fix="Return or emit pydantic models, dataclasses, or dicts with type=.",
            )
        if cls is dict and name is None:
            raise OutputError("A dict was emitted without a type name.", fix='Say type="package.Name".')
        try:
            return name or self.name_of(cls), self.codec(cls).encode(value)
        except (ValueError, TypeError, RecursionError) as error:
            raise OutputError(
                f"A message of type {name or cls.__name__} can't be written as JSON: {text_of(error)}."
            ) from error


def _findings(error: ValidationError) -> str:
    findings = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in findings[:5])


def _is_lost(value: Any, written: Any) -> bool:
    """Whether a number within a value has become null."""
    if isinstance(value, float):
        return written is None and not math.isfinite(value)
    if isinstance(value, Mapping) and isinstance(written, dict):
        return any(_is_lost(item, written.get(str(name))) for name, item in value.items())
    if isinstance(value, list | tuple) and isinstance(written, list) and len(value) == len(written):
        return any(map(_is_lost, value, written))
    return False


def _has_encoded_bytes(schema: object, seen: set[int]) -> bool:
    if id(schema) in seen:
        return False
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("val_json_bytes") in {"base64", "hex"}:
            return True
        return any(_has_encoded_bytes(item, seen) for item in schema.values())
    return isinstance(schema, list | tuple) and any(_has_encoded_bytes(item, seen) for item in schema)


def is_message_class(cls: object) -> bool:
    """Whether objects of this class can be messages."""
    if not isinstance(cls, type):
        return False
    return cls is dict or issubclass(cls, BaseModel) or dataclasses.is_dataclass(cls)


def type_name(cls: type[Any]) -> str:
    """`__message_type__` of a class, else `package.Class` with a warning: names that follow the code break when it moves.

    Example:
        >>> class PlaceOrder:
        ...     __message_type__ = "orders.PlaceOrder"
        >>> type_name(PlaceOrder)
        'orders.PlaceOrder'
    """
    declared = getattr(cls, "__message_type__", None)
    if isinstance(declared, str):
        return declared
    package = cls.__module__.rpartition(".")[0] or cls.__module__
    name = f"{package}.{cls.__name__}"
    warnings.warn(
        f"{cls.__qualname__} has no message type name; {name!r} is taken from where its code lives. "
        f'Say type="…" at its handler, or __message_type__ = "…" in the class.',
        UserWarning,
        stacklevel=4,
    )
    return name


def field_names(cls: type[Any]) -> set[str] | None:
    """The fields of a message class, `None` where anything goes (dict)."""
    if issubclass(cls, BaseModel):
        return set(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return {item.name for item in dataclasses.fields(cls)}
    return None
