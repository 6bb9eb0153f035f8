"""PostgreSQL that takes no work: consumption pauses with one line in the log, and resumes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine, event, make_url, text

from idemp import App, Context, Idempotent, Retry, Settings
from idemp.messages import Delivery
from idemp.sql import postgresql
from tests.servers.databases import query
from tests.worker.test_loop import wait_for
from tests.world import Order, World, effect, insert_and_send

pytestmark = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)

Break = Callable[[str, str], Iterator[None]]


def end_sessions(url: str, role: str) -> None:
    query(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", role)


def restarted(url: str, role: str) -> Iterator[None]:
    end_sessions(url, role)
    query(url, f"ALTER ROLE {role} NOLOGIN")
    yield
    query(url, f"ALTER ROLE {role} LOGIN")


def read_only(url: str, role: str) -> Iterator[None]:
    query(url, f"ALTER ROLE {role} SET default_transaction_read_only = on")
    end_sessions(url, role)
    yield
    query(url, f"ALTER ROLE {role} RESET default_transaction_read_only")
    end_sessions(url, role)


def out_of_connections(url: str, role: str) -> Iterator[None]:
    query(url, f"ALTER ROLE {role} CONNECTION LIMIT 0")
    end_sessions(url, role)
    yield
    query(url, f"ALTER ROLE {role} CONNECTION LIMIT -1")


def privilege_revoked(url: str, role: str) -> Iterator[None]:
    query(url, f"REVOKE INSERT ON idemp_inbox FROM {role}")
    yield
    query(url, f"GRANT INSERT ON idemp_inbox TO {role}")


def outputs_revoked(url: str, role: str) -> Iterator[None]:
    query(url, f"REVOKE INSERT ON idemp_output FROM {role}")
    yield
    query(url, f"GRANT INSERT ON idemp_output TO {role}")


def table_locked(url: str, role: str) -> Iterator[None]:
    with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute("LOCK TABLE idemp_inbox IN ACCESS EXCLUSIVE MODE")
        yield


@pytest.fixture
def role(url: str) -> Iterator[str]:
    """A role that may do everything, as an owner would have it."""
    name = f"worker_{secrets.token_hex(4)}"
    World(url).close()  # makes the table of the effects
    query(url, f"CREATE ROLE {name} LOGIN")
    for what in ("ALL TABLES IN SCHEMA public", "ALL SEQUENCES IN SCHEMA public", "SCHEMA public"):
        query(url, f"GRANT ALL ON {what} TO {name}")
    yield name
    end_sessions(url, name)
    query(url, f"DROP OWNED BY {name}")
    query(url, f"DROP ROLE {name}")


def test_retries_that_cannot_be_stored_for_now_wait(url: str, role: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are neither moved to the queue of what no database can store, nor is the handler's error the reason of the pause."""

    def handle(message: Order, ctx: Context) -> None:
        if world.runs[message.order_id] == 1:
            query(url, f"REVOKE INSERT ON idemp_message FROM {role}")
            raise ValueError("boom")
        insert_and_send(message, ctx)

    owner, world = World(url), World(of_role(url, role), handle)
    owner.send("1")
    worker = world.worker()
    for _ in range(3):
        worker.step(poll=0.0)
        world.runs["1"] = 0
    assert "permission denied" in worker.status()["obstacle"]
    assert [record.event for record in caplog.records] == ["worker.paused"]
    query(url, f"GRANT INSERT ON idemp_message TO {role}")
    world.runs["1"] = 1
    world.work(worker)
    assert (owner.effects(), owner.rows(), owner.rows("shop.unstorable")) == ({"1": 1}, [], [])
    world.close()
    owner.close()


def test_a_stream_that_was_left_open_is_the_handlers_failure(url: str) -> None:
    """A traceback keeps the stream alive, which keeps the connection."""

    def handle(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        driver: Any = ctx.connection.connection.driver_connection
        for (number,) in driver.cursor().stream("SELECT generate_series(1, 1000)"):
            if message.order_id == "bad" and number == 3:
                raise ValueError("a bad row")

    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    world.send("1", "bad", "2")
    world.work(world.worker())
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"], "a bad row" in dead["error"]) == ("handler", 2, True)
    assert world.effects() == {"1": 1, "2": 1}


def test_rows_of_another_kind_reach_no_other_message(url: str) -> None:
    def handle(message: Order, ctx: Context) -> None:
        driver: Any = ctx.connection.connection.driver_connection
        driver.row_factory = dict_row
        insert_and_send(message, ctx)
        if message.order_id == "2" and world.runs["2"] == 1:
            raise RuntimeError("once")

    world = World(url, handle)
    world.send("1", "2", "1", "2", "3")
    world.work(world.worker())
    assert (world.effects(), world.rows()) == ({"1": 1, "2": 1, "3": 1}, [])


@pytest.mark.parametrize("fast", [True, False])
def test_listeners_of_an_engine_are_called_as_ever(url: str, fast: bool) -> None:
    """What they run belongs to the transaction, also of a batch that is claimed again one by one."""
    engine = create_engine(make_url(url))
    seen: list[str] = []
    tenants: set[Any] = set()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("SET LOCAL app.tenant = 'shop'")

    @event.listens_for(engine, "commit")
    def audit(connection: Any) -> None:
        if connection.scalar(text("SELECT count(*) FROM effect")) > len(seen) and connection.in_transaction():
            seen.append("audited")
            if len(seen) == 1:
                raise RuntimeError("once")

    def handle(message: Order, ctx: Context) -> None:
        tenants.add(ctx.connection.scalar(text("SELECT current_setting('app.tenant', true)")))
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    world = World(url)
    app = App("shop", engine=engine, settings=Settings(database_url=url, fast_path=fast))
    app.handler(Order, policy=Idempotent(key="order_id", batch=3, retry=Retry(attempts=3, delays=(0.0,))))(handle)
    app.handlers["shop.Order"].seconds = 0.0
    world.app = lambda: app  # type: ignore[method-assign]
    world.apps.append(app)
    world.send("1", "2", "3")
    worker = world.worker()
    key = worker.protocol.executor.accept(Delivery("shop", {"type": "shop.Order"}, b'{"order_id": "2"}')).claim
    assert key is not None
    with world.database.engine.connect() as other:
        other.execute(
            text("INSERT INTO idemp_inbox VALUES ((SELECT id FROM idemp_name WHERE name = 'shop'), :key, 1, '', NULL, 0, 'x')"),
            {"key": key.key},
        )
        released = Timer(1.5 * postgresql.CLAIM_SECONDS, other.rollback)  # while they are claimed one by one
        released.start()
        worker.step(poll=0.0)
        released.join()
    world.pass_time(60)
    world.work(worker)
    assert (world.effects(), world.dead(), tenants) == ({"1": 1, "2": 1, "3": 1}, [], {"shop"})
    world.close()
    engine.dispose()


def of_role(url: str, role: str) -> str:
    return make_url(url).set(username=role).render_as_string(hide_password=False)


def idles(url: str, ctx: Context) -> None:
    pid = ctx.connection.scalar(text("SELECT pg_backend_pid()"))
    wait_for(lambda: not query(url, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))


def asks_for_long(_url: str, ctx: Context) -> None:
    ctx.connection.execute(text("SELECT pg_sleep(100)"))


@pytest.mark.parametrize(
    ("setting", "slow"), [("idle_in_transaction_session_timeout", idles), ("statement_timeout", asks_for_long)]
)
def test_a_handler_outlasts_the_patience_of_the_server(url: str, role: str, setting: str, slow: Callable[..., None]) -> None:
    """Its failures count, although they end the connection; its neighbours are handled."""

    def handle(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id == "slow":
            slow(url, ctx)

    world = World(of_role(url, role), handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    worker = world.worker()  # its start looks at every table, which may take a loaded machine longer than what is set now
    query(url, f"ALTER ROLE {role} SET {setting} = '1s'")
    world.apps[0].adapters().close()  # new connections have it
    world.send("1", "slow", "2", "3")
    world.work(worker)
    assert world.effects() == {"1": 1, "2": 1, "3": 1}
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"], world.runs["slow"]) == ("handler", 2, 2)
    assert "timeout" in dead["error"]


@pytest.mark.parametrize(
    "how",
    [restarted, read_only, out_of_connections, privilege_revoked, outputs_revoked, table_locked],
    ids=lambda each: each.__name__,
)
def test_consumption_pauses_and_resumes(
    url: str, role: str, how: Break, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "TABLE_SECONDS", 0.1)
    caplog.set_level("INFO")
    owner, world = World(url), World(of_role(url, role))
    worker = world.worker()
    world.send("0")
    world.work(worker)
    with ExitStack() as stack:
        owner.send("1", "2", "3")
        stack.enter_context(contextmanager(how)(url, role))
        for _ in range(3):
            worker.step(poll=0.0)
        assert owner.effects() == {"0": 1}
    wait_for(lambda: worker.step(poll=0.0) == 0 and not owner.rows())
    assert (owner.effects(), owner.dead(), owner.rows()) == ({"0": 1, "1": 1, "2": 1, "3": 1}, [], [])
    seen = [getattr(record, "event", "") for record in caplog.records]
    events = [event for event in seen if event in ("worker.paused", "worker.resumed")]
    assert events == ["worker.paused", "worker.resumed"]
    world.close()
    owner.close()
