"""A handler that changes its database session leaves nothing of it to later deliveries."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, text

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A statement, and what shows afterwards whether something of it is left.
CHANGES = {
    "postgresql": {
        "SET default_transaction_read_only = on": "SHOW default_transaction_read_only",
        "SET SESSION search_path = public, pg_catalog": "SHOW search_path",
        "/* tenant */ set time zone 'Asia/Tokyo'": "SHOW TimeZone",
        "RESET statement_timeout; SET statement_timeout = 12345": "SHOW statement_timeout",
        "SELECT 1; SET search_path = public, pg_catalog": "SHOW search_path",
        "SELECT set_config('app.tenant', 'seven', false)": "SELECT coalesce(current_setting('app.tenant', true), '')",
        "SELECT pg_advisory_lock(7)": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
        "LISTEN news": "SELECT count(*) FROM pg_listening_channels()",
        "CREATE TEMP TABLE mine (n int)": "SELECT to_regclass('mine')::text",
        "SELECT 1 AS n INTO TEMP mine": "SELECT to_regclass('mine')::text",
        "PREPARE mine AS SELECT 1": "SELECT count(*) FROM pg_prepared_statements WHERE name = 'mine'",
        "DECLARE mine CURSOR WITH HOLD FOR SELECT 1": "SELECT count(*) FROM pg_cursors",
        "DO $$ BEGIN SET search_path = public, pg_catalog; END $$": "SHOW search_path",
    },
    "mariadb": {
        "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE": "SELECT @@tx_isolation",
        "SET LOCAL sql_mode = 'ANSI_QUOTES'": "SELECT @@sql_mode",
        "# why\nSET time_zone = '+09:00'": "SELECT @@time_zone",
        "SET @tenant := 7": "SELECT coalesce(@tenant, '')",
        "SELECT @tenant := 7": "SELECT coalesce(@tenant, '')",
        "/*!50000 SET @tenant = 7 */": "SELECT coalesce(@tenant, '')",
        "SELECT GET_LOCK('mine', 0)": "SELECT coalesce(IS_USED_LOCK('mine') = connection_id(), 0)",
    },
    "sqlite": {
        "PRAGMA cache_size = 77": "PRAGMA cache_size",
        "CREATE TEMP TABLE mine (n int)": "SELECT count(*) FROM sqlite_temp_master",
    },
}


class Desk:
    """An app with one handler and one pooled connection."""

    def __init__(self, url: str, policy: Idempotent | None) -> None:
        pooled = {} if url == "sqlite://" else {"pool_size": 1, "max_overflow": 0}
        self.engine = create_engine_safely(url, **pooled)
        make_tables(self.engine)
        broker = InMemoryBroker()
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        self.app = App("shop", database=self.engine, broker=broker, settings=Settings())
        self.app.handler(dict, type="shop.Sell", policy=policy)(self.sell)
        self.app.start()
        self.protocol = self.app.protocol(broker.publisher())
        self.work: Callable[[Context], Any] = lambda ctx: None
        self.number = 0

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        self.work(ctx)
        ctx.send(message, to="stock", type="stock.Reserve")

    def deliver(self, work: Callable[[Context], Any]) -> Outcome:
        self.work, self.number = work, self.number + 1
        return self.protocol.process(Message(body=b"{}", type="shop.Sell", message_id=f"sale-{self.number}"))

    def read(self, query: str) -> object:
        """As the next delivery finds it."""
        found: list[object] = []
        outcome = self.deliver(lambda ctx: found.append(ctx.connection.exec_driver_sql(query).scalar()))
        assert outcome is Outcome.HANDLED
        return found[0]


@pytest.fixture(params=["early", "late", "without claim"])
def policy(request: pytest.FixtureRequest) -> Idempotent | None:
    return None if request.param == "without claim" else Idempotent(claim=request.param)


@pytest.fixture
def desk(database_url: str, policy: Idempotent | None) -> Iterator[Desk]:
    made = Desk(database_url, policy)
    yield made
    made.app.close()
    made.engine.dispose()


def raw(ctx: Context) -> Any:
    return ctx.connection.connection.driver_connection


def changes(engine: Engine) -> dict[str, str]:
    return CHANGES[engine.dialect.name]


def test_later_deliveries_find_the_session_as_it_was(desk: Desk) -> None:
    for statement, query in changes(desk.engine).items():
        before = desk.read(query)
        assert desk.deliver(lambda ctx, words=statement: ctx.connection.exec_driver_sql(words)) is Outcome.HANDLED
        assert (statement, desk.read(query)) == (statement, before)


def test_nor_after_the_drivers_own_cursor(desk: Desk) -> None:
    for statement, query in changes(desk.engine).items():
        before = desk.read(query)
        assert desk.deliver(lambda ctx, words=statement: raw(ctx).cursor().execute(words)) is Outcome.HANDLED
        assert (statement, desk.read(query)) == (statement, before)


def test_nor_after_a_handler_that_failed(desk: Desk) -> None:
    for statement, query in changes(desk.engine).items():
        before = desk.read(query)

        def fail(ctx: Context, words: str = statement) -> None:
            ctx.session.execute(text(words))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            desk.deliver(fail)
        assert (statement, desk.read(query)) == (statement, before)


def test_nor_after_an_initiation(desk: Desk) -> None:
    for statement, query in changes(desk.engine).items():
        before = desk.read(query)
        with desk.app.initiate() as unit:
            unit.connection.exec_driver_sql(statement)
        assert (statement, desk.read(query)) == (statement, before)


class TestMariadb:
    @pytest.fixture
    def database_url(self, mariadb_url: str) -> str:
        return mariadb_url

    @pytest.mark.parametrize(
        "way", mostly_slow(["USE", "temporary table", "several", "select_db", "PREPARE", "set_charset"], first=3)
    )
    def test_neighbours_find_their_own_tables(self, desk: Desk, way: str) -> None:
        query = "SELECT concat_ws(' ', database(), count(*), @@character_set_client) FROM idemp_output WHERE 1 = 0"
        before = desk.read(query)
        ways: dict[str, Callable[[Any], object]] = {
            "USE": lambda driver: driver.cursor().execute("USE mysql"),
            "select_db": lambda driver: driver.select_db("mysql"),
            "temporary table": lambda driver: driver.query("CREATE TEMPORARY TABLE idemp_output SELECT 1 AS n"),
            "PREPARE": lambda driver: driver.cursor().execute("PREPARE mine FROM 'SELECT 1'"),
            "set_charset": lambda driver: driver.set_character_set("latin1"),
            "several": lambda driver: driver.cursor().executemany("SET @a = %s", [(1,), (2,)]),
        }
        kept = desk.read("SELECT connection_id()")
        with suppress(Exception):  # its own outputs go astray, which is its own affair
            desk.deliver(lambda ctx: ways[way](raw(ctx)))
        assert desk.read(query) == before
        assert desk.read("SELECT connection_id()") != kept

    def test_a_claim_keeps_the_connection(self, desk: Desk) -> None:
        """Though it sets how long it waits for locks, and sets that back."""
        before = desk.read("SELECT connection_id()")
        desk.app.store._without_returning = True
        assert desk.deliver(lambda ctx: raw(ctx).cursor().execute("SELECT 1")) is Outcome.HANDLED
        assert desk.read("SELECT connection_id()") == before


class TestSqlite:
    @pytest.fixture
    def database_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/inbox.db"

    def test_attached_databases_are_left_behind(self, desk: Desk) -> None:
        attach = "ATTACH ':memory:' AS other"
        assert desk.deliver(lambda ctx: raw(ctx).execute(attach)) is Outcome.HANDLED
        assert desk.read("SELECT count(*) FROM pragma_database_list WHERE name = 'other'") == 0


class TestPostgresql:
    @pytest.fixture
    def database_url(self, postgresql_url: str) -> str:
        return postgresql_url

    @pytest.mark.parametrize(
        ("statement", "query"),
        [
            ("SET default_transaction_read_only = on", "SHOW default_transaction_read_only"),
            ("SET TIME ZONE 'Asia/Tokyo'", "SHOW TimeZone"),
            ("SET ROLE pg_monitor", "SELECT current_user"),
        ],
    )
    def test_settings_that_the_server_reports_are_seen_whoever_sent_them(
        self, desk: Desk, statement: str, query: str
    ) -> None:
        before = desk.read(query)

        def past_sqlalchemy(ctx: Context) -> None:
            raw(ctx).pgconn.exec_(b"BEGIN")  # only says so where there is a transaction already
            raw(ctx).pgconn.exec_(statement.encode())
            raw(ctx).execute("SET LOCAL ROLE NONE")

        assert desk.deliver(past_sqlalchemy) is Outcome.HANDLED
        assert desk.read(query) == before

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # psycopg's of the cursor
    @pytest.mark.parametrize("way", ["cursor WITH HOLD", "several statements", "in many", "isolation_level"])
    def test_what_psycopg_leaves_on_the_connection(self, desk: Desk, way: str) -> None:
        ways: dict[str, Callable[[Any], object]] = {
            "cursor WITH HOLD": lambda driver: driver.cursor("mine", withhold=True),
            "several statements": lambda driver: driver.execute("SELECT 1; SET application_name = 'mine'"),
            "in many": lambda driver: driver.cursor().executemany("SELECT set_config('a.b', %s, false)", [("c",)]),
            "isolation_level": lambda driver: setattr(driver, "isolation_level", 4),
        }
        before = desk.read("SELECT pg_backend_pid()")
        with suppress(Exception):  # within a transaction some of them are refused
            desk.deliver(lambda ctx: ways[way](raw(ctx)))
        assert desk.read("SELECT pg_backend_pid()") != before

    @pytest.mark.parametrize(
        "statement",
        [
            "SET LOCAL search_path = public, pg_catalog",
            "SET CONSTRAINTS ALL DEFERRED",
            "SELECT set_config('app.tenant', '7', true)",
            "SELECT pg_advisory_xact_lock(7)",
            "CREATE TEMP TABLE mine (n int) ON COMMIT DROP",
            "SELECT 'SET', 1 -- LISTEN",
        ],
    )
    def test_what_ends_with_the_transaction_keeps_the_connection(self, desk: Desk, statement: str) -> None:
        before = desk.read("SELECT pg_backend_pid()")
        assert desk.deliver(lambda ctx: ctx.connection.exec_driver_sql(statement)) is Outcome.HANDLED
        assert desk.deliver(lambda ctx: raw(ctx).execute(statement)) is Outcome.HANDLED
        assert desk.read("SELECT pg_backend_pid()") == before

    def test_a_local_setting_by_bound_parameters_keeps_the_connection(self, desk: Desk) -> None:
        before = desk.read("SELECT pg_backend_pid()")
        words = text("SELECT set_config('app.tenant', :tenant, :local)")
        desk.deliver(lambda ctx: ctx.session.execute(words, {"tenant": "7", "local": True}))
        assert desk.read("SELECT pg_backend_pid()") == before
        desk.deliver(lambda ctx: ctx.session.execute(words, {"tenant": "7", "local": False}))
        assert desk.read("SELECT pg_backend_pid()") != before


def test_a_database_in_memory_is_kept() -> None:
    desk = Desk("sqlite://", Idempotent())
    assert desk.deliver(lambda ctx: ctx.connection.exec_driver_sql("PRAGMA cache_size = 77")) is Outcome.HANDLED
    assert desk.deliver(lambda ctx: None) is Outcome.HANDLED
    desk.app.close()
