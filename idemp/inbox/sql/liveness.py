"""Who is alive, and when each consumer was consuming: heartbeats, relays, and the retention window made of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, case, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from idemp.inbox.port import DEFAULT_BROKER
from idemp.inbox.sql.brokers import OwnBroker
from idemp.inbox.sql.queues import Queues
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.times import refresh

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Engine

    from idemp.clock import Clock
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables

BEAT_INTERVAL: Final = timedelta(seconds=5)
RELAY_ALIVE_WITHIN: Final = timedelta(seconds=15)
"""Three beats: a relay that missed them all is not counted on."""
ACTIVITY_GAP: Final = timedelta(seconds=60)
"""Beats further apart than this have downtime between them, which no retention window counts."""
FAR_PAST: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Older than any claim: "nothing is late"."""
_STEP_SECONDS: Final = 1.0
"""By how much a clock may differ from the time that passed between two beats; what is more was no consuming."""
KEPT_ACTIVITY: Final = timedelta(days=400)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it last showed itself; `seen_at` is `None` after a clean end, `broker` the name of its broker."""

    name: str
    started_at: datetime
    seen_at: datetime | None
    relay: bool
    alive: bool
    broker: str = DEFAULT_BROKER


class Liveness:
    """Heartbeats in the database.

    Example:
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> liveness = Liveness(engine, tables, SystemClock(), Names(engine, tables))
        >>> liveness.relay_alive()
        False
        >>> liveness.beat("host-1", relay=True, consumers=["orders"])
        >>> liveness.relay_alive()
        True
    """

    def __init__(
        self, engine: Engine, tables: Tables, clock: Clock, names: Names, broker: OwnBroker | None = None
    ) -> None:
        self._short = Short(engine)
        self._clock = clock
        self._names = names
        self._last: tuple[datetime, float] | None = None
        self._broker = broker = broker or OwnBroker(names)
        self._queues = Queues(tables)
        worker, activity = tables.worker, tables.activity
        now = bindparam("now", type_=worker.c.seen_at.type)
        self._seen = (
            update(worker)
            .where(worker.c.id == bindparam("worker_id"))
            .values(  # in this order: MySQL sees what was assigned before
                started_at=case((worker.c.seen_at.is_(None), now), else_=worker.c.started_at),
                seen_at=now,
                relay=bindparam("is_relay"),
                broker_id=bindparam("broker_id"),
            )
        )
        self._retire = update(worker).where(worker.c.name == bindparam("worker")).values(seen_at=None, relay=False)
        # A beat from the future is of a clock that was wrong, and shows nothing.
        seen = worker.c.seen_at.between(bindparam("since"), bindparam("until"))
        relays = select(worker.c.id).where(worker.c.relay, seen)
        self._relays = relays.where(broker.owns(worker)).limit(1)
        self._workers = (
            select(
                worker.c.name,
                worker.c.started_at,
                worker.c.seen_at,
                worker.c.relay,
                tables.broker.c.name.label("broker"),
            )
            .select_from(worker.outerjoin(tables.broker, tables.broker.c.id == worker.c.broker_id))
            .order_by(worker.c.name)
        )
        of_consumer = activity.c.consumer_id == bindparam("consumer")
        self._intervals = (
            select(activity.c.started_at, activity.c.ended_at).where(of_consumer).order_by(activity.c.started_at.desc())
        )
        self._latest = self._intervals.limit(1)
        self._extend = (
            update(activity)
            .where(of_consumer, activity.c.started_at == bindparam("started"), activity.c.ended_at < now)
            .values(ended_at=now)
        )
        self._open = insert(activity).values(
            consumer_id=bindparam("consumer"), started_at=bindparam("started"), ended_at=bindparam("ended")
        )
        self._prune = delete(activity).where(of_consumer, activity.c.ended_at < bindparam("before"))

    def beat(
        self, worker: str, *, relay: bool, consumers: Iterable[str], queues: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Show life of a worker, whether it is a relay, which consumers consume, and from which queues they do."""
        worker_id = self._names.id("worker", worker)
        consuming = sorted(self._names.id("consumer", consumer) for consumer in set(consumers))
        places = sorted((self._names.id("consumer", consumer), queue) for consumer, queue in queues)
        refresh(self._clock)
        now, stepped, broker_id = self._clock.now(), self._clock_stepped(), self._broker.id

        def work(connection: Connection) -> None:
            connection.execute(
                self._seen, {"worker_id": worker_id, "now": now, "is_relay": relay, "broker_id": broker_id}
            )
            for consumer_id in consuming:
                self._consumed(connection, consumer_id, now, stepped=stepped)
            for consumer_id, queue in places:
                self._queues.used(connection, consumer_id, queue, now)

        try:
            self._short.run(work)
        except IntegrityError:
            self._short.run(work)  # another worker opened an interval in the same microsecond: extend that one

    def _clock_stepped(self) -> bool:
        """Whether the clock has gone another way since the last beat than time did."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        former, self._last = self._last, (now, monotonic)
        if former is None:
            return False
        return abs((now - former[0]).total_seconds() - (monotonic - former[1])) > _STEP_SECONDS

    def retire(self, worker: str) -> None:
        """Take a worker's heartbeat back; an unknown worker is none."""
        self._short.run(lambda connection: connection.execute(self._retire, {"worker": worker}))

    def relay_alive(self) -> bool:
        """Whether some relay that ships to this broker showed life within `RELAY_ALIVE_WITHIN`."""
        now = self._clock.now()
        lately = {"since": now - RELAY_ALIVE_WITHIN, "until": now + RELAY_ALIVE_WITHIN, **self._broker.said()}
        return self._short.run(lambda connection: connection.scalar(self._relays, lately)) is not None

    def workers(self) -> Sequence[WorkerRow]:
        """All workers that this database ever saw, by name."""
        now = self._clock.now()
        rows = self._short.run(lambda connection: connection.execute(self._workers).all())
        return [
            WorkerRow(
                row.name,
                row.started_at,
                row.seen_at,
                row.relay,
                row.seen_at is not None and abs(now - row.seen_at) <= RELAY_ALIVE_WITHIN,
                row.broker or DEFAULT_BROKER,
            )
            for row in rows
        ]

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The moment since which the consumer has consumed for `retention` in sum; `FAR_PAST` if it has not yet."""
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return FAR_PAST
        return self._short.run(lambda connection: self.late_before_by(connection, consumer_id, retention))

    def late_before_by(self, connection: Connection, consumer_id: int, retention: timedelta) -> datetime:
        """As `late_before`, in somebody's transaction."""
        missing = retention
        later = self._clock.now()
        started_at: datetime
        ended_at: datetime
        for started_at, ended_at in connection.execute(self._intervals, {"consumer": consumer_id}):
            until = min(ended_at, later)  # two workers may have opened overlapping intervals; clocks may differ
            consumed = max(until - started_at, timedelta(0))
            if consumed >= missing:
                return until - missing
            missing -= consumed
            later = min(later, started_at)
        return FAR_PAST

    def ago(self, period: timedelta) -> datetime:
        """The moment so long before now, by the clock and not by consuming time; `FAR_PAST` at the earliest."""
        return self._clock.now() - min(period, self._clock.now() - FAR_PAST)

    def prune(self, connection: Connection, consumer_id: int, longest: timedelta) -> None:
        """Forget intervals that no window of this length, nor any within `KEPT_ACTIVITY`, can need."""
        before = min(self.late_before_by(connection, consumer_id, longest), self._clock.now() - KEPT_ACTIVITY)
        if before > FAR_PAST:
            connection.execute(self._prune, {"consumer": consumer_id, "before": before})

    def _consumed(self, connection: Connection, consumer_id: int, now: datetime, *, stepped: bool) -> None:
        latest = connection.execute(self._latest, {"consumer": consumer_id}).first()
        if latest is None or latest.ended_at < now - (timedelta(0) if stepped else ACTIVITY_GAP):
            connection.execute(self._open, {"consumer": consumer_id, "started": now, "ended": now})
        elif latest.ended_at < now:
            connection.execute(self._extend, {"consumer": consumer_id, "started": latest.started_at, "now": now})
