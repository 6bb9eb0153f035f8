"""One process keeps the servers that a run's test processes share.

    python -m tests.servers.keeper FOLDER    # keeps servers until it is ended; its socket is in FOLDER
    python -m tests.servers.keeper --end     # ends the one that IDEMP_TEST_KEEP=1 left for later runs

A server starts when the first test asks for it. The keeper ends with the run, and its servers with it; where
IDEMP_TEST_KEEP=1 says so it stays, and the next run finds its servers running.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from tests.servers import node
from tests.servers.activemq import ActiveMQ
from tests.servers.documents import Moto, PouchDB
from tests.servers.mariadb import MariaDB
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import Process, Server, scratch_directory, wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP = "IDEMP_TEST_KEEP"
FOLDER = "IDEMP_TEST_KEEPER"
KINDS: dict[str, type[Server]] = {
    kind.__name__: kind for kind in (ActiveMQ, MariaDB, Moto, PgBouncer, PostgreSQL, PouchDB, RabbitMQ, Redis)
}
PID = "pid"

S = TypeVar("S", bound=Server)


def shared(kind: type[S], *arguments: object) -> S:
    """The server of this kind that all test processes of the run share; never stop it."""
    with closing(_connection(Path(os.environ[FOLDER]))) as connection:
        connection.send((kind.__name__, arguments))
        server, trouble = connection.recv()
    if trouble:
        raise RuntimeError(f"{kind.need.name} did not start: {trouble}")
    assert isinstance(server, kind)
    return server


@contextmanager
def keeping() -> Iterator[None]:
    """Run a keeper meanwhile, whose folder the environment of all test processes names."""
    with ExitStack() as stack:
        if os.environ.get(KEEP) == "1":
            folder = _start_for_later()
        else:
            folder = stack.enter_context(scratch_directory("keeper"))
            process = Process(folder / "log")
            stack.callback(process.stop, signal.SIGTERM)
            process.start(_command(folder), cwd=_root())
        os.environ[FOLDER] = str(folder)
        yield


def _start_for_later() -> Path:
    """The folder of the keeper that stays; it runs already, or starts now in the place of an older one."""
    folder = _kept_folder()
    with suppress(OSError), closing(_connection(folder, seconds=0)):
        return folder
    end()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "socket").unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        subprocess.Popen(
            _command(folder), cwd=_root(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return folder


def end() -> list[int]:
    """End the keepers of this checkout that stayed, and their servers; returns the numbers of the processes."""
    ended = []
    for folder in _kept_folder().parent.glob(_kept_folder().name[:-8] + "*"):
        with suppress(OSError, ValueError), closing(_connection(folder, seconds=0)):
            pid = int((folder / PID).read_text())
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the keeper has ended")  # type: ignore[misc]
            ended.append(pid)
    return ended


def keep(folder: Path) -> None:
    """Answer those who ask for servers, until a signal ends it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as servers, Listener(str(folder / "socket"), "AF_UNIX", backlog=64) as listener:
        (folder / PID).write_text(str(os.getpid()))
        shelf = _Shelf(servers)
        while True:
            with suppress(OSError, EOFError):  # somebody who only looked whether it answers
                Thread(target=shelf.serve, args=(listener.accept(),), daemon=True).start()


class _Shelf:
    """The servers that run, each started once; those of different kinds start side by side."""

    def __init__(self, servers: ExitStack) -> None:
        self._servers = servers
        self._running: dict[tuple[object, ...], Server] = {}
        self._locks = {name: Lock() for name in KINDS}

    def serve(self, connection: Connection) -> None:
        with closing(connection), suppress(EOFError, OSError):
            name, arguments = connection.recv()
            try:
                answer: tuple[Server | None, str] = self._take(name, arguments), ""
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
            connection.send(answer)

    def _take(self, name: str, arguments: tuple[Any, ...]) -> Server:
        with self._locks[name]:
            found = self._running.get((name, *arguments))
            if found is None:
                base = self._servers.enter_context(scratch_directory(name.lower()))
                found = self._servers.enter_context(KINDS[name](base, *arguments))
                self._running[name, *arguments] = found
            return found


def _connection(folder: Path, seconds: float = 60.0) -> Connection:
    """To the keeper; waits for one that is about to start."""
    made: list[Connection] = []

    def connects() -> bool:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            made.append(Client(str(folder / "socket"), "AF_UNIX"))
        return bool(made)

    if not seconds:
        return Client(str(folder / "socket"), "AF_UNIX")
    wait_until(connects, "the keeper of servers answers", seconds=seconds, seen=lambda: _told(folder))
    return made[0]


def _told(folder: Path) -> str:
    log = folder / "log"
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def _kept_folder() -> Path:
    """Named after this checkout, and how servers are set up here: when that changes, others start."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    checkout = hashlib.sha256(str(_root()).encode()).hexdigest()[:8]
    return node.folder().with_name(f"servers-{checkout}-{hashlib.sha256(sources).hexdigest()[:8]}")


def _root() -> Path:
    return Path(__file__).parents[2]


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.servers.keeper", str(folder)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--end"]:
        print(f"Ended: {end() or 'none was running'}")
    else:
        keep(Path(sys.argv[1]))
