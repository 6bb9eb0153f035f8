"""Initiations, and the inbox around what exists already."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any
from uuid import UUID
from weakref import WeakSet

import pytest
from kombu import Connection, Exchange, Queue
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Engine, create_engine, exc, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from idemp import (
    App,
    ConfigurationError,
    Conflict,
    Context,
    DispatchIncomplete,
    Idempotent,
    Inbox,
    InFlight,
    Key,
    Policy,
    Previous,
    Refuse,
    Settings,
    TransactionEnded,
    Unreadable,
    Verdict,
    forks,
)
from idemp.dispatcher import Dispatcher
from idemp.errors import BlockEnded, BlockRolledBack, HandlerError, UnknownType, UnusableOutput
from idemp.sql.broker import SqlBroker
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.worker import Worker
from tests.conftest import every_database
from tests.world import SINK, Order, Shipped, World, effect, insert_and_send, metadata


@pytest.fixture
def world(url: str) -> World:
    return World(url)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    engine = create_engine(world.url)
    yield engine
    engine.dispose()


def initiate(app: App, id: str | None, number: int = 0) -> bool:
    with app.initiate(id) as unit:
        unit.session.execute(effect.insert(), {"what": "1"})
        unit.send(Shipped(order_id="1", part=0), to=SINK)
        unit.send(Shipped(order_id="1", part=2), to=SINK, delay="10m")
    return unit.duplicate


def test_an_initiation_commits_changes_and_messages_once(world: World) -> None:
    app = world.app()
    assert [initiate(app, "nightly") for _ in range(3)] == [False, True, True]
    assert (world.effects(), set(world.sent()), world.pending()) == ({"1": 1}, {("1", 0)}, 1)
    assert initiate(app, None) is initiate(app, None) is False
    assert world.effects() == {"1": 3}


def test_a_second_initiation_sends_what_the_first_one_stored(world: World) -> None:
    for part in range(2):
        with world.app().initiate("nightly") as unit:
            unit.send(Shipped(order_id="1", part=part), to=SINK)
    assert set(world.sent()) == {("1", 0)}


@pytest.mark.parametrize("id", [None, "nightly"])
def test_an_initiation_begins_once(world: World, id: str | None) -> None:
    app = world.app()
    initiation = app.initiate(id=id)
    for what in ("1", "2"):
        with contextlib.suppress(HandlerError), initiation as unit:
            unit.connection.execute(effect.insert(), {"what": what})
            unit.send(Shipped(order_id=what, part=0), to=SINK)
    with pytest.raises(HandlerError, match=r"begun before, and nothing was done now: call app.initiate\(\) for each block"):
        initiation.__enter__()
    assert (world.effects(), len(world.rows(SINK))) == ({"1": 1}, 1)
    other = app.initiate()
    with contextlib.suppress(ZeroDivisionError), other:
        1 / 0
    with pytest.raises(HandlerError), other:
        raise AssertionError


def test_an_initiation_that_fails_leaves_nothing(world: World) -> None:
    with pytest.raises(RuntimeError, match="boom"), world.app().initiate("nightly") as unit:
        unit.send(Shipped(order_id="1", part=0), to=SINK)
        raise RuntimeError("boom")
    assert (world.claims(), world.pending(), world.sent()) == (0, 0, {})


def test_an_initiation_whose_broker_is_away_is_sent_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    app = world.app()
    with app.initiate() as unit:
        unit.send(Shipped(order_id="1", part=0), to="nowhere")
    assert "committed, but the broker refused 1 outputs and no relay is alive" in caplog.text
    assert world.pending() == 1
    world.broker.declare("nowhere", [])
    world.pass_time(60)
    world.work(world.worker())
    assert (len(world.rows("nowhere")), world.pending()) == (1, 0)


@pytest.mark.parametrize("id", ["", " ", "a\0", "\ufffd", 7, None])
def test_an_id_of_no_use_is_no_shared_id(world: World, id: Any) -> None:
    app = world.app()
    if id is None:
        assert initiate(app, id) is initiate(app, id) is False
        return
    with pytest.raises(ConfigurationError, match="id has to be text"):
        initiate(app, id)


def test_a_handler_that_commits_its_initiation_is_refused(world: World) -> None:
    from idemp import TransactionEnded

    with pytest.raises(TransactionEnded), world.app().initiate() as unit:
        unit.session.commit()


def test_a_changed_key_or_another_broker_is_refused_at_start(world: World) -> None:
    world.send("1")
    world.work(world.worker())
    app = App("shop", settings=Settings(database_url=world.url))
    app.handler(Order, policy=Idempotent())(lambda message: None)
    with pytest.raises(ConfigurationError, match='key of shop.Order was "order_id" and is {message_id = true} now'):
        app.adapters()
    from idemp.sql.checks import check_broker

    assert [str(each) for each in check_broker(world.database, "rabbitmq:a")] == [
        "these tables serve the broker 'sql', not 'rabbitmq:a': outputs would go to the wrong one: set IDEMP_BROKER_URL, or use another IDEMP_TABLE_PREFIX"
    ]  # fmt: skip


def test_types_that_are_not_opted_in_are_named_at_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "idemp")
    worker = world.worker()
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.stop()
    thread.join(60)
    assert "not opted in, so these run on every delivery: shop.Plain" in caplog.text


# The inbox


class Pay(BaseModel):
    __message_type__ = "billing.Pay"
    model_config = ConfigDict(populate_by_name=True)
    payment_id: int = Field(alias="paymentId")


class Paid(BaseModel):
    __message_type__ = "billing.Paid"


def pay(message: Pay, ctx: Context) -> None:
    ctx.session.execute(effect.insert(), {"what": str(message.payment_id)})


def pay_and_tell(message: Pay, ctx: Context) -> None:
    pay(message, ctx)
    ctx.send(Paid(), to=SINK)


def wrap(engine: Engine, function: Callable[..., Any] = pay, **options: Any) -> Callable[..., Any]:
    options = {"policy": Idempotent(key="paymentId"), "consumer": "billing", "message": Pay, **options}
    return Inbox(engine).wrap(function, **options)


def test_a_wrapped_handler_takes_what_people_have(world: World, engine: Engine) -> None:
    handle = wrap(engine)
    assert handle(b'{"paymentId": 1}').verdict is Verdict.CLAIMED
    for same in ('{"paymentId": 1}', bytearray(b'{"paymentId": 1.0}'), {"paymentId": 1}, Pay(payment_id=1)):
        assert handle(same).verdict is Verdict.DUPLICATE
    assert handle({"paymentId": 2}, {"message_id": "x", "correlation_id": "c"}).verdict is Verdict.CLAIMED
    with pytest.raises(TypeError, match="a message is bytes"):
        handle(7)
    assert world.effects() == {"1": 1, "2": 1}


def test_a_wrapped_handler_takes_messages_of_kombu(world: World, engine: Engine) -> None:
    handle = wrap(engine, policy=Idempotent(key=Key.message_id()))
    outcomes = []
    with Connection("memory://") as connection, connection.channel() as channel:
        queue = Queue("pay", Exchange("pay"), routing_key="pay", channel=channel)
        queue.declare()
        with connection.Producer(channel) as producer:
            for _ in range(2):
                producer.publish({"paymentId": 7}, exchange="pay", routing_key="pay", message_id="same")
            producer.publish({"paymentId": 8}, exchange="pay", routing_key="pay", message_id="gz", compression="zlib")
        outcomes += [handle(queue.get(accept=["json"])).verdict for _ in range(3)]  # kombu decompresses the last one
    assert outcomes == [Verdict.CLAIMED, Verdict.DUPLICATE, Verdict.CLAIMED]
    assert world.effects() == {"7": 1, "8": 1}


def test_a_model_with_headers_is_compared_with_nothing(world: World, engine: Engine) -> None:
    handle, headers = wrap(engine), {"headers": {"traceparent": "00-1"}}
    for properties in (headers, {}, {"headers": None}):
        handle(Pay(payment_id=7), properties)
    assert handle({"paymentId": 7, "added": "by the next release"}, headers).verdict is Verdict.DUPLICATE
    with pytest.raises(Unreadable, match="headers are not a mapping"):
        handle(Pay(payment_id=8), {"headers": [1]})


STRANGE: list[Any] = [7, 1.5, True, b"7", ["7"], {"x": 1}, UUID(int=7), "x" * 256, "\ud800", "a\0b", ""]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_outputs_take_over_only_ids_that_can_be_sent(world: World, engine: Engine, value: Any) -> None:
    publisher = SqlBroker(world.database, "x").publisher()
    handle = wrap(engine, pay_and_tell, publisher=publisher)
    strange = {"headers": {"traceparent": value, "tracestate": "x" * 513}, "correlation_id": value, "message_id": value}
    assert handle(b'{"paymentId": 7}', strange).outputs == 1
    (row,) = world.rows(SINK)
    properties = json.loads(row.headers)
    assert properties["correlation_id"] == properties["message_id"]
    assert {name: len(text) <= 512 for name, text in properties.get("headers", {}).items()} in ({}, {"traceparent": True})


def test_what_keeps_a_message_from_being_acknowledged_raises(world: World, engine: Engine) -> None:
    handle = wrap(engine)
    handle({"paymentId": 1})
    with pytest.raises(Conflict):
        handle({"paymentId": 1, "cents": 5})
    with pytest.raises(Unreadable):
        handle({"paymentId": None})
    with pytest.raises(Unreadable):
        handle(b"{")
    with pytest.raises(UnknownType):
        handle(b"{}", {"type": "another"})

    def fail(message: Pay) -> None:
        raise Refuse("boom")

    with pytest.raises(Refuse):
        wrap(engine, fail)({"paymentId": 2})
    assert (world.effects(), world.claims(), world.rows()) == ({"1": 1}, 1, [])


def test_a_wrapped_handler_sends_its_outputs(world: World, engine: Engine) -> None:
    publisher = SqlBroker(world.database, "wrap").publisher()
    handle = wrap(engine, pay_and_tell, publisher=publisher)
    assert [handle({"paymentId": 1}).outputs for _ in range(2)] == [1, 0]
    assert (len(world.rows(SINK)), world.pending()) == (1, 0)


def test_a_redelivery_sends_at_once_what_is_pending(world: World, engine: Engine) -> None:
    for publisher in (None, SqlBroker(world.database, "wrap").publisher()):
        handle = wrap(engine, pay_and_tell, publisher=publisher)
        with pytest.raises(DispatchIncomplete):
            handle({"paymentId": 1})
        world.pass_time(-60)  # it is not due, however loaded the machine is
    assert handle({"paymentId": 1}, redelivered=True).outputs == 1
    assert (len(world.rows(SINK)), world.pending()) == (1, 0)


def test_outputs_without_publisher_and_relay_are_incomplete(world: World, engine: Engine) -> None:
    handle = wrap(engine, pay_and_tell)
    for _ in range(2):
        with pytest.raises(
            DispatchIncomplete, match="handled and committed; 1 of its outputs wait for a relay, and none is alive"
        ):
            handle({"paymentId": 1})
    SqlScheduler(world.database, "relay").beat("relay")
    assert (handle({"paymentId": 1}).verdict, world.effects()) == (Verdict.DUPLICATE, {"1": 1})
    world.pass_time(60)
    worker = world.worker()
    worker.relay.turn()
    assert len(world.rows(SINK)) == 1


def test_a_policy_without_deduplication_wraps_too(world: World, engine: Engine) -> None:
    handle = wrap(engine, policy=Policy())
    assert [handle({"paymentId": 1}).verdict for _ in range(2)] == [Verdict.CLAIMED] * 2
    assert world.effects() == {"1": 2}


def test_a_claim_in_a_transaction_of_ones_own(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    SqlScheduler(world.database, "relay").beat("relay")

    def handle(body: Any, commit: bool = True, **options: Any) -> bool:
        with Session(engine) as session:
            with inbox.claim(session, body, consumer="billing", policy=Idempotent(key="id"), **options) as unit:
                if not unit.duplicate:
                    session.execute(effect.insert(), {"what": "1"})
                    unit.send(Paid(), to=SINK)
            if commit:
                session.commit()
        return unit.duplicate

    assert handle(b'{"id": 7}', commit=False, type="shop.Pay") is False
    assert [handle(b'{"id": 7}', type="shop.Pay") for _ in range(2)] == [False, True]
    assert (world.effects(), world.pending()) == ({"1": 1}, 1)
    with pytest.raises(Conflict):
        handle(b'{"id": 7, "more": 1}', type="shop.Pay")
    with pytest.raises(UnknownType, match="pass type='package.Name'"):
        handle(b'{"id": 7}')
    world.pass_time(1)
    world.worker().relay.turn()
    assert (len(world.rows(SINK)), world.pending()) == (1, 0)


def test_a_claim_without_a_relay_is_refused_before_commit(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    policy = Idempotent(key="id")
    with (
        Session(engine) as session,
        pytest.raises(DispatchIncomplete, match="was rolled back: start one"),
        inbox.claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=policy) as unit,
    ):
        unit.send(Paid(), to=SINK)
    assert (world.claims(), world.pending()) == (0, 0)


def test_a_claim_whose_block_raises_is_rolled_back(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    with Session(engine) as session:
        with (
            pytest.raises(RuntimeError, match="boom"),
            inbox.claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=Idempotent(key="id")),
        ):
            session.execute(effect.insert(), {"what": "1"})
            raise RuntimeError("boom")
        session.commit()
    assert (world.claims(), world.effects()) == (0, {})


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)
def test_claims_need_no_second_connection(world: World) -> None:
    """As many threads as the pool has connections, in an inbox that has opened nothing and knows no type yet."""
    engine = create_engine(world.url, pool_size=2, max_overflow=0, pool_timeout=3)
    inbox, together, policy = Inbox(engine), threading.Barrier(2), Idempotent(key="id")
    SqlScheduler(world.database, "relay").beat("relay")
    failures: list[BaseException] = []

    def handle(number: int) -> None:
        try:
            with Session(engine) as session:
                session.execute(select(1))
                together.wait()
                with inbox.claim(session, {"id": number}, consumer="billing", type=f"shop.Pay{number}", policy=policy) as unit:
                    unit.send(Paid(), to=SINK)
                    together.wait()
                session.commit()
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=handle, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    assert (failures, world.claims(), world.pending()) == ([], 2, 2)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "postgresql-core", "mariadb", "mariadb-core"], indirect=True)
def test_a_claim_waits_for_its_holder_as_long_as_it_says(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    options: dict[str, Any] = {"consumer": "billing", "type": "shop.Pay", "policy": Idempotent(key="id")}
    with Session(engine) as holder, Session(engine) as other:
        with inbox.claim(holder, {"id": 1}, **options):
            with pytest.raises(InFlight, match="has not ended within 0.1 s"), inbox.claim(other, {"id": 1}, wait=0.1, **options):
                raise AssertionError
            assert not other.in_transaction()
        holder.commit()
        with inbox.claim(other, {"id": 1}, wait=0.1, **options) as unit:
            assert unit.duplicate
        refused: list[Any] = [0.0, -1.0, float("nan"), float("inf"), "2", None]
        for wait in refused:
            with (
                pytest.raises(ConfigurationError, match="nothing was claimed"),
                inbox.claim(other, {"id": 2}, wait=wait, **options),
            ):
                raise AssertionError


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)
def test_what_could_not_be_asked_is_not_called_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine(world.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    handle = Inbox(engine).wrap(insert_and_send, message=Order, consumer="billing", policy=Idempotent(key="order_id"))
    SqlScheduler(world.database, "relay").beat("relay")
    assert handle({"order_id": "1"}).verdict is Verdict.CLAIMED
    held: list[Any] = []
    dispatch = Dispatcher.dispatch

    def dispatch_and_hold(self: Dispatcher, works: Any) -> Any:
        refused = dispatch(self, works)
        held.append(engine.connect())
        return refused

    monkeypatch.setattr(Dispatcher, "dispatch", dispatch_and_hold)
    with pytest.raises(DispatchIncomplete, match="handled and committed.*could not be asked whether one is alive"):
        handle({"order_id": "2"})
    held[-1].close()
    engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_claim_in_a_session_that_commits_each_statement_is_refused(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    automatic = engine.execution_options(isolation_level="AUTOCOMMIT")
    with (
        engine.connect() as later,
        Session(automatic) as first,
        Session(later.execution_options(isolation_level="AUTOCOMMIT")) as second,
    ):
        for session in (first, second):
            with (
                pytest.raises(ConfigurationError, match="commits each statement: create it without isolation_level='AUTOCOMMIT'"),
                inbox.claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=Idempotent(key="id")),
            ):
                raise AssertionError
    assert world.claims() == 0
    with Session(engine) as session:  # the same message, in a transaction
        with inbox.claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=Idempotent(key="id")) as unit:
            assert not unit.duplicate
        session.commit()
    assert world.claims() == 1


class Large(BaseModel):
    __message_type__ = "billing.Large"
    __cloudevent__ = "structured"
    text: str


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("method", ["outputs", "store_on", "_is_late", "relay_alive"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_claim_that_fails_before_or_behind_its_block_is_not_committed_by_its_caller(
    world: World, engine: Engine, method: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    owner = {"outputs": Context, "relay_alive": SqlScheduler}.get(method, SqlStore)
    monkeypatch.setattr(owner, method, fail)
    policy, made = Idempotent(key="id"), {"timestamp": 1_700_000_000}
    with Session(engine) as session:
        with (
            pytest.raises(error),
            Inbox(engine).claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=policy, properties=made) as unit,
        ):
            session.execute(effect.insert(), {"what": "1"})
            unit.send(Paid(), to=SINK)
        session.commit()
    assert (world.claims(), world.effects(), world.pending()) == (0, {}, 0)


def test_a_claim_whose_output_is_too_long_is_rolled_back(world: World, engine: Engine) -> None:
    with Session(engine) as session:
        with (
            pytest.raises(UnusableOutput, match="the event has"),
            Inbox(engine).claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=Idempotent(key="id")) as unit,
        ):
            session.execute(effect.insert(), {"what": "1"})
            unit.send(Large(text="x" * (16 * 1024 * 1024 - 20)), to=SINK)
        session.commit()
    assert (world.claims(), world.effects()) == (0, {})


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_a_claim_whose_block_is_interrupted_is_not_committed_by_its_caller(
    world: World, engine: Engine, error: type[BaseException]
) -> None:
    with Session(engine) as session:
        with (
            pytest.raises(error),
            Inbox(engine).claim(session, {"id": 7}, consumer="billing", type="shop.Pay", policy=Idempotent(key="id")),
        ):
            session.execute(effect.insert(), {"what": "1"})
            raise error
        session.commit()
    assert (world.claims(), world.effects()) == (0, {})


def test_errors_say_whether_the_database_was_committed() -> None:
    assert [error.committed for error in (Conflict, InFlight, Refuse)] == [False] * 3


def test_a_former_type_and_key_are_duplicates_of_the_present_ones(world: World) -> None:
    world.send("1", message_id="m1")
    world.work(world.worker())

    class Renamed(Order):
        __message_type__ = "shop.OrderPlaced"

    def app(previous: Any) -> App:
        app = App("shop", settings=Settings(database_url=world.url))
        app.handler(Renamed, policy=Idempotent(previous=previous))(insert_and_send)
        world.apps.append(app)
        return app

    with pytest.raises(ConfigurationError, match="shop.OrderPlaced is new, and shop.Order is not handled any more"):
        app(None).adapters()
    worker = Worker(app(Previous(type="shop.Order", key="order_id")))
    world.receivers.append(worker.intake.receiver)
    world.send("1", type="shop.OrderPlaced", message_id="m1")  # the producer says it again under the new name
    world.send("1", message_id="m1")  # a redelivery of the former type
    world.send("2", "2", message_id="m2")
    world.work(worker)
    assert (world.effects(), world.dead()) == ({"1": 1, "2": 1}, [])


def test_ids_of_a_former_field_do_not_meet_those_of_the_present_one(world: World) -> None:
    class Numbered(BaseModel):
        __message_type__ = "shop.Numbered"
        number: int

    runs: list[int] = []

    def work(policy: Idempotent, *bodies: bytes) -> None:
        app = App("shop", settings=Settings(database_url=world.url))
        app.handler(Numbered, policy=policy)(lambda message: runs.append(message.number))
        for number, body in enumerate(bodies):
            world.send_raw(body, {"type": "shop.Numbered", "message_id": f"{body!r}{number}"})
        worker = Worker(app)
        world.apps.append(app)
        world.receivers.append(worker.intake.receiver)
        world.work(worker)

    before, now = Idempotent(key="number"), Idempotent(key=Key.header("x"), previous=Previous(key="number"))
    work(before, b'{"number": 1}', b'{"number": 2}')
    work(now, b'{"number": 1}', b'{"number": 3}', b'{"number": 3}')  # without a header: by the former key
    assert (runs, world.dead()) == ([1, 2, 3], [])


def test_a_release_before_a_rename_knows_what_the_later_one_has_handled(world: World) -> None:
    class Renamed(Order):
        __message_type__ = "shop.Renamed"

    def release(model: Any, previous: Previous | None = None) -> None:
        app = App("shop", settings=Settings(database_url=world.url))
        app.handler(model, policy=Idempotent(previous=previous))(insert_and_send)
        worker = Worker(app)
        world.apps.append(app)
        world.receivers.append(worker.intake.receiver)
        world.send("1", message_id="m")
        world.work(worker)

    release(Renamed, Previous(type="shop.Order"))
    release(Order)
    assert (world.effects(), world.dead()) == ({"1": 1}, [])


def test_options_of_the_settings_hold_for_claims_too(world: World, engine: Engine) -> None:
    inbox = Inbox(
        engine, settings=Settings(database_url=world.url, messages={"shop.Order": {"retention": "30d", "key": "order_id"}})
    )
    body = b'{"order_id": "1"}'
    with Session(engine) as session:
        with inbox.claim(session, body, consumer="shop", type="shop.Order") as unit:
            assert not unit.duplicate
        session.commit()
    world.pass_time(8 * 86_400)
    assert inbox._process.opened is not None
    assert inbox._process.opened[1].purge() == 0
    with Session(engine) as session, inbox.claim(session, body, consumer="shop", type="shop.Order") as unit:
        assert unit.duplicate


def test_a_late_message_leaves_no_claim_in_the_callers_transaction(world: World, engine: Engine) -> None:
    from idemp.errors import Late

    inbox = Inbox(engine)
    policy = Idempotent(key="order_id", retention="1h")
    with Session(engine) as session:
        with inbox.claim(session, b'{"order_id": "1"}', consumer="shop", type="shop.Order", policy=policy):
            pass
        session.commit()
    world.pass_time(7_200)
    assert inbox._process.opened is not None
    assert inbox._process.opened[1].purge() == 1
    with Session(engine) as session:
        old = {"timestamp": 1.6e9}
        with (
            pytest.raises(Late),
            inbox.claim(session, b'{"order_id": "2"}', consumer="shop", type="shop.Order", policy=policy, properties=old),
        ):
            raise AssertionError
        session.commit()
    assert world.claims() == 0


def test_a_second_wrap_is_compared_and_takes_the_former_type(world: World, engine: Engine) -> None:
    inbox, runs = Inbox(engine), []

    def handle(message: Order) -> None:
        runs.append(message.order_id)

    first = inbox.wrap(
        handle, message=Order, consumer="shop", policy=Idempotent(key="order_id", previous=Previous(type="shop.Old"))
    )
    assert first(b'{"order_id": "1"}', {"type": "shop.Old"}).verdict is Verdict.CLAIMED
    assert first(b'{"order_id": "1"}').verdict is Verdict.DUPLICATE
    second = inbox.wrap(handle, message=Order, consumer="shop", policy=Idempotent())
    with pytest.raises(ConfigurationError, match="the key of shop.Order was"):
        second(b'{"order_id": "1"}', {"message_id": "1"})
    with pytest.raises(Unreadable, match="headers are not a mapping"):
        first(b'{"order_id": "1"}', {"headers": [1]})
    assert runs == ["1"]


def test_an_error_of_one_owner_keeps_no_other_from_forgetting_at_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []

    class Owner:
        def forget(self) -> None:
            forgotten.append(self)
            raise RuntimeError("a listener of the engine")

    owners = [Owner(), Owner()]
    monkeypatch.setattr(forks, "_OWNERS", WeakSet(owners))
    with pytest.raises(RuntimeError):
        forks._forked()
    assert set(forgotten) == set(owners)


# Initiations in a session of the caller's


@every_database
def test_an_initiation_joins_a_session(world: World, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    app = world.app()
    if engine.dialect.name == "sqlite":
        app.adapters()  # before the session has the only write lock

    def place(id: str | None = None, *, fails: bool = False, commit: bool = True) -> bool:
        with Session(engine) as session:
            session.execute(effect.insert(), {"what": "before"})
            with suppress(ZeroDivisionError), app.initiate(id, session=session) as unit:
                if not unit.duplicate:
                    unit.session.execute(effect.insert(), {"what": "within"})
                    unit.connection.execute(effect.insert(), {"what": "connection"})
                unit.send(Paid(), to=SINK)
                if fails:
                    1 / 0
            if commit:
                session.commit()
            return unit.duplicate

    assert place() is False
    assert (world.effects(), world.pending()) == (dict.fromkeys(("before", "within", "connection"), 1), 1)
    unrelayed = [record for record in caplog.records if getattr(record, "event", "") == "output.unrelayed"]
    assert [record.fields for record in unrelayed] == [{"count": 1}]
    SqlScheduler(world.database, "relay").beat("relay")
    caplog.clear()
    place(fails=True)
    place(commit=False)
    assert (world.effects(), world.pending()) == (dict.fromkeys(("before", "within", "connection"), 1), 1)
    assert [place("order 7"), place("order 7")] == [False, True]
    assert (world.effects(), world.pending()) == ({"before": 3, "within": 2, "connection": 2}, 2)
    assert not caplog.records
    world.pass_time(1)
    world.worker().relay.turn()
    assert (len(world.rows(SINK)), world.pending()) == (2, 0)


@every_database
def test_an_initiation_that_cannot_be_stored_rolls_the_session_back(world: World, engine: Engine) -> None:
    app = world.app()
    app.adapters()
    with Session(engine) as session:
        session.execute(effect.insert(), {"what": "1"})
        with pytest.raises(UnusableOutput), app.initiate(session=session) as unit:
            unit.send({"text": float("nan")}, to=SINK, type="shop.Text")
        session.commit()
    assert (world.effects(), world.claims(), world.pending()) == ({}, 0, 0)


@every_database
def test_a_block_that_catches_a_database_error_is_no_success(world: World, engine: Engine) -> None:
    """On PostgreSQL, COMMIT would roll back without an error; elsewhere, the transaction is as good as before."""
    inbox = Inbox(engine)
    options: Any = {"consumer": "billing", "type": "shop.Pay", "policy": Idempotent(key="id")}
    refused = engine.dialect.name == "postgresql"
    ended: Any = pytest.raises(BlockRolledBack, match="nothing was committed") if refused else nullcontext()
    with Session(engine) as session:
        with ended, inbox.claim(session, {"id": 1}, **options):
            session.execute(effect.insert(), {"what": "1"})
            with suppress(exc.DBAPIError):
                session.execute(text("SELECT * FROM nowhere"))
        session.commit()
    assert (world.claims(), world.effects()) == ((0, {}) if refused else (1, {"1": 1}))


@every_database
def test_blocks_are_nested_and_their_transaction_is_proven(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    options: Any = {"consumer": "billing", "policy": Idempotent(key="id")}
    for type in ("shop.Pay", "shop.Order"):
        inbox.prepare(type=type, **options)
    with Session(engine) as session:
        with inbox.claim(session, {"id": 1}, type="shop.Pay", **options), session.begin_nested():
            with inbox.claim(session, {"id": 2}, type="shop.Order", **options):
                session.execute(effect.insert(), {"what": "1"})
            session.execute(effect.insert(), {"what": "2"})
        session.commit()
    assert (world.claims(), world.effects()) == (2, {"1": 1, "2": 1})


@pytest.mark.parametrize("kind", ["mariadb"], indirect=True)
def test_a_block_whose_statement_commits_is_found(world: World, engine: Engine) -> None:
    inbox = Inbox(engine)
    options: Any = {"consumer": "billing", "type": "shop.Pay", "policy": Idempotent(key="id")}
    with (
        Session(engine) as session,
        pytest.raises(BlockEnded, match="check with idemp inbox show"),
        inbox.claim(session, {"id": 1}, **options) as unit,
    ):
        session.execute(text("CREATE TABLE other (id integer)"))
        unit.send(Paid(), to=SINK)
    assert (world.claims(), world.pending()) == (1, 0)


@every_database
@pytest.mark.filterwarnings("ignore:transaction already deassociated")
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("claims", [False, True])
def test_a_block_that_ends_its_transaction_loses_no_output(world: World, engine: Engine, bound: bool, claims: bool) -> None:
    app, inbox = world.app(), Inbox(engine)
    app.adapters()
    SqlScheduler(world.database, "relay").beat("relay")
    ends: list[tuple[Callable[[Session], Any], bool]] = [
        (lambda session: session.commit(), False),
        (lambda session: session.rollback(), False),
        (lambda session: session.connection().commit(), True),
        (lambda session: session.close(), False),
        (lambda session: session.connection().connection.driver_connection.rollback(), False),
    ]
    for number, (end, commits) in enumerate(ends):
        before = world.effects()
        with engine.connect() as connection, Session(connection if bound else engine) as session:
            if claims:
                options: Any = {"consumer": "billing", "type": "shop.Pay", "policy": Idempotent(key="id")}
                block: Any = inbox.claim(session, {"id": str(number)}, **options)
            else:
                block = app.initiate(str(number), session=session)
            with pytest.raises((TransactionEnded, exc.InvalidRequestError, exc.ResourceClosedError)), block as unit:
                session.execute(effect.insert(), {"what": "1"})
                end(session)
                unit.send(Paid(), to=SINK)
            with suppress(exc.InvalidRequestError):
                session.commit()
            connection.commit()
        assert world.pending() == 0
        assert commits or world.effects() == before
    with Session(engine) as session:
        with app.initiate("kept", session=session) as unit, session.begin_nested():
            unit.send(Paid(), to=SINK)
        session.commit()
    assert world.pending() == 1


def test_a_session_that_cannot_be_joined_is_refused(world: World, engine: Engine, new_url: Callable[[], str]) -> None:
    app, other = world.app(), create_engine(new_url())
    metadata.create_all(other)
    with Session(other) as session:
        session.execute(effect.insert(), {"what": "1"})
        with pytest.raises(ConfigurationError, match="is not the database of idemp's tables"), app.initiate(session=session):
            pass
        session.commit()
    other.dispose()
    with (
        Session(engine, autoflush=False) as session,
        pytest.raises(ConfigurationError, match="AUTOCOMMIT|commits each statement"),
    ):
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with app.initiate(session=session):
            pass
    with pytest.raises(ConfigurationError, match="is not a session of SQLAlchemy"):
        app.initiate(session="x").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is not an AsyncSession"):
        asyncio.run(enter(app.initiate(session=Session(engine))))
    with pytest.raises(ConfigurationError, match="is an AsyncSession, which is for `async with`"):
        app.initiate(session=AsyncSession()).__enter__()
    assert (world.claims(), world.pending()) == (0, 0)


async def enter(block: Any) -> None:
    async with block:
        pass
