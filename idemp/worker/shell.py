"""The shell of a worker and of a relay: threads that send and clean up, signs of life, and an end."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

from idemp.app import App
from idemp.events import log
from idemp.process import Adapters, open_adapters
from idemp.settings import Settings
from idemp.worker.health import status
from idemp.worker.relay import Cleaner, Relay
from idemp.worker.repeated import Repeated

__all__ = ["BEAT", "NEVER", "POLL", "RelayProcess", "Shell", "Stop"]

BEAT: Final = 5.0  # seconds between heartbeats at most
POLL: Final = 0.25  # seconds between looks for rows that are due
NEVER: Final = float("inf")


@dataclass
class Stop:
    """The end of a process, which `stop` announces.

    Attributes:
        deadline: When the process ends even if a handler still runs, by the monotonic clock.

    Example:
        >>> Stop().asked
        False
    """

    deadline: float = NEVER

    @property
    def asked(self) -> bool:
        """Whether the process is to end."""
        return self.deadline != NEVER


class Shell:
    """A process that works until it is stopped.

    Args:
        role: `worker` or `relay`.
        adapters: Of the process.
        settings: Of the process.
        chores: Done by the relay at the begin of each turn.

    Example:
        >>> Shell.stop.__name__
        'stop'
    """

    def __init__(self, role: Literal["worker", "relay"], adapters: Adapters, settings: Settings, chores: list[Any]) -> None:
        self.adapters, self.settings, self._role = adapters, settings, role
        self.relay = Relay(adapters.scheduler, adapters.broker.publisher(), settings.publish_timeout, chores)
        self._threads: list[Repeated] = []
        self._failure: BaseException | None = None
        self._stop, self._told_stop, self._next_beat = Stop(), False, 0.0

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stop.asked

    def run(self) -> None:
        """Work until `stop`; then finish what runs, and give the rest back.

        Raises:
            BaseException: What ended the process: SystemExit of a handler, MemoryError, an error in idemp.
        """
        classify, scheduler = self.adapters.store.classify, self.adapters.scheduler
        self._threads = [
            Repeated("upkeep", self.upkeep, POLL, classify, self.fail),
            Repeated("relay", self.relay.turn, 1.0, classify, self.fail),
            Cleaner(scheduler, classify, self.fail),
        ]
        self.upkeep()
        self.log_start()
        for thread in self._threads:
            thread.start()
        try:
            while not self._stop.asked:
                self.step()
                if self._failure is not None:
                    raise self._failure
            self.finish()
        finally:
            for thread in self._threads:
                thread.end()
        self.close()
        log("worker.stopped")

    def log_start(self) -> None:
        """Log that the process has started."""
        log("relay.started")

    def step(self, *, poll: float = 0.1) -> int:
        """Do what the main thread does, and return how much that was: here, it waits some seconds."""
        time.sleep(poll)
        return 0

    def finish(self) -> None:
        """Let what runs come to its end, when the process stops."""

    def close(self) -> None:
        """Say goodbye, and close connections. A process that died does neither."""
        self.adapters.scheduler.beat(self._role, stopping=True)
        self.relay.publisher.close()
        self.adapters.close()

    def stop(self) -> None:
        """End `run` after the handler that runs. Safe in a signal handler."""
        if not self._stop.asked:
            self._stop.deadline = time.monotonic() + self.settings.grace

    def fail(self, error: BaseException) -> None:
        """End `run` with an error of another thread."""
        self._failure = error

    def upkeep(self) -> None:
        """Show life in time, and end the process when its grace time is over."""
        now = time.monotonic()
        if now > self._stop.deadline:
            log("worker.killed", type=self.running or "no handler")
            os._exit(0)
        if now >= self._next_beat or (self._stop.asked and not self._told_stop):
            stopping = self._stop.asked
            self.beat(stopping=stopping)
            self._told_stop, self._next_beat = stopping, now + min(self.settings.lease / 3, BEAT)

    def beat(self, *, stopping: bool) -> None:
        """Show life, and keep what is leased."""
        self.adapters.scheduler.beat(self._role, stopping=stopping)

    @property
    def running(self) -> str:
        """Types of the messages whose handlers run."""
        return ""

    def status(self) -> dict[str, Any]:
        """Return the status for health checks."""
        silent = {thread.name.removeprefix("idemp-"): thread.silent for thread in self._threads}
        away = next((f"{each.name} pauses" for each in self._threads if each.away), "")
        return status(silent, obstacle=away, stopping=self._stop.asked)


class RelayProcess(Shell):
    """A process that only relays: for apps that initiate or wrap, and have no worker.

    Args:
        settings: Name the database and the broker.
        app: In place of them; its chores are done, too.

    Raises:
        ConfigurationError: A start-up check has a red finding.

    Example:
        >>> RelayProcess(Settings(database_url="sqlite:///nowhere.db"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the file nowhere.db does not exist: idemp db upgrade
    """

    def __init__(self, settings: Settings, app: App | None = None) -> None:
        super().__init__("relay", app.adapters() if app else open_adapters(settings), settings, app.chores if app else [])
