"""Signals of one worker process, and a supervisor of several."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import Unavailable, describe_error
from idemp.events import log
from idemp.ports import Kind
from idemp.settings import Settings
from idemp.worker.health import SILENT, combine, serve_health, status
from idemp.worker.shell import Shell

if TYPE_CHECKING:
    from idemp.sql.engine import Database

__all__ = ["INTERRUPTED", "TERMINATED", "Supervisor", "outage", "run"]

INTERRUPTED: Final = 130
TERMINATED: Final = 143  # by SIGTERM, before the worker had begun
REFUSED: Final = frozenset({2, 3})  # usage and configuration: starting again would not help
LONGEST_WAIT: Final = 2.0  # seconds between attempts to open a worker
LONGEST_PAUSE: Final = 30.0  # seconds before a process that died is started again
STEADY: Final = 60.0  # seconds after which a process counts as healthy
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def outage(error: Exception, database: Database) -> bool:
    """Return whether an error at a start says that the database or the broker is away.

    Example:
        >>> from idemp.sql.engine import Database
        >>> outage(ValueError(), Database("sqlite:///shop.db")), outage(Unavailable("…"), Database("sqlite:///shop.db"))
        (False, True)
    """
    # asyncpg's errors about connections come unwrapped.
    return isinstance(error, Unavailable | OSError) or database.dialect.classify(error) in (Kind.LOST, Kind.TRANSIENT)


class _Stopped(BaseException):
    """Stopped before the worker was open, at any point of its opening."""


class _Process:
    """A worker or a relay, from the moment on when it is to be opened."""

    def __init__(self, begin: Callable[[], Shell], database: Database) -> None:
        self._begin, self._database = begin, database
        self.worker: Shell | None = None
        self.stopping, self._obstacle = False, "starting"

    def open(self, patience: float) -> Shell:
        """Open it, and wait some seconds for a database that is away."""
        deadline, pause = time.monotonic() + patience, 0.25
        while self.worker is None:
            try:
                self.worker = self._begin()
            except Exception as error:
                if self.stopping:  # what was interrupted has made another error of it
                    raise _Stopped from error
                if not outage(error, self._database) or time.monotonic() >= deadline:
                    raise
                if self._obstacle == "starting":
                    log("worker.waiting", error=error)
                self._obstacle = describe_error(error)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_WAIT)
        if self.stopping:  # what was interrupted has ignored it
            self.worker.stop()
        return self.worker

    def stop(self) -> None:
        """Stop; before it was opened, there is nothing to give back."""
        self.stopping = True
        if self.worker is None:
            raise _Stopped
        self.worker.stop()

    def status(self) -> dict[str, Any]:
        return self.worker.status() if self.worker else status({}, obstacle=self._obstacle, stopping=self.stopping)


def run(begin: Callable[[], Shell], database: Database, settings: Settings, *, supervisor: int | None = None) -> None:
    """Open a worker and run it in the main thread until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        begin: Opens what runs until it is stopped.
        database: Says which errors of that are an outage, whose end is waited for.
        settings: Say for how long, and where health checks are answered.
        supervisor: File descriptor to which the status is written, as lines of JSON. The worker stops, too, when standard
            input closes: the supervisor has gone.
    """
    process = _Process(begin, database)

    def stop(_number: int, _frame: FrameType | None) -> None:
        if process.stopping or (process.worker is not None and process.worker.stopping):
            # The logging lock may be held by the code that this signal has interrupted.
            last = threading.Thread(target=log, args=("worker.interrupted",), daemon=True)
            last.start()
            last.join(1.0)
            os._exit(INTERRUPTED)
        process.stop()

    try:
        for each in SIGNALS:
            signal.signal(each, stop)
        if supervisor is not None:
            threading.Thread(target=_watch_input, args=(process,), daemon=True).start()
            threading.Thread(target=_report, args=(process, supervisor), daemon=True).start()
        elif settings.health_port is not None:
            serve_health(settings.health_host, settings.health_port, process.status)
        worker = process.open(settings.patience)
    except _Stopped:
        return
    gc.freeze()  # a full collection would look at all modules
    worker.run()


def _watch_input(process: _Process) -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written
    if process.worker is None:
        os._exit(0)
    process.stop()


def _report(process: _Process, supervisor: int) -> None:
    """Write the status each second, for as long as the supervisor reads."""
    with contextlib.suppress(OSError):
        while True:
            os.write(supervisor, json.dumps(process.status()).encode() + b"\n")
            time.sleep(1.0)


@dataclass
class _Child:
    """A process, the end of its pipe, and its last status."""

    process: subprocess.Popen[bytes]
    pipe: int
    signalled: int = 0
    started: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)
    status: dict[str, Any] = field(default_factory=lambda: status({}, obstacle="starting"))

    def read(self) -> None:
        """Take the last status from the pipe."""
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self.pipe, 65_536).splitlines()
            if lines:
                self.status, self.seen = json.loads(lines[-1]), time.monotonic()

    def close(self) -> None:
        os.close(self.pipe)
        if self.process.stdin is not None:
            self.process.stdin.close()


class Supervisor:
    """Keeps several worker processes running; a process that died is started again, after growing pauses.

    Args:
        command: Starts one process, which is given the file descriptor of its pipe as last argument. It ends when its standard
            input closes, so none outlives the supervisor.
        processes: Number of processes.
        settings: Say where health checks are answered, for all processes together.
        environment: Returns the variables that a process is given besides, by its number.

    Example:
        >>> Supervisor([sys.executable, "-c", "raise SystemExit(3)"], 2, Settings()).run()
        3
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        settings: Settings,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._command, self._settings, self._environment = command, settings, environment
        self._children: dict[int, _Child] = {}
        self._starts = dict.fromkeys(range(processes), 0.0)  # when each is to be started
        self._pauses = dict.fromkeys(range(processes), 0.0)
        self._stops = 0  # signals to pass on
        self._code = 0

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a process refuses its configuration; return the exit code."""
        for each in SIGNALS:
            signal.signal(each, self.stop)
        if self._settings.health_port is not None:
            serve_health(self._settings.health_host, self._settings.health_port, self.status)
        while not self._stops or self._children:
            for number, child in list(self._children.items()):
                child.read()
                if child.process.poll() is not None:
                    self._ended(number, child)
                elif child.signalled < self._stops:
                    child.signalled += 1
                    child.process.terminate()
            for number, when in self._starts.items():
                if number not in self._children and time.monotonic() >= when and not self._stops:
                    self._start(number)
            time.sleep(0.05)
        return self._code

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Pass SIGTERM on; a second one ends the processes at once."""
        self._stops += 1

    def status(self) -> dict[str, Any]:
        """Return the status of all processes. One that reports no more is stuck; one that is started again is not ready."""
        now, statuses = time.monotonic(), []
        for number in self._starts:
            child = self._children.get(number)
            last = child.status if child else status({}, obstacle="starting")
            stuck = child is not None and now - child.seen >= SILENT
            statuses.append(last | {"healthy": False, "ready": False} if stuck else last)
        return combine(statuses)

    def _start(self, number: int) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*self._command, str(write)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[write],
            env={**os.environ, **self._environment(number)},
        )
        os.close(write)
        self._children[number] = _Child(process, read)

    def _ended(self, number: int, child: _Child) -> None:
        del self._children[number]
        child.close()
        code, now = child.process.returncode, time.monotonic()
        stopped = child.signalled and code in (0, TERMINATED, -signal.SIGTERM)  # perhaps before it had set its own handler
        if code in REFUSED or (self._stops and not stopped):
            self._code = self._code or (code if code > 0 else 1)
        if code in REFUSED:
            self.stop()
        elif not self._stops:
            log("worker.died", code=code)
        steady = now - child.started > STEADY
        self._pauses[number] = 1.0 if steady else min(LONGEST_PAUSE, self._pauses[number] * 2 or 1.0)
        self._starts[number] = now + self._pauses[number]
