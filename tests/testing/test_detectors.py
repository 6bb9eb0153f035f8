"""Handlers with classic faults are found out, and told why; correct ones raise nothing."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from idemp import Context, Idempotent
from idemp.testing.detectors import DEFAULT, rehearse
from idemp.testing.findings import Finding, NotIdempotent
from idemp.testing.harness import Harness
from idemp.testing.light import assert_idempotent
from tests.lanes import mostly_slow
from tests.testing import classic, correct, suspicious
from tests.testing.__main__ import attack


@pytest.mark.parametrize("case", mostly_slow(classic.CASES, first=5), ids=lambda case: case.handler.__name__)
def test_classic_faults(case: classic.Classic) -> None:
    with pytest.raises(NotIdempotent) as raised:
        assert_idempotent(
            case.handler,
            classic.SAMPLE,
            message=dict,
            type=classic.TYPE,
            policy=Idempotent(),
            tables=classic.Base.metadata,
        )
    assert raised.value.findings[0].kind == case.kind
    assert case.words in str(raised.value)
    assert case.handler.__name__ in str(raised.value)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    case = classic.CASES[0]
    with Harness(case.app, tables=classic.Base.metadata) as harness:
        rehearse(harness, harness.message(classic.SAMPLE, type=classic.TYPE))
        assert harness.state(lambda session: session.query(classic.Order).count()) == 0
        assert harness.executions == []
        assert harness.publisher.sent == []
        harness.send(classic.SAMPLE, type=classic.TYPE)
        assert harness.step().outcome.name == "HANDLED"  # type: ignore[union-attr]


def keeps_the_last(message: dict[str, Any], ctx: Context) -> None:
    ctx.connection.execute(delete(classic.Order))
    ctx.session.add(classic.Order(number=message["id"], sku=message["sku"]))


def numbers(session: Session) -> list[int]:
    return sorted(session.scalars(select(classic.Order.number)))


@pytest.mark.slow
def test_dependence_on_order_is_looked_for_on_request() -> None:
    samples = [{**classic.SAMPLE, "id": number} for number in (1, 2)]
    about: dict[str, Any] = {"message": dict, "type": classic.TYPE, "policy": Idempotent()}
    about |= {"tables": classic.Base.metadata, "state": numbers}
    assert_idempotent(keeps_the_last, *samples, **about, crash_at=())
    with pytest.raises(NotIdempotent, match=r"\[order\]"):
        assert_idempotent(keeps_the_last, *samples, **about, crash_at=(), detect=DEFAULT | {"order"})


FOUND_IN_OTHERS = {
    "sensors": "memory",
    "credit": "second connection",
    "sales": "memory",
    "cards": "file",
    "points": "unstable key",
    "bank-cards": "file",
    "flights": "redelivered",
    "documents": "after commit",
    "statements": "memory",
}
"""Handlers by somebody who had not seen the detectors. `photos` sends whatever its threads have finished in time."""


@pytest.mark.parametrize("case", mostly_slow(suspicious.CASES, first=2), ids=lambda case: case.name)
def test_faults_by_somebody_else(case: correct.Case) -> None:
    kinds = {finding.kind for finding in found_in(case)}
    if case.name == "photos":
        assert kinds & {"random", "counter", "clock", "set order"}
    else:
        assert FOUND_IN_OTHERS[case.name] in kinds


@pytest.mark.parametrize("case", mostly_slow(correct.CASES, first=2), ids=lambda case: case.name)
def test_correct_handlers_raise_nothing(case: correct.Case) -> None:
    assert found_in(case) == []


def found_in(case: correct.Case) -> list[Finding]:
    with Harness(case.app, tables=case.tables) as harness:
        found = []
        for sample in case.samples:
            message = harness.message(sample)
            found += rehearse(harness, message)
            harness.send(message)
            harness.rest()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("case", correct.CASES[:2], ids=lambda case: case.name)
def test_correct_handlers_under_attack(case: correct.Case) -> None:
    """A sample of what `python -m tests.testing` runs with all of them, a thousand examples each."""
    attack(case, examples=10)
