"""Checker first and work later; COMMITs of the local work whose answer is lost. On a real PostgreSQL, behind a proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.errors import RolledBack, Undecided
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import InMemoryHome, PreparedMessages, State, Taken
from idemp.prepared.sql import SqlBarrier
from idemp.testing import FaultProxy
from idemp.testing.store_bench import Background
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from idemp.prepared import Record
    from idemp.testing import Trigger

COMMIT = b"COMMIT\0"  # of psycopg's statement, and of the server's answer to it
SOON = 10.0
WHERE: dict[str, Any] = {"message": {"n": 1}, "to": "stock", "type": "stock.Reserve", "key": "order-1"}


@dataclass
class Shop:
    prepared: PreparedMessages
    broker: InMemoryBroker
    proxy: FaultProxy
    engine: Engine

    def work(self, session: Session) -> None:
        session.execute(text("INSERT INTO business (n) VALUES (1)"))

    @property
    def rows(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(text("SELECT COUNT(*) FROM business")) or 0)

    @property
    def arrived(self) -> int:
        return self.broker.depth("stock")


@pytest.fixture
def shop(postgresql_url: str) -> Iterator[Shop]:
    url = make_url(postgresql_url)
    direct = create_engine_safely(postgresql_url)
    make_tables(direct)
    with direct.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (n INTEGER NOT NULL)")
    broker = InMemoryBroker()
    broker.declare(Topology(exchange="idemp", queues=("stock",)))
    with FaultProxy(url.host or "", url.port or 5432) as proxy:
        engine = create_engine_safely(url.set(host=proxy.host, port=proxy.port))
        app = App("orders", store=InMemoryStore(), broker=broker)
        barrier = SqlBarrier(engine, wait=timedelta(seconds=5))
        yield Shop(
            PreparedMessages(app, InMemoryHome(), barrier=barrier, check_after=timedelta(0)), broker, proxy, direct
        )
        engine.dispose()
    direct.dispose()


def test_checker_first_and_work_later(shop: Shop) -> None:
    """The work is refused, and leaves nothing."""

    def slow(session: Session) -> None:
        raise AssertionError("it must not begin")

    prepared = shop.prepared.make(**WHERE)
    shop.prepared.home.prepare(prepared, timedelta(0))
    assert shop.prepared.run_once().rolled_back == 1
    with pytest.raises(RolledBack):
        shop.prepared.submit_after(slow, **WHERE)
    assert (shop.rows, shop.arrived) == (0, 0)


def test_checker_comes_while_the_work_runs(shop: Shop) -> None:
    """It waits for the COMMIT, and then agrees."""
    checking: list[Background[Any]] = []

    def work(session: Session) -> None:
        shop.work(session)
        checking.append(Background(shop.prepared.run_once))
        wait_until(lambda: _waits(shop.engine), "the checker waits for this transaction", seconds=SOON)

    shop.prepared.submit_after(work, **WHERE)
    assert checking[0].result(SOON).taken == 1
    assert shop.rows == 1
    assert len({message.message_id for message in shop.broker.browse("stock", 10)}) == 1


def _waits(engine: Engine) -> bool:
    waiting = "datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.scalar(text(f"SELECT COUNT(*) FROM pg_stat_activity WHERE {waiting}")))


def _taken(record: Record) -> Taken:
    return Taken(record.prepared.output, record.prepared.fingerprint)


LOST: dict[str, Callable[[Shop], Trigger]] = {
    "it did not commit": lambda shop: shop.proxy.cut_when(COMMIT, before=True),
    "it committed": lambda shop: shop.proxy.cut_when(COMMIT, direction="to_client", before=True),
}


@pytest.mark.parametrize("lost", LOST)
def test_commit_without_an_answer(shop: Shop, lost: str, caplog: pytest.LogCaptureFixture) -> None:
    """The barrier knows which it was: delivered if and only if it took place."""
    cuts: list[Trigger] = []

    def work(session: Session) -> None:
        shop.work(session)
        cuts.append(LOST[lost](shop))

    if lost == "it committed":
        shop.prepared.submit_after(work, **WHERE)
        assert "prepared_commit_found" in [getattr(record, "event", "") for record in caplog.records]
    else:
        with pytest.raises(OperationalError):
            shop.prepared.submit_after(work, **WHERE)
    assert cuts[0].wait_triggered(SOON)
    expected = int(lost == "it committed")
    assert (shop.rows, shop.arrived) == (expected, expected)
    assert shop.prepared.run_once().taken == 0


@pytest.mark.parametrize("lost", LOST)
def test_commit_without_an_answer_and_then_nobody_to_ask(shop: Shop, lost: str) -> None:
    """The producer says that it does not know, and the checker finds out when the database is back."""

    def work(session: Session) -> None:
        shop.work(session)
        LOST[lost](shop)
        shop.proxy.refuse()

    with pytest.raises(Undecided) as raised:
        shop.prepared.submit_after(work, **WHERE)
    assert raised.value.committed == "unknown"
    assert shop.arrived == 0
    assert shop.prepared.run_once().unasked == 1
    shop.proxy.heal()
    record = shop.prepared.home.find(shop.prepared.id_of("order-1"))
    assert record is not None
    assert (record.state, record.checks) == (State.PREPARED, 0)
    shop.prepared.home.postpone(_taken(record), "the test does not wait", timedelta(0), checked=False)
    done = shop.prepared.run_once()
    expected = int(lost == "it committed")
    assert (done.committed, done.rolled_back) == (expected, 1 - expected)
    assert (shop.rows, shop.arrived) == (expected, expected)
