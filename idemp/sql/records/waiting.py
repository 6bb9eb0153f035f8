"""What waits in the tables: pending outputs, retries, dead letters, and who is alive to take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any, Final

from sqlalchemy import and_, case, func, literal, select, true

from idemp.ports import Finding
from idemp.sql.engine import Database
from idemp.sql.retention import overdue
from idemp.sql.scheduler import RELAY_SECONDS

__all__ = ["MOST", "Waiting", "WaitingQueue", "check_waiting", "read_waiting"]

MOST: Final = 100_000  # rows that are looked at, so that a count costs little however many wait
OVERDUE: Final = 60.0  # seconds after which a due row without a holder counts as left


@dataclass(frozen=True)
class WaitingQueue:
    """Rows of one queue.

    Attributes:
        messages: Messages of the SQL broker.
        retries: Retries, due or not.
        due: Retries that are due and not leased.
        dead: Dead letters.
        held: Messages and retries that a worker has leased.
        overdue: Seconds for which the oldest one without a holder has been due.

    Example:
        >>> WaitingQueue("billing", 0, 2, 0, 1, 0, 0).dead
        1
    """

    name: str
    messages: int
    retries: int
    due: int
    dead: int
    held: int
    overdue: int


@dataclass(frozen=True)
class Waiting:
    """Numbers of rows, of which 100,000 of a table are counted at most.

    Attributes:
        pending: Outputs that the broker has not confirmed, without those in quarantine.
        overdue: Seconds for which the oldest of them has been due.
        quarantined: Outputs that no queue took.
        queues: Queues with rows.
        alive: Number of processes that were seen within 15 seconds, by role: `worker`, `relay`.
        refused: Outputs among the pending ones that no queue has taken yet.
        stuck: Outputs and messages that wait for longer than their delay allows.

    Example:
        >>> Waiting(3, 0, 1).alive
        {}
    """

    pending: int
    overdue: int
    quarantined: int
    queues: Sequence[WaitingQueue] = ()
    alive: Mapping[str, int] = field(default_factory=dict)
    refused: int = 0
    stuck: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def read_waiting(database: Database, lease: float = 30.0) -> Waiting:
    """Count what waits. SELECT is the only right that this needs.

    Args:
        database: Is read, and not changed.
        lease: Seconds for which a worker leases a message.

    Example:
        >>> from idemp.sql.schema import upgrade
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     database = Database(f"sqlite:///{folder}/shop.db")
        ...     upgrade(database)
        ...     read_waiting(database).pending
        0
    """
    tables, now = database.tables, database.dialect.now
    some = select(*(tables.pending.c[name] for name in ("due_at", "quarantined_at", "refusals"))).limit(MOST).subquery()
    in_quarantine = some.c.quarantined_at.is_not(None)
    refused = _count(~in_quarantine, some.c.refusals > 0)
    of_pending = select(_count(~in_quarantine), _longest(now, some.c.due_at, ~in_quarantine), _count(in_quarantine), refused)
    stuck = {
        table: select(func.count()).select_from(select(literal(1)).select_from(table).where(late).limit(MOST).subquery())
        for table, late in overdue(database, lease).items()
    }
    columns = ("queue", "due_at", "holder")
    chosen = [tables.message.c[name] for name in columns]
    rows = select(*chosen, tables.message.c.history.is_not(None).label("failed")).limit(MOST).subquery()
    due, held = rows.c.due_at.is_not(None), rows.c.holder.is_not(None)
    of_queues = select(
        rows.c.queue,
        _count(~rows.c.failed),
        _count(rows.c.failed, due),
        _count(rows.c.failed, rows.c.due_at <= now, ~held),
        _count(rows.c.failed, ~due),
        _count(held),
        _longest(now, rows.c.due_at, ~held),
    ).group_by(rows.c.queue)
    worker = tables.worker
    lately = and_(~worker.c.stopping, worker.c.seen_at.between(now - RELAY_SECONDS, now))
    with database.engine.connect() as connection:
        pending, longest, quarantined, refused = map(int, connection.execute(of_pending).one())  # sums may be decimals
        late = connection.execute(stuck[tables.pending]).scalar_one()
    with database.queue_engine.connect() as connection:
        found = connection.execute(of_queues.order_by(rows.c.queue)).all()
        queues = [WaitingQueue(name, *map(int, numbers)) for name, *numbers in found]
        rows_alive = connection.execute(select(worker.c.role, func.count()).where(lately).group_by(worker.c.role)).all()
        late += connection.execute(stuck[tables.message]).scalar_one()
    alive = {role: count for role, count in rows_alive}  # noqa: C416 - rows
    return Waiting(pending, longest, quarantined, queues, alive, refused, late)


def check_waiting(waiting: Waiting, commands: Mapping[str, str]) -> list[Finding]:
    """Return findings about what waits.

    Args:
        waiting: What was counted.
        commands: The command that starts the worker of a queue, as far as it is known.

    Example:
        >>> [str(finding) for finding in check_waiting(Waiting(0, 0, 0, [WaitingQueue("billing", 0, 0, 0, 2, 0, 0)]), {})]
        ['the queue billing has 2 dead letters: idemp dead list --queue billing']
    """
    found = []
    if waiting.overdue > OVERDUE and not waiting.alive:
        text = f"{_counted(waiting.pending, 'output')} pending, and no worker or relay was seen within {RELAY_SECONDS:.0f} s"
        found.append(Finding("red", text, "idemp relay"))
    if waiting.stuck:
        text = f"{_counted(waiting.stuck, 'row')} wait for longer than their delay allows: the database's clock was set back"
        found.append(Finding("red", text, "start a worker or a relay, which makes them due: idemp relay"))
    if waiting.refused:
        text = f"no queue has taken {_counted(waiting.refused, 'output')} yet: in quarantine 11 minutes after the first refusal"
        found.append(Finding("yellow", text, "idemp inbox list --pending"))
    if waiting.quarantined:
        text = f"no queue took {_counted(waiting.quarantined, 'output')}, so they are in quarantine"
        found.append(Finding("yellow", text, "idemp inbox list --quarantined"))
    for queue in waiting.queues:
        if queue.overdue > OVERDUE and not queue.held:
            text = f"no worker has taken what is due in the queue {queue.name} for {queue.overdue} s"
            fix = commands.get(queue.name, f"idemp worker MODULE:APP, of the app that is called {queue.name}")
            found.append(Finding("red", text, fix))
        if queue.dead:
            text = f"the queue {queue.name} has {_counted(queue.dead, 'dead letter')}"
            found.append(Finding("yellow", text, f"idemp dead list --queue {quote(queue.name)}"))
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _count(*conditions: Any) -> Any:
    return func.coalesce(func.sum(case((and_(true(), *conditions), 1), else_=0)), 0)


def _longest(now: Any, due_at: Any, condition: Any) -> Any:
    """Return for how long the oldest row has been due."""
    late = func.max(case((and_(condition, due_at <= now), now - due_at), else_=0.0))
    return func.coalesce(late, 0.0)
