"""The scheduler on SQL: everything that waits is a row with a due time.

Pending outputs stand in the database of the inbox; retries, dead letters and workers stand with the broker's queues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, and_, bindparam, case, delete, exists, func, null, or_, select, update
from sqlalchemy import Row as SqlRow

from idemp.identity import name_number
from idemp.messages import Delivery, Output, Refusal, Row, read_properties
from idemp.policy import LONGEST
from idemp.ports import Failed
from idemp.sql.engine import Database
from idemp.sql.store import UNCLAIMED, output_of

__all__ = ["SATURATED", "UNDECIDED", "SqlScheduler"]

OWN_PAUSES: Final = (2.0, 8.0, 32.0, 128.0, 512.0)  # seconds after refusals that are an output's own fault; then quarantine
LONGEST_PAUSE: Final = 60.0  # seconds between attempts to send an output
SATURATED: Final = 30_000  # of a small integer
UNDECIDED: Final = -1
"""Refusals of an output that relays leave alone: a prepared message. Its consumer is a negative number."""
RELAY_SECONDS: Final = 15.0  # a relay that was seen within is alive
LOOK: Final = 50  # rows that are looked at for a suspect, or beyond suspects, at most
BATCH: Final = 500  # claims, or confirmed outputs, that are deleted by one statement or transaction
FORGOTTEN: Final = 86_400.0  # seconds after which the row of a worker goes


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
            deliveries=bindparam("delivered"),
            attempts=bindparam("tries"),
            deaths=bindparam("died"),
            digest=bindparam("identity"),
            headers=bindparam("properties"),
            body=bindparam("text"),
            story=bindparam("history"),
        )
        worker_row = database.tables.worker
        alive = or_(worker_row.c.stopping, worker_row.c.seen_at > now - lease)
        self._gone = and_(message.c.holder.is_not(None), ~exists().where(worker_row.c.name == message.c.holder, alive))
        waiting = (message.c.queue == bindparam("queue"), message.c.story.is_not(None), message.c.due_at <= now)
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

    def refuse(self, refusals: Mapping[str, Refusal]) -> None:
        """Postpone outputs with growing pauses. Refusals that are their own fault put them into quarantine, after 11 minutes."""
        if not refusals:
            return
        pending, now = self.database.tables.pending, self.database.dialect.now
        for_outage = 0.25 + 0.25 * pending.c.attempts * pending.c.attempts
        for_outage = case((for_outage < LONGEST_PAUSE, for_outage), else_=LONGEST_PAUSE)
        own_fault = case(*((pending.c.refusals == count, pause) for count, pause in enumerate(OWN_PAUSES)), else_=0.0)
        final = pending.c.refusals >= len(OWN_PAUSES)
        count = case((pending.c.refusals < SATURATED, pending.c.refusals + 1), else_=SATURATED)
        with self.database.short() as connection:
            for id, refusal in sorted(refusals.items()):
                # In an order in which none sees the new value of another, as it would on MySQL.
                values: dict[Any, Any] = {pending.c.due_at: now + (own_fault if refusal.own else for_outage)}
                if refusal.own:
                    values |= {pending.c.quarantined_at: case((final, now), else_=null()), pending.c.refusals: count}
                values[pending.c.attempts] = case((pending.c.attempts < SATURATED, pending.c.attempts + 1), else_=SATURATED)
                values[pending.c.reason] = refusal.reason[:1000].encode()
                connection.execute(update(pending).where(pending.c.output_id == id).ordered_values(*values.items()))

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
            rows = select(output).join(pending, where).where(pending.c.output_id.in_(ids), output.c.body != b"")  # not erased
            found = []
            for row in connection.execute(rows.order_by(*(output.c[name] for name in place))).all():
                try:
                    found.append(output_of(row, sendable=True))
                except ValueError as error:  # one that was spoilt holds up no other
                    values = {"quarantined_at": now, "reason": f"its stored headers cannot be read: {error}"[:1000].encode()}
                    connection.execute(update(pending).where(pending.c.output_id == row.output_id).values(values))
        return found

    # Retries and dead letters

    def settle(self, failed: Sequence[Failed], done: Sequence[Row]) -> None:
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
        found, _ = self._lease_some(queue, LOOK, suspects=True)
        return found[0] if found else None

    def _lease_some(self, queue: str, limit: int, *, suspects: bool) -> tuple[list[Delivery], bool]:
        with self.database.queue_engine.connect() as connection:  # no write lock, unless there is something to lease
            if connection.execute(self._any_due, {"queue": queue}).first() is None:
                return [], False
        with self.database.short(queues=True) as connection:
            locked = connection.scalars(self._due, {"queue": queue, "most": max(limit, LOOK)}).all()
            due = [Row(row.id, 0, 0, row.deaths, []) for row in connection.execute(self._deaths, {"ids": locked})]
            chosen = [row for row in due if row.suspect is suspects][: 1 if suspects else limit]
            if chosen:
                connection.execute(self._lease, [{"row": row.id, "died": min(row.deaths, SATURATED)} for row in chosen])
            rows = connection.execute(self._leased, {"ids": [row.id for row in chosen]}).all()
        self._held.update((row.id, row.deliveries) for row in rows)
        return [_delivery(row) for row in rows], any(row.suspect for row in due)

    def accompany(self, row: Row) -> None:
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
        """Show life, and renew the leases of rows."""
        leased = [{"row": id, "delivery": delivery} for id, delivery in list(self._held.items())]
        with self.database.short(queues=True) as connection:
            connection.execute(self._beat, {"does": role, "stops": stopping})
            if leased:
                connection.execute(self._keep, leased)

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
        """Delete claims beyond their windows, confirmed outputs without a claim, and workers that were last seen a day ago."""
        tables, now = self.database.tables, self.database.dialect.now
        sent = ~exists().where(tables.pending.c.output_id == tables.output.c.output_id)
        with self.database.short() as connection:
            connection.execute(delete(tables.output).where(tables.output.c.consumer_id <= UNCLAIMED, sent))
        held = exists().where(tables.message.c.holder == tables.worker.c.name)
        with self.database.short(queues=True) as connection:
            connection.execute(delete(tables.worker).where(tables.worker.c.seen_at < now - FORGOTTEN, ~held))
        with self.database.engine.connect() as connection:
            identities = connection.execute(select(tables.identity).where(tables.identity.c.retention < LONGEST)).all()
        return sum(self._purge_claims(each.consumer, each.type, each.retention) for each in identities)

    def _purge_claims(self, consumer: str, type: str, window: float) -> int:
        tables, dialect = self.database.tables, self.database.dialect
        inbox, output, pending, identity = tables.inbox, tables.output, tables.pending, tables.identity
        unsent = exists().where(
            output.c.consumer_id == inbox.c.consumer_id,
            output.c.message_key == inbox.c.message_key,
            pending.c.output_id == output.c.output_id,
        )
        expired = (
            select(inbox.c.consumer_id, inbox.c.message_key, inbox.c.claimed_at)
            .where(inbox.c.claimed_at < dialect.now - window, inbox.c.type_id == name_number("type", type))
            .where(inbox.c.consumer_id == name_number("consumer", consumer), ~unsent)
            .order_by(inbox.c.claimed_at)
        )
        with self.database.engine.connect() as connection:  # no write lock, unless there is something to delete
            found = connection.execute(expired.limit(BATCH)).all()
        if not found:
            return 0
        keys = [row.message_key for row in found]
        ours = (inbox.c.consumer_id == found[0].consumer_id, inbox.c.message_key.in_(keys))
        free = select(inbox.c.consumer_id, inbox.c.message_key, inbox.c.claimed_at).where(*ours).order_by(inbox.c.claimed_at)
        with self.database.short() as connection:
            # Locked by a statement of its own, so that no server locks, or skips, rows of `pending` along with them.
            rows = connection.execute(dialect.lock(free)).all()
            if not rows:
                return 0
            keys = [row.message_key for row in rows]
            for table in (output, inbox):
                connection.execute(delete(table).where(table.c.consumer_id == rows[0].consumer_id, table.c.message_key.in_(keys)))
            latest = rows[-1].claimed_at
            noted = (identity.c.consumer == consumer, identity.c.type == type)
            later = or_(identity.c.purged_before.is_(None), identity.c.purged_before < latest)
            connection.execute(update(identity).where(*noted, later).values(purged_before=latest))
        return len(rows)


def _place(row: Row) -> dict[str, Any]:
    return {"row": row.id, "delivery": row.deliveries}


def _delivery(row: SqlRow[Any]) -> Delivery:
    leased = Row(row.id, row.deliveries, row.attempts, row.deaths, json.loads(row.story))
    return Delivery(row.queue, read_properties(row.headers), row.body, row=leased)
