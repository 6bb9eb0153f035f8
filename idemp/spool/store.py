"""Writing and reading the spool.

Offsets are handed out under the lock of the spool's one row, which is held until COMMIT: whoever sees an offset sees all
before it, and none is ever missing. A sequence would give them out of the order in which transactions commit.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import delete, exc, func, insert, select, update

from idemp.columns import Columns, check_source, position
from idemp.errors import ConfigurationError, OffsetsLost, StoreError
from idemp.inbox.sql import failures, pooler
from idemp.inbox.sql.engine import shown, start_errors
from idemp.inbox.sql.locating import made_once, schema_of
from idemp.inbox.sql.pooling import watch_pool
from idemp.inbox.sql.tables import DEFAULT_PREFIX
from idemp.spool.tables import SpoolTables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Engine

_RELEASED_AT_ONCE: Final = 5_000  # rows
_READ_AT_ONCE: Final = 500  # rows


class Unstorable(StoreError):
    """The database takes these messages never, such as a text with a NUL character."""


@dataclass(frozen=True, slots=True)
class Level:
    """What a spool holds.

    Attributes:
        first: the offset of the oldest message kept.
        next: the offset that the next message will have.
        stored_bytes: the sum of the bodies.

    Example:
        >>> Level(first=10, next=25, stored_bytes=300).messages
        15
    """

    first: int
    next: int
    stored_bytes: int

    @property
    def messages(self) -> int:
        """How many messages it holds."""
        return self.next - self.first


class SpoolStore:
    """The spools in one database.

    Args:
        engine: the database.
        schema: database schema of the tables.
        prefix: prefix of the tables.

    Example:
        >>> from idemp.inbox.sql import create_engine_safely
        >>> from idemp.columns import Columns
        >>> store = SpoolStore(create_engine_safely("sqlite://"))
        >>> store.create("orders")
        >>> store.append("orders", [Columns("m-1", "t", b"{}", None, None, "")])
        True
        >>> store.level("orders"), [row.id for row in store.read("orders", 0, 1)]
        (Level(first=0, next=1, stored_bytes=2), ['m-1'])
    """

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = DEFAULT_PREFIX) -> None:
        watch_pool(engine)
        self._engine = engine
        self._named = SpoolTables(schema, prefix)
        self._schema, self._prefix = schema, prefix

    @made_once
    def _tables(self) -> SpoolTables:
        if self._schema is not None:
            return self._named
        return SpoolTables(None, self._prefix, schema_of(self._engine, self._named.spool.name))

    def create(self, queue: str) -> None:
        """Make the tables where they are missing, and this queue's spool. Several may do it at once.

        Raises:
            StoreUnavailable: the database can't be reached.
            ConfigurationError: it refuses, or the queue's name is too long.
            GuaranteeError: the engine prepares named statements behind a connection pooler.
        """
        check_source(queue)
        spool = self._tables.spool
        with start_errors(self._engine):
            with self._engine.connect() as connection:
                pooler.refuse_prepared_statements(connection)
            self._make_tables()
            if self._row(queue) is None:
                try:
                    with self._engine.begin() as connection:
                        values = {"queue": queue, "first_offset": 0, "next_offset": 0, "stored_bytes": 0}
                        connection.execute(insert(spool).values(values))
                except exc.IntegrityError:
                    pass  # somebody else was faster

    def _make_tables(self) -> None:
        """Each try that fails because of others is one in which they made a table more."""
        for left in range(len(self._tables.metadata.tables), -1, -1):
            try:
                self._tables.metadata.create_all(self._engine, checkfirst=True)
            except (exc.ProgrammingError, exc.OperationalError, exc.IntegrityError) as error:
                if self._there():
                    return
                if not left:
                    raise ConfigurationError(
                        f"The spool's tables can't be made in {shown(self._engine)}: {error.orig}.",
                        fix="Run `idemp pipeline spool` once as a user who may make tables.",
                    ) from error
            else:
                return

    def level(self, queue: str) -> Level:
        """What a spool holds now.

        Raises:
            ConfigurationError: there is none for this queue.
            StoreError: the database is away.
        """
        with self._translated():
            row = self._row(queue)
        if row is None:
            raise ConfigurationError(
                f"There is no spool of {queue!r} in {shown(self._engine)}.", fix=f"Run `idemp pipeline spool {queue}`."
            )
        return Level(row.first_offset, row.next_offset, row.stored_bytes)

    def append(
        self, queue: str, rows: Sequence[Columns], *, most_messages: int | None = None, most_bytes: int | None = None
    ) -> bool:
        """Store messages in one transaction; their positions are ours to give.

        An empty spool takes whatever comes, so that a message larger than the limit does not stop it for ever.

        Returns:
            `False` if the spool would hold more than it may: nothing is stored.

        Raises:
            Unstorable: the database takes them never; nothing is stored.
            StoreError: the database is away; whether they are stored is unknown after a lost COMMIT.
        """
        size = sum(len(row.body) for row in rows)
        spool = self._tables.spool
        with self._translated(), self._engine.begin() as connection:
            connection.execute(
                update(spool)
                .where(spool.c.queue == queue)
                .values(next_offset=spool.c.next_offset + len(rows), stored_bytes=spool.c.stored_bytes + size)
            )
            row = connection.execute(select(spool).where(spool.c.queue == queue)).one()
            level = Level(row.first_offset, row.next_offset, row.stored_bytes)
            too_much = (most_messages is not None and level.messages > most_messages) or (
                most_bytes is not None and level.stored_bytes > most_bytes
            )
            if too_much and level.messages > len(rows):
                connection.rollback()
                return False
            connection.execute(
                insert(self._tables.spooled),
                [_stored(row.id, level.next - len(rows) + place, each) for place, each in enumerate(rows)],
            )
        return True

    def read(self, queue: str, start: int, end: int) -> Iterator[Columns]:
        """The messages from offset `start` up to, and without, `end`.

        Raises:
            OffsetsLost: some were released.
            StoreError: the database is away.
        """
        spooled, follows = self._tables.spooled, start
        with self._translated(), self._engine.connect() as connection:
            row = self._row(queue, connection)
            query = (
                select(spooled)
                .where(spooled.c.spool_id == (row.id if row else None))
                .where(spooled.c.offset >= start, spooled.c.offset < end)
                .order_by(spooled.c.offset)
                .execution_options(yield_per=_READ_AT_ONCE)
            )
            with connection.execute(query) as found:
                for each in found:
                    if each.offset != follows:
                        break
                    place = position(queue, each.offset)
                    yield Columns(each.message_id, each.type, bytes(each.body), each.headers, each.time, place)
                    follows += 1
        if follows < end:
            raise OffsetsLost.trimmed(queue, follows, self.level(queue).first)

    def release(self, queue: str, end: int) -> int:
        """Delete all before offset `end`, in short transactions; says how many.

        Raises:
            StoreError: the database is away; the rest is deleted next time.
        """
        count = 0
        while (level := self.level(queue)).first < end:
            until = min(level.first + _RELEASED_AT_ONCE, end, level.next)
            if until <= level.first:
                break
            with self._translated(), self._engine.begin() as connection:
                count += self._release(connection, queue, level.first, until)
        return count

    def _release(self, connection: Connection, queue: str, first: int, until: int) -> int:
        spool, spooled = self._tables.spool, self._tables.spooled
        ours = connection.execute(
            update(spool).where(spool.c.queue == queue, spool.c.first_offset == first).values(first_offset=until)
        )
        if ours.rowcount != 1:
            return 0  # somebody else releases, too
        row = connection.execute(select(spool.c.id).where(spool.c.queue == queue)).one()
        gone = (spooled.c.spool_id == row.id) & (spooled.c.offset >= first) & (spooled.c.offset < until)
        size = connection.execute(select(func.sum(func.length(spooled.c.body))).where(gone)).scalar_one() or 0
        connection.execute(delete(spooled).where(gone))
        connection.execute(
            update(spool).where(spool.c.queue == queue).values(stored_bytes=spool.c.stored_bytes - int(size))
        )
        return until - first

    def _there(self) -> bool:
        with self._engine.connect() as connection:
            try:
                connection.execute(select(self._tables.spool.c.id).limit(1))
                connection.execute(select(self._tables.spooled.c.offset).limit(1))
            except exc.DBAPIError:
                return False
        return True

    def _row(self, queue: str, connection: Connection | None = None) -> Any:
        if connection is None:
            with self._engine.connect() as own:
                return self._row(queue, own)
        spool = self._tables.spool
        return connection.execute(select(spool).where(spool.c.queue == queue)).one_or_none()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.DataError as error:
            raise Unstorable(f"The database takes this never: {error.orig}.") from error
        except exc.SQLAlchemyError as error:
            raise failures.translate(error) or failures.refused(error) from error


def _stored(spool_id: int, offset: int, row: Columns) -> Mapping[str, Any]:
    return {
        "spool_id": spool_id,
        "offset": offset,
        "message_id": row.id,
        "type": row.type,
        "body": row.body,
        "headers": row.headers,
        "time": row.time,
    }
