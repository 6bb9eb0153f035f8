"""Old rows: claims beyond their windows go, and what waits for longer than it may becomes due."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.util import memoized_property

from idemp.events import log
from idemp.identity import name_number
from idemp.policy import LONGEST
from idemp.sql.engine import Database
from idemp.sql.store import UNCLAIMED
from idemp.sql.tables import Tables

__all__ = ["LONGEST_OWN_PAUSE", "LONGEST_PAUSE", "STEP", "UNDECIDED", "Retention", "catch_up", "overdue"]

BATCH: Final = 500  # claims that one transaction deletes: more of them hold up deliveries, fewer take longer
FORGOTTEN: Final = 86_400.0  # seconds after which the row of a worker goes
LONGEST_PAUSE: Final = 60.0  # seconds between attempts to send an output
LONGEST_OWN_PAUSE: Final = 512.0  # and between those that it was itself to blame for
STEP: Final = 20.0  # seconds by which a time may be in the future before the clock of the database counts as set back
UNDECIDED: Final = -1
"""Refusals of an output that relays leave alone: a prepared message. Its consumer is a negative number."""


class Retention:
    """Deletes what is older than its retention. Of several processes one goes on: the others see that it has got further.

    Example:
        >>> Retention(Database("sqlite:///shop.db")).database.tables.inbox.name
        'idemp_inbox'
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._reached: dict[tuple[str, str], float] = {}  # where the last batch has ended, so that none looks at its rows again

    @memoized_property
    def _expired(self) -> Select[Any]:
        """Claims of a type beyond their window, without those whose outputs wait."""
        tables, now = self.database.tables, self.database.dialect.now
        inbox, output, pending = tables.inbox, tables.output, tables.pending
        unsent = exists().where(
            output.c.consumer_id == inbox.c.consumer_id,
            output.c.message_key == inbox.c.message_key,
            pending.c.output_id == output.c.output_id,
        )
        return (
            select(inbox.c.consumer_id, inbox.c.message_key)
            .where(inbox.c.consumer_id == bindparam("consumer"), inbox.c.type_id == bindparam("type"))
            .where(inbox.c.claimed_at < now - bindparam("window"), inbox.c.claimed_at >= bindparam("reached"), ~unsent)
            .order_by(inbox.c.claimed_at)
        )

    @memoized_property
    def _at_once(self) -> Select[Any] | None:
        return _deletion(self.database.tables, self._expired) if self.database.dialect.deletes_in_queries else None

    def purge(self) -> int:
        """Delete claims beyond their windows, confirmed outputs without a claim, and workers that were last seen a day ago.

        Returns:
            How many claims were deleted; if any, there may be more.
        """
        tables, now = self.database.tables, self.database.dialect.now
        if not self._reached:  # the begin of a purge
            sent = ~exists().where(tables.pending.c.output_id == tables.output.c.output_id)
            with self.database.short() as connection:
                connection.execute(delete(tables.output).where(tables.output.c.consumer_id <= UNCLAIMED, sent))
            held = exists().where(tables.message.c.holder == tables.worker.c.name)
            with self.database.short(queues=True) as connection:
                connection.execute(delete(tables.worker).where(tables.worker.c.seen_at < now - FORGOTTEN, ~held))
        with self.database.engine.connect() as connection:
            identities = connection.execute(select(tables.identity).where(tables.identity.c.retention < LONGEST)).all()
        return sum(self._purge_claims(each.consumer, each.type, each.retention, each.purged_before) for each in identities)

    def _purge_claims(self, consumer: str, type: str, window: float, purged_before: float | None) -> int:
        place: dict[str, Any] = {"consumer": name_number("consumer", consumer), "type": name_number("type", type)}
        reached = self._reached.pop((consumer, type), 0.0)
        if reached and purged_before is not None and purged_before > reached:
            return 0
        place |= {"window": window, "reached": reached}
        with self.database.engine.connect() as connection:  # no write lock, unless there is something to delete
            if connection.execute(self._expired.limit(1), place).first() is None:
                return 0
        with self.database.short() as connection:
            count, latest = self._delete(connection, place)
            if not count:
                return 0
            identity = self.database.tables.identity
            noted = (identity.c.consumer == consumer, identity.c.type == type)
            later = or_(identity.c.purged_before.is_(None), identity.c.purged_before < latest)
            connection.execute(update(identity).where(*noted, later).values(purged_before=latest))
        if count == BATCH:
            self._reached[consumer, type] = latest
        return count

    def _delete(self, connection: Connection, place: dict[str, Any]) -> tuple[int, float]:
        """Delete a batch of claims with their outputs; return how many, and the time of the latest one."""
        inbox, output = self.database.tables.inbox, self.database.tables.output
        if self._at_once is not None:
            count, latest = connection.execute(self._at_once, place).one()
            return count, latest
        keys = [row.message_key for row in connection.execute(self._expired.limit(BATCH), place)]
        ours = (inbox.c.consumer_id == place["consumer"], inbox.c.message_key.in_(keys))
        free = select(inbox.c.message_key, inbox.c.claimed_at).where(*ours).order_by(inbox.c.claimed_at)
        # Locked by a statement of its own, so that no server locks, or skips, rows of `pending` along with them.
        rows = connection.execute(self.database.dialect.lock(free)).all() if keys else []
        if not rows:
            return 0, 0.0
        keys = [row.message_key for row in rows]
        for table in (output, inbox):
            connection.execute(delete(table).where(table.c.consumer_id == place["consumer"], table.c.message_key.in_(keys)))
        return len(rows), rows[-1].claimed_at


def _deletion(tables: Tables, expired: Select[Any]) -> Select[Any]:
    """Return a deletion of a batch as one statement, with no keys to and fro: a third of the work, where a server can."""
    inbox, output = tables.inbox, tables.output
    old = expired.limit(BATCH).with_for_update(of=inbox, skip_locked=True).cte("old")

    def theirs(table: Table) -> Delete:
        return delete(table).where(table.c.consumer_id == old.c.consumer_id, table.c.message_key == old.c.message_key)

    sent, gone = theirs(output).cte("sent"), theirs(inbox).returning(inbox.c.claimed_at).cte("gone")
    made: Any = select(func.count(), func.max(gone.c.claimed_at)).select_from(gone).add_cte(sent)
    return made  # type: ignore[no-any-return]


def overdue(database: Database, lease: float) -> dict[Table, ColumnElement[bool]]:
    """Return, by table, which rows wait for longer than their delay, a pause and a lease allow: the clock was set back.

    Example:
        >>> [table.name for table in overdue(Database("sqlite:///shop.db"), 30.0)]
        ['idemp_pending', 'idemp_message']
    """
    pending, message, now = database.tables.pending, database.tables.message, database.dialect.now
    pause = case((pending.c.refusals > 0, LONGEST_OWN_PAUSE), else_=LONGEST_PAUSE)
    waits = and_(pending.c.quarantined_at.is_(None), pending.c.refusals != UNDECIDED)
    return {
        pending: and_(waits, pending.c.due_at > now + func.coalesce(_delay(database), 0.0) + pause + STEP),
        message: message.c.due_at > now + func.coalesce(message.c.delay, 0.0) + lease + STEP,
    }


def catch_up(database: Database, lease: float) -> None:
    """Shorten waits that are longer than they may be, because the clock of the database was set back.

    Args:
        database: Its rows are changed.
        lease: Seconds for which a worker leases a message.

    Example:
        >>> catch_up.__name__
        'catch_up'
    """
    tables, now = database.tables, database.dialect.now
    late = overdue(database, lease)
    for table, delay in ((tables.pending, _delay(database)), (tables.message, tables.message.c.delay)):
        queues = table is tables.message
        with (database.queue_engine if queues else database.engine).connect() as connection:  # no write lock for nothing
            if connection.execute(select(literal(1)).select_from(table).where(late[table]).limit(1)).first() is None:
                continue
        with database.short(queues=queues) as connection:
            shorter = update(table).where(late[table]).values(due_at=now + func.coalesce(delay, 0.0))
            count = connection.execute(shorter).rowcount
        log("clock.stepped", count=count, what="messages" if queues else "outputs")
    worker = tables.worker
    with database.short(queues=True) as connection:  # one that is alive says so again, and another one is known to be gone
        connection.execute(update(worker).where(worker.c.seen_at > now).values(seen_at=now))


def _delay(database: Database) -> ColumnElement[Any]:
    """Return the delay of the output of a pending row."""
    output, pending = database.tables.output, database.tables.pending
    same = (output.c[name] == pending.c[name] for name in ("consumer_id", "message_key", "ordinal"))
    return select(output.c.delay).where(*same).scalar_subquery()
