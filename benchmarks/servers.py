"""Servers of a benchmark: PostgreSQL on a disk, RabbitMQ, and, for a peer, Redis."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from benchmarks.place import plain
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests.servers.postgresql import Postgresql
from tests.servers.process import Server, descendants, find, free_port, wait_until
from tests.servers.rabbitmq import Rabbitmq

FAR_SECONDS = 0.002


class Durable(Postgresql):
    """PostgreSQL that waits for its disk, as in production.

    Args:
        flush: Microseconds by which each flush of commits takes longer.
    """

    def __init__(self, base: Path, flush: int = 0) -> None:
        super().__init__(base)
        self._flush = flush

    def command(self) -> Sequence[str]:
        return [*super().command(), "-c", f"commit_delay={self._flush}", "-c", "commit_siblings=0"]


class Redis(Server):
    """Redis that loses no confirmed write."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        find("redis-server", "redis-server", "/usr/bin")

    def command(self) -> Sequence[str]:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.base, "appendonly": "yes", "appendfsync": "always"}
        return [
            str(find("redis-server", "redis-server")),
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        ]

    def check(self) -> object:
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=5)) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(100).startswith(b"+PONG")


@dataclass
class Servers:
    """URLs of the servers.

    Attributes:
        far: The database, 2 ms away.
        meter: Returns seconds of CPU of PostgreSQL, of RabbitMQ, and bytes of WAL.
    """

    database: str
    broker: str
    far: str
    redis: str
    meter: Callable[[], tuple[float, float, float]]


@contextmanager
def running(disk: Path, *, redis: bool = False, flush: int = 0) -> Iterator[Servers]:
    """Start private servers, with idemp's tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers end with a run that is ended
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-bench-", dir=disk)))
        folder.chmod(0o755)
        database = stack.enter_context(Durable(folder / "postgresql", flush))
        broker = stack.enter_context(Rabbitmq(folder / "rabbitmq"))
        tables = Database(database.url)
        upgrade(tables)
        tables.close()
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.far", str(port), str(database.port), str(FAR_SECONDS)]
        proxy = stack.enter_context(subprocess.Popen(command))
        stack.callback(proxy.kill)
        wait_until(lambda: socket.create_connection(("127.0.0.1", port)).close() is None, "the proxy")
        far = make_url(database.url).set(port=port).render_as_string(hide_password=False)
        kept = stack.enter_context(Redis(folder / "redis")).url if redis else ""
        log = stack.enter_context(psycopg.connect(plain(database.url), autocommit=True))

        def meter() -> tuple[float, float, float]:
            (written,) = log.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone() or (0,)
            return _cpu(database), _cpu(broker), float(written)

        yield Servers(database.url, broker.url, far, kept, meter)


def _cpu(server: Server) -> float:
    """Return the seconds of CPU of a server's processes."""
    assert server._process is not None
    seconds = 0.0
    for pid in descendants(server._process.pid):
        with suppress(OSError):
            seconds += time.clock_gettime(~pid << 3 | 2)  # the CPU clock of a process: see clock_getcpuclockid(3)
    return seconds
