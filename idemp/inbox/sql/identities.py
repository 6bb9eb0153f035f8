"""The identities of all consumers, in the database: compared at each start, then stored."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, insert, select, update

from idemp.inbox.identities import Agreement, Stored, agreement, still_used
from idemp.inbox.sql.queues import Queues
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Engine

    from idemp.clock import Clock
    from idemp.inbox.port import Identity
    from idemp.inbox.sql.liveness import Liveness
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables


_NOBODY: Final = -1
"""The number of no consumer."""


class Identities:
    """Compares the identities of an app with those stored, and stores them; see `idemp.inbox.identities.agreement`.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.port import Identity
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.liveness import Liveness
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables, clock = create_engine_safely("sqlite://"), Tables(), SystemClock()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> identities = Identities(engine, tables, clock, Liveness(engine, tables, clock, names), names)
        >>> week = {"orders.Place": timedelta(days=7)}
        >>> identities.agree("orders", "orders", [Identity("orders.Place", "field:order_no")], {}, week)
        >>> identities.agree("orders", "orders", [Identity("orders.Place", "field:order_id")], {}, week)
        Traceback (most recent call last):
        ...
        idemp.errors.IdentityChanged: Consumer 'orders' now identifies 'orders.Place' by 'field:order_id'; until now ...
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock, liveness: Liveness, names: Names) -> None:
        self._short = Short(engine, at_start=True)
        self._clock = clock
        self._liveness = liveness
        self._names = names
        self._queues = Queues(tables)
        consumer, kind, identity = tables.consumer, tables.message_type, tables.identity
        # All of them, so that two new consumers of one queue can't pass each other. Nobody else locks these rows.
        self._lock = select(consumer.c.id).order_by(consumer.c.id).with_for_update()
        self._stored = (
            select(
                identity.c.id,
                consumer.c.name.label("consumer"),
                kind.c.name.label("message_type"),
                identity.c.descriptor,
                identity.c.ended_at,
            )
            .select_from(identity)
            .join(consumer, consumer.c.id == identity.c.consumer_id)
            .join(kind, kind.c.id == identity.c.type_id)
            .where(consumer.c.id.in_(bindparam("mates", expanding=True)) | (consumer.c.queue == bindparam("queue")))
            .order_by(identity.c.id)
        )
        self._untaken = (
            select(kind.c.id, kind.c.name)
            .where(
                kind.c.id.in_(select(identity.c.type_id).where(identity.c.consumer_id == bindparam("consumer"))),
                kind.c.name.not_in(bindparam("taken", expanding=True)),
            )
            .order_by(kind.c.name)
        )
        inbox = tables.inbox
        self._claimed = (
            select(inbox.c.claimed_at)
            .where(
                inbox.c.consumer_id == bindparam("consumer"),
                inbox.c.type_id == bindparam("type"),
                inbox.c.claimed_at >= bindparam("since"),
            )
            .order_by(inbox.c.claimed_at.desc())
            .limit(1)
        )
        one = identity.c.id == bindparam("identity")
        self._end = update(identity).where(one).values(ended_at=bindparam("now"))
        self._reopen = update(identity).where(one).values(ended_at=None)
        self._forget = delete(identity).where(one)
        self._insert = insert(identity).values(
            {name: bindparam(name) for name in ("consumer_id", "type_id", "descriptor", "since")}
        )

    def agree(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Store the current identities, or refuse them; nothing is stored then.

        Raises:
            IdentityChanged: a living identity differs and is not covered.
        """
        consumer_id = self._names.id("consumer", consumer)
        type_ids = {
            identity.message_type: self._names.id("message_type", identity.message_type) for identity in current
        }

        def work(connection: Connection) -> None:
            connection.execute(self._lock).all()
            agreed = self._compared(connection, consumer, consumer_id, queue, current, covered, retention)
            now = self._clock.now()
            for former in agreed.forgotten:
                connection.execute(self._forget, {"identity": former.number})
            for former in agreed.ended:
                connection.execute(self._end, {"identity": former.number, "now": now})
            living = {former.key: former for former in agreed.living}
            for identity in current:
                same = living.get((consumer, identity.message_type, identity.descriptor))
                if same is None:
                    values = {"consumer_id": consumer_id, "type_id": type_ids[identity.message_type], "since": now}
                    connection.execute(self._insert, {**values, "descriptor": identity.descriptor})
                elif same.ended_at is not None:
                    connection.execute(self._reopen, {"identity": same.number})
            self._queues.started(connection, consumer_id, queue, now)

        self._short.run(work)

    def check(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """As `agree`, and nothing is stored.

        Raises:
            IdentityChanged: a living identity differs and is not covered.
        """
        known = self._names.known("consumer", consumer)
        number = known if known is not None else _NOBODY
        self._short.run(
            lambda connection: self._compared(connection, consumer, number, queue, current, covered, retention)
        )

    def unhandled(
        self,
        consumer: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> Sequence[str]:
        """The stored types of which this consumer's claims still count, and which it takes no more; by name.

        A type that an app does not know has the longest of its windows, as for the cleaner.
        """
        consumer_id = self._names.known("consumer", consumer)
        if consumer_id is None:
            return []
        taken = {name for identity in current for name in (identity.message_type, *identity.aliases)}
        taken |= {identity.message_type for identities in covered.values() for identity in identities}

        def work(connection: Connection) -> Sequence[str]:
            types = connection.execute(self._untaken, {"consumer": consumer_id, "taken": sorted(taken)}).all()
            if not types:
                return []
            longest = max(retention.values(), default=timedelta(0))
            since = self._liveness.late_before_by(connection, consumer_id, longest)
            of_type = {"consumer": consumer_id, "since": since}
            return [
                row.name
                for row in types
                if connection.execute(self._claimed, {**of_type, "type": row.id}).first() is not None
            ]

        return self._short.run(work)

    def _compared(
        self,
        connection: Connection,
        consumer: str,
        consumer_id: int,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> Agreement:
        users = self._queues.users(connection, queue)
        mates = still_used(users, retention, partial(self._liveness.late_before_by, connection))
        rows = connection.execute(self._stored, {"mates": [consumer_id, *mates], "queue": queue})
        return agreement(
            [Stored(*row) for row in rows],
            consumer,
            current,
            covered,
            retention,
            lambda window: self._liveness.late_before_by(connection, consumer_id, window),
        )
