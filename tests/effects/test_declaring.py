"""What is refused before anything is stored, and what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_serializer, field_validator

from idemp import App, ConfigurationError, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.effects import EffectRun
from idemp.errors import OutputError
from idemp.inbox.document import DocumentInbox, InMemoryDocuments
from idemp.inbox.memory import InMemoryStore
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MemoryEffects
from tests.house import House, sale


@dataclass
class Receipt:
    to: str
    cents: int


@pytest.fixture
def house() -> House:
    clock = FakeClock()
    store = InMemoryStore(clock)
    return House(store, MemoryEffects(store), clock)


def handles(house: House, does: Callable[[Context], object], **policy: Any) -> None:
    def handler(message: dict[str, Any], ctx: Context) -> None:
        does(ctx)

    house.app.handler(dict, type="shop.Sell", policy=Idempotent(**policy))(handler)


def test_stored_under_its_name_and_never_published(house: House) -> None:
    @house.app.effect("mail.receipt")
    def receipt(value: Receipt) -> None: ...

    handles(house, lambda ctx: (ctx.effect("mail.receipt", Receipt("ann", 995)), ctx.send({}, to="stock", type="s.R")))
    outcome, _ = house.handle()
    assert outcome is Outcome.HANDLED
    assert [output.routing_key for output in house.publisher.sent] == ["stock"]
    (item,) = house.store.upkeep.take_effects("shop", 10, house.app.settings.relay_lease)
    assert (item.output.routing_key, json.loads(item.output.message.body)) == (
        "mail.receipt",
        {"to": "ann", "cents": 995},
    )
    assert item.output.message.causation_id == "sale-1"


class Price(BaseModel):
    eur: float


class Mail(BaseModel):
    to: str = Field(serialization_alias="recipient")


class Bought(BaseModel):
    known: str

    @field_serializer("known")
    def written(self, value: str) -> str:
        return value.upper()

    @field_validator("known")
    @classmethod
    def read(cls, value: str) -> str:
        return {"ann": "ann"}[value]


def test_left_as_it_is_where_messages_are_cloudevents() -> None:
    clock = FakeClock()
    store = InMemoryStore(clock)
    house = House(store, MemoryEffects(store), clock, wire="cloudevents-structured")
    house.app.effect("ping", dict)(print)
    handles(house, lambda ctx: ctx.effect("ping", {"n": 1}))
    house.deliver()
    (item,) = house.store.upkeep.take_effects("shop", 10, house.app.settings.relay_lease)
    assert item.output.message.body == b'{"n":1}'


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mail.receit", Receipt("ann", 1), "Did you mean 'mail.receipt'?"),
        ("mail.receipt", {"to": "ann"}, "takes a Receipt, not a dict"),
        ("mail.receipt", None, "takes a Receipt, not a NoneType"),
        ("price.told", Price(eur=float("inf")), "can't be written as JSON"),
        ("mail.sent", Mail(to="ann"), "could not be read back when the effect runs.*to: Field required"),
        ("mail.bought", Bought(known="ann"), "could not be read back when the effect runs.*KeyError"),
    ],
)
def test_refused_before_commit(house: House, name: str, value: Any, words: str) -> None:
    house.app.effect("mail.receipt", Receipt)(print)
    house.app.effect("price.told", Price)(print)
    house.app.effect("mail.sent", Mail)(print)
    house.app.effect("mail.bought", Bought)(print)
    handles(house, lambda ctx: ctx.effect(name, value))
    with pytest.raises(OutputError, match=words) as caught:
        house.deliver()
    assert caught.value.committed == "no"
    assert house.pending() == 0


def test_refused_where_nothing_is_stored(house: House) -> None:
    house.app.effect("ping", dict)(print)

    @house.app.handler(dict, type="shop.Sell")
    def handler(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})

    with pytest.raises(OutputError, match=r"not opted in.*policy=Idempotent"):
        house.deliver()


def test_refused_where_nobody_would_run_it() -> None:
    clock = FakeClock()
    app = App("carts", store=DocumentInbox(InMemoryDocuments(), clock=clock), broker=InMemoryBroker(clock), clock=clock)
    app.effect("ping", dict)(print)

    @app.handler(dict, type="c.Add", policy=Idempotent(entity="id"))
    def handler(message: dict[str, Any], ctx: Context) -> None: ...

    with pytest.raises(ConfigurationError, match="Effects can't be had on a DocumentInbox"):
        app.start()
    assert app.consumer.encode_effect is None


def test_wrapped_consumers_have_no_runner(house: House) -> None:
    from idemp import Inbox
    from idemp.inbox.sql import create_engine_safely
    from idemp.inbox.sql.schema import upgrade
    from idemp.inbox.sql.tables import Tables

    engine = create_engine_safely("sqlite://")
    upgrade(engine, Tables())

    def handler(message: dict[str, Any], ctx: Context) -> None:
        ctx.effect("ping", {})

    wrapped = Inbox(engine).wrap(handler, message=dict, type="shop.Sell", consumer="shop", policy=Idempotent())
    with pytest.raises(OutputError, match="nobody would run it"):
        wrapped(sale())


async def later(value: dict[str, str]) -> None: ...


PARTIAL = partial(later)


def yields(value: dict[str, str]) -> Iterator[None]:
    yield None


def by_name(value: dict[str, str], *, run: EffectRun) -> None: ...


def takes_three(value: dict[str, str], run: EffectRun, third: int) -> None: ...


def says_nothing(value) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (later, {}, "asynchronous"),
        (PARTIAL, {}, "asynchronous"),
        (yields, {}, "a generator"),
        (by_name, {}, "neither"),
        (takes_three, {}, r"\(value\) nor \(value, run\)"),
        (says_nothing, {}, "does not say what it takes"),
        (print, {"retry": "soon"}, "no duration"),
        (print, {"timeout": "1h"}, "at most 0:15:00"),
        (print, {"max_attempts": 0}, "at least one attempt"),
    ],
)
def test_wrong_declarations(house: House, function: Any, options: dict[str, Any], words: str) -> None:
    cls = [dict] if function in {print, PARTIAL} else []
    with pytest.raises(ConfigurationError, match=words):
        house.app.effect("ping", *cls, **options)(function)


def test_a_name_has_one_function(house: House) -> None:
    house.app.effect("ping", dict)(print)
    with pytest.raises(ConfigurationError, match="Two functions"):
        house.app.effect("ping", dict)(print)
    with pytest.raises(ConfigurationError, match="can't be an effect's name"):
        house.app.effect(" ping", dict)(print)


def test_message_in_hand_is_a_message(house: House) -> None:
    """Nobody sends an effect's name as a destination: `send` to a queue of that name is a message."""
    handles(house, lambda ctx: ctx.send({}, to="stock", type="mail.receipt"))
    house.deliver(Message(body=b"{}", type="shop.Sell", message_id="m-1"))
    assert len(house.publisher.sent) == 1
