"""`idemp worker`, `idemp relay`: processes that run until they are told to stop."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idemp.cli.command import Broker, BrokerName, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.wiring import configured_app, configured_apps, existing_broker, open_store, settings_of
from idemp.health import Health
from idemp.settings import Settings
from idemp.startup import agree_broker, check_not_per_entity
from idemp.telemetry import together
from idemp.telemetry.wiring import metrics_by, tell_pending, traces_if

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.broker.port import Publisher
    from idemp.inbox.port import InboxStore
    from idemp.relay import Relay
    from idemp.telemetry import Telemetry

log = logging.getLogger("idemp.cli")

_BEAT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0


def add_to(group: typer.Typer) -> None:
    """Register the verbs."""
    verb(group, "worker", log_level="info")(worker)
    verb(group, "relay", log_level="info")(relay)


def worker(
    screen: Screen,
    apps: Annotated[list[str], typer.Argument(metavar="MODULE:APP...", help="What to run.")],
    *,
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="Worker processes.")] = 1,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=256, help="Consuming threads per app.")] = None,
    no_relay: Annotated[bool, typer.Option("--no-relay", help="Leave pending outputs to others.")] = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", help="Stop then, too.")] = False,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Consume: run the handlers of apps, and a relay beside them.

    SIGTERM or SIGINT lets running handlers finish and gives the rest back; a second one ends it at once.
    """
    if processes > 1:
        from idemp.cli.supervisor import Supervisor, child_command

        supervisor = Supervisor(child_command(sys.argv[1:]), processes)
        stopped_by = until_stopped(supervisor.stop, supervisor.run, supervisor.kill)
        screen.result({"processes": processes, "stopped_by": stopped_by, "exit_code": supervisor.exit_code})
        raise typer.Exit(supervisor.exit_code)
    from idemp.worker import Worker

    made = configured_apps(apps, database=database, broker=broker, schema=schema, prefix=prefix)
    running = Worker(made, threads=threads, relay=False if no_relay else None)
    if until_stdin_closes:
        threading.Thread(target=_stop_at_end_of_stdin, args=(running.stop,), daemon=True).start()
    # What is loaded by now stays; each full collection would look through all of it, in the middle of a batch.
    gc.collect()
    gc.freeze()
    stopped_by = until_stopped(running.stop, running.run, last_words=running.tell_abandoned)
    log.info("worker stopped", extra={"event": "worker_stopped", "by": stopped_by})
    screen.result({"consumers": [app.name for app in made], "stopped_by": stopped_by})


def relay(
    screen: Screen,
    app: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="Whose database and broker.")] = None,
    *,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", help="Stop then, too.")] = False,
    database: Database = None,
    broker: Broker = None,
    broker_name: BrokerName = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Ship the pending outputs of one broker, and nothing else. Several relays may run on one database."""
    options = {
        "database": database,
        "broker": broker,
        "broker_name": broker_name,
        "schema": schema,
        "prefix": prefix,
    }
    found = configured_app(app, **options) if app is not None else settings_of(**options)
    settings, store = (found, open_store(found)) if isinstance(found, Settings) else (found.settings, found.store)
    check_not_per_entity(
        store, "A relay", "Leave it out: what pends is sent by its message, which comes again until then."
    )
    store.verify()
    shipping_to = existing_broker(found)
    agree_broker(store, shipping_to)
    running: list[Relay] = []
    silence = settings.health_timeout + settings.relay_interval

    def probe() -> Health:
        return running[0].health(silence) if running else Health(waiting=["starting"])

    with metrics_by(settings, probe) as metrics:
        stopped_by = _relay(
            settings, store, shipping_to.publisher(), metrics, running, until_stdin_closes=until_stdin_closes
        )
    screen.result({"stopped_by": stopped_by})


def _relay(
    settings: Settings,
    store: InboxStore,
    publisher: Publisher,
    metrics: Telemetry,
    running: list[Relay],
    *,
    until_stdin_closes: bool,
) -> str | None:
    from idemp.relay import Relay

    telemetry = together(metrics, traces_if(wanted=settings.traces))
    stop = threading.Event()
    if until_stdin_closes:
        threading.Thread(target=_stop_at_end_of_stdin, args=(stop.set,), daemon=True).start()
    _beat(store, telemetry)
    beating = threading.Thread(
        target=_keep_beating, args=(store, publisher, telemetry, stop), name="idemp-beat", daemon=True
    )
    beating.start()
    log.info("relay runs", extra={"event": "relay_runs"})
    shipping = Relay(
        store.upkeep,
        publisher,
        lease=settings.relay_lease,
        max_attempts=settings.output_attempts,
        telemetry=telemetry,
    )
    running.append(shipping)
    try:
        return until_stopped(stop.set, lambda: shipping.run(stop, settings.relay_interval))
    finally:
        stop.set()
        beating.join()
        publisher.close()
        store.upkeep.retire(store.worker)


def until_stopped(
    stop: Callable[[], object],
    run: Callable[[], object],
    kill: Callable[[], object] | None = None,
    last_words: Callable[[], object] | None = None,
) -> str | None:
    """Run; the first signal asks to stop, the second one ends the process. The name of the signal, if one came."""
    came: list[str] = []

    def on_signal(number: int, _: object) -> None:
        if came:
            if kill is not None:
                kill()
            _say_last(signal.Signals(number).name, last_words)
            os._exit(ExitCode.INTERRUPTED)
        came.append(signal.Signals(number).name)
        log.info("%s: stopping", came[0], extra={"event": "stopping", "signal": came[0]})
        stop()

    former: dict[int, Any] = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return came[0] if came else None


def _say_last(name: str, last_words: Callable[[], object] | None) -> None:
    """In a thread of its own, for a second at most: perhaps nobody reads the log, or somebody holds its lock for good."""

    def say() -> None:
        log.warning("%s again: ended at once", name, extra={"event": "stopped_at_once", "signal": name})
        if last_words is not None:
            last_words()

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(_LAST_WORDS_SECONDS)


def _stop_at_end_of_stdin(stop: Callable[[], object]) -> None:
    """Whoever started this process holds the other end, which the kernel closes when that process dies."""
    while os.read(0, 4096):
        pass
    log.info("stdin closed: stopping", extra={"event": "stopping", "signal": None})
    stop()


def _beat(store: InboxStore, telemetry: Telemetry) -> None:
    store.upkeep.beat(store.worker, relay=True, consumers=[])
    tell_pending(telemetry, [store.upkeep])


def _keep_beating(store: InboxStore, publisher: Publisher, telemetry: Telemetry, stop: threading.Event) -> None:
    from idemp.errors import StoreError

    while not stop.wait(_BEAT_SECONDS):
        publisher.keep_alive()
        try:
            _beat(store, telemetry)
        except StoreError as error:
            log.warning("no heartbeat: %s", error, extra={"event": "beat_failed", "consumer": None})
    with suppress(StoreError):
        store.upkeep.announce_pending()  # the relay waits for outputs, not for the end
