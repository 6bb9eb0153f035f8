"""A failed statement of the handler's is the handler's failure, or the database's: never "the handler rolled back"."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy import Integer, String, event, func, select, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery, Park, Retry, Topology
from idemp.errors import HandlerError, TransactionEnded
from idemp.inbox.sql import create_engine_safely
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables
from tests.inbox.sql.unseen import end_unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    from idemp.broker.port import Settlement

MODES = ["early", "late", "not opted in"]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order_with_key"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    sku: Mapped[str] = mapped_column(String(20))


class House:
    """One handler, given anew for each delivery."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self.engine = engine
        self.mode = mode
        Base.metadata.drop_all(engine)
        Base.metadata.create_all(engine)
        broker = InMemoryBroker()
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        self.app = App(
            "house", database=engine, broker=broker, settings=Settings(), session_factory=sessionmaker(engine)
        )
        policy = None if mode == "not opted in" else Idempotent(claim=mode)
        self.app.handler(dict, type="house.Do", policy=policy)(self.do)
        self.app.start()
        self.protocol = self.app.protocol(broker.publisher())
        self.runs = 0

    def do(self, message: dict[str, Any], ctx: Context) -> None:
        self.runs += 1
        ctx.send({}, to="stock", type="stock.Reserve")
        self.work(ctx)

    def deliver(self, work: Callable[[Context], object], message_id: str = "m-1") -> tuple[Outcome, Settlement]:
        self.work = work
        message = Message(body=b"{}", type="house.Do", message_id=message_id)
        return self.protocol.handle(Delivery(message=message, queue="house"))

    def count(self, table: str) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(text(table))) or 0

    def left_nothing(self) -> None:
        assert (self.count("idemp_inbox"), self.count("idemp_output"), self.count("order_with_key")) == (0, 0, 0)


@pytest.fixture(params=MODES)
def house(engine: Engine, request: pytest.FixtureRequest) -> House:
    return House(engine, request.param)


def add(ctx: Context, number: int = 1) -> None:
    ctx.session.add(Order(id=number, sku="A-1"))


def add_twice(ctx: Context) -> None:
    add(ctx)
    ctx.session.flush()
    ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'B-2')"))


def test_a_violation_in_a_flush_is_the_handlers_failure_and_counts(house: House) -> None:
    def violate(ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'B-2')"))
        add(ctx)

    outcome, settlement = house.deliver(violate)
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert settlement.counted
    assert "IntegrityError" in settlement.reason
    assert house.runs == 1
    house.left_nothing()
    assert house.deliver(add)[0] is Outcome.HANDLED


def test_a_violation_in_a_plain_statement_as_well(house: House) -> None:
    outcome, settlement = house.deliver(add_twice)
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert settlement.counted
    house.left_nothing()


def test_a_late_redelivery_that_fails_on_its_own_earlier_row_is_a_duplicate(engine: Engine) -> None:
    house = House(engine, "late")
    assert house.deliver(add)[0] is Outcome.HANDLED
    assert house.deliver(add)[0] is Outcome.REDISPATCHED
    assert house.count("order_with_key") == 1


def test_a_swallowed_failure_of_a_flush_is_never_committed(house: House) -> None:
    def swallow(ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'B-2')"))
        with suppress(IntegrityError):
            add(ctx)
            ctx.session.flush()

    assert house.deliver(swallow)[0] is Outcome.RETRIED
    house.left_nothing()


def test_a_swallowed_failure_of_a_plain_statement_loses_nothing_in_silence(house: House) -> None:
    """PostgreSQL would answer COMMIT with ROLLBACK and no error; the others go on without the failed statement."""

    def swallow(ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'A-1')"))
        with suppress(SQLAlchemyError):
            ctx.connection.execute(text("INSERT INTO no_such_table VALUES (1)"))

    outcome, _ = house.deliver(swallow)
    if house.engine.dialect.name == "postgresql":
        assert outcome is Outcome.RETRIED
        house.left_nothing()
    else:
        assert outcome is Outcome.HANDLED
        assert house.count("order_with_key") == 1


def test_a_database_that_asks_again_during_a_flush_is_asked_again(house: House) -> None:
    asked: list[int] = []

    def busy_once(ctx: Context) -> None:
        add(ctx)
        if not asked:
            asked.append(1)
            event.listen(ctx.session, "before_flush", deadlock, once=True)

    def deadlock(*_: object) -> None:
        raise OperationalError("INSERT", {}, asks_again(house.engine.dialect.name))

    assert house.deliver(busy_once)[0] is Outcome.HANDLED
    assert house.runs == 2
    assert house.count("order_with_key") == 1


DEADLOCK = {
    "postgresql": "DO $$ BEGIN RAISE 'deadlock' USING ERRCODE = '40P01'; END $$",
    "mariadb": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'deadlock'",
}


def test_a_deadlock_does_not_hide_a_commit_of_the_handlers_own(house: House) -> None:
    """The claim would pass for handled, with outputs that nobody stored."""
    deadlock = DEADLOCK.get(house.engine.dialect.name)
    if deadlock is None or house.mode != "early":
        return  # SQLite has no deadlocks, and nothing is claimed before a late claim

    def commit_and_lose(ctx: Context) -> None:
        add(ctx)
        ctx.session.flush()
        end_unseen(ctx.connection)
        ctx.connection.execute(text(deadlock))

    outcome, settlement = house.deliver(commit_and_lose)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == TransactionEnded.__name__
    assert (house.runs, house.count("idemp_inbox")) == (1, 0)
    assert house.deliver(lambda ctx: add(ctx, 2))[0] is Outcome.HANDLED
    assert house.count("idemp_output") == 1


@pytest.mark.parametrize("error", [ConnectionError("the index is away"), InvalidRequestError("no SQL here")], ids=type)
def test_a_listener_that_fails_after_commit_changes_nothing(
    house: House, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """It is committed: withdrawing the claim would have the effect done twice."""

    def listen(ctx: Context) -> None:
        add(ctx)
        event.listen(ctx.session, "after_commit", raising(error), once=True)

    assert house.deliver(listen)[0] is Outcome.HANDLED
    assert house.count("order_with_key") == 1
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["after_commit_failed"]
    if house.mode != "not opted in":
        assert house.deliver(add)[0] is Outcome.REDISPATCHED


@pytest.mark.parametrize("error", [ValueError("not today"), InvalidRequestError("no SQL here")], ids=type)
def test_a_listener_that_fails_before_commit_prevents_it(house: House, error: Exception) -> None:
    def listen(ctx: Context) -> None:
        add(ctx)
        event.listen(ctx.session, "before_commit", raising(error), once=True)

    outcome, settlement = house.deliver(listen)
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert str(error) in settlement.reason
    house.left_nothing()
    assert house.deliver(add)[0] is Outcome.HANDLED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
def test_a_listener_of_the_engine_that_fails_before_commit_leaves_nothing_open(
    own_engine: Engine, mode: str, first: bool
) -> None:
    """The connection goes back to the pool: what is open there would be committed by whoever gets it next."""
    failures: list[Exception] = []

    def fail(_connection: object) -> None:
        if failures:
            raise failures.pop()

    if first:
        event.listen(own_engine, "commit", fail)
    house = House(own_engine, mode)
    if not first:
        event.listen(own_engine, "commit", fail)
    failures.append(ValueError("not today"))
    outcome, settlement = house.deliver(add)
    assert failures == []
    if own_engine.dialect.name == "postgresql" and not first:
        assert outcome is Outcome.HANDLED  # ours had sent the message that commits
        return
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert "not today" in settlement.reason
    house.left_nothing()
    assert house.deliver(lambda ctx: add(ctx, 2), "m-2")[0] is Outcome.HANDLED
    assert house.count("order_with_key") == 1
    assert house.deliver(lambda ctx: add(ctx, 3))[0] is Outcome.HANDLED


@pytest.fixture
def own_engine(engine: Engine) -> Iterator[Engine]:
    """On the same database, with no listeners yet."""
    own = create_engine_safely(engine.url)
    yield own
    own.dispose()


def test_any_error_in_a_flush_is_the_handlers_own(house: House) -> None:
    """SQLAlchemy rolls back for it; that was not the handler."""

    def listen(ctx: Context) -> None:
        add(ctx)
        event.listen(Order, "before_insert", raising(ValueError("no such sku")), once=True)

    outcome, settlement = house.deliver(listen)
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert "no such sku" in settlement.reason
    house.left_nothing()


def raising(error: Exception) -> Callable[..., None]:
    def listener(*_: object) -> None:
        raise error

    return listener


def test_another_database_that_is_down_is_the_handlers_failure(house: House) -> None:
    """It must not hold up consumption as if the inbox's own database were away."""
    other = create_engine_safely("sqlite:////no/such/folder/other.db")

    def ask(ctx: Context) -> None:
        with other.connect():
            pass

    outcome, settlement = house.deliver(ask)
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert settlement.counted
    assert house.runs == 1


def test_closing_the_session_is_refused_instead_of_dropping_what_it_holds(house: House) -> None:
    def close(ctx: Context) -> None:
        with ctx.session as session:
            session.add(Order(id=1, sku="A-1"))

    outcome, settlement = house.deliver(close)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert "close" in settlement.headers["idemp-dead-error"]
    house.left_nothing()


@pytest.mark.parametrize("mode", ["early", "late"])
def test_a_commit_behind_our_back_and_then_a_failure_leaves_no_claim(engine: Engine, mode: str) -> None:
    """Otherwise the redelivery would be taken for a duplicate of a handling that never ended."""
    house = House(engine, mode)

    def misdeed(ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'A-1')"))
        driver: Any = ctx.connection.connection.dbapi_connection
        driver.commit()
        raise ValueError("later")

    outcome, settlement = house.deliver(misdeed)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == TransactionEnded.__name__
    assert house.count("idemp_inbox") == 0
    assert house.deliver(lambda ctx: add(ctx, 2))[0] is Outcome.HANDLED


@pytest.mark.parametrize("kind", ["not opted in", "early", "late"])
def test_an_aborted_transaction_says_so(postgresql_url: str, kind: Any) -> None:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    house = House(engine, kind)

    def swallow(ctx: Context) -> None:
        with suppress(SQLAlchemyError):
            ctx.connection.execute(text("SELECT 1 / 0"))

    house.work = swallow
    with pytest.raises(HandlerError, match=r"begin_nested"):
        house.protocol.process(Message(body=b"{}", type="house.Do", message_id="m-1"))
    engine.dispose()


def asks_again(dialect: str) -> Exception:
    """What the driver raises when the database asks to try again."""
    if dialect == "sqlite":
        busy = sqlite3.OperationalError("database is locked")
        busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
        return busy
    if dialect == "postgresql":
        return psycopg.errors.DeadlockDetected("deadlock detected")
    return pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")
