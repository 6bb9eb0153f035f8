"""Storms: many messages with copies, workers killed, servers restarted; then plain clients count what is there.

    python -m tests.storms rabbitmq --messages 5000 --kills 100 --restarts 2
    python -m tests.storms sql
    python -m tests.storms activemq
    python -m tests.storms rabbitmq --database mariadb
    python -m tests.storms sql --pooler --kills 50
    python -m tests.storms rabbitmq --app asynchronous
    python -m tests.storms rabbitmq --database unwritten --restarts 50

The producer and the judge are the drivers, pika and stomp.py: they share no code with idemp.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import pika
import pika.exceptions
import stomp
from sqlalchemy import create_engine

from idemp.brokers.activemq import ActivemqBroker
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests.servers.activemq import Activemq
from tests.servers.databases import LOST, query
from tests.servers.mariadb import Mariadb
from tests.servers.pgbouncer import Pgbouncer
from tests.servers.postgresql import Postgresql, Unwritten
from tests.servers.process import Server
from tests.servers.rabbitmq import Rabbitmq
from tests.storm_app import ATTEMPTS, QUEUE, SINK, metadata

DUPLICATES = 0.2
FAILING = 100  # of so many messages, one always fails
PATIENCE = 900.0
DATABASES: dict[str, type[Server]] = {"mariadb": Mariadb, "postgresql": Postgresql, "unwritten": Unwritten}
BROKERS: dict[str, type[Server]] = {"activemq": Activemq, "rabbitmq": Rabbitmq}
ROOT = Path(__file__).parent.parent
SHARE = float(os.environ.get("IDEMP_TEST_STORM", "0.1"))
"""Of the full storms of optional rooms, in the lane; 1 runs them whole."""


@dataclass
class Report:
    messages: int
    copies: int
    kills: int
    restarts: int
    seconds: float
    lost: int
    doubled: int
    outputs_lost: int
    two_ids: int
    pending: int
    failing: int
    dead: int
    left: int

    @property
    def kept(self) -> bool:
        wrong = (self.lost, self.doubled, self.outputs_lost, self.two_ids, self.pending, self.dead, self.left)
        return not any(wrong) and self.failing == self.messages // FAILING


class Outside(Protocol):
    """What is outside of idemp: a producer, and who takes the outputs."""

    def send(self, number: int) -> None: ...

    def waiting(self) -> int: ...

    def outputs(self) -> list[tuple[str, str]]: ...

    def close(self) -> None: ...


class Table:
    """Queues in tables, by the driver."""

    def __init__(self, url: str) -> None:
        self._url = url
        query(url, "INSERT INTO idemp_queue VALUES (%s)", SINK)

    def send(self, number: int) -> None:
        headers = json.dumps({"message_id": str(uuid4()), "type": "storm.Begin"}).encode()
        values = (QUEUE, headers, json.dumps({"number": number}).encode())
        query(self._url, "INSERT INTO idemp_message (queue, due_at, headers, body) VALUES (%s, 0, %s, %s)", *values)

    def waiting(self) -> int:
        return int(query(self._url, "SELECT count(*) FROM idemp_message WHERE queue = %s AND history IS NULL", QUEUE)[0][0])

    def outputs(self) -> list[tuple[str, str]]:
        rows = query(self._url, "SELECT headers, body FROM idemp_message WHERE queue = %s", SINK)
        return [(json.loads(headers)["message_id"], bytes(body).decode()) for headers, body in rows]

    def close(self) -> None:
        """Do nothing: each query has a connection of its own."""


class Rabbit:
    """RabbitMQ, by pika; it connects again and sends again until a message is confirmed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._channel: Any = None
        self._seen: list[tuple[str, str]] = []

    def send(self, number: int) -> None:
        properties = pika.BasicProperties(message_id=str(uuid4()), type="storm.Begin", delivery_mode=2)
        body = json.dumps({"number": number}).encode()
        self._do(lambda channel: channel.basic_publish("", QUEUE, body, properties, mandatory=True))

    def waiting(self) -> int:
        return int(self._do(lambda channel: channel.queue_declare(QUEUE, passive=True)).method.message_count)

    def outputs(self) -> list[tuple[str, str]]:
        while True:
            method, properties, body = self._do(lambda channel: channel.basic_get(SINK))
            if method is None:
                return self._seen
            self._seen.append((properties.message_id, body.decode()))
            with suppress(pika.exceptions.AMQPError):  # else it comes again, under the same id
                self._channel.basic_ack(method.delivery_tag)

    def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with suppress(pika.exceptions.AMQPError, OSError):
                connection.close()

    def _do(self, call: Any) -> Any:
        deadline = time.monotonic() + 120
        while True:
            try:
                if self._channel is None or not self._channel.is_open:
                    self.close()
                    self._connection = pika.BlockingConnection(pika.URLParameters(self._url))
                    self._channel = self._connection.channel()
                    self._channel.confirm_delivery()
                    self._channel.queue_declare(SINK, durable=True, arguments={"x-queue-type": "quorum"})
                return call(self._channel)
            except (pika.exceptions.AMQPError, OSError):
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


class Active(stomp.ConnectionListener):  # type: ignore[misc]
    """ActiveMQ, by stomp.py; it connects again and sends again until a receipt comes."""

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port
        self._connection: Any = None
        self._frames: SimpleQueue[Any] = SimpleQueue()
        self._seen: list[tuple[str, str]] = []
        ActivemqBroker(url).declare(SINK, [])

    def send(self, number: int) -> None:
        headers = {"message_id": str(uuid4()), "type": "storm.Begin", "persistent": "true", "receipt": "sent"}
        body = json.dumps({"number": number})
        self._do(lambda: self._connection.send(f"/queue/{QUEUE}", body, headers=headers), "receipt-id")

    def waiting(self) -> int:
        options = {"browser": "true", "id": "1", "ack": "auto"}
        found = self._do(lambda: self._connection.subscribe(f"/queue/{QUEUE}", headers=options, **options), "browser")
        self._connection.unsubscribe("1")
        return found

    def outputs(self) -> list[tuple[str, str]]:
        if self._connection is None:
            self._connect()
        self._connection.subscribe(f"/queue/{SINK}", id="2", ack="client-individual", headers={"activemq.prefetchSize": "1000"})
        with suppress(Empty):
            while True:
                frame = self._frames.get(timeout=3)
                if "subscription" in frame.headers:
                    self._seen.append((json.loads(frame.headers["idemp"])["message_id"], frame.body))
                    self._connection.ack(frame.headers["ack"])
        return self._seen

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.transport.disconnect_socket()

    def on_message(self, frame: Any) -> None:
        self._frames.put(frame)

    on_receipt = on_error = on_message

    def _connect(self) -> None:
        self.close()
        self._frames = SimpleQueue()
        self._connection = stomp.StompConnection12([("127.0.0.1", self._port)], reconnect_attempts_max=1)
        self._connection.set_listener("storm", self)
        self._connection.connect(wait=True)

    def _do(self, call: Any, last: str) -> int:
        """Return the number of frames before the one that has a header."""
        deadline = time.monotonic() + 120
        while True:
            try:
                if self._connection is None or not self._connection.is_connected():
                    self._connect()
                call()
                for number in itertools.count():
                    if last in self._frames.get(timeout=5).headers:
                        return number
            except (stomp.exception.StompException, OSError, Empty, AttributeError):
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


class Workers:
    """Processes that are started again when they end: workers of an app, or what `python -m` takes."""

    def __init__(self, count: int, target: str | Sequence[str], environment: dict[str, str], log: Path) -> None:
        module = ("idemp", "worker", target) if isinstance(target, str) else target
        self._command = [sys.executable, "-m", *module]
        self._environment, self._log = {**os.environ, **environment}, log.open("ab")
        self._running: list[subprocess.Popen[bytes]] = []
        self._count = count

    def keep(self) -> None:
        self._running = [process for process in self._running if process.poll() is None]
        while len(self._running) < self._count:
            self._running.append(
                subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stdout=self._log, stderr=self._log)
            )

    def kill(self, chance: random.Random) -> None:
        victim = chance.choice(self._running)
        victim.kill()
        victim.wait()

    def stop(self) -> None:
        """Let them end in an orderly way; they give back what they have not handled."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running = []

    def close(self) -> None:
        self.stop()
        self._log.close()


OUTSIDES: dict[str, Callable[[str], Outside]] = {"activemq": Active, "rabbitmq": Rabbit, "sql": Table}


@contextmanager
def storm_servers(
    kind: str, database: str = "postgresql", *, pooler: bool = False
) -> Iterator[tuple[list[Server], dict[str, str], str]]:
    """Start servers, and make the tables; yield those that are to be restarted, the settings and the URL of the database."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-storm-")))
        folder.chmod(0o755)
        servers: list[Server] = [stack.enter_context(DATABASES[database](folder / database))]
        url = servers[0].url
        environment = {"IDEMP_DATABASE_URL": url, "IDEMP_LEASE": "5s"}
        if pooler:
            environment["IDEMP_DATABASE_URL"] = stack.enter_context(Pgbouncer(folder / "pgbouncer", url, "transaction")).url
        if kind in BROKERS:
            servers.append(stack.enter_context(BROKERS[kind](folder / kind)))
            environment["IDEMP_BROKER_URL"] = servers[-1].url
        installed = Database(url)
        upgrade(installed)
        installed.close()
        engine = create_engine(url)
        metadata.create_all(engine)
        engine.dispose()
        yield servers[:1] if database == "unwritten" else servers, environment, url


def run(
    kind: str,
    *,
    messages: int,
    kills: int,
    restarts: int,
    database: str = "postgresql",
    pooler: bool = False,
    app: str = "app",
    workers: int = 3,
    seed: int = 1,
    log: Path | None = None,
) -> Report:
    """Run a storm until nothing waits, and count."""
    chance, start = random.Random(seed), time.monotonic()
    todo = [*range(messages), *chance.sample(range(messages), int(messages * DUPLICATES))]
    chance.shuffle(todo)
    todo[:0] = range(-(messages // FAILING), 0)
    with storm_servers(kind, database, pooler=pooler) as (servers, environment, url), ExitStack() as stack:
        log = log or Path(stack.enter_context(tempfile.NamedTemporaryFile(prefix="storm-", suffix=".log")).name)
        running = Workers(workers, f"tests.storm_app:{app}", environment, log)
        stack.callback(running.close)
        running.keep()
        outside: Outside = OUTSIDES[kind](environment.get("IDEMP_BROKER_URL", url))
        stack.callback(outside.close)
        killed = restarted = sent = 0
        while True:
            handled = _count(url, "SELECT count(*) FROM effect")
            for number in todo[sent : sent + 50] if sent < len(todo) and sent < handled + 500 else ():
                _again(lambda number=number: outside.send(number))  # type: ignore[misc]
                sent += 1
            share = handled / (2 * messages)
            if killed < kills and share >= killed / kills:
                running.kill(chance)
                killed += 1
            if restarted < restarts * len(servers) and share >= (restarted + 1) / (restarts * len(servers) + 1):
                server = servers[restarted % len(servers)]
                server.stop() if restarted // len(servers) % 2 else server.kill()
                server.start()
                restarted += 1
            running.keep()
            if sent == len(todo) and killed == kills and handled >= 2 * messages and not _rest(url, outside):
                running.stop()  # what a worker holds counts as waiting only now
                if not _rest(url, outside):
                    break
            if time.monotonic() - start > PATIENCE:
                break
            time.sleep(0.05)
        running.close()
        return _judge(url, outside, messages, int(messages * DUPLICATES), killed, restarted, time.monotonic() - start)


def rage(
    chance: random.Random,
    workers: Workers,
    servers: Sequence[Server],
    outside: Outside,
    url: str,
    total: int,
    count: str = "SELECT count(*) FROM idemp_inbox",
    *,
    kills: int,
    restarts: int,
    patience: float = 240.0,
) -> str:
    """Kill workers, and servers in turn, until all is handled and nothing waits; return what was done."""
    start, killed, restarted = time.monotonic(), 0, 0
    workers.keep()
    while (handled := _count(url, count)) < total or killed < kills or restarted < restarts or _rest(url, outside):
        assert time.monotonic() < start + patience, (handled, killed, Path(workers._log.name).read_text()[-3000:])
        if killed < kills * handled / total:
            workers.kill(chance)
            killed += 1
        if restarted < (restarts + 1) * handled / (total + 1) - 1:
            server = servers[restarted % len(servers)]
            server.kill()
            server.start()
            restarted += 1
        workers.keep()
        time.sleep(0.05)  # the questions above take the processor from the workers
    workers.stop()
    assert (killed, restarted) == (kills, restarts)
    return f"{total} handlings, {killed} kills, {restarted} restarts, {time.monotonic() - start:.1f} s"


def _rest(url: str, outside: Outside) -> int:
    rows = _count(
        url,
        "SELECT (SELECT count(*) FROM idemp_pending) + (SELECT count(*) FROM idemp_message WHERE history IS NOT NULL AND due_at > 0)",
    )
    return rows + outside.waiting()


def _judge(url: str, outside: Outside, messages: int, copies: int, kills: int, restarts: int, seconds: float) -> Report:
    effects = Counter(_again(lambda: query(url, "SELECT number, step FROM effect")))
    expected = {(number, step) for number in range(messages) for step in (1, 2)}
    ids: dict[tuple[int, int], set[str]] = {}
    for id, body in outside.outputs():
        done = json.loads(body)
        ids.setdefault((done["number"], done["step"]), set()).add(id)
    return Report(
        messages,
        copies,
        kills,
        restarts,
        round(seconds, 1),
        lost=len(expected - set(effects)),
        doubled=sum(count - 1 for count in effects.values()),
        outputs_lost=len(expected - set(ids)),
        two_ids=sum(len(each) > 1 for each in ids.values()),
        pending=_count(url, "SELECT count(*) FROM idemp_pending"),
        failing=_count(url, f"SELECT count(*) FROM idemp_message WHERE due_at IS NULL AND attempts = {ATTEMPTS}"),
        dead=_count(
            url, f"SELECT count(*) FROM idemp_message WHERE history IS NOT NULL AND (due_at > 0 OR attempts <> {ATTEMPTS})"
        ),
        left=outside.waiting(),
    )


def _count(url: str, statement: str) -> int:
    return int(_again(lambda: query(url, statement))[0][0])


def _again(call: Any) -> Any:
    """Call until the database answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return call()
        except LOST:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=OUTSIDES)
    parser.add_argument("--database", default="postgresql", choices=DATABASES)
    parser.add_argument("--pooler", action="store_true")
    parser.add_argument("--messages", type=int, default=5_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--app", default="app", choices=["app", "asynchronous"])
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    report = run(**vars(options))
    print(json.dumps(asdict(report), indent=2))
    sys.exit(0 if report.kept else 1)
