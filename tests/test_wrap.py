"""`Inbox.wrap` as a callable: idempotence around any function, without an App."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from idemp import Context, Idempotent, Inbox, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.errors import (
    ConfigurationError,
    DispatchIncomplete,
    IdentityChanged,
    IdInFlight,
    MissingId,
    PayloadConflict,
    SchemaError,
)
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.testing.store_bench import Background
from tests.inbox.sql.kept import make_tables


class Pay(BaseModel):
    __message_type__ = "billing.Pay"

    payment_id: int
    amount: int = 0


@pytest.fixture
def engine() -> Any:
    made = create_engine_safely("sqlite://")
    make_tables(made)
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE paid (id int)"))
    yield made
    made.dispose()


def paid(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM paid")) or 0


def pay(message: Pay, ctx: Context) -> None:
    """An ordinary function, unchanged by being wrapped."""
    ctx.session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.payment_id})
    ctx.send({"id": message.payment_id}, to="stock", type="stock.Paid")


def broker() -> InMemoryBroker:
    made = InMemoryBroker()
    made.declare(Topology(exchange="idemp", queues=("stock",)))
    return made


def test_object_message_and_duplicates(engine: Engine) -> None:
    there = broker()
    handle = Inbox(engine).wrap(
        pay, consumer="billing", policy=Idempotent(key="payment_id"), publisher=there.publisher()
    )
    assert handle(Pay(payment_id=1)) is Outcome.HANDLED
    assert handle(Message(body=b'{"payment_id": 1, "amount": 0}')) is Outcome.REDISPATCHED
    assert handle(Message(body=b'{"payment_id":2}', type="billing.Pay")) is Outcome.HANDLED
    with pytest.raises(PayloadConflict):
        handle(Pay(payment_id=1, amount=5))
    assert paid(engine) == 2
    assert len({message.message_id for message in there.browse("stock", 10)}) == 2


def test_marks_are_recorded_with_the_call(engine: Engine) -> None:
    inbox = Inbox(engine)
    handle = inbox.wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"), publisher=broker().publisher())
    handle(Pay(payment_id=1))
    assert inbox.store.upkeep.pending_count() == 0


def test_without_a_publisher_outputs_wait_for_a_relay(engine: Engine) -> None:
    inbox = Inbox(engine)
    handle = inbox.wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"))
    assert handle.outcome(Pay(payment_id=1)) is Outcome.PENDING
    assert inbox.store.upkeep.pending_count() == 1
    with pytest.raises(ConfigurationError, match="needs a publisher"):
        handle.on_message(object())


def test_failure_rolls_back_and_reaches_the_caller(engine: Engine) -> None:
    attempts: list[int] = []

    def failing(message: Pay, ctx: Context) -> None:
        pay(message, ctx)
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise ValueError("no money")

    handle = Inbox(engine).wrap(failing, consumer="billing", policy=Idempotent(key="payment_id"))
    with pytest.raises(ValueError, match="no money"):
        handle(Pay(payment_id=1))
    assert paid(engine) == 0
    assert handle.outcome(Pay(payment_id=1), attempt=2) is Outcome.PENDING
    assert (attempts, paid(engine)) == ([1, 2], 1)


@pytest.mark.parametrize("with_publisher", [True, False])
def test_a_call_that_returns_may_be_acked_with_its_outputs(engine: Engine, with_publisher: bool) -> None:
    """Outputs without a confirm: it raises as long as no relay lives that would send them."""
    publisher = InMemoryBroker().publisher() if with_publisher else None  # there is no queue `stock`
    inbox = Inbox(engine)
    handle = inbox.wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"), publisher=publisher)
    for _ in range(2):
        with pytest.raises(DispatchIncomplete, match="no relay is alive") as raised:
            handle(Pay(payment_id=1))
        assert raised.value.committed == "yes"
    assert paid(engine) == 1
    inbox.store.upkeep.beat("a relay", relay=True, consumers=[])
    assert handle(Pay(payment_id=1)) is Outcome.PENDING


@pytest.mark.parametrize("database", ["memory", "postgresql", "mariadb"])
def test_a_call_that_returns_was_handled(request: pytest.FixtureRequest, database: str) -> None:
    """While another run has the id: whoever ignored a value would ack a message of which nothing exists."""
    runs: list[int] = []
    store: Any = InMemoryStore()
    if database != "memory":
        made = create_engine_safely(request.getfixturevalue(f"{database}_url"))
        make_tables(made)
        store = SqlStore(made)
        request.addfinalizer(made.dispose)

    def inner(message: dict[str, int]) -> None:
        runs.append(message["id"])
        if len(runs) == 1:
            assert handle.outcome({"id": 1}) is Outcome.IN_FLIGHT
            with pytest.raises(IdInFlight, match="deliver it again") as raised:
                handle({"id": 1})
            assert raised.value.committed == "no"
            raise ValueError("no stock")

    policy = Idempotent(key="id", claim_wait="100ms")
    handle = Inbox(store).wrap(inner, dict, type="t", consumer="c", policy=policy)
    with pytest.raises(ValueError, match="no stock"):
        handle({"id": 1})
    assert (handle({"id": 1}), handle({"id": 1})) == (Outcome.HANDLED, Outcome.SKIPPED)
    assert runs == [1, 1]
    store.upkeep.close()


def test_id_that_is_missing_is_not_invented(engine: Engine) -> None:
    handle = Inbox(engine).wrap(pay, consumer="billing", policy=Idempotent())
    with pytest.raises(MissingId):
        handle(Pay(payment_id=1))
    assert paid(engine) == 0


def test_users_own_session_factory(engine: Engine) -> None:
    class Own(Session):
        pass

    seen: list[Any] = []

    def function(message: Pay, ctx: Context) -> None:
        seen.append(ctx.session)

    inbox = Inbox(engine, session_factory=sessionmaker(engine, class_=Own))
    inbox.wrap(function, consumer="billing", policy=Idempotent(key="payment_id"))(Pay(payment_id=1))
    assert isinstance(seen[0], Own)
    with pytest.raises(ConfigurationError, match="another engine"):
        Inbox(engine, session_factory=sessionmaker(create_engine("sqlite://")))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: scoped_session(sessionmaker()), "is a scoped_session, not a sessionmaker"),
        (lambda: Session, "is a type, not a sessionmaker"),
        (Session, "is a Session, not a sessionmaker"),
        (async_sessionmaker, "is a async_sessionmaker, not a sessionmaker"),
        (lambda: sessionmaker(autobegin=False), "autobegin=False"),
        (lambda: sessionmaker(twophase=True), "twophase=True"),
    ],
)
def test_session_factories_that_can_not_be_used_are_refused_at_once(
    engine: Engine, factory: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Inbox(engine, session_factory=factory())


@pytest.mark.parametrize("given", ["sqlite://", None])
def test_what_is_no_synchronous_engine_is_refused_at_once(given: Any) -> None:
    asynchronous = create_async_engine("postgresql+psycopg://nobody@127.0.0.1/none")
    for engine in (given, asynchronous, asynchronous.sync_engine):
        with pytest.raises(ConfigurationError, match="needs a synchronous SQLAlchemy engine"):
            Inbox(engine)  # type: ignore[arg-type]


def test_tables_are_checked_at_once() -> None:
    made = create_engine_safely("sqlite://")
    with pytest.raises(SchemaError, match="idemp db upgrade"):
        Inbox(made).wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"))
    made.dispose()


def test_prefix(engine: Engine) -> None:
    with pytest.raises(SchemaError, match="billing_"):
        Inbox(engine, prefix="billing_").wrap(pay, consumer="billing")
    upgrade(engine, Tables(prefix="billing_"))
    handle = Inbox(engine, prefix="billing_").wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"))
    assert handle.outcome(Pay(payment_id=1)) is Outcome.PENDING


def test_identity_changed_by_a_deploy(engine: Engine) -> None:
    Inbox(engine).wrap(pay, consumer="billing", policy=Idempotent(key="payment_id"))
    with pytest.raises(IdentityChanged):
        Inbox(engine).wrap(pay, consumer="billing", policy=Idempotent(key="amount"))


def test_two_consumers_of_one_inbox() -> None:
    store = InMemoryStore()
    runs: list[str] = []
    wrapped = [
        Inbox(store).wrap(
            lambda message, name=name: runs.append(name), dict, type="t", consumer=name, policy=Idempotent(key="id")
        )
        for name in ("billing", "audit")
    ]
    for handle in wrapped:
        assert [handle({"id": 1}), handle({"id": 1})] == [Outcome.HANDLED, Outcome.SKIPPED]
    assert runs == ["billing", "audit"]


def test_threads_share_it() -> None:
    runs: list[int] = []
    handle = Inbox(InMemoryStore()).wrap(
        lambda message: runs.append(message["id"]), dict, type="t", consumer="c", policy=Idempotent(key="id")
    )
    threads = [Background(lambda: [handle({"id": number}) for number in range(20)]) for _ in range(4)]
    outcomes = [outcome for thread in threads for outcome in thread.result(30)]
    assert sorted(runs) == list(range(20))
    assert outcomes.count(Outcome.HANDLED) == 20
    assert outcomes.count(Outcome.SKIPPED) == 60
