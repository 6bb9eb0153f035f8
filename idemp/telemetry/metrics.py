"""Metrics for Prometheus: counters of workers, which survive a killed process, and gauges of waiting messages and outputs."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from idemp.app import App
from idemp.errors import ConfigurationError, Unavailable, needs
from idemp.events import log
from idemp.handling import Handling
from idemp.hooks import Hooks
from idemp.sql.engine import Database
from idemp.sql.records.waiting import Waiting, read_waiting
from idemp.telemetry.catalogue import METRICS
from idemp.worker.server import Page, Server

with needs("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, values
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector

__all__ = ["Metrics", "MetricsServer"]

EVERY: Final = 5.0  # minimum seconds between reads of the tables
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
NUMBER: Final = "_IDEMP_PROCESS"
BY_QUEUE: Final = {
    "idemp_messages": "messages",
    "idemp_retries": "retries",
    "idemp_retries_due": "due",
    "idemp_dead_letters": "dead",
    "idemp_queue_overdue_seconds": "overdue",
}
"""Gauges of queues, and the field of `WaitingQueue` that each shows."""
UNKNOWN: Final = "unknown"
"""Label for types that no handler takes: producers choose their names, so their number is unlimited."""

if NUMBER in os.environ:  # a restarted process continues the counts of the one that died
    values.ValueClass = values.MultiProcessValue(lambda: os.environ[NUMBER])  # type: ignore[no-untyped-call]


@cache
def _metric(name: str) -> Any:
    metric = METRICS[name]
    if metric.kind == "counter":
        return Counter(name, metric.text, metric.labels)
    return Histogram(name, metric.text, metric.labels, buckets=BUCKETS)


class Metrics(Hooks):
    """Counts deliveries, handlings, outputs and pauses of a worker. `idemp worker` adds it if `metrics_port` is set.

    Args:
        consumer: Name of the app.

    Example:
        >>> app = App("orders", hooks=[Metrics("orders")])
    """

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        for metric in METRICS.values():
            if metric.kind != "gauge":
                _metric(metric.name)

    def before_handle(self, handling: Handling) -> None:
        """Store the start time."""
        handling.notes["started"] = time.monotonic()

    def after_commit(self, handling: Handling) -> None:
        """Count a handling and its outputs."""
        labels = self._labels(handling)
        _metric("idemp_handled_total").labels(*labels).inc()
        _metric("idemp_outputs_total").labels(*labels).inc(len(handling.outputs))
        if (started := handling.notes.get("started")) is not None:
            _metric("idemp_handling_seconds").labels(*labels).observe(time.monotonic() - started)

    def on_hold(self, reason: str) -> None:  # noqa: ARG002 - a label would have too many values
        """Count a pause."""
        _metric("idemp_holds_total").labels(self._consumer).inc()

    def on_settled(self, handling: Handling) -> None:
        """Count a delivery."""
        labels = self._labels(handling)
        if handling.decision is not None:
            _metric("idemp_failures_total").labels(*labels, handling.decision.rule.name).inc()
        verdict = handling.verdict.value.replace(" ", "_") if handling.verdict is not None else "none"
        _metric("idemp_deliveries_total").labels(*labels, verdict, handling.outcome).inc()

    def _labels(self, handling: Handling) -> tuple[str, str]:
        return self._consumer, handling.handler.type if handling.handler is not None else UNKNOWN


class MetricsServer:
    """Answers `GET /metrics` for all processes of a worker, with the metrics of handlers in the default registry, too.

    Args:
        app: The app, whose settings have the address and the database.
        processes: Number of worker processes; with several, their counts are shared by files.

    Attributes:
        port: TCP port on which the server listens.

    Raises:
        ConfigurationError: The address cannot be used.

    Example:
        >>> from idemp import Settings
        >>> from urllib.request import urlopen
        >>> server = MetricsServer(App("orders", settings=Settings(metrics_port=0, database_url="sqlite:///nowhere.db")))
        >>> b"idemp_database_up 0.0" in urlopen(f"http://127.0.0.1:{server.port}/metrics").read()
        True
        >>> server.close()
    """

    def __init__(self, app: App, *, processes: int = 1) -> None:
        settings = app.settings
        self._registry, self._tables = CollectorRegistry(), _Tables(app)
        self._folder = tempfile.mkdtemp(prefix="idemp-metrics-") if processes > 1 else None
        self._registry.register(self._tables)
        shared = MultiProcessCollector(None, self._folder) if self._folder else _Own()  # type: ignore[no-untyped-call]
        self._registry.register(shared)
        try:
            self._server = Server("metrics", settings.metrics_host, settings.metrics_port or 0, {"/metrics": self._page})
        except ConfigurationError:
            self._forget()
            raise
        self.port = self._server.port
        log("metrics.started", host=settings.metrics_host, port=self.port)

    def environment(self, number: int) -> Mapping[str, str]:
        """Return the environment variables by which a worker process shares its counts.

        Args:
            number: Number of the process, from 0; a restarted process has the number of its predecessor.
        """
        return {FOLDER: self._folder, NUMBER: str(number)} if self._folder else {}

    def close(self) -> None:
        """Stop listening."""
        self._server.close()
        self._forget()

    def _page(self, accept: str) -> Page:
        encode, media_type = choose_encoder(accept)
        return Page(200, media_type, encode(self._registry))

    def _forget(self) -> None:
        self._tables.database.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Own(Collector):
    """Collects all metrics of this process, those of handlers included."""

    def collect(self) -> Iterator[Any]:
        yield from REGISTRY.collect()


class _Tables(Collector):
    """Collects the gauges of the tables, which are read on request."""

    def __init__(self, app: App) -> None:
        self.database: Database = app.database()
        self._lock, self._read_at = threading.Lock(), -EVERY
        self._waiting: Waiting | None = None

    def describe(self) -> list[Any]:
        """Return no metrics, so that registration does not read the tables."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        waiting = self._look()
        yield self._gauge("idemp_database_up", {(): waiting is not None})
        if waiting is None:
            return
        yield self._gauge("idemp_pending_outputs", {(): waiting.pending})
        yield self._gauge("idemp_pending_overdue_seconds", {(): waiting.overdue})
        yield self._gauge("idemp_quarantined_outputs", {(): waiting.quarantined})
        for metric, name in BY_QUEUE.items():
            yield self._gauge(metric, {(queue.name,): getattr(queue, name) for queue in waiting.queues})
        yield self._gauge("idemp_alive", {(role,): count for role, count in waiting.alive.items()})

    def _gauge(self, name: str, numbers: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
        metric = METRICS[name]
        family = GaugeMetricFamily(name, metric.text, labels=metric.labels)
        for labels, number in numbers.items():
            family.add_metric(labels, number)
        return family

    def _look(self) -> Waiting | None:
        with self._lock:
            if time.monotonic() - self._read_at >= EVERY:
                try:
                    missing = self.database.missing_files()  # a connection would create them
                    self._waiting = None if missing else read_waiting(self.database)
                except Exception as error:
                    if self.database.dialect.classify(error) is None and not isinstance(error, (ConfigurationError, Unavailable)):
                        raise
                    self._waiting = None
                self._read_at = time.monotonic()
            return self._waiting
