"""SIGTERM to a worker with a slow handler and a full prefetch on RabbitMQ: finish or give back; the exit code says it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idemp.broker.kombu import KombuBroker
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message, Output, OutputKind
from tests.inbox.sql.kept import make_tables
from tests.poison.mill import FINE, Mill
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

MODULE = """
import time
from pathlib import Path
from sqlalchemy import text
from idemp import App, Idempotent

app = App("slow")


@app.handler(dict, type="slow.Work", policy=Idempotent())
def work(message, ctx):
    ctx.connection.execute(text("INSERT INTO effect VALUES (:id)"), {"id": ctx.message_id})
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    ctx.send({"id": ctx.message_id}, to="out", type="slow.Done")
"""
SENT = 10


class Service:
    """A worker process in a directory of its own, with ten messages waiting."""

    def __init__(self, folder: Path, database: str, broker: str) -> None:
        self.folder = folder
        (folder / "slow.py").write_text(MODULE)
        self.engine: Engine = create_engine_safely(database)
        make_tables(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (id varchar(40))"))
        self.broker = KombuBroker(broker)
        self.broker.declare(Topology(exchange="idemp", queues=("slow", "out")))
        self._environment = {**os.environ, "IDEMP_DATABASE_URL": database, "IDEMP_BROKER_URL": broker}
        made = [uuid4() for _ in range(SENT)]
        outputs = [
            Output(
                id=each,
                ordinal=0,
                kind=OutputKind.SEND,
                exchange="",
                routing_key="slow",
                message=Message(body=b"{}", type="slow.Work", message_id=str(each)),
            )
            for each in made
        ]
        with self.broker.publisher() as publisher:  # type: ignore[union-attr]
            assert publisher.publish(outputs, 10) == [None] * SENT

    @contextmanager
    def working(self, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """The process, in its first handler, with nine messages sent ahead."""
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "idemp.cli", "worker", "slow:app", "--log-json"],
                cwd=self.folder,
                env={**self._environment, **settings},
                stderr=log,
                stdout=subprocess.DEVNULL,
            )
        try:
            wait_until((self.folder / "begun").exists, "the handler began")
            wait_until(lambda: self.ready() == 0, "the others were sent ahead")
            yield process
        finally:
            process.kill()
            process.wait()

    def ready(self) -> int:
        return self.broker.depth("slow")

    def effects(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(text("SELECT count(*) FROM effect")) or 0)

    def lines(self) -> list[dict[str, Any]]:
        lines = (self.folder / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]

    def told_to_stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in self.events(), "the signal arrived")


@pytest.fixture
def service(tmp_path: Path, postgresql_url: str, rabbitmq_url: str) -> Iterator[Service]:
    service = Service(tmp_path, postgresql_url, rabbitmq_url)
    yield service
    service.engine.dispose()


def test_running_handler_finishes_and_the_rest_goes_back(service: Service) -> None:
    """Exit code 0; the message in hand is handled once and acked, the nine others are there for others."""
    with service.working() as process:
        service.told_to_stop(process)
        wait_until(lambda: service.ready() == SENT - 1, "what was sent ahead goes back while the handler runs")
        assert process.poll() is None
        (service.folder / "go").touch()
        assert process.wait(20) == 0
    assert service.ready() == SENT - 1
    assert (service.effects(), service.broker.depth("out")) == (1, 1)
    assert "worker_stopped" in service.events()
    assert "handler_abandoned" not in service.events()


def test_handler_that_outlasts_the_grace_time_is_given_back(service: Service) -> None:
    """Its transaction is rolled back, its message comes again, and the worker ends in good order all the same."""
    with service.working(IDEMP_GRACE="500ms") as process:
        service.told_to_stop(process)
        assert process.wait(20) == 0
    wait_until(lambda: service.ready() == SENT, "all are back")
    assert (service.effects(), service.broker.depth("out")) == (0, 0)
    (abandoned,) = [line for line in service.lines() if line["event"] == "handler_abandoned"]
    assert (abandoned["consumer"], abandoned["message_type"]) == ("slow", "slow.Work")
    assert abandoned["message_id"] is not None
    assert abandoned["seconds"] >= 0.5


def test_second_signal_gives_everything_back_at_once(service: Service) -> None:
    """No grace; nothing is half done."""
    with service.working(IDEMP_GRACE="10m") as process:
        service.told_to_stop(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 130
    wait_until(lambda: service.ready() == SENT, "all are back")
    assert (service.effects(), service.broker.depth("out")) == (0, 0)
    assert service.events()[-2:] == ["stopped_at_once", "handler_abandoned"]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_relay_that_waits_for_outputs_does_not_hold_up_the_end(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/mill.db" if database == "sqlite" else request.getfixturevalue("postgresql_url")
    with closing(Mill(url, InMemoryBroker(), settings={"relay_interval": 60})) as shop:
        with shop.working(threads=1):
            shop.send([FINE])
            wait_until(lambda: len(shop.effects()) == 1, "it works")
            begun = time.monotonic()
        assert time.monotonic() - begun < 30, "and not 60"
