"""An inbox whose outputs are sent by its caller or by a relay thread; results, and messages of other libraries."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from idemp import AsyncInbox, ConfigurationError, Context, HandlerError, Idempotent, Inbox, Policy
from idemp.errors import DispatchIncomplete, UnusableOutput
from idemp.events import log
from idemp.ports import Verdict
from idemp.sql.records.claims import InboxRecords
from idemp.sql.scheduler import SqlScheduler
from idemp.testing.memory import MemoryBroker
from tests.conftest import every_path
from tests.worker.test_loop import wait_for
from tests.world import SINK, World, asynchronous_url, effect

POLICY = Idempotent(key="id")


class Pay(BaseModel):
    __message_type__ = "billing.Pay"
    id: int


@pytest.fixture
def world(url: str) -> Iterator[World]:
    world = World(url)
    yield world
    world.close()


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    engine = create_engine(world.url)
    yield engine
    engine.dispose()


@pytest.fixture
def inbox(engine: Engine) -> Iterator[Inbox]:
    inbox = Inbox(engine)
    yield inbox
    inbox.relay().stop()


def answer(message: Pay, ctx: Context) -> None:
    ctx.result = b"\x00%d" % message.id
    ctx.forward(b"", {"headers": {"task": "shop.pack"}}, to=SINK)


def wrap(inbox: Inbox, function: Callable[..., Any] = answer, **options: Any) -> Callable[..., Any]:
    return inbox.wrap(function, **{"message": Pay, "consumer": "billing", "policy": POLICY, **options})


def pay(inbox: Inbox, engine: Engine, number: int = 7, grace: float | None = 0.0) -> Context:
    with Session(engine) as session:
        with inbox.claim(session, {"id": number}, consumer="billing", type="billing.Pay", policy=POLICY, grace=grace) as unit:
            if not unit.duplicate:
                unit.send({"paid": True}, to=SINK, type="billing.Paid")
                unit.result = b"paid"
        session.commit()
    return unit


@every_path
def test_a_duplicate_gets_the_result_and_the_foreign_message(world: World, inbox: Inbox) -> None:
    inbox.relay(world.broker)
    outcomes = [wrap(inbox)({"id": 7}) for _ in range(2)]
    assert [(each.verdict, each.result) for each in outcomes] == [(Verdict.CLAIMED, b"\x007"), (Verdict.DUPLICATE, b"\x007")]
    wait_for(lambda: world.pending() == 0)
    (row,) = world.rows(SINK)
    assert (row.body, row.headers) == (b"", b'{"headers": {"task": "shop.pack"}}')
    records = InboxRecords(world.database)
    (claim,) = records.find("i:7")
    assert [(each.place, each.state) for each in records.outputs(claim)] == [
        (f"forward to {SINK}", "confirmed"),
        ("result for duplicates", "kept"),
    ]
    assert records.redispatch(claim, confirmed=True) == 1  # and not the result
    assert records.erase(claim) == 2
    assert [each.state for each in records.outputs(claim)] == ["erased", "erased"]
    assert (records.erase(claim), wrap(inbox)({"id": 7}).result) == (0, None)


def test_a_type_that_is_not_opted_in_has_a_result_of_each_run(world: World, inbox: Inbox) -> None:
    def count(message: Pay, ctx: Context) -> None:
        world.runs["7"] += 1
        ctx.result = b"%d" % world.runs["7"]

    handle = wrap(inbox, count, policy=Policy())
    assert [handle({"id": 7}).result for _ in range(2)] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("emit", "text"),
    [
        (lambda ctx: setattr(ctx, "result", "text"), "a result has to be bytes"),
        (lambda ctx: setattr(ctx, "result", bytes(17 * 1024 * 1024)), "at most 16,777,216"),
        (lambda ctx: ctx.forward("text", to=SINK), "a forwarded body has to be bytes"),
        (lambda ctx: ctx.forward(b"", {"headers": {"a": (1,)}}, to=SINK), "would come back changed"),
        (lambda ctx: ctx.forward(b"", {"headers": [1]}, to=SINK), "headers are a mapping"),
        (lambda ctx: ctx.forward(b"", {"declare": "x"}, to=SINK), "declare: not a property of AMQP"),
        (lambda ctx: ctx.forward(b"", {"headers": {"a": "x" * 10_000}}, to=SINK), "at most 9,000"),
        (lambda ctx: ctx.forward(b"", to=""), "to has to be text"),
        (lambda ctx: ctx.forward(b"", to=SINK, mandatory="no"), "has to be true or false"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_nothing_is_claimed(
    world: World, inbox: Inbox, emit: Callable[[Context], None], text: str
) -> None:
    with pytest.raises(UnusableOutput, match=text):
        wrap(inbox, lambda _message, ctx: emit(ctx))({"id": 7})
    assert world.claims() == 0


def test_nothing_is_forwarded_after_the_handling(inbox: Inbox) -> None:
    contexts: list[Context] = []
    wrap(inbox, lambda _message, ctx: contexts.append(ctx))({"id": 7})
    with pytest.raises(HandlerError, match="would never be stored"):
        contexts[0].forward(b"", to=SINK)


# A caller that sends by itself


@every_path
def test_a_caller_sends_after_its_own_commit(world: World, inbox: Inbox, engine: Engine) -> None:
    first = pay(inbox, engine, grace=600.0)
    assert SqlScheduler(world.database, "relay").lease_outputs(10, 1.0) == []  # they are the caller's
    again = pay(inbox, engine, grace=600.0)  # within the time of the first one
    assert (again.duplicate, again.result, [each.sendable for each in again.stored]) == (True, b"paid", [False])
    assert inbox.dispatch(again, world.broker.publisher()) == 0
    assert inbox.dispatch(first, world.broker.publisher()) == 1
    assert (world.pending(), len(world.rows(SINK)), pay(inbox, engine).stored) == (0, 1, [])


def test_what_is_not_committed_is_not_sent(world: World, inbox: Inbox, engine: Engine) -> None:
    inbox.prepare(consumer="billing", type="billing.Pay", policy=POLICY)
    with Session(engine) as session:
        with inbox.claim(session, {"id": 7}, consumer="billing", type="billing.Pay", policy=POLICY, grace=600.0) as unit:
            unit.send({"paid": True}, to=SINK, type="billing.Paid")
        session.rollback()
    assert inbox.dispatch(unit, world.broker.publisher()) == 0
    assert world.rows(SINK) == []


def test_what_the_broker_refuses_stays_for_a_relay(world: World, inbox: Inbox, engine: Engine) -> None:
    class Away:
        def send(self, outputs: Any) -> None:
            raise OSError("away")

        def publish(self, outputs: Any, timeout: float) -> Any:
            raise OSError("away")

        def close(self) -> None: ...

    assert inbox.dispatch(pay(inbox, engine, grace=600.0), Away()) == 0
    world.pass_time(1.0)
    assert len(SqlScheduler(world.database, "relay").lease_outputs(10, 1.0)) == 1


@pytest.mark.parametrize("kind", ["postgresql-psycopg", "postgresql-asyncpg", "sqlite-aiosqlite"], indirect=True)
def test_an_async_caller_sends_after_its_own_commit_or_by_a_thread(world: World) -> None:
    async def run() -> tuple[int, bytes | None]:
        engine = create_async_engine(asynchronous_url(world.url))
        inbox = AsyncInbox(engine)
        await inbox.prepare(consumer="billing", type="billing.Pay", policy=POLICY)
        units = []
        for _ in range(2):
            async with AsyncSession(engine) as session:
                options: dict[str, Any] = {"consumer": "billing", "type": "billing.Pay", "policy": POLICY, "grace": 600}
                async with inbox.claim(session, {"id": 7}, **options) as unit:
                    if not unit.duplicate:
                        unit.send({"paid": True}, to=SINK, type="billing.Paid")
                        unit.result = b"paid"
                await session.commit()
            units.append(unit)
        sent = await inbox.dispatch(units[0], world.broker.publisher())
        async with AsyncSession(engine) as session:
            async with inbox.claim(session, {"id": 8}, **{**options, "grace": 0}) as unit:
                unit.send({"paid": True}, to=SINK, type="billing.Paid")
            await session.commit()
        own = create_engine(world.url) if engine.driver == "asyncpg" else None  # else it is made from the URL
        relay = inbox.relay(world.broker, engine=own)
        assert relay is inbox.relay()
        await asyncio.to_thread(relay.wake)
        await asyncio.to_thread(relay.stop)
        await engine.dispose()
        return sent, units[1].result

    assert asyncio.run(run()) == (1, b"paid")
    assert (world.pending(), len(world.rows(SINK))) == (0, 2)


@pytest.mark.parametrize("grace", [-1, "15s", 1e9])
def test_a_grace_that_is_no_time_is_refused(world: World, inbox: Inbox, engine: Engine, grace: Any) -> None:
    with pytest.raises(ConfigurationError, match="nothing was claimed"):
        pay(inbox, engine, grace=grace)
    assert world.claims() == 0


def test_a_name_is_registered_before_the_transaction_of_the_caller(world: World, engine: Engine) -> None:
    """On SQLite the caller has the only write lock, so that nothing else can be written."""
    inbox = Inbox(engine)
    inbox.prepare(consumer="billing", type="billing.Pay", policy=POLICY)
    with Session(engine) as session:
        session.execute(effect.insert(), {"what": "7"})
        with inbox.claim(session, {"id": 7}, consumer="billing", type="billing.Pay", policy=POLICY):
            pass
        session.commit()
    assert world.claims() == 1
    with pytest.raises(ConfigurationError, match="key"):
        Inbox(engine).prepare(consumer="billing", type="billing.Pay", policy=Idempotent(key="other"))


# The relay thread


@every_path
def test_the_relay_thread_sends_what_no_worker_sends(world: World, inbox: Inbox, engine: Engine) -> None:
    scheduler, relay = SqlScheduler(world.database, "other"), inbox.relay()
    with pytest.raises(DispatchIncomplete):
        pay(inbox, engine, grace=None)
    relay.start()
    assert scheduler.relay_alive()
    pay(inbox, engine, grace=None)
    relay.wake()
    wait_for(lambda: world.pending() == 0)
    assert len(world.rows(SINK)) == 1
    relay.stop()
    assert not scheduler.relay_alive()
    pay(inbox, engine, 8)
    relay.wake()  # it starts again
    relay.stop()
    assert len(world.rows(SINK)) == 2


def test_a_wrapped_handler_wakes_the_relay(world: World, inbox: Inbox) -> None:
    inbox.relay()
    assert wrap(inbox)({"id": 7}).outputs == 0  # without it, this raises: no relay would be alive
    wait_for(lambda: world.pending() == 0)


def test_a_forked_process_has_a_relay_of_its_own(world: World, inbox: Inbox, engine: Engine) -> None:
    inbox.relay().start()
    child = os.fork()
    if not child:
        pay(inbox, engine)
        inbox.relay().wake()
        try:
            wait_for(lambda: world.pending() == 0)
        finally:
            inbox.relay().stop()
            os._exit(world.pending())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pay(inbox, engine, 8)
    inbox.relay().wake()
    wait_for(lambda: len(world.rows(SINK)) == 2)


def test_a_fork_waits_for_a_turn_of_the_relay(world: World, inbox: Inbox, engine: Engine) -> None:
    """In a child, a lock of SQLite's that the thread had at the fork would stay taken."""
    children = []
    for number in range(25):
        pay(inbox, engine, number)
        inbox.relay().wake()
        engine.dispose()
        if not (child := os.fork()):
            pay(inbox, engine, number)
            os._exit(0)
        children.append(child)
    wait_for(lambda: all(_ended(child) for child in children))


def _ended(child: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(child, os.WNOHANG)[0] != 0
    return True


def test_a_relay_to_another_broker_is_refused(world: World, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    app = world.app()
    app.adapters()  # which stores the identity of the SQL broker
    broker = MemoryBroker()
    with pytest.raises(ConfigurationError, match="these tables serve the broker 'sql'"):
        inbox.relay(broker).start()
    inbox.relay().wake()  # behind a COMMIT: nothing may escape
    assert "these tables serve the broker" in caplog.text
    with pytest.raises(ConfigurationError, match="a relay to another broker"):
        inbox.relay(MemoryBroker())


def test_the_relay_thread_survives_what_the_database_does(world: World, inbox: Inbox, engine: Engine) -> None:
    inbox.relay().start()
    failing = [SystemExit(1), OSError("away"), ValueError("a bug"), OSError("away")]

    def fail(*_: Any) -> None:
        if failing:
            raise failing.pop()

    event.listen(engine, "engine_connect", fail)
    wait_for(lambda: not failing)
    pay(inbox, engine)
    inbox.relay().wake()
    wait_for(lambda: world.pending() == 0)


def test_an_event_of_another_adapter_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "idemp")
    log("pigeon.lost", place="roof {}", error=OSError("storm"))
    assert caplog.records[0].getMessage() == "pigeon.lost: place=roof {} error=OSError: storm"
