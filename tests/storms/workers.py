"""Worker processes of the command line, that are killed and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from idemp.testing.processes import wait_until
from tests.servers.forked import Forked

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 40.0


class Workers:
    """So many processes of one command; safe to use from any thread.

    They are forked, so that those that take the places of the dead are there as soon as a supervisor's would be.

    Args:
        count: how many there shall be.
        arguments: what follows `idemp worker`.
        environment: settings, beside this process's own environment.
        each: further settings, of the first, the second, and so on, in turn; of those that take their places as well.
        logs: a folder where each process's stderr gets a file of its own; without it stderr is this process's.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        each: Sequence[Mapping[str, str]] = ({},),
        logs: Path | None = None,
    ) -> None:
        self.count = count
        self.exit_codes: list[int] = []
        self._arguments = ["worker", *arguments]
        self._environments = [{**os.environ, **environment, **own} for own in each]
        self._logs = logs
        self._running: list[Forked] = []
        self._started = 0
        self._lock = threading.RLock()

    @property
    def running(self) -> tuple[Forked, ...]:
        """Those that were started last, dead or alive."""
        with self._lock:
            return tuple(self._running)

    def start(self) -> None:
        """Start all of them."""
        with self._lock:
            while len(self._running) < self.count:
                self._spawn()

    def kill_one(self, dice: random.Random) -> None:
        """SIGKILL one of them, and start another in its place."""
        with self._lock:
            victim = dice.choice(self._running)
            victim.kill()
            victim.wait()
            self._running.remove(victim)
            self._spawn()

    def replace_the_dead(self) -> None:
        """Start those again that ended: they found a server away at their start, or a message killed them."""
        with self._lock:
            for worker in [worker for worker in self._running if worker.poll() is not None]:
                self._running.remove(worker)
                self.exit_codes.append(worker.wait())
                self._spawn()

    def stop(self) -> list[int]:
        """SIGTERM, and SIGKILL for those that do not end; their exit codes."""
        with self._lock:
            stopped, self._running = self._running, []
        for worker in stopped:
            # One that was started a moment ago does not hear it yet: it would end as any program does.
            wait_until(lambda worker=worker: _heeds(worker, signal.SIGTERM), "the worker heeds SIGTERM")  # type: ignore[misc]
            worker.terminate()
        return [_ended(worker) for worker in stopped]

    def _spawn(self) -> None:
        environment = self._environments[self._started % len(self._environments)]
        self._started += 1
        log = self._logs / f"{self._started:04d}.log" if self._logs else None
        self._running.append(Forked(self._arguments, folder=ROOT, environment=environment, log=log))


def sharing(message_type: str, batches: Sequence[int]) -> list[Mapping[str, str]]:
    """Settings of workers that handle messages of this type in batches of these sizes, in turn."""
    return [{"IDEMP_MESSAGES": json.dumps({message_type: {"batch": batch}})} for batch in batches]


def _heeds(worker: Forked, number: signal.Signals) -> bool:
    """Whether it has ended, or has a handler for this signal."""
    if worker.poll() is not None:
        return True
    caught = next(line for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _ended(worker: Forked) -> int:
    try:
        return worker.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
