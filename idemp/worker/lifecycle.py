"""Signals of one worker process, and a supervisor of several."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from idemp.worker.loop import Worker
from idemp.worker.relay import RelayProcess

__all__ = ["INTERRUPTED", "Supervisor", "run"]

log = logging.getLogger("idemp")

INTERRUPTED: Final = 130
REFUSED: Final = frozenset({2, 3})  # usage and configuration: starting again would not help
LONGEST_PAUSE: Final = 30.0  # seconds before a process that died is started again
STEADY: Final = 60.0  # seconds after which a process counts as healthy
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run(worker: Worker | RelayProcess, *, supervised: bool = False) -> None:
    """Run a worker in the main thread until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        worker: Runs until it is stopped.
        supervised: Whether to stop, too, when standard input closes: the supervisor has gone.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        if worker.stopping:
            # The logging lock may be held by the code that this signal has interrupted.
            last = threading.Thread(target=log.error, args=("interrupted twice: its messages are delivered again",), daemon=True)
            last.start()
            last.join(1.0)
            os._exit(INTERRUPTED)
        worker.stop()

    for each in SIGNALS:
        signal.signal(each, stop)
    if supervised:

        def watch() -> None:
            os.read(sys.stdin.fileno(), 1)  # nothing is ever written
            worker.stop()

        threading.Thread(target=watch, daemon=True).start()
    gc.freeze()  # a full collection would look at all modules
    worker.run()


class Supervisor:
    """Keeps several worker processes running; a process that died is started again, after growing pauses.

    Args:
        command: Starts one process. It ends when its standard input closes, so none outlives the supervisor.
        processes: Number of processes.

    Example:
        >>> Supervisor([sys.executable, "-c", "raise SystemExit(3)"], 2).run()
        3
    """

    def __init__(self, command: Sequence[str], processes: int) -> None:
        self._command = command
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = dict.fromkeys(range(processes), 0.0)  # when each is to be started
        self._started: dict[int, float] = {}
        self._pauses = dict.fromkeys(range(processes), 0.0)
        self._stops = 0  # signals to pass on
        self._told: dict[int, int] = {}
        self._code = 0

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a process refuses its configuration; return the exit code."""
        for each in SIGNALS:
            signal.signal(each, self.stop)
        while not self._stops or self._children:
            for number, child in list(self._children.items()):
                if child.poll() is not None:
                    self._ended(number, child)
                elif self._told[number] < self._stops:
                    self._told[number] += 1
                    child.terminate()
            for number, when in self._starts.items():
                if number not in self._children and time.monotonic() >= when and not self._stops:
                    self._start(number)
            time.sleep(0.05)
        return self._code

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Pass SIGTERM on; a second one ends the processes at once."""
        self._stops += 1

    def _start(self, number: int) -> None:
        self._started[number], self._told[number] = time.monotonic(), 0
        self._children[number] = subprocess.Popen(  # noqa: S603 - our own command
            self._command, stdin=subprocess.PIPE, start_new_session=True
        )

    def _ended(self, number: int, child: subprocess.Popen[bytes]) -> None:
        del self._children[number]
        if child.stdin is not None:
            child.stdin.close()
        code, now = child.returncode, time.monotonic()
        stopped = self._told[number] and code in (0, -signal.SIGTERM)  # perhaps before it had set its own handler
        if code in REFUSED or (self._stops and not stopped):
            self._code = self._code or (code if code > 0 else 1)
        if code in REFUSED:
            self.stop()
        elif not self._stops:
            log.error("a worker process ended with %d: another is started", code)
        steady = now - self._started[number] > STEADY
        self._pauses[number] = 1.0 if steady else min(LONGEST_PAUSE, self._pauses[number] * 2 or 1.0)
        self._starts[number] = now + self._pauses[number]
