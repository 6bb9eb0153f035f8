"""The consuming loop: groups of deliveries through the protocol, one group at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from idemp.app import App
from idemp.errors import ConfigurationError, Unavailable, describe_error
from idemp.events import log
from idemp.hooks import guard
from idemp.messages import Delivery
from idemp.protocol import Protocol
from idemp.work import Work
from idemp.worker.health import status
from idemp.worker.relay import BEAT, Cleaner, Relay
from idemp.worker.repeated import Repeated

__all__ = ["Worker", "type_names"]

FAST: Final = 0.050  # seconds; slower handlers run in a group of one
POLL: Final = 0.25  # seconds between looks for rows that are due
LONGEST_PAUSE: Final = 5.0  # seconds, while the database is away
SLOW: Final = 60.0  # seconds after which a handler that runs is logged
NEVER: Final = float("inf")


class Worker:
    """Consumes the queue of an app until it is stopped.

    Args:
        app: The consumer.

    Raises:
        ConfigurationError: The app has no handlers, or a start-up check has a red finding.

    Example:
        >>> Worker(App("orders"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the app 'orders' has no handlers: import the modules that define them
    """

    _awaits = False

    def __init__(self, app: App) -> None:
        if not app.handlers:
            raise ConfigurationError(f"the app {app.name!r} has no handlers: import the modules that define them")
        if app.is_async and not self._awaits:
            raise ConfigurationError(f"the app {app.name!r} has `async def` handlers: use idemp.worker.open_worker(app)")
        self.app, self.settings = app, app.settings
        parts = app.parts()
        self._store, self._scheduler, self._receiver = parts.store, parts.scheduler, app.receiver()
        self._publishers = [parts.broker.publisher() for _ in range(2)]
        timeout = self.settings.publish_timeout
        self._hook = guard(app.hooks) if app.hooks else None
        self.protocol = Protocol(
            app.handlers,
            self._store,
            self._scheduler,
            self._publishers[0],
            self._receiver,
            timeout,
            worker=parts.worker,
            hook=self._hook,
            default_type=app.default_type,
        )
        self._relay = Relay(self._scheduler, self._publishers[1], timeout, [self._declare, *app.chores])
        self._most = max(self.settings.group, *(handler.batch for handler in app.handlers.values()))
        self._accepted: list[Work] = []  # and not handled yet
        self._held: list[Delivery] = []  # the database took no work when their turn came
        self._aside: list[Delivery] = []  # redelivered, and not in rows yet
        self._slow: deque[Work] = deque()
        self._busy = False
        self._next_rows = self._next_beat = 0.0
        self._suspect_due = False
        self._pause = 0.0
        self._deadline = NEVER  # of handlers that run while the worker stops
        self._told_stop = False
        self._failure: BaseException | None = None
        self._threads: list[Repeated] = []
        self._seen = time.monotonic()  # the consuming thread's last sign of life
        self._watched: dict[int, float] = {}  # when the handlers that run count as slow
        self._obstacle = ""  # why deliveries are held
        self._undeclared = False  # which was logged
        self._declare()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._deadline != NEVER

    def run(self) -> None:
        """Consume until `stop`; then finish what runs, and give the rest back.

        Raises:
            BaseException: What ended the process: SystemExit of a handler, MemoryError, an error in idemp.
        """
        plain = [name for name, handler in sorted(self.app.handlers.items()) if not handler.opted_in]
        if plain:
            log("worker.plain", types=", ".join(plain))
        self._threads = [
            Repeated("upkeep", self.upkeep, POLL, self._store.classify, self._fail),
            Repeated("relay", self._relay.turn, 1.0, self._store.classify, self._fail),
            Cleaner(self._scheduler, self._store.classify, self._fail),
        ]
        if self.app.unhandled:
            log("worker.configured", types=", ".join(self.app.unhandled))
        self.upkeep()
        log("worker.started", queue=self.app.name)
        for thread in self._threads:
            thread.start()
        try:
            while not self.stopping:
                self.step()
                if self._failure is not None:
                    raise self._failure
            self._finish()
        finally:
            for thread in self._threads:
                thread.end()
        self.close()
        log("worker.stopped")

    def _declare(self) -> None:
        """Declare the queue of the app; later, if the broker is away, or so full that only consumption frees space."""
        try:
            self.app.declare()
        except Unavailable as error:
            if self._threads and not self._pause and not self._undeclared:  # else there is a line about it already
                log("queue.undeclared", queue=self.app.name, error=error)
                self._undeclared = True

    def stop(self) -> None:
        """End `run` after the handler that runs. Safe in a signal handler."""
        if not self.stopping:
            self._deadline = time.monotonic() + self.settings.grace
            self._receiver.wake()

    def close(self) -> None:
        """Give back what was not handled, and say goodbye. A worker that died does neither."""
        steps = [
            self.protocol.complete,
            self._receiver.close,
            self._scheduler.release,
            lambda: self._scheduler.beat("worker", stopping=True),
        ]
        for step in (*steps, *(publisher.close for publisher in self._publishers)):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - leases run out, and others take over
                log("worker.left", error=error)

    def step(self, *, poll: float = POLL) -> int:
        """Run one turn, and return how many deliveries it took: what was held, or what is due and what the broker has.

        Args:
            poll: Seconds to wait for deliveries.
        """
        taken, self._seen = 0, time.monotonic()
        try:
            deliveries, self._held = self._held, []
            deliveries = deliveries or list(self._take(poll))
            taken = len(deliveries)
            self._run(deliveries)
        except Exception as error:
            self._hold_accepted()
            if not isinstance(error, Unavailable) and self._store.classify(error) is None:
                raise
            self._obstacle = describe_error(error)
            self._wait()
        else:
            if self._held:
                self._hold_accepted()
                self._wait()
            elif self._pause and self._works_again():
                log("worker.resumed")
                self._pause = 0.0
        return taken

    def _run(self, deliveries: Sequence[Delivery]) -> None:
        """Run what was taken, in groups."""
        taken = len(deliveries)
        suspect = taken == 1 and deliveries[0].row is not None and deliveries[0].row.suspect
        full = taken >= self._most and not suspect  # so there may be more; a suspect takes no group in flight along
        self._accepted = list(map(self.protocol.accept, deliveries))
        while self._accepted and not self.stopping and not self._held:
            group, self._accepted, fast = _split(self._accepted)
            if _waits(group):
                self._slow += group
            else:
                self._handle(group, more=full and fast)
        if self._slow and not self.stopping and not self._held:
            self._handle([self._slow.popleft()])  # one a turn, so that fast neighbours come in between
        if not full and self.protocol.flight is not None:
            self._hold(self.protocol.complete())

    def _works_again(self) -> bool:
        """Return whether an outage is over, if nothing is held any more."""
        return True

    def _finish(self) -> None:
        """Let end what runs, when the worker stops."""

    def _hold_accepted(self) -> None:
        accepted, self._accepted = self._accepted, []
        self._held += [work.delivery for work in accepted]

    def status(self) -> dict[str, Any]:
        """Return the status for health checks. The consuming thread is not judged while a handler runs."""
        running = self.running
        silent = {thread.name.removeprefix("idemp-"): thread.silent for thread in self._threads}
        silent["consuming"] = self._silent()
        outage = self._obstacle if self._pause else next((f"{each.name} pauses" for each in self._threads if each.away), "")
        return status(silent, obstacle=outage, stopping=self.stopping, running=type_names(running))

    def _silent(self) -> float:
        """Return the seconds since the consuming thread's last sign of life."""
        return 0.0 if self.running else time.monotonic() - max(self._seen, self.protocol.seen)

    @property
    def running(self) -> list[Work]:
        """The deliveries that are being claimed or handled."""
        return [self.protocol.running] if self.protocol.running is not None else []

    def upkeep(self) -> None:
        """Show life and renew leases in time, and end the process when its grace time is over."""
        now = time.monotonic()
        if now > self._deadline:
            log("worker.killed", type=type_names(self.running) or "no handler")
            os._exit(0)
        self._watch(now)
        if now >= self._next_beat or (self.stopping and not self._told_stop):
            self._scheduler.beat("worker", stopping=self.stopping)
            self._receiver.keep_alive()
            self._told_stop, self._next_beat = self.stopping, now + min(self.settings.lease / 3, BEAT)

    def _watch(self, now: float) -> None:
        """Log a handler that runs for long, once."""
        watched, self._watched = self._watched, {}
        for work in self.running:
            slow_at = watched.get(id(work), now + SLOW)
            if now >= slow_at:
                log("handler.slow", type=_type(work), id=work.delivery.properties.get("message_id"), seconds=SLOW)
                slow_at = NEVER
            self._watched[id(work)] = slow_at

    def _take(self, poll: float) -> Sequence[Delivery]:
        """Return one suspect alone; or, in the next turn, rows that are due and deliveries of the broker."""
        if self._suspect_due and (suspects := self._take_suspect()):
            return suspects
        room = self._room()
        if room <= 0:
            return []
        rows = self._rows(room // 2 or 1 if self._busy else room)
        taken, nothing_due = list(rows), not rows and not (self._suspect_due and self._is_free())
        try:
            fresh = self._receiver.receive(room - len(rows), poll if nothing_due and self._may_wait() else 0.0)
            self._busy = bool(fresh)
            for delivery in fresh:
                (self._aside if delivery.redelivered else taken).append(delivery)
            if self._aside:
                self._aside, self._next_rows = self.protocol.set_aside(self._aside), 0.0
                if self._aside:
                    raise Unavailable("redelivered messages could not be moved into rows")
        except Exception:
            self._held += taken
            raise
        return taken

    def _room(self) -> int:
        """Return how many deliveries may be taken."""
        return self._most - len(self._slow)

    def _may_wait(self) -> bool:
        """Return whether nothing else is to be done while no message comes."""
        return not self._slow and self.protocol.flight is None

    def _rows(self, limit: int) -> Sequence[Delivery]:
        now = time.monotonic()
        if now < self._next_rows:
            return []
        rows, self._suspect_due = self._scheduler.lease_messages(self.app.name, limit)
        self._next_rows = 0.0 if rows else now + POLL
        return rows

    def _is_free(self) -> bool:
        """Return whether nothing else runs, so that a suspect can."""
        return True

    def _take_suspect(self) -> list[Delivery]:
        """Return a message that may have ended its process twice, when nothing else runs."""
        self._suspect_due, self._next_rows = False, 0.0
        if held := self.protocol.complete():
            self._hold(held)
            return []
        suspect = self._scheduler.lease_suspect(self.app.name)
        return [suspect] if suspect is not None else []

    def _handle(self, group: list[Work], *, more: bool = False) -> None:
        before = [] if more else self.protocol.complete()  # no group in flight waits for a slow neighbour
        if held := [*before, *self.protocol.handle(group, more=more)]:
            self._hold(held)

    def _hold(self, held: Sequence[Work]) -> None:
        self._held += [work.delivery for work in held]
        self._obstacle = self.protocol.obstacle or self._obstacle

    def _wait(self) -> None:
        """Pause consumption, longer each time."""
        if not self._pause:
            log("worker.paused", error=self._obstacle)
            if self._hook is not None:
                self._hook("on_hold", self._obstacle)
        self._pause = min(LONGEST_PAUSE, self._pause * 2 or 0.1)
        until = time.monotonic() + self._pause
        while time.monotonic() < until and not self.stopping:
            time.sleep(min(0.1, self._pause))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._receiver.wake()


def _type(work: Work) -> str:
    return work.handler.type if work.handler is not None else ""


def type_names(works: Sequence[Work]) -> str:
    """Return the types of messages.

    Example:
        >>> type_names([])
        ''
    """
    return ", ".join(sorted({_type(work) for work in works}))


def _split(works: list[Work]) -> tuple[list[Work], list[Work], bool]:
    """Return what runs next, the rest, and whether it is fast: what is fast and opted in runs together, others alone."""
    together: list[Work] = []
    others: list[Work] = []
    for work in works:
        handler = work.handler
        fast = work.error is not None or handler is None or (handler.opted_in and handler.seconds < FAST)
        (together if fast else others).append(work)
    return (together, others, True) if together else (others[:1], others[1:], False)


def _waits(group: Sequence[Work]) -> bool:
    """Return whether a delivery is known to be slow; a suspect runs at once."""
    handler, row = group[0].handler, group[0].delivery.row
    known_slow = len(group) == 1 and handler is not None and FAST <= handler.seconds < NEVER
    return known_slow and not (row is not None and row.suspect)
