"""Prepared messages: published if, and only if, the work commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, exc, make_url, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from idemp import App, ConfigurationError, Conflict, Settings
from idemp.errors import TransactionEnded, TransactionRolledBack
from idemp.prepared import Answer, BarrierMissed, Prepared, PreparedMessages, RolledBack, SqlBarrier, Undecided
from idemp.prepared.table import TableHome
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database, spelt
from idemp.sql.records.claims import InboxRecords
from idemp.testing import CrashPoints
from idemp.testing.app import let_pass
from idemp.testing.homes import HomeConformance
from idemp.worker import RelayProcess, Worker
from tests.prepared import SINK, TYPE, Shop, metadata, order
from tests.test_kills import run_until, some, watch
from tests.world import Order

KINDS = ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.slow)]
every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)


@pytest.fixture
def shop_url(kind: str, new_url: Callable[[], str], tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else new_url()


@pytest.fixture
def begin(url: str, shop_url: str) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def begin(**options: Any) -> Shop:
        made.append(Shop(url, shop_url, **options))
        return made[-1] if len(made) > 1 else made[-1].create()

    yield begin
    for each in made:
        each.close()


@every_kind
class TestTable(HomeConformance):
    @pytest.fixture
    def open_home(self, begin: Callable[..., Shop]) -> Callable[[], TableHome]:
        return lambda: begin().messages.table

    @pytest.fixture
    def pass_time(self, url: str) -> Iterator[Callable[[float], None]]:
        database = Database(url)
        yield lambda seconds: let_pass(database, seconds)
        database.close()


@every_kind
def test_a_message_is_published_with_its_work(begin: Callable[..., Shop]) -> None:
    shop = begin()
    assert shop.place("1")
    assert (shop.orders(), list(shop.published()), shop.waiting()) == (["1"], ["1"], 0)
    assert not shop.place("1")  # under the same key, nothing is done twice
    (ids,) = shop.published().values()
    assert (shop.orders(), len(ids), shop.waiting()) == (["1"], 1, 0)


@every_kind
def test_work_that_fails_publishes_nothing_and_uses_its_key_up(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with pytest.raises(RuntimeError, match="no"):
        shop.place("1", fails=True)
    with pytest.raises(RolledBack, match="take another key"):
        shop.place("1")
    shop.relay()
    assert (shop.orders(), shop.published(), shop.waiting()) == ([], {}, 0)


@every_kind
@pytest.mark.parametrize("how", [lambda session: session.rollback(), lambda session: session.connection().rollback()])
def test_work_that_rolls_back_by_itself_publishes_nothing(begin: Callable[..., Shop], how: Callable[[Session], None]) -> None:
    shop = begin()

    def work(session: Session) -> None:
        session.execute(order.insert(), {"id": "1"})
        how(session)

    with pytest.raises((TransactionEnded, exc.InvalidRequestError)):
        shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE).submit(work)
    shop.relay()
    assert (shop.orders(), shop.published(), shop.waiting()) == ([], {}, 0)


def test_work_is_not_begun_without_a_home(begin: Callable[..., Shop]) -> None:
    shop = begin()
    assert shop.messages.table.find() == []
    with shop.database.short() as connection:
        connection.execute(text("ALTER TABLE idemp_pending RENAME TO gone"))
    with pytest.raises(exc.OperationalError, match="no such table"):  # and not Undecided
        shop.place("1")
    assert shop.orders() == []


@every_kind
def test_in_steps(begin: Callable[..., Shop]) -> None:
    shop = begin()
    for _ in range(2):
        with (
            shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1") as preparation,
            shop.engine.begin() as connection,
        ):
            if preparation.pass_barrier(connection):
                connection.execute(order.insert(), {"id": "1"})
    assert (shop.orders(), list(shop.published())) == (["1"], ["1"])
    with pytest.raises(LookupError), shop.messages.prepare({"order_id": "2"}, to=SINK, type=TYPE, key="2"):
        raise LookupError("sold out")
    preparation = shop.messages.prepare({"order_id": "2"}, to=SINK, type=TYPE, key="2")
    with pytest.raises(RolledBack), preparation, shop.engine.begin() as connection:
        preparation.pass_barrier(connection)
    assert (shop.orders(), list(shop.published()), shop.waiting()) == (["1"], ["1"], 0)


@every_kind
def test_a_block_that_passes_no_barrier_raises_and_its_message_is_parked(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with (
        pytest.raises(BarrierMissed, match="'1' did not pass the barrier, so its work may or may not be committed") as raised,
        shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1"),
        shop.engine.begin() as connection,
    ):
        connection.execute(order.insert(), {"id": "1"})
    shop.relay()  # asks for nothing that is parked
    (found,) = shop.messages.table.find(["1"])
    assert (shop.orders(), shop.published(), found.state) == (["1"], {}, "parked")
    assert f"{found.id} is parked" in str(raised.value)
    assert "send it by app.initiate()" in found.reason
    shop.messages.table.resume([found.id])
    shop.relay()
    assert (shop.published(), shop.waiting()) == ({}, 0)


def test_a_block_that_raises_before_the_barrier_says_so(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with pytest.raises(LookupError) as raised, shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1"):
        raise LookupError("sold out")
    assert "what it committed, if anything, has no message '1'" in raised.value.__notes__[0]
    assert shop.waiting() == 0


def test_work_that_fails_in_a_block_which_goes_on_is_rolled_back(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1") as preparation:
        with suppress(LookupError), shop.engine.begin() as connection:
            preparation.pass_barrier(connection)
            raise LookupError("sold out")
        with shop.engine.begin() as connection:  # another transaction
            connection.execute(order.insert(), {"id": "sold out"})
    assert (preparation.answer, shop.waiting(), shop.published()) == ("rollback", 0, {})


@every_kind
def test_the_barrier_of_another_engine_is_refused(begin: Callable[..., Shop], new_url: Callable[[], str]) -> None:
    shop, elsewhere = begin(), begin_elsewhere(new_url())
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    refused = pytest.raises(ConfigurationError, match="another engine .* so nothing is committed")
    with refused, preparation, elsewhere.begin() as connection:
        connection.execute(order.insert(), {"id": "1"})
        preparation.pass_barrier(connection)
    with elsewhere.connect() as connection:
        assert connection.scalars(select(order.c.id)).all() == []
    assert (shop.waiting(), shop.published()) == (0, {})
    elsewhere.dispose()


def begin_elsewhere(url: str) -> Engine:
    """Return the engine of another database that has a barrier, too."""
    made, arguments = spelt(make_url(url))
    engine = create_engine(made, **arguments)
    metadata.create_all(engine)
    SqlBarrier(engine).create()
    return engine


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_the_barrier_of_another_schema_is_noticed(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with shop.engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant"))
        for name in ("orders", "idemp_barrier"):
            connection.execute(text(f"CREATE TABLE tenant.{name} (LIKE {name} INCLUDING ALL)"))
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    with pytest.raises(BarrierMissed, match="has no row"), preparation, shop.engine.begin() as connection:
        connection.execute(text("SET LOCAL search_path TO tenant"))
        if preparation.pass_barrier(connection):
            connection.execute(order.insert(), {"id": "1"})
    shop.relay()
    assert [each.state for each in shop.messages.table.find(["1"])] == ["parked"]


def test_a_barrier_is_not_passed_before_the_message_is_stored(begin: Callable[..., Shop]) -> None:
    shop = begin()
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    with pytest.raises(ConfigurationError, match="not stored yet"), shop.engine.begin() as connection:
        connection.execute(order.insert(), {"id": "1"})
        preparation.pass_barrier(connection)
    assert shop.orders() == []


@every_kind
def test_the_checker_waits_for_work_in_flight(begin: Callable[..., Shop]) -> None:
    """It gives up after some seconds, and comes again; work that comes after its answer is refused."""
    shop, asked, answers = begin(), threading.Event(), list[Answer]()
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    preparation.__enter__()
    asking = threading.Thread(target=lambda: (asked.set(), answers.append(shop.barrier.ask(preparation.prepared))))
    with shop.engine.begin() as connection:
        assert preparation.pass_barrier(connection)
        connection.execute(order.insert(), {"id": "1"})
        asking.start()
        asked.wait()
        if shop.engine.dialect.name != "sqlite":  # where it waits for all that is written
            asking.join(30)
            assert answers == ["unknown"]
    asking.join(30)
    assert shop.barrier.ask(preparation.prepared) == "commit"
    shop.relay()
    assert list(shop.published()) == ["1"]


@every_kind
def test_another_message_under_a_key_is_refused(begin: Callable[..., Shop]) -> None:
    shop = begin()
    shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1").__enter__()
    with pytest.raises(Conflict, match="another message is prepared under the key '1'"):
        shop.messages.prepare({"order_id": "2"}, to=SINK, type=TYPE, key="1").submit(lambda session: None)
    shop.relay()
    assert (shop.published(), shop.waiting()) == ({}, 0)


@every_kind
def test_work_that_lost_its_transaction_commits_nothing_behind_the_checker(begin: Callable[..., Shop]) -> None:
    shop = begin()
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")

    def work(session: Session) -> None:
        connection = session.connection()
        connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
        if connection.dialect.name != "sqlite":
            assert shop.barrier.ask(preparation.prepared) == "rollback"
        connection.execute(order.insert(), {"id": "1"})

    with pytest.raises(TransactionRolledBack):
        preparation.submit(work)
    shop.relay()
    assert (shop.orders(), shop.published(), shop.waiting()) == ([], {}, 0)


@every_kind
def test_steps_that_lost_their_transaction_commit_nothing(begin: Callable[..., Shop]) -> None:
    shop = begin()
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    with shop.engine.connect() as connection:
        with pytest.raises(TransactionRolledBack), preparation, connection.begin():
            assert preparation.pass_barrier(connection)
            connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
            connection.execute(order.insert(), {"id": "1"})
        connection.execute(order.insert(), {"id": "2"})
        connection.commit()  # of another transaction
    shop.relay()
    assert (shop.orders(), shop.published(), shop.waiting()) == (["2"], {}, 0)


@every_kind
@pytest.mark.parametrize("below", [True, False])
def test_work_that_commits_by_itself(begin: Callable[..., Shop], below: bool) -> None:
    shop = begin()

    def work(session: Session) -> None:
        session.execute(order.insert(), {"id": "1"})
        if below:
            session.connection().connection.driver_connection.commit()  # type: ignore[union-attr]
        else:
            session.execute(text("COMMIT"))
        session.execute(order.insert(), {"id": "1"})

    with pytest.raises(TransactionEnded) as raised:
        shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1").submit(work)
    assert raised.value.committed is below
    shop.relay()
    assert shop.orders() == list(shop.published()) == (["1"] if below else [])


@every_kind
def test_a_used_key_publishes_no_other_message(begin: Callable[..., Shop]) -> None:
    shop = begin()
    assert shop.place("1")
    other = shop.messages.prepare({"order_id": "other"}, to=SINK, type=TYPE, key="1")
    with pytest.raises(Conflict, match="under the key '1'"):
        other.submit(lambda session: None)
    with pytest.raises(Conflict), other, shop.engine.begin() as connection:
        other.pass_barrier(connection)
    shop.relay()
    assert (list(shop.published()), shop.waiting()) == (["1"], 0)


def test_an_app_has_one_checker_and_work_is_plain(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with pytest.raises(ConfigurationError, match="an App of their own"):
        PreparedMessages(shop.app, Oracle("commit"))

    async def work(session: Session) -> None: ...

    with pytest.raises(ConfigurationError, match="takes a plain function"):
        shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE).submit(work)


def test_a_deadlock_runs_the_work_again(begin: Callable[..., Shop]) -> None:
    shop, runs = begin(), list[int]()

    def work(session: Session) -> None:
        runs.append(1)
        session.execute(order.insert(), {"id": "1"})
        if len(runs) < 3:
            import sqlite3

            busy = sqlite3.OperationalError("database is locked")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise exc.OperationalError("", {}, busy)

    assert shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1").submit(work)
    assert (len(runs), shop.orders(), list(shop.published())) == (3, ["1"], ["1"])


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("reachable", [True, False])
def test_a_lost_answer_to_commit(begin: Callable[..., Shop], committed: bool, reachable: bool) -> None:
    shop = begin()

    def lose(connection: Any) -> None:
        if committed:
            connection.connection.driver_connection.commit()
        if not reachable:
            event.remove(units, "commit", lose)
            event.listen(short, "begin", refuse)
        raise exc.OperationalError("COMMIT", {}, Exception("the connection was lost"))

    def refuse(connection: Any) -> None:
        raise exc.OperationalError("BEGIN", {}, Exception("nobody answers"))

    def lose_once(connection: Any) -> None:
        event.remove(units, "commit", lose_once)
        lose(connection)

    units: Any = shop.barrier._database.units
    short: Any = shop.barrier._database._short
    shop.messages.table
    event.listen(units, "commit", lose_once if reachable else lose)
    if not reachable:
        with pytest.raises(Undecided, match="call again with the same key"):
            shop.place("1")
        event.remove(short, "begin", refuse)
        shop.relay()
    elif committed:
        assert shop.place("1")
    else:
        with pytest.raises(exc.OperationalError):
            shop.place("1")
    assert shop.orders() == list(shop.published()) == (["1"] if committed else [])
    assert shop.waiting() == 0


class Oracle:
    """A checker that says what it is told."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)

    def ask(self, prepared: Prepared) -> Answer:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_checker_that_does_not_know_is_asked_again_then_the_message_is_parked(
    begin: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    nonsense: Any = None
    oracle = Oracle("unknown", RuntimeError("away"), RuntimeError("away"), "unknown", nonsense)
    shop = begin(checker=oracle, checks=2)
    with shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1"):
        pass
    with pytest.raises(ConfigurationError, match="is not a SqlBarrier"):
        shop.place("2")
    table = shop.messages.table
    for _ in range(10):
        let_pass(shop.database, 61)
        shop.messages.check()
    assert oracle.answers == []  # what nobody answered did not count, and what is parked is not asked for
    (found,) = table.find(["1"])
    assert (found.state, found.app, found.type, found.reason) == (
        "parked",
        "orders",
        TYPE,
        "asked 2 times for the outcome of the work",
    )
    assert "prepared.parked" in [getattr(record, "event", "") for record in caplog.records]
    # Commands about outputs do not publish what is undecided.
    assert InboxRecords(shop.database).redispatch_quarantined() == 0
    oracle.answers = ["unknown", "commit"]
    assert (table.resume([found.id]), table.resume(["unknown"])) == (1, 0)
    shop.messages.check()
    assert (table.find()[0].state, table.find()[0].checks, shop.published()) == ("waiting", 1, {})
    assert table.park_ids([found.id], "asks the lawyers") == 1
    assert table.find()[0].reason == "asks the lawyers"
    table.resume([found.id])
    shop.relay()
    assert (list(shop.published()), table.find(), shop.waiting()) == (["1"], [], 0)


def test_a_message_that_the_broker_refuses_is_an_output_like_others(begin: Callable[..., Shop]) -> None:
    shop = begin()
    assert shop.messages.prepare({"order_id": "1"}, to="nowhere", type=TYPE, key="1").submit(lambda session: None)
    assert (shop.waiting(), shop.messages.table.find()) == (1, [])
    table = shop.messages.table
    for _ in range(20):
        if not table.find():
            shop.relay()
    (record,) = table.find(["1"])
    assert (record.state, record.checks, table.find(parked=True)) == ("quarantined", -1, [])
    SqlBroker(shop.database, "late").declare("nowhere", [])
    shop.relay()
    assert (shop.waiting(), table.resume([record.id])) == (1, 1)
    shop.relay()
    assert (shop.waiting(), table.find()) == (0, [])


def test_apps_check_their_own_messages_and_rows(begin: Callable[..., Shop], url: str, shop_url: str) -> None:
    shop = begin()
    other = App("invoices", settings=Settings(database_url=url))
    others = PreparedMessages(other, Oracle("commit"))
    shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1").__enter__()
    others.prepare({"order_id": "2"}, to=SINK, type=TYPE, key="1").__enter__()  # another app, so another key
    let_pass(shop.database, 61)
    assert (others.check(), others.check(), list(shop.published())) == (1, 0, ["2"])
    assert [(each.app, each.key) for each in shop.messages.table.find()] == [("orders", "1")]
    other.close()


def test_rows_of_the_barrier_are_kept_for_what_waits(begin: Callable[..., Shop]) -> None:
    shop = begin()
    shop.place("1")
    with shop.engine.begin() as connection:
        waiting = shop.messages.prepare({"order_id": "2"}, to=SINK, type=TYPE, key="2")
        waiting.__enter__()
        waiting.pass_barrier(connection)
        connection.execute(order.insert(), {"id": "2"})
        connection.execute(shop.barrier.table.update().values(inserted_at=0.0))
    shop.place("3")
    shop.messages._upkeep()
    shop.relay()
    with shop.engine.connect() as connection:
        assert len(connection.execute(select(shop.barrier.table)).all()) == 2
    assert sorted(shop.published()) == ["1", "2", "3"]
    assert shop.barrier.purge("invoices", -10.0, lambda ids: set()) == 0


@pytest.mark.parametrize("role", ["worker", "relay"])
def test_workers_and_relays_of_the_app_check(begin: Callable[..., Shop], role: str) -> None:
    shop = begin()
    with pytest.raises(SystemExit), shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1") as preparation:
        with shop.engine.begin() as connection:
            preparation.pass_barrier(connection)
            connection.execute(order.insert(), {"id": "1"})
        raise SystemExit  # the process ends before it could say so
    assert (shop.waiting(), shop.published()) == (1, {})
    let_pass(shop.database, 61)
    if role == "worker":
        shop.app.handler(Order)(lambda message: None)
        worker = Worker(shop.app)
        worker.relay.turn()
        worker.close()
    else:
        relay = RelayProcess(shop.app.settings, shop.app)
        relay.relay.turn()
        relay.relay.publisher.close()
    assert (shop.waiting(), list(shop.published())) == (0, ["1"])


def test_what_is_of_no_use_is_refused(url: str, tmp_path: Path) -> None:
    app = App("orders", settings=Settings(database_url=url))
    engine = create_engine(f"sqlite:///{tmp_path}/empty.db")
    for options, message in (({"checks": 0}, "at least one"), ({"check_after": "soon"}, "check_after"), ({"checker": 7}, "ask")):
        with pytest.raises(ConfigurationError, match=message):
            PreparedMessages(app, **{"checker": SqlBarrier(engine), **options})
    with pytest.raises(ConfigurationError, match=r"empty.db has no table idemp_barrier: SqlBarrier\(engine\).create\(\)"):
        PreparedMessages(app, SqlBarrier(engine)).prepare({}, to=SINK, type=TYPE).submit(lambda session: None)
    SqlBarrier(engine).create()
    with pytest.raises(ConfigurationError, match="is not a SQLAlchemy Engine"):
        SqlBarrier(create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]
    app.close()
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mariadb"], indirect=True)
def test_a_barrier_that_rolls_nothing_back_is_refused(begin: Callable[..., Shop]) -> None:
    shop = begin()
    with shop.engine.begin() as connection:
        connection.execute(text("ALTER TABLE idemp_barrier ENGINE = MyISAM"))
    with pytest.raises(ConfigurationError, match="in MyISAM, which rolls nothing back"):
        shop.place("1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)
def test_work_inside_work_under_one_key_does_not_wait_for_itself(begin: Callable[..., Shop]) -> None:
    shop = begin()

    def work(session: Session) -> None:
        session.execute(order.insert(), {"id": "1"})
        with pytest.raises(Undecided):
            shop.place("1")

    assert shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1").submit(work)
    assert (shop.orders(), list(shop.published())) == (["1"], ["1"])


@every_kind
def test_work_that_commits_each_statement_is_refused(begin: Callable[..., Shop]) -> None:
    shop = begin()
    preparation = shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1")
    automatic = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="commits each statement"), preparation, automatic.connect() as connection:
        preparation.pass_barrier(connection)
    assert (shop.waiting(), shop.published()) == (0, {})


STEPS = {
    TableHome: ("prepare", "lease", "commit", "end"),
    SqlBarrier: ("admit", "ask", "do"),
    App: ("dispatch",),
}


def live(points: CrashPoints, url: str, shop_url: str, story: str) -> None:
    """The body of a process: a producer, or a checker."""
    shop = Shop(url, shop_url)
    watch(points, STEPS)
    if story == "produce":
        event.listen(shop.barrier._database._short, "commit", lambda connection: points.reached("commit"))
        shop.place("1")
    else:
        shop.messages.check()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("story", ["produce", "check"])
def test_a_process_is_killed_at_each_step(begin: Callable[..., Shop], url: str, shop_url: str, story: str) -> None:
    shop = begin()

    def reset() -> None:
        with shop.engine.begin() as connection:
            for table in (order, shop.barrier.table):
                connection.execute(table.delete())
        tables = shop.database.tables
        with shop.database.short() as connection:
            connection.execute(tables.output.delete())
        with shop.database.short(queues=True) as connection:
            connection.execute(tables.message.delete())

    for at in some(2):
        reset()
        if story == "check":  # a producer has died behind its COMMIT
            with shop.engine.begin() as connection:
                key = f"c{at}"
                preparation = shop.messages.prepare({"order_id": key}, to=SINK, type=TYPE, key=key)
                preparation.__enter__()
                preparation.pass_barrier(connection)
                connection.execute(order.insert(), {"id": key})
            let_pass(shop.database, 61)
        name = run_until(at, live, url, shop_url, story)
        shop.relay()
        assert shop.orders() == list(shop.published()), name
        assert all(len(ids) == 1 for ids in shop.published().values()), name
        assert shop.waiting() == 0, name
        assert story == "produce" or len(shop.orders()) == 1
        if not name:
            break
    assert at > 8
