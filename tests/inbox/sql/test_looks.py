"""What idemp's own looks at a database meet: an outage in the right words, whatever it is, and never a driver's error."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, exc, text

from idemp import Idempotent, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.errors import ConfigurationError, StoreError, StoreUnavailable
from idemp.inbox.sql import SqlStore, create_engine_safely, failures
from idemp.inbox.sql.schema import upgrade
from idemp.inbox.sql.tables import Tables
from idemp.relay import Relay
from tests.house import SELL, House, memory_house
from tests.lanes import mostly_slow
from tests.servers.process import wait_until

LIMITS = {"postgresql": "SET statement_timeout = '200ms'", "mysql": "SET SESSION max_statement_time = 0.2"}
TABLES = ("inbox", "output", "pending", "unfinished", "history")


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """Each server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def family(engine: Engine) -> str:
    return "postgresql" if engine.dialect.name == "postgresql" else "mysql"


@contextmanager
def locked(engine: Engine, table: str) -> Iterator[None]:
    """Somebody has a table for himself."""
    statement = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE" if family(engine) == "postgresql" else "LOCK TABLES {} WRITE"
    with engine.connect() as connection:
        connection.execute(text(statement.format(table)))
        yield
        if family(engine) == "mysql":
            connection.execute(text("UNLOCK TABLES"))


@contextmanager
def impatient(url: str) -> Iterator[SqlStore]:
    """A store whose statements the server cancels after a moment."""
    engine = create_engine_safely(url)

    def limit(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(LIMITS[family(engine)])
        connection.commit()

    event.listen(engine, "connect", limit)
    store = SqlStore(engine)
    try:
        yield store
    finally:
        store.close()
        engine.dispose()


def looks(store: SqlStore) -> dict[str, Callable[[], object]]:
    return {
        "verify": store.verify,
        "start": lambda: store.note_start("shop", UUID(int=7)),
        "relay": lambda: store.upkeep.take_pending(10, timedelta(seconds=30)),
        "beat": lambda: store.upkeep.beat("w", relay=True, consumers=["shop"]),
        "purge": lambda: store.upkeep.purge("shop", {SELL: timedelta(days=1)}, 10),
        "state": store.upkeep.pending_state,
        "horizons": lambda: store.refresh_horizons("shop", [timedelta(days=1)]),
    }


@pytest.mark.parametrize("table", mostly_slow(TABLES, first=2))
def test_a_statement_that_takes_too_long_is_an_outage(url: str, table: str) -> None:
    """It is not a missing right, and its words name what it is."""
    other, met = create_engine_safely(url), []
    upgrade(other, Tables())
    with impatient(url) as store:
        store.prepare("shop", [SELL])
        with locked(other, f"idemp_{table}"):
            for look in looks(store).values():
                try:
                    look()
                except StoreError as error:
                    met.append(error)
    assert met, "nobody asked for the table"
    for error in met:
        assert isinstance(error, StoreUnavailable)
        assert "cancelled a statement of idemp's own" in error.message
        assert "Grant" not in str(error)
    other.dispose()


def test_consumption_pauses_while_the_store_can_not_be_asked(url: str) -> None:
    """No handler is blamed: its message is held, and handled when the lock is gone."""
    other = create_engine_safely(url)
    upgrade(other, Tables())
    with impatient(url) as store:
        house = House(store, memory_house().effects, memory_house().clock)
        house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(lambda message: None)
        store.prepare("shop", [SELL])
        with (
            locked(other, "idemp_inbox"),
            pytest.raises(StoreUnavailable, match="cancelled a statement of idemp's own"),
        ):
            house.handle()
        assert house.handle()[0] is Outcome.HANDLED
    other.dispose()


@pytest.mark.parametrize("table", mostly_slow(TABLES, first=2))
def test_a_table_that_is_missing_is_called_missing(empty_engine: Engine, table: str) -> None:
    engine = empty_engine
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE idemp_{table}"))
    store, met = SqlStore(engine), []
    for look in looks(store).values():
        try:
            look()
        except (StoreError, ConfigurationError) as error:
            met.append(str(error))
    assert met
    for said in met:
        assert "missing" in said
        assert table in said
        assert "idemp db upgrade" in said
    store.close()


def test_the_relay_says_what_is_missing(empty_engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine = empty_engine
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE idemp_pending"))
    store, stop = SqlStore(engine), threading.Event()
    relay = Relay(store.upkeep, InMemoryBroker().publisher())
    running = threading.Thread(target=relay.run, args=(stop, timedelta(seconds=1)))

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "relay_store_away"]

    with caplog.at_level(logging.WARNING):
        running.start()
        wait_until(said, "it was said")
    stop.set()
    running.join(30)
    (line,) = said()
    assert line.startswith("relay: the database refuses: A table is missing: ")
    assert "idemp db upgrade" in line
    store.close()


@pytest.mark.parametrize(
    "error",
    [
        exc.OperationalError("SELECT 1", {}, Exception("canceling statement due to statement timeout")),
        exc.InvalidRequestError("Could not reflect"),
        exc.NoSuchTableError("idemp_inbox"),
        RuntimeError("of a driver of others"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_a_look_reaches_the_handler(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store of others does not translate."""
    house = memory_house()

    def verify() -> None:
        raise error

    monkeypatch.setattr(house.store.inner, "verify", verify)
    obstacle = house.worker().obstacle()
    assert isinstance(obstacle, StoreError)
    assert type(error).__name__ in obstacle.message


@pytest.mark.parametrize("size", [100, 4096, 20_000])
def test_a_file_that_was_cut_off_is_called_damaged(tmp_path: Path, size: int) -> None:
    """As a copy is that ran out of room."""
    engine = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db")
    upgrade(engine, Tables())
    engine.dispose()  # the log is written back
    os.truncate(tmp_path / "inbox.db", size)
    store = SqlStore(engine)
    with pytest.raises(
        StoreError, match=r"The database file is damaged: .*malformed\. .* restore the file from a backup"
    ):
        store.verify()
    store.close()
    engine.dispose()


@pytest.mark.parametrize("says", ["", "Not connected"])
def test_a_connection_that_was_closed_here_is_told_in_words(says: str) -> None:
    """The driver says nothing but a number."""
    from pymysql.err import InterfaceError

    found = failures.translate(exc.DBAPIError("SELECT 1", {}, InterfaceError(0, says)))
    assert isinstance(found, StoreUnavailable)
    told = says or "the connection was closed in this process"
    assert told in found.message
    assert "''" not in found.message
