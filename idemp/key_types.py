"""Which fields of message classes can be (part of) an id: checked at start, before each message is parked."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import deque
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, get_origin
from uuid import UUID

from pydantic import (
    AnyUrl,
    BaseModel,
    IPvAnyAddress,
    IPvAnyInterface,
    IPvAnyNetwork,
    PostgresDsn,
    SecretBytes,
    SecretStr,
)

from idemp.encodings import fields_of, nested_metadata, parts_of, validators_of
from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_key_types"]

_IDS: Final = (str, int, UUID, date, Decimal)
_SCALARS: Final = (*_IDS, float, bytes, bytearray, complex, time, timedelta)
_LISTS: Final = (list, tuple, set, frozenset)
_NO_IDS: Final[tuple[Any, ...]] = (
    float, complex, bytes, bytearray, timedelta, time, Mapping, deque, *_LISTS, enum.Enum, re.Pattern, PurePath,
    IPv4Address, IPv6Address, IPv4Interface, IPv6Interface, IPv4Network, IPv6Network,
    IPvAnyAddress, IPvAnyInterface, IPvAnyNetwork, SecretStr, SecretBytes, BaseModel,
    *(base for url in (AnyUrl, PostgresDsn) for base in url.__mro__[:-1]),
)  # fmt: skip
"""Classes whose objects are never ids; those of unknown classes may be: a validator may make texts of them."""


def check_key_types(cls: type[Any], paths: Iterable[str]) -> None:
    """Refuse body fields of a key whose values can never be (part of) an id, or that can't be there at all.

    Raises:
        ConfigurationError: a field on the path does not exist, or its type is certain and is no type for an id.

    Example:
        >>> class Place(BaseModel):
        ...     price: float
        >>> check_key_types(Place, ["price"])
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: Place.price is (part of) a key, and float is never an id. ...
    """
    for path in paths:
        _check(cls, path, path.split("."))


def _check(cls: Any, path: str, names: list[str]) -> None:
    """Follow a path as far as its classes are known."""
    for number, name in enumerate(names):
        field = fields_of(cls).get(name)
        if field is None:
            return
        if _has_own_code(cls, name, [*field.metadata, *nested_metadata(field.annotation)]):
            return  # it may make anything of the value
        parts = parts_of(field.annotation)
        if number == len(names) - 1:
            _check_last(cls, name, parts)
            return
        below = names[number + 1]
        if parts and all(_lacks(part, below) for part in parts):
            raise ConfigurationError(
                f"{cls.__name__}.{name} has no field {below!r}, which the policy names as (part of) a key: {path!r}.",
                fix=_fields_text(parts),
            )
        cls = parts[0] if len(parts) == 1 else None


def _has_own_code(cls: type[Any], name: str, metadata: list[Any]) -> bool:
    if any(hasattr(item, "func") or hasattr(item, "__get_pydantic_core_schema__") for item in metadata):
        return True
    if not issubclass(cls, BaseModel):
        return hasattr(cls, "__post_init__")
    whole = cls.__pydantic_decorators__.model_validators or cls.model_post_init is not BaseModel.model_post_init
    return bool(whole) or any(validators_of(cls, name))


def _check_last(cls: type[Any], name: str, parts: list[Any]) -> None:
    used = getattr(cls, "model_config", {}).get("use_enum_values", False)
    if not parts or not all(_is_no_id(part, enum_values=used) for part in parts):
        return
    what = " or ".join(_name(part) for part in parts)
    fix = "Use a field of text, a whole number, a UUID, a date or a decimal, or a function as the key."
    if any(isinstance(part, type) and issubclass(part, enum.Enum) for part in parts):
        fix = f"Make it a StrEnum or an IntEnum, or name its value: {name + '.value'!r}."
    elif any(isinstance(part, type) and fields_of(part) for part in parts):
        fix = f"Name one of its fields, as in {name + '.' + next(iter(fields_of(parts[0])), 'id')!r}."
    raise ConfigurationError(f"{cls.__name__}.{name} is (part of) a key, and {what} is never an id.", fix=fix)


def _is_no_id(part: Any, *, enum_values: bool) -> bool:
    found = part if isinstance(part, type) and get_origin(part) is None else get_origin(part)
    if not isinstance(found, type) or issubclass(found, _IDS) or (enum_values and issubclass(found, enum.Enum)):
        return False
    return issubclass(found, _NO_IDS) or dataclasses.is_dataclass(found)


def _lacks(part: Any, name: str) -> bool:
    """Whether no object of a class has something of this name, as far as that is certain."""
    found = part if isinstance(part, type) and get_origin(part) is None else get_origin(part)
    if not isinstance(found, type) or issubclass(found, Mapping) or hasattr(found, name):
        return False
    if issubclass(found, BaseModel):
        return name not in found.model_fields and found.model_config.get("extra") != "allow"
    if dataclasses.is_dataclass(found):
        return name not in fields_of(found)
    return issubclass(found, (*_SCALARS, *_LISTS))


def _fields_text(parts: list[Any]) -> str:
    known = sorted({name for part in parts if isinstance(part, type) for name in fields_of(part)})
    return f"Its fields are {', '.join(known)}." if known else "It has no fields: name the field itself."


def _name(part: Any) -> str:
    return part.__name__ if isinstance(part, type) else str(part).removeprefix("typing.")
