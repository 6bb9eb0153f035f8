"""Which queues each consumer has, in the database, and until when each was in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import bindparam, insert, select, update

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from idemp.inbox.sql.tables import Tables


class Queues:
    """Statements on `queue`, each in somebody's transaction.

    Its rows are few and never deleted: one for each queue that a consumer ever had.

    Example:
        >>> from datetime import UTC, datetime
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> queues = Queues(tables)
        >>> with engine.begin() as connection:
        ...     queues.used(connection, 1, "orders.0", datetime(2026, 3, 1, tzinfo=UTC))
        ...     queues.users(connection, "orders.0")
        {1: datetime.datetime(2026, 3, 1, 0, 0, tzinfo=datetime.timezone.utc)}
    """

    def __init__(self, tables: Tables) -> None:
        consumer, queue = tables.consumer, tables.queue
        of_it = (queue.c.name == bindparam("of_name"), queue.c.consumer_id == bindparam("of_consumer"))
        self._users = select(queue.c.consumer_id, queue.c.used_at).where(queue.c.name == bindparam("of_name"))
        self._one = select(queue.c.used_at).where(*of_it)
        self._extend = update(queue).where(*of_it, queue.c.used_at < bindparam("now")).values(used_at=bindparam("now"))
        self._insert = insert(queue).values(
            name=bindparam("of_name"), consumer_id=bindparam("of_consumer"), used_at=bindparam("now")
        )
        own = consumer.c.id == bindparam("of_consumer")
        self._latest = select(consumer.c.queue).where(own)
        self._set_latest = update(consumer).where(own).values(queue=bindparam("of_name"))

    def users(self, connection: Connection, queue: str) -> Mapping[int, datetime]:
        """The consumers that have or had the queue, and when each was last seen to use it."""
        return {row.consumer_id: row.used_at for row in connection.execute(self._users, {"of_name": queue})}

    def used(self, connection: Connection, consumer_id: int, queue: str, now: datetime) -> None:
        """The consumer uses the queue."""
        which = {"of_consumer": consumer_id, "of_name": queue}
        if connection.execute(self._one, which).first() is None:
            connection.execute(self._insert, {**which, "now": now})
        else:
            connection.execute(self._extend, {**which, "now": now})

    def started(self, connection: Connection, consumer_id: int, queue: str, now: datetime) -> None:
        """The consumer starts on the queue, which the former release has to learn as well."""
        latest = connection.scalar(self._latest, {"of_consumer": consumer_id})
        which = {"of_consumer": consumer_id, "of_name": latest}
        if latest is not None and connection.execute(self._one, which).first() is None:
            # The former release started there, and wrote nothing else. It may be running still.
            connection.execute(self._insert, {**which, "now": now})
        self.used(connection, consumer_id, queue, now)
        connection.execute(self._set_latest, {"of_consumer": consumer_id, "of_name": queue})
