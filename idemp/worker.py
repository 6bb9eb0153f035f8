"""A worker process: consuming threads, and the upkeep that runs beside them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from idemp.consuming import LONGEST_PAUSE, Consuming, KeptAlive
from idemp.effects.runner import EffectRunner
from idemp.errors import HandlerError, StoreError, StoreReplaced
from idemp.health import Handling, Health
from idemp.relay import Relay
from idemp.retention import NEVER, Cleaner
from idemp.showing import described, logger
from idemp.startup import check_handlers, check_partitions
from idemp.suspects import Turns
from idemp.telemetry.wiring import metrics_by, tell_pending
from idemp.twophase import Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from idemp.app import App

log = logger("idemp.worker")

BEAT_SECONDS: Final = 5.0
LONG_SECONDS: Final = 60.0
"""From then on a running handler is named by `/health` and in the log."""
_KEEP_ALIVE_SECONDS: Final = 5.0


class Worker:
    """Runs apps that share a process: `threads` consuming threads each, their effects, a relay, a cleaner, heartbeats.

    Args:
        apps: what to run; each has been started or is by `run`.
        threads: consuming threads per app; default from the first app's settings.
        relay: whether to ship pending outputs, too; default from the settings.

    Example:
        >>> from idemp import App
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> app = App("orders", store=InMemoryStore(), broker=InMemoryBroker())
        >>> @app.handler(dict, type="orders.Ping")
        ... def ping(message: dict[str, object]) -> None: ...
        >>> worker = Worker([app])
        >>> worker.stop()
        >>> worker.run()
    """

    def __init__(self, apps: Sequence[App], *, threads: int | None = None, relay: bool | None = None) -> None:
        settings = apps[0].settings
        self.apps = tuple(apps)
        self._threads = threads or settings.threads
        self._relay = settings.relay if relay is None else relay
        self._stop = threading.Event()
        self._asked = threading.Event()  # by the operator, not by a thread that ended
        self._idle = threading.Event()  # nothing is consumed any more, nor will be
        self._fatal: BaseException | None = None
        self._consuming: list[Consuming] = []
        self._effect_runners: list[EffectRunner] = []
        self._kept = KeptAlive()
        self._beatless: set[App] = set()  # one line in the log for each outage
        self._reported: set[tuple[Consuming, float]] = set()  # one line in the log for each handler that runs for long
        self._turns = Turns(solitary=len(self.apps) * self._threads == 1, stop=self._asked)

    def stop(self) -> None:
        """Ask the worker to end: running handlers finish within the grace time, everything else is given back."""
        self._asked.set()
        self._stop.set()

    def health(self) -> Health:
        """Return whether the process is alive and consumes; called from other threads.

        An outage of a server makes it not ready, and a restart would not help: it stays alive.
        """
        settings, now, health = self.apps[0].settings, time.monotonic(), Health()
        limit = settings.health_handler_timeout
        if self._stop.is_set():
            health.waiting.append("stopping")
        elif len(self._consuming) < len(self.apps) * self._threads:
            health.waiting.append("starting")
        for each in list(self._consuming):
            (consumer, types), since = each.in_hand(), each.handling_since
            if since is not None:
                seconds = now - since
                if seconds > LONG_SECONDS:
                    health.handling.extend(Handling(consumer, kind, seconds) for kind in types)
                if limit is not None and seconds > limit.total_seconds():
                    health.problems.append(f"{consumer}: a handler has been running for {seconds:.0f} s")
            elif now - each.alive_at > settings.health_timeout.total_seconds() and not self._stop.is_set():
                silent = f"a consuming thread has shown no sign of life for {now - each.alive_at:.0f} s"
                health.problems.append(f"{consumer}: {silent}")
            elif each.away is not None:
                health.waiting.append(f"{consumer}: {each.away} is away")
        if any(runner.held_up for runner in list(self._effect_runners)):
            health.problems.append("so many effects run on past their timeouts that others don't begin")
        health.waiting.extend(f"{app.name}: the database takes no heartbeat" for app in list(self._beatless))
        return health

    def tell_abandoned(self) -> None:
        """Log each delivery that is still running: the end of the process cuts it off."""
        for each in list(self._consuming):
            each.tell_abandoned()

    def run(self) -> None:
        """Consume until `stop` is called.

        Raises:
            ConfigurationError: found at start; nothing was consumed.
            StoreUnavailable: at start; nothing was consumed.
            BrokerUnavailable: at start; nothing was consumed.
            StoreReplaced: the database's file was deleted or replaced; what was not acked comes again.
            BrokerReplaced: likewise the embedded broker's.
            HandlerError: a handler raised what is no `Exception`, such as `SystemExit`; its message returned to the queue.
        """
        with metrics_by(self.apps[0].settings, self.health) as metrics:
            check_partitions(self.apps)
            for app in self.apps:
                check_handlers(app)
            for app in self.apps:
                app.observe(metrics)
                app.start()
            names = ", ".join(f"{app.name} (queue {app.queue})" for app in self.apps)
            consumers = [app.name for app in self.apps]
            log.info("worker starts: %s", names, extra={"event": "worker_runs", "consumers": consumers})
            self._run()

    def _run(self) -> None:
        consuming = [
            self._thread(partial(self._consume, app), f"{app.name}-{number}")
            for app in self.apps
            if app.registry.declared
            for number in range(self._threads)
        ]
        effects = [
            self._thread(partial(self._run_effects, app), f"effects-{app.name}-{number}")
            for app in self.apps
            if app.registry.effects
            for number in range(app.settings.effect_threads)
        ]
        beside = [self._thread(self._beat, "beat"), self._thread(self._keep_alive, "keep-alive")]
        beside.extend(self._thread(partial(self._clean, app), f"clean-{app.name}") for app in self._distinct())
        if self._relay:
            beside.extend(self._thread(partial(self._run_relay, app), f"relay-{app.name}") for app in self._distinct())
        beside.extend(
            self._thread(partial(self._check_prepared, app), f"prepared-{app.name}")
            for app in self.apps
            if app.prepared
        )
        beside.extend(self._recovering())
        self._beat_once()
        for thread in (*consuming, *effects, *beside):
            thread.start()
        self._stop.wait()
        for each in list(self._consuming):  # what is only waiting here need not wait for running handlers
            each.cancel()
        deadline = time.monotonic() + self.apps[0].settings.grace.total_seconds()
        self._wake_effects()
        for thread in (*consuming, *effects):
            thread.join(max(0.0, deadline - time.monotonic()))
        self.tell_abandoned()
        self._idle.set()
        for thread in beside:
            thread.join(LONGEST_PAUSE)
        self._retire()
        ended_by = (each.ended_by for each in self._consuming if each.ended_by is not None)
        self._fatal = self._fatal or next(ended_by, None)  # a thread may still be closing its connection
        if self._fatal is not None and not isinstance(self._fatal, Exception):  # an exit's code is not ours either
            raise HandlerError(
                f"A handler ended the process: {described(self._fatal)}.",
                fix="Raise Refuse to park a message, or an Exception to have it tried again.",
            ) from self._fatal
        if self._fatal is not None:
            raise self._fatal

    def _consume(self, app: App) -> None:
        consuming = Consuming(app, self._stop, self._kept, self._turns)
        self._consuming.append(consuming)
        consuming.run()

    # Beside it ------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beat_once()
            self._report_long_handlers()
        if self._relay:
            self._wake_relays()

    def _beat_once(self) -> None:
        for app in self.apps:
            try:
                app.store.upkeep.beat(app.store.worker, relay=self._relay, consumers=app.consumers())
                app.store.refresh_horizons(app.name, app.retentions().values())
            except StoreReplaced:
                raise
            except StoreError as error:
                if app not in self._beatless:
                    log.warning("no heartbeat: %s", error, extra={"event": "beat_failed", "consumer": app.name})
                self._beatless.add(app)
            else:
                if app in self._beatless:
                    log.info("heartbeats arrive again", extra={"event": "beat_again", "consumer": app.name})
                self._beatless.discard(app)
        tell_pending(self.apps[0].telemetry, [app.store.upkeep for app in self._distinct()])

    def _report_long_handlers(self) -> None:
        now, running = time.monotonic(), [(each, each.handling_since) for each in self._consuming]
        late = {(each, since) for each, since in running if since is not None and now - since > LONG_SECONDS}
        for each, since in late - self._reported:
            each.report_long(now - since)
        self._reported = late

    def _wake_relays(self) -> None:
        """They wait for outputs, not for the end; what they miss by an error here is one interval."""
        for app in self._distinct():
            with suppress(StoreError):
                app.store.upkeep.announce_pending()

    def _wake_effects(self) -> None:
        """As relays: those that wait have nothing to finish."""
        for app in self.apps:
            if app.registry.effects:
                app.store.announce_effects()

    def _retire(self) -> None:
        for app in self.apps:
            try:
                app.store.upkeep.retire(app.store.worker)
            except StoreError as error:
                log.warning(
                    "heartbeat not taken back: %s", error, extra={"event": "retire_failed", "consumer": app.name}
                )
            app.close()

    def _keep_alive(self) -> None:
        # Through the grace time, too: a running handler's connection must last until its ack.
        while not self._idle.wait(_KEEP_ALIVE_SECONDS):
            self._kept.keep_alive()

    def _clean(self, app: App) -> None:
        cleaners = [
            Cleaner(other.store.upkeep, consumer, _purged(other), telemetry=other.telemetry)
            for other in self._sharing(app)
            for consumer in other.consumers()
        ]
        while not self._stop.wait(app.settings.purge_interval.total_seconds()):
            for cleaner in cleaners:
                cleaner.run(self._stop)

    def _run_relay(self, app: App) -> None:
        publisher = app.broker.publisher()
        with self._kept.while_used(publisher):
            lease = app.settings.relay_lease
            attempts = app.settings.output_attempts
            relay = Relay(
                app.store.upkeep,
                publisher,
                lease=lease,
                max_attempts=attempts,
                telemetry=app.telemetry,
            )
            relay.run(self._stop, app.settings.relay_interval)
            publisher.close()

    def _check_prepared(self, app: App) -> None:
        if app.prepared is not None:
            with self._kept.while_used(app.prepared.publishers):
                app.prepared.run(self._stop)
            app.prepared.close()

    def _recovering(self) -> Iterator[threading.Thread]:
        """The first round is over before anything is consumed, which would wait for what is in doubt."""
        for app in self.apps:
            if app.coordinator is not None:
                recovery = Recovery(app.coordinator)
                recovery.keep_up()
                rounds = partial(recovery.run, self._stop, app.settings.recover_interval)
                yield self._thread(rounds, f"recover-{app.name}")

    def _run_effects(self, app: App) -> None:
        name, *former = app.consumers()
        runner = EffectRunner(app.store.upkeep, name, app.registry.effects, former=former, telemetry=app.telemetry)
        self._effect_runners.append(runner)
        runner.run(self._stop, app.settings.relay_interval)

    def _distinct(self) -> list[App]:
        """One app per store: relays and cleaners work on databases, not on consumers."""
        return [app for app in self.apps if self._sharing(app)[0] is app]

    def _sharing(self, app: App) -> list[App]:
        return [other for other in self.apps if other.store is app.store]

    # Threads --------------------------------------------------------------------------------------------------------

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - raised again by run()
                said = described(error)
                log.critical("worker thread %s ended: %s", name, said, extra={"event": "worker_failed", "by": name})
                self._fatal = self._fatal or error
                self._stop.set()

        return threading.Thread(target=guarded, name=f"idemp-{name}", daemon=True)


def _purged(app: App) -> Mapping[str, timedelta]:
    """After which time claims are deleted. Where that is left to the archive, the cleaner still makes daily tables ahead."""
    windows = app.retentions()
    return windows if app.settings.purge else dict.fromkeys(windows, NEVER)
