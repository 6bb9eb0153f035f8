"""Handler starts without an end: what counts the deaths of a message that kills its worker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from sqlalchemy import bindparam, case, delete, func, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from idemp.errors import SchemaError
from idemp.inbox.sql import failures
from idemp.inbox.sql.engine import is_mysql, start_error
from idemp.inbox.sql.short import Locking, Short

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection, Engine, Insert

    from idemp.clock import Clock
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables

_PROBE_CONSUMER: Final = 0  # interned names begin at 1
_RIGHTS: Final = "Grant this user SELECT, INSERT, UPDATE and DELETE on it, and run `idemp db check`."

MOST_STARTS: Final = 30_000
"""Counts to here and no further: the column is a small integer."""


class Unfinished:
    """Records and forgets starts, each by one statement that is committed at once. Safe to share between threads.

    The record has to outlive the process and the handling's rollback, so it is never part of a unit of work.

    Example:
        >>> from uuid import uuid4
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables, key = create_engine_safely("sqlite://"), Tables(), uuid4()
        >>> upgrade(engine, tables)
        >>> unfinished = Unfinished(engine, tables, SystemClock(), "host-1", Names(engine, tables))
        >>> unfinished.start("orders", key), unfinished.start("orders", key)
        (0, 1)
        >>> unfinished.end("orders", key)
        >>> unfinished.start("orders", key)
        0
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock, worker: str, names: Names) -> None:
        self._short = Short(engine, single=True)
        self._clock = clock
        self.worker = worker
        self._names = names
        self._table = tables.unfinished
        self._count = counting_start(tables, engine.dialect.name)
        columns = self._table.c
        this = (columns.consumer_id == bindparam("consumer"), columns.message_key == bindparam("key"))
        self._forget = delete(self._table).where(*this)
        self._take_back = (
            update(self._table).where(*this, columns.starts > bindparam("most")).values(starts=bindparam("most"))
        )

    def start(self, consumer: str, key: UUID) -> int:
        """Record a start; how many earlier ones did not end, less than `MOST_STARTS`.

        Raises:
            StoreError: as `Store.note_start` says.
        """
        row = start_row(
            self._names.id("consumer", consumer), key, self._names.id("worker", self.worker), self._clock.now()
        )
        return self._short.run(lambda connection: _earlier(connection, self._count, row))

    def end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """Forget all but `left` starts of this message; never adds any.

        Raises:
            StoreError: as `Store.note_end` says.
        """
        wanted: dict[str, Any] = {"consumer": self._names.id("consumer", consumer), "key": key}
        if left > 0:
            self._short.run(lambda connection: connection.execute(self._take_back, {**wanted, "most": left}).rowcount)
        else:
            self._short.run(lambda connection: connection.execute(self._forget, wanted).rowcount)


class Forgotten:
    """Starts whose message never came back, deleted in bounded batches by the cleaner.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> forgotten = Forgotten(Tables())  # .purge(connection, consumer_id, before, limit=1000)
    """

    def __init__(self, tables: Tables) -> None:
        table = tables.unfinished
        old = (table.c.consumer_id == bindparam("consumer")) & (table.c.last_at < bindparam("before"))
        # One that starts right now is passed over: nobody waits for anybody.
        self._old = Locking(select(table.c.message_key).where(old).limit(bindparam("limit")))
        self._delete = delete(table).where(old, table.c.message_key.in_(bindparam("keys", expanding=True)))

    def purge(self, connection: Connection, consumer_id: int, before: datetime, limit: int) -> int:
        """Delete at most `limit` records whose last start was before this moment; how many it were."""
        wanted = {"consumer": consumer_id, "before": before}
        keys = connection.scalars(self._old.on(connection), {**wanted, "limit": limit}).all()
        if not keys:
            return 0
        return connection.execute(self._delete, {**wanted, "keys": keys}).rowcount


def probe(engine: Engine, tables: Tables) -> None:
    """Record starts and their end in a transaction that is rolled back: better now than with the first redelivery.

    Raises:
        SchemaError: this user may not write, or the table is not as it was made.
    """
    table, statement = tables.unfinished, counting_start(tables, engine.dialect.name)
    row = start_row(_PROBE_CONSUMER, key := uuid4(), 0, datetime.now(UTC))
    mine = (table.c.consumer_id == _PROBE_CONSUMER) & (table.c.message_key == key)
    with engine.connect() as connection:
        transaction = connection.begin()
        try:
            counted = [_earlier(connection, statement, row) for _ in range(3)]
            connection.execute(delete(table).where(mine))
        except DBAPIError as error:
            if start_error(error, engine) is not None:
                raise
            raise failures.unwritable(table.fullname, error, _RIGHTS) from error
        finally:
            transaction.rollback()
    if counted != [0, 1, 2]:
        raise SchemaError(
            f"The table {table.fullname} does not count: {counted}.", fix="Look for triggers or rules on it."
        )


def counting_start(tables: Tables, dialect: str) -> Insert:
    """The statement that records a start and brings the number of starts back: by RETURNING, or as last inserted id.

    MySQL has no RETURNING, but answers the value of LAST_INSERT_ID(…) along with the statement's success, as MariaDB
    does: one round trip there, too, and none to make up for what a second statement could miss.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> "RETURNING" in str(counting_start(Tables(), "postgresql"))
        True
    """
    table = tables.unfinished
    values: dict[str, Any] = {column.name: bindparam(column.name) for column in table.columns}
    one_more = case((table.c.starts < MOST_STARTS, table.c.starts + 1), else_=table.c.starts)
    if is_mysql(dialect):
        statement = mysql.insert(table).values(values)
        return statement.on_duplicate_key_update(
            starts=func.last_insert_id(one_more),
            last_at=statement.inserted.last_at,
            worker_id=statement.inserted.worker_id,
        )
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    upsert = insert(table).values(values)
    return upsert.on_conflict_do_update(
        index_elements=[table.c.consumer_id, table.c.message_key],
        set_={"starts": one_more, "last_at": upsert.excluded.last_at, "worker_id": upsert.excluded.worker_id},
    ).returning(table.c.starts)


def start_row(consumer_id: int, key: UUID, worker_id: int, now: datetime) -> dict[str, Any]:
    """A first start, as `counting_start` wants it."""
    return {
        "message_key": key,
        "consumer_id": consumer_id,
        "starts": 1,
        "first_at": now,
        "last_at": now,
        "worker_id": worker_id,
    }


def _earlier(connection: Connection, statement: Insert, row: dict[str, Any]) -> int:
    result = connection.execute(statement, row)
    if result.returns_rows:
        return int(result.scalar_one()) - 1
    return max(int(result.lastrowid or 0) - 1, 0)  # 0 where the row is new: nothing was assigned
