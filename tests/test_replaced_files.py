"""Files of SQLite that are deleted or replaced under a process: it stops, and confirms nothing more."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from idemp import App, Context, Idempotent
from idemp.broker.local import LocalBroker
from idemp.broker.port import Ack, Topology
from idemp.columns import Columns
from idemp.errors import BrokerReplaced, StoreReplaced
from idemp.inbox.sql import create_engine_safely
from idemp.settings import Settings
from idemp.spool.store import SpoolStore
from idemp.worker import Worker
from tests.broker.given import output
from tests.inbox.sql.kept import make_tables

TOPOLOGY = Topology(exchange="idemp", queues=("orders", "stock"))


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


def delete_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def delete_index(path: Path) -> None:
    Path(f"{path}-shm").unlink()


HOW = [delete, replace, delete_log, delete_index]
How = Callable[[Path], None]


@pytest.fixture
def broker(tmp_path: Path) -> LocalBroker:
    broker = LocalBroker(tmp_path / "queues.db")
    broker.declare(TOPOLOGY)
    return broker


@pytest.mark.parametrize("how", HOW)
def test_publisher_confirms_nothing_more(broker: LocalBroker, tmp_path: Path, how: How) -> None:
    publisher = broker.publisher()
    assert publisher.publish([output(key="stock")], 10) == [None]
    how(tmp_path / "queues.db")
    for _ in range(2 if how in {delete, replace} else 1):
        (refusal,) = publisher.publish([output(key="stock")], 10)
        assert refusal is not None
        assert refusal.kind == "closed"
        assert "was deleted or replaced" in refusal.detail
    publisher.close()


@pytest.mark.parametrize("how", HOW)
def test_receiver_takes_and_settles_nothing_more(broker: LocalBroker, tmp_path: Path, how: How) -> None:
    publisher = broker.publisher()
    publisher.publish([output(key="orders"), output(key="orders")], 10)
    receiver = broker.receiver(["orders"], prefetch=1)
    delivery = receiver.receive(10)
    assert delivery is not None
    how(tmp_path / "queues.db")
    with pytest.raises(BrokerReplaced, match="was deleted or replaced"):
        receiver.settle(delivery, Ack())
    with pytest.raises(BrokerReplaced):
        receiver.receive(10)
    receiver.close()
    publisher.close()


def test_transaction_that_was_under_way_is_not_confirmed(broker: LocalBroker, tmp_path: Path) -> None:
    link = broker._open()

    def commits_into_nowhere() -> None:
        with link.transaction() as raw:
            raw.execute("INSERT INTO queues (name) VALUES ('new')")
            (tmp_path / "queues.db").unlink()

    with pytest.raises(BrokerReplaced):
        commits_into_nowhere()
    link.close()


def test_log_that_its_last_connection_takes_along_was_not_replaced(broker: LocalBroker, tmp_path: Path) -> None:
    """A worker starts while another process, say a command that lists messages, ends."""
    with closing(sqlite3.connect(tmp_path / "queues.db")) as other:
        other.execute("SELECT 1 FROM queues").fetchone()
        receiver = broker.receiver(["orders"], prefetch=1)
        receiver._holder.link.check_file()
    assert not (tmp_path / "queues.db-wal").exists()
    publisher = broker.publisher()
    assert publisher.publish([output(key="orders")], 10) == [None]
    assert receiver.receive(10) is not None
    receiver.close()
    publisher.close()


def test_broker_goes_on_with_no_other_file(broker: LocalBroker, tmp_path: Path) -> None:
    """A file of another broker in its place has other queues under the same numbers."""
    publisher = broker.publisher()
    assert publisher.publish([output(key="stock")], 10) == [None]
    other = LocalBroker(tmp_path / "other.db")
    other.declare(Topology(exchange="idemp", queues=("stock", "orders")))
    (tmp_path / "other.db").replace(tmp_path / "queues.db")
    with pytest.raises(BrokerReplaced):
        broker.depth("stock")
    with pytest.raises(BrokerReplaced):
        broker.receiver(["stock"], prefetch=1)
    publisher.close()


@pytest.mark.parametrize("how", HOW)
def test_engine_gives_no_connection_that_nobody_else_sees(tmp_path: Path, how: How) -> None:
    path = tmp_path / "inbox.db"
    engine = create_engine_safely(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (number INTEGER)"))
    how(path)
    with pytest.raises(StoreReplaced), engine.connect():
        pass
    engine.dispose()  # whoever replaced the file on purpose says so
    with engine.connect():
        pass
    engine.dispose()


@pytest.mark.parametrize("how", HOW)
def test_commit_into_a_file_that_is_gone_fails(tmp_path: Path, how: How) -> None:
    path = tmp_path / "inbox.db"
    engine = create_engine_safely(f"sqlite:///{path}")

    def commit() -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (number INTEGER)"))
            how(path)

    with pytest.raises(StoreReplaced) as caught:
        commit()
    assert caught.value.committed == "unknown"
    engine.dispose()


def test_files_come_and_go_while_nothing_is_open(tmp_path: Path) -> None:
    """The last connection to a file deletes its log: the next one finds another, and nothing is wrong with that."""
    engine = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db", pool_size=1, max_overflow=5)
    for _ in range(3):
        connections = [engine.connect() for _ in range(3)]
        for connection in connections:
            connection.execute(text("CREATE TABLE IF NOT EXISTS effect (number INTEGER)"))
            connection.commit()
            connection.close()
        engine.pool.dispose()
    engine.dispose()


def test_spool_says_of_nothing_that_it_keeps_it(tmp_path: Path) -> None:
    engine = create_engine_safely(f"sqlite:///{tmp_path}/spool.db")
    spool = SpoolStore(engine)
    spool.create("orders")
    row = Columns("m-1", "t", b"{}", None, None, "")
    assert spool.append("orders", [row])
    (tmp_path / "spool.db").unlink()
    with pytest.raises(StoreReplaced):
        spool.append("orders", [row])
    engine.dispose()


@pytest.mark.parametrize(("name", "error"), [("queues.db", BrokerReplaced), ("inbox.db", StoreReplaced)])
def test_worker_stops_and_confirms_nothing_more(tmp_path: Path, name: str, error: type[Exception]) -> None:
    """In the third of ten handlings the file goes; that one is neither acked nor sent, or its output still waits."""
    broker = LocalBroker(tmp_path / "queues.db")
    engine = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db")
    make_tables(engine)
    app = App("orders", database=engine, broker=broker, settings=Settings(relay=False))
    worker = Worker([app], threads=1)
    handled: list[int] = []

    @app.handler(dict, type="orders.Place", policy=Idempotent(key="number"))
    def place(message: dict[str, Any], ctx: Context) -> None:
        handled.append(message["number"])
        if message["number"] == 3:
            kept = tmp_path / f"kept-{name}"
            for suffix in ("", "-wal", "-shm"):
                os.link(f"{tmp_path / name}{suffix}", f"{kept}{suffix}")
                Path(f"{tmp_path / name}{suffix}").unlink()
        if message["number"] == 10:
            worker.stop()
        ctx.send({"number": message["number"]}, to="stock", type="stock.Reserve")

    broker.declare(TOPOLOGY)
    publisher = broker.publisher()
    for number in range(1, 11):
        one = output(b'{"number": %d}' % number, key="orders")
        one.message.headers.update({})
        assert publisher.publish([_typed(one)], 10) == [None]
    publisher.close()
    with pytest.raises(error, match="was deleted or replaced"):
        worker.run()
    assert 10 not in handled
    engine.dispose()
    if name == "inbox.db":
        assert broker.depth("stock") <= 2  # nothing of what was committed into the deleted file
        assert broker.depth("orders") == 8
    else:
        left = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db")
        with left.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM idemp_pending")) >= 1
            assert connection.scalar(text("SELECT count(*) FROM idemp_inbox")) == len(set(handled))
        left.dispose()


def _typed(one: Any) -> Any:
    from dataclasses import replace as changed

    return changed(one, message=changed(one.message, type="orders.Place", content_type="application/json"))
