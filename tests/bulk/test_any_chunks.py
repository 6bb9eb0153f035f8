"""Any way to cut messages into chunks, beside online consumers, ends as the online consumer alone would have ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idemp import Context, Idempotent
from idemp.bulk import Bulk, Came, Row
from idemp.inbox.sql import SqlStore, Tables
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import SqlEffects
from tests.house import SELL, House, memory_house, sale, sql_house
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [f"m{number}" for number in range(8)]
FAILING = {"m3"}

deliveries = st.tuples(st.just("online"), st.sampled_from(NAMES))
chunks = st.tuples(
    st.sampled_from(["rows", "commit lost", "commit undone"]),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["f", "g"])), max_size=12),
)
histories = st.lists(deliveries | chunks, max_size=8)


def declare(house: House) -> None:
    def sell(message: dict[str, Any], ctx: Context) -> None:
        house.effects.write(ctx, message["name"])  # type: ignore[arg-type]
        ctx.send({"of": message["name"]}, to="stock", type="stock.Reserve")
        if message["name"] in FAILING:
            raise LookupError(message["name"])

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)


def body(name: str) -> bytes:
    return json.dumps({"name": name}).encode()


def run(house: House, history: list[Any]) -> None:
    """Live through a history, then through the whole list once more."""
    bulk = Bulk(house.app)
    for kind, what in [*history, ("rows", [(name, "f") for name in NAMES])]:
        if kind == "online":
            house.handle(sale(what, body(what)))
            continue
        fault = {"commit lost": "lost, committed", "commit undone": "lost, not committed"}.get(kind)
        house.script.commit_faults = [fault] if fault else []  # type: ignore[list-item]
        rows = [Row(id=name, type=SELL, body=body(name), position=f"{source}#{name}") for name, source in what]
        report = bulk.run(rows)
        house.script.commit_faults = []
        assert report.rows == len(rows)
        assert {each.row.id for each in report.parked} == {name for name, _ in what} & FAILING
        assert report.counts[Came.CONFLICT] == 0


def check(house: House) -> None:
    alone = memory_house()
    declare(alone)
    for name in NAMES:
        alone.handle(sale(name, body(name)))
    while house.relay().taken:
        pass
    assert house.pending() == 0
    assert set(house.sent()) == set(alone.sent())
    for name in NAMES:
        assert house.effects.count(name) == (name not in FAILING)


@settings(deadline=None)
@given(histories)
@pytest.mark.slow
def test_in_memory(history: list[Any]) -> None:
    house = memory_house()
    declare(house)
    run(house, history)
    check(house)


@settings(deadline=None, max_examples=15)
@given(histories)
@pytest.mark.slow
def test_on_sqlite(history: list[Any]) -> None:
    with sql_house() as house:
        declare(house)
        run(house, history)
        check(house)


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Any]:
    with kept.database(postgresql) as made:
        yield made


@pytest.mark.slow
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories)
def test_on_postgresql(engine: Any, history: list[Any]) -> None:
    kept.empty(engine, Tables())
    clock = FakeClock()
    store = SqlStore(engine, clock=clock)
    try:
        house = House(store, SqlEffects(engine), clock)
        declare(house)
        run(house, history)
        check(house)
    finally:
        store.close()
