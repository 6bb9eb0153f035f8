"""The barrier: a row in the database of the local work, written in its own transaction, or by the checker before it."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Table, bindparam, delete, exc, select, update
from sqlalchemy.orm import Session, sessionmaker

from idemp.errors import ConfigurationError, TransientStoreError
from idemp.inbox.sql import failures
from idemp.inbox.sql.claim_mysql import waiting
from idemp.inbox.sql.engine import is_mysql, place_of
from idemp.inbox.sql.inserting import insert_if_absent
from idemp.inbox.sql.locating import located, made_once
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.tables import Tables, shared_tables
from idemp.inbox.sql.times import DatabaseTime
from idemp.prepared.port import Answer, Decision
from idemp.prepared.refusing import already_passed, rolled_back, work_ended

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from uuid import UUID

    from sqlalchemy import Engine

WAIT: Final = timedelta(seconds=2)
_MOST_TRIES: Final = 3
_PASSED: Final = "idemp_passed"


class _Statements:
    def __init__(self, barrier: Table) -> None:
        self.table = barrier
        one, ids = barrier.c.id == bindparam("one"), barrier.c.id.in_(bindparam("ids", expanding=True))
        self.reason = select(barrier.c.reason).where(one)
        # A snapshot that is older than the row would not see it; a lock looks at what is there now.
        self.reason_now = self.reason.with_for_update(read=True)
        self.settle = update(barrier).where(ids, barrier.c.settled_at.is_(None)).values(settled_at=DatabaseTime(0.0))
        self.settled = select(barrier.c.settled_at).where(one)
        self.old = (
            select(barrier.c.id)
            .where(barrier.c.settled_at <= DatabaseTime("before"))
            .order_by(barrier.c.settled_at)
            .limit(bindparam("limit"))
        )
        self.delete = delete(barrier).where(ids, barrier.c.settled_at.is_not(None))


class SqlBarrier:
    """A barrier in a SQL database, the one of the local work. Safe to share between threads and processes.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite.
        tables: where idemp's tables live (`idemp db upgrade` makes them).
        session_factory: makes the sessions of `begin`; a `sessionmaker` of the same engine.
        wait: how long a probe waits for work in flight; whole seconds on MariaDB and MySQL, and on SQLite as long as the
            engine's connections wait (`timeout` of `connect_args`).

    Example:
        >>> from uuid import UUID
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> engine = create_engine_safely("sqlite://")
        >>> upgrade(engine, Tables())
        >>> barrier, id = SqlBarrier(engine), UUID("0192c8a4-7d3e-7000-8000-000000000001")
        >>> with barrier.begin() as session:
        ...     barrier.pass_(session, id)
        >>> barrier.probe(id)
        <Answer.COMMIT: 'commit'>
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tables: Tables | None = None,
        session_factory: sessionmaker[Any] | None = None,
        wait: timedelta = WAIT,
    ) -> None:
        self.engine = engine
        self._configured_tables = tables or shared_tables()
        self._sessions = session_factory or sessionmaker(engine)
        self._wait = wait
        self._short = Short(engine)

    @made_once
    def tables(self) -> Tables:
        """The tables, with the schema that they are in."""
        return located(self.engine, self._configured_tables)

    @made_once
    def _sql(self) -> _Statements:
        return _Statements(self.tables.barrier)

    @property
    def place(self) -> str:
        """The database."""
        return place_of(self.engine)

    def verify(self) -> None:
        """See that tables, keys and isolation are as the promises need them; see `idemp.inbox.sql.schema.check`."""
        check(self.engine, self.tables)

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """A session that commits at the end of the block.

        Raises:
            TransientStoreError: deadlock, serialization failure or lock wait; it is rolled back, and may run again.
            ConfigurationError: the block committed, rolled back or closed the session itself; what became of it is unknown.
        """
        try:
            with self._sessions() as session, session.begin() as transaction:
                yield session
                if not transaction.is_active or not self._stands(session):
                    raise work_ended()
        except exc.DBAPIError as error:
            if failures.is_transient(error.orig):
                raise failures.translate(error) or error from error
            raise

    def pass_(self, work: Session | Connection, id: UUID) -> None:
        """One INSERT on the work's own connection; where the key is taken, the row says by whom.

        Raises:
            RolledBack: the checker was first.
            AlreadyPassed: work for this id is committed already.
            ConfigurationError: the connection commits by itself.
            StoreError: the database could not do its part.
        """
        connection = work if isinstance(work, Connection) else work.connection()
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise ConfigurationError(
                "The local work runs at AUTOCOMMIT: the barrier's row would be committed without it.",
                fix="Do it in a transaction.",
            )
        try:
            reason = self._insert(connection, id, Decision.COMMIT)
        except exc.DBAPIError as error:
            raise failures.translate(error) or failures.denied(error) or error from error
        if reason is Decision.ROLLBACK:
            raise rolled_back(id)
        if reason is not None:
            raise already_passed(id)
        if isinstance(work, Session):
            work.info[_PASSED] = id

    def probe(self, id: UUID) -> Answer:
        """One INSERT in a transaction of its own, which waits for whoever has inserted the same key and not ended yet."""
        try:
            with self._short.transaction() as connection, self._waiting_briefly(connection):
                reason = self._insert(connection, id, Decision.ROLLBACK)
        except TransientStoreError:
            return Answer.UNKNOWN  # it waited long enough; nothing was decided
        return Answer((reason or Decision.ROLLBACK).value)

    def settle(self, ids: Collection[UUID]) -> None:
        """One UPDATE; the first time counts."""
        if ids:
            self._short.run(lambda connection: connection.execute(self._sql.settle, {"ids": sorted(ids)}))

    def is_settled(self, id: UUID) -> bool:
        """By its primary key."""
        return self._short.run(lambda connection: connection.scalar(self._sql.settled, {"one": id})) is not None

    def purge(self, retention: timedelta, limit: int) -> int:
        """One SELECT of keys, one DELETE of them."""

        def work(connection: Connection) -> int:
            wanted = {"before": -retention.total_seconds(), "limit": limit}
            ids = sorted(connection.scalars(self._sql.old, wanted))
            return connection.execute(self._sql.delete, {"ids": ids}).rowcount if ids else 0

        return self._short.run(work)

    def close(self) -> None:
        """Nothing is open; the engine is its owner's."""

    def _stands(self, session: Session) -> bool:
        """Whether the row is still there, which a ROLLBACK among the work's statements takes away."""
        passed = session.info.pop(_PASSED, None)
        return passed is None or session.connection().scalar(self._sql.reason, {"one": passed}) is not None

    def _insert(self, connection: Connection, id: UUID, decision: Decision) -> Decision | None:
        """Who was there before with which decision; `None` if nobody was, and now we are."""
        values = {"id": id, "reason": decision.value, "passed_at": DatabaseTime(0.0)}
        read = self._sql.reason_now if is_mysql(connection.dialect.name) else self._sql.reason
        for _ in range(_MOST_TRIES):
            if insert_if_absent(connection, self._sql.table, values):
                return None
            reason = connection.scalar(read, {"one": id})
            if reason is not None:
                return Decision(reason)
        raise TransientStoreError(f"The barrier of message {id} was there and could not be read, time and again.")

    @contextmanager
    def _waiting_briefly(self, connection: Connection) -> Iterator[None]:
        match connection.dialect.name:
            case "postgresql":
                milliseconds = max(1, int(self._wait.total_seconds() * 1000))  # 0 would be for ever
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
                yield
            case "mysql" | "mariadb":
                with waiting(connection, self._wait):
                    yield
            case _:
                yield
