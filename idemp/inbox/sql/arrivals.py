"""Messages that many processes stage, each under tokens of its own, for one transaction of another process.

On PostgreSQL the table is unlogged: a crash of the server empties it. Whoever reads says how many messages it expects.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql

from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.tables import Tables

KEPT: Final = timedelta(days=1)
"""How long what nobody asked for is kept: it was staged by attempts of tasks that died, or that another attempt won over."""
STAGING_OPTION: Final = "idemp_staging"
"""The execution option of connections that stage."""


class Arrivals:
    """The table of staged messages, on PostgreSQL.

    Args:
        engine: the database.
        tables: with their schema and prefix.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> Arrivals(create_engine_safely("postgresql://db/shop"), Tables()).table.name
        'idemp_arrival'
    """

    def __init__(self, engine: Engine, tables: Tables) -> None:
        self.table = tables.arrival
        self._short = Short(engine.execution_options(**{STAGING_OPTION: True}))
        self._upkeep = Short(engine)
        self._put = postgresql.insert(self.table).values(arrived_at=func.now()).on_conflict_do_nothing()

    def put(self, token: UUID, number: int, messages: int, content: bytes) -> None:
        """Stage a piece, committed; harmless to repeat.

        Args:
            token: of the attempt that stages.
            number: of the piece, from 0.
            messages: how many are in it.
            content: whatever its reader understands.

        Raises:
            StoreUnavailable: the database can't be reached.
            StoreError: it refuses.
        """
        row = {"token": token, "number": number, "messages": messages, "content": content}
        self._short.run(lambda connection: connection.execute(self._put, row))

    def counted(self, connection: Connection, tokens: Sequence[UUID]) -> dict[UUID, int]:
        """How many messages are there, by token; none for tokens of which nothing is left."""
        arrival = self.table.c
        found = (
            select(arrival.token, func.sum(arrival.messages)).where(arrival.token.in_(tokens)).group_by(arrival.token)
        )
        return {token: int(messages) for token, messages in connection.execute(found)}

    def read(self, connection: Connection, token: UUID) -> Iterator[bytes]:
        """What was staged under a token, piece by piece in its order; one at a time is held."""
        arrival = self.table.c
        numbers = select(arrival.number).where(arrival.token == token).order_by(arrival.number)
        for number in connection.scalars(numbers).all():
            one = select(arrival.content).where(arrival.token == token, arrival.number == number)
            yield bytes(connection.scalars(one).one())

    def drop(self, connection: Connection, tokens: Sequence[UUID]) -> None:
        """Delete what was staged under these tokens."""
        connection.execute(delete(self.table).where(self.table.c.token.in_(tokens)))

    def drop_now(self, tokens: Sequence[UUID]) -> None:
        """The same in a transaction of its own.

        Raises:
            StoreError: as `put` says.
        """
        if tokens:
            self._upkeep.run(lambda connection: self.drop(connection, tokens))

    def drop_old(self, kept: timedelta = KEPT) -> int:
        """Delete what is older than that, by the server's clock; how many pieces those were.

        Raises:
            StoreError: as `put` says.
        """
        old = delete(self.table).where(self.table.c.arrived_at < func.now() - kept)
        return self._upkeep.run(lambda connection: connection.execute(old).rowcount)
