"""Costs of a delivery in counts, which do not depend on the machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.pq import Trace
from sqlalchemy import Pool, event

from benchmarks.calls import record
from idemp import Context
from idemp.handling import Handling
from idemp.identity import uuid7
from idemp.messages import Delivery
from tests.world import SINK, Order, Shipped, SteppedWorker, World, effect, event_loop


def test_own_calls_of_a_delivery() -> None:
    assert len(record(10)) / 10 <= 105  # Python 3.11 counts comprehensions, too


@pytest.fixture
def trips(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Count the round trips to PostgreSQL since the last call: each ends a simple query, or an extended one by its Sync."""
    trace = tmp_path / "trace"
    descriptor = os.open(trace, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def connected(driver: Any, _record: Any) -> None:
        driver = getattr(driver, "driver_connection", driver)
        driver.pgconn.trace(descriptor)
        driver.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)

    seen = 0

    def trips() -> int:
        nonlocal seen
        lines = trace.read_text(errors="replace").splitlines()
        found = sum(line.split("\t")[:1] == ["F"] and line.split("\t")[2] in ("Query", "Sync") for line in lines[seen:])
        seen = len(lines)
        return found

    event.listen(Pool, "connect", connected)
    yield trips
    event.remove(Pool, "connect", connected)
    os.close(descriptor)


def insert_and_publish(message: Order, ctx: Context) -> None:
    ctx.connection.execute(effect.insert().inline(), {"what": message.order_id})
    ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)


@pytest.mark.parametrize("kind", ["postgresql", "postgresql-psycopg"], indirect=True)
def test_round_trips_of_a_delivery_up_to_its_commit(url: str, trips: Callable[[], int]) -> None:
    world = World(url, insert_and_publish)
    worker = world.worker()

    executor = worker.protocol.executor
    done: list[Handling] = []

    def execute(*ids: str, batch: int = 1) -> int:
        body = [json.dumps({"order_id": id}).encode() for id in ids]
        handlings = [executor.accept(Delivery("shop", {"type": "shop.Order", "message_id": uuid7()}, each)) for each in body]
        worker.app.handlers["shop.Order"].batch = batch
        trips()
        if isinstance(worker, SteppedWorker):
            store = worker.runner._store
            call = store.run(executor.for_task(store).execute, [handlings])
            asyncio.run_coroutine_threadsafe(call, event_loop()).result()
        else:
            executor.execute([handlings])
        assert all(handling.error is None for handling in handlings)
        done[:] = handlings
        return trips()

    execute("warm")
    assert execute("1") == 3
    assert execute("1") == 2
    assert (executor.read_back(done), trips()) == (False, 1)  # once a group
    assert execute(*map(str, range(100, 150)), batch=50) == 52
    assert world.effects() == dict.fromkeys(["warm", "1", *map(str, range(100, 150))], 1)


def test_statements_of_a_delivery(url: str) -> None:
    world = World(url)
    worker = world.worker()
    world.send("warm", "warm")
    world.work(worker)
    database: Any = worker.adapters.store.database  # type: ignore[attr-defined]
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
