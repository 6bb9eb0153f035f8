"""Houses that are looked at: metrics in a registry, spans in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from idemp.protocol import Protocol
from idemp.telemetry import Telemetry
from idemp.telemetry.opentelemetry import Traces
from idemp.telemetry.prometheus import Metrics
from tests.house import House, memory_house, sql_house


class Spans:
    """What was traced."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, prefix: str) -> list[ReadableSpan]:
        """The ended spans whose names begin so, in the order of their ends."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(prefix)]

    def one(self, prefix: str) -> ReadableSpan:
        (span,) = self.named(prefix)
        return span

    def clear(self) -> None:
        self._exporter.clear()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one series; 0 if it does not exist yet."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """What a scrape says: samples by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def observed(house: House, telemetry: Telemetry) -> House:
    """A house whose workers are looked at, its relay and cleaner not."""
    house.app.observe(telemetry)

    def worker() -> Protocol:
        if house._protocol is None:
            house._protocol = house.app.protocol(house.publisher)
            house._protocol._pause = lambda seconds: None
        return house._protocol

    house.worker = worker  # type: ignore[method-assign]
    return house


@contextmanager
def opened(kind: str, telemetry: Telemetry) -> Iterator[House]:
    if kind == "memory":
        yield observed(memory_house(), telemetry)
        return
    with sql_house() as house:
        yield observed(house, telemetry)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def house(metrics: Metrics) -> Iterator[House]:
    """A house with metrics."""
    with opened("memory", metrics) as made:
        yield made


@pytest.fixture(params=["memory", "sqlite"])
def any_house(request: pytest.FixtureRequest, metrics: Metrics) -> Iterator[House]:
    """On either kind of store, for what is read back from it."""
    with opened(request.param, metrics) as made:
        yield made


@pytest.fixture
def traced(spans: Spans) -> Iterator[House]:
    """A house with traces."""
    with opened("memory", Traces(spans.provider)) as made:
        yield made


@pytest.fixture(params=["memory", "sqlite"])
def any_traced(request: pytest.FixtureRequest, spans: Spans) -> Iterator[House]:
    """On either kind of store, for what is read back from it."""
    with opened(request.param, Traces(spans.provider)) as made:
        yield made
