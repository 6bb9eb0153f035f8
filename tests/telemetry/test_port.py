"""The port by itself: it costs nothing, loads nothing, and what looks on never changes what happens."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from typing import Any

import pytest

from idemp import Context, Idempotent, Outcome
from idemp.broker.port import Ack, Delivery
from idemp.relay import Relay, Round
from idemp.retention import Cleaner
from idemp.telemetry import SILENT, Telemetry, Watch, together
from idemp.telemetry.prometheus import Metrics
from tests.house import SELL, House, memory_house, sale
from tests.telemetry.conftest import opened, value

HOOKS = [
    name
    for name, member in inspect.getmembers(Watch, inspect.isfunction)
    if not name.startswith("_") and name not in {"delivery", "transaction", "turn", "looks", "reaches"}
]


class Broken(Telemetry):
    """Everything raises."""

    reads_state = True

    class Watch(Watch):
        pass

    def watch(self, consumer: Any) -> Watch:
        return self.Watch()

    def trace_headers(self) -> dict[str, str]:
        raise RuntimeError("broken")

    def relayed(self, round: Round) -> None:
        raise RuntimeError("broken")

    def pending(self, state: Any) -> None:
        raise RuntimeError("broken")

    def purged(self, *_: Any) -> None:
        raise RuntimeError("broken")


def _break(*_: Any) -> None:
    raise RuntimeError("broken")


for _hook in (*HOOKS, "reaches"):  # which is told once, before all deliveries
    setattr(Broken.Watch, _hook, _break)


def live(house: House) -> list[Outcome]:
    """A life with most of what can happen in it."""
    house.sells(outputs=2)
    outcomes = [house.handle(message)[0] for message in (sale(), sale(), sale(body={"sku": "B-2"}), sale(body=b"{"))]
    house.script.answers = ["nacked"]
    outcomes.append(house.handle(sale("2"))[0])
    house.relay(telemetry=house.app.telemetry)
    Cleaner(house.app.store.upkeep, "shop", house.app.retentions(), telemetry=house.app.telemetry).run()
    return outcomes


def test_broken_telemetry_changes_nothing(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for deliveries nor for the metrics beside it; each method is told once."""
    with opened("memory", SILENT) as house:
        expected = (live(house), house.sent(), house.pending())
    with opened("memory", together(Broken(), metrics)) as house:
        assert (live(house), house.sent(), house.pending()) == expected
    assert value(metrics, "idemp_deliveries_total", consumer="shop", type=SELL, outcome="handled") == 1
    told = [record.method for record in caplog.records if getattr(record, "event", "") == "telemetry_failed"]
    assert len(told) == len(set(told))
    seen = {name.partition(".")[2] for name in told}
    assert seen == {*HOOKS, "reaches", "trace_headers", "relayed", "purged"} - {"repeats", "waits", "resumes"}


class Recorder(Telemetry):
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def watch(self, consumer: Any) -> Watch:
        watch = Watch()
        for hook in HOOKS:
            setattr(watch, hook, lambda *arguments, hook=hook: self.told.append(hook))
        return watch


@pytest.mark.parametrize("raises", [False, True], ids=["no", "raises"])
def test_who_does_not_look_hears_nothing(metrics: Metrics, raises: bool) -> None:
    """It is asked before each delivery, and others beside it hear all."""
    recorder, looking = Recorder(), False

    def looks() -> bool:
        if raises and not looking:
            raise RuntimeError("broken")
        return looking

    def watch(consumer: Any) -> Watch:
        made = Recorder.watch(recorder, consumer)
        made.looks = looks  # type: ignore[method-assign]
        return made

    recorder.watch = watch  # type: ignore[method-assign]
    with opened("memory", together(recorder, metrics)) as house:
        house.sells(outputs=1)
        house.handle(sale())
        assert recorder.told == []
        looking = True
        house.handle(sale("2"))
        assert recorder.told == HANDLED
    assert value(metrics, "idemp_deliveries_total", consumer="shop", type=SELL, outcome="handled") == 2


def test_outputs_on_their_way(metrics: Metrics) -> None:
    """Between the sending and the confirms, other deliveries of the thread are seen by watches of their own."""
    recorder = Recorder()
    with opened("memory", together(recorder, metrics)) as house:
        house.sells(outputs=1)
        protocol = house.worker()
        first, second = (protocol.begin(Delivery(message=sale(name), queue="shop")) for name in ("1", "2"))
        for handling in (first, second):
            assert handling.shipment is not None
            protocol.dispatcher.send(handling.shipment)
        assert recorder.told == [*HANDLED[:5], *HANDLED[:5], *["resumes", "sends", "waits"] * 2]
        for (_, (refused,)), handling in zip(protocol.dispatcher.answered(), (first, second), strict=True):
            assert handling.confirmed(refused) == (Outcome.HANDLED, Ack())
        assert recorder.told[16:] == ["sent", "sent", "ended", "left", "ended", "left"]
    assert value(metrics, "idemp_deliveries_total", consumer="shop", type=SELL, outcome="handled") == 2
    assert value(metrics, "idemp_outputs_total", consumer="shop", via="dispatch", result="confirmed") == 2


HANDLED = [
    "begins",
    "decoded",
    "handler_begins",
    "handler_ended",
    "transaction_ended",
    "sends",
    "sent",
    "ended",
    "left",
]
DUPLICATE = ["begins", "decoded", "transaction_ended", "not_claimed", "sends", "sent", "ended", "left"]
LATE_DUPLICATE = [*HANDLED[:5], "not_claimed", *HANDLED[5:]]


@pytest.mark.parametrize(
    ("policy", "lives"),
    [
        (Idempotent(), [HANDLED, DUPLICATE]),
        (Idempotent(claim="late"), [HANDLED, LATE_DUPLICATE]),
        (None, [HANDLED, HANDLED]),
    ],
    ids=["early", "late", "not opted in"],
)
def test_order_of_a_life(policy: Idempotent | None, lives: list[list[str]]) -> None:
    """The port's promise to whoever implements it: nothing is sent inside a transaction."""
    recorder = Recorder()

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve")

    with opened("memory", recorder) as house:
        house.app.handler(dict, type=SELL, policy=policy)(sell)
        for life in lives:
            recorder.told.clear()
            house.handle()
            assert recorder.told == life


def test_order_of_a_failure() -> None:
    recorder = Recorder()
    with opened("memory", recorder) as house:
        house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message: message["missing"])
        house.handle()
    assert recorder.told == [*HANDLED[:5], "failed", "ended", "left"]


def test_nothing_looks_by_default() -> None:
    """A consumer made by hand has no telemetry; an app has traces, unless its settings say otherwise."""
    house = memory_house(traces=False)
    assert house.app.telemetry is SILENT
    assert type(house.worker().watch) is Watch
    assert type(Relay(house.app.store.upkeep, house.publisher)._watch) is Watch
    assert memory_house().app.telemetry is not SILENT


def test_together() -> None:
    first, second = Telemetry(), Telemetry()
    both = together(first, SILENT, together(second, first))
    assert both.parts == (first, second)  # type: ignore[attr-defined]
    assert (both.reads_state, together(both, Metrics()).reads_state) == (False, True)


def test_neither_library_is_loaded() -> None:
    code = """
import sys
import idemp, idemp.protocol, idemp.worker, idemp.relay, idemp.wrap, idemp.telemetry, idemp.telemetry.wiring
from idemp import App
App("orders")
import idemp.inbox.sql, idemp.broker.kombu, idemp.telemetry.events, idemp.telemetry.catalogue
print({"prometheus_client", "opentelemetry.trace"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prometheus_client", "opentelemetry"}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Missing())
"""


def test_without_the_libraries() -> None:
    """Traces are off without a word; metrics, which were asked for, are refused with the command that mends it."""
    code = (
        WITHOUT
        + """
from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.errors import ConfigurationError
from idemp.inbox.memory import InMemoryStore
from idemp.settings import Settings
from idemp.telemetry import SILENT
from idemp.worker import Worker

def app(**settings):
    return App("shop", store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings(**settings))

assert app().telemetry is SILENT
try:
    Worker([app(metrics_port=0)]).run()
except ConfigurationError as error:
    print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'idemp[prometheus]'" in done.stdout, done.stderr


def test_silent_watch_adds_next_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No object is made, no line logged."""
    caplog.set_level(logging.DEBUG)
    watch = Watch()
    assert watch.delivery(None) is watch.transaction()  # type: ignore[arg-type]
    assert caplog.records == []
