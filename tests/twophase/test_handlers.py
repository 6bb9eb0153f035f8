"""What handlers may do with another database, and what they may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, exc, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from idemp import Context, Outcome
from idemp.broker.port import Ack, Delivery, Park, Retry
from idemp.errors import BranchUnavailable, GuaranteeError, HandlerError, TransactionEnded
from idemp.inbox.sql import create_engine_safely
from tests.inbox.sql.unseen import end_unseen
from tests.twophase.kinds import ON_MARIADB, ON_POSTGRESQL
from tests.twophase.world import Consumer, World, message

if TYPE_CHECKING:
    from collections.abc import Iterator

Misdeed = Callable[[Context], object]


@contextmanager
def handler_also(consumer: Consumer, does: Misdeed) -> Iterator[None]:
    consumer.after_writing.append(does)
    try:
        yield
    finally:
        consumer.after_writing.clear()


def handled(shop: World, n: int, does: Misdeed) -> tuple[Outcome, Any]:
    with handler_also(shop.consumer, does):
        return shop.consumer.protocol.handle(Delivery(message=message(n), queue="billing"))


def nothing_happened(shop: World, n: int) -> None:
    assert shop.effects(n) == [0, 0]
    assert shop.in_doubt() == []
    assert shop.decisions() == 0


def swallowed(does: Misdeed) -> Misdeed:
    def do(ctx: Context) -> None:
        with suppress(Exception):
            does(ctx)

    return do


def driver(ctx: Context) -> Any:
    return ctx.database("ledger").connection.connection.driver_connection


def closes_and_goes_on(ctx: Context) -> None:
    """Its next statement fails of it: no outage, after which it would run again for ever."""
    connection = ctx.database("ledger").connection
    with suppress(TransactionEnded):
        connection.close()
    connection.execute(text("SELECT 1"))


ENDINGS: dict[str, Misdeed] = {
    "session.commit": lambda ctx: ctx.database("ledger").session.commit(),
    "session.rollback": lambda ctx: ctx.database("ledger").session.rollback(),
    "session.close": lambda ctx: ctx.database("ledger").session.close(),
    "session.reset": lambda ctx: ctx.database("ledger").session.reset(),
    "connection.commit": lambda ctx: ctx.database("ledger").connection.commit(),
    "connection.rollback": lambda ctx: ctx.database("ledger").connection.rollback(),
    "connection.close": lambda ctx: ctx.database("ledger").connection.close(),
    "connection.close, and on": closes_and_goes_on,
    "COMMIT": lambda ctx: ctx.database("ledger").connection.execute(text("COMMIT")),
    "the driver's commit": lambda ctx: driver(ctx).commit(),
    "the inbox's": lambda ctx: ctx.session.commit(),
}


@pytest.mark.parametrize("swallows", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_ending_is_refused(shop: World, ending: str, swallows: bool) -> None:
    does = swallowed(ENDINGS[ending]) if swallows else ENDINGS[ending]
    outcome, settlement = handled(shop, 101, does)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"
    nothing_happened(shop, 101)


@pytest.mark.parametrize("end", ["rollback", "reset"])
def test_ending_an_unused_session_is_refused(shop: World, end: str) -> None:
    shop.consumer.before_writing.append(lambda ctx: getattr(ctx.database("ledger").session, end)())
    try:
        outcome, settlement = shop.consumer.protocol.handle(Delivery(message=message(160), queue="billing"))
    finally:
        shop.consumer.before_writing.clear()
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"
    nothing_happened(shop, 160)


@ON_POSTGRESQL  # MariaDB asks for the right to recover alone
def test_a_role_of_the_handlers_prepares_nothing(shop: World, unique_name: str) -> None:
    """Nobody else may commit what a role has prepared."""
    database: Any = shop.consumer.coordinator.databases["ledger"]

    def administers(*statements: str) -> None:
        with database.engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement.format(unique_name)))

    administers("CREATE ROLE {0}", "GRANT ALL ON ALL TABLES IN SCHEMA public TO {0}")
    try:
        takes = lambda ctx: ctx.database("ledger").connection.execute(text(f"SET LOCAL ROLE {unique_name}"))  # noqa: E731
        outcome, settlement = handled(shop, 161, takes)
        assert (outcome, type(settlement)) == (Outcome.RETRIED, Retry)
        nothing_happened(shop, 161)
        assert handled(shop, 162, lambda ctx: None)[0] is Outcome.HANDLED
    finally:
        administers("DROP OWNED BY {0}", "DROP ROLE {0}")


def test_driver_ends_it_behind_our_back(shop: World) -> None:
    """PostgreSQL: the handling is parked, and its claim is free. MariaDB itself refuses, and no harm is done."""
    outcome, settlement = handled(shop, 102, swallowed(lambda ctx: end_unseen(ctx.database("ledger").connection)))
    if not shop.is_postgresql("ledger"):
        assert outcome is Outcome.HANDLED
        return
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"
    assert shop.effects(102) == [0, 1], "that can't be taken back, and is said"
    assert shop.in_doubt() == []


def test_a_session_that_a_handler_changed_is_closed(shop: World) -> None:
    """Another delivery must not find it in the pool."""
    seen: list[Any] = []

    def change(ctx: Context) -> None:
        ctx.database("ledger").connection.exec_driver_sql("SET TIME ZONE 'UTC'" if on_postgresql else "SET @n = 1")
        seen.append(driver(ctx))

    on_postgresql = shop.is_postgresql("ledger")
    assert handled(shop, 140, change)[0] is Outcome.HANDLED
    assert handled(shop, 141, lambda ctx: seen.append(driver(ctx)))[0] is Outcome.HANDLED
    changed, kept = (bool(getattr(each, "closed", not getattr(each, "open", True))) for each in seen)
    assert (changed, kept) == (True, False)


def failing_statement(ctx: Context) -> None:
    ctx.database("ledger").connection.execute(text("SELECT 1 FROM nowhere"))


def test_statement_that_failed(shop: World) -> None:
    """Its error may not be swallowed on PostgreSQL, which would answer PREPARE with a ROLLBACK and no error."""
    outcome, settlement = handled(shop, 103, swallowed(failing_statement))
    if not shop.is_postgresql("ledger"):
        assert outcome is Outcome.HANDLED
        shop.all_is_well(103)
        return
    assert isinstance(settlement, Retry)
    assert "the handler went on" in settlement.reason
    nothing_happened(shop, 103)
    outcome, settlement = handled(
        shop, 103, swallowed(lambda ctx: ctx.connection.execute(text("SELECT 1 FROM nowhere")))
    )
    assert isinstance(settlement, Retry)
    assert "the handler went on" in settlement.reason
    nothing_happened(shop, 103)


class Unique(DeclarativeBase):
    pass


class Row(Unique):
    __tablename__ = "one_of_each"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_flush_that_fails(shop: World) -> None:
    """It is the handler's own affair, with the database's own error, also where the server refuses a plain ROLLBACK."""
    Unique.metadata.create_all(shop.engines["ledger"])

    def twice(ctx: Context) -> None:
        session = ctx.database("ledger").session
        session.add(Row(id=1))
        session.flush()
        session.connection().execute(text("INSERT INTO one_of_each (id) VALUES (2)"))
        session.add(Row(id=2))
        session.flush()

    _, settlement = handled(shop, 130, twice)
    assert isinstance(settlement, Retry)
    assert settlement.reason.startswith("IntegrityError")
    nothing_happened(shop, 130)
    _, settlement = handled(shop, 131, swallowed(twice))
    assert isinstance(settlement, Retry), "what it goes on with is not committed"
    nothing_happened(shop, 131)

    def partly(ctx: Context) -> None:
        session = ctx.database("ledger").session
        session.add(Row(id=1))
        session.flush()
        with suppress(exc.IntegrityError), session.begin_nested():
            session.execute(text("INSERT INTO one_of_each (id) VALUES (1)"))

    with handler_also(shop.consumer, partly):
        assert shop.consumer.deliver(132) is Outcome.HANDLED
    shop.all_is_well(132)
    Unique.metadata.drop_all(shop.engines["ledger"])


def test_handler_that_fails(shop: World) -> None:
    def fail(ctx: Context) -> None:
        raise ValueError("out of money")

    _, settlement = handled(shop, 104, fail)
    assert isinstance(settlement, Retry)
    assert settlement.counted
    nothing_happened(shop, 104)


@ON_POSTGRESQL  # MariaDB prepares it
def test_what_cannot_be_prepared(shop: World) -> None:
    create = text("CREATE TEMPORARY TABLE for_now (n int)")
    _, settlement = handled(shop, 105, lambda ctx: ctx.database("ledger").session.execute(create))
    assert isinstance(settlement, Retry)
    assert "can't be prepared" in settlement.reason
    assert settlement.counted
    nothing_happened(shop, 105)


@ON_MARIADB  # PostgreSQL can roll them back
def test_definitions_on_mariadb(shop: World) -> None:
    """They would commit."""
    create = text("CREATE TABLE more (n int)")
    _, settlement = handled(shop, 106, lambda ctx: ctx.database("ledger").session.execute(create))
    assert isinstance(settlement, Park)
    nothing_happened(shop, 106)


def test_database_that_the_policy_does_not_name(shop: World) -> None:
    _, settlement = handled(shop, 107, lambda ctx: ctx.database("stock"))
    assert isinstance(settlement, Retry)
    assert "'stock'" in settlement.reason
    nothing_happened(shop, 107)


def test_handler_that_does_not_ask_for_it(shop: World) -> None:
    """Nothing is begun there, prepared or noted."""
    assert shop.consumer.deliver(108, names=[]) is Outcome.HANDLED
    assert shop.effects(108) == [1, 0]
    assert shop.consumer.deliver(108, names=[]) is Outcome.REDISPATCHED


def test_duplicates_and_ids_that_are_taken(shop: World) -> None:
    assert shop.consumer.deliver(109) is Outcome.HANDLED
    assert shop.consumer.deliver(109) is Outcome.REDISPATCHED
    shop.all_is_well(109)


@ON_POSTGRESQL  # MariaDB has no such limit
def test_server_that_prepares_no_more(shop: World) -> None:
    """Nobody's fault: uncounted, and handled once there is room."""
    with shop.engines["ledger"].connect() as connection:
        room = int(connection.scalar(text("SHOW max_prepared_transactions")) or 0)
        taken = int(connection.scalar(text("SELECT COUNT(*) FROM pg_prepared_xacts")) or 0)
    names = [f"taking-room-{number}" for number in range(room - taken)]
    for name in names:
        with shop.engines["ledger"].connect() as connection:
            connection.execute(text("INSERT INTO foreigner (n) VALUES (2)"))
            connection.connection.driver_connection.execute(f"PREPARE TRANSACTION '{name}'")  # type: ignore[union-attr]
    try:
        _, settlement = handled(shop, 110, lambda ctx: None)
    finally:
        for name in names:
            with shop.engines["ledger"].connect() as connection:
                by_itself = connection.execution_options(isolation_level="AUTOCOMMIT")
                by_itself.exec_driver_sql(f"ROLLBACK PREPARED '{name}'")
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert "max_prepared_transactions" in settlement.reason
    nothing_happened(shop, 110)
    assert shop.consumer.deliver(110) is Outcome.HANDLED
    shop.all_is_well(110)


def test_session_is_of_the_users_own_factory(shop: World) -> None:
    class OwnSession(Session):
        pass

    engine = shop.engines["ledger"]
    consumer = Consumer(shop.place)
    database: Any = consumer.coordinator.databases["ledger"]
    database.session_factory = sessionmaker(engine, class_=OwnSession)
    seen: list[type] = []
    with handler_also(consumer, lambda ctx: seen.append(type(ctx.database("ledger").session))):
        assert consumer.deliver(111) is Outcome.HANDLED
    assert issubclass(seen[0], OwnSession)
    shop.all_is_well(111)
    consumer.close()


def test_deadlock_runs_again(shop: World) -> None:
    """Whatever the other database asks to do again is done again, from the claim on."""
    asked: list[int] = []

    def ask(ctx: Context) -> None:
        asked.append(1)
        if len(asked) == 1:
            error = exc.OperationalError("UPDATE", {}, _deadlock(shop))
            raise error

    with handler_also(shop.consumer, ask):
        assert shop.consumer.deliver(112) is Outcome.HANDLED
    assert len(asked) == 2
    shop.all_is_well(112)


def _deadlock(shop: World) -> BaseException:
    if shop.is_postgresql("ledger"):
        from psycopg.errors import DeadlockDetected

        return DeadlockDetected("deadlock detected")
    from pymysql.err import OperationalError

    return OperationalError(1213, "Deadlock found when trying to get lock")


def test_database_that_is_away(shop: World) -> None:
    database: Any = shop.consumer.coordinator.databases["ledger"]
    reachable, database.engine = database.engine, create_engine_safely(database.engine.url.set(port=1))
    try:
        with pytest.raises(BranchUnavailable, match="Database 'ledger'"):
            shop.consumer.deliver(113)
        # A handler that swallows it is not committed without its other half.
        with pytest.raises(BranchUnavailable):
            _without(shop, 113)
    finally:
        database.engine = reachable
    nothing_happened(shop, 113)


def _without(shop: World, n: int) -> None:
    with handler_also(shop.consumer, swallowed(lambda ctx: ctx.database("ledger"))):
        shop.consumer.deliver(n, names=[])


def test_engine_that_commits_by_itself(shop: World) -> None:
    """PostgreSQL: refused at start, and where the database was away at that time, before anything is written."""
    consumer = Consumer(shop.place)
    database: Any = consumer.coordinator.databases["ledger"]
    proper = database.engine
    database.engine = proper.execution_options(isolation_level="AUTOCOMMIT")
    if not shop.is_postgresql("ledger"):
        assert consumer.deliver(118) is Outcome.HANDLED, "XA has its own beginning"
        shop.all_is_well(118)
    else:
        with pytest.raises(GuaranteeError, match="AUTOCOMMIT"):
            database.verify()
        for does in (lambda ctx: ctx.database("ledger"), swallowed(lambda ctx: ctx.database("ledger"))):
            with pytest.raises(GuaranteeError, match="AUTOCOMMIT"), handler_also(consumer, does):
                consumer.deliver(118, names=[])
        nothing_happened(shop, 118)
    database.engine = proper
    consumer.close()


def test_statement_after_the_preparation(shop: World) -> None:
    """It would be in nobody's transaction, and lost without a word."""

    def listen(ctx: Context) -> None:
        ledger = ctx.database("ledger").connection
        late = text("INSERT INTO effect (n) VALUES (119)")
        event.listen(ctx.session, "before_commit", lambda _: ledger.execute(late))

    _, settlement = handled(shop, 119, listen)
    assert isinstance(settlement, Retry)
    assert settlement.counted
    nothing_happened(shop, 119)


@pytest.mark.parametrize("fails", [False, True])
def test_connection_in_a_transaction_of_its_own_after_the_preparation(shop: World, fails: bool) -> None:
    """Whatever the driver was told keeps no branch from its end, after the decision or without one."""
    n = 120 + fails

    def listen(ctx: Context) -> None:
        def late(_: Session) -> None:
            driver(ctx).cursor().execute("SELECT 1")
            if fails:
                raise ValueError("too late")

        event.listen(ctx.session, "before_commit", late)

    _, settlement = handled(shop, n, listen)
    if fails:
        assert isinstance(settlement, Retry)
        nothing_happened(shop, n)
    else:
        assert isinstance(settlement, Ack)
        shop.all_is_well(n)


def test_connections_go_back_as_they_were(shop: World) -> None:
    """After handlings that ended well and ill, whatever the pool hands out is in no transaction."""
    database: Any = shop.consumer.coordinator.databases["ledger"]
    opened: list[int] = []
    event.listen(database.engine, "connect", lambda *_: opened.append(1))
    for n in (114, 115, 116):
        assert shop.consumer.deliver(n) is Outcome.HANDLED
    assert len(opened) <= 2, "they are used again"
    with pytest.raises(HandlerError), handler_also(shop.consumer, lambda ctx: ctx.database("nowhere")):
        shop.consumer.deliver(117)
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    assert shop.in_doubt() == []
