"""From objects to bodies and back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field

from idemp.codecs import Codec, Types, is_message_class, type_name
from idemp.errors import ConfigurationError, OutputError, UndecodableMessage


class Colour(Enum):
    RED = "red"


class Everything(BaseModel):
    __message_type__ = "test.Everything"

    id: UUID = UUID(int=7)
    day: date = date(2026, 1, 2)
    moment: datetime = datetime(2026, 1, 2, 3, tzinfo=UTC)
    price: Decimal = Decimal("1.50")
    colour: Colour = Colour.RED
    tags: tuple[str, ...] = ("a", "")
    nothing: int | None = None
    aliased: int = Field(default=0, alias="otherName")


@dataclass
class Plain:
    sku: str
    count: int = 0
    deep: list[dict[str, Any]] = field(default_factory=list)


@pytest.mark.parametrize("value", [Everything(), Plain("A-1", 0, [{"a": None}]), {"a": [0, "", None, False, {}]}])
def test_round_trip(value: Any) -> None:
    from idemp.messages import Message, parse_json

    codec = Codec(type(value))
    body = codec.encode(value)
    again = codec.decode(parse_json(Message(body=body)))
    assert again == value
    assert codec.encode(again) == body


def test_what_does_not_fit_names_fields_and_no_values() -> None:
    with pytest.raises(UndecodableMessage, match=r"Plain: sku: .*; count: ") as raised:
        Codec(Plain).decode({"count": "secret"})
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("payload", [None, [], "text", 0, [{"a": 1}]])
def test_dict_handlers_take_objects_only(payload: Any) -> None:
    with pytest.raises(UndecodableMessage, match="not an object"):
        Codec(dict).decode(payload)


@pytest.mark.parametrize("cls", [int, str, list, object, type, "Plain", None, Plain("a")])
def test_no_message_classes(cls: Any) -> None:
    assert not (isinstance(cls, type) and is_message_class(cls))
    with pytest.raises(ConfigurationError, match="no message class"):
        Codec(cls)


def test_key_fields_are_checked() -> None:
    Codec(Everything).check_fields(["id", "tags.0"])
    Codec(dict).check_fields(["anything"])
    for cls in (Everything, Plain):
        with pytest.raises(ConfigurationError, match="no field 'order_id'"):
            Codec(cls).check_fields(["order_id.x"])


class TestTypes:
    def test_registered_name_wins(self) -> None:
        types = Types()
        types.register(Everything, "test.Other")
        assert types.encode(Everything(), None)[0] == "test.Other"
        assert types.encode(Everything(), "test.Explicit")[0] == "test.Explicit"

    def test_declared_name(self) -> None:
        assert Types().name_of(Everything) == "test.Everything"

    def test_name_from_where_the_code_lives_comes_with_a_warning(self) -> None:
        with pytest.warns(UserWarning, match=r"Plain has no message type name"):
            assert type_name(Plain) == "tests.Plain"
        types = Types()
        with pytest.warns(UserWarning, match="Plain"):
            types.name_of(Plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert types.name_of(Plain) == "tests.Plain"

    @pytest.mark.parametrize("value", [0, "", [], None, False, object(), Colour.RED])
    def test_what_is_no_message(self, value: Any) -> None:
        with pytest.raises(OutputError, match="is no message"):
            Types().encode(value, "test.X")

    def test_dict_without_a_name(self) -> None:
        with pytest.raises(OutputError, match="without a type name"):
            Types().encode({}, None)

    @pytest.mark.parametrize("value", [{"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, {"a": b"x"}])
    def test_what_is_no_json(self, value: dict[str, Any]) -> None:
        with pytest.raises(OutputError, match="can't be written as JSON"):
            Types().encode(value, "test.X")

    @pytest.mark.parametrize(
        "value",
        [
            {1: "a", "1": "b"},
            {"deep": [{True: "a", "true": "b"}]},
            {"a": Decimal("1e400")},
            {"a": Decimal("1e-400")},
            Plain("A-1", deep=[{"1": 1, 1: 2}]),
            Plain("A-1", deep=[{"share": float("inf")}]),
            Everything.model_construct(price=Decimal("1.5"), nothing=float("nan")),
        ],
        ids=str,
    )
    def test_what_no_consumer_could_read(self, value: Any) -> None:
        """Committed, it could be neither handled nor taken back."""
        with pytest.raises(OutputError, match="can't be written as JSON"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydantic's, of a value that is not of its field's type
            Types().encode(value, "test.X")


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    __message_type__ = "test.Strict"

    id: UUID
    moment: datetime
    colour: Colour


def test_strict_models_read_what_they_write() -> None:
    value = Strict(id=UUID(int=1), moment=datetime(2026, 1, 1, tzinfo=UTC), colour=Colour.RED)
    from idemp.messages import Message, parse_json

    assert Codec(Strict).decode(parse_json(Message(body=Codec(Strict).encode(value)))) == value
    with pytest.raises(UndecodableMessage):
        Codec(Strict).decode({"id": str(UUID(int=1)), "moment": "2026-01-01T00:00:00Z", "colour": "red", "x": 1})


def test_a_strict_model_stays_strict_and_takes_what_json_has_for_a_uuid() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        id: UUID
        n: int

    codec = Codec(Strict)
    text = "0192c8a4-7d3e-7000-8000-000000000001"
    assert codec.decode({"id": text, "n": 1}) == Strict(id=UUID(text), n=1)
    with pytest.raises(UndecodableMessage):
        codec.decode({"id": text, "n": "1"})
