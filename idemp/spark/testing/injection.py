"""In a Python worker: faults happen at the transactions of chunks, as the session's plan says.

The product has no hooks for this. A chunk is handled in a unit of work of the inbox, of whose connection SQLAlchemy tells
us when it begins, right before its COMMIT is sent, and when it comes back to the pool after it. So it does of transactions
that stage messages for the atomic sink.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy import Engine, event
from sqlalchemy.pool import Pool

from idemp.inbox.sql.arrivals import STAGING_OPTION
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.spark.testing.plans import DRIVER, FAULTS, Fault, Place, Plan, When
from idemp.testing.crash_points import Crash

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.engine import ExceptionContext

EXIT_STATUS: Final = 41
_COMMITTED: Final = "idemp_spark_committed"


class Task(Protocol):
    """What PySpark's `TaskContext` says of the task that runs."""

    def stageId(self) -> int: ...  # noqa: D102, N802 - PySpark's names
    def partitionId(self) -> int: ...  # noqa: D102, N802
    def attemptNumber(self) -> int: ...  # noqa: D102, N802
    def taskAttemptId(self) -> int: ...  # noqa: D102, N802


def install(executor: int) -> None:
    """Let faults happen in this process and in those that are forked of it, if its session has a place for them.

    Args:
        executor: process id of the JVM that this process works for.
    """
    folder = os.environ.get(FAULTS)
    if folder is not None:
        Injector(Path(folder), executor, _spark_task).listen(Engine, Pool)


def _spark_task() -> Task | None:
    from pyspark import TaskContext

    return TaskContext.get()


class Injector:
    """What SQLAlchemy tells, and what happens then.

    Args:
        session: the session's folder of faults.
        executor: process id of the JVM.
        task: the task that runs now, if one does.
    """

    def __init__(self, session: Path, executor: int, task: Callable[[], Task | None]) -> None:
        self._session = session
        self._executor = executor
        self._task = task
        self._last_task: int | None = None
        self._committed = 0

    def listen(self, engine: Engine | type[Engine], pool: Pool | type[Pool]) -> None:
        """Have SQLAlchemy tell."""
        event.listen(engine, "begin", self._begins)
        event.listen(engine, "commit", self._commits)
        event.listen(engine, "rollback", _was_not_committed)
        event.listen(engine, "handle_error", self._fails)
        event.listen(pool, "reset", self._comes_back)

    def _begins(self, connection: Connection) -> None:
        if _is_of_chunk(connection):
            self._at("before begin")

    def _commits(self, connection: Connection) -> None:
        """COMMIT is about to be sent: what an engine's own listeners do, who may send it, comes after this."""
        if _is_of_chunk(connection):
            self._at("before commit")
            connection.info[_COMMITTED] = True

    def _fails(self, context: ExceptionContext) -> None:
        if context.connection is not None:
            _was_not_committed(context.connection)

    def _comes_back(self, _connection: Any, record: Any, _state: Any) -> None:
        if record.info.pop(_COMMITTED, False):
            self._at("after commit")
            self._committed += 1

    def _at(self, when: When) -> None:
        place = self._place(when)
        plan = Plan.current(self._session) if place is not None else None
        if place is not None and plan is not None and (fault := plan.due(place)) is not None:
            _happen(fault, place)

    def _place(self, when: When) -> Place | None:
        task = self._task()
        if task is None:
            return None
        if task.taskAttemptId() != self._last_task:  # a worker process runs one task after the other
            self._last_task, self._committed = task.taskAttemptId(), 0
        return Place(
            when=when,
            stage=task.stageId(),
            partition=task.partitionId(),
            attempt=task.attemptNumber(),
            transaction=self._committed + 1,
            pid=os.getpid(),
            executor=self._executor,
        )


def _happen(fault: Fault, place: Place) -> None:
    if fault.how == "exit":
        os._exit(EXIT_STATUS)
    if fault.how == "raise":
        raise Crash(f"{place.when} {place.transaction} of partition {place.partition}, attempt {place.attempt}")
    if fault.how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
        return  # somebody has woken it: it goes on
    if fault.how == "kill executor":
        os.kill(place.executor, signal.SIGKILL)
    elif fault.how == "kill driver":
        os.killpg(int(os.environ[DRIVER]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _was_not_committed(connection: Connection) -> None:
    if not connection.invalidated:  # one that broke has forgotten everything
        connection.info.pop(_COMMITTED, None)


def _is_of_chunk(connection: Connection) -> bool:
    options = connection.get_execution_options()
    return options.get(UNIT_OPTION) is not None or STAGING_OPTION in options
