"""Signals of one worker process, and a supervisor of several."""

from __future__ import annotations

import contextlib
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

__all__ = ["INTERRUPTED", "Supervisor", "run"]

log = logging.getLogger("idemp")

INTERRUPTED: Final = 130
REFUSED: Final = frozenset({2, 3})  # usage and configuration: starting again would not help
LONGEST_PAUSE: Final = 30.0  # seconds before a process that died is started again
STEADY: Final = 60.0  # seconds after which a process counts as healthy
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run(worker: Worker, *, supervised: bool = False) -> None:
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
            sys.stdin.buffer.read()
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
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a process refuses its configuration; return the exit code."""
        for each in SIGNALS:
            signal.signal(each, self.stop)
        while not self._stopping or self._children:
            now = time.monotonic()
            for number, child in list(self._children.items()):
                if child.poll() is not None:
                    self._ended(number, child.returncode, now)
            for number, when in self._starts.items():
                if number not in self._children and now >= when and not self._stopping:
                    self._started[number] = now
                    self._children[number] = subprocess.Popen(  # noqa: S603 - our own command
                        self._command, stdin=subprocess.PIPE, start_new_session=True
                    )
            time.sleep(0.05)
        return self._code

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Pass SIGTERM on; a second one ends the processes at once."""
        self._stopping = True
        for child in list(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)

    def _ended(self, number: int, code: int, now: float) -> None:
        child = self._children.pop(number)
        if child.stdin is not None:
            child.stdin.close()
        if code in REFUSED or (self._stopping and code):
            self._code = self._code or (code if code > 0 else 1)
        if code in REFUSED:
            self.stop()
        elif not self._stopping:
            log.error("a worker process ended with %d: another is started", code)
        steady = now - self._started[number] > STEADY
        self._pauses[number] = 1.0 if steady else min(LONGEST_PAUSE, self._pauses[number] * 2 or 1.0)
        self._starts[number] = now + self._pauses[number]
