"""Another database, by SQLAlchemy."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.orm import Session, sessionmaker

from idemp.errors import BranchUnavailable, StoreError, StoreUnavailable, TransientStoreError
from idemp.inbox.sql import durability, failures, guard, pooler
from idemp.inbox.sql.engine import place_of, start_errors
from idemp.inbox.sql.pooling import watch_pool
from idemp.inbox.sql.short import running_errors
from idemp.twophase.sql.branch import SqlBranch
from idemp.twophase.sql.kinds import PostgreSQL, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, Engine, exc

    from idemp.diagnosis import Diagnosis
    from idemp.inbox.sql import Tables
    from idemp.twophase.port import BranchId, Ended, InDoubt, Prepared


class Room(NamedTuple):
    """For how many prepared transactions a server has room.

    Attributes:
        most: at most so many, of all its databases.
        others: so many of them are taken right now by what this inbox has not prepared.
    """

    most: int
    others: int


class SqlDatabase:
    """Another database that handlers write to. Safe to share between threads.

    Args:
        name: its name in the app.
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB or MySQL.
        session_factory: makes the sessions that handlers see; a `sessionmaker` of the same engine.
        owned: whether `close` disposes of the engine.

    Raises:
        ConfigurationError: a kind of database that can't prepare transactions.

    Example:
        >>> from sqlalchemy import create_engine
        >>> SqlDatabase("ledger", create_engine("postgresql+psycopg://me:secret@db/ledger")).place
        'postgresql://db:5432/ledger'
    """

    def __init__(
        self, name: str, engine: Engine, *, session_factory: sessionmaker[Any] | None = None, owned: bool = False
    ) -> None:
        self.name = name
        self.engine = engine
        self.kind = kind_of(engine, name)
        self.session_factory = session_factory or sessionmaker(class_=Session)
        self._owned = owned
        guard.install(engine)
        watch_pool(engine)

    @property
    def place(self) -> str:
        """The database, without user and password."""
        return place_of(self.engine)

    def begin(self, id: BranchId) -> SqlBranch:
        """Begin a branch on a connection of its own.

        Raises:
            BranchUnavailable: the database can't be reached.
        """
        return SqlBranch(self, id)

    def in_doubt(self) -> Sequence[InDoubt]:
        """All prepared branches of any inbox of idemp's.

        Raises:
            BranchUnavailable: the database can't be reached.
            StoreError: it refuses.
        """
        with self._committing_by_itself() as connection:
            return list(self.kind.in_doubt(connection))

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """End a prepared branch, whoever prepared it.

        Raises:
            BranchUnavailable: the database can't be reached.
            StoreError: it refuses: on PostgreSQL only the user that prepared it may, or a superuser.
        """
        with self._committing_by_itself() as connection:
            return self.kind.end(connection, id, commit=commit)

    def outcome(self, prepared: Prepared) -> bool | None:
        """Whether a branch that is gone was committed; `None` where its server does not say.

        Raises:
            StoreError: as `in_doubt`.
        """
        if prepared.transaction is None:
            return None
        with self._committing_by_itself() as connection:
            return self.kind.outcome(connection, prepared.transaction)

    def verify(self) -> None:
        """See that the server can prepare transactions.

        Raises:
            GuaranteeError: it can't, as it is set up.
            ConfigurationError: it refuses this user, or the database doesn't exist.
            StoreUnavailable: it can't be reached.
        """
        with start_errors(self.engine), self.engine.connect() as connection:
            pooler.refuse_prepared_statements(connection)
            self.kind.verify(connection, self.name)

    def room(self, inbox: bytes) -> Room | None:
        """How many transactions the server keeps prepared, as this inbox sees it; `None` where there is no limit.

        Raises:
            StoreError: as `in_doubt`.
        """
        if not isinstance(self.kind, PostgreSQL):
            return None
        with self._committing_by_itself() as connection:
            return Room(self.kind.most(connection), self.kind.others(connection, inbox))

    def durability(self, tables: Tables) -> Sequence[Diagnosis]:
        """The settings that decide whether what is prepared survives a crash of the server.

        Raises:
            StoreError: as `in_doubt`.
        """
        with self._committing_by_itself() as connection:
            return durability.look(connection, tables)

    def close(self) -> None:
        """Dispose of an engine of its own."""
        if self._owned:
            self.engine.dispose()

    def meaning(self, error: exc.SQLAlchemyError | StoreError) -> StoreError:
        """What an error means that a statement of idemp's own met."""
        known = error if isinstance(error, StoreError) else failures.translate(error) or failures.refused(error)
        if isinstance(known, TransientStoreError):
            return known
        kind = BranchUnavailable if isinstance(known, StoreUnavailable) else StoreError
        return kind(f"Database {self.name!r}: {known.message}", fix=known.fix or "Nothing was changed there.")

    @contextmanager
    def _committing_by_itself(self) -> Iterator[Connection]:
        try:
            with running_errors(self.engine), self.engine.connect() as connection:
                yield connection.execution_options(isolation_level="AUTOCOMMIT")
        except StoreError as error:
            raise self.meaning(error) from error
