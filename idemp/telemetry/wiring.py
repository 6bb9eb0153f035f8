"""From settings to telemetry: which parts are on, and the port that serves the metrics."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from idemp.errors import ConfigurationError, StoreError
from idemp.health import Health, Probe
from idemp.inbox.port import PendingState
from idemp.settings import PROCESS_VARIABLE
from idemp.showing import logger
from idemp.telemetry import SILENT, Telemetry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from idemp.inbox.port import Upkeep
    from idemp.settings import Settings

log = logger("idemp.telemetry")

_LAST_PORT: Final = 65_535


def traces_if(*, wanted: bool) -> Telemetry:
    """Traces, if they are wanted and OpenTelemetry is installed.

    Example:
        >>> traces_if(wanted=False) is SILENT
        True
    """
    if not wanted:
        return SILENT
    try:
        from idemp.telemetry.opentelemetry import Traces
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        return SILENT
    return Traces()


@contextmanager
def metrics_by(settings: Settings, probe: Probe = Health) -> Iterator[Telemetry]:
    """Serve `/metrics`, `/health` and `/ready` while the block runs, if `metrics_port` is set.

    Args:
        settings: with the port.
        probe: what `/health` and `/ready` ask.

    Raises:
        ConfigurationError: the extra is missing, or the port can't be listened on.

    Example:
        >>> from idemp.settings import Settings
        >>> with metrics_by(Settings()) as telemetry:
        ...     telemetry is SILENT
        True
    """
    port = port_of(settings)
    if port is None:
        yield SILENT
        return
    try:
        from prometheus_client import start_http_server

        from idemp.telemetry.probes import with_probes
        from idemp.telemetry.prometheus import Metrics
    except ImportError as error:
        raise ConfigurationError(
            "metrics_port is set, and prometheus-client is not installed.", fix="pip install 'idemp[prometheus]'"
        ) from error
    metrics, host = Metrics(), settings.metrics_host
    try:
        server, thread = start_http_server(port, addr=host, registry=metrics.registry)
    except OSError as error:
        raise ConfigurationError(
            f"Metrics can't be served on {host}:{port}: {error.strerror or error}.",
            fix="Set metrics_port (IDEMP_METRICS_PORT) to a free port, or 0 for any; the n-th of several processes takes "
            "the n-th port from there.",
        ) from error
    server.set_app(with_probes(server.get_app(), probe))  # type: ignore[arg-type]
    try:
        url = f"http://{host}:{server.server_port}/metrics"
        log.info("metrics on %s", url, extra={"event": "metrics_served", "url": url})
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tell_pending(telemetry: Telemetry, upkeeps: Iterable[Upkeep]) -> None:
    """Read what waits in these databases, if somebody wants to know; an outage is told by the heartbeat's own failure."""
    if not telemetry.reads_state:
        return
    try:
        states = [upkeep.pending_state() for upkeep in upkeeps]
    except StoreError as error:
        log.debug("pending outputs not counted: %s", error)
        return
    telemetry.pending(
        PendingState(
            count=sum(state.count for state in states),
            quarantined=sum(state.quarantined for state in states),
            oldest_seconds=max((state.oldest_seconds for state in states), default=0.0),
        )
    )


def port_of(settings: Settings) -> int | None:
    """The port of this process's metrics, `None` for none.

    Raises:
        ConfigurationError: it would lie beyond the last one.

    Example:
        >>> from idemp.settings import Settings
        >>> port_of(Settings(metrics_port=9464))
        9464
    """
    if not settings.metrics_port:
        return settings.metrics_port
    number = os.environ.get(PROCESS_VARIABLE, "")
    port = settings.metrics_port + (int(number) if number.isdecimal() else 0)
    if port > _LAST_PORT:
        raise ConfigurationError(
            f"There is no port {port} for the metrics of process {number}.", fix="Set a lower metrics_port."
        )
    return port
