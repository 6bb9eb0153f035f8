"""Stores that keep a claim with its entity: what they refuse, and that both say the same of the same mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session

import idemp.testing
from idemp import App, Context, Idempotent, Inbox, Outcome, Previous
from idemp.bulk import Bulk
from idemp.cli.mending import Mending
from idemp.errors import ConfigurationError
from idemp.inbox.document import document_of, session_of
from idemp.inbox.sql import SqlStore, SqlStreams, create_engine_safely
from idemp.inbox.stream import StreamInbox, stream_of
from idemp.settings import Settings
from tests.house import SELL, House, memory_house, sale
from tests.inbox.document.given import DocumentHouse
from tests.inbox.stream.house import memory_house as stream_house

if TYPE_CHECKING:
    from collections.abc import Callable

PER_ENTITY = [pytest.param(DocumentHouse, id="documents"), pytest.param(stream_house, id="streams")]


@pytest.fixture(params=PER_ENTITY)
def house(request: pytest.FixtureRequest) -> House:
    made: House = request.param()
    return made


@pytest.mark.parametrize("accessor", [document_of, session_of, stream_of])
def test_a_session_of_another_store_is_told_alike(accessor: Callable[[Context], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"session is a \w+, since its store is no .*App\(…, store="):
        accessor(idemp.testing.context(session=Session()))


def test_chunks_are_refused(house: House) -> None:
    """They leave outputs to a relay, which nobody has here; and on another engine the claims would stand elsewhere."""
    house.sells(entity="sku")
    engine = create_engine_safely("sqlite://")
    for bulk in (Bulk(house.app), Bulk(house.app, engine=engine)):
        with pytest.raises(ConfigurationError, match="Chunks can't be had on"):
            bulk.start()
    engine.dispose()


def test_a_wrapped_function_needs_a_publisher(house: House) -> None:
    """No relay would send what it emits."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve")

    inbox, policy = Inbox(house.app.store), Idempotent(entity="sku")
    with pytest.raises(ConfigurationError, match=r"without a publisher.* Say publisher="):
        inbox.wrap(sell, type=SELL, consumer="shop", policy=policy)
    handle = inbox.wrap(sell, type=SELL, consumer="shop", policy=policy, publisher=house.publisher)
    assert [handle(sale()), handle(sale())] == [Outcome.HANDLED, Outcome.REDISPATCHED]


def test_initiations_are_refused(house: House) -> None:
    with pytest.raises(ConfigurationError, match="initiation can't be had on"), house.app.initiate():
        pytest.fail("it began")


def test_no_other_database_takes_the_place_of_the_store(house: House) -> None:
    """On the command line: `idemp worker MODULE:APP --database URL` would handle anew what was handled."""
    store = house.app.store
    for app in (App("shop", store=store), App("shop", store=store, settings=Settings())):
        with pytest.raises(ConfigurationError, match="Leave out --database"):
            app.configure(Settings(database_url="sqlite://"), database=True)
        assert app.store is store


def test_the_kit_needs_a_store_of_the_same_kind(house: House) -> None:
    """On a database of its own it would say that handlers fail, or prove nothing."""
    app = App("shop", store=house.app.store, settings=Settings())
    app.handler(dict, type=SELL, policy=Idempotent(entity="sku"))(lambda message: None)
    with pytest.raises(ConfigurationError, match="with store=, which makes one"):
        idemp.testing.redeliver(app, {"sku": "A-1"}, type=SELL)


@pytest.mark.parametrize("make", [*PER_ENTITY, pytest.param(memory_house, id="memory")])
@pytest.mark.parametrize("claim", ["early", "late"])
def test_confirms_of_what_a_former_identity_handled_are_recorded(make: Callable[[], House], claim: str) -> None:
    house = make()
    policy: dict[str, Any] = {"entity": "sku", "claim": claim}
    former = App("shop", store=house.app.store, broker=house.broker, settings=house.app.settings, clock=house.clock)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve")

    former.handler(dict, type=SELL, policy=Idempotent(key="order_no", **policy))(sell)
    message = sale(body={"sku": "A-1", "order_no": 7, "order_id": "x"})
    assert former.protocol(house.publisher).process(message) is Outcome.HANDLED
    assert house.app.store.upkeep.pending_count() == 1, "it died before it had recorded the confirm"
    house.sells(**policy, key="order_id", previous=[Previous(key="order_no")])
    present = house.app.protocol(house.publisher)
    assert present.process(message) is Outcome.REDISPATCHED
    present.dispatcher.flush()
    assert house.app.store.upkeep.pending_count() == 0


def test_commands_that_reports_name_are_for_the_database_of_streams() -> None:
    engine = create_engine_safely("sqlite:///bank.db")
    app = App("bank", store=StreamInbox(SqlStreams(engine), SqlStore(engine)))
    assert Mending("bank:app", app, {}).upgrade().text == "idemp db upgrade --database sqlite:///bank.db"
    engine.dispose()


def shared_entities(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    return [
        (record.consumer, record.other, record.entity)  # type: ignore[attr-defined]
        for record in caplog.records
        if getattr(record, "event", None) == "entity_shared"
    ]


def test_consumers_that_share_an_entity_are_warned_of(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """When the second one writes to it; once in each process, and not for entities of their own."""

    def deliver(consumer: str, number: int, sku: str) -> Outcome:
        app = App(consumer, store=house.app.store, broker=house.broker, settings=Settings(), clock=house.clock)
        app.handler(dict, type=SELL, policy=Idempotent(entity="sku"))(lambda message: None)
        app.start()
        return app.protocol(house.publisher).process(sale(f"sale-{number}", {"sku": sku}))

    caplog.set_level("WARNING", "idemp.inbox")
    for number in range(3):
        assert deliver("shop", number, "A-1") is Outcome.HANDLED
        assert deliver("till", number, "B-1") is Outcome.HANDLED
    assert shared_entities(caplog) == []
    for number in range(3, 6):
        assert deliver("till", number, "A-1") is Outcome.HANDLED
    assert shared_entities(caplog) == [("till", "shop", "A-1")]
    assert deliver("shop", 6, "A-1") is Outcome.HANDLED
    assert shared_entities(caplog) == [("till", "shop", "A-1"), ("shop", "till", "A-1")]
