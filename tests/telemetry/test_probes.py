"""`/health` and `/ready`: what Kubernetes asks, over HTTP, of a worker that works, hangs, or waits for a server."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import idemp.worker
from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.errors import StoreUnavailable
from idemp.health import Health
from idemp.inbox.memory import InMemoryStore
from idemp.relay import Relay
from idemp.settings import Settings
from idemp.telemetry.wiring import metrics_by
from idemp.testing.faulty import FaultyStore, Script
from idemp.worker import Worker
from tests.house import SELL
from tests.servers.process import wait_until
from tests.telemetry.test_served import put, running, served_url

if TYPE_CHECKING:
    from collections.abc import Iterator


def get(url: str, path: str) -> tuple[int, Any]:
    try:
        with urlopen(url.removesuffix("/metrics") + path, timeout=10) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def asked(url: str, path: str) -> tuple[int, Any]:
    status, body = get(url, path)
    return status, json.loads(body)


class Stuck(InMemoryBroker):
    """A broker that can stop to answer whoever receives."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def receiver(self, *arguments: Any, **options: Any) -> Any:
        receiver = super().receiver(*arguments, **options)
        receive = receiver.receive

        def patient(timeout: float) -> Any:
            self.answers.wait()
            return receive(timeout)

        receiver.receive = patient  # type: ignore[method-assign]
        return receiver


class Shop:
    """A worker whose handler runs for as long as the test wants, and whose database is away at its will."""

    def __init__(self, **settings: Any) -> None:
        self.broker = Stuck()
        self.broker.declare(Topology(exchange="idemp", queues=("shop",)))
        self.script = Script()
        self.handled = threading.Event()
        store: Any = FaultyStore(InMemoryStore(), self.script)
        self.app = App("shop", store=store, broker=self.broker, settings=Settings(metrics_port=0, **settings))
        self.app.handler(dict, type=SELL)(self.sell)
        self.worker = Worker([self.app])

    def sell(self, message: dict[str, Any]) -> None:
        self.handled.wait()

    @contextmanager
    def running(self, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
        caplog.set_level(logging.INFO, "idemp")
        try:
            with running(self.worker):
                wait_until(lambda: any(getattr(each, "event", "") == "metrics_served" for each in caplog.records), "up")
                url = served_url(caplog)
                wait_until(lambda: get(url, "/ready")[0] == 200, "it consumes")
                yield url
                self.handled.set()
                self.broker.answers.set()
        finally:
            self.handled.set()
            self.broker.answers.set()


def test_only_these_paths_are_there(caplog: pytest.LogCaptureFixture) -> None:
    with Shop().running(caplog) as url:
        assert [get(url, path)[0] for path in ("/metrics", "/health", "/ready")] == [200, 200, 200]
        assert [get(url, path)[0] for path in ("/", "/healthz", "/ready/", "/metricsx", "/favicon.ico")] == [404] * 5
        assert asked(url, "/ready")[1] == {"alive": True, "ready": True, "problems": [], "waiting": [], "handling": []}


def test_a_thread_that_hangs_outside_of_handlers_fails_health(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(health_timeout=timedelta(seconds=1))
    with shop.running(caplog) as url:
        shop.broker.answers.clear()
        wait_until(lambda: get(url, "/health")[0] == 503, "it is missed")
        status, health = asked(url, "/ready")
        assert (status, health["alive"]) == (503, False)
        assert "shop: a consuming thread has shown no sign of life for" in health["problems"][0]
        shop.broker.answers.set()
        wait_until(lambda: get(url, "/health")[0] == 200, "it lives again")


def test_a_long_handler_is_reported_and_fails_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idemp.worker, "LONG_SECONDS", 0.05)
    monkeypatch.setattr(idemp.worker, "BEAT_SECONDS", 0.05)
    shop = Shop(health_timeout=timedelta(seconds=1))
    with shop.running(caplog) as url:
        put(shop.broker, "m-1")
        wait_until(lambda: bool(asked(url, "/health")[1]["handling"]), "it is seen")

        def told() -> list[Any]:
            return [each for each in caplog.records if getattr(each, "event", "") == "handler_runs_long"]

        wait_until(lambda: bool(told()), "it is logged")
        wait_until(lambda: asked(url, "/health")[1]["handling"][0]["seconds"] > 1.5, "it runs for long")
        status, health = asked(url, "/health")
        assert (status, health["handling"][0]["consumer"], health["handling"][0]["message_type"]) == (200, "shop", SELL)
        assert len(told()) == 1
        assert told()[0].message_id == "m-1"
        shop.handled.set()
        wait_until(lambda: not asked(url, "/health")[1]["handling"], "it ended")


def test_a_limit_for_handlers_fails_health(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(health_handler_timeout=timedelta(seconds=0.2))
    with shop.running(caplog) as url:
        put(shop.broker, "m-1")
        wait_until(lambda: get(url, "/health")[0] == 503, "it takes too long")
        assert "shop: a handler has been running for" in asked(url, "/health")[1]["problems"][0]
        shop.handled.set()
        wait_until(lambda: get(url, "/health")[0] == 200, "it ended")


def test_an_outage_makes_it_not_ready_and_no_restart_would_help(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(health_handler_timeout=timedelta(seconds=1))
    shop.handled.set()
    with shop.running(caplog) as url:
        shop.script.store_faults = [StoreUnavailable("The database is away.") for _ in range(6)]
        put(shop.broker, "m-1")
        wait_until(lambda: "shop: the database is away" in asked(url, "/ready")[1]["waiting"], "it waits")
        assert get(url, "/health")[0] == 200
        wait_until(lambda: get(url, "/ready")[0] == 200, "the database is back")


def test_before_its_start_and_while_it_stops_it_is_not_ready() -> None:
    worker = Shop().worker
    assert (worker.health().alive, worker.health().waiting) == (True, ["starting"])
    worker.stop()
    assert (worker.health().alive, worker.health().waiting) == (True, ["stopping"])


def test_a_relay_that_hangs_fails_health() -> None:
    """Between two rounds it waits for outputs; the database may stop to answer there."""
    relay = Relay(InMemoryStore().upkeep, InMemoryBroker().publisher())
    with metrics_by(Settings(metrics_port=0), lambda: relay.health(timedelta(minutes=5))):
        assert relay.health(timedelta(minutes=5)) == Health()
    assert not relay.health(timedelta(0)).alive
