"""The relay: sends outputs that are due and that no dispatch has sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from idemp.app import App, open_parts
from idemp.events import log
from idemp.ports import Kind, Publisher, Scheduler
from idemp.protocol import publish
from idemp.settings import Settings
from idemp.worker.health import status
from idemp.worker.repeated import Repeated

__all__ = ["BEAT", "Cleaner", "Relay", "RelayProcess"]

LIMIT: Final = 100  # outputs a turn
BEAT: Final = 5.0  # seconds between heartbeats at most
PURGE: Final = 600.0  # seconds between purges
REST: Final = 1.5  # times as long as a batch took, the purge rests behind it, so that claims go on meanwhile


class Relay:
    """Leases outputs and sends them. Several relays take disjoint outputs.

    Args:
        scheduler: Leases the outputs, and learns what became of them.
        publisher: Belongs to the relay's thread.
        timeout: Seconds to wait for confirms; half of the lease.
        chores: Done at the begin of each turn.

    Example:
        >>> from idemp.worker.relay import Relay
        >>> Relay.turn.__name__
        'turn'
    """

    def __init__(
        self, scheduler: Scheduler, publisher: Publisher, timeout: float, chores: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._scheduler, self._publisher, self._timeout = scheduler, publisher, timeout
        self._refused, self._chores = False, chores

    def turn(self) -> bool:
        """Send one list of outputs; return whether there may be more that are due."""
        for chore in self._chores:
            chore()
        outputs = self._scheduler.lease_outputs(LIMIT, 2 * self._timeout)
        if not outputs:
            return False
        refused = publish(self._publisher, outputs, self._timeout)
        self._scheduler.confirm([output.id for output in outputs if output.id not in refused])
        self._scheduler.refuse(refused)
        outage = [refusal.reason for refusal in refused.values() if not refusal.own]
        if outage and not self._refused:
            log("relay.refused", reason=outage[0])
        elif self._refused and not outage:
            log("relay.resumed")
        self._refused = bool(outage)
        return len(outputs) == LIMIT and len(refused) < LIMIT


class Cleaner(Repeated):
    """The thread that deletes old rows, in batches."""

    def __init__(
        self,
        scheduler: Scheduler,
        classify: Callable[[BaseException], Kind | None],
        failed: Callable[[BaseException], None],
        every: float = PURGE / 10,
    ) -> None:
        super().__init__("purge", self._turn, every, classify, failed)
        self._scheduler = scheduler

    def _turn(self) -> float:
        """Delete a batch; return the seconds until the next one."""
        start = time.monotonic()
        more = self._scheduler.purge()
        return REST * (time.monotonic() - start) if more else PURGE


class RelayProcess:
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
        self._parts = app.parts() if app else open_parts(settings)
        self._publisher = self._parts.broker.publisher()
        self._relay = Relay(self._parts.scheduler, self._publisher, settings.publish_timeout, app.chores if app else ())
        self._failure: BaseException | None = None
        self._threads: list[Repeated] = []
        self.stopping = False

    def run(self) -> None:
        """Relay until `stop`.

        Raises:
            BaseException: An error in idemp.
        """
        log("relay.started")
        parts = self._parts
        self._threads = [
            Repeated("upkeep", lambda: parts.scheduler.beat("relay"), BEAT, parts.store.classify, self._fail),
            Repeated("relay", self._relay.turn, 1.0, parts.store.classify, self._fail),
            Cleaner(parts.scheduler, parts.store.classify, self._fail),
        ]
        parts.scheduler.beat("relay")
        for thread in self._threads:
            thread.start()
        while not self.stopping:
            time.sleep(0.1)
        for thread in self._threads:
            thread.end()
        if self._failure is not None:
            raise self._failure
        parts.scheduler.beat("relay", stopping=True)
        self._publisher.close()
        parts.close()
        log("worker.stopped")

    def status(self) -> dict[str, Any]:
        """Return the status for health checks."""
        silent = {thread.name.removeprefix("idemp-"): thread.silent for thread in self._threads}
        outage = next((f"{each.name} pauses" for each in self._threads if each.away), "")
        return status(silent, obstacle=outage, stopping=self.stopping)

    def stop(self) -> None:
        """End `run`. Safe in a signal handler."""
        self.stopping = True

    def _fail(self, error: BaseException) -> None:
        self._failure, self.stopping = error, True
