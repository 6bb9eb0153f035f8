"""Metrics equal what is counted from the tables, also while processes are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from idemp import App, ConfigurationError, Context, Settings
from idemp.cli.main import Exit
from idemp.telemetry.catalogue import ALERTS, METRICS, PANELS
from idemp.telemetry.metrics import Metrics, MetricsServer
from tests.cli.test_commands import run
from tests.servers.databases import query
from tests.servers.process import free_port
from tests.storm_app import metadata
from tests.storms import ROOT, Table
from tests.worker.test_loop import wait_for
from tests.world import Order, World

Numbers = dict[tuple[str, tuple[str, ...]], float]


def read(port: int) -> Numbers:
    """Return numbers by the name of the metric and its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(each.name, tuple(each.labels.values())): each.value for family in families for each in family.samples}


def total(numbers: Numbers, name: str, *labels: str) -> float:
    return sum(number for (each, values), number in numbers.items() if each == name and set(labels) <= set(values))


def test_what_a_worker_did_and_what_waits(url: str, age: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.send({"id": 1}, to="nowhere" if message.order_id == "lost" else "sink", type="shop.Sent")
        if message.order_id == "bad":
            raise ValueError

    world = World(url, handle)
    app, consumer = world.app(), f"shop-{os.urandom(4).hex()}"  # the registry is one for all tests of a process
    app.hooks = [Metrics(consumer)]
    monkeypatch.setattr(world, "app", lambda: app)
    monkeypatch.setattr("idemp.telemetry.metrics.EVERY", 0.0)
    server = MetricsServer(App("shop", settings=Settings(database_url=url, metrics_port=0)))
    world.send("1", "1", "2", "bad", "lost")
    world.send("3", type="shop.Unknown")
    worker = world.worker()
    world.work(worker)
    worker.upkeep()
    numbers = read(server.port)
    deliveries = {
        tuple(each for each in labels if each != consumer): count
        for (name, labels), count in numbers.items()
        if name == "idemp_deliveries_total" and consumer in labels
    }
    assert deliveries == {  # outcome, type, verdict
        ("done", "shop.Order", "claimed"): 3,
        ("done", "shop.Order", "duplicate"): 1,
        ("retry", "shop.Order", "claimed"): 2,
        ("dead", "shop.Order", "claimed"): 1,
        ("retry", "unknown", "none"): 1,
    }
    assert total(numbers, "idemp_handled_total", consumer) == total(numbers, "idemp_outputs_total", consumer) == 3
    assert total(numbers, "idemp_handling_seconds_count", consumer) == 3
    assert total(numbers, "idemp_failures_total", consumer, "handler") == 3
    gauges = {name: total(numbers, name) for name in METRICS if METRICS[name].kind == "gauge"}
    assert gauges == {
        "idemp_database_up": 1,
        "idemp_pending_outputs": 1,
        "idemp_pending_overdue_seconds": 0,
        "idemp_quarantined_outputs": 0,
        "idemp_messages": 2,  # in the sink
        "idemp_retries": 1,
        "idemp_retries_due": 0,
        "idemp_dead_letters": 1,
        "idemp_queue_overdue_seconds": gauges["idemp_queue_overdue_seconds"],
        "idemp_alive": 1,
    }
    age(60)
    numbers = read(server.port)
    assert total(numbers, "idemp_retries_due", "shop") == 1
    assert 50 < total(numbers, "idemp_queue_overdue_seconds", "shop") < 90
    assert total(numbers, "idemp_pending_overdue_seconds") > 30
    server.close()


def test_an_address_that_is_taken_is_refused(url: str) -> None:
    settings = Settings(database_url=url, metrics_port=0)
    server = MetricsServer(App("shop", settings=settings))
    with pytest.raises(ConfigurationError, match=f"metrics_port={server.port} cannot be used"):
        MetricsServer(App("shop", settings=settings.model_copy(update={"metrics_port": server.port})), processes=2)
    server.close()


def test_the_dashboard_and_the_alerts_name_metrics_and_labels_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("describe", "--grafana") == Exit.OK
    board = json.loads(capsys.readouterr().out)
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) == sum(len(panel.expressions) for panel in PANELS)
    assert run("describe", "--alerts") == Exit.OK
    said = capsys.readouterr().out
    assert said.count("- alert:") == len(ALERTS)
    expressions += [json.loads(text) for text in re.findall(r"expr: (.*)", said)]
    named = Counter[str]()
    for expression in expressions:
        for name in re.findall(r"idemp_\w+", expression):
            metric = METRICS[name.removesuffix("_bucket")]
            assert name == metric.name or metric.kind == "histogram"
            for labels in re.findall(r"by \(([^)]*)\)", expression):
                assert set(labels.split(", ")) - {"le"} <= set(metric.labels), expression
            named[metric.name] += 1
    assert set(named) == set(METRICS)  # each is drawn
    assert run("describe") == run("describe", "shop", "--alerts") == Exit.USAGE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize("kills", [0, 10])
def test_one_endpoint_for_all_processes_in_a_storm(url: str, tmp_path: Path, kills: int) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    port, messages = free_port(), 100
    environment = {**os.environ, "IDEMP_DATABASE_URL": url, "IDEMP_LEASE": "2s", "IDEMP_METRICS_PORT": str(port)}
    command = [sys.executable, "-m", "idemp", "worker", "tests.storm_app:app", "--processes", "3"]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
    try:
        wait_for(lambda: "consuming" in Path(log.name).read_text())
        outside = Table(url)
        killed = 0
        for number in range(messages):
            outside.send(number)
            if number % 5 == 0:
                outside.send(number)
            if killed < kills * (number + 1) // messages:
                killed += kill_one(process.pid)
            if number == 50:  # in the middle of it, the counter lies between two counts of the table
                before = query(url, "SELECT count(*) FROM idemp_inbox")[0][0]
                seen = total(read(port), "idemp_handled_total")
                assert before - 10 * killed - 3 <= seen <= query(url, "SELECT count(*) FROM idemp_inbox")[0][0]

        while killed < kills:
            wait_for(lambda: kill_one(process.pid))
            killed += 1

        def settled() -> bool:
            done = query(url, "SELECT count(*) FROM idemp_inbox")[0][0] == 2 * messages
            return bool(done) and not outside.waiting() and query(url, "SELECT count(*) FROM idemp_pending")[0][0] == 0

        wait_for(settled, 120)
        sink = query(url, "SELECT count(*) FROM idemp_message WHERE queue = 'storm.sink'")[0][0]
        wait_for(lambda: total(read(port), "idemp_messages") == sink, 30)  # the tables are looked at every 5 s
        numbers = read(port)
    finally:
        process.terminate()
        process.wait(60)
        log.close()
    handled, inbox = total(numbers, "idemp_handled_total"), query(url, "SELECT count(*) FROM idemp_inbox")[0][0]
    assert inbox == 2 * messages
    assert inbox - 10 * killed <= handled <= inbox  # a kill may come between COMMIT and the count of a batch
    assert handled == inbox or killed
    outputs = query(url, "SELECT count(*) FROM idemp_output")[0][0]
    assert outputs - 20 * killed <= total(numbers, "idemp_outputs_total") <= outputs
    done = total(numbers, "idemp_deliveries_total", "done")
    if not killed:
        assert (total(numbers, "idemp_outputs_total"), total(numbers, "idemp_deliveries_total", "duplicate")) == (
            outputs,
            messages / 5,
        )
        assert done == 2 * messages + messages / 5
    assert (total(numbers, "idemp_messages"), total(numbers, "idemp_retries"), total(numbers, "idemp_dead_letters")) == (
        sink,
        0,
        0,
    )
    assert total(numbers, "idemp_alive", "worker") >= 3


def kill_one(supervisor: int) -> bool:
    """Kill a process of a worker; return whether there is one, and not only a pause."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    if children:
        os.kill(int(random.choice(children)), signal.SIGKILL)
    return bool(children)
