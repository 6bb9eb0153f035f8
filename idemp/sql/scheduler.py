"""The scheduler on SQL: everything that waits is a row with a due time.

Pending outputs are in the database of the inbox; retries, dead letters and workers are in that of the SQL broker's queues.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, Row, and_, bindparam, case, delete, exists, func, or_, select, update

from idemp.events import log
from idemp.messages import Delivery, MessageRow, Output, Refusal, read_history, read_properties
from idemp.ports import NewRow
from idemp.sql.engine import Database
from idemp.sql.retention import LONGEST_OWN_PAUSE, LONGEST_PAUSE, STEP, UNDECIDED, Retention, catch_up
from idemp.sql.store import is_erased, output_of

__all__ = ["SATURATED", "UNDECIDED", "SqlScheduler"]

OWN_PAUSES: Final = (2.0, 8.0, 32.0, 128.0, LONGEST_OWN_PAUSE)
"""Seconds after refusals that are an output's own fault, in which others do not count; then quarantine."""
SATURATED: Final = 30_000  # of a small integer
RELAY_SECONDS: Final = 15.0  # a relay that was seen within is alive
LOOK: Final = 50  # rows that are looked at for a suspect, or beyond suspects, at most
BATCH: Final = 500  # rows of one statement; databases limit its parameters


class SqlScheduler:
    """Pending outputs, retries, dead letters and workers of one database.

    Args:
        database: Engines and tables.
        worker: Name of this process: the holder of leased rows.
        lease: Seconds for which a leased row is this worker's; `beat` renews it.

    Example:
        >>> SqlScheduler(Database("sqlite:///shop.db"), "worker-1").lease
        30.0
    """

    def __init__(self, database: Database, worker: str, lease: float = 30.0) -> None:
        self.database, self.worker, self.lease = database, worker, lease
        self._held: dict[int, int] = {}
        self._retention, self._begun = Retention(database), False
        message, pending = database.tables.message, database.tables.pending
        now, dialect = database.dialect.now, database.dialect
        ids: BindParameter[Any] = bindparam("ids", expanding=True)
        self._confirm = delete(pending).where(pending.c.output_id.in_(ids))
        ours = and_(
            message.c.id == bindparam("row"),
            message.c.holder == worker,
            message.c.deliveries == bindparam("delivery"),
        )
        self._done = delete(message).where(ours)
        later = now + bindparam("wait")  # NULL for a dead letter
        # A conflict leaves a row that waits or is held alone, and counts on a dead one, which only a replay revives.
        total = message.c.attempts + bindparam("tries")
        counted = {"attempts": case((total < SATURATED, total), else_=SATURATED)}
        self._new = dialect.upsert(message, ["digest"], counted, where=message.c.due_at.is_(None)).values(
            queue=bindparam("to"),
            due_at=later,
            delay=bindparam("wait"),
            deliveries=bindparam("delivered"),
            attempts=bindparam("tries"),
            deaths=bindparam("died"),
            digest=bindparam("identity"),
            headers=bindparam("properties"),
            body=bindparam("text"),
            history=bindparam("history"),
        )
        worker_row = database.tables.worker
        alive = or_(worker_row.c.stopping, worker_row.c.seen_at > now - lease)
        self._gone = and_(message.c.holder.is_not(None), ~exists().where(worker_row.c.name == message.c.holder, alive))
        waiting = (message.c.queue == bindparam("queue"), message.c.history.is_not(None), message.c.due_at <= now)
        order = (message.c.due_at, message.c.id)
        self._any_due = select(message.c.id).where(*waiting).limit(1)
        # Locked by a statement of its own, so that no server locks, or skips, rows of workers along with them.
        self._due = dialect.lock(select(message.c.id).where(*waiting).order_by(*order).limit(bindparam("most")))
        locked = message.c.id.in_(ids)
        died = case((self._gone, 1), else_=0)
        self._deaths = select(message.c.id, (message.c.deaths + died).label("deaths")).where(locked).order_by(*order)
        self._lease = (
            update(message)
            .where(message.c.id == bindparam("row"))
            .values(deaths=bindparam("died"), holder=worker, deliveries=message.c.deliveries + 1, due_at=now + lease)
        )
        self._leased = select(message).where(locked).order_by(*order)
        self._keep = update(message).where(ours).values(due_at=now + lease)
        self._accompany = update(message).where(ours).values(deaths=message.c.deaths - 1)
        seen = {"role": bindparam("does"), "seen_at": now, "stopping": bindparam("stops")}
        self._beat = dialect.upsert(worker_row, ["name"], {"seen_at": now, "stopping": None}).values(name=worker, **seen)

    # Outputs

    def confirm(self, ids: Sequence[str]) -> None:
        """Delete the pending rows of confirmed outputs."""
        todo, fast = sorted(ids), self.database.fast_path
        if todo and fast is not None and not self.database.engine.dispatch.begin:  # which may set a role
            with self.database.engine.connect() as connection:
                fast.confirm(connection, todo)
        elif todo:
            with self.database.short() as connection:
                for start in range(0, len(todo), BATCH):  # databases limit the parameters of a statement
                    connection.execute(self._confirm, {"ids": todo[start : start + BATCH]})

    def pending(self, ids: Sequence[str]) -> set[str]:
        """Return which outputs have a pending row."""
        pending, found = self.database.tables.pending, set[str]()
        with self.database.engine.connect() as connection:  # takes no write lock
            for start in range(0, len(ids), BATCH):
                rows = select(pending.c.output_id).where(pending.c.output_id.in_(ids[start : start + BATCH]))
                found.update(str(id) for id in connection.scalars(rows))
        return found

    def refuse(self, refusals: Mapping[str, Refusal]) -> None:
        """Postpone outputs with growing pauses. Refusals that are their own fault put them into quarantine, after 11 minutes.

        A refusal within the pause of the last one does not count: copies of a message bring the same outputs.
        """
        pending, now = self.database.tables.pending, self.database.dialect.now
        todo, first, final = sorted(refusals), list[str](), list[str]()
        early = func.coalesce(pending.c.counts_at, 0.0) > now
        known = select(pending.c.output_id, pending.c.attempts, pending.c.refusals, early.label("early"))
        with self.database.short() as connection:
            for start in range(0, len(todo), BATCH):
                ours = known.where(pending.c.output_id.in_(todo[start : start + BATCH]))
                for row in connection.execute(self.database.dialect.lock(ours)).all():
                    id = str(row.output_id)
                    refusal = refusals[id]
                    pause: Any = min(LONGEST_PAUSE, 0.25 + 0.25 * row.attempts * row.attempts)
                    values: dict[str, Any] = {
                        "attempts": min(row.attempts + 1, SATURATED),
                        "reason": refusal.reason[:1000].encode(),
                    }
                    if refusal.own and row.early:
                        pause = pending.c.counts_at - now
                    elif refusal.own:
                        pause = OWN_PAUSES[row.refusals] if row.refusals < len(OWN_PAUSES) else 0.0
                        values |= {"refusals": min(row.refusals + 1, SATURATED), "counts_at": now + pause}
                        if row.refusals >= len(OWN_PAUSES):
                            values["quarantined_at"] = now
                            final.append(id)
                        elif not row.refusals:
                            first.append(id)
                    connection.execute(update(pending).where(pending.c.output_id == id).values(due_at=now + pause, **values))
            for fields in self._places(connection, first, refusals):
                log("output.refused", **fields)
            for fields in self._places(connection, final, refusals):
                log("output.quarantined", **fields)

    def _places(self, connection: Connection, ids: Sequence[str], refusals: Mapping[str, Refusal]) -> list[dict[str, Any]]:
        """Return the fields of log lines about outputs: one for all that go to one place for one reason."""
        output, counts = self.database.tables.output, Counter[tuple[str, str, str]]()
        columns = (output.c.output_id, output.c.kind, output.c.routing_key, output.c.headers)
        pending = self.database.tables.pending
        same = and_(*(output.c[name] == pending.c[name] for name in ("consumer_id", "message_key", "ordinal")))
        for start in range(0, len(ids), BATCH):
            rows = select(*columns).join(pending, same).where(pending.c.output_id.in_(ids[start : start + BATCH]))
            for row in connection.execute(rows):
                to = "its subscribers" if row.kind == "publish" else f"the queue {row.routing_key!r}"
                counts[str(read_properties(row.headers).get("type") or row.kind), to, refusals[str(row.output_id)].reason] += 1
        return [{"count": count, "type": type, "to": to, "reason": reason} for (type, to, reason), count in counts.items()]

    def lease_outputs(self, limit: int, lease: float) -> list[Output]:
        """Return outputs that are due, in the order of their messages; other relays see them after `lease` seconds."""
        output, pending, now = self.database.tables.output, self.database.tables.pending, self.database.dialect.now
        ours = (pending.c.due_at <= now, pending.c.quarantined_at.is_(None), pending.c.refusals != UNDECIDED)
        due = select(pending.c.output_id).where(*ours).order_by(pending.c.due_at).limit(limit)
        with self.database.engine.connect() as connection:  # no write lock, unless there is something to lease
            if connection.execute(due.limit(1)).first() is None:
                return []
        with self.database.short() as connection:
            ids = connection.scalars(self.database.dialect.lock(due)).all()
            connection.execute(update(pending).where(pending.c.output_id.in_(ids)).values(due_at=now + lease))
            place = ("consumer_id", "message_key", "ordinal")
            where = and_(*(output.c[name] == pending.c[name] for name in place))
            rows = select(output).join(pending, where).where(pending.c.output_id.in_(ids), ~is_erased(output))
            outputs = []
            for row in connection.execute(rows.order_by(*(output.c[name] for name in place))).all():
                try:
                    outputs.append(output_of(row, sendable=True))
                except ValueError as error:  # one that was spoilt holds up no other
                    values = {"quarantined_at": now, "reason": f"its stored headers cannot be read: {error}"[:1000].encode()}
                    connection.execute(update(pending).where(pending.c.output_id == row.output_id).values(values))
        return outputs

    # Retries and dead letters

    def settle(self, failed: Sequence[NewRow], done: Sequence[MessageRow]) -> None:
        """Store retries and dead letters, and delete rows that are done."""
        with self.database.short(queues=True) as connection:
            for each in failed:
                delivery, row = each.delivery, each.delivery.row
                if row is not None and not connection.execute(self._done, _place(row)).rowcount:
                    continue  # another worker has it now
                values: dict[str, Any] = {"wait": each.delay, "tries": min(each.attempts, SATURATED)}
                values |= {"delivered": row.deliveries if row else 0, "died": row.deaths if row else each.deaths}
                values |= {"to": delivery.queue, "identity": each.identity, "history": json.dumps(list(each.history)).encode()}
                values |= {"properties": json.dumps(delivery.properties).encode(), "text": delivery.body}
                connection.execute(self._new, values)
            if done:
                connection.execute(self._done, list(map(_place, done)))
        for row in (*done, *(each.delivery.row for each in failed)):
            if row is not None and self._held.get(row.id) == row.deliveries:  # not leased again meanwhile
                del self._held[row.id]

    def lease_messages(self, queue: str, limit: int) -> tuple[list[Delivery], bool]:
        """Return retries that are due, but for suspects, and whether a suspect is due.

        A row has one death more if its holder is gone and was not stopping.
        """
        return self._lease_some(queue, limit, suspects=False)

    def lease_suspect(self, queue: str) -> Delivery | None:
        """Return the suspect that is due first."""
        suspects, _ = self._lease_some(queue, LOOK, suspects=True)
        return suspects[0] if suspects else None

    def _lease_some(self, queue: str, limit: int, *, suspects: bool) -> tuple[list[Delivery], bool]:
        with self.database.queue_engine.connect() as connection:  # no write lock, unless there is something to lease
            if connection.execute(self._any_due, {"queue": queue}).first() is None:
                return [], False
        with self.database.short(queues=True) as connection:
            locked = connection.scalars(self._due, {"queue": queue, "most": max(limit, LOOK)}).all()
            due = [MessageRow(row.id, 0, 0, row.deaths, []) for row in connection.execute(self._deaths, {"ids": locked})]
            chosen = [row for row in due if row.suspect is suspects][: 1 if suspects else limit]
            if chosen:
                connection.execute(self._lease, [{"row": row.id, "died": min(row.deaths, SATURATED)} for row in chosen])
            rows = connection.execute(self._leased, {"ids": [row.id for row in chosen]}).all()
        self._held.update((row.id, row.deliveries) for row in rows)
        return [_delivery(row) for row in rows], any(row.suspect for row in due)

    def accompany(self, row: MessageRow) -> None:
        """Take one death in advance from a suspect that is not alone any more."""
        with self.database.short(queues=True) as connection:
            connection.execute(self._accompany, _place(row))

    def release(self) -> None:
        """Give back leased rows that nothing ran for."""
        leased, message = list(self._held), self.database.tables.message
        if leased:
            ours = (message.c.id.in_(leased), message.c.holder == self.worker)
            with self.database.short(queues=True) as connection:
                connection.execute(update(message).where(*ours).values(due_at=self.database.dialect.now, holder=None))
        self._held.clear()

    # Workers

    def beat(self, role: str, *, stopping: bool = False) -> None:
        """Show life, and renew the leases of rows. If the clock of the database was set back, let nothing wait for longer."""
        leased = [{"row": id, "delivery": delivery} for id, delivery in list(self._held.items())]
        worker, now = self.database.tables.worker, self.database.dialect.now
        ahead = select(func.max(worker.c.seen_at) > now + STEP)
        with self.database.short(queues=True) as connection:
            turned_back = bool(connection.execute(ahead).scalar())
            connection.execute(self._beat, {"does": role, "stops": stopping})
            if leased:
                connection.execute(self._keep, leased)
        if turned_back or not self._begun:
            catch_up(self.database, self.lease)
        self._begun = True

    def relay_alive(self, connection: Connection | None = None) -> bool:
        """Return whether a worker or a relay was seen lately. A heartbeat from the future does not count.

        Args:
            connection: A caller's, in a transaction: while threads hold all connections of the pool, each would wait for another.
        """
        worker, now = self.database.tables.worker, self.database.dialect.now
        lately = worker.c.seen_at.between(now - RELAY_SECONDS, now)
        alive = select(func.count()).where(worker.c.role.in_(["worker", "relay"]), ~worker.c.stopping, lately)
        if connection is not None and self.database.queue_engine is self.database.engine:
            if connection.execute(alive).scalar():
                return True
            if connection.get_isolation_level() == "READ COMMITTED":
                return False
            # The snapshot of the transaction may be older than the last heartbeat.
        with self.database.queue_engine.connect() as another:
            return bool(another.execute(alive).scalar())

    def purge(self) -> int:
        """Delete a batch of claims for each type, and what nothing refers to."""
        return self._retention.purge()


def _place(row: MessageRow) -> dict[str, Any]:
    return {"row": row.id, "delivery": row.deliveries}


def _delivery(row: Row[Any]) -> Delivery:
    leased = MessageRow(row.id, row.deliveries, row.attempts, row.deaths, read_history(row.history))
    return Delivery(row.queue, read_properties(row.headers), row.body, row=leased)
