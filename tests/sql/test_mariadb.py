"""MariaDB that takes no work, and errors of its own: consumption pauses with one line in the log, and resumes."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from idemp import AsyncContext, AsyncInbox, ConfigurationError, Context, Idempotent, Inbox, Retry, Verdict
from idemp.dispatcher import Dispatcher
from idemp.executor import Executor
from idemp.handlers import Handlers
from idemp.messages import Delivery, Output
from idemp.protocol import Protocol
from idemp.settler import Settler
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.schema import upgrade
from idemp.sql.store import SqlStore
from tests.servers.databases import create_database, end_connections, query
from tests.servers.mariadb import Mariadb
from tests.worker.test_loop import wait_for
from tests.world import Order, World, insert_and_send

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["mariadb"], indirect=True)]


@pytest.fixture
def user(url: str) -> Iterator[str]:
    with worker_of(url) as name:
        yield name


@contextmanager
def worker_of(url: str) -> Iterator[str]:
    """A user with the rights of a worker, table by table."""
    name = f"worker_{secrets.token_hex(4)}"
    World(url).close()  # makes the table of the effects
    query(url, f"CREATE USER {name}")
    for (table,) in query(url, "SHOW TABLES"):
        query(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {name}")
    yield name
    query(url, f"DROP USER {name}")


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("ALTER USER {user} ACCOUNT LOCK", "ALTER USER {user} ACCOUNT UNLOCK"),
        ("REVOKE INSERT ON idemp_inbox FROM {user}", "GRANT INSERT ON idemp_inbox TO {user}"),
        ("REVOKE INSERT ON idemp_output FROM {user}", "GRANT INSERT ON idemp_output TO {user}"),
        ("RENAME TABLE idemp_pending TO moved", "RENAME TABLE moved TO idemp_pending"),
    ],
    ids=["locked", "claims refused", "outputs refused", "no table"],
)
def test_consumption_pauses_and_resumes(url: str, user: str, begin: str, end: str, caplog: pytest.LogCaptureFixture) -> None:
    pauses_and_resumes(url, user, begin, end, caplog)


@pytest.fixture
def own_server() -> Iterator[str]:
    """A server whose settings touch no other test."""
    with tempfile.TemporaryDirectory(prefix="idemp-mariadb-") as folder:
        Path(folder).chmod(0o755)
        with Mariadb(Path(folder) / "node") as node:
            database = Database(create_database(node.url))
            upgrade(database)
            yield database.engine.url.render_as_string(hide_password=False)
            database.close()


def test_consumption_pauses_while_the_server_is_read_only(kind: str, own_server: str, caplog: pytest.LogCaptureFixture) -> None:
    with worker_of(own_server) as user:
        pauses_and_resumes(own_server, user, "SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0", caplog)


def pauses_and_resumes(url: str, user: str, begin: str, end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    owner, world = World(url), World(make_url(url).set(username=user).render_as_string(hide_password=False))
    worker = world.worker()
    world.send("0")
    world.work(worker)
    owner.send("1", "2", "3")
    query(url, begin.format(user=user))
    try:
        end_connections(url, "user", user)
        for _ in range(3):
            worker.step(poll=0.0)
        assert owner.effects() == {"0": 1}
    finally:
        query(url, end.format(user=user))
    wait_for(lambda: worker.step(poll=0.0) == 0 and not owner.rows())
    assert (owner.effects(), owner.dead(), owner.rows()) == ({"0": 1, "1": 1, "2": 1, "3": 1}, [], [])
    seen = [getattr(record, "event", "") for record in caplog.records]
    assert [event for event in seen if event in ("worker.paused", "worker.resumed")] == ["worker.paused", "worker.resumed"]
    world.close()
    owner.close()


def killed(url: str, ctx: Context) -> None:
    query(url, f"KILL {ctx.connection.scalar(text('SELECT CONNECTION_ID()'))}")
    insert_and_send(Order(order_id="bad"), ctx)


def swallows_a_deadlock(url: str, ctx: Context) -> None:
    """The server has rolled back, so that what comes behind it has no claim."""
    ctx.connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
    insert_and_send(Order(order_id="bad"), ctx)


@pytest.mark.parametrize(("spoil", "rule"), [(killed, "connection lost"), (swallows_a_deadlock, "rolled back")])
def test_a_message_with_a_bad_handler_holds_up_no_other(url: str, spoil: Callable[[str, Context], None], rule: str) -> None:
    def handle(message: Order, ctx: Context) -> Any:
        insert_and_send(message, ctx)
        if message.order_id == "bad":
            spoil(url, ctx)

    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    world.send("1", "bad", "2")
    worker = world.worker()
    while world.rows() and not world.dead():
        world.work(worker)
        world.pass_time(10)
    assert world.effects() == {"1": 1, "2": 1}
    assert world.runs["bad"] >= 2
    assert [(dead["rule"], dead["attempts"]) for dead in world.dead()] == [(rule, 2)]


@pytest.mark.parametrize("language", ["ja_JP", "cs_CZ", "hu_HU", "de_DE"])
def test_a_duplicate_is_one_in_each_language_of_the_server(url: str, language: str) -> None:
    engine = create_engine(url, connect_args={"init_command": f"SET lc_messages = '{language}'"})
    handle = Inbox(engine).wrap(lambda message, ctx: None, message=Order, consumer="billing", policy=Idempotent(key="order_id"))
    assert [handle({"order_id": "1"}).verdict for _ in range(2)] == [Verdict.CLAIMED, Verdict.DUPLICATE]
    engine.dispose()


def test_asynchronous_connections_that_read_texts_in_another_way_are_refused(url: str) -> None:
    """Their driver escapes by backslashes, so a text could end its literal."""

    async def handle(message: Order, ctx: AsyncContext) -> None: ...

    async def main() -> None:
        options = {"init_command": "SET sql_mode = 'STRICT_TRANS_TABLES,NO_BACKSLASH_ESCAPES'"}
        engine = create_async_engine(make_url(url).set(drivername="mysql+aiomysql"), connect_args=options)
        wrapped = AsyncInbox(engine).wrap(handle, message=Order, consumer="billing", policy=Idempotent(key="order_id"))
        with pytest.raises(ConfigurationError, match="NO_BACKSLASH_ESCAPES"):
            await wrapped({"order_id": "1', NULL, 12345.0, 0x6576696c) -- "})
        await engine.dispose()

    asyncio.run(main())


class Elsewhere:
    """A broker that takes larger messages than the database."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.acked: list[Delivery] = []

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave it to `publish`."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[None]:
        self.taken += [output.routing_key for output in outputs]
        return [None] * len(outputs)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        self.acked += deliveries


def test_a_message_that_the_server_hangs_up_on_stops_nobody(url: str) -> None:
    """Quotes take two bytes each, so the statement is longer than max_allowed_packet."""
    database, broker = Database(url), Elsewhere()
    store, dispatcher = SqlStore(database, "w"), Dispatcher(broker, SqlScheduler(database, "w"))  # type: ignore[arg-type]
    settler = Settler(Handlers(), store, dispatcher.scheduler, dispatcher, broker)  # type: ignore[arg-type]
    protocol = Protocol(Executor(Handlers(), store), dispatcher, settler)
    bad, good = Delivery("shop", {"type": "nobody"}, b'"' * 9_000_000), Delivery("shop", {"type": "nobody"}, b'"')
    assert protocol.set_aside([bad]) == []
    assert protocol.handle([protocol.executor.accept(each) for each in (good, bad, good)]) == []
    assert (broker.taken, len(broker.acked)) == (["shop.unstorable"] * 2, 4)
    database.close()


def test_an_output_that_the_server_hangs_up_on_keeps_no_neighbour_back(url: str) -> None:
    broker = SqlBroker(Database(url), "w")
    broker.declare("stock", [])
    outputs = [Output("", "send", "", "stock", {}, body) for body in (b"1", b'"' * 9_000_000, b"2")]
    one, bad, two = broker.publisher().publish(outputs, 10.0)
    assert (one, two) == (None, None)
    assert bad is not None
    assert bad.own
    broker.database.close()


def test_a_connection_in_a_transaction_that_the_driver_does_not_know_of_commits_nothing(url: str) -> None:
    """An answer with rows does not tell PyMySQL that a transaction is open."""

    def handle(message: Order, ctx: Context) -> None:
        if message.order_id == "bad":
            driver: Any = ctx.connection.connection.driver_connection
            driver.rollback()
            driver.cursor().execute("INSERT INTO effect (what) VALUES ('leak') RETURNING row")
        insert_and_send(message, ctx)

    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=1)))
    world.send("bad", "1")
    world.work(world.worker())
    assert (world.effects(), [each["rule"] for each in world.dead()]) == ({"1": 1}, ["rolled back"])


def test_an_output_that_was_spoilt_stops_no_relay(url: str) -> None:
    world = World(url)
    world.send("1")
    world.work(world.worker(), relay=False)
    world.pass_time(660)
    tables = world.database.tables
    with world.database.short() as connection:
        part = tables.output.c.ordinal == 2
        connection.execute(tables.output.update().where(part).values(headers=b"{"))
        connection.execute(tables.pending.delete().where(~(tables.pending.c.ordinal == 2)))
    assert SqlScheduler(world.database, "relay").lease_outputs(10, 30) == []
    with world.database.engine.connect() as connection:
        reasons = connection.scalars(tables.pending.select().with_only_columns(tables.pending.c.reason)).all()
    assert [b"cannot be read" in reason for reason in reasons] == [True]
