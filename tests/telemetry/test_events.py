"""The tables of events and metrics, held against the source and against the reference pages."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import idemp
from idemp import Idempotent, Refuse
from idemp.broker.port import Delivery, Park
from idemp.cli.logs import MAX_TRACEBACK_CHARACTERS, JsonLines
from idemp.deliverylog import tell
from idemp.errors import TransactionEnded, WorkerDied
from idemp.settling import settlement_of_failure
from idemp.telemetry import SILENT, catalogue, events
from tests.house import SELL, House, sale
from tests.telemetry.conftest import opened

SOURCE = Path(idemp.__file__).parent
DOCS = SOURCE.parent / "docs" / "reference"
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "time", "logger", "traceback", "event", "level"}


@dataclass(frozen=True)
class Logged:
    """A log call in the source."""

    where: str
    level: str
    event: str | None
    fields: frozenset[str]


def logged(text: str, where: str) -> Iterator[Logged]:
    """All log calls of a module. What goes to `extra` must stand there, so that it can be read here."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in {"log", "logger", "logging"}):
            continue
        extra = next((keyword.value for keyword in node.keywords if keyword.arg == "extra"), None)
        level = {"exception": "error"}.get(node.func.attr, node.func.attr)
        place = f"{where}:{node.lineno}"
        if extra is None:
            yield Logged(place, level, None, frozenset())
            continue
        assert isinstance(extra, ast.Dict), f"{place}: extra= has to be written out"
        fields: set[str] = set()
        event = None
        for key, value in zip(extra.keys, extra.values, strict=True):
            if key is None:
                source = ast.unparse(value)
                assert source.endswith(".log_fields") or source.startswith("about("), f"{place}: **{source}"
                fields.update(events.MESSAGE)
            elif ast.literal_eval(key) == "event":
                event = ast.literal_eval(value)
            else:
                fields.add(ast.literal_eval(key))
        yield Logged(place, level, event, frozenset(fields))


@pytest.fixture(scope="module")
def calls() -> list[Logged]:
    modules = [path for path in SOURCE.rglob("*.py") if "testing" not in path.parts and "demo" not in path.parts]
    return [call for path in modules for call in logged(path.read_text("utf-8"), str(path.relative_to(SOURCE)))]


def test_every_line_that_people_see_is_an_event(calls: list[Logged]) -> None:
    assert [call.where for call in calls if call.event is None and call.level != "debug"] == []


def test_every_event_is_registered_with_its_level_and_fields(calls: list[Logged]) -> None:
    wrong = [
        call
        for call in calls
        if call.event is not None
        and (
            call.event not in events.EVENTS
            or call.level not in {"log", *events.EVENTS[call.event].levels}
            or not call.fields <= set(events.EVENTS[call.event].fields)
        )
    ]
    assert wrong == []


def test_nothing_is_registered_that_is_not_logged(calls: list[Logged]) -> None:
    used: dict[str, set[str]] = {}
    for call in calls:
        if call.event is not None:
            used.setdefault(call.event, set()).update(call.fields)
    assert used == {name: set(event.fields) for name, event in events.EVENTS.items()}


def test_fields_of_one_message_are_told_together() -> None:
    """Who has a consumer and a message has its type."""
    for name, event in events.EVENTS.items():
        assert RESERVED.isdisjoint(event.fields), name
        if {"consumer", "message_id"} <= set(event.fields):
            assert "message_type" in event.fields, name


def test_the_guard_notices() -> None:
    text = 'log.info("x")\nlog.error("y", extra={"event": "e", "a": 1, **about(c, d), **work.log_fields})\n'
    silent, told = logged(text, "m")
    assert (silent.event, silent.where) == (None, "m:1")
    assert (told.event, told.level, told.fields) == ("e", "error", {"a", *events.MESSAGE})
    for wrong in ('log.info("x", extra=told)', 'log.info("x", extra={**told})'):
        with pytest.raises(AssertionError):
            list(logged(wrong, "m"))


@pytest.mark.parametrize(("page", "table"), [("events.md", events.markdown()), ("metrics.md", catalogue.markdown())])
def test_reference_pages_have_these_tables(page: str, table: str) -> None:
    """To mend it: `python -c "from idemp.telemetry import events; print(events.markdown())"`; `catalogue` for metrics."""
    found = re.search(r"<!-- table -->\n(.*?)<!-- end of table -->", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert found[1].strip() == table.strip()


# One line per delivery ----------------------------------------------------------------------------------------------


def told(house: House, caplog: pytest.LogCaptureFixture, attempt: int = 1, **properties: Any) -> dict[str, Any]:
    """What the log says about one delivery, as JSON."""
    caplog.clear()
    delivery = Delivery(message=sale(**properties), queue="shop", attempt=attempt, redelivered=True)
    outcome, settlement = house.worker().handle(delivery)
    tell("shop", delivery, outcome, settlement, seconds=0.25)
    (record,) = [
        record for record in caplog.records if record.levelno >= logging.WARNING or record.name == "idemp.delivery"
    ]
    line: dict[str, Any] = json.loads(JsonLines().format(record))
    return line


def test_a_delivery_is_told_once_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "idemp")

    def fail(message: dict[str, Any]) -> None:
        raise Refuse("never") if message.get("refuse") else RuntimeError("no stock,\n  sorry")

    with opened("memory", SILENT) as house:
        house.app.handler(dict, type=SELL, policy=Idempotent(attempts=2, retry_delays=["3s"]))(fail)
        retried = told(house, caplog)
        parked = told(house, caplog, attempt=2)
    assert list(retried)[:5] == ["time", "level", "logger", "event", "message"]
    common = {
        "logger": "idemp.delivery", "event": "delivery", "consumer": "shop", "message_id": "sale-1", "message_type": SELL,
        "queue": "shop", "redelivered": True, "duration": 0.25, "attempts": 2,
    }  # fmt: skip
    assert retried == {
        **common, "time": retried["time"], "level": "warning", "outcome": "retried", "attempt": 1, "delay": 3.0,
        "reason": "RuntimeError", "because": None,
        "message": f"shop: {SELL} sale-1 retried in 3 s, attempt 1 of 2: RuntimeError: no stock, sorry",
    }  # fmt: skip
    assert parked == {
        **common, "time": parked["time"], "level": "error", "outcome": "parked", "attempt": 2, "delay": None,
        "reason": "RuntimeError", "because": "attempts used up (2)",
        "message": f"shop: {SELL} sale-1 (attempt 2 of 2) parked: RuntimeError: no stock, sorry",
    }  # fmt: skip
    assert set(retried) - {"time", "level", "logger", "event", "message"} == set(events.EVENTS["delivery"].fields)


def test_what_went_well_is_for_debugging_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "idemp")
    with opened("memory", SILENT) as house:
        house.sells()
        assert told(house, caplog)["level"] == "debug"
        assert told(house, caplog)["outcome"] == "redispatched"


def test_long_exceptions_are_cut_in_their_middle() -> None:
    error = RuntimeError("x" * 100_000)
    record = logging.makeLogRecord({"msg": "failed", "exc_info": (type(error), error, None)})
    text = json.loads(JsonLines().format(record))["traceback"]
    assert len(text) <= MAX_TRACEBACK_CHARACTERS
    assert text.startswith("RuntimeError: xxx")
    assert "\n  [...]\n" in text


def test_settling_itself_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The one line tells it."""
    caplog.set_level(logging.DEBUG, "idemp")
    with opened("memory", SILENT) as house:
        house.sells()
        house.worker()
        settlement_of_failure(house.app.consumer, Delivery(message=sale(), queue="shop"), RuntimeError("no stock"))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("options", "error", "attempt", "because"),
    [
        ({"attempts": 3}, KeyError("bug"), 3, "attempts used up (3)"),
        ({"refuse_on": [LookupError]}, KeyError("bug"), 1, "refuse_on names LookupError"),
        ({"retry_on": [OSError]}, KeyError("bug"), 1, "retry_on names others"),
        ({}, Refuse("never"), 1, "Refuse"), ({}, WorkerDied("killed", attempts=4), 1, "attempts used up (4)"),
        ({}, TransactionEnded("COMMIT in the handler"), 1, "can't be handled, however often"),
    ],
)  # fmt: skip
def test_what_is_parked_says_why_it_is_not_tried_again(
    options: Any, error: Exception, attempt: int, because: str
) -> None:
    with opened("memory", SILENT) as house:
        house.app.handler(dict, type=SELL, policy=Idempotent(**options))(lambda message: None)
        delivery = Delivery(message=sale(), queue="shop", attempt=attempt)
        settlement = settlement_of_failure(house.app.consumer, delivery, error)
    assert isinstance(settlement, Park)
    assert settlement.headers["idemp-dead-because"] == because
