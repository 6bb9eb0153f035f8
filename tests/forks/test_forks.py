"""A service that is used before its process is forked: nothing is lost, doubled or hanging, on either side."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pika
import pytest
from sqlalchemy import create_engine

from idemp.brokers.rabbitmq.broker import RabbitBroker
from idemp.settings import Settings
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.testing.app import let_pass
from idemp.worker.relay import Relay
from tests.forks import OWN, QUEUE, SINK, metadata
from tests.servers.databases import query
from tests.servers.process import free_port

IDS, KILLS, PATIENCE = 500, 4, 120.0
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Place:
    """A database, a virtual host, and a process on them."""

    def __init__(self, url: str, vhost: str, log: Path) -> None:
        self.url, self.log = url, log
        self.settings = Settings(database_url=url, broker_url=vhost)
        self.environment = {**os.environ, "IDEMP_DATABASE_URL": url, "IDEMP_BROKER_URL": vhost}
        chance = random.Random(1)
        self.todo = [*range(IDS), *chance.sample(range(IDS), IDS // 5)]
        chance.shuffle(self.todo)
        self._chance = chance
        with self.channel() as channel:
            for queue in (QUEUE, SINK):
                channel.queue_declare(queue, durable=True)

    @contextmanager
    def channel(self) -> Iterator[Any]:
        with closing(pika.BlockingConnection(pika.URLParameters(self.settings.broker_url))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel

    @contextmanager
    def running(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
            process.terminate()
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def watch(self, parent: int, ids: int) -> None:
        """Wait until all ids have had their effects, and kill who has had the last ones meanwhile."""
        deadline, killed, database = time.monotonic() + PATIENCE, 0, Database(self.url)
        while (done := int(query(self.url, "SELECT count(DISTINCT number) FROM effect WHERE number >= 0")[0][0])) < ids:
            assert time.monotonic() < deadline, f"{done} of {ids} after {PATIENCE:.0f} s: {self.log.read_text()[-3000:]}"
            last = f"SELECT pid FROM effect WHERE pid <> {parent} ORDER BY id DESC LIMIT 1"
            for (victim,) in query(self.url, last) if done > ids * killed / (5 * KILLS) else ():
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
            SqlScheduler(database, "a relay").beat("relay")  # so that outputs may wait
            time.sleep(0.05)
        database.close()
        assert killed >= KILLS

    def check(self, ids: set[int]) -> None:
        """Each id has had one effect, and one output under one id."""
        effects = Counter(number for (number,) in query(self.url, "SELECT number FROM effect WHERE number >= 0"))
        assert effects == Counter(ids)
        database = Database(self.url)
        let_pass(database, 60)
        publisher = RabbitBroker(self.settings.broker_url).publisher()
        relay = Relay(SqlScheduler(database, "relay"), publisher, 10.0)
        while relay.turn():
            pass
        publisher.close()
        database.close()
        outputs: dict[int, set[str]] = {}
        with self.channel() as channel:
            while (got := channel.basic_get(SINK, auto_ack=True))[0] is not None:
                outputs.setdefault(json.loads(got[2])["number"], set()).add(got[1].message_id)
        assert {number for number in outputs if number >= 0} == ids
        assert {number: found for number, found in outputs.items() if len(found) > 1} == {}


@pytest.fixture
def place(url: str, vhost: str, tmp_path: Path) -> Place:
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    return Place(url, vhost, tmp_path / "log")


@pytest.mark.parametrize(
    ("kind", "way"),
    [("postgresql", "os.fork"), ("mariadb", "os.fork"), ("postgresql", "fork"), ("postgresql", "forkserver")],
    indirect=["kind"],
)
def test_children_that_consume_beside_their_parent(place: Place, way: str) -> None:
    with place.channel() as channel:
        for number in place.todo:
            channel.basic_publish("", QUEUE, json.dumps({"number": number}), mandatory=True)
    with place.running("tests.forks.parent", way) as parent:
        place.watch(parent.pid, IDS + len(OWN))
    place.check({*range(IDS), *OWN})


FORKED_IN_A_TRANSACTION = """
import os, sys
from idemp import App
from idemp.errors import HandlerError
from tests.forks import effect

app, how = App("forks"), sys.argv[1]
try:
    with app.initiate() as unit:
        unit.connection.execute(effect.insert(), {"number": 1, "pid": os.getpid()})
        unit.send({"number": 1}, to="forks.sink", type="forks.Counted")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif how == "exit":
            sys.exit()
        elif how == "raise":
            raise ValueError
except (HandlerError, ValueError):
    assert child == 0
"""


@pytest.mark.parametrize(
    ("kind", "how"),
    [("postgresql", "exit"), ("postgresql", "raise"), ("postgresql-core", "leave"), ("mariadb", "exit"), ("mariadb", "leave")],
    indirect=["kind"],
)
def test_a_child_does_not_end_the_transaction_that_its_parent_is_in(place: Place, how: str) -> None:
    command = [sys.executable, "-c", FORKED_IN_A_TRANSACTION, how]
    subprocess.run(command, cwd=ROOT, env=place.environment, check=True, timeout=PATIENCE)
    place.check({1})


FORKED_IN_A_FIRST_USE = """
import os, signal, threading
from idemp.sql.engine import Database

began, goes_on = threading.Event(), threading.Event()
database = Database("sqlite:///first.db")
database.dialect.schema = lambda *_: (began.set(), goes_on.wait())[0]
threading.Thread(target=lambda: database.tables, daemon=True).start()
began.wait()
if (child := os.fork()) == 0:
    signal.alarm(10)
    Database("sqlite:///second.db").tables
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_does_not_wait_for_the_first_use_of_a_thread_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKED_IN_A_FIRST_USE], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_gunicorn(place: Place) -> None:
    place.environment["FORKS_USED"] = "1"
    port = free_port()

    def ask_until_answered(number: int) -> None:
        while True:
            with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
                connection.request("GET", f"/{number}")
                if connection.getresponse().status == HTTPStatus.NO_CONTENT:
                    return

    with (
        place.running("gunicorn", "--preload", "--workers=3", f"--bind=127.0.0.1:{port}", "tests.forks.web") as parent,
        ThreadPoolExecutor(3) as clients,
    ):
        answers = clients.map(ask_until_answered, place.todo)
        place.watch(parent.pid, IDS)
        list(answers)
    place.check({*range(IDS)})
