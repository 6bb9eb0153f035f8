"""From end to end: a worker with its metrics scraped over HTTP, its traces, and the ports of its processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

import pytest

from idemp import App, Context, Idempotent
from idemp.broker.local import LocalBroker
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.errors import ConfigurationError
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import Output, OutputKind
from idemp.settings import PROCESS_VARIABLE, Settings
from idemp.telemetry.opentelemetry import Traces
from idemp.telemetry.wiring import metrics_by, port_of
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.house import SELL, sale
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until
from tests.telemetry.conftest import Spans, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def scrape(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    with urlopen(url, timeout=10) as answer:
        return parsed(answer.read().decode())


def total(found: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str, **labels: str) -> float:
    return sum(value for key, value in found.get(name, {}).items() if labels.items() <= dict(key).items())


def served_url(caplog: pytest.LogCaptureFixture) -> str:
    (url,) = {record.url for record in caplog.records if getattr(record, "event", "") == "metrics_served"}
    return str(url)


def put(broker: InMemoryBroker, message_id: str, traceparent: str = "", **body: Any) -> None:
    headers = {"traceparent": traceparent} if traceparent else {}
    message = sale(message_id, body, headers=headers)
    output = Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message)
    assert broker.publisher().publish([output], 5) == [None]


@contextmanager
def running(worker: Worker) -> Iterator[None]:
    background = Background(worker.run)
    try:
        yield
    finally:
        worker.stop()
        background.result(30)


def test_worker_from_end_to_end(tmp_path: Path, caplog: pytest.LogCaptureFixture, spans: Spans) -> None:
    """Messages in, metrics scraped while it runs, traces that hang together, and a port that is free afterwards."""
    caplog.set_level(logging.INFO, "idemp")
    engine = create_engine_safely(f"sqlite:///{tmp_path}/shop.db")
    make_tables(engine)
    broker = InMemoryBroker()
    broker.declare(Topology(exchange="idemp", queues=("shop", "stock")))
    settings = Settings(metrics_port=0, traces=False)
    store = SqlStore(engine)
    app = App("shop", store=store, broker=broker, settings=settings, telemetry=Traces(spans.provider))

    @app.handler(dict, type=SELL, policy=Idempotent(attempts=1))
    def sell(message: dict[str, Any], ctx: Context) -> None:
        if message.get("fail"):
            raise RuntimeError("no stock")
        ctx.send({}, to="stock", type="stock.Reserve")

    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    put(broker, "m-1", parent)
    put(broker, "m-2", fail=True)
    threads = threading.active_count()
    with running(Worker([app])):
        wait_until(lambda: broker.depth("stock") == 1 and broker.depth("shop.dead") == 1, "both handled")
        put(broker, "m-1", f"00-{'c' * 32}-{'d' * 16}-01")
        wait_until(lambda: broker.depth("stock") == 2, "the duplicate is redispatched")
        url = served_url(caplog)
        wait_until(lambda: total(scrape(url), "idemp_deliveries_total") == 3, "all deliveries are counted")
        found = scrape(url)
    for outcome in ("handled", "redispatched", "parked"):
        assert total(found, "idemp_deliveries_total", outcome=outcome, consumer="shop", type=SELL) == 1
    assert total(found, "idemp_dead_letters_total", reason="RuntimeError") == 1
    assert total(found, "idemp_outputs_total", result="confirmed") == 2
    assert total(found, "idemp_duplicate_age_seconds_count") == 1
    assert total(found, "idemp_claims_in_flight") == 0
    assert {key[0][1] for key in found["idemp_pending_outputs"]} == {"waiting", "quarantined"}
    assert found["idemp_oldest_pending_seconds"].keys() == {()}
    first, again = (span for span in spans.named("process") if span.attributes["idemp.message_id"] == "m-1")
    assert [link.context.span_id for link in again.links] == [first.context.span_id]
    carried = {message.headers["traceparent"] for message in broker.browse("stock", 10)}
    assert {value.split("-")[1] for value in carried} == {"a" * 32}
    with pytest.raises(URLError):
        scrape(url)
    wait_until(lambda: threading.active_count() <= threads, "its threads ended")
    engine.dispose()


def test_heartbeat_tells_what_waits(tmp_path: Path) -> None:
    engine = create_engine_safely(f"sqlite:///{tmp_path}/shop.db")
    make_tables(engine)
    app = App("shop", store=SqlStore(engine), broker=InMemoryBroker(), settings=Settings())
    with app.initiate() as unit:
        unit.send({}, to="nowhere", type="stock.Reserve")
    with metrics_by(Settings(metrics_port=0)) as metrics:
        app.observe(metrics)
        Worker([app])._beat_once()
        registry: Any = metrics
        assert registry.registry.get_sample_value("idemp_pending_outputs", {"state": "waiting"}) == 1
    engine.dispose()


def test_occupied_port_is_refused_before_anything_is_consumed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker = InMemoryBroker()
        app = App("shop", broker=broker, database="sqlite://", settings=Settings(metrics_port=port))
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}.*metrics_port"):
            Worker([app]).run()


@pytest.mark.parametrize(
    ("port", "number", "served"),
    [(None, "1", None), (0, "1", 0), (9464, "", 9464), (9464, "0", 9464), (9464, "3", 9467), (9464, "nonsense", 9464)],
)
def test_each_process_has_a_port_of_its_own(
    monkeypatch: pytest.MonkeyPatch, port: int | None, number: str, served: int | None
) -> None:
    monkeypatch.setenv(PROCESS_VARIABLE, number)
    assert port_of(Settings(metrics_port=port)) == served


def test_beyond_the_last_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_VARIABLE, "1")
    with pytest.raises(ConfigurationError, match="no port 65536"):
        port_of(Settings(metrics_port=65_535))


def free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


MODULE = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from idemp import App, Idempotent

out = open("spans-" + __import__("os").environ.get("IDEMP_PROCESS_NUMBER", "0"), "w", buffering=1)
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=lambda span: span.name + "\\n")))
trace.set_tracer_provider(provider)
app = App("shop")


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id"))
def order(message, ctx):
    ctx.send({}, to="shop", type="shop.Done")


@app.handler(dict, type="shop.Done")
def done(message):
    pass
"""


def test_processes_and_relay_of_the_command_line(tmp_path: Path) -> None:
    """Ports, settings from the environment, the program's own tracer provider; each process ends cleanly."""
    (tmp_path / "shop.py").write_text(MODULE)
    workers, relay = free_ports(), free_ports()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")},
        "IDEMP_DATABASE_URL": f"sqlite:///{tmp_path}/shop.db",
        "IDEMP_BROKER_URL": f"local://{tmp_path}/broker.db",
    }
    store = SqlStore(create_engine_safely(environment["IDEMP_DATABASE_URL"]))
    make_tables(store.engine)
    LocalBroker(tmp_path / "broker.db")  # as the first worker makes it

    def start(port: int, *arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"stderr-{port}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "idemp.cli", *arguments, "--log-json"],
                cwd=tmp_path,
                env={**environment, "IDEMP_METRICS_PORT": str(port)},
                stderr=log,
            )

    def answers(port: int) -> bool:
        try:
            return "idemp_pending_outputs" in scrape(f"http://127.0.0.1:{port}/metrics")
        except URLError:
            return False

    processes = [start(workers, "worker", "shop:app", "--processes", "2"), start(relay, "relay")]
    try:
        wait_until(lambda: all(answers(port) for port in (workers, workers + 1, relay)), "three ports answer")
        lines = [json.loads(line) for line in (tmp_path / f"stderr-{workers}").read_text().splitlines()]
        served = {line["url"] for line in lines if line["event"] == "metrics_served"}
        assert served == {f"http://127.0.0.1:{port}/metrics" for port in (workers, workers + 1)}
        app = App("shop", store=store, broker=f"local://{tmp_path}/broker.db")
        with app.initiate() as unit:
            unit.send({"order_id": 1}, to="shop", type="shop.Order")
        url = f"http://127.0.0.1:{relay}/metrics"
        urls = [url, *(f"http://127.0.0.1:{port}/metrics" for port in (workers, workers + 1))]
        wait_until(
            lambda: sum(total(scrape(one), "idemp_deliveries_total", outcome="handled") for one in urls[1:]) == 2,
            "both messages are handled",
        )
        sent = sum(total(scrape(one), "idemp_outputs_total", result="confirmed", via="relay") for one in urls)
        assert sent == 1
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(30) for process in processes]
    assert codes == [0, 0]
    spans = [line for file in tmp_path.glob("spans-*") for line in file.read_text().split("\n") if line]
    assert "process shop" in spans
    store.close()
    store.engine.dispose()
