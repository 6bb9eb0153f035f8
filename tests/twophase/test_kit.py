"""The test kit runs handlers of several databases: the machine, faults at COMMIT, and what they find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, Table, func, select

from idemp import App, Context, Outcome, TwoPhase
from idemp.testing import CRASH_POINTS, Harness, assert_idempotent, redelivery_machine
from idemp.testing.options import ALL_POINTS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

METADATA = MetaData()
EFFECT = Table("effect", METADATA, Column("id", Integer))


def app(handler: Callable[[dict[str, Any], Context], None] | None = None) -> App:
    made = App("billing", databases={"ledger": "postgresql://nowhere/ledger"})

    def pay(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.execute(EFFECT.insert(), {"id": message["id"]})
        ctx.database("ledger").session.execute(EFFECT.insert(), {"id": message["id"]})
        ctx.send({"id": message["id"]}, to="stock", type="stock.Reserve")

    made.handler(dict, type="billing.Pay", policy=TwoPhase("ledger", key="id"))(handler or pay)
    return made


def count(session: Any) -> int:
    return session.scalar(select(func.count()).select_from(EFFECT)) or 0


def everywhere(harness: Harness) -> tuple[int, int]:
    return harness.state(count), harness.databases["ledger"].rows()["effect"]


@pytest.mark.parametrize(
    "point", [each for each in CRASH_POINTS if each.name in ALL_POINTS], ids=lambda point: point.name
)
def test_crash_points(point: Any) -> None:
    with Harness(app(), tables=METADATA) as harness:
        harness.send({"id": 1}, type="billing.Pay")
        harness.script.die(point.name)
        harness.step()
        committed, there = everywhere(harness)
        assert committed == there, "recovery, at the next worker's start, makes them agree"
        harness.rest()
        assert everywhere(harness) == (1, 1)
        assert harness.databases["ledger"].held is None


@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed", "transient", "away"])
def test_commits_that_fail(fault: str) -> None:
    with Harness(app(), tables=METADATA) as harness:
        harness.send({"id": 1}, type="billing.Pay")
        harness.script.commit_faults.append(fault)
        step = harness.step()
        assert step is not None
        assert step.outcome in {Outcome.HANDLED, Outcome.REDISPATCHED}
        assert everywhere(harness) == (1, 1)


TestMachine = redelivery_machine(
    app(), messages={"billing.Pay": st.fixed_dictionaries({"id": st.integers(1, 3)})}, state=count, tables=METADATA
).TestCase


def test_what_the_other_database_alone_shows_is_compared() -> None:
    """A handler that writes more there when it runs again is found out."""
    runs: list[int] = []

    def pay(message: dict[str, Any], ctx: Context) -> None:
        for _ in range(1 + len(runs) % 2):
            ctx.database("ledger").session.execute(EFFECT.insert(), {"id": message["id"]})
        runs.append(1)

    with pytest.raises(AssertionError, match="'ledger'"):
        assert_idempotent(
            pay,
            {"id": 1},
            message=dict,
            type="billing.Pay",
            policy=TwoPhase("ledger", key="id"),
            tables=METADATA,
            detect=(),
        )


def test_ending_it_is_refused_as_in_a_service() -> None:
    def pay(_: dict[str, Any], ctx: Context) -> None:
        ctx.database("ledger").session.commit()

    with Harness(app(pay), tables=METADATA) as harness:
        harness.send({"id": 1}, type="billing.Pay")
        step = harness.step()
        assert step is not None
        assert step.outcome is Outcome.PARKED
