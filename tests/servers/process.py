"""What all servers share: a free port, a process that can't outlive the test run, starting, stopping and killing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import psutil
from sqlalchemy import make_url

from tests.servers import compose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.servers.programs import Need

GUARD = Path(__file__).with_name("guard.py")
# Below the ports that the system gives to outgoing connections: a client retrying against a dead server must not be
# given the server's port, nor connect to itself.
# Test processes side by side pick from ports of their own, so that none takes what another is about to use.
PORTS = range(20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8, 32_000, 8)
POLL_SECONDS = 0.02


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on."""
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port in a hundred tries")


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float = 60.0, seen: Callable[[], object] = str
) -> None:
    """Poll a condition until it holds, or raise TimeoutError saying what did not happen, and what is `seen` instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what} {seen()}".rstrip())
        time.sleep(POLL_SECONDS)


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


class Process:
    """One server process under a guard, which ends it together with all that it started."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.pid = 0
        self._guard: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], user: str | None) -> None:
        """Start it; its output goes to the log."""
        guard = [sys.executable, "-I", str(GUARD), str(os.getpid()), user or "-", *command]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **environment},
                # Away from the terminal: an interrupt is for the test run, which then stops its servers.
                start_new_session=True,
                text=True,
            )
        assert self._guard.stdout is not None
        told = self._guard.stdout.readline()
        if not told:
            self.kill()
            raise RuntimeError(f"{command[0]} did not start:\n{self.log_tail()}")
        self.pid = int(told)

    @property
    def running(self) -> bool:
        """Whether the server still runs."""
        return self._guard is not None and self._guard.poll() is None

    def pids(self) -> list[int]:
        """The guard, the server and all that it started."""
        if self._guard is None or not self.running:
            return []
        with suppress(psutil.NoSuchProcess):
            guard = psutil.Process(self._guard.pid)
            return [guard.pid, *(child.pid for child in guard.children(recursive=True))]
        return []

    def stop(self, signal_number: int, *, seconds: float = 30.0) -> None:
        """Ask the server to end and wait until nothing of it is left; kill it if it takes too long."""
        if self._guard is not None and self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the server and all that it started, and wait until nothing of it is left."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._guard.stdout.close()
        self._guard = None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of what the server said."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(said.splitlines()[-lines:])


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
