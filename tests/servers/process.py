"""A private server: a process on a free loopback port, with its data in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

PORTS = range(20_000, 32_000)  # below those that the system gives to clients


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens."""
    start = int.from_bytes(os.urandom(2), "big")
    for number in range(len(PORTS)):
        port = PORTS[(start + number) % len(PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    deadline, last = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except Exception as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not happen within {seconds:.0f} s; {last}")


def descendants(pid: int) -> set[int]:
    """Return the process ids of a process and of all that it has started."""
    parents, found = {}, {pid}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    while children := {child for child, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def find(program: str, package: str, folders: str = "/usr/sbin") -> Path:
    """Return the path of a program; install its package if it is missing.

    Args:
        folders: Pattern of the folders that come before those of the path; the last one comes first.
    """
    for attempt in range(2):
        path = os.pathsep.join(
            [*sorted(map(str, Path("/").glob(folders.lstrip("/"))), reverse=True), os.environ.get("PATH", os.defpath)]
        )
        if found := shutil.which(program, path=path):
            return Path(found)
        if attempt == 0:
            _install(package)
    raise FileNotFoundError(f"{program} was not found: install the package {package}")


def _install(package: str) -> None:
    """Install a package with apt-get, as root or through sudo; its service is not started."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    policy = Path("/usr/sbin/policy-rc.d")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    made = os.geteuid() == 0 and not policy.exists()
    if made:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "--no-remove", package]):
            command = [*prefix, "apt-get", "-o", "DPkg::Lock::Timeout=120", *arguments]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        if made:
            policy.unlink()


class Server(ABC):
    """A server as a context manager.

    Attributes:
        base: Folder of the data, the log and the sockets.
        port: TCP port of 127.0.0.1.
    """

    user: ClassVar[str | None] = None
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, base: Path) -> None:
        self.base, self.port = base, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        base.mkdir()

    def __enter__(self) -> Self:
        self.prepare()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    def address(self) -> str:
        return self.url

    @abstractmethod
    def prepare(self) -> None:
        """Make the data folder and the configuration, once."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def check(self) -> object:
        """Talk to the server; any exception means that it is not ready."""

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        environment = {**os.environ, **self.environment()}
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.base,
                env=environment,
                user=self.user,
                group=self.user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, f"{type(self).__name__} on port {self.port}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"it ended: {(self.base / 'log').read_text()[-2000:]}")
        self.check()
        return True

    def stop(self) -> None:
        """End it in an orderly way."""
        self._signal(self.stop_signal)

    def kill(self) -> None:
        """SIGKILL all its processes."""
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if number is signal.SIGKILL:
            pids = descendants(process.pid)  # those of PostgreSQL have groups of their own
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            process.wait(60)
            wait_until(lambda: all(map(has_ended, pids)), "the end of its processes")
        else:
            with suppress(ProcessLookupError):
                process.send_signal(number)
            process.wait(60)
