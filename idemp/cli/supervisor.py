"""`--processes N`: a parent that keeps N worker processes running, and that none of them outlives."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from idemp.cli.exits import ExitCode
from idemp.settings import PROCESS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("idemp.cli")

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_LIVED_LONG: Final = 60.0
# What trying again does not mend.
_FINAL: Final = frozenset({ExitCode.USAGE, ExitCode.REFUSED})


class Supervisor:
    """Starts children, starts those again that die (after pauses that grow), and stops them all.

    Each child's stdin is a pipe whose other end only this process holds: when it dies, however it dies, the kernel
    closes the pipe and the children stop.

    Args:
        command: what a child runs; it must stop at SIGTERM and when its stdin closes.
        processes: how many of them.

    Example:
        >>> import sys
        >>> supervisor = Supervisor([sys.executable, "-c", "raise SystemExit(3)"], processes=2)
        >>> supervisor.run()
        >>> supervisor.exit_code
        3
    """

    def __init__(self, command: Sequence[str], processes: int) -> None:
        self._command = list(command)
        self._processes = processes
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self.exit_code = int(ExitCode.OK)

    def run(self) -> None:
        """Keep the children running until `stop`, or until one says that its configuration is refused."""
        keepers = [threading.Thread(target=self._keep, args=(n,), daemon=True) for n in range(1, self._processes + 1)]
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            keeper.join()

    def stop(self) -> None:
        """Ask all children to stop, as SIGTERM does."""
        self._stop.set()
        with self._lock:
            for child in self._children:
                child.terminate()

    def kill(self) -> None:
        """End all children at once."""
        with self._lock:
            for child in self._children:
                child.kill()

    def _keep(self, number: int) -> None:
        pause = _FIRST_PAUSE
        while (child := self._start(number)) is not None:
            began = time.monotonic()
            code = child.wait()
            with self._lock:
                self._children.discard(child)
            if child.stdin is not None:
                child.stdin.close()
            if self._stop.is_set():
                return
            if code in _FINAL:
                self.exit_code = code
                self.stop()
                return
            pause = _FIRST_PAUSE if time.monotonic() - began > _LIVED_LONG else pause
            log.error(
                "worker process %d ended with %d, started again in %g s",
                child.pid,
                code,
                pause,
                extra={"event": "process_died", "pid": child.pid, "code": code, "pause": pause},
            )
            self._stop.wait(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _start(self, number: int) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stop.is_set():
                return None
            # A process group of its own: what the terminal sends to ours reaches the children once, through us.
            environment = {**os.environ, PROCESS_VARIABLE: str(number - 1)}
            child = subprocess.Popen(  # noqa: S603
                self._command, stdin=subprocess.PIPE, process_group=0, env=environment
            )
            self._children.add(child)
        log.info(
            "worker process %d of %d is %d",
            number,
            self._processes,
            child.pid,
            extra={"event": "process_started", "pid": child.pid},
        )
        return child


def child_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a child: that of this process, but one process, which stops with its parent.

    Example:
        >>> child_command(["worker", "shop:app", "--processes", "4", "--json"])[1:]
        ['-m', 'idemp.cli', 'worker', 'shop:app', '--until-stdin-closes']
    """
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--processes":
            skip = True
        elif not argument.startswith("--processes=") and argument != "--json":
            kept.append(argument)
    return [sys.executable, "-m", "idemp.cli", *kept, "--until-stdin-closes"]
