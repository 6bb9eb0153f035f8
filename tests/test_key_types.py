"""Fields of a key that can never be an id are refused at start, not message by message; what may be one is left alone."""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import pathlib
import re
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType

import pytest
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    PastDate,
    PositiveFloat,
    PostgresDsn,
    SecretStr,
    StringConstraints,
    conlist,
    create_model,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from idemp import App, Context, Idempotent, Outcome
from idemp.errors import ConfigurationError, IdentityChanged
from idemp.startup import agree_identities
from tests.house import House, memory_house, sale


class Plain(enum.Enum):
    A = "a"


class Text(str, enum.Enum):  # noqa: UP042 - as many have it
    A = "a"


class Both(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    A = 1


class Inner(BaseModel):
    x: int
    rate: float = 1.0

    @property
    def total(self) -> int:
        return self.x


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


@dataclass
class Part:
    x: int


class Row(NamedTuple):
    x: int


class Table(TypedDict):
    x: int


Price = NewType("Price", float)

NEVER = [
    float,
    float | None,
    Price,
    PositiveFloat,
    Literal[b"a"],
    bytes,
    complex,
    list,
    list[int],
    tuple[int, str],
    set[int],
    frozenset,
    dict,
    dict[str, int],
    Mapping[str, int],
    deque[int],
    dt.timedelta,
    dt.time,
    ipaddress.IPv4Address,
    ipaddress.IPv6Network,
    IPvAnyAddress,
    pathlib.Path,
    SecretStr,
    AnyUrl,
    HttpUrl,
    PostgresDsn,
    re.Pattern,
    Plain,
    Inner,
    Part,
    Row,
    Table,
    conlist(int),
    float | bytes,
    Annotated[float, Field(gt=0)],
]
MAYBE = [
    str,
    int,
    bool,
    uuid.UUID,
    dt.date,
    dt.datetime,
    AwareDatetime,
    PastDate,
    Decimal,
    Text,
    Both,
    Number,
    int | None,
    object,
    Any,
    int | float,
    float | str,
    Literal["a"],
    ByteSize,
    Json,
    Json[int],
    Annotated[str, StringConstraints(to_lower=True)],
    Annotated[float, AfterValidator(str)],
    NewType("Sku", str),
]


def declare(annotation: Any, key: str = "k", **field: Any) -> House:
    house = memory_house()
    cls = create_model("Made", k=(annotation, Field(**field) if field else ...))
    house.app.handler(cls, type="shop.Made", policy=Idempotent(key=key))(lambda message: None)
    return house


def refused(house: House) -> str:
    with pytest.raises(ConfigurationError) as raised:
        house.app.registry.build({})
    return str(raised.value)


@pytest.mark.parametrize("annotation", NEVER, ids=str)
def test_what_can_never_be_an_id_is_refused(annotation: Any) -> None:
    assert "Made.k is (part of) a key" in refused(declare(annotation))


@pytest.mark.parametrize("annotation", MAYBE, ids=str)
def test_what_may_be_an_id_is_left_alone(annotation: Any) -> None:
    declare(annotation).app.registry.build({})


@pytest.mark.parametrize(
    ("annotation", "key"),
    [
        (str, "k.x"),
        (int, "k.id"),
        (list[Inner], "k.x"),
        (Inner, "k.y"),
        (Part, "k.y"),
        (Inner | None, "k.y"),
        (Inner, "k.x.y"),
        (Inner | Part, "k.y"),
    ],
)
def test_paths_to_nowhere_are_refused(annotation: Any, key: str) -> None:
    said = refused(declare(annotation, key))
    assert "has no field" in said
    assert "Its fields are" in said or "name the field itself" in said


@pytest.mark.parametrize(
    ("annotation", "key"),
    [
        (Inner, "k.x"),
        (Inner, "k.total"),
        (Part, "k.x"),
        (Row, "k.x"),
        (Table, "k.x"),
        (dict, "k.y"),
        (dict[str, Any], "k.y.z"),
        (Any, "k.y"),
        (Open, "k.y"),
        (Inner | Open, "k.y"),
        (Plain, "k.value"),
        (dt.date, "k.year"),
        (uuid.UUID, "k.hex"),
        (Inner | None, "k.x"),
        (AnyUrl, "k.host"),
        (SecretStr | int, "k.y"),
    ],
)
def test_paths_that_may_lead_somewhere_are_left_alone(annotation: Any, key: str) -> None:
    declare(annotation, key).app.registry.build({})


def test_the_field_at_the_end_counts() -> None:
    assert "Inner.rate" in refused(declare(Inner, "k.rate"))


@pytest.mark.parametrize(
    ("annotation", "words"), [(Plain, "StrEnum"), (Plain, "'k.value'"), (Inner, "'k.x'"), (float, "a decimal")]
)
def test_what_to_do(annotation: Any, words: str) -> None:
    assert words in refused(declare(annotation))


def test_code_that_makes_something_else_of_it_is_left_alone() -> None:
    class Validated(BaseModel):
        k: float

        @field_validator("k", mode="after")
        @classmethod
        def as_text(cls, value: float) -> str:
            return str(value)

    class Whole(BaseModel):
        k: float

        @model_validator(mode="after")
        def as_text(self) -> Whole:
            self.k = str(self.k)  # type: ignore[assignment]
            return self

    @dataclass
    class Made:
        k: Any

        def __post_init__(self) -> None:
            self.k = str(self.k)

    @dataclass
    class Floats(Made):
        k: float

    class Values(BaseModel):
        model_config = ConfigDict(use_enum_values=True)
        k: Plain

    for cls, value in ((Validated, 1.5), (Whole, 1.5), (Floats, 1.5), (Values, "a")):
        house = memory_house()
        house.app.handler(cls, type="shop.Made", policy=Idempotent(key="k"))(lambda message: None)
        made = [house.deliver(sale(str(number), {"k": value}, type="shop.Made")) for number in range(2)]
        assert made == [Outcome.HANDLED, Outcome.SKIPPED], cls


@pytest.mark.parametrize("option", ["ordered_by", "entity"])
def test_other_fields_of_a_policy_are_checked_alike(option: str) -> None:
    house = memory_house()
    policy = Idempotent(**{option: "rate"})
    house.app.handler(Inner, type="shop.Made", policy=policy)(lambda message: None)
    assert "Inner.rate" in refused(house)


# Aliases


class Chosen(BaseModel):
    k: str = Field(validation_alias=AliasChoices("number", "no"))


class Reached(BaseModel):
    k: str = Field(validation_alias=AliasPath("order", 0, "number"))


@pytest.mark.parametrize(
    ("cls", "bodies"),
    [
        (Chosen, [{"number": "7"}, {"no": "7"}]),
        (Reached, [{"order": [{"number": "7"}]}, {"order": [{"number": "7"}, 1]}]),
    ],
)
def test_a_field_of_several_names_is_a_key(cls: type[Any], bodies: list[Any]) -> None:
    house = memory_house()
    policy = Idempotent(key="k", fingerprint="off")
    house.app.handler(cls, type="shop.Made", policy=policy)(lambda message, ctx: house.effects.write(ctx, "sale"))
    agree_identities(house.store, "shop", "shop", house.app.registry)
    made = [house.deliver(sale(str(number), body, type="shop.Made")) for number, body in enumerate(bodies)]
    assert made == [Outcome.HANDLED, Outcome.SKIPPED]


def test_other_names_in_json_are_another_identity() -> None:
    house = memory_house()
    for cls in (Chosen, Reached):
        app = App("shop", store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)

        def handler(message: Any, ctx: Context) -> None: ...

        app.handler(cls, type="shop.Made", policy=Idempotent(key="k"))(handler)
        if cls is Chosen:
            agree_identities(house.store, "shop", "shop", app.registry)
        else:
            with pytest.raises(IdentityChanged, match="AliasPath"):
                agree_identities(house.store, "shop", "shop", app.registry)
