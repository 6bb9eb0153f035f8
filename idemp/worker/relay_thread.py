"""A relay in a process that has no worker of idemp, such as a web server or a Celery worker."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from idemp.events import log
from idemp.forks import forget_in_children, pause_at_forks
from idemp.ports import Kind, Outlet, Scheduler
from idemp.process import open_broker, raise_red
from idemp.settings import Settings
from idemp.worker.relay import Relay
from idemp.worker.repeated import Repeated

if TYPE_CHECKING:
    from idemp.sql.scheduler import SqlScheduler
    from idemp.sql.store import SqlStore

__all__ = ["RelayThread"]

BEAT: Final = 5.0  # seconds between heartbeats
PATIENCE: Final = 2.0  # seconds that a fork waits for a turn, which may be waiting for the broker
EVERY: Final = 1.0  # seconds between looks for what another process has left


class RelayThread:
    """Sends outputs that no dispatch has sent: when it is woken, and each second. `Inbox.relay` makes it.

    It starts at its first use in a process, also in a forked one. Several relays take disjoint outputs.

    Args:
        opened: Returns the store and the scheduler of the process.
        settings: Of the inbox.
        broker: Takes the outputs; None for the one that the settings name.
        own: Whether the thread alone uses the opened engine, which `stop` then closes.

    Example:
        >>> RelayThread.wake.__name__
        'wake'
    """

    def __init__(
        self,
        opened: Callable[[], tuple[SqlStore, SqlScheduler]],
        settings: Settings,
        broker: Outlet | None = None,
        *,
        own: bool = False,
    ) -> None:
        self._opened, self._settings, self.broker, self._own = opened, settings, broker, own
        self._inherited: list[object] = []  # of a parent process, whose connections have to stay open
        self._begin()
        forget_in_children(self)
        pause_at_forks(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: Repeated | None = None
        self._relay: Relay | None = None
        self._next_beat, self._asked = 0.0, False
        self._turning, self._paused = threading.Lock(), False

    def pause(self) -> None:
        """Wait for the end of a turn before a fork: in a child, a lock of SQLite's that the thread has would stay taken."""
        self._paused = self._turning.acquire(timeout=PATIENCE)

    def resume(self) -> None:
        """Go on after a fork."""
        if self._paused:
            self._turning.release()

    def forget(self) -> None:
        """Begin with nothing, in a forked child; another thread may have held the lock at the fork."""
        self._inherited.append(self._relay)
        self._begin()

    def start(self) -> None:
        """Start the thread if this process has none, and show life, so that outputs may be stored. Repeated calls do nothing.

        Raises:
            ConfigurationError: The tables are missing, or belong to another broker.
            Exception: An error of the database, which is away.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            store, scheduler = self._opened()
            if self._relay is None:
                self._relay = self._open(store, scheduler)
                atexit.register(self.stop)
            scheduler.beat("relay")
            self._next_beat = time.monotonic() + BEAT
            turn = self._turn(scheduler, self._relay)
            self._thread = Repeated("relay", turn, EVERY, _outage, self._failed)
            self._thread.start()

    def wake(self) -> None:
        """Send what has just been committed; call it after COMMIT. It raises nothing: what is stored is sent later at the latest."""
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - after COMMIT nothing may escape
            log("thread.paused", thread="idemp-relay", error=error)
        self._asked = True
        if (thread := self._thread) is not None:
            thread.wake()

    def stop(self) -> None:
        """Send what `wake` was called for, end the thread, sign off, and close the connection to the broker."""
        with self._lock:
            thread, relay = self._thread, self._relay
            self._thread = self._relay = None
        if thread is None or relay is None:
            return
        atexit.unregister(self.stop)
        thread.end()
        if thread.is_alive():  # it waits for something, and the publisher is its own
            return
        if self._asked:
            with suppress(Exception):  # another relay sends it
                relay.turn()
        with suppress(Exception):  # without a word, the relay counts as alive for some seconds more
            self._opened()[1].beat("relay", stopping=True)
        relay.publisher.close()
        if self._own:
            self._opened()[0].database.close()

    def _open(self, store: SqlStore, scheduler: SqlScheduler) -> Relay:
        from idemp.sql.checks import check_broker

        broker = self.broker or open_broker(self._settings, store.database, store.worker)
        raise_red(check_broker(store.database, broker.identity))
        return Relay(scheduler, broker.publisher(), self._settings.publish_timeout)

    def _turn(self, scheduler: Scheduler, relay: Relay) -> Callable[[], bool]:
        def turn() -> bool:
            with self._turning:
                if time.monotonic() >= self._next_beat:
                    scheduler.beat("relay")
                    self._next_beat = time.monotonic() + BEAT
                self._asked = False
                return relay.turn()

        return turn

    def _failed(self, error: BaseException) -> None:
        """Log an error that ended the thread; the next call of `wake` starts another."""
        log("thread.paused", thread="idemp-relay", error=error)


def _outage(error: BaseException) -> Kind | None:
    """Survive all errors: without a heartbeat, claims with outputs are refused before COMMIT."""
    return Kind.LOST if isinstance(error, Exception) else None
