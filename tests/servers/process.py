"""What all servers share: a free port, a process that can't outlive the test run, starting, stopping and killing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from sqlalchemy import make_url

from idemp.testing.processes import Process, wait_until
from tests.servers import compose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.programs import Need

# Below the ports that the system gives to outgoing connections: a client retrying against a dead server must not be
# given the server's port, nor connect to itself.
# Test processes side by side pick from ports of their own, so that none takes what another is about to use.
PORTS = range(20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8, 32_000, 8)

_given: set[int] = set()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on, and that nobody in this process was given before."""
    for port in random.sample(sorted({*PORTS} - _given), k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)  # whoever was given it may not listen on it yet
            return port
    raise RuntimeError("no free port in a hundred tries")


def with_database(url: str, name: str) -> str:
    """The SQLAlchemy URL of another database on the same server."""
    return make_url(url).set(database=name).render_as_string(hide_password=False)


@contextmanager
def scratch_directory(name: str) -> Iterator[Path]:
    """A directory directly below the system's temporary one, where a server's own user can reach it."""
    folder = Path(tempfile.mkdtemp(prefix=f"idemp-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Server(ABC):
    """A private server on a free loopback port, with its data below `base`; a context manager.

    Runs as a local process, or in a container where its programs are not installed.
    """

    need: ClassVar[Need]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 60.0

    def __init__(self, base: Path, *, port: int | None = None) -> None:
        self.base = base
        self.port = port or free_port()
        self.process = Process(base / "log")
        self.container = compose.Container(self.need.name, self.port) if self.need.missing() else None

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process talks to the server, and can neither start nor end it."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Process)}

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the data directory and the configuration; done once, before the first start."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def check(self) -> None:
        """Talk to the server as a client; any exception means that it is not ready."""

    def environment(self) -> dict[str, str]:
        """Environment variables of the server's own."""
        return {}

    def user(self) -> str | None:
        """The user to run as, where that must be another one."""
        return None

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.base / "data"

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.container.running if self.container else self.process.running

    def pids(self) -> list[int]:
        """All processes of a local server."""
        return self.process.pids()

    def start(self) -> None:
        """Start it, on the data that it had before, and wait until it answers."""
        if self.container:
            self.container.start()
        else:
            if not self.data.exists():
                self.prepare()
            self.process.start(self.command(), cwd=self.base, environment=self.environment(), user=self.user())
        try:
            wait_until(self._answers_or_ended, f"{self.need.name} answers", seconds=self.start_seconds)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop it gracefully."""
        if self.container:
            self.container.stop()
        else:
            self.process.stop(self.stop_signal)

    def kill(self) -> None:
        """SIGKILL the whole server."""
        if self.container:
            self.container.kill()
        else:
            self.process.kill()

    def restart(self) -> None:
        """Stop it gracefully and start it on the same data and port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop it for good; nothing will ask for its data again, so there is nothing to wait for."""
        if self.container:
            self.container.remove()
        else:
            self.process.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers_or_ended(self) -> bool:
        if not self.running:
            raise RuntimeError(f"{self.need.name} ended while starting:\n{self.process.log_tail()}")
        try:
            self.check()
        except Exception:
            return False
        return True
