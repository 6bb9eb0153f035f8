"""How a handler may end the transaction of its claim: allowed, refused, or a dead letter that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, event, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from idemp import App, ConfigurationError, Context, Idempotent, Inbox, Previous, Retry, Settings
from idemp.sql.engine import Database
from idemp.sql.guard import Unit
from idemp.sql.store import SqlStore
from tests.world import Order, World, effect, unique

KINDS = ["sqlite", "postgresql", *(pytest.param(each, marks=pytest.mark.slow) for each in ("postgresql-core", "mariadb"))]
pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True)


class Base(DeclarativeBase):
    pass


class One(Base):
    __tablename__ = "one"
    row: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]


def driver(ctx: Context) -> Any:
    return ctx.connection.connection.driver_connection


def insert(ctx: Context) -> None:
    ctx.session.execute(effect.insert(), {"what": "1"})


def double(ctx: Context) -> None:
    ctx.session.add_all([One(what="x"), One(what="x")])
    ctx.session.flush()


def swallow(error: type[Exception], call: Callable[[Context], Any]) -> Callable[[Context], None]:
    def swallowing(ctx: Context) -> None:
        with pytest.raises(error):
            call(ctx)

    return swallowing


def with_begin(ctx: Context) -> None:
    with ctx.session.begin():
        ctx.session.add(One(what="a"))
    ctx.session.add(One(what="b"))


def nested(ctx: Context) -> None:
    with pytest.raises(IntegrityError), ctx.session.begin_nested():
        double(ctx)
    with ctx.connection.begin_nested() as savepoint:
        ctx.connection.execute(effect.insert(), {"what": "undone"})
        savepoint.rollback()


def with_session(ctx: Context) -> None:
    with ctx.session as session:
        session.add(One(what="x"))


def second_session(ctx: Context) -> None:
    with Session(ctx.connection) as session:
        session.add(One(what="x"))
        session.commit()


def reads_elsewhere(ctx: Context) -> None:
    engine = create_engine(ctx.connection.engine.url)
    with engine.connect() as other:
        assert other.execute(text("SELECT count(*) FROM effect")).scalar() == 0
    engine.dispose()


def script(ctx: Context) -> None:
    if name_of(ctx) == "sqlite":
        driver(ctx).executescript("SELECT 1")  # commits before it begins
    elif name_of(ctx) == "mysql":
        driver(ctx).query("CREATE TABLE IF NOT EXISTS made (a INTEGER)")
    else:
        driver(ctx).execute("SELECT 1; COMMIT; SELECT 1")


def name_of(ctx: Context) -> str:
    return ctx.connection.dialect.name


def set_something(ctx: Context) -> None:
    settings = {
        "sqlite": "PRAGMA case_sensitive_like = 1",
        "mysql": "SET sort_buffer_size = 5000000",
        "postgresql": "SET work_mem = '5MB'",
    }
    ctx.connection.execute(text(settings[name_of(ctx)]))


def make_a_table(ctx: Context) -> None:
    # MySQL's other tables commit.
    ctx.connection.execute(text(f"CREATE {'TEMPORARY' if name_of(ctx) == 'mysql' else ''} TABLE made (a INTEGER)"))


ALLOWED = {
    "nothing": lambda ctx: None,
    "with session.begin()": with_begin,
    "begin_nested": nested,
    "savepoint and rollback to it": lambda ctx: [ctx.connection.execute(text(each)) for each in ("SAVEPOINT mine", "ROLLBACK TO mine", "RELEASE SAVEPOINT mine")],
    "DDL": make_a_table,
    "second session on the connection": second_session,
    "reading on another connection": reads_elsewhere,
    "session.expunge_all()": lambda ctx: ctx.session.expunge_all(),
    "session setting": set_something,
}  # fmt: skip
REFUSED = {
    "session.commit()": lambda ctx: ctx.session.commit(),
    "session.rollback()": lambda ctx: ctx.session.rollback(),
    "session.close()": lambda ctx: ctx.session.close(),
    "session.reset()": lambda ctx: ctx.session.reset(),
    "session.invalidate()": lambda ctx: ctx.session.invalidate(),
    "with session": with_session,
    "connection.commit()": lambda ctx: ctx.connection.commit(),
    "text COMMIT": lambda ctx: ctx.session.execute(text("  commit;")),
    "text END": lambda ctx: ctx.connection.exec_driver_sql("TRUNCATE effect" if name_of(ctx) == "mysql" else "END"),
    "text ROLLBACK": lambda ctx: ctx.connection.execute(text("ROLLBACK TRANSACTION")),
    "text BEGIN": lambda ctx: ctx.connection.execute(text("BEGIN")),
    "text RESET ALL": lambda ctx: ctx.connection.execute(text("reset  all;" if name_of(ctx) == "postgresql" else "COMMIT")),
}
COMMITTED = {"driver.commit()": lambda ctx: driver(ctx).commit(), "driver.executescript()": script}
ROLLED_BACK = {
    "connection.rollback()": lambda ctx: ctx.connection.rollback(),
    "driver.rollback()": lambda ctx: driver(ctx).rollback(),
    "driver RESET ALL": lambda ctx: driver(ctx).execute("RESET ALL") if name_of(ctx) == "postgresql" else driver(ctx).rollback(),
    "swallowed failed flush": swallow(IntegrityError, double),
    "connection.get_transaction().rollback()": lambda ctx: ctx.connection.get_transaction().rollback(),
}
FAILED = {
    "failed flush": double,
    "autocommit": lambda ctx: ctx.connection.execution_options(isolation_level="AUTOCOMMIT"),
    "connection.close()": lambda ctx: ctx.connection.close(),
    "connection.invalidate()": lambda ctx: ctx.connection.invalidate(),
}


Run = Callable[[Callable[[Context], Any], bool], World]


@pytest.fixture
def run(url: str) -> Run:
    """Lets one worker run a handler, on tables without rows; what handlers before did to its connections must not matter."""
    world = World(url, policy=Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    worker, tables = world.worker(), world.database.tables

    def run(call: Callable[[Context], Any], inserts_again: bool) -> World:
        def handle(message: Order, ctx: Context) -> None:
            if call is not with_begin:
                insert(ctx)
            call(ctx)
            if inserts_again or call is with_begin:
                insert(ctx)

        for queues, some in ((False, (effect, unique, tables.pending, tables.output, tables.inbox)), (True, (tables.message,))):
            with world.database.short(queues=queues) as connection:
                for table in some:
                    connection.execute(table.delete())
        world.handle = handle
        world.send("1")
        world.work(worker)
        assert worker.adapters.store.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        # Whatever the handler did, the next message finds a working connection.
        world.handle = lambda message, ctx: insert(ctx)
        before = sum(world.effects().values())
        world.send("2")
        world.work(worker)
        assert sum(world.effects().values()) == before + 1
        return world

    return run


def test_allowed(run: Run) -> None:
    for name, call in ALLOWED.items():
        world = run(call, False)
        assert (world.effects(), world.dead(), world.claims()) == ({"1": 2}, [], 2), name


@pytest.mark.parametrize("swallows", [False, True])
def test_refused(run: Run, swallows: bool) -> None:
    for name, call in REFUSED.items():
        world = run(swallow(Exception, call) if swallows else call, swallows)
        assert (world.effects(), world.claims()) == ({"1": 1}, 1), name
        (dead,) = world.dead()
        assert (dead["rule"], dead["committed"], dead["attempts"]) == ("transaction ended", False, 0), name
        assert "remove that call, idemp commits after the handler" in dead["error"], name
        assert ("RESET ALL" in dead["error"]) is (name == "text RESET ALL" and "postgresql" in world.url), name


@pytest.mark.parametrize("inserts_again", [False, True])
def test_committed_below_sqlalchemy(run: Run, inserts_again: bool) -> None:
    for name, call in COMMITTED.items():
        world = run(call, inserts_again)
        assert (world.effects(), world.claims()) == ({"1": 2}, 2), name  # the first part stays, what came behind it is gone
        (dead,) = world.dead()
        assert (dead["rule"], dead["committed"]) == ("transaction ended", True), name
        assert "Its claim and effects so far are committed" in dead["error"], name


@pytest.mark.parametrize("then", ["raises", "commits the session", "closes the connection"])
def test_committed_below_sqlalchemy_and_failed(run: Run, then: str) -> None:
    """Whatever came behind the commit, its effects stand and its outputs are not stored."""
    for name, call in COMMITTED.items():

        def commit_and_fail(ctx: Context, call: Any = call) -> None:
            call(ctx)
            if then == "commits the session":
                ctx.session.commit()
            if then == "closes the connection":
                ctx.connection.close()
            raise RuntimeError("boom")

        world = run(commit_and_fail, False)
        (dead,) = world.dead()
        assert (dead["rule"], dead["committed"], world.effects()) == ("transaction ended", True, {"1": 2}), name


@pytest.mark.parametrize("inserts_again", [False, True])
def test_rolled_back(run: Run, inserts_again: bool) -> None:
    for name, call in ROLLED_BACK.items():
        world = run(call, inserts_again)
        assert (world.effects(), world.claims()) == ({"1": 1}, 1), name
        (dead,) = world.dead()
        if name == "swallowed failed flush" and inserts_again:  # the session takes no more statements
            assert (dead["rule"], dead["attempts"]) == ("handler", 2)
            assert "rolled back due to a previous exception during flush" in dead["error"]
        else:
            assert (dead["rule"], dead["committed"], dead["attempts"]) == ("rolled back", False, 2), name
            assert ("RESET ALL" in dead["error"]) is ("postgresql" in world.url), name


def test_a_failure_of_the_handler(run: Run) -> None:
    for name, call in FAILED.items():
        world = run(call, False)
        assert (world.effects(), world.claims()) == ({"1": 1}, 1), name
        # A connection that was invalidated looks as if the server had closed it: retries, of which the first do not count.
        dead = [(each["rule"], each["attempts"]) for each in world.dead()]
        assert dead == ([] if name == "connection.invalidate()" else [("handler", 2)]), name


def listens(ctx: Context) -> None:
    event.listen(ctx.session, "after_commit", lambda session: None)


def test_listeners_to_a_commit_of_the_session_are_refused(run: Run) -> None:
    """idemp commits, and not the session: they would never run, or run before a rollback."""
    world = run(listens, False)
    assert (world.effects(), world.claims()) == ({"1": 1}, 1)
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == ("handler", 2)
    assert "Send a message to the app's own queue, whose handler runs after the commit, or use a hook" in dead["error"]


def test_ddl_of_a_failed_handler_is_undone(run: Run) -> None:
    def create_and_fail(ctx: Context) -> None:
        ctx.connection.execute(text("CREATE TABLE made (a INTEGER)"))
        raise RuntimeError("boom")

    world = run(create_and_fail, False)
    with world.database.engine.connect() as connection:
        assert not inspect(connection).has_table("made")


def test_an_engine_that_commits_each_statement_is_refused_at_start(url: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    app = App("shop", engine=engine, settings=Settings(database_url=url))
    with pytest.raises(ConfigurationError, match="commits each statement: create it without isolation_level='AUTOCOMMIT'"):
        app.adapters()
    engine.dispose()


def test_an_error_of_another_unit_is_the_handlers_own(run: Run, url: str) -> None:
    """A handler that wraps another one: that one's conflict or ended transaction decides nothing here."""
    engine = create_engine(url)
    inner = Inbox(engine).wrap(lambda message, ctx: ctx.session.commit(), message=Order, consumer="inner")

    def handle(ctx: Context) -> None:
        driver(ctx).rollback()  # SQLite has one writer
        inner({"order_id": "1"}, {"message_id": "inner"})

    world = run(handle, False)
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == ("handler", 2)
    engine.dispose()


SETTINGS = {
    "sqlite": {"PRAGMA busy_timeout": 1234, "PRAGMA synchronous": 1},
    "postgresql": {"lock_timeout": "7s", "statement_timeout": "50s", "idle_in_transaction_session_timeout": "40s"},
    "mysql": {"innodb_lock_wait_timeout": 33},
}


def test_settings_of_the_users_connections_are_there_in_handlers(url: str) -> None:
    world = World(url)
    engine = create_engine(world.url)
    wanted, found = SETTINGS[engine.dialect.name], []

    @event.listens_for(engine, "connect")
    def connected(driver: Any, _record: object) -> None:
        cursor = driver.cursor()
        for name, value in wanted.items():
            cursor.execute(f"{name} = {value}" if name.startswith("PRAGMA") else f"SET {name} = '{value}'".replace("'33'", "33"))
        cursor.close()
        driver.commit()

    def look(connection: Any) -> None:
        asked = {"sqlite": "{}", "postgresql": "SHOW {}", "mysql": "SELECT @@{}"}[engine.dialect.name]
        found.append({name: connection.execute(text(asked.format(name))).scalar() for name in wanted})

    def handle(message: Order, ctx: Context) -> None:
        look(ctx.connection)

    inbox, policy = Inbox(engine), Idempotent(key="order_id", previous=Previous(type="shop.Former"))
    for consumer, each in (("a", Idempotent(key="order_id")), ("b", policy)):  # one claim, and two
        inbox.wrap(handle, message=Order, consumer=consumer, policy=each)({"order_id": "1"})
    with Session(engine) as session, inbox.claim(session, {"order_id": "2"}, consumer="c", type="shop.Order", policy=policy):
        look(session)
    with engine.connect() as connection:
        look(connection)
    assert found == [wanted] * 4
    engine.dispose()


def test_sessions_settings_of_a_handler_reach_no_other_message(url: str) -> None:
    database = Database(url)
    SqlStore(database, "worker")
    with Unit(database) as unit:
        sets, asks = {
            "sqlite": ("PRAGMA cache_size = 77", "PRAGMA cache_size"),
            "postgresql": ("/* app */ LISTEN shop", "SELECT pg_listening_channels()"),
            "mysql": ("# app\nSET LOCAL sort_buffer_size = 77777", "SELECT @@sort_buffer_size"),
        }[unit.connection.dialect.name]
        unit.connection.execute(text(sets))
    with database.engine.connect() as connection:
        assert connection.execute(text(asks)).scalar() not in (77, "shop", 77777)
    database.close()
