"""A service that was wired and used before its process was forked: nothing is lost, doubled or stuck on either side."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import kombu
import psutil
import pytest
from sqlalchemy import select

from idemp.broker.making import make_broker
from idemp.broker.port import Ack, Broker, Topology
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.relay import Relay
from idemp.settings import Settings
from idemp.testing.processes import Process, wait_until
from tests.forks import tasks, wired
from tests.inbox.sql.kept import make_tables
from tests.servers.process import free_port

NUMBERS = int(os.environ.get("IDEMP_TEST_FORKS", "40"))
"""Messages that children handle in each test, all of them twice; the parent handles a tenth of that beside them."""
CHILDREN = 3
KILLS = 4
PATIENCE = 150 + NUMBERS
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(60 + PATIENCE)


@dataclass
class Place:
    """A database, a broker, and a folder for processes on them."""

    database: str
    broker_url: str
    folder: Path
    broker: Broker

    def run(self, *command: str) -> Process:
        """Start a process that is wired to them."""
        process = Process(self.folder / "log")
        wiring = {**wired.configuration(self.database, self.broker_url, self.folder), tasks.BROKER: self.broker_url}
        process.start([sys.executable, "-m", *command], cwd=ROOT, environment=wiring)
        return process

    def run_corners(self, names: str) -> None:
        """Run some of `corners`, one after the other."""
        process = self.run("tests.forks.corners", *names.split())
        assert process.wait(PATIENCE) == 0, process.log_tail()

    def effects(self) -> Counter[int]:
        """How often each number took effect; without those that came before the fork."""
        engine = create_engine_safely(self.database)
        with engine.connect() as connection:
            found = Counter(connection.scalars(select(wired.effect.c.number)))
        engine.dispose()
        return Counter({number: times for number, times in found.items() if number < wired.FIRST})

    def depth(self, queue: str) -> int:
        """How many messages are ready there."""
        return self.broker.depth(queue)

    def receipts(self) -> dict[int, set[str]]:
        """The ids under which each number's output arrived."""
        found: dict[int, set[str]] = defaultdict(set)
        receiver = self.broker.receiver([wired.QUEUE], prefetch=1000)
        while (delivery := receiver.receive(1.0)) is not None:
            found[json.loads(delivery.message.body)["number"]].add(str(delivery.message.message_id))
            receiver.settle(delivery, Ack())
        receiver.close()
        return {number: ids for number, ids in found.items() if number < wired.FIRST}

    def check(self, numbers: list[int]) -> None:
        """Each number took effect once, its output arrived under one id, and nothing failed on the way."""
        errors = self.folder / "errors"
        assert not errors.exists(), errors.read_text()
        assert self.effects() == Counter(numbers)
        receipts = self.receipts()
        assert sorted(receipts) == sorted(numbers)
        assert {number: ids for number, ids in receipts.items() if len(ids) != 1} == {}

    def relay(self) -> None:
        """Ship what is pending."""
        engine = create_engine_safely(self.database)
        upkeep = SqlStore(engine).upkeep
        publisher = self.broker.publisher()
        relay = Relay(upkeep, publisher, lease=timedelta(seconds=10))
        wait_until(lambda: relay.run_once().taken == 0 and upkeep.pending_count() == 0, "all is sent", seconds=PATIENCE)
        publisher.close()
        engine.dispose()


def killing(master: int, kills: int, done: Callable[[], bool]) -> None:
    """Kill so many of a process' children, one after the other, while there is work."""
    while kills and not done():
        time.sleep(random.uniform(0.2, 0.6))
        if children := psutil.Process(master).children():
            kills -= 1
            with suppress(psutil.NoSuchProcess):
                random.choice(children).kill()


def answered(port: int, number: int) -> bool:
    """Whether a request came to its end; not if its worker was killed, or none listens yet."""
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("GET", f"/{number}")
        return connection.getresponse().status == HTTPStatus.NO_CONTENT
    return False


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = getattr(request, "param", "postgresql")
    server = kind in {"postgresql", "mariadb"}
    database = request.getfixturevalue(f"{kind}_url") if server else f"sqlite:///{tmp_path}/inbox.db"
    url = (
        f"local://{tmp_path}/queues.db"
        if kind == "sqlite"
        else request.getfixturevalue("rabbitmq_url" if server else f"{kind}_url")
    )
    engine = create_engine_safely(database)
    make_tables(engine)
    wired.metadata.create_all(engine)
    engine.dispose()
    broker = make_broker(url, Settings(allow_at_most_once=True))
    broker.declare(Topology(exchange="idemp", queues=(wired.QUEUE,)))
    return Place(database, url, tmp_path, broker)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("postgresql", "os.fork"),
        pytest.param("mariadb", "os.fork", marks=pytest.mark.slow),
        pytest.param("sqlite", "os.fork", marks=pytest.mark.slow),
        pytest.param("postgresql", "fork", marks=pytest.mark.slow),
        pytest.param("postgresql", "forkserver", marks=pytest.mark.slow),
    ],
    indirect=["place"],
)
def test_children_and_their_parent_work_side_by_side(place: Place, kind: str) -> None:
    parent = place.run("tests.forks.parent", kind, str(NUMBERS), str(CHILDREN))
    try:
        assert parent.wait(PATIENCE) == 0, parent.log_tail()
    finally:
        parent.kill()
    place.check(json.loads((place.folder / "settled").read_text()))


@pytest.mark.slow
def test_connections_that_the_parent_has_in_use(place: Place) -> None:
    place.run_corners("names notifications end_of_the_child thread_local transaction publisher receiver")


def test_locks_that_the_parent_holds(place: Place) -> None:
    place.run_corners("locks")


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_sqlite_that_the_parent_has_in_use(place: Place) -> None:
    place.run_corners("sqlite_in_use")


@pytest.mark.parametrize(
    ("place", "corners"),
    [
        ("postgresql", "forked_in_c"),
        ("mariadb", "thread_local transaction"),
        ("mariadb", "forked_in_c"),
        ("sqlite", "names publisher receiver"),
        ("sqlite", "parent_ends_first"),
        ("redis", "publisher receiver"),
        ("activemq", "publisher receiver"),
    ],
    indirect=["place"],
)
@pytest.mark.slow
def test_other_databases_and_brokers(place: Place, corners: str) -> None:
    place.run_corners(corners)


@pytest.mark.slow
def test_celery_forks_its_workers(place: Place) -> None:
    numbers = list(range(NUMBERS))
    with kombu.Connection(place.broker_url) as connection:
        producer = tasks.app.amqp.Producer(connection)
        for number in random.sample([*numbers, *numbers], 2 * len(numbers)):
            tasks.app.send_task("forks.settle", [number], producer=producer)
    options = (
        "--pool=prefork",
        f"--concurrency={CHILDREN}",
        "--without-gossip",
        "--without-mingle",
        "--loglevel=ERROR",
    )
    worker = place.run("celery", "-A", "tests.forks.tasks", "worker", *options)

    def all_settled() -> bool:
        assert worker.running, worker.log_tail()
        return place.depth(tasks.TASKS) == 0 and set(place.effects()) == set(numbers)

    try:
        # Celery gives up if its first processes die before they are up.
        wait_until(lambda: bool(place.effects()), "a task is done", seconds=PATIENCE)
        killing(worker.pid, KILLS, all_settled)
        wait_until(all_settled, "all tasks are done", seconds=PATIENCE)
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0, worker.log_tail()
    finally:
        worker.kill()
    place.relay()
    place.check(numbers)


@pytest.mark.slow
def test_gunicorn_preloads_the_app(place: Place) -> None:
    numbers = list(range(NUMBERS))
    port = free_port()
    server = place.run(
        "gunicorn", "--preload", f"--workers={CHILDREN}", f"--bind=127.0.0.1:{port}", "--log-level=error",
        f"--timeout={PATIENCE}", "tests.forks.web:application",
    )  # fmt: skip
    left = Counter([*numbers, *numbers])

    def ask(shuffled: list[int]) -> None:
        for number in shuffled:
            while not answered(port, number):
                assert server.running, server.log_tail()
                time.sleep(0.05)
            left[number] -= 1

    clients = [
        threading.Thread(target=ask, args=(random.sample(numbers[place::2], len(numbers[place::2])),), daemon=True)
        for place in (0, 1, 0, 1)
    ]
    try:
        for client in clients:
            client.start()
        killing(server.pid, KILLS, lambda: not any(client.is_alive() for client in clients))
        for client in clients:
            client.join(PATIENCE)
        assert +left == Counter()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, server.log_tail()
    finally:
        server.kill()
    place.relay()
    place.check(numbers)
