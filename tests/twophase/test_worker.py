"""A worker recovers before it consumes, and goes on doing so."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp.broker.port import Topology
from idemp.errors import GuaranteeError
from idemp.identity import new_id
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Output, OutputKind
from idemp.twophase import Recovery
from idemp.twophase.sql.branch import SqlBranch
from idemp.worker import Worker
from tests.servers.process import wait_until
from tests.twophase.dying import dying
from tests.twophase.world import message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.twophase.world import Consumer, World


def left_in_doubt(shop: World, consumer: Consumer, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends after the decision, as far as the databases can tell."""
    with dying(monkeypatch, SqlBranch, "commit"):
        consumer.deliver(n)
    assert len(shop.in_doubt()) == 1
    assert shop.effects(n) == [1, 0]


@contextmanager
def working(consumer: Consumer) -> Iterator[None]:
    worker = Worker([consumer.app], threads=1, relay=False)
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        yield
    finally:
        worker.stop()
        running.join(20)
    assert not running.is_alive()


def test_start(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in doubt is ended; and a handler that would have waited for its locks handles its message."""
    left_in_doubt(shop, other, 201, monkeypatch)
    with shop.engines[""].begin() as connection:  # other tests' consumers of this name go by other keys
        connection.execute(text("DELETE FROM idemp_identity"))
    broker: Any = other.app.broker
    broker.declare(Topology(exchange="idemp", queues=("billing", "stock")))
    sent = Output(
        id=new_id(other.app.clock.now()),
        ordinal=0,
        kind=OutputKind.SEND,
        exchange="",
        routing_key="billing",
        message=message(202),
    )
    broker.publisher().publish([sent], 5)
    in_handler: list[list[int]] = []
    other.after_writing.append(lambda _: in_handler.append(shop.effects(201)))
    with working(other):
        wait_until(lambda: shop.effects(202) == [1, 1], 20)
    assert in_handler == [[1, 1]]
    assert shop.in_doubt() == []


def test_rounds(
    shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first takes all, later ones what they see twice; a database that is away is told once, and waited for."""
    caplog.set_level(logging.INFO, "idemp.twophase")
    recovery = Recovery(shop.consumer.coordinator, wait=timedelta(milliseconds=100))
    recovery.keep_up()
    left_in_doubt(shop, other, 203, monkeypatch)
    recovery.keep_up()
    assert shop.effects(203) == [1, 0], "it may be in work"
    recovery.keep_up()
    assert shop.effects(203) == [1, 1]
    told = [record for record in caplog.records if getattr(record, "event", "") == "branch_recovered"]
    assert [record.decision for record in told] == ["committed"]  # type: ignore[attr-defined]
    assert shop.consumer.deliver(203).name == "REDISPATCHED"
    shop.all_is_well(203)

    database: Any = shop.consumer.coordinator.databases["ledger"]
    reachable, database.engine = database.engine, create_engine_safely(database.engine.url.set(port=1))
    recovery.keep_up()
    recovery.keep_up()
    database.engine = reachable
    recovery.keep_up()
    waits = [record for record in caplog.records if getattr(record, "event", "") == "recovery_waits"]
    assert [record.databases for record in waits] == [["ledger"]]  # type: ignore[attr-defined]


def test_start_without_the_other_database(shop: World, other: Consumer, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and not the end: other types are handled."""
    database: Any = other.coordinator.databases["ledger"]
    database.engine.dispose()
    database.engine = create_engine_safely(database.engine.url.set(port=1))
    other.app.start()
    assert [getattr(record, "event", "") for record in caplog.records] == ["recovery_waits"]


def test_server_that_prepares_nothing(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is PostgreSQL's default: found at start."""
    database: Any = other.coordinator.databases["ledger"]
    if shop.is_postgresql("ledger"):
        monkeypatch.setattr(type(database.kind), "most", lambda *_: 0)
        said = "max_prepared_transactions is 0"
    else:
        with database.engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        monkeypatch.setattr(database.engine.dialect, "server_version_info", (10, 4, 3))
        said = "don't outlive their connection"
    with pytest.raises(GuaranteeError, match=said):
        other.app.start()
