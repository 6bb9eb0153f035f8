"""Celery workers that are killed between the effect of a task and its ack: how often each tool lets the effect happen.

`python -m benchmarks.kills` starts private servers, and a real prefork worker for each tool. A task inserts one row into PostgreSQL.
At its first run, SIGKILL ends its process: at once when the row is committed, or when the task has returned to Celery. RabbitMQ
delivers it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from celery import Celery, Task
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, func, select

from benchmarks.servers import running

TOOLS: Final = {
    "Celery alone": "celery",
    "Celery's deduplication": "celery",
    "celery-once": "celery-once",
    "celery-singleton": "celery-singleton",
    "idemkit on PostgreSQL": "idemkit",
    "idemp": "idemp",
}
"""Tools, and the distribution of each."""
POINTS: Final = {"commit": "when the effect was committed", "return": "when the task had returned"}
EFFECT: Final = Table("effect", MetaData(), Column("row", Integer, primary_key=True), Column("what", String(80)))
PATIENCE: Final = 120.0  # seconds for all tasks of a tool
LEASE: Final = 2.0  # seconds for which idemkit leaves a run alone that may have died


@dataclass(frozen=True)
class Trial:
    """A tool, the point at which its tasks are killed, and the servers."""

    tool: str
    point: str
    database: str
    broker: str
    redis: str
    folder: str

    @property
    def name(self) -> str:
        return f"{self.tool} {self.point}".replace(" ", "-").replace("'", "")


class Killer:
    """Kills this process at a point of a task's first run."""

    def __init__(self, trial: Trial, engine: Engine) -> None:
        self._trial, self._order, self._commit = trial, -1, engine.dialect.do_commit
        engine.dialect.do_commit = self._committed  # type: ignore[method-assign]

    def insert(self, execute: Callable[..., object], order: int) -> int:
        """Insert the effect of a task."""
        execute(EFFECT.insert(), {"what": f"{self._trial.name} {order}"})
        self._order = order
        return order

    def reach(self, point: str) -> None:
        """Kill the process if it is to die here, and has not done so with this order before."""
        order, self._order = self._order, -1 if point == "return" else self._order
        if point == self._trial.point and order >= 0:
            try:
                (Path(self._trial.folder) / f"{self._trial.name} {order}").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def _committed(self, connection: Any) -> None:
        self._commit(connection)
        self.reach("commit")


def make(trial: Trial) -> tuple[Celery, Any]:
    """Return the app of a tool, as its own pages advise, and its task."""
    app = Celery(trial.name, broker=trial.broker, backend=trial.redis)
    app.conf.update(
        task_default_queue=trial.name,
        broker_transport_options={"confirm_publish": True},
        worker_prefetch_multiplier=1,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
    )
    engine = create_engine(trial.database)
    base: Any = Task
    options: dict[str, Any] = {}
    killer = Killer(trial, engine)

    def charge(order: int) -> int:
        with engine.begin() as connection:
            return killer.insert(connection.execute, order)

    if trial.tool == "Celery's deduplication":
        app.conf.worker_deduplicate_successful_tasks = True
    elif trial.tool == "celery-once":
        from celery_once import QueueOnce

        base = QueueOnce
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": trial.redis, "default_timeout": 3600}}
    elif trial.tool == "celery-singleton":
        from celery_singleton import Singleton

        base = Singleton
        app.conf.singleton_backend_url = trial.redis
    elif trial.tool == "idemkit on PostgreSQL":
        from idemkit import MethodConfig, PostgresBackend, idempotent_sync

        backend = PostgresBackend.from_url(trial.database.replace("+psycopg", ""), min_size=1)
        waits = {"lease_ttl_seconds": LEASE, "wait_timeout_seconds": LEASE / 2}
        config = MethodConfig(key_fields=["order"], version=trial.point, **waits)
        # The second run finds the lease of the first one, and fails; only a third one can take it over.
        options = {"autoretry_for": (Exception,), "default_retry_delay": 2 * LEASE}
        charge = idempotent_sync(backend=backend, config=config)(charge)
    elif trial.tool == "idemp":
        from idemp import Inbox
        from idemp.integrations.celery import install, session

        base = install(app, Inbox(engine))

        def charge(order: int) -> int:
            return killer.insert(session().execute, order)

    class Killed(base):  # type: ignore[misc]
        abstract = True

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            value = super().__call__(*arguments, **named)
            killer.reach("return")
            return value

    return app, app.task(base=Killed, name="charge", **options)(charge)


def measure(trial: Trial, count: int) -> dict[str, int]:
    """Kill the process of each of some tasks once; return how many have had their effect once and twice, and failed in the end.

    Raises:
        TimeoutError: Some are not finished in time.
    """
    app, charge = make(trial)
    with subprocess.Popen([sys.executable, "-m", "benchmarks.kills", "--worker", *astuple(trial)]) as worker:
        try:
            results = [charge.apply_async((order,)) for order in range(count)]
            failures: Counter[str] = Counter()
            deadline = time.monotonic() + PATIENCE
            while not all(each.ready() for each in results):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{trial.name}: {sum(each.ready() for each in results)} of {count} tasks were finished")
                time.sleep(0.2)
            failures.update(str(each.result)[:100] for each in results if each.failed())
        finally:
            worker.terminate()  # a warm shutdown, after which no task runs
            worker.wait(60)
            app.close()
    engine, mine = create_engine(trial.database), EFFECT.c.what.startswith(f"{trial.name} ")
    with engine.connect() as connection:
        times = list(connection.scalars(select(func.count()).where(mine).group_by(EFFECT.c.what)))
    engine.dispose()
    assert len(times) == count, "an effect was lost"
    print(trial.name, dict(failures), file=sys.stderr)
    return {"once": times.count(1), "twice": count - times.count(1), "failed": sum(failures.values())}


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table: the effects of the tasks that were killed at each point."""
    rows = []
    for tool, each in figures.items():
        name = tool if tool == "idemp" else f"{tool} {each['version']}"
        rows += [
            f"| {name} | {text} | {' | '.join(str(each[point][what]) for what in ('once', 'twice', 'failed'))} |"
            for point, text in POINTS.items()
        ]
    head = ["| | killed | effect once | effect twice | task failed |", "|---|---|--:|--:|--:|"]
    return "\n".join([*head, *rows])


def main() -> None:
    """Measure the tools one after another, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("tools", nargs="*", default=list(TOOLS), metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--tasks", type=int, default=20, help="tasks of each tool and point, each of which is killed once")
    parser.add_argument("--save", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        servers = stack.enter_context(running(Path(tempfile.gettempdir()), redis=True))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-kills-"))
        engine = create_engine(servers.database)
        EFFECT.metadata.create_all(engine)
        engine.dispose()
        if "idemkit on PostgreSQL" in options.tools:
            command = [str(Path(sys.executable).with_name("idemkit")), "init-pg", servers.database.replace("+psycopg", "")]
            subprocess.run(command, check=True)
        for tool in options.tools:
            trials = [Trial(tool, point, servers.database, servers.broker, servers.redis, folder) for point in POINTS]
            figures[tool] = {each.point: measure(each, options.tasks) for each in trials} | {"version": version(TOOLS[tool])}
    print(table(figures))
    if options.save:
        options.save.write_text(f"{json.dumps(figures, indent=1)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        app, _ = make(Trial(*sys.argv[2:]))
        app.worker_main(
            ["worker", "--concurrency=2", "--loglevel=CRITICAL", "--without-gossip", "--without-mingle", "-P", "prefork"]
        )
    else:
        main()
