"""Two databases in one handling: both commit, or none does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event, exc, text

from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, Retry, Settings
from idemp.cli.main import Exit
from idemp.errors import HandlerError
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.testing import CrashPoints, StoreConformance
from idemp.twophase import TwoPhase, databases, recover
from idemp.twophase.databases import TwoPhaseStore
from tests.cli.test_commands import run
from tests.servers import server
from tests.servers.databases import create_database, drop_database, query
from tests.test_kills import run_until, some, watch
from tests.twophase import Books, booked, engine_of
from tests.worker.test_loop import wait_for
from tests.world import Order, insert_and_send

KINDS = [("postgresql", "mariadb"), ("mariadb", "postgresql"), ("sqlite", "postgresql")]
NAMES = ["-".join(kinds) for kinds in KINDS]
SLOW = [*(pytest.param(*kinds, marks=pytest.mark.slow) for kinds in KINDS[:2]), KINDS[2]]
every_kind = pytest.mark.parametrize(("kind", "second"), SLOW, indirect=["kind"], ids=NAMES)
first_kind = pytest.mark.parametrize(("kind", "second"), SLOW[:1], indirect=["kind"], ids=NAMES[:1])


@pytest.fixture
def ledger_url(second: str) -> Iterator[str]:
    url = create_database(server(second))
    yield url
    engine = engine_of(url)
    with engine.connect() as connection:  # a database with prepared transactions cannot be dropped
        for xid in connection.recover_twophase() if second == "postgresql" else ():
            if query(url, "SELECT 1 FROM pg_prepared_xacts WHERE gid = %s AND database = current_database()", xid):
                connection.rollback_prepared(xid, recover=True)
    engine.dispose()
    drop_database(url)


@pytest.fixture
def begin(url: str, ledger_url: str) -> Iterator[Callable[..., Books]]:
    made: list[Books] = []

    def begin(handle: Any = insert_and_send, **options: Any) -> Books:
        made.append(Books(url, handle, ledger_url=ledger_url, **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.mark.parametrize(("kind", "second"), [SLOW[0], KINDS[2]], indirect=["kind"])
class TestStore(StoreConformance):
    @pytest.fixture
    def open_store(self, database: Database, ledger_url: str) -> Iterator[Callable[[str], TwoPhaseStore]]:
        second = TwoPhase(App("shop", settings=Settings(database_url=str(database.engine.url))), "ledger", engine_of(ledger_url))

        def open_store(worker: str) -> TwoPhaseStore:
            store = SqlStore(database, worker)
            for consumer in ("billing", "shop"):
                store.register(consumer, ["shop.Pay", "shop.Order"], [])
            return TwoPhaseStore(store, second)

        yield open_store
        second.second.close()

    @pytest.fixture
    def open_scheduler(self, database: Database) -> Callable[[str], SqlScheduler]:
        return lambda worker: SqlScheduler(database, worker, 30.0)


@every_kind
def test_both_commit(begin: Callable[..., Books]) -> None:
    books = begin()
    books.send("1", "1", "2")
    books.work(books.worker())
    assert (books.effects(), books.booked(), books.in_doubt()) == ({"1": 1, "2": 1}, {"1": 1, "2": 1}, [])
    with books.apps[-1].initiate(id="3") as unit:
        books.book(Order(order_id="3"), unit)
    assert (books.booked(), books.in_doubt()) == ({"1": 1, "2": 1, "3": 1}, [])
    books.pass_time(61)
    with books.database.short() as connection:
        connection.execute(books.database.tables.branch.update().values(decided_at=0.0))
    assert recover(books.apps[-1]) == {}
    with books.database.short() as connection:
        assert connection.execute(books.database.tables.branch.select()).all() == []


@every_kind
@pytest.mark.parametrize("batch", [1, 3])
def test_none_commits_if_the_handler_fails(begin: Callable[..., Books], batch: int) -> None:
    def fail(message: Order, ctx: Context) -> None:
        books.book(message, ctx)
        insert_and_send(message, ctx)
        if message.order_id == "bad":
            raise RuntimeError("no")

    books = begin(fail, policy=Idempotent(key="order_id", batch=batch, retry=Retry(attempts=2, delays=(0.0,))))
    books.send("1", "bad", "2")
    books.work(books.worker())
    assert (books.effects(), books.booked(), books.in_doubt()) == ({"1": 1, "2": 1}, {"1": 1, "2": 1}, [])
    assert [dead["rule"] for dead in books.dead()] == ["handler"]


def swallow(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    def swallowing(session: Any) -> None:
        with pytest.raises(Exception):  # noqa: B017
            call(session)

    return swallowing


ENDS = {
    "session.commit()": lambda session: session.commit(),
    "session.rollback()": lambda session: session.rollback(),
    "session.close()": lambda session: session.close(),
    "connection.commit()": lambda session: session.connection().commit(),
    "text": lambda session: session.execute(text("COMMIT")),
    "swallowed commit": swallow(lambda session: session.connection().commit()),
}
FAILURES = {
    "connection.rollback()": lambda session: session.connection().rollback(),
    "driver.rollback()": lambda session: session.connection().connection.driver_connection.rollback(),
    "swallowed failure": swallow(lambda session: session.execute(text("SELECT * FROM nowhere"))),
    "connection.invalidate()": lambda session: session.connection().invalidate(),
}


@pytest.mark.parametrize(
    ("kind", "second"), [pytest.param(*KINDS[0], marks=pytest.mark.slow), KINDS[2]], indirect=["kind"], ids=[NAMES[0], NAMES[2]]
)
def test_handlers_that_end_the_second_transaction(begin: Callable[..., Books]) -> None:
    def end(message: Order, ctx: Context) -> None:
        books.book(message, ctx)
        insert_and_send(message, ctx)
        if message.order_id in ways:
            ways[message.order_id](books.session(ctx))

    ways = {**ENDS, **FAILURES}
    books = begin(end, policy=Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    books.send(*ways, "1")
    worker = books.worker()
    for _ in range(6):
        books.work(worker)
        books.pass_time(10)
    spoilt = set(ways)
    if books.ledger.dialect.name == "mysql":  # where a failed statement spoils nothing
        spoilt.remove("swallowed failure")
    kept = dict.fromkeys({*ways, "1"} - spoilt, 1)
    assert (books.effects(), books.booked(), books.in_doubt()) == (kept, kept, [])
    parked = [row for row in books.rows() if row.due_at is None]
    dead = {json.loads(row.body)["order_id"]: json.loads(row.history)[-1]["rule"] for row in parked}
    assert set(dead) == spoilt
    assert {dead[name] for name in ENDS} == {"transaction ended"}


@every_kind
@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_to_the_commit_of_the_inbox(begin: Callable[..., Books], monkeypatch: Any, committed: bool) -> None:
    finish, lost = SqlStore.finish, list[int]()

    def lose(self: Any, tx: Any, handled: Any) -> None:
        if committed or lost:
            finish(self, tx, handled)
        if not lost:
            lost.append(1)
            tx.connection.invalidate()
            raise exc.OperationalError("COMMIT", {}, Exception("lost"), connection_invalidated=True)

    monkeypatch.setattr(SqlStore, "finish", lose)
    books = begin()
    books.send("1")
    worker = books.worker()
    for _ in range(4):
        books.work(worker)
        books.pass_time(10)
    wait_for(lambda: not (recover(books.apps[-1]) or books.in_doubt()))  # MariaDB has to see the end of a connection
    assert (books.effects(), books.booked()) == ({"1": 1}, {"1": 1})


@first_kind
def test_a_second_database_that_is_away_holds_its_messages(begin: Callable[..., Books], ledger_url: str) -> None:
    books = begin()
    worker = books.worker()
    books.send("1")
    query(ledger_url, "RENAME TABLE booked TO moved")
    engine = books.ledgers[-1].second.engine
    away = False

    @event.listens_for(engine, "do_connect")
    def refuse(*_: Any) -> None:
        if away:
            raise engine.dialect.dbapi.OperationalError(2003, "nobody answers")

    query(ledger_url, "RENAME TABLE moved TO booked")
    engine.dispose()
    away = True
    worker.step(poll=0.0)
    assert (len(worker.intake.held), books.dead(), books.effects()) == (1, [], {})
    away = False
    books.work(worker)
    assert (books.effects(), books.booked(), books.dead()) == ({"1": 1}, {"1": 1}, [])


STEPS: dict[Any, tuple[str, ...]] = {
    databases._Branch: ("__init__", "prepare", "commit"),
    TwoPhase: ("decide",),
    SqlStore: ("claim", "finish"),
}


def live(points: CrashPoints, url: str, ledger_url: str) -> None:
    """The body of a process."""
    books = Books(url, ledger_url=ledger_url)
    watch(points, STEPS)
    books.work(books.worker())


@every_kind
def test_a_process_is_killed_at_each_step(begin: Callable[..., Books], url: str, ledger_url: str, second: str) -> None:
    books = begin()
    books.app()
    for at in some(3):
        books.send(str(at))
        name = run_until(at, live, url, ledger_url)
        books.recover()
        wait_for(lambda: not (recover(books.apps[-1]) or books.in_doubt()))
        assert (books.effects().get(str(at)), books.booked().get(str(at))) == (1, 1), name
        if not name:
            break
    assert at > 10


@first_kind
def test_the_command_tells_what_it_did(
    begin: Callable[..., Books], ledger_url: str, url: str, tmp_path: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "payments.py").write_text(
        "from sqlalchemy import create_engine\nfrom idemp import App\nfrom idemp.twophase import TwoPhase\n"
        f"app = App('shop')\nledger = TwoPhase(app, 'ledger', create_engine({ledger_url!r}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    books = begin()
    books.worker()
    assert run("recover", "payments:app") == Exit.OK
    assert capsys.readouterr().out == "nothing is in doubt\n"
    xid = f"{books.ledgers[-1]._scope}1"
    with engine_of(ledger_url).connect() as connection:
        transaction = connection.begin_twophase(xid)
        connection.execute(booked.insert(), {"what": "x"})
        transaction.prepare()
        assert run("recover", "payments:app", "--json") == Exit.FAILED  # MariaDB leaves it to its connection
        assert json.loads(capsys.readouterr().out)[xid].startswith("left: ")
        connection.invalidate()
    wait_for(lambda: run("recover", "payments:app") == Exit.OK)
    assert capsys.readouterr().out.endswith(f"{xid}  rolled back\n")
    assert (books.booked(), books.in_doubt()) == ({}, [])


@first_kind
def test_rows_of_branches_in_the_hands_of_a_connection_are_kept(begin: Callable[..., Books], monkeypatch: Any) -> None:
    """A worker that is slow between the two commits."""
    books, rows = begin(), list[int]()
    commit = databases._Branch.commit

    def look(self: Any) -> None:
        with books.database.short() as connection:
            connection.execute(books.database.tables.branch.update().values(decided_at=0.0))
        assert [what[:4] for what in recover(books.apps[-1]).values()] == ["left"]
        with books.database.short() as connection:
            rows.append(len(connection.execute(books.database.tables.branch.select()).all()))
        commit(self)

    monkeypatch.setattr(databases._Branch, "commit", look)
    books.send("1")
    books.work(books.worker())
    assert (rows, books.booked()) == ([1], {"1": 1})


@first_kind
def test_what_is_of_no_use_is_refused(begin: Callable[..., Books], url: str, ledger_url: str) -> None:
    app = App("x", settings=Settings(database_url=url))
    with pytest.raises(ConfigurationError, match="SQLite prepares no transactions"):
        TwoPhase(app, "ledger", create_engine("sqlite://"))
    second = TwoPhase(app, "ledger", engine_of(ledger_url))
    with pytest.raises(ConfigurationError, match="two databases of the name 'ledger'"):
        TwoPhase(app, "ledger", engine_of(ledger_url))
    for ctx in (Context("x", {}, None, None), AsyncContext("x", {}, None, None)):
        with pytest.raises(HandlerError, match="plain handlers of types that are opted in"):
            second.session(ctx)


@pytest.mark.parametrize(("kind", "second"), [("mariadb", "postgresql"), ("postgresql", "postgresql")], indirect=["kind"])
def test_recovery_waits_for_a_handling_in_flight(begin: Callable[..., Books], monkeypatch: pytest.MonkeyPatch) -> None:
    books, said = begin(), list[str]()
    prepare = databases._Branch.prepare

    def look(self: Any) -> None:
        prepare(self)
        said.extend(recover(books.apps[-1]).values())

    monkeypatch.setattr(databases._Branch, "prepare", look)
    books.send("1")
    books.work(books.worker())
    assert (said, books.effects(), books.booked()) == (["left: its handling is under way"], {"1": 1}, {"1": 1})


@pytest.mark.parametrize(("kind", "second"), [("sqlite", "postgresql")], indirect=["kind"])
def test_apps_recover_their_own_branches(begin: Callable[..., Books], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of another app has the same name, and is another one."""
    books, elsewhere = begin(), create_database(server("postgresql"))
    other = App("other", settings=Settings(database_url=url))
    second = TwoPhase(other, "ledger", engine_of(elsewhere))
    with monkeypatch.context() as patch:  # a worker that dies between the two commits
        patch.setattr(databases._Branch, "commit", lambda self: None)
        patch.setattr(TwoPhase, "end", lambda self, xid: "died")
        books.send("1")
        books.work(books.worker())
    with books.database.short() as connection:
        connection.execute(books.database.tables.branch.update().values(decided_at=0.0))
    assert (recover(other), len(books.in_doubt())) == ({}, 1)
    assert (list(recover(books.apps[-1]).values()), books.booked()) == (["committed"], {"1": 1})
    other.close()
    second.second.close()
    drop_database(elsewhere)


@pytest.mark.parametrize(("kind", "second"), [("sqlite", "postgresql"), SLOW[0]], indirect=["kind"])
def test_a_branch_that_another_recovery_has_ended_fails_nothing(begin: Callable[..., Books]) -> None:
    books = begin()
    books.worker()
    ledger = books.ledgers[-1]
    assert ledger.end(f"{ledger._scope}gone").startswith("left: ")
