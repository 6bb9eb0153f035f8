"""Starts while the database or the broker is away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import make_url

from idemp import App, Settings
from idemp.errors import Unavailable
from idemp.sql.broker import SqlBroker
from idemp.worker import Worker
from tests.servers.proxy import Proxy
from tests.worker.test_loop import wait_for
from tests.world import QUEUE, SINK, Order, Shipped, World, effect

ROOT = Path(__file__).parent.parent.parent
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(*command: str, **settings: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "IDEMP_TEST_FOLDER": str(tmp_path), **settings}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, "-m", "idemp", *command], env=environment, text=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str], until: str) -> list[str]:
    """Return what a process has logged, up to a line with an event."""
    found: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        found.append(line)
        if until in line:
            return found
    raise AssertionError("".join(found))


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_worker_and_a_relay_wait_for_a_database_that_is_away(url: str, start: Start) -> None:
    world, away, attempts = World(url), threading.Event(), list[bytes]()
    away.set()

    def decide(sent: bytes) -> str:
        attempts.append(sent)
        return "before" if away.is_set() else ""

    with Proxy(make_url(url).port or 5432, decide) as proxy:
        through = make_url(url).set(port=proxy.port).render_as_string(hide_password=False)
        worker = start("worker", "tests.apps:app", IDEMP_DATABASE_URL=through)
        relay = start("relay", IDEMP_DATABASE_URL=through)
        stopped = start("worker", "tests.apps:app", "--processes", "2", IDEMP_DATABASE_URL=through)
        waiting = [lines(each, "worker.waiting")[-1] for each in (worker, relay, stopped)]
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(60) == 0
        so_far = len(attempts)
        wait_for(lambda: len(attempts) >= so_far + 4)  # which say nothing
        away.clear()
        world.send("1")
        goes_on = [lines(worker, "worker.started"), lines(relay, "relay.started")]
        wait_for(lambda: world.effects() == {"1": 1})
    assert all("waits for the database: OperationalError" in line for line in waiting)
    assert [sum("waiting" in line for line in each) for each in goes_on] == [0, 0]


def test_a_worker_may_be_stopped_at_any_line_of_its_start(url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "IDEMP_DATABASE_URL": url, "IDEMP_TEST_FOLDER": str(tmp_path)}
    command = [sys.executable, "-m", "tests.worker.stopped"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    codes = json.loads(done.stdout.splitlines()[-1])
    begun = codes.count(0)
    assert begun > 20
    assert codes == [0, 0, *[143] * (len(codes) - begun), *[0] * (begun - 2)], done.stderr


def test_the_patience_ends_with_an_exit_code_and_sigterm_ends_an_import(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "slow_app.py").write_text("print('importing', flush=True)\ninput()\n")
    importing = start("worker", "slow_app")
    relay = start("relay", IDEMP_DATABASE_URL=f"postgresql://127.0.0.1:{port}/shop", IDEMP_PATIENCE="0s")
    lines(importing, "importing")
    importing.send_signal(signal.SIGTERM)
    assert (importing.wait(60), relay.wait(60)) == (143, 4)
    assert relay.stdout is not None
    (said,) = relay.stdout.readlines()
    assert said.startswith("idemp: OperationalError: ")


def test_an_initiation_needs_the_database_alone(url: str) -> None:
    """The broker takes connections and says nothing: one initiation waits for it, and the next ones do not ask."""
    world, calls, asked = World(url), [], 0
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def count() -> None:
            with pytest.raises(OSError):  # it is closed in the end
                while True:
                    calls.append(silent.accept())

        thread = threading.Thread(target=count)
        thread.start()
        address = f"amqp://127.0.0.1:{silent.getsockname()[1]}"
        app = App(QUEUE, settings=Settings(database_url=url, broker_url=address, publish_timeout=1.2))
        app.handler(Order)(lambda message: None)  # whose queue is to be declared
        for number in range(3):
            with app.initiate() as unit:
                unit.connection.execute(effect.insert(), {"what": str(number)})
                unit.send(Shipped(order_id="1", part=number), to=SINK)
            asked = len(calls) if number == 0 else asked
        assert asked >= 1
        assert len(calls) == asked
        assert (len(world.effects()), world.pending()) == (3, 3)
        app.close()
        silent.shutdown(socket.SHUT_RDWR)
    thread.join()
    for connection, _ in calls:
        connection.close()


class Full(SqlBroker):
    """A broker whose store is full: it delivers, and takes nothing."""

    full = True
    declared = 0

    def declare(self, *arguments: object) -> list[object]:  # type: ignore[override]
        if self.full:
            raise Unavailable("the store is full")
        self.declared += 1
        return super().declare(*arguments)  # type: ignore[arg-type, return-value]


def test_a_broker_that_takes_nothing_is_consumed_from(url: str) -> None:
    world = World(url)
    world.send("1")
    app = world.app()
    parts = app.adapters()
    broker = Full(parts.store.database, "full")  # type: ignore[attr-defined]
    app.process.opened = replace(parts, broker=broker)
    worker = Worker(app)
    world.receivers.append(worker.intake.receiver)
    world.work(worker)
    assert (world.effects(), broker.declared) == ({"1": 1}, 0)
    broker.full = False
    for _ in range(2):
        worker.relay.turn()
    assert broker.declared == 1
