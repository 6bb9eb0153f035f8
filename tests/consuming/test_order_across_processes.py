"""Processes end while they hold messages, and others take over: nothing of a key is overtaken, lost or done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text

from idemp.broker.making import make_broker
from idemp.broker.port import Topology
from idemp.errors import ConfigurationError
from idemp.settings import Settings
from tests.consuming.test_order import output
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

MODULE = """
import os
from sqlalchemy import text
from idemp import App, Idempotent, Refuse

app = App("killed")
policy = {"ordered_by": "key", "retry_delays": ["300ms"], "attempts": 2}


@app.handler(dict, type="a", policy=Idempotent(**policy))
@app.handler(dict, type="b", policy=Idempotent(**policy, claim="late"))
def work(message, ctx):
    ctx.connection.execute(text("INSERT INTO effect (key, number) VALUES (:key, :number)"), message)
    ctx.send({"number": message["number"]}, to="out", type="killed.Done")
    if message["fails"] == "for good":
        raise Refuse("parked")
    if message["fails"] == "once" and ctx.attempt == 1:
        raise ValueError("at its first attempt")
    if message["fails"] == "deadly":
        os._exit(1)
"""
QUEUE, KEYS = "killed", 7


class Service:
    """A place where workers are started, and what they leave there."""

    def __init__(self, folder: Path, database: str, broker: str) -> None:
        (folder / "killed.py").write_text(MODULE)
        self._folder = folder
        self._environment = {**os.environ, "IDEMP_DATABASE_URL": database, "IDEMP_BROKER_URL": broker}
        self.engine = create_engine(database)
        make_tables(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (place serial, key integer, number integer)"))
        self._broker = make_broker(broker, Settings())
        self._broker.declare(Topology(exchange="idemp", queues=("out",)))

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker whose queue is there."""
        command = [sys.executable, "-m", "idemp.cli", "worker", "killed:app", "--log-json", *options]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stderr=log, stdout=subprocess.DEVNULL
            )
        try:
            wait_until(self._is_declared, "the queue is there")
            yield process
        finally:
            process.terminate()
            process.wait()

    def send(self, count: int, fails: dict[str, Collection[int]]) -> None:
        """Messages with these numbers, some of which fail."""
        fates = {number: fate for fate, numbers in fails.items() for number in numbers}
        outputs = [
            output(number, {"key": number % KEYS, "fails": fates.get(number, "never")}, queue=QUEUE)
            for number in range(count)
        ]
        with self._broker.publisher() as publisher:  # type: ignore[union-attr]
            assert publisher.publish(outputs, 30) == [None] * count

    def effects(self) -> list[tuple[int, int]]:
        """Keys and numbers, in the order in which they were committed."""
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT key, number FROM effect ORDER BY place"))
            return [(row.key, row.number) for row in rows]

    def numbers_in(self, queue: str) -> set[int]:
        return {json.loads(message.body)["number"] for message in self._broker.browse(queue, 1000)}

    def comes_to(self, count: int, parked: set[int]) -> None:
        """All are handled once, with an output, in the order of their keys, but for those that are parked."""
        fine = [number for number in range(count) if number not in parked]
        wait_until(lambda: len(self.effects()) == len(fine), "all are handled")
        wait_until(lambda: self.numbers_in(f"{QUEUE}.dead") == parked, "or parked")
        wait_until(lambda: self.numbers_in("out") == set(fine), "all outputs are there")
        by_key = defaultdict(list)
        for key, number in self.effects():
            by_key[key].append(number)
        assert by_key == {key: [number for number in fine if number % KEYS == key] for key in range(KEYS)}

    def _is_declared(self) -> bool:
        try:
            self._broker.depth(QUEUE)
        except ConfigurationError:
            return False
        return True


@pytest.fixture
def service(tmp_path: Path, postgresql_url: str, rabbitmq_url: str) -> Iterator[Service]:
    service = Service(tmp_path, postgresql_url, rabbitmq_url)
    yield service
    service.engine.dispose()


@pytest.fixture
def service_on_activemq(tmp_path: Path, postgresql_url: str, activemq_url: str) -> Iterator[Service]:
    service = Service(tmp_path, postgresql_url, activemq_url)
    yield service
    service.engine.dispose()


@pytest.mark.slow
def test_the_active_one_is_killed(service: Service) -> None:
    """Again and again, with others waiting to take over."""
    kill_the_active_one(service, 400)


def test_the_active_one_is_killed_on_activemq(service_on_activemq: Service) -> None:
    """The same, with an exclusive consumer."""
    kill_the_active_one(service_on_activemq, 200)


def kill_the_active_one(service: Service, count: int) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(service.worker("--threads", "2")) for _ in range(4)]
        parked = set(range(20, count, 40))
        service.send(count, {"once": range(3, count, 15), "for good": parked})
        for times, worker in enumerate(workers[:-1], start=1):
            wait_until(lambda least=times * count // 5: len(service.effects()) >= least, "some are done")  # type: ignore[misc]
            worker.send_signal(signal.SIGKILL)
        service.comes_to(count, parked)


@pytest.mark.slow
def test_a_message_ends_its_process(service: Service) -> None:
    """Its deaths count though it stays in its place, and those behind it go on when it is parked."""
    with service.worker("--processes", "2"):
        service.send(60, {"once": {8, 11}, "deadly": {10}})
        service.comes_to(60, {10})
