"""One minute of the soak, and that its verdict sees what breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.servers.postgresql import PostgreSQL
from tests.servers.rabbitmq import RabbitMQ
from tests.soak.app import CONSUMER, Charge
from tests.soak.audit import Ledger
from tests.soak.plan import Plan
from tests.soak.report import Report
from tests.soak.soak import Soak
from tests.soak.watching import read_logs, tails
from tests.storms.looking import id_of_output

pytestmark = pytest.mark.slow

PLAN = Plan(minutes=1, seed=11, rate=50, batches=(20, 1))


@pytest.mark.timeout(420)
def test_one_minute_of_everything_that_goes_wrong(
    own_postgresql: PostgreSQL, own_rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """With workers that handle message by message beside such as share transactions."""
    report = Soak(PLAN, own_postgresql, own_rabbitmq, tmp_path).run()
    print(json.dumps(report.as_json(), indent=2))
    assert not report.broken, tails(tmp_path)
    assert min(report.faults.values()) >= 1
    assert report.effects == report.messages - report.fail_always > 0
    assert report.letters["Doomed"] >= report.fail_always > 0
    assert report.letters["WorkerDied"] >= report.killers > 0


def entered(ledger: Ledger, message_type: str, ordinal: int, number: int, body: bytes | None = None) -> None:
    wanted = id_of_output(CONSUMER, Charge.__message_type__, PLAN.order_id(number), ordinal)
    ledger.enter(message_type, wanted, body or json.dumps({"number": number}).encode())


def of_kind(kind: str) -> int:
    return next(number for number in range(10_000) if PLAN.kind(number) == kind)


def test_the_ledger_sees_each_output_once_or_more_under_its_id_and_with_one_body() -> None:
    number = of_kind("fine")
    ledger = Ledger(PLAN)
    for _ in range(2):
        entered(ledger, "soak.Invoice", 0, number)
        entered(ledger, "soak.Charged", 1, number)
    assert ledger.seen == 4
    assert not ledger.found
    entered(ledger, "soak.Charged", 0, number)
    entered(ledger, "soak.Charged", 1, number, b'{"number":%d}' % number)
    assert dict(ledger.found) == {"outputs under a wrong id": 1, "outputs with several bodies": 1}


def test_the_ledger_misses_what_was_never_seen_and_finds_what_was_rolled_back() -> None:
    ledger = Ledger(PLAN)
    parked = of_kind("always")
    entered(ledger, "soak.Invoice", 0, parked)
    ledger.check(parked + 1)
    handled = sum(PLAN.kind(number) != "always" for number in range(parked + 1))
    assert dict(ledger.found) == {"outputs missing": 2 * handled, "outputs of what was rolled back": 1}


def judged(**changed: object) -> Report:
    watched = {"threads_before": 7, "threads_after": 7, "descriptors_before": 9, "descriptors_after": 9}
    return Report(**{**watched, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, {}),
        ({"memory_before": 100.0, "memory_after": 104.9}, {}),
        ({"memory_before": 100.0, "memory_after": 105.0}, {"memory_growth": 0.05}),
        ({"threads_after": 8}, {"threads": (7, 8)}),
        ({"threads_after": None}, {"threads": (7, None)}),
        ({"descriptors_after": 16}, {"descriptors": (9, 16)}),
        ({"lost": 1}, {"lost": 1}),
        ({"doubled": 2}, {"doubled": 2}),
        ({"outputs": {"outputs missing": 3}}, {"outputs": {"outputs missing": 3}}),
        ({"left": {"soak": 1}}, {"left": {"soak": 1}}),
        ({"survivor_ended": "with 1"}, {"survivor_ended": "with 1"}),
    ],
)
def test_the_verdict(changed: dict[str, object], broken: dict[str, object]) -> None:
    assert judged(**changed).broken == broken


def test_errors_in_logs_are_unexpected_unless_something_explains_them(tmp_path: Path) -> None:
    parked = {"level": "error", "event": "delivery", "reason": "Doomed"}
    ended = {"error": {"kind": "BrokerUnavailable", "exit_code": 4}}
    lines = [{"level": "warning", "event": "outage"}, parked, ended, {"level": "critical", "event": "worker_failed"}]
    for group in ("killed", "survivor"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "0001.log").write_text("\n".join([*map(json.dumps, lines), "Traceback"]))
    logged = read_logs(tmp_path, never_ends="survivor", expected=lambda entry: entry.get("reason") == "Doomed")
    assert logged.events["warning outage"] == 2
    assert [line.partition(":")[2].strip() for line in logged.unexpected] == [
        json.dumps(lines[3]),
        "Traceback",
        json.dumps(ended),
        json.dumps(lines[3]),
        "Traceback",
    ]
