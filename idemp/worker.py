"""A worker process: consuming threads, and the upkeep that runs beside them."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from idemp.broker.port import Release
from idemp.deliverylog import tell
from idemp.errors import BrokerUnavailable, HandlerError, IdempError, StoreError, StoreUnavailable
from idemp.relay import Relay
from idemp.retention import Cleaner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.app import App
    from idemp.broker.port import Delivery, Publisher, Receiver, Settlement
    from idemp.protocol import Outcome

log = logging.getLogger("idemp.worker")

BEAT_SECONDS: Final = 5.0
_KEEP_ALIVE_SECONDS: Final = 5.0
_RECEIVE_SECONDS: Final = 0.25
_LONGEST_PAUSE: Final = 5.0


class _Alive(Protocol):
    def keep_alive(self) -> None: ...


class Worker:
    """Runs apps that share a process: `threads` consuming threads each, a relay, a cleaner, heartbeats.

    Args:
        apps: what to run; each has been started or is by `run`.
        threads: consuming threads per app; default from the first app's settings.
        relay: whether to ship pending outputs, too; default from the settings.

    Example:
        >>> from idemp import App
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> worker = Worker([App("orders", store=InMemoryStore(), broker=InMemoryBroker())])
        >>> worker.stop()
        >>> worker.run()
    """

    def __init__(self, apps: Sequence[App], *, threads: int | None = None, relay: bool | None = None) -> None:
        settings = apps[0].settings
        self.apps = tuple(apps)
        self._threads = threads or settings.threads
        self._relay = settings.relay if relay is None else relay
        self._stop = threading.Event()
        self._fatal: BaseException | None = None
        self._alive: set[_Alive] = set()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Ask the worker to end: running handlers finish within the grace time, everything else is given back."""
        self._stop.set()

    def run(self) -> None:
        """Consume until `stop` is called.

        Raises:
            ConfigurationError: found at start; nothing was consumed.
            StoreUnavailable: at start; nothing was consumed.
            BrokerUnavailable: at start; nothing was consumed.
            BaseException: whatever a handler raised beyond `Exception`; its message returned to the queue.
        """
        for app in self.apps:
            app.start()
        consuming = [
            self._thread(partial(self._consume, app), f"{app.name}-{number}")
            for app in self.apps
            for number in range(self._threads)
        ]
        beside = [self._thread(self._beat, "beat"), self._thread(self._keep_alive, "keep-alive")]
        beside.extend(self._thread(partial(self._clean, app), f"clean-{app.name}") for app in self._distinct())
        if self._relay:
            beside.extend(self._thread(partial(self._run_relay, app), f"relay-{app.name}") for app in self._distinct())
        self._beat_once()
        for thread in (*consuming, *beside):
            thread.start()
        self._stop.wait()
        deadline = time.monotonic() + self.apps[0].settings.grace.total_seconds()
        for thread in consuming:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in beside:
            thread.join(_LONGEST_PAUSE)
        self._retire()
        if isinstance(self._fatal, SystemExit):  # its code is not ours
            raise HandlerError(f"A handler ended the process: {self._fatal!r}.", fix="Raise Refuse instead.")
        if self._fatal is not None:
            raise self._fatal

    # Consuming ------------------------------------------------------------------------------------------------------

    def _consume(self, app: App) -> None:
        publisher = app.broker.publisher()
        protocol = app.protocol(publisher)
        with self._kept_alive(publisher):
            pause = _Pause(self._stop)
            while not self._stop.is_set():
                try:
                    self._consume_connected(app, protocol.handle, protocol.dispatcher.flush_if_due, pause)
                except BrokerUnavailable as error:
                    pause.after(f"{app.name}: the broker is away", error)
            protocol.dispatcher.flush()
            publisher.close()

    def _consume_connected(
        self,
        app: App,
        handle: Callable[[Delivery], tuple[Outcome, Settlement]],
        flush: Callable[[], None],
        pause: _Pause,
    ) -> None:
        receiver = app.broker.receiver([app.queue], prefetch=app.settings.prefetch)
        try:
            with self._kept_alive(receiver):
                while not self._stop.is_set():
                    delivery = receiver.receive(_RECEIVE_SECONDS)
                    pause.over(f"{app.name}: the broker is back")
                    if delivery is not None:
                        receiver.settle(delivery, self._settled(app, delivery, handle))
                    flush()
        finally:
            receiver.close()

    def _settled(
        self, app: App, delivery: Delivery, handle: Callable[[Delivery], tuple[Outcome, Settlement]]
    ) -> Settlement:
        """Run a delivery; while the database is away it is held, and consumption with it."""
        pause = _Pause(self._stop)
        while not self._stop.is_set():
            try:
                outcome, settlement = handle(delivery)
            except StoreUnavailable as error:
                pause.after(f"{app.name}: the database is away, consumption pauses", error)
                continue
            except BaseException as error:
                log.critical(
                    "%s: handling %s %s ended the worker: %r",
                    app.name,
                    delivery.message.type,
                    delivery.message.message_id,
                    error,
                    extra={"event": "handler_ended_worker", "message_id": delivery.message.message_id},
                )
                raise
            pause.over(f"{app.name}: the database is back")
            tell(app.name, delivery, outcome, settlement)
            return settlement
        return Release()

    # Beside it ------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beat_once()

    def _beat_once(self) -> None:
        for app in self.apps:
            try:
                app.store.upkeep.beat(app.store.worker, relay=self._relay, consumers=app.consumers())
                app.store.refresh_horizons(app.name, app.retentions().values())
            except StoreError as error:
                log.warning("no heartbeat: %s", error, extra={"event": "beat_failed"})

    def _retire(self) -> None:
        for app in self.apps:
            try:
                app.store.upkeep.retire(app.store.worker)
            except StoreError as error:
                log.warning("heartbeat not taken back: %s", error, extra={"event": "retire_failed"})
            app.close()

    def _keep_alive(self) -> None:
        while not self._stop.wait(_KEEP_ALIVE_SECONDS):
            with self._lock:
                parties = list(self._alive)
            for party in parties:
                party.keep_alive()

    def _clean(self, app: App) -> None:
        cleaners = [
            Cleaner(other.store.upkeep, consumer, other.retentions())
            for other in self._sharing(app)
            for consumer in other.consumers()
        ]
        while not self._stop.wait(app.settings.purge_interval.total_seconds()):
            for cleaner in cleaners:
                cleaner.run(self._stop)

    def _run_relay(self, app: App) -> None:
        publisher = app.broker.publisher()
        with self._kept_alive(publisher):
            lease = app.settings.relay_lease
            relay = Relay(app.store.upkeep, publisher, lease=lease, timeout=lease / 2)
            relay.run(self._stop, app.settings.relay_interval)
            publisher.close()

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
                log.critical("worker thread %s ended: %r", name, error, extra={"event": "worker_failed"})
                self._fatal = self._fatal or error
                self._stop.set()

        return threading.Thread(target=guarded, name=f"idemp-{name}", daemon=True)

    def _kept_alive(self, party: Receiver | Publisher) -> _KeptAlive:
        return _KeptAlive(party, self._alive, self._lock)


class _KeptAlive:
    """While the block runs, the party's heartbeats are serviced from another thread."""

    def __init__(self, party: _Alive, parties: set[_Alive], lock: threading.Lock) -> None:
        self._party, self._parties, self._lock = party, parties, lock

    def __enter__(self) -> None:
        with self._lock:
            self._parties.add(self._party)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._parties.discard(self._party)


class _Pause:
    """Growing pauses during an outage: one log line when it begins, one when it is over."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._seconds = 0.0

    def after(self, what: str, error: IdempError) -> None:
        if self._seconds == 0:
            log.warning("%s: %s", what, error, extra={"event": "outage"})
        self._seconds = min(_LONGEST_PAUSE, self._seconds * 2 or 0.1)
        self._stop.wait(self._seconds)

    def over(self, what: str) -> None:
        if self._seconds:
            log.info(what, extra={"event": "outage_over"})
        self._seconds = 0.0
