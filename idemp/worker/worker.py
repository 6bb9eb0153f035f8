"""The worker: takes deliveries, lets a runner run them, and pauses while the database is away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from idemp.app import App
from idemp.dispatcher import Dispatcher
from idemp.errors import ConfigurationError, Unavailable, describe_error
from idemp.events import log
from idemp.executor import Executor
from idemp.handling import Handling
from idemp.hooks import guard
from idemp.protocol import Protocol
from idemp.settler import Settler
from idemp.worker.groups import Groups
from idemp.worker.health import status
from idemp.worker.intake import HandlerRunner, Intake
from idemp.worker.shell import NEVER, POLL, Shell

__all__ = ["Worker", "type_names"]

LONGEST_PAUSE: Final = 5.0  # seconds, while the database is away
SLOW: Final = 60.0  # seconds after which a handler that runs is logged


class Worker(Shell):
    """Consumes the queue of an app until it is stopped.

    Plain handlers run in groups; if any handler is `async def`, all run at once, on an event loop and in threads.

    Args:
        app: The consumer.

    Raises:
        ConfigurationError: The app has no handlers, a start-up check has a red finding, or the pool of an asynchronous engine is
            too small.

    Example:
        >>> Worker(App("orders"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the app 'orders' has no handlers: import the modules that define them
    """

    def __init__(self, app: App) -> None:
        if not app.handlers:
            raise ConfigurationError(f"the app {app.name!r} has no handlers: import the modules that define them")
        self.app, adapters = app, app.adapters()
        super().__init__("worker", adapters, app.settings, [self._declare, *app.chores])
        self._hook = guard(app.hooks) if app.hooks else None
        store, receiver = adapters.store, app.receiver()
        dispatcher = Dispatcher(adapters.broker.publisher(), adapters.scheduler, self.settings.publish_timeout)
        self.protocol = Protocol(
            Executor(app.handlers, store, self._hook),
            dispatcher,
            Settler(app.handlers, store, adapters.scheduler, dispatcher, receiver, self._hook, adapters.worker),
        )
        self.intake = Intake(app.name, adapters.scheduler, receiver, self.protocol)
        self.runner = self._runner()
        self._pause = 0.0
        self._seen = time.monotonic()  # when the last turn began
        self._watched: dict[int, float] = {}  # when the handlers that run count as slow
        self._undeclared = False  # which was logged
        self._declare()

    def _runner(self) -> HandlerRunner:
        app = self.app
        together = max(handler.batch for handler in app.handlers.values())
        if not app.is_async:
            return Groups(self.protocol, max(self.settings.group, together), self.intake, self._stop)
        from idemp.worker.tasks import Tasks

        store = app.async_store()
        limit = store.limit(self.settings.concurrency)
        return Tasks(self.protocol, self.intake, self._stop, self.fail, store, limit, max(limit, together))

    def _declare(self) -> None:
        """Declare the queue of the app; later, if the broker is away, or so full that only consumption frees space."""
        try:
            self.app.declare()
        except Unavailable as error:
            if self._threads and not self._pause and not self._undeclared:  # else there is a line about it already
                log("queue.undeclared", queue=self.app.name, error=error)
                self._undeclared = True

    def run(self) -> None:
        """Consume until `stop`; then finish what runs, and give the rest back."""
        self.runner.serve(super().run)

    def log_start(self) -> None:
        """Log which queue is consumed, and which types are not opted in or not handled."""
        plain = [name for name, handler in sorted(self.app.handlers.items()) if not handler.opted_in]
        if plain:
            log("worker.plain", types=", ".join(plain))
        if self.app.unhandled:
            log("worker.configured", types=", ".join(self.app.unhandled))
        log("worker.started", queue=self.app.name)

    def step(self, *, poll: float = POLL) -> int:
        """Run one turn, and return how many deliveries it took: what was held, or what is due and what the broker has.

        Args:
            poll: Seconds to wait for deliveries.
        """
        taken, self._seen, intake = 0, time.monotonic(), self.intake
        try:
            deliveries = intake.take(self.runner, poll)
            taken = len(deliveries)
            self.runner.run(deliveries)
        except Exception as error:
            intake.take_back(self.runner.accepted)
            if not isinstance(error, Unavailable) and self.adapters.store.classify(error) is None:
                raise
            intake.obstacle = describe_error(error)
            self.pause()
        else:
            if intake.held:
                intake.take_back(self.runner.accepted)
                self.pause()
            elif self._pause and (self.runner.settled or not self.runner.in_hand):
                log("worker.resumed")
                self._pause = 0.0
        return taken

    def pause(self) -> None:
        """Pause consumption, longer each time."""
        if not self._pause:
            log("worker.paused", error=self.intake.obstacle)
            if self._hook is not None:
                self._hook("on_hold", self.intake.obstacle)
        self._pause = min(LONGEST_PAUSE, self._pause * 2 or 0.1)
        until = time.monotonic() + self._pause
        while time.monotonic() < until and not self._stop.asked:
            time.sleep(min(0.1, self._pause))

    def finish(self) -> None:
        """Let handlers come to their end."""
        self.runner.finish()

    def stop(self) -> None:
        """End `run` after the handler that runs. Safe in a signal handler."""
        super().stop()
        self.intake.receiver.wake()

    def fail(self, error: BaseException) -> None:
        """End `run` with an error of another thread."""
        super().fail(error)
        self.intake.receiver.wake()

    def close(self) -> None:
        """Give back what was not handled, and say goodbye. A worker that died does neither."""
        scheduler, publisher = self.adapters.scheduler, self.protocol.dispatcher.publisher
        steps = [
            self.protocol.complete,
            self.intake.receiver.close,
            scheduler.release,
            lambda: scheduler.beat("worker", stopping=True),
            self.relay.publisher.close,
        ]
        for step in (*steps, *([publisher.close] if publisher is not None else [])):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - leases run out, and others take over
                log("worker.left", error=error)

    def status(self) -> dict[str, Any]:
        """Return the status for health checks. The consuming thread is not judged while a handler runs."""
        silent = {thread.name.removeprefix("idemp-"): thread.silent for thread in self._threads}
        executor = self.protocol.executor  # of an event loop's tasks, each has one of its own
        silent["consuming"] = 0.0 if executor.running else time.monotonic() - max(self._seen, executor.seen)
        away = next((f"{each.name} pauses" for each in self._threads if each.away), "")
        obstacle = self.intake.obstacle if self._pause else away
        return status(silent, obstacle=obstacle, stopping=self._stop.asked, running=self.running)

    @property
    def running(self) -> str:
        """Types of the messages whose handlers run."""
        return type_names(self.runner.running())

    def beat(self, *, stopping: bool) -> None:
        """Show life, and keep what the broker has delivered."""
        super().beat(stopping=stopping)
        self.intake.receiver.keep_alive()

    def upkeep(self) -> None:
        """Show life in time, log slow handlers, and end the process when its grace time is over."""
        now = time.monotonic()
        self.watch(now)
        self.runner.watch(now)
        super().upkeep()

    def watch(self, now: float) -> None:
        """Log a handler that runs for long, once."""
        watched, self._watched = self._watched, {}
        for handling in self.runner.running():
            timeout = handling.handler.timeout if handling.handler is not None else None
            limit = SLOW if timeout is None else min(SLOW, timeout)
            slow_at = watched.get(id(handling), now + limit)
            if now >= slow_at:
                log("handler.slow", type=_type(handling), id=handling.delivery.properties.get("message_id"), seconds=limit)
                slow_at = NEVER
            self._watched[id(handling)] = slow_at


def _type(handling: Handling) -> str:
    return handling.handler.type if handling.handler is not None else ""


def type_names(handlings: Sequence[Handling]) -> str:
    """Return the types of messages.

    Example:
        >>> type_names([])
        ''
    """
    return ", ".join(sorted({_type(handling) for handling in handlings}))
