"""Other databases of handlers under test: SQLite in memory, where what is prepared outlives the process that dies.

SQLite can't prepare a transaction. Here the database is in this very process, which does not really die: the transaction
stays open on its connection until somebody ends it, as a prepared one would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import MetaData, func, select
from sqlalchemy.orm import Session, sessionmaker

from idemp.errors import BranchUnavailable
from idemp.inbox.sql import create_engine_safely, failures, guard
from idemp.testing.options import make_tables
from idemp.twophase import Coordinator, Ended, InDoubt
from idemp.twophase.sql import SqlDecisions
from idemp.twophase.sql.branch import SqlBranch
from idemp.twophase.sql.kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sqlalchemy import Connection, Engine, exc

    from idemp.errors import StoreError
    from idemp.inbox.sql import SqlStore
    from idemp.twophase import BranchId, Prepared
    from idemp.work import Registration


class _InMemory(Kind):
    """Prepared is what its database holds."""

    def __init__(self, database: StandIn) -> None:
        self._database = database

    def begin(self, connection: Connection, id: BranchId) -> None:
        """SQLite begins with the first statement that writes."""
        del id
        connection.begin()

    def prepare(self, connection: Connection, id: BranchId, begun: int | None) -> None:
        """From now on its end is its database's affair."""
        del begun
        self._database.held = id, connection

    def end_own(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """As anybody."""
        del connection
        return self._database.end(id, commit=commit)

    def abandon(self, connection: Connection, id: BranchId) -> None:
        """The connection's end is enough."""

    def end(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """As anybody."""
        del connection
        return self._database.end(id, commit=commit)

    def in_doubt(self, connection: Connection) -> Iterator[InDoubt]:
        """What is held."""
        del connection
        yield from self._database.in_doubt()

    def verify(self, connection: Connection, name: str) -> None:
        """It can do all that."""


class _Branch(SqlBranch):
    """A branch whose connection is the database itself: never closed for good."""

    def leave(self) -> None:
        """What is prepared stays so."""
        if not self._is_prepared or self._is_over:
            super().leave()

    def _discard(self) -> None:
        """In memory a connection that is discarded takes its database along."""


class StandIn:
    """The port `Database` in memory. It has one connection: what is prepared there keeps all others waiting.

    Args:
        name: of the database, in the app.
        tables: the user's tables.

    Example:
        >>> StandIn("ledger", None).rows()
        {}
    """

    def __init__(self, name: str, tables: Any) -> None:
        self.name = name
        self.place = f"memory:{name}"
        self.held: tuple[BranchId, Connection] | None = None  # what is prepared
        self.engine: Engine = create_engine_safely("sqlite://")
        guard.install(self.engine)
        self.kind: Kind = _InMemory(self)
        self.session_factory = sessionmaker(class_=Session)
        make_tables(tables, self.engine)
        self._tables = MetaData()
        self._tables.reflect(self.engine)

    def empty(self) -> None:
        """No rows, and nothing prepared."""
        if self.held is not None:
            self.end(self.held[0], commit=False)
        with self.engine.begin() as connection:
            for table in self._tables.tables.values():
                connection.execute(table.delete())

    def rows(self) -> dict[str, int]:
        """How many rows each table has, those that are prepared left out of account."""
        with self.engine.connect() as connection:
            return {
                table.name: int(connection.scalar(select(func.count()).select_from(table)) or 0)
                for table in self._tables.tables.values()
            }

    def begin(self, id: BranchId) -> SqlBranch:
        """As the port says."""
        if self.held is not None:
            raise BranchUnavailable(f"The database {self.name!r} waits for what is prepared there to be ended.")
        return _Branch(self, id)

    def in_doubt(self) -> list[InDoubt]:
        """As the port says."""
        return [InDoubt(self.held[0])] if self.held is not None else []

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """As the port says."""
        if self.held is None or self.held[0] != id:
            return Ended.GONE
        (_, connection), self.held = self.held, None
        transaction = connection.get_transaction()
        if transaction is not None:
            (transaction.commit if commit else transaction.rollback)()
        connection.close()
        return Ended.DONE

    def meaning(self, error: exc.SQLAlchemyError) -> StoreError:
        """What an error means that a statement of idemp's own met."""
        return failures.translate(error) or failures.refused(error)

    def outcome(self, prepared: Prepared) -> None:
        """Nobody keeps it."""
        del prepared

    def verify(self) -> None:
        """It can do all that."""

    def close(self) -> None:
        """End what was opened."""
        self.engine.dispose()


def stand_ins(registrations: Iterable[Registration], tables: Any) -> dict[str, StandIn]:
    """One for each database that a policy names."""
    names = sorted({name for item in registrations for name in item.policy.databases})
    return {name: StandIn(name, tables) for name in names}


def coordinator_on(store: SqlStore, databases: Mapping[str, StandIn]) -> Coordinator:
    """What decides about stand-ins, by an inbox under test."""
    return Coordinator(store, SqlDecisions(store), databases)
