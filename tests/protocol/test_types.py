"""One id, several message types: what counts within a type, and what is another message's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy import select

from idemp import App, Idempotent, Key, Message, Outcome, Previous
from idemp.errors import ConfigurationError, IdentityChanged, PayloadConflict
from idemp.inbox.port import Identity
from idemp.inbox.small import SmallStore
from idemp.inbox.sql import shared_tables
from idemp.startup import agree_identities
from tests.house import SELL, House, sale

if TYPE_CHECKING:
    from idemp.policy import Policy

CANCEL = "shop.Cancel"
FORMER_HEADER = replace(Key.header("x-order"), by_type=False)


def cancels(house: House, **policy: Any) -> None:
    """A second type with an effect of its own."""
    house.app.handler(dict, type=CANCEL, policy=Idempotent(**policy))(
        lambda message, ctx: house.effects.write(ctx, "cancellation")
    )


def ordered(message_type: str, order: str, message_id: str = "m-1") -> Message:
    return Message(body=b"{}", type=message_type, message_id=message_id, headers={"x-order": order})


@pytest.mark.parametrize("fingerprint", ["all", "off"])
def test_a_header_counts_within_the_message_type(house: House, fingerprint: str) -> None:
    """Placing an order and cancelling it are two messages, though both name the order."""
    house.sells(key=Key.header("x-order"), fingerprint=fingerprint)
    cancels(house, key=Key.header("x-order"), fingerprint=fingerprint)
    for message_type in (SELL, CANCEL):
        outcomes = [house.deliver(ordered(message_type, "7", transport)) for transport in ("a", "b")]
        assert outcomes[0] is Outcome.HANDLED
        assert outcomes[1] in {Outcome.REDISPATCHED, Outcome.SKIPPED}
    assert (house.sales(), house.effects.count("cancellation")) == (1, 1)


@pytest.mark.parametrize("policy", [{}, {"fingerprint": "off"}, {"on_conflict": "redispatch"}, {"claim": "late"}])
def test_an_id_of_the_envelope_that_another_type_has_is_a_conflict(house: House, policy: dict[str, Any]) -> None:
    """Whatever its payload: nothing is executed, nothing is sent again, and the message is parked."""
    house.sells(**policy)
    cancels(house, **policy)
    house.deliver(sale("m-1"))
    sent = house.sent()
    with pytest.raises(PayloadConflict, match=r"'m-1' of this 'shop\.Cancel' .* handled as 'shop\.Sell'"):
        house.deliver(replace(sale("m-1"), type=CANCEL))
    assert (house.effects.count("cancellation"), house.sent()) == (0, sent)
    assert house.deliver(sale("m-1")) is Outcome.REDISPATCHED


def test_types_of_one_batch(house: House) -> None:
    house.sells(batch=10)
    cancels(house, batch=10)
    (first, _), (second, _) = house.together(sale("m-1"), sale("m-2"))
    assert first is second is Outcome.HANDLED
    outcomes = house.together(replace(sale("m-1"), type=CANCEL), sale("m-2"), sale("m-3"))
    assert [outcome for outcome, _ in outcomes] == [Outcome.PARKED, Outcome.REDISPATCHED, Outcome.HANDLED]
    assert house.effects.count("cancellation") == 0


@pytest.mark.parametrize("renamed", [{"aliases": [SELL]}, {"policy": {"previous": [Previous(type=SELL)]}}])
def test_a_renamed_type_is_the_same(house: House, renamed: dict[str, Any]) -> None:
    old = App("shop", store=house.store, broker=house.broker, settings=house.app.settings)
    old.handler(dict, type=SELL, policy=Idempotent())(lambda message: None)
    assert old.protocol(house.publisher).process(sale("m-1")) is Outcome.HANDLED
    options = {"type": "shop.Sold", "aliases": renamed.get("aliases", ())}
    policy = Idempotent(**renamed.get("policy", {}))
    house.app.handler(dict, **options, policy=policy)(lambda message, ctx: house.effects.write(ctx, "sale"))
    assert house.deliver(replace(sale("m-1"), type="shop.Sold")) is Outcome.SKIPPED
    assert house.sales() == 0


@pytest.mark.parametrize("key", [None, "order_id", Key.header("x-order")], ids=["envelope", "body", "header"])
@pytest.mark.parametrize("claim", ["early", "late"])
def test_a_former_release_knows_what_a_renamed_type_handled(house: House, key: Any, claim: str) -> None:
    """It knows no other name of the type: to it the claim of another one would be a conflict."""
    old = App("shop", store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)
    declared = {} if key is None else {"key": key}
    old.handler(dict, type=SELL, policy=Idempotent(claim=claim, **declared))(lambda message: None)
    policy = Idempotent(claim=claim, **declared, previous=[Previous(type=SELL)])
    house.app.handler(dict, type="shop.Sold", aliases=[SELL], policy=policy)(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    message = replace(sale("m-1", {"order_id": "7"}), headers={"x-order": "7"})
    assert house.deliver(message) is Outcome.HANDLED
    assert old.protocol(house.publisher).process(message) is Outcome.SKIPPED
    for name in (SELL, "shop.Sold"):
        assert house.deliver(replace(message, type=name)) is Outcome.SKIPPED
    assert house.sales() == 1


class TestHeadersOfTheFormerRelease:
    """Earlier releases derived one id from a header for all types; its claims count for one window."""

    @staticmethod
    def started(house: House, policy: Policy, consumer: str = "shop") -> App:
        app = App(consumer, store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)
        app.handler(dict, type=SELL, policy=policy)(lambda message, ctx: house.effects.write(ctx, "sale"))
        agree_identities(house.store, "shop", "shop", app.registry)
        return app

    def test_claims_of_both_releases_count(self, house: House) -> None:
        former, key = Idempotent(key=FORMER_HEADER, retention="5m"), Key.header("x-order")
        old = self.started(house, former)
        assert old.protocol(house.publisher).process(ordered(SELL, "1")) is Outcome.HANDLED
        new = self.started(house, Idempotent(key=key, retention="5m"))
        assert new.protocol(house.publisher).process(ordered(SELL, "1")) is Outcome.SKIPPED
        assert new.protocol(house.publisher).process(ordered(SELL, "2")) is Outcome.HANDLED
        # Side by side: the old release restarts, and finds what the new one has handled.
        again = self.started(house, former)
        assert again.protocol(house.publisher).process(ordered(SELL, "2")) is Outcome.SKIPPED
        assert house.sales() == 2

    def test_they_are_claimed_for_one_window(self, house: House) -> None:
        """Then an id costs one claim again."""
        self.started(house, Idempotent(key=FORMER_HEADER, retention="5m"))
        key = Key.header("x-order")
        new = self.started(house, Idempotent(key=key, retention="5m"))
        assert [each.key for each in new.registry.registrations()[0].policy.previous if each.key] != []
        house.consume_for_ten_minutes()
        later = self.started(house, Idempotent(key=key, retention="5m"))
        assert later.registry.registrations()[0].policy.previous == ()

    def test_another_change_is_refused_all_the_same(self, house: House) -> None:
        self.started(house, Idempotent(key=FORMER_HEADER, retention="5m"))
        house.clock.advance(timedelta(minutes=1))
        with pytest.raises(IdentityChanged, match="header:x-order"):
            self.started(house, Idempotent(key=Key.header("x-other"), retention="5m"))
        covered = (Previous(key=Key.header("x-order")),)
        self.started(house, Idempotent(key=Key.header("x-other"), retention="5m", previous=covered))


class TestTypesOfAKeysField:
    """Another type, default or name in JSON of the field makes other ids of the same bytes."""

    ORDER = UUID("0192c8a4-7d3e-7000-8000-000000000001")

    @dataclass
    class ByUuid:
        order_id: UUID

    @dataclass
    class ByNumber:
        number: int

    @dataclass
    class ByText:
        order_id: str

    class WithDefault(BaseModel):
        order_id: str
        tenant: str = "main"

    class WithOtherDefault(BaseModel):
        order_id: str
        tenant: str = "eu"

    class Renamed(BaseModel):
        order_id: str = Field(alias="number")

    class Lower(BaseModel):
        order_id: Annotated[str, StringConstraints(to_lower=True)]

    @staticmethod
    def app(house: House, cls: type[Any], **policy: Any) -> App:
        app = App("shop", store=house.store, broker=house.broker, settings=house.app.settings, clock=house.clock)
        options = {"key": "order_id", "retention": "5m", **policy}
        app.handler(cls, type=SELL, policy=Idempotent(**options))(lambda message, ctx: house.effects.write(ctx, "sale"))
        return app

    @staticmethod
    def start(house: House, app: App) -> None:
        agree_identities(house.store, "shop", "shop", app.registry)

    CHANGES = (
        (ByUuid, ByText, ["order_id"]),
        (ByText, ByUuid, ["order_id"]),
        (ByText, dict, ["order_id"]),
        (ByText, Renamed, ["order_id"]),
        (ByText, Lower, ["order_id"]),
        (WithDefault, WithOtherDefault, ["tenant", "order_id"]),
    )  # fmt: skip

    @pytest.mark.parametrize(("before", "after", "key"), CHANGES)
    def test_a_change_is_refused_until_covered(self, house: House, before: Any, after: Any, key: list[str]) -> None:
        self.start(house, self.app(house, before, key=key))
        for _ in range(2):
            with pytest.raises(IdentityChanged, match=r"Previous\(message=…\)"):
                self.start(house, self.app(house, after, key=key))
        covered = self.app(house, after, key=key, previous=[Previous(message=before)])
        self.start(house, covered)
        house.consume_for_ten_minutes()
        self.start(house, self.app(house, after, key=key))

    def test_what_it_says_to_add_is_enough_where_the_field_has_another_name(self, house: House) -> None:
        self.start(house, self.app(house, self.ByUuid, key="order_id"))
        with pytest.raises(IdentityChanged, match=r"Previous\(key='order_id'\)\] \(and message=…"):
            self.start(house, self.app(house, self.ByNumber, key="number"))
        former = Previous(key="order_id", message=self.ByUuid)
        self.start(house, self.app(house, self.ByNumber, key="number", previous=[former]))

    @pytest.mark.parametrize(("before", "after"), [(ByUuid, ByText), (ByText, ByUuid), (ByUuid, dict)])
    @pytest.mark.parametrize("claim", ["early", "late"])
    def test_what_was_handled_is_a_duplicate(self, house: House, before: Any, after: Any, claim: str) -> None:
        """Ids are read as the former version read them, by both versions side by side."""
        old, new = (
            self.app(house, before, claim=claim),
            self.app(house, after, claim=claim, previous=[Previous(message=before)]),
        )
        for app in (old, new, old):
            self.start(house, app)
        body = {"order_id": str(self.ORDER)}
        assert old.protocol(house.publisher).process(sale("m-1", body)) is Outcome.HANDLED
        assert new.protocol(house.publisher).process(sale("m-2", body)) is Outcome.SKIPPED
        other = {"order_id": str(UUID(int=self.ORDER.int + 1))}
        assert new.protocol(house.publisher).process(sale("m-3", other)) is Outcome.HANDLED
        assert old.protocol(house.publisher).process(sale("m-4", other)) is Outcome.SKIPPED
        assert house.sales() == 2

    def test_what_the_former_class_does_not_take_was_not_handled_by_it(self, house: House) -> None:
        new = self.app(house, self.ByText, previous=[Previous(message=self.ByUuid)])
        assert new.protocol(house.publisher).process(sale("m-1", {"order_id": "order-7"})) is Outcome.HANDLED

    def test_earlier_releases_side_by_side(self, house: House) -> None:
        """They stored the key's name alone, and compare it word for word."""
        name = Identity(SELL, "field:order_id")
        agree = partial(house.store.upkeep.agree_identities, "shop", "shop")
        week = {SELL: timedelta(minutes=5)}
        agree([name], {}, week)
        self.start(house, self.app(house, self.ByUuid))
        agree([name], {}, week)
        self.start(house, self.app(house, self.ByUuid))
        house.consume_for_ten_minutes()
        self.start(house, self.app(house, self.ByUuid))
        with pytest.raises(IdentityChanged):
            self.start(house, self.app(house, self.ByText))

    def test_earlier_releases_find_what_they_would_have_stored(self, house: House) -> None:
        """However long ago they ran, if ever: going back is no change of the key."""
        self.start(house, self.app(house, self.ByUuid))

        found = [each for each in self.stored(house.store) if each[0] == SELL]
        assert found == [(SELL, "field:order_id"), (SELL, "field:order_id; read as uuid")]

    @staticmethod
    def stored(store: Any) -> list[tuple[str, str]]:
        """In the order in which they were stored, as far as they are current."""
        if isinstance(store.upkeep, SmallStore):
            return [(name, text) for (_, name, text), ended in store.upkeep.content.identities.items() if ended is None]
        tables = shared_tables()
        rows = select(tables.message_type.c.name, tables.identity.c.descriptor).join(
            tables.identity, tables.identity.c.type_id == tables.message_type.c.id
        )
        with store.engine.connect() as connection:
            current = rows.where(tables.identity.c.ended_at.is_(None)).order_by(tables.identity.c.id)
            return [tuple(row) for row in connection.execute(current)]

    def test_a_default_that_is_made_up_each_time_is_refused(self, house: House) -> None:
        """A message without the field would be handled at each delivery."""

        class MadeUp(BaseModel):
            order_id: UUID = Field(default_factory=uuid4)

        with pytest.raises(ConfigurationError, match="default_factory"):
            self.app(house, MadeUp).registry.build()
