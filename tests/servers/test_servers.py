"""The servers that other tests rely on: they start, keep their data, end completely and listen on loopback only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from amqp import Connection, Message
from redis import Redis as RedisClient
from sqlalchemy import make_url

from tests.servers import given, mariadb, postgresql
from tests.servers.documents import Moto, PouchDB
from tests.servers.fixtures import LEASE, private
from tests.servers.mariadb import MariaDB
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import Process, free_port, wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.fixtures import SpareRabbitMQ
    from tests.servers.process import Server

ALL = [pytest.param(kind, id=kind.need.name, marks=pytest.mark.timeout(90)) for kind in (PostgreSQL, MariaDB, Redis)]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.slow
def test_keeps_its_data_and_ends_completely(kind: type[Server]) -> None:
    with private(kind) as server:
        restarted_and_killed(server)
        server.start()
        assert read(server) == b"kept"
        running = server.pids()
        server.stop()
        assert not alive(running)


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.need.name) for kind in (PouchDB, Moto)])
@pytest.mark.slow
def test_in_memory_it_listens_on_loopback_and_ends_completely(kind: type[Server]) -> None:
    with private(kind) as server:
        running = server.pids()
        assert listening(running) == {server.port}
    assert not alive(running)


def restarted_and_killed(server: Server) -> None:
    """It listens on loopback, has its data and its port after a restart, and nothing of it is left after a kill."""
    assert listening(server.pids()) >= {server.port}
    write(server)
    before, port = server.pids(), server.port
    server.restart()
    assert (read(server), server.port) == (b"kept", port)
    assert not alive(before)
    running = server.pids()
    server.kill()
    assert running
    assert not alive(running)
    assert not server.running


def test_postgresql_recovers_from_an_immediate_stop_with_its_prepared_transaction(own_postgresql: PostgreSQL) -> None:
    url = own_postgresql.create_database("recovered")
    for statement in ("CREATE TABLE t (x int)", "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'p'"):
        postgresql.query(url, statement)
    running = own_postgresql.pids()
    own_postgresql.stop_immediately()
    assert not alive(running)
    own_postgresql.start()
    assert postgresql.query(url, "SELECT gid FROM pg_prepared_xacts") == [("p",)]
    own_postgresql.drop_database("recovered")
    assert postgresql.query(own_postgresql.url, "SELECT * FROM pg_prepared_xacts") == []


def test_postgresql_syncs(postgresql_url: str) -> None:
    assert postgresql.query(postgresql_url, "SHOW fsync") == [("on",)]
    assert postgresql.query(postgresql_url, "SHOW synchronous_commit") == [("on",)]


class TestRabbitMQ:
    def test_alarm_blocks_publishers_until_it_is_cleared(self, own_rabbitmq: RabbitMQ) -> None:
        blocked: list[str] = []
        own_rabbitmq.create_vhost("starved")
        with closing(connect(own_rabbitmq.port, on_blocked=blocked.append)) as connection:
            channel = connection.channel()
            own_rabbitmq.raise_memory_alarm()
            channel.basic_publish(Message(b"x"), exchange="", routing_key="nowhere")
            connection.drain_events(timeout=10)
            # Before the connection closes: the node reads nothing from a blocked one.
            own_rabbitmq.clear_memory_alarm()
        assert blocked
        assert own_rabbitmq.alarms() == "[]"

    def test_spare_node_comes_back_empty(self, own_rabbitmq: RabbitMQ) -> None:
        listed = own_rabbitmq.ctl("list_vhosts", "--quiet", "--no-table-headers").split()
        assert listed == ["/"]
        assert own_rabbitmq.alarms() == "[]"

    @pytest.mark.timeout(90)
    @pytest.mark.slow
    def test_keeps_its_data_and_ends_completely_and_is_replaced(self, spare_rabbitmq: SpareRabbitMQ) -> None:
        """In one test, for a node takes its time to start; a graceful stop is part of the restart."""
        server = spare_rabbitmq.take()
        restarted_and_killed(server)
        replacement = spare_rabbitmq.take()
        assert replacement is not server
        assert replacement.running

    def test_gives_each_test_a_vhost(self, rabbitmq_url: str, unique_name: str) -> None:
        vhost = rabbitmq_url.rpartition("/")[2]
        assert vhost == unique_name
        with closing(connect(make_url(rabbitmq_url).port, vhost)) as connection:
            assert connection.channel().queue_declare("q").message_count == 0

    def test_failing_expression_is_an_error(self, rabbitmq: RabbitMQ) -> None:
        with pytest.raises(RuntimeError, match="badmatch"):
            rabbitmq.evaluate("ok = failed")


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
    ("fixture", "server"), [("postgresql_url", postgresql), ("mariadb_url", mariadb)], ids=["PostgreSQL", "MariaDB"]
)
def test_database_is_new_for_each_test(fixture: str, server: object, turn: int, request: pytest.FixtureRequest) -> None:
    server.query(request.getfixturevalue(fixture), "CREATE TABLE only_mine (x int)")  # type: ignore[attr-defined]


@pytest.mark.parametrize("turn", [1, 2])
def test_redis_database_is_new_for_each_test(redis_url: str, turn: int) -> None:
    with closing(RedisClient.from_url(redis_url)) as client:
        assert client.keys() == [LEASE.encode()]
        client.set("mine", turn)


class TestGivenServers:
    """The user's own servers, played by the run's private ones."""

    @pytest.mark.parametrize(
        ("fixture", "kind", "listing"),
        [
            ("postgresql", given.GivenPostgreSQL, "SELECT datname FROM pg_database"),
            ("mariadb", given.GivenMariaDB, "SHOW DATABASES"),
        ],
        ids=["PostgreSQL", "MariaDB"],
    )
    def test_database_is_created_and_dropped_under_an_open_transaction(
        self, fixture: str, kind: type, listing: str, unique_name: str, request: pytest.FixtureRequest
    ) -> None:
        url = request.getfixturevalue(fixture).url
        server, driver = kind(url), postgresql if kind is given.GivenPostgreSQL else mariadb
        driver.query(server.create_database(unique_name), "CREATE TABLE t (x int)")
        assert (unique_name,) in driver.query(url, listing)
        server.drop_database(unique_name)
        assert (unique_name,) not in driver.query(url, listing)

    def test_rabbitmq_is_asked_through_its_management_plugin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.setattr(given.GivenRabbitMQ, "_manage", lambda _, *request: asked.append(request[:2]))
        server = given.GivenRabbitMQ("pyamqp://me:secret@broker:5673/prod?heartbeat=10")
        assert server.create_vhost("t") == "pyamqp://me:secret@broker:5673/t?heartbeat=10"
        server.delete_vhost("t")
        assert asked == [("PUT", "vhosts/t"), ("PUT", "permissions/t/me"), ("DELETE", "vhosts/t")]


class TestGuard:
    """A server ends with whoever started it."""

    # A server with a daemon in a session of its own, which no signal to the group would reach.
    DAEMONS = ("sh", "-c", "(setsid sleep 600 &) ; exec sleep 600")
    STARTER = """
import os, sys, time
from pathlib import Path
from tests.servers.process import Process, wait_until
process = Process(Path(sys.argv[1]))
process.start(sys.argv[3:], cwd=Path("/"), environment={}, user=None)
wait_until(lambda: len(process.pids()) == 3, "guard, server and daemon run")
if sys.argv[2] == "forked" and not (copy := os.fork()):
    time.sleep(600)
print(copy if sys.argv[2] == "forked" else 0, *process.pids(), flush=True)
time.sleep(600)
"""

    def test_kill_reaches_daemons(self, tmp_path: Path) -> None:
        process = self.start(tmp_path)
        running = process.pids()
        process.kill()
        assert not alive(running)

    def test_daemons_end_after_their_server(self, tmp_path: Path) -> None:
        process = self.start(tmp_path)
        running = process.pids()
        process.stop(signal.SIGTERM)
        assert not alive(running)

    def test_server_ends_with_a_signalled_guard(self, tmp_path: Path) -> None:
        process = self.start(tmp_path)
        running = process.pids()
        os.kill(running[0], signal.SIGTERM)
        wait_until(lambda: not alive(running), "all have ended")
        process.kill()

    @pytest.mark.parametrize("how", ["alone", "forked"])
    def test_server_ends_with_a_killed_test_run(self, how: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
        command = [sys.executable, "-c", self.STARTER, str(tmp_path / "log"), how, *self.DAEMONS]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=pytestconfig.rootpath, text=True) as run:
            assert run.stdout is not None
            copy, *running = map(int, run.stdout.readline().split())
            run.kill()
            try:
                wait_until(lambda: not alive(running), "all have ended")
            finally:
                if copy:
                    os.kill(copy, signal.SIGKILL)

    def test_program_that_is_missing_is_an_error(self, tmp_path: Path) -> None:
        process = Process(tmp_path / "log")
        with pytest.raises(RuntimeError, match="No such file"):
            process.start(["/no/such/program"], cwd=tmp_path, environment={}, user=None)

    def start(self, folder: Path) -> Process:
        process = Process(folder / "log")
        process.start(self.DAEMONS, cwd=folder, environment={}, user=None)
        wait_until(lambda: len(process.pids()) == 3, "guard, server and daemon run")
        return process


def test_no_port_is_given_twice() -> None:
    """A server that was given one may not listen on it yet."""
    assert len({free_port() for _ in range(200)}) == 200


def test_server_that_ends_while_starting_says_why(tmp_path: Path) -> None:
    with private(Redis) as server:
        port = server.port
        second = Redis(tmp_path, port=port)
        # Nobody answers on the other port that it asks, so only its end can be noticed.
        unused = free_port()
        second.check = lambda: connect(unused)  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Address already in use"):
            second.start()
        assert time.monotonic() - began < 10


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def listening(pids: list[int]) -> set[int]:
    """The TCP ports that the processes listen on; an address other than loopback fails the test."""
    ports = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # a server's short-lived helper
            for socket in psutil.Process(pid).net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    assert socket.laddr.ip in {"127.0.0.1", "::1"}
                    ports.add(socket.laddr.port)
    return ports


def connect(port: int | None, vhost: str = "/", **options: object) -> Connection:
    connection = Connection(f"127.0.0.1:{port}", virtual_host=vhost, connect_timeout=5, read_timeout=10, **options)
    connection.connect()
    return connection


def write(server: Server) -> None:
    """Store the word that `read` finds again."""
    if isinstance(server, PostgreSQL | MariaDB):
        driver = postgresql if isinstance(server, PostgreSQL) else mariadb
        url = server.create_database("words")
        driver.query(url, "CREATE TABLE words (word varchar(9))")
        driver.query(url, "INSERT INTO words VALUES ('kept')")
    elif isinstance(server, RabbitMQ):
        with closing(connect(server.port)) as connection:
            channel = connection.channel()
            channel.confirm_select()
            channel.queue_declare("words", durable=True, auto_delete=False)
            channel.basic_publish_confirm(Message(b"kept", delivery_mode=2), exchange="", routing_key="words")
    else:
        with closing(RedisClient.from_url(server.url)) as client:
            client.set("word", "kept")


def read(server: Server) -> bytes:
    """What `write` stored."""
    if isinstance(server, PostgreSQL | MariaDB):
        driver = postgresql if isinstance(server, PostgreSQL) else mariadb
        url = make_url(server.url).set(database="words").render_as_string()
        return str(driver.query(url, "SELECT word FROM words")[0][0]).encode()
    if isinstance(server, RabbitMQ):
        with closing(connect(server.port)) as connection:
            return bytes(connection.channel().basic_get("words").body)
    with closing(RedisClient.from_url(server.url)) as client:
        word = client.get("word")
        assert isinstance(word, bytes)
        return word
