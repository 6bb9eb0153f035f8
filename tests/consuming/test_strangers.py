"""Apps without handlers, and messages that no handler takes: nobody's queue is emptied into the dead letters."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from idemp import App, Idempotent, settling
from idemp.broker.memory import InMemoryBroker
from idemp.errors import ConfigurationError
from idemp.inbox.memory import InMemoryStore
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.servers.process import wait_until


def app_of(broker: InMemoryBroker, *types: str, name: str = "shop") -> tuple[App, Counter[str]]:
    """An app of the queue `shop`, and how often its handlers ran for each type."""
    app, runs, lock = App(name, store=InMemoryStore(), broker=broker, queue="shop"), Counter[str](), threading.Lock()

    def handler(message_type: str) -> Any:
        def handle(message: dict[str, Any]) -> None:
            with lock:
                runs[message_type] += 1

        return handle

    for each in types:
        app.handler(dict, type=each, policy=Idempotent())(handler(each))
    return app, runs


def fill(app: App, *types: str) -> None:
    with app.initiate() as unit:
        for each in types:
            unit.send({}, to="shop", type=each)
    app.broker.declare(app.topology())
    publisher = app.broker.publisher()
    pending = app.store.upkeep.take_pending(100, timedelta(minutes=5))
    assert publisher.publish([item.output for item in pending], 10) == [None] * len(types)


def test_an_app_without_handlers_does_not_touch_its_queue(caplog: pytest.LogCaptureFixture) -> None:
    """The module that holds them was not imported."""
    broker = InMemoryBroker()
    sender, _ = app_of(broker, name="sender")
    fill(sender, "shop.Sell", "shop.Sell")
    worker = Worker([app_of(broker)[0]])
    worker.stop()
    with pytest.raises(ConfigurationError, match="no handlers; its queue 'shop' was not touched"):
        worker.run()
    assert (broker.depth("shop"), broker.depth("shop.dead")) == (2, 0)
    assert "worker_runs" not in {getattr(record, "event", None) for record in caplog.records}


def test_an_app_with_effects_alone_runs_those_and_leaves_its_queue(caplog: pytest.LogCaptureFixture) -> None:
    broker, opened = InMemoryBroker(), threading.Event()
    app, _ = app_of(broker)

    @app.effect("door.open")
    def open_door(value: dict[str, int]) -> None:
        opened.set()

    fill(app_of(broker, name="sender")[0], "shop.Sell")
    with app.initiate() as unit:
        unit.effect("door.open", {"number": 7})
    with caplog.at_level(logging.INFO, "idemp"):
        worker = Worker([app])
        running = Background(worker.run)
        wait_until(opened.is_set, "the effect")
        worker.stop()
        running.result(60)
    assert (broker.depth("shop"), broker.depth("shop.dead")) == (1, 0)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert "queue_not_consumed" in events


def test_two_apps_of_one_queue_get_what_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has handlers for some types: what the other one takes goes round until it does."""
    monkeypatch.setattr(settling, "UNCONFIRMED_DELAY", timedelta(milliseconds=20))
    broker = InMemoryBroker()
    shop, sold = app_of(broker, "shop.Sell", name="shop")
    stock, reserved = app_of(broker, "stock.Reserve", name="stock")
    fill(shop, *["shop.Sell", "stock.Reserve"] * 20)
    workers = [Worker([app], threads=1) for app in (shop, stock)]
    running = [Background(worker.run) for worker in workers]
    wait_until(lambda: sold["shop.Sell"] == 20 and reserved["stock.Reserve"] == 20, "all are handled", seconds=120)
    for worker, each in zip(workers, running, strict=True):
        worker.stop()
        each.result(60)
    assert broker.depth("shop.dead") == 0


def test_a_worker_says_that_it_runs_when_its_queues_exist(caplog: pytest.LogCaptureFixture) -> None:
    broker = InMemoryBroker()
    app, _ = app_of(broker, "shop.Sell")
    seen: list[int] = []

    class Looking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", None) == "worker_runs":
                seen.append(broker.depth("shop"))

    looking, log = Looking(), logging.getLogger("idemp.worker")
    log.addHandler(looking)
    try:
        with caplog.at_level(logging.INFO, "idemp.worker"):
            worker = Worker([app])
            worker.stop()
            worker.run()
    finally:
        log.removeHandler(looking)
    assert seen == [0]
