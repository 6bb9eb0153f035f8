"""The App: forms of the decorator, what handlers return, initiations, and what is refused at start."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from idemp import (
    App,
    ConfigurationError,
    Context,
    Idempotent,
    Key,
    Message,
    Outcome,
    Policy,
    Previous,
)
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Guarantees
from idemp.errors import GuaranteeError, IdentityChanged, OutputError, UnknownMessageType
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import OutputKind
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from tests.house import House, memory_house, sale, sql_house
from tests.inbox.sql.kept import make_tables


class Place(BaseModel):
    __message_type__ = "shop.Place"

    order_id: int


@dataclass
class Placed:
    __message_type__ = "shop.Placed"

    order_id: int


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made


@pytest.fixture
def app() -> App:
    return App("shop", store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings())


def types(app: App) -> list[str]:
    return [registration.message_type for registration in app.registry.registrations()]


class TestDecorator:
    def test_every_form_leaves_the_function_as_it_is(self, app: App) -> None:
        def one(message: Place) -> None: ...
        def two(message: Placed, ctx: Context) -> None: ...
        def three(message: dict[str, Any]) -> None: ...
        def four(message: Any) -> None: ...

        assert app.handler(one) is one
        assert app.handler()(two) is two
        assert app.handler(type="shop.Dict")(three) is three
        assert app.handler(Place, type="shop.Other", policy=Idempotent(key="order_id"))(four) is four
        assert types(app) == ["shop.Place", "shop.Placed", "shop.Dict", "shop.Other"]
        assert four(7) is None  # type: ignore[func-returns-value]

    @pytest.mark.parametrize(
        ("function", "words"),
        [
            (lambda: None, "does not say"), (lambda a, b, c: None, "does not say"), ("text", "can't be read"),
            (7, "can't be read"),
            (len, "does not say|can't be read"),
        ],
    )  # fmt: skip
    def test_no_handlers(self, app: App, function: Any, words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            app.handler(function)

    def test_no_handlers_even_with_a_class(self, app: App) -> None:
        async def asynchronous(message: Place) -> None: ...

        def too_many(message: Place, ctx: Context, more: int) -> None: ...
        def keyword(message: Place, *, needed: int) -> None: ...

        for function in (asynchronous, too_many, keyword, lambda: None):
            with pytest.raises(ConfigurationError, match=r"asynchronous|can't be a handler"):
                app.handler(Place)(function)

    def test_optional_parameters(self, house: House) -> None:
        seen: list[Any] = []

        def named(message: dict[str, Any], ctx: Context | None = None) -> None:
            seen.append(ctx is not None)

        def other(message: dict[str, Any], factor: int = 2) -> None:
            seen.append(factor)

        class Service:
            def method(self, message: dict[str, Any], ctx: Context) -> None:
                seen.append(ctx.message_id)

            def __call__(self, message: dict[str, Any]) -> None:
                seen.append("called")

        for number, function in enumerate(
            (named, other, Service().method, Service(), functools.partial(other, factor=3))
        ):
            house.app.handler(dict, type=f"shop.T{number}", policy=Idempotent())(function)
            house.deliver(sale(f"sale-{number}", type=f"shop.T{number}"))
        assert seen == [True, 2, "sale-2", "called", 3]

    def test_two_handlers_for_one_type(self, app: App) -> None:
        app.handler(dict, type="shop.A", aliases=["shop.B"])(lambda message: None)
        for name, aliases in (("shop.A", []), ("shop.B", []), ("shop.C", ["shop.A"]), ("shop.C", ["shop.B"])):
            with pytest.raises(ConfigurationError, match="two handlers"):
                app.handler(dict, type=name, aliases=aliases)(lambda message: None)

    @pytest.mark.parametrize("name", ["", " a", "a ", "x" * 256, "a\x00"])
    def test_names_that_are_none(self, app: App, name: str) -> None:
        with pytest.raises(ConfigurationError):
            app.handler(dict, type=name)(lambda message: None)
        with pytest.raises(ConfigurationError):
            App(name)

    def test_dicts_need_a_name(self, app: App) -> None:
        with pytest.raises(ConfigurationError, match="carry no type name"):
            app.handler(dict)(lambda message: None)

    def test_handler_added_later_is_found(self, app: App) -> None:
        app.handler(dict, type="shop.A")(lambda message: None)
        app.start()
        app.handler(dict, type="shop.B")(lambda message: None)
        assert app.registry.find(Message(body=b"", type="shop.B")).message_type == "shop.B"

    def test_looking_for_handlers_while_others_start(self, app: App) -> None:
        """Each thread of a worker wires itself while others consume already."""
        app.handler(dict, type="shop.A")(lambda message: None)
        app.start()
        stop: list[bool] = []

        def look() -> int:
            found = 0
            while not stop:
                app.registry.find_by_name("shop.A")
                found += 1
            return found

        looking = Background(look)
        for number in range(200):
            app.registry.build({"shop.A": {"attempts": number % 7 + 1}})
        stop.append(True)
        assert looking.result(30) > 0

    def test_default_type(self, house: House) -> None:
        house.app.registry.default_type = "shop.Place"
        house.app.handler(Place, policy=Idempotent(key="order_id"))(lambda message: None)
        assert house.deliver(sale(type=None, body={"order_id": 1})) is Outcome.HANDLED


class TestPartitions:
    """Several queues, an app each, are one consumer."""

    def test_renamed_one_is_refused_by_each_queue(self) -> None:
        engine, broker, runs = create_engine_safely("sqlite://"), InMemoryBroker(), list[tuple[str, int]]()
        make_tables(engine)

        def partitions(name: str, *, previous: tuple[Previous, ...] = ()) -> list[App]:
            apps = [App(name, queue=f"b.{each}", subscribe=False, database=engine, broker=broker) for each in range(3)]
            for app in apps:
                policy = Idempotent(key="order_id", previous=previous)
                app.handler(Place, policy=policy)(lambda place, _ctx: runs.append((name, place.order_id)))
            return apps

        message = Message(type="shop.Place", body=b'{"order_id": 1}', message_id="m-1")
        former = partitions("billing")
        for app in former:
            app.start()
        assert former[0].protocol(broker.publisher()).process(message) is Outcome.HANDLED
        for app in partitions("payments"):
            with pytest.raises(IdentityChanged, match="the queue's consumer was 'billing'"):
                app.start()
        renamed = partitions("payments", previous=(Previous(consumer="billing"),))
        for app in renamed:
            app.start()
        assert renamed[0].protocol(broker.publisher()).process(message) is Outcome.SKIPPED
        assert runs == [("billing", 1)]
        engine.dispose()


class TestReturned:
    """What a handler returns or yields is an output."""

    def run(
        self, house: House, result: Any, *, replies: bool = False, **properties: Any
    ) -> list[tuple[str, str, bytes]]:
        house.app.handler(dict, type="shop.Sell", policy=Idempotent(), replies=replies)(lambda message: result)
        house.deliver(sale(**properties))
        stored = house.app.store.upkeep.pending_count()
        assert stored == len(house.publisher.sent)
        return [(str(item.kind), item.routing_key, item.message.body) for item in house.publisher.sent]

    @pytest.fixture(autouse=True)
    def bound(self, house: House) -> None:
        from idemp.broker.port import Topology

        house.broker.declare(Topology(exchange="idemp", queues=("stock",), bindings=(Binding("stock", "#"),)))

    def test_message(self, house: House) -> None:
        assert self.run(house, Placed(1)) == [("publish", "shop.Placed", b'{"order_id":1}')]

    def test_several(self, house: House) -> None:
        assert [body for *_, body in self.run(house, [Placed(1), (Placed(2), None), Place(order_id=3)])] == [
            b'{"order_id":1}', b'{"order_id":2}', b'{"order_id":3}',
        ]  # fmt: skip

    def test_generator(self, house: House) -> None:
        def sell(message: dict[str, Any], ctx: Context) -> Iterator[Placed]:
            yield Placed(1)
            ctx.send({}, to="stock", type="stock.Reserve")
            yield Placed(2)

        house.app.handler(dict, type="shop.Sell", policy=Idempotent())(sell)
        house.deliver()
        assert [output.routing_key for output in house.publisher.sent] == ["shop.Placed", "stock", "shop.Placed"]

    def test_generator_that_fails_leaves_nothing(self, house: House) -> None:
        def sell(message: dict[str, Any]) -> Iterator[Placed]:
            yield Placed(1)
            raise ValueError("no")

        house.app.handler(dict, type="shop.Sell", policy=Idempotent())(sell)
        with pytest.raises(ValueError, match="no"):
            house.deliver()
        assert house.sent() == []

    def test_reply(self, house: House) -> None:
        assert self.run(house, Placed(1), replies=True, reply_to="stock") == [("reply", "stock", b'{"order_id":1}')]

    def test_reply_that_nobody_asked_for_is_published(self, house: House) -> None:
        assert self.run(house, Placed(1), replies=True)[0][0] == OutputKind.PUBLISH

    @pytest.mark.parametrize("result", [0, "", False, {}, [0], object()])
    def test_anything_else_is_an_error_before_commit(self, house: House, result: Any) -> None:
        with pytest.raises(OutputError):
            self.run(house, result)
        assert house.sent() == []


class TestStart:
    def test_topology(self, app: App) -> None:
        app.handler(dict, type="shop.A", aliases=["shop.B"], policy=Policy(retry_delays=["3s"]))(lambda message: None)
        made = app.topology()
        assert made.queues == ("shop",)
        assert made.bindings == (Binding("shop", "shop.A"), Binding("shop", "shop.B"))
        assert made.delays == (3.0, 5.0)

    def test_key_that_the_class_does_not_have(self, app: App) -> None:
        app.handler(Place, policy=Idempotent(key="order_no"))(lambda message: None)
        with pytest.raises(ConfigurationError, match=r"no field 'order_no'.*order_id"):
            app.start()

    def test_transport_that_loses_messages(self) -> None:
        class Lossy(InMemoryBroker):
            guarantees = Guarantees(  # type: ignore[assignment]
                name="lossy", at_least_once=False, confirms=False, delays="none", horizon_seconds=0
            )

        with pytest.raises(GuaranteeError, match="IDEMP_ALLOW_AT_MOST_ONCE"):
            App("shop", store=InMemoryStore(), broker=Lossy(), settings=Settings()).start()
        App("shop", store=InMemoryStore(), broker=Lossy(), settings=Settings(allow_at_most_once=True)).start()

    def test_window_shorter_than_the_horizon(self) -> None:
        app = App(
            "shop",
            store=InMemoryStore(),
            broker=InMemoryBroker(),
            settings=Settings(redelivery_horizon=timedelta(days=2)),
        )
        app.handler(dict, type="shop.A", policy=Idempotent(retention="1d"))(lambda message: None)
        with pytest.raises(ConfigurationError, match="shorter than the redelivery horizon"):
            app.start()

    def test_identity_changed_by_a_deploy(self) -> None:
        """Case 16b."""
        engine = create_engine_safely("sqlite://")
        make_tables(engine)

        def deploy(key: Any, *previous: Previous) -> None:
            app = App("shop", database=engine, broker=InMemoryBroker(), settings=Settings())
            app.handler(dict, type="shop.A", policy=Idempotent(key=key, previous=previous))(lambda message: None)
            app.start()
            app.store.upkeep.beat("w", relay=False, consumers=["shop"])

        deploy(Key.message_id())
        deploy(Key.message_id())
        with pytest.raises(IdentityChanged, match="previous="):
            deploy("order_id")
        deploy("order_id", Previous(key=Key.message_id()))
        with engine.connect() as connection:
            found = connection.scalars(text("SELECT descriptor FROM idemp_identity ORDER BY id")).all()
            assert found == ["message_id", "field:order_id", "field:order_id; read as json"]
        engine.dispose()

    def test_unknown_type_says_the_nearest(self, app: App) -> None:
        app.handler(Place)(lambda message: None)
        with pytest.raises(UnknownMessageType, match=r"Did you mean 'shop\.Place'"):
            app.registry.find(Message(body=b"", type="shop.Plaec"))

    def test_settings_change_too_late(self, app: App) -> None:
        app.start()
        app.configure(app.settings)  # nothing changes
        with pytest.raises(ConfigurationError, match="in use"):
            app.configure(Settings(prefetch=7))

    def test_a_closed_app_may_be_configured_anew(self) -> None:
        app = App("shop", broker="local://unused.db")
        for database in ("a.db", "b.db"):
            app.configure(Settings(database_url=f"sqlite:///{database}"))
            assert isinstance(app.store, SqlStore)
            assert app.store.engine.url.database == database
            app.close()
