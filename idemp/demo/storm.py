"""The storm of the demo: send, repeat, kill, and count."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from sqlalchemy import Select, distinct, func, select

from idemp.context import EXCHANGE
from idemp.demo import apps
from idemp.errors import IdempError
from idemp.identity import uuid7
from idemp.messages import Output, encode
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade

__all__ = ["Report", "run"]

WORKERS: Final = ("orders", "orders", "stock")
DUPLICATES: Final = 0.2
LEASE: Final = "1s"  # so that the messages of a killed process come back soon
AT_ONCE: Final = 100
PATIENCE: Final = 300.0  # seconds


@dataclass(frozen=True)
class Report:
    """Counts at the end of the demo.

    Attributes:
        lost: Messages without an effect in either consumer.
        doubled: Messages with more than one effect in either consumer.
        two_ids: Outputs that arrived under more than one id.
        left: Rows that still wait or are dead.

    Example:
        >>> Report(messages=1, copies=2, kills=0, lost=0, doubled=0, two_ids=0, left=0, seconds=1.0).kept
        True
    """

    messages: int
    copies: int
    kills: int
    lost: int
    doubled: int
    two_ids: int
    left: int
    seconds: float

    @property
    def kept(self) -> bool:
        """True if every promise was kept."""
        return not (self.lost or self.doubled or self.two_ids or self.left)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, and whether every promise was kept."""
        return {**asdict(self), "kept": self.kept}

    def __str__(self) -> str:
        verdict = "every effect once, every output under one id" if self.kept else "A PROMISE WAS BROKEN"
        return (
            f"{self.messages:,} messages, {self.copies:,} more copies of them, {self.kills} processes killed at work, "
            f"{self.seconds:.0f} s\nlost {self.lost}, doubled {self.doubled}, outputs under two ids {self.two_ids}, "
            f"left over {self.left}: {verdict}"
        )


def run(*, messages: int = 2_000, kills: int = 20, seed: int = 1, folder: Path | None = None, quiet: bool = False) -> Report:
    """Run the demo.

    Args:
        messages: Commands to send; a fifth of them is sent twice.
        kills: Processes that SIGKILL ends while they hold messages.
        seed: Seed of the choice of duplicates and killed processes.
        folder: Folder of the database; a temporary folder by default.
        quiet: Whether to show no progress.

    Raises:
        IdempError: The folder exists, or the workers did not finish in five minutes.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-demo-")))
        else:
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                raise IdempError(f"{folder} exists: the demo makes a folder of its own") from None
        database = Database(f"sqlite:///{folder}/demo.db")
        stack.callback(database.close)
        upgrade(database)
        with database.short() as connection:
            apps.metadata.create_all(connection)
        progress = stack.enter_context(Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()))
        workers = stack.enter_context(_workers(folder, database))
        return _storm(database, workers, progress, random.Random(seed), messages, kills)


def _storm(database: Database, workers: _Workers, progress: Progress, chance: random.Random, messages: int, kills: int) -> Report:
    start = time.monotonic()
    commands = [_command(number) for number in range(messages)]
    copies = chance.sample(commands, int(messages * DUPLICATES))
    todo = commands + copies
    chance.shuffle(todo)
    broker = SqlBroker(database, "demo")
    for app in (apps.orders, apps.stock):
        broker.declare(app.name, sorted(app.handlers))
    publisher = broker.publisher()
    task = progress.add_task("handled by both consumers", total=2 * messages)
    killed = sent = 0
    while True:
        handled = _count(database, select(func.count()).select_from(apps.order))
        handled += _count(database, select(func.count()).select_from(apps.reservation))
        progress.update(task, completed=handled)
        if sent < len(todo) and sent < handled + 2 * AT_ONCE:
            if any(publisher.publish(todo[sent : sent + AT_ONCE], 10.0)):
                raise IdempError("the demo's broker took no messages")
            sent += AT_ONCE
        if killed < kills and handled >= 2 * messages * killed // kills and workers.kill(chance):
            killed += 1
        workers.restart()
        if sent >= len(todo) and killed == kills and not _waiting(database):
            break
        if time.monotonic() - start > PATIENCE:
            raise IdempError(f"the demo did not end: {_waiting(database)} rows wait after {PATIENCE:.0f} s")
        time.sleep(0.02)
    seconds = round(time.monotonic() - start, 1)
    return _report(database, messages=messages, copies=len(copies), kills=killed, seconds=seconds)


class _Workers:
    """Worker processes, each restarted when it has ended."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._database = database
        self._environment = {**os.environ, "IDEMP_DATABASE_URL": f"sqlite:///{folder}/demo.db", "IDEMP_LEASE": LEASE}
        self._log = (folder / "workers.log").open("ab")
        self._running = [(app, self._start(app)) for app in WORKERS]

    def kill(self, chance: random.Random) -> bool:
        """Kill a process that holds messages; return whether there was one."""
        message = self._database.tables.message
        with self._database.queue_engine.connect() as connection:
            holders = connection.scalars(select(message.c.holder).where(message.c.holder.is_not(None)).distinct()).all()
        busy = [process for _, process in self._running if any(f"-{process.pid}-" in holder for holder in holders)]
        if not busy:
            return False
        victim = chance.choice(busy)
        victim.kill()
        victim.wait()
        return True

    def restart(self) -> None:
        """Start a process for each that has ended."""
        self._running = [(app, process if process.poll() is None else self._start(app)) for app, process in self._running]

    def close(self) -> None:
        """Stop all processes."""
        for _, process in self._running:
            process.terminate()
        for _, process in self._running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _start(self, app: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "idemp", "worker", f"idemp.demo.apps:{app}"]
        return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)  # noqa: S603


@contextlib.contextmanager
def _workers(folder: Path, database: Database) -> Iterator[_Workers]:
    workers = _Workers(folder, database)
    try:
        yield workers
    finally:
        workers.close()


def _command(number: int) -> Output:
    id = uuid7()
    properties = {"message_id": id, "type": apps.PlaceOrder.__message_type__, "timestamp": time.time()}
    command = encode(apps.PlaceOrder(order_id=number))
    return Output(id, "publish", EXCHANGE, apps.PlaceOrder.__message_type__, properties, command)


def _count(database: Database, query: Select[Any], *, queues: bool = False) -> int:
    with (database.queue_engine if queues else database.engine).connect() as connection:
        return int(connection.execute(query).scalar() or 0)


def _waiting(database: Database) -> int:
    """Return how many messages, retries and outputs wait; dead letters do not."""
    message, pending = database.tables.message, database.tables.pending
    rows = _count(database, select(func.count()).where(message.c.due_at.is_not(None)), queues=True)
    return rows + _count(database, select(func.count()).select_from(pending))


def _report(database: Database, *, messages: int, copies: int, kills: int, seconds: float) -> Report:
    lost = doubled = 0
    for table in (apps.order, apps.reservation):
        with database.engine.connect() as connection:
            counts = connection.execute(select(table.c.order_id, func.count()).group_by(table.c.order_id)).all()
        effects = {number: count for number, count in counts}  # noqa: C416 - typed as pairs
        lost += sum(number not in effects for number in range(messages))
        doubled += sum(count > 1 for count in effects.values())
    ids = select(apps.reservation.c.order_id).group_by(apps.reservation.c.order_id)
    ids = ids.having(func.count(distinct(apps.reservation.c.message_id)) > 1)
    two_ids = _count(database, select(func.count()).select_from(ids.subquery()))
    left = _count(database, select(func.count()).select_from(database.tables.message), queues=True)
    return Report(messages, copies, kills, lost, doubled, two_ids, left, seconds)
