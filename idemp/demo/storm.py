"""The storm: workers are killed, and started again, until all work is done."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import SQLAlchemyError

from idemp.demo.place import Place
from idemp.demo.proof import Proof, prove
from idemp.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.demo.plan import Plan

_EFFECTS_PER_ORDER: Final = 3
_FED_AT_ONCE: Final = 500
_LOOK_SECONDS: Final = 0.05
_STOP_SECONDS: Final = 45.0
_CONFIRM_SECONDS: Final = 30.0
_LAST_KILL_AT: Final = 0.92
_ROUNDS: Final = 5
_BUSY: Final = (sqlite3.OperationalError, SQLAlchemyError)


def run(
    plan: Plan,
    *,
    database: str | None = None,
    broker: str | None = None,
    keep: bool = False,
    progress: Callable[[int, int, int], object] | None = None,
) -> Proof:
    """Feed, kill, wait until all is at rest, and prove.

    Args:
        plan: how long and how hard.
        database: SQLAlchemy URL; default a file in a temporary directory.
        broker: broker URL; default likewise.
        keep: leave tables, queues and files as they are.
        progress: told now and then how many effects there are, how many there shall be, and how many kills there were.

    Raises:
        IdempError: database or broker can't be used.
    """
    with Place(database, broker, keep=keep) as place:
        return Storm(plan, place, progress or (lambda *_: None)).run()


class Storm:
    """One run.

    Args:
        plan: how long and how hard.
        place: where.
        progress: see `run`.
    """

    def __init__(self, plan: Plan, place: Place, progress: Callable[[int, int, int], object]) -> None:
        self._plan = plan
        self._place = place
        self._tell = progress
        self._dice = plan.random()
        self._wanted = plan.orders * _EFFECTS_PER_ORDER
        # Kills are spread over the work, at random points of it: so there is work in somebody's hands at each.
        points = (self._dice.uniform(0.01, _LAST_KILL_AT) for _ in range(plan.kills))
        self._kill_at = sorted((round(point * self._wanted) for point in points), reverse=True)
        self._workers: list[subprocess.Popen[bytes]] = []
        # One relay beside them, which nobody kills: a dead one's outputs wait for the end of its lease, a minute.
        self._relay: subprocess.Popen[bytes] | None = None
        self._kills = 0
        self._kills_unsettled = 0

    def run(self) -> Proof:
        """Everything from feeding to the proof."""
        self._feed()
        began = time.monotonic()
        at_rest = False
        for _ in range(_ROUNDS):
            at_rest = self._round()
            # What workers held when they stopped is back in the queues, where brokers count it: then once more.
            if not at_rest or not self._left():
                break
        seconds = time.monotonic() - began
        return prove(
            self._plan,
            self._place,
            kills=self._kills,
            kills_unsettled=self._kills_unsettled,
            seconds=seconds,
            at_rest=at_rest,
        )

    def _round(self) -> bool:
        try:
            self._relay = self._start("relay")
            self._workers = [self._start_worker() for _ in range(self._plan.workers)]
            return self._until_at_rest()
        finally:
            self._stop()

    # Feeding --------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        outputs = list(self._plan.feed(self._place.orders))
        publisher = self._place.broker.publisher()
        try:
            for start in range(0, len(outputs), _FED_AT_ONCE):
                refused = publisher.publish(outputs[start : start + _FED_AT_ONCE], _CONFIRM_SECONDS)
                if any(refused):
                    raise BrokerError(f"The broker refused what the demo feeds: {next(filter(None, refused))}.")
        finally:
            publisher.close()

    # Workers --------------------------------------------------------------------------------------------------------

    def _start_worker(self) -> subprocess.Popen[bytes]:
        return self._start("worker", "idemp.demo.apps:orders", "idemp.demo.apps:stock", "--no-relay")

    def _start(self, *command_line: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "idemp.cli", *command_line, "--until-stdin-closes", "--log-level", "warning"]
        with self._place.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self._place.environment,
                cwd=self._place.folder,
                process_group=0,
            )

    def _stop(self) -> None:
        processes = [*self._workers, *([self._relay] if self._relay is not None else [])]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in processes:
            try:
                worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            _close_stdin(worker)

    # The storm ------------------------------------------------------------------------------------------------------

    def _until_at_rest(self) -> bool:
        """Kill and start workers until nothing is left to do; `False` if nothing moved for too long."""
        seen: tuple[int, ...] = ()
        moved = time.monotonic()
        while (facts := self._facts()) != (self._wanted, self._kills, 0, 0):
            self._tell(facts[0], self._wanted, self._kills)
            if facts != seen:
                seen, moved = facts, time.monotonic()
            elif time.monotonic() - moved > self._plan.patience:
                return False
            self._replace_dead()
            if not (self._kill_at and facts[0] >= self._kill_at[-1] and self._kill_one(facts[0])):
                time.sleep(_LOOK_SECONDS)
        self._tell(self._wanted, self._wanted, self._kills)
        return True

    def _facts(self) -> tuple[int, int, int, int]:
        """Effects, kills, and when all effects are there what is left in the queues and without a confirm."""
        effects = self._place.effects()
        if effects < self._wanted:
            return effects, self._kills, -1, -1
        return effects, self._kills, self._left(), self._place.scalar("SELECT count(*) FROM {i}pending")

    def _left(self) -> int:
        return self._place.witness.remaining([self._place.orders, self._place.stock])

    def _replace_dead(self) -> None:
        """A worker that ended by itself is started again, as any supervisor would."""
        for index, worker in enumerate(self._workers):
            if worker.poll() is not None:
                _close_stdin(worker)
                self._workers[index] = self._start_worker()
        if self._relay is not None and self._relay.poll() is not None:
            _close_stdin(self._relay)
            self._relay = self._start("relay")

    def _kill_one(self, effects: int) -> bool:
        """Kill a worker at a random moment. Until enough of them were, only one that holds something unsettled."""
        time.sleep(self._dice.uniform(0, _LOOK_SECONDS))
        index = self._dice.randrange(len(self._workers))
        worker = self._workers[index]
        if not _stand_still(worker):
            return False
        enough = self._kills_unsettled * 2 > self._kills
        try:
            unsettled = self._place.witness.unsettled(worker.pid)
        except _BUSY:
            worker.send_signal(signal.SIGCONT)  # it stands within a lock of a file that readers wait for, too
            return False
        if not unsettled and not enough and effects < self._wanted:
            worker.send_signal(signal.SIGCONT)
            return False
        worker.kill()
        worker.wait()
        _close_stdin(worker)
        self._kill_at.pop()
        self._kills += 1
        self._kills_unsettled += unsettled
        self._workers[index] = self._start_worker()
        return True


def _stand_still(worker: subprocess.Popen[bytes]) -> bool:
    """Stop a process, and wait until it stands; `False` if it ended meanwhile."""
    if worker.poll() is not None:
        return False
    worker.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(worker.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return True
    worker.returncode = os.waitstatus_to_exitcode(status)
    return False


def _close_stdin(worker: subprocess.Popen[bytes]) -> None:
    if worker.stdin is not None:
        with suppress(OSError):
            worker.stdin.close()
