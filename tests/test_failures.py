"""The table of failures: error class and phase decide, and the store is asked where that leaves it open."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from idemp import Conflict, HandlerError, InFlight, Refuse, Retry, TransactionEnded, Unreadable
from idemp.errors import Late, Poison, TransactionRolledBack, Undelivered, UnknownType
from idemp.failures import RULES, Action, Phase, decide
from idemp.ports import Kind
from idemp.sql.sqlite import SqliteDialect


@dataclass
class Asked:
    """Answers as a store does, and counts how often it was probed."""

    works: bool = True
    probes: int = 0

    def classify(self, error: BaseException) -> Kind | None:
        return SqliteDialect().classify(error)

    def probe(self) -> bool:
        self.probes += 1
        return self.works


def driver_error(name: str) -> OperationalError:
    error = sqlite3.OperationalError("told by the driver")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
    return OperationalError("SELECT 1", None, error)


BUSY, FULL, MISSING = driver_error("BUSY"), driver_error("FULL"), driver_error("ERROR")
BOOM = RuntimeError("boom")


@pytest.mark.parametrize(
    ("error", "phase", "works", "rule", "action"),
    [
        (Unreadable("x"), Phase.ACCEPT, True, "unreadable", Action.PARK),
        (UnknownType("x"), Phase.ACCEPT, True, "unknown type", Action.RETRY),
        (BOOM, Phase.ACCEPT, True, "message class", Action.PARK),
        (Poison("x"), Phase.ACCEPT, True, "poison", Action.PARK),
        (Conflict("x"), Phase.CLAIM, True, "conflict", Action.PARK),
        (Late("x"), Phase.CLAIM, True, "late", Action.PARK),
        (InFlight("x"), Phase.CLAIM, True, "in flight", Action.RETRY),
        (Poison("x"), Phase.CLAIM, True, "poison", Action.PARK),
        (BUSY, Phase.CLAIM, True, "database busy", Action.RERUN),
        (FULL, Phase.CLAIM, False, "database away", Action.HOLD),
        (MISSING, Phase.CLAIM, False, "database away", Action.HOLD),
        (NoConnectionLeft(), Phase.CLAIM, False, "database away", Action.HOLD),
        (MISSING, Phase.CLAIM, True, "before the handler", Action.RERUN),
        (BOOM, Phase.CLAIM, True, "handler", Action.RETRY),
        (BOOM, Phase.HANDLER, True, "handler", Action.RETRY),
        (BOOM, Phase.HANDLER, False, "handler", Action.RETRY),
        (Refuse("x"), Phase.HANDLER, True, "refused", Action.PARK),
        (MISSING, Phase.HANDLER, False, "handler", Action.RETRY),
        (BUSY, Phase.HANDLER, True, "database busy", Action.RERUN),
        (FULL, Phase.HANDLER, True, "connection lost", Action.RERUN),
        (FULL, Phase.HANDLER, False, "database away", Action.HOLD),
        (Conflict("of another unit"), Phase.HANDLER, True, "handler", Action.RETRY),
        (InFlight("of another unit"), Phase.HANDLER, True, "handler", Action.RETRY),
        (TransactionEnded("of another unit"), Phase.HANDLER, True, "handler", Action.RETRY),
        (HandlerError("x"), Phase.HANDLER, True, "handler", Action.RETRY),
        (MISSING, Phase.FINISH, False, "database away", Action.HOLD),
        (MISSING, Phase.FINISH, True, "handler", Action.RETRY),
        (FULL, Phase.FINISH, True, "connection lost", Action.RERUN),
        (TransactionRolledBack("x"), Phase.FINISH, True, "rolled back", Action.RETRY),
        (Undelivered("x", own=False), Phase.DISPATCH, True, "undelivered", Action.RETRY),
        (Undelivered("x", own=True), Phase.DISPATCH, True, "unsendable", Action.RETRY),
    ],
)
def test_the_table(error: Exception, phase: Phase, works: bool, rule: str, action: Action) -> None:
    decision = decide(error, phase, Retry(), [], Asked(works))
    assert (decision.rule.name, decision.action) == (rule, action)


def test_a_database_that_stays_busy_is_away() -> None:
    for phase in (Phase.CLAIM, Phase.HANDLER, Phase.FINISH):
        assert decide(BUSY, phase, Retry(), [], Asked(works=False), reruns=4).action is Action.RERUN
        assert decide(BUSY, phase, Retry(), [], Asked(works=False), reruns=5).action is Action.HOLD
        assert decide(BUSY, phase, Retry(), [], Asked(), reruns=5).action is Action.RETRY


def test_errors_of_this_very_unit_decide() -> None:
    decision = decide(TransactionEnded("session.commit()"), Phase.HANDLER, Retry(), [], Asked(), own=True)
    assert (decision.rule.name, decision.action) == ("transaction ended", Action.PARK)


def test_a_policy_does_not_turn_outages_into_refusals() -> None:
    retry = Retry(retry_on=(KeyError,))
    for error, rule in ((BUSY, "database busy"), (FULL, "connection lost"), (BOOM, "refused"), (KeyError(), "handler")):
        assert decide(error, Phase.HANDLER, retry, [], Asked()).rule.name == rule


@pytest.mark.parametrize(
    ("error", "phase", "uncounted", "then"),
    [
        (UnknownType("x"), Phase.ACCEPT, 20, (Action.PARK, False)),
        (BUSY, Phase.HANDLER, 20, (Action.RETRY, True)),
        (FULL, Phase.HANDLER, 3, (Action.RETRY, True)),
        (BUSY, Phase.CLAIM, None, None),
        (MISSING, Phase.CLAIM, None, None),
        (BOOM, Phase.HANDLER, 0, (Action.RETRY, True)),
        (InFlight("x"), Phase.CLAIM, None, None),
    ],
)
def test_uncounted_retries_come_to_an_end(error: Exception, phase: Phase, uncounted: int | None, then: Any) -> None:
    rule = decide(error, phase, Retry(), [], Asked(), reruns=99).rule
    decisions = []
    for times in range(50):
        history = [
            {"rule": rule.name, "times": times // 2},
            {"rule": "other", "times": 9},
            {"rule": rule.name, "times": times - times // 2},
        ]
        decisions.append(decide(error, phase, Retry(), history, Asked(), reruns=99))
    counts = [decision.action is Action.RETRY and not decision.counted for decision in decisions]
    assert sum(counts) == (50 if uncounted is None else uncounted)
    if then is not None:
        assert (decisions[-1].action, decisions[-1].counted) == then


def test_the_store_is_only_asked_where_it_is_open() -> None:
    store = Asked()
    for error, phase in ((BOOM, Phase.HANDLER), (Conflict("x"), Phase.CLAIM), (BUSY, Phase.CLAIM), (Refuse("x"), Phase.HANDLER)):
        decide(error, phase, Retry(), [], store)
    assert store.probes == 0


def test_every_rule_has_its_reason() -> None:
    assert all(rule.why and name == rule.name for name, rule in RULES.items())
