"""Costs of a delivery in counts, which do not depend on the machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import event

from benchmarks.calls import count
from tests.world import World


def test_own_calls_of_a_delivery() -> None:
    assert sum(count(10).values()) / 10 <= 115


def test_statements_of_a_delivery(url: str) -> None:
    world = World(url)
    worker = world.worker()
    world.send("warm", "warm")
    world.work(worker)
    database: Any = worker._store.database  # type: ignore[attr-defined]
    seen: Counter[str] = Counter()

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen[" ".join(statement.split()[:3] if "INSERT" in statement else statement.split()[:1])] += 1

    def committed(_connection: Any) -> None:
        seen["COMMIT"] += 1

    event.listen(database.engine, "before_cursor_execute", executed)
    event.listen(database.engine, "commit", committed)
    try:
        world.send("1")
        worker.step()
        first, seen = seen, Counter()
        world.send("1")
        worker.step()
    finally:
        event.remove(database.engine, "before_cursor_execute", executed)
        event.remove(database.engine, "commit", committed)
    assert first == {
        "INSERT INTO idemp_inbox": 1,
        "SELECT": 1,  # whether claims of its age were deleted
        "INSERT INTO effect": 1,
        "INSERT INTO idemp_output": 1,
        "INSERT INTO idemp_pending": 1,
        "DELETE": 1,  # what the broker has confirmed
        "COMMIT": 2,
    }
    assert seen == {"INSERT INTO idemp_inbox": 1, "SELECT": 1}
    world.close()
