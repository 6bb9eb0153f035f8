"""The barrier: a row in the database of the work, inserted by the work in its own transaction, or before it by the checker.

The conflict of the two is the answer. There is no SELECT first, because "not there" could mean "not yet". After the barrier of dtm
(https://github.com/dtm-labs/dtm).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Column, Connection, Double, Engine, MetaData, String, Table, delete, event, exc, inspect, select
from sqlalchemy.orm import Session

from idemp.errors import ConfigurationError, Conflict, TransactionEnded, TransactionRolledBack
from idemp.ports import Kind
from idemp.prepared.ports import Answer, Prepared
from idemp.sql.dialects import Ended, autocommit_refused
from idemp.sql.engine import Database
from idemp.sql.guard import Unit
from idemp.sql.tables import DEFAULT_PREFIX, INNODB

__all__ = ["SqlBarrier"]

TRIES: Final = 3  # of work that fails by a deadlock or a serialization failure
LIMIT: Final = 1000  # rows that are deleted at once


class SqlBarrier:
    """A checker for work in a SQL database. `create`, or the owner of the database, creates its one table.

    Args:
        engine: SQLAlchemy engine of the work's database.
        prefix: Prefix of the table's name.

    Example:
        >>> from sqlalchemy import create_engine
        >>> barrier = SqlBarrier(create_engine("sqlite:///shop.db"))
        >>> barrier.table.name
        'idemp_barrier'
    """

    def __init__(self, engine: Engine, prefix: str = DEFAULT_PREFIX) -> None:
        if not isinstance(engine, Engine):
            raise ConfigurationError(f"{engine!r} is not a SQLAlchemy Engine")
        self._database = Database(engine)
        Unit.guard(self._database.units)
        options: Any = INNODB
        self.table = Table(
            f"{prefix}barrier",
            MetaData(),
            Column("id", String(36), primary_key=True),
            *(Column(name, String(255), nullable=False) for name in ("app", "answer", "token", "digest")),
            Column("inserted_at", Double, nullable=False),
            **options,
        )

    def create(self) -> None:
        """Create the table, unless it exists."""
        self.table.create(self._database.engine, checkfirst=True)

    def verify(self) -> None:
        """Check that the table exists and is transactional.

        Raises:
            ConfigurationError: The table is missing, or its storage engine has no rollback.
        """
        engine = self._database.engine
        with self._database.short() as connection:  # a forked child gets a connection of its own
            inspector, where = inspect(connection), engine.url.render_as_string()
            if not inspector.has_table(self.table.name):
                raise ConfigurationError(f"{where} has no table {self.table.name}: SqlBarrier(engine).create()")
            options = inspector.get_table_options(self.table.name) if connection.dialect.name in ("mysql", "mariadb") else {}
            kept_by = options.get("mysql_engine", "InnoDB")
        if kept_by != "InnoDB":
            raise ConfigurationError(f"{where} keeps {self.table.name} in {kept_by}, which rolls nothing back: use InnoDB")

    def ask(self, prepared: Prepared) -> Answer:
        """Insert the row of a rollback. This waits some seconds for work in flight; work that comes later is refused."""
        try:
            with self._database.short() as connection, self._database.dialect.impatient(connection):
                return self._insert(connection, prepared, "rollback")[0]
        except Conflict:  # another message has the row, so the work of this one cannot commit
            return "rollback"
        except exc.DBAPIError as error:
            if self._database.dialect.classify(error) is Kind.TRANSIENT:
                return "unknown"
            raise

    def admit(self, work: Session | Connection, prepared: Prepared, committing: Callable[[], object] = lambda: None) -> Answer:
        """Insert the row of a commit in the transaction of the work; before its COMMIT, check that the row is still there.

        Args:
            work: Session or connection of the barrier's engine.
            prepared: The message.
            committing: Called before the COMMIT of the work.

        Returns:
            `unknown` if the work is to be done, `commit` if it was committed before, `rollback` if it comes too late.

        Raises:
            ConfigurationError: The connection is in autocommit mode, or belongs to another engine.
            Conflict: Work with another message was done or rolled back under the key.
        """
        connection = work.connection() if isinstance(work, Session) else work
        if connection.engine.pool is not self._database.engine.pool:
            there, here = (engine.url.render_as_string() for engine in (connection.engine, self._database.engine))
            raise ConfigurationError(
                f"the work is on another engine ({there}) than the barrier ({here}), so nothing is committed: "
                "begin the work on the engine of the barrier, or give SqlBarrier the engine of the work"
            )
        if self._database.dialect.autocommits(connection):
            raise autocommit_refused()
        token, began = secrets.token_hex(8), connection.get_transaction()
        answer, new = self._insert(connection, prepared, "commit", token)

        def prove(connection: Connection) -> None:
            if connection.get_transaction() is not began:
                return
            # The row is missing after a deadlock whose error the work has caught, or a rollback by the driver.
            if new and not self._has_row(connection, prepared, token):
                connection.connection.rollback()  # SQLAlchemy does not roll back after a refused COMMIT
                raise TransactionRolledBack("a rollback")
            committing()

        event.listen(connection, "commit", prove)
        return "unknown" if new else answer

    def do(self, prepared: Prepared, work: Callable[[Session], object]) -> Answer:
        """Do work in a transaction that has passed the barrier; repeat it after a deadlock or a serialization failure.

        Returns:
            The answer of `admit`; the work is done only if it is `unknown`.

        Raises:
            Conflict: Work with another message was done or rolled back under the key.
            TransactionEnded: The work has ended its transaction; `committed` of the error says whether it was committed.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return self._do(prepared, work)
            except exc.DBAPIError as error:
                if attempt == TRIES or self._database.dialect.classify(error) is not Kind.TRANSIENT:
                    raise
        raise AssertionError

    def _do(self, prepared: Prepared, work: Callable[[Session], object]) -> Answer:
        dialect = self._database.dialect
        with Unit(self._database) as unit:
            dialect.mark(unit.connection, unit.name, self.table)
            with dialect.impatient(unit.connection):
                answer, new = self._insert(unit.connection, prepared, "commit", unit.name)
            dialect.claimed(unit.connection)
            try:
                if new:
                    work(unit.session)
                unit.commit([], lambda *_: None, None, lazy=False)
            except Exception as error:
                ended = isinstance(error, Ended)
                if (ended or not (unit.ending or unit.holds())) and self._committed_by_work(unit, prepared):
                    raise TransactionEnded("a commit below SQLAlchemy", committed=True) from error
                if ended:
                    raise TransactionRolledBack(dialect.unmarked) from error
                raise
        return "unknown" if new else answer

    def _committed_by_work(self, unit: Unit, prepared: Prepared) -> bool:
        """Return whether the work itself has committed the row of its unit."""
        unit.end()
        with self._database.engine.connect() as connection:
            return self._has_row(connection, prepared, unit.name)

    def _has_row(self, connection: Connection, prepared: Prepared, token: str) -> bool:
        ours = select(self.table.c.id).where(self.table.c.id == prepared.output.id, self.table.c.token == token)
        return connection.execute(self._database.dialect.newest(ours)).first() is not None

    def purge(self, app: str, retention: float, waiting: Callable[[Sequence[str]], set[str]]) -> int:
        """Delete old rows of an app, except those of messages that still wait; return how many.

        Args:
            app: Name of the app.
            retention: Seconds for which a row is kept.
            waiting: Function that returns which of some ids still wait.
        """
        table, now = self.table, self._database.dialect.now
        old = select(table.c.id).where(table.c.app == app, table.c.inserted_at < now - retention).limit(LIMIT)
        with self._database.short() as connection:
            ids = connection.scalars(old).all()
            gone = sorted(set(ids) - waiting(ids)) if ids else []
            connection.execute(delete(table).where(table.c.id.in_(gone)))
        return len(gone)

    def _insert(self, connection: Connection, prepared: Prepared, answer: Answer, token: str = "") -> tuple[Answer, bool]:
        """Insert a row unless there is one; return the stored answer, and whether it is the one of this call."""
        table, token = self.table, token or secrets.token_hex(8)
        row = {"id": prepared.output.id, "app": prepared.app, "answer": answer, "token": token, "digest": prepared.digest}
        insert = self._database.dialect.insert_new(table, ["id"]).values(inserted_at=self._database.dialect.now)
        connection.execute(insert, row)
        row_of_id = select(table.c.answer, table.c.token, table.c.digest).where(table.c.id == prepared.output.id)
        stored = connection.execute(self._database.dialect.newest(row_of_id)).one()
        if stored.digest != prepared.digest:
            raise Conflict(f"work with another message was done or rolled back under the key {prepared.key!r}")
        new = stored.token == token
        if not new:  # work in a handler may have committed it before it is on disk
            self._database.dialect.let_commit_wait(connection)
        return stored.answer, new
