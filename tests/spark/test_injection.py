"""What counts as a place for a fault: the transactions of chunks in tasks, and COMMITs that succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError

from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.spark.testing.injection import Injector
from idemp.spark.testing.plans import Fault, Place, Plan
from idemp.testing.crash_points import Crash
from tests.spark.chunks import CONSUMER, handle_chunk

pytestmark = pytest.mark.slow


class Running:
    """The task that runs, as PySpark tells it."""

    def __init__(self) -> None:
        self.task: Any = None

    def begin(self, number: int, *, partition: int = 0, attempt: int = 0) -> None:
        told = {"stageId": 7, "partitionId": partition, "attemptNumber": attempt, "taskAttemptId": number}
        self.task = SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()})


@pytest.fixture
def running() -> Running:
    return Running()


@pytest.fixture
def engine(tmp_path: Path, running: Running) -> Iterator[Engine]:
    engine = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db")
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON"))
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (id text PRIMARY KEY, attempt int)"))
        connection.execute(text("CREATE TABLE child (id text REFERENCES effect DEFERRABLE INITIALLY DEFERRED)"))
    Injector(tmp_path / "faults", 40, lambda: running.task).listen(engine, engine.pool)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> SqlStore:
    store = SqlStore(engine)
    store.prepare(CONSUMER, ["tests.Row"])
    return store


def committed(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM effect")) or 0)


@pytest.mark.parametrize(("when", "there"), [("before begin", 0), ("before commit", 0), ("after commit", 1)])
def test_places(when: Any, there: int, tmp_path: Path, running: Running, store: SqlStore) -> None:
    plan = Plan.put(tmp_path / "faults", [Fault("raise", when)])
    running.begin(1, partition=3, attempt=2)
    with pytest.raises(Crash, match=f"{when} 1 of partition 3, attempt 2"):
        handle_chunk(store, ["a"], 0)
    store.engine.dispose()  # the process is gone
    assert committed(store.engine) == there
    (fired,) = plan.fired()
    assert (fired.place.stage, fired.place.executor) == (7, 40)
    handle_chunk(store, ["a"], 0)
    assert committed(store.engine) == 1


def test_transactions_are_counted_by_task(tmp_path: Path, running: Running, store: SqlStore) -> None:
    plan = Plan.put(tmp_path / "faults", [Fault("raise", "before commit", transaction=2)])
    for task, each in enumerate("abc"):
        running.begin(task)
        handle_chunk(store, [each], 0)
    assert plan.fired() == []
    with pytest.raises(Crash):
        handle_chunk(store, ["d"], 0)


def test_what_only_looks_is_not_counted(tmp_path: Path, running: Running, store: SqlStore) -> None:
    Plan.put(tmp_path / "faults", [Fault("raise", "before commit", transaction=2)])
    running.begin(1)
    handle_chunk(store, ["a"], 0)
    with store.begin():
        pass
    with pytest.raises(Crash):
        handle_chunk(store, ["b"], 0)


def test_only_tasks_and_their_chunks_count(tmp_path: Path, running: Running, store: SqlStore) -> None:
    plan = Plan.put(tmp_path / "faults", [Fault("raise", "before commit"), Fault("raise", "after commit")])
    handle_chunk(store, ["a"], 0)  # outside of a task
    running.begin(1)
    store.prepare("another", ["tests.Other"])
    with store.engine.begin() as connection:
        connection.execute(text("DELETE FROM effect"))
    assert plan.fired() == []


def test_commit_that_failed_has_no_after(tmp_path: Path, running: Running, store: SqlStore) -> None:
    plan = Plan.put(tmp_path / "faults", [Fault("raise", "after commit")])
    running.begin(1)
    with pytest.raises(IntegrityError, match="FOREIGN KEY"), store.begin() as unit:
        unit.connection.execute(text("INSERT INTO child VALUES ('no such parent')"))
        unit.commit()
    with store.begin() as unit:
        unit.connection.execute(text("INSERT INTO effect VALUES ('rolled back', 0)"))
    assert plan.fired() == []


class TestPlan:
    def test_each_fault_fires_as_often_as_it_says_whoever_comes(self, tmp_path: Path) -> None:
        plan = Plan.put(tmp_path, [Fault("exit", "before begin", times=2), Fault("kill", "before begin", partition=1)])
        places = [Place("before begin", 0, partition, 0, 1, pid=4, executor=3) for partition in (0, 0, 0, 1, 1)]
        other = Plan(plan.folder)  # another process's
        due = [taking.due(place) for taking, place in zip([plan, other] * 3, places, strict=False)]
        assert [fault and fault.how for fault in due] == ["exit", "exit", None, "kill", None]
        assert [(fired.fault.how, fired.place.partition) for fired in plan.fired()] == [
            ("exit", 0),
            ("exit", 0),
            ("kill", 1),
        ]
        assert sorted(file.name for file in plan.folder.glob("part*")) == []

    def test_one_plan_is_in_force(self, tmp_path: Path) -> None:
        assert Plan.current(tmp_path) is None
        first, second = (Plan.put(tmp_path, [Fault(how, "before begin")]) for how in ("exit", "kill"))
        current = Plan.current(tmp_path)
        assert current is not None
        assert current.folder == second.folder
        first.lift()
        assert Plan.current(tmp_path) is not None
        second.lift()
        assert Plan.current(tmp_path) is None

    @pytest.mark.parametrize("limits", [{"how": "sleep"}, {"when": "at noon"}, {"times": 0}])
    def test_what_is_no_fault(self, limits: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"There is no|at least once"):
            Fault(**{"how": "kill", "when": "before begin", **limits})
