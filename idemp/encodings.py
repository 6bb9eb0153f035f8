"""How the fields of a message class become the bytes of an id, in words that change whenever those bytes may change."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NewType, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["check_key_fields", "encoding_of", "fields_of", "nested_metadata", "parts_of", "validators_of"]

_JSON: Final = "json"
_UNKNOWN: Final = "?"
_LONGEST_DEFAULT: Final = 40
# In this order: a bool is an int, and a datetime is a date.
_KINDS: Final = (
    (bool, "bool"),
    (str, "str"),
    (int, "int"),
    (UUID, "uuid"),
    (datetime, "datetime"),
    (date, "date"),
    (Decimal, "decimal"),
)
_CHANGES: Final = {
    "strip_whitespace": "stripped", "to_lower": "lower", "to_upper": "upper",
    "str_strip_whitespace": "stripped", "str_to_lower": "lower", "str_to_upper": "upper",
}  # fmt: skip
_DATES: Final = {"PastDate": "date", "FutureDate": "date"}


def encoding_of(cls: type[Any], paths: Iterable[str]) -> str:
    """How the body fields of a key are read: their names in JSON, types, validators and defaults.

    Args:
        cls: a pydantic model, a dataclass or `dict`.
        paths: the fields, as `Key.fields` has them.

    Returns:
        An empty text if there are no fields.

    Example:
        >>> class Place(BaseModel):
        ...     tenant: str = "main"
        ...     order_id: UUID
        >>> encoding_of(Place, ["tenant", "order_id"]), encoding_of(dict, ["order_id"])
        ("str='main', uuid", 'json')
    """
    return ", ".join(_path(cls, path.split(".")) for path in paths)


def check_key_fields(cls: type[Any], paths: Iterable[str]) -> None:
    """Refuse a key's field whose default differs each time: redeliveries of one message would have different ids.

    Raises:
        ConfigurationError: a field has a `default_factory`.
    """
    for path in paths:
        for owner, name, field in _fields_on(cls, path.split(".")):
            if field.default_factory is not None:
                raise ConfigurationError(
                    f"{owner.__name__}.{name} is (part of) a key and has a default_factory: a message without the field "
                    "would have another id at each delivery.",
                    fix="Make the field required, or give it a plain default.",
                )


def _path(cls: type[Any], names: list[str]) -> str:
    if cls is dict:
        return _JSON
    words: list[str] = []
    found = list(_fields_on(cls, names))
    for owner, name, field in found:
        alias = field.validation_alias or field.alias
        if alias is not None and alias != name:  # AliasChoices and AliasPath have no hash
            words.append(f"{alias}:" if isinstance(alias, str) else f"{alias!r}:")
        words += validators_of(owner, name)
        config = getattr(owner, "model_config", {}) if str in parts_of(field.annotation) else {}
        words += _changes([config, *field.metadata, *nested_metadata(field.annotation)])
    if len(found) < len(names):
        return " ".join([*words, _UNKNOWN])
    words.append("|".join(sorted({_name(part) for part in parts_of(field.annotation)})))
    plain = field.default is not None and not field.is_required() and field.default_factory is None
    default = f"={_shortened(repr(field.default))}" if plain else ""
    return " ".join(words) + default


def _fields_on(cls: Any, names: list[str]) -> Iterator[tuple[type[Any], str, FieldInfo]]:
    """The fields on a path, as far as their classes are known."""
    for name in names:
        field = fields_of(cls).get(name)
        if field is None:
            return
        yield cls, name, field
        cls = next((each for each in parts_of(field.annotation) if isinstance(each, type)), None)


def fields_of(cls: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a pydantic model or a dataclass by name; none for anything else.

    Example:
        >>> class Place(BaseModel):
        ...     order_id: UUID
        >>> list(fields_of(Place)), fields_of(dict)
        (['order_id'], {})
    """
    if not isinstance(cls, type):
        return {}
    if issubclass(cls, BaseModel):
        return cls.model_fields
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = get_type_hints(cls, include_extras=True)
    return {
        item.name: FieldInfo.from_annotated_attribute(
            hints[item.name], item.default if isinstance(item.default, FieldInfo) else item
        )
        for item in dataclasses.fields(cls)
    }


def parts_of(annotation: Any) -> list[Any]:
    """Return what a value may be, without `None`.

    Example:
        >>> parts_of(Annotated[UUID | str | None, "an id"])
        [<class 'uuid.UUID'>, <class 'str'>]
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return parts_of(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return [part for each in get_args(annotation) for part in parts_of(each)]
    if origin is Literal:
        return [type(value) for value in get_args(annotation)]
    if isinstance(annotation, NewType):
        return parts_of(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # declared by a `type` statement
        return parts_of(annotation.__value__)
    return [] if annotation in {None, type(None)} else [annotation]


def nested_metadata(annotation: Any) -> list[Any]:
    """Return the metadata inside of an annotation, such as that of the parts of a union.

    Example:
        >>> nested_metadata(Annotated[str, "short"] | None)
        ['short']
    """
    if hasattr(annotation, "__value__"):
        return nested_metadata(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return [*annotation.__metadata__, *nested_metadata(get_args(annotation)[0])]
    return [item for each in get_args(annotation) for item in nested_metadata(each)]


def _name(part: Any) -> str:
    if not isinstance(part, type):
        return _UNKNOWN
    if issubclass(part, enum.Enum) and issubclass(part, int):
        members = [str(member) for member in part]
        if members != [int.__repr__(member) for member in part]:  # the id has the members' names
            return f"enum {_shortened(','.join(members))}"
    for cls, name in _KINDS:
        if issubclass(part, cls):
            return name
    return _DATES.get(part.__name__, "datetime" if part.__name__.endswith("Datetime") else part.__name__)


def _changes(metadata: Iterable[Any]) -> Iterator[str]:
    """What is done to a value before it is (part of) an id."""
    for item in metadata:
        for option, word in _CHANGES.items():
            if item.get(option) if isinstance(item, dict) else getattr(item, option, None):
                yield word
        if callable(function := getattr(item, "func", None)):
            yield f"{type(item).__name__}({getattr(function, '__qualname__', repr(function))})"


def validators_of(owner: type[Any], name: str) -> Iterator[str]:
    """Yield the mode and the name of each validator of a model's field.

    Example:
        >>> list(validators_of(BaseModel, "order_id"))
        []
    """
    decorators = getattr(owner, "__pydantic_decorators__", None)
    for found in getattr(decorators, "field_validators", {}).values():
        if {name, "*"} & set(found.info.fields):
            yield f"{found.info.mode}({found.cls_var_name})"


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_DEFAULT:
        return text
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
