"""Several brokers, one database: each pending output belongs to one of them."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import select, update

from idemp import App, Context, Idempotent
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Row, SqlSet
from idemp.errors import BrokerChanged, ConfigurationError
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore
from idemp.messages import Message, Output, OutputKind
from idemp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Tables
    from tests.inbox.sql.conftest import MovedClock

RELAY_AFTER = timedelta(seconds=30)
LEASE = timedelta(seconds=30)
OUTPUTS = "SELECT place, 'shop.Done' AS type, payload AS body, 'out' AS queue FROM {fresh}"


@pytest.fixture
def stores(engine: Engine, clock: MovedClock) -> Iterator[dict[str, SqlStore]]:
    """The same database, for three brokers."""
    made = {name: SqlStore(engine, clock=clock, broker=name) for name in ("default", "eu", "us")}
    yield made
    for store in made.values():
        store.close()


def outputs_of(number: int, size: int = 2) -> list[Output]:
    return [
        Output(
            id=uuid4(),
            ordinal=ordinal,
            kind=OutputKind.SEND,
            exchange="",
            routing_key="out",
            message=Message(body=b"x" * size, type="shop.Done"),
        )
        for ordinal in range(number)
    ]


def claim_of(text: str) -> Claim:
    return Claim(
        consumer="shop",
        id=effective_id("envelope", text),
        message_type="shop.Order",
        fingerprint=None,
        wait=timedelta(0),
    )


def early(store: SqlStore, outputs: Sequence[Output]) -> None:
    claim = claim_of(str(uuid4()))
    with store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        unit.store_outputs(claim, outputs, RELAY_AFTER)
        unit.commit()


def late(store: SqlStore, outputs: Sequence[Output]) -> None:
    claim = claim_of(str(uuid4()))
    with store.begin([claim], late=True) as unit:
        assert unit.claim_and_store(claim, outputs, RELAY_AFTER).verdict is Verdict.CLAIMED
        unit.commit()


def batch(store: SqlStore, outputs: Sequence[Output]) -> None:
    claims = [claim_of(str(uuid4())) for _ in outputs]
    with store.begin(claims) as unit:
        unit.claim_all(claims, timedelta(0))
        unit.store_all([(claim, [output]) for claim, output in zip(claims, outputs, strict=True)], RELAY_AFTER)
        unit.commit()


class TestLeases:
    @pytest.mark.parametrize(
        ("store_them", "outputs"),
        [(early, (2, 2)), (early, (2, 20_000)), (early, (9, 2)), (late, (2, 2)), (batch, (12, 2))],
        ids=["early", "large", "many", "late", "batch"],
    )
    def test_relay_leases_outputs_of_its_own_broker_alone(
        self, stores: dict[str, SqlStore], clock: MovedClock, store_them: Any, outputs: tuple[int, int]
    ) -> None:
        stored = {name: outputs_of(*outputs) for name in stores}
        for name, store in stores.items():
            store_them(store, stored[name])
        clock.move(seconds=RELAY_AFTER.total_seconds())
        for name, store in stores.items():
            taken = store.upkeep.take_pending(100, LEASE)
            assert {item.output.id for item in taken} == {output.id for output in stored[name]}
        assert stores["eu"].upkeep.waiting() == (dict.fromkeys(stores, outputs[0]), 0)

    def test_effects_belong_to_no_broker(self, stores: dict[str, SqlStore]) -> None:
        """Each worker of their consumer runs them."""
        effect = Output(
            id=uuid4(),
            ordinal=0,
            kind=OutputKind.EFFECT,
            exchange="",
            routing_key="mail",
            message=Message(body=b"{}"),
        )
        early(stores["eu"], [effect])
        assert stores["us"].upkeep.take_pending(10, LEASE) == []
        (taken,) = stores["us"].upkeep.take_effects("shop", 10, LEASE)
        assert taken.output.id == effect.id

    def test_what_the_former_release_stored_is_the_default_brokers(
        self, stores: dict[str, SqlStore], engine: Engine, tables: Tables, clock: MovedClock
    ) -> None:
        early(stores["eu"], outputs_of(1))
        with engine.begin() as connection:
            connection.execute(update(tables.pending).values(broker_id=None))
        clock.move(seconds=60)
        assert stores["eu"].upkeep.take_pending(10, LEASE) == []
        assert len(stores["default"].upkeep.take_pending(10, LEASE)) == 1

    def test_released_from_quarantine_it_is_still_its_brokers(
        self, stores: dict[str, SqlStore], clock: MovedClock
    ) -> None:
        (output,) = outputs_of(1)
        early(stores["eu"], [output])
        stores["default"].upkeep.quarantine({output.id: "returned"})
        assert stores["default"].upkeep.release_quarantined([output.id]) == 1
        assert stores["default"].upkeep.take_pending(10, LEASE) == []
        assert len(stores["eu"].upkeep.take_pending(10, LEASE)) == 1


@pytest.mark.parametrize("sets", [{}, {"shop.Order": SqlSet(outputs=OUTPUTS)}], ids=["handlers", "sets"])
def test_outputs_of_a_backfill_are_its_brokers(engine: Engine, sets: dict[str, Any], tables: Tables) -> None:
    app = App("shop", database=engine, broker=InMemoryBroker(), broker_name="eu", settings=Settings())

    @app.handler(dict, type="shop.Order", policy=Idempotent())
    def order(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="out", type="shop.Done")

    Bulk(app, sets=sets).run([Row(id=f"m-{n}", type="shop.Order", body=b"{}") for n in range(300)])
    with closing(app), engine.connect() as connection:
        names = select(tables.broker.c.name).join_from(
            tables.pending, tables.broker, tables.broker.c.id == tables.pending.c.broker_id, isouter=True
        )
        assert connection.scalars(names).all() == ["eu"] * 300


class TestLife:
    def test_relay_is_alive_for_its_own_broker(self, stores: dict[str, SqlStore]) -> None:
        """A delivery is acked with pending outputs only where a relay of *that* broker lives."""
        eu, us, default = stores["eu"], stores["us"], stores["default"]
        eu.upkeep.beat(relay=True, consumers=[])
        assert (eu.relay_alive(), us.relay_alive(), default.relay_alive()) == (True, False, False)
        default.upkeep.beat(relay=True, consumers=[])
        assert (us.relay_alive(), default.relay_alive()) == (False, True)
        assert {(row.broker, row.alive) for row in us.upkeep.workers() if row.relay} == {
            ("eu", True),
            ("default", True),
        }
        eu.upkeep.retire()
        assert not eu.relay_alive()


class TestNames:
    def test_two_brokers_of_one_name_are_refused(self, stores: dict[str, SqlStore]) -> None:
        upkeep = stores["default"].upkeep
        upkeep.agree_broker("RabbitMQ cluster 'a', virtual host '/'")
        upkeep.agree_broker("RabbitMQ cluster 'a', virtual host '/'")
        with pytest.raises(BrokerChanged, match=r"'default' belong to .*'/'; this is .*'billing'") as caught:
            upkeep.agree_broker("RabbitMQ cluster 'a', virtual host 'billing'")
        assert "IDEMP_BROKER_NAME" in caught.value.fix
        assert "idemp broker adopt" in caught.value.fix
        stores["eu"].upkeep.agree_broker("RabbitMQ cluster 'a', virtual host 'billing'")

    def test_name_that_is_in_use_already_gets_its_broker(self, stores: dict[str, SqlStore]) -> None:
        """A process that only initiates stores outputs before any worker has connected to the broker."""
        early(stores["eu"], outputs_of(1))
        assert stores["eu"].upkeep.brokers.stored("eu") is None
        stores["eu"].upkeep.agree_broker("a")
        with pytest.raises(BrokerChanged):
            stores["eu"].upkeep.agree_broker("b")

    def test_app_and_its_store_name_one_broker(self, stores: dict[str, SqlStore]) -> None:
        app = App("shop", store=stores["us"], broker=InMemoryBroker(), broker_name="eu", settings=Settings())
        with pytest.raises(ConfigurationError, match=r"named 'eu', and outputs of the SqlStore go to the broker 'us'"):
            app.start()

    @pytest.mark.parametrize("name", ["", "a b", "x" * 101])
    def test_names_that_can_not_be_ones(self, name: str) -> None:
        with pytest.raises(ValueError, match="broker_name"):
            Settings(broker_name=name)
