"""The database of a test: seen to be the test's own, emptied again and again, its counters set back."""

from __future__ import annotations

import warnings
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, Integer, MetaData, Table, event, false, inspect, null, select, text
from sqlalchemy.exc import OperationalError, SAWarning
from sqlalchemy.sql.ddl import sort_tables_and_constraints

from idemp.errors import ConfigurationError
from idemp.inbox.sql import Tables
from idemp.inbox.sql.engine import is_mysql, shown
from idemp.testing.database_time import DatabaseTime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, Engine

MARK: Final = "idemp_testing_may_empty"
"""A table that says: the rows of this database may be deleted."""

_COUNTERS_OF_POSTGRESQL: Final = text("""
    SELECT format('SELECT setval(%L, %s, %s)', seqrelid::regclass, coalesce(pg_sequence_last_value(seqrelid), seqstart),
                  (pg_sequence_last_value(seqrelid) IS NOT NULL)::text)
    FROM pg_sequence JOIN pg_class c ON c.oid = seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname NOT LIKE :ours AND n.nspname NOT LIKE 'pg_temp%'
""")
_COUNTERS_OF_MYSQL: Final = text("""
    SELECT concat('ALTER TABLE `', table_name, '` AUTO_INCREMENT = ', auto_increment) FROM information_schema.tables
    WHERE table_schema = database() AND auto_increment IS NOT NULL AND table_name NOT LIKE :ours
""")


class Ground:
    """A database that is emptied before each example of a property, rows of the user's included.

    Args:
        engine: on a database of the test's own.

    Attributes:
        time: the database's clock.

    Example:
        >>> from sqlalchemy import create_engine
        >>> engine = create_engine("sqlite://")
        >>> with engine.begin() as connection:
        ...     _ = connection.exec_driver_sql("CREATE TABLE invoice (number integer)")
        ...     _ = connection.exec_driver_sql("INSERT INTO invoice VALUES (1)")
        >>> Ground(engine).claim()
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: A test would delete the rows of invoice in sqlite://. Name an empty database...
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.time = DatabaseTime(engine)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _unsynced)

    def claim(self) -> None:
        """Make sure that all rows may be deleted.

        Raises:
            ConfigurationError: there are some of which nobody said so.
        """
        with self.engine.begin() as connection:
            found = _reflected(connection)
            if MARK not in {table.name for table in found.tables.values()}:
                _refuse_rows(connection, found)
                Table(MARK, MetaData(), Column("yes", Integer)).create(connection)

    def measure(self) -> None:
        """All tables are there now: what has to be done to empty them follows from them."""
        with self.engine.connect() as connection:
            self._found = _reflected(connection)
            self._statements = list(self._emptying(self._found))
        self._start = self.counters()

    def empty(self) -> None:
        """Delete all rows, but for names that the store has interned and knows by heart."""
        self._run([*self._statements, *self._start])

    def counters(self) -> list[str]:
        """Statements that set ids which the database counts back to where they are now."""
        ours = {"ours": f"{Tables().prefix}%"}
        with self.engine.connect() as connection:
            match connection.dialect.name:
                case "postgresql":
                    return list(connection.scalars(_COUNTERS_OF_POSTGRESQL, ours))
                case name if is_mysql(name):
                    return list(connection.scalars(_COUNTERS_OF_MYSQL, ours))
                case "sqlite":
                    return list(_counters_of_sqlite(connection))
        return []

    def set_back(self, counters: Sequence[str]) -> None:
        """Have ids counted from there on again: what was rolled back counts on all the same."""
        if counters:
            self._run(counters)

    def _run(self, statements: Sequence[str]) -> None:
        # By the driver itself: this is done once or twice per example of a property.
        with closing(self.engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def _emptying(self, found: MetaData) -> Iterator[str]:
        ours, dialect = Tables(), self.engine.dialect
        kept = {ours.consumer.name, ours.message_type.name, ours.worker.name, ours.version_table, MARK}
        tables = [table for table in found.tables.values() if table.name not in kept and not _is_version(table)]
        *ordered, (_, circular) = sort_tables_and_constraints(tables)  # type: ignore[no-untyped-call]
        names = [dialect.identifier_preparer.format_table(table) for table, _ in ordered[::-1] if table is not None]
        retired = ours.worker.update().values(seen_at=null(), relay=false())
        if circular and dialect.name == "postgresql":
            yield f"TRUNCATE {', '.join(names)}"
            names = []
        if circular and is_mysql(dialect.name):
            yield "SET foreign_key_checks = 0"
        if dialect.name == "sqlite":
            yield "BEGIN"
            yield "PRAGMA defer_foreign_keys = ON"
        yield from (f"DELETE FROM {name}" for name in names)
        if circular and is_mysql(dialect.name):
            yield "SET foreign_key_checks = 1"
        yield str(retired.compile(dialect=dialect))


def _reflected(connection: Connection) -> MetaData:
    """All tables of all schemas that are somebody's own."""
    found, inspector = MetaData(), inspect(connection)
    schemas: list[str | None] = [None]
    if connection.dialect.name == "postgresql":
        others = set(inspector.get_schema_names()) - {"information_schema", inspector.default_schema_name}
        schemas += sorted(name for name in others if not name.startswith("pg_"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # of types and indexes that nobody asked for
        for schema in schemas:
            found.reflect(connection, schema=schema)
    return found


def _refuse_rows(connection: Connection, found: MetaData) -> None:
    ours = Tables().prefix
    filled = [
        str(table)
        for table in found.tables.values()
        if not table.name.startswith(ours)
        and not _is_version(table)
        and connection.execute(select(text("1")).select_from(table).limit(1)).first() is not None
    ]
    if filled:
        raise ConfigurationError(
            f"A test would delete the rows of {', '.join(sorted(filled)[:5])} in {shown(connection.engine)}.",
            fix=f"Name an empty database of the test's own, or say that it may: CREATE TABLE {MARK} (yes integer).",
        )


def _unsynced(connection: Any, _record: Any) -> None:
    """Nobody pulls the plug in a test, and waiting for the disk takes a hundred times as long as all else."""
    connection.execute("PRAGMA synchronous = OFF")


def _is_version(table: Table) -> bool:
    return table.name.endswith("alembic_version")


def _counters_of_sqlite(connection: Connection) -> Iterator[str]:
    with suppress(OperationalError):  # there is no such table where nothing counts
        counted: Any = connection.exec_driver_sql("SELECT name, seq FROM sqlite_sequence").all()
        yield "DELETE FROM sqlite_sequence"
        for name, number in counted:
            quoted = name.replace("'", "''")
            yield f"INSERT INTO sqlite_sequence (name, seq) VALUES ('{quoted}', {int(number)})"
