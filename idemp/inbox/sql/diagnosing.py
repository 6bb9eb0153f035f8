"""Everything that `check` refuses, found at once and with the commands that mend it; for people, not at each start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from idemp.diagnosis import Command, Diagnosis, Verdict, statements
from idemp.errors import ConfigurationError, StoreError
from idemp.inbox.sql import checks, durability, pooler, rights, space
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import is_mysql, missing_file, shown, sqlite_file, start_error, start_errors
from idemp.inbox.sql.schema import check, versions

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Engine, Table

    from idemp.clock import Clock
    from idemp.inbox.sql.tables import Tables

SKEW_WARNING_SECONDS: Final = 2.0
SKEW_FAILED_SECONDS: Final = 30.0
_CLOCK_LOOKS: Final = 5

_UNLOGGED: Final = text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = COALESCE(:schema, current_schema()) AND c.relpersistence = 'u' ORDER BY c.relname"
)
_ENGINES: Final = text(
    "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = COALESCE(:schema, DATABASE())"
)
_NOW: Final = {
    "postgresql": text("SELECT clock_timestamp()"),
    "mysql": text("SELECT UTC_TIMESTAMP(6)"),
    "mariadb": text("SELECT UTC_TIMESTAMP(6)"),
}


@dataclass(slots=True)
class Diagnoses:
    """Looks at a database and collects what it finds.

    Args:
        engine: where the tables are.
        tables: with their schema and prefix.
        clock: the time of this process.
        upgrade: what makes or upgrades the tables.

    Example:
        >>> from idemp.clock import SystemClock
        >>> from idemp.diagnosis import shell
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine = create_engine_safely("sqlite://")
        >>> found = Diagnoses(engine, Tables(), SystemClock(), shell("idemp", "db", "upgrade")).run()
        >>> [(item.name, item.commands[0].text) for item in found if item.verdict == "failed"]
        [('tables', 'idemp db upgrade')]
    """

    engine: Engine
    tables: Tables
    clock: Clock
    upgrade: Command
    found: list[Diagnosis] = field(default_factory=list)

    def run(self) -> list[Diagnosis]:
        """All that was found.

        Raises:
            ConfigurationError: the database refuses this user, or doesn't exist, or is too old.
            StoreUnavailable: it can't be reached.
        """
        if (file := missing_file(self.engine)) is not None:
            detail = f"There are no tables {self.tables.prefix}*: the file {file} does not exist."
            self._add("failed", "tables", detail, self._make_them(), self.upgrade)
            return self.found
        with start_errors(self.engine), self.engine.connect() as connection:
            version, level = checks.server_version(connection), self._isolation(connection)
            kind = "mariadb" if getattr(connection.dialect, "is_mariadb", False) else connection.dialect.name
            self._add("ok", "database", f"{shown(self.engine)}: {kind} {version}, {level}")
            self._pooler(connection)
            self._structure(connection)
            self.found += durability.look(connection, self.tables)
            self._clocks(connection)
        if not any(item.verdict == "failed" and item.name in _STRUCTURE for item in self.found):
            self._probe()
        return self.found

    def _add(self, verdict: Verdict, name: str, detail: str, fix: str = "", *commands: Command) -> None:
        self.found.append(Diagnosis(verdict, name, detail, fix, commands))

    def _make_them(self) -> str:
        if sqlite_file(self.engine) is None:
            return "Make them."
        return (
            "If this inbox is new, make them. If it was in use, its file was moved, deleted or replaced: first put the "
            "right one in its place."
        )

    def _isolation(self, connection: Connection) -> str:
        try:
            return checks.isolation(connection)
        except ConfigurationError as error:
            self._add("failed", "isolation", error.message, error.fix)
            return str(connection.get_isolation_level())

    def _pooler(self, connection: Connection) -> None:
        if not pooler.is_shared(connection):
            return
        try:
            pooler.refuse_prepared_statements(connection)
        except ConfigurationError as error:
            self._add("failed", "pooler", error.message, error.fix)
            return
        detail = "One stands before the database: relays in other processes are not woken, they poll."
        fix = "Have it end the connections of machines that went dark (docs/how-to/poolers.md)."
        self._add("warning", "pooler", detail, fix)

    def _structure(self, connection: Connection) -> None:
        """Version, tables, keys, engines, rights: what the probe would stumble over."""
        try:
            found, wanted, fits = versions(connection, self.tables)
        except ConfigurationError as error:
            self._add("failed", "tables", error.message, error.fix)
            return
        except DBAPIError as error:
            if start_error(error, self.engine) is not None:
                raise
            connection.rollback()
            look = rights.look(connection, self.tables)
            if look.verdict == "ok":  # it is something else, or was granted a moment ago
                self._add("failed", "rights", f"The version of the tables can't be read: {error.orig}")
                return
            where = "" if connection.dialect.name == "postgresql" else " Where there are none yet, make them first."
            self.found.append(replace(look, fix=look.fix + where))
            return
        names = f"{self.tables.prefix}*" + (
            f" in schema {self.tables.configured_schema}" if self.tables.configured_schema else ""
        )
        if found is None:
            self._add("failed", "tables", f"There are no tables {names}.", self._make_them(), self.upgrade)
            return
        if not fits:
            detail = f"The tables {names} are of version {found!r}; {wanted!r} is needed."
            self._add(
                "failed", "tables", detail, "Upgrade them; workers of the former release go on meanwhile.", self.upgrade
            )
            return
        hidden = rights.hidden(connection, self.tables)
        broken = list(self._broken(connection, hidden))
        beside = f", but for {len(hidden)} that this user may not read" if hidden else ""
        whole = Diagnosis("ok", "tables", f"{names} of version {found}, with all columns and keys{beside}")
        self.found += broken or [whole]
        self.found.append(rights.look(connection, self.tables))

    def _broken(self, connection: Connection, hidden: Container[str]) -> Iterator[Diagnosis]:
        look = inspect(connection)
        existing = set(look.get_table_names(schema=self.tables.schema))
        ours = [table for table in self.tables.metadata.sorted_tables if table.name not in hidden]
        missing = sorted(table.name for table in ours if table.name not in existing)
        if missing:
            detail = f"These tables are missing: {', '.join(missing)}."
            fix = "Restore them from a backup, or have them made anew, without what they held."
            yield Diagnosis("failed", "tables", detail, fix, (self.upgrade,))
        names = [table.name for table in ours if table.name in existing]
        columns = look.get_multi_columns(self.tables.schema, names)
        keys = look.get_multi_pk_constraint(self.tables.schema, names)
        for table in ours:
            if table.name in existing:
                place = (self.tables.schema, table.name)
                found = {column["name"] for column in columns[place]}
                yield from self._broken_table(look, table, found, keys.get(place) or {})
        yield from self._without_log(connection) if connection.dialect.name == "postgresql" else ()
        yield from self._without_rollback(connection) if is_mysql(connection.dialect.name) else ()

    def _broken_table(
        self, look: Any, table: Table, columns: Container[str], live: Mapping[str, Any]
    ) -> Iterator[Diagnosis]:
        if lost := sorted(column.name for column in table.columns if column.name not in columns):
            fix = "Restore it from a backup; or drop it and run `idemp db upgrade`, which loses what it held."
            yield Diagnosis("failed", "columns", f"The table {table.name} lacks the columns {', '.join(lost)}.", fix)
            return
        key, wanted = list(live.get("constrained_columns") or ()), [column.name for column in table.primary_key.columns]
        if key != wanted:
            yield Diagnosis(
                "failed",
                "primary key",
                f"The primary key of {table.name} is ({', '.join(key) or 'none'}), not ({', '.join(wanted)}): "
                "one id could be handled twice.",
                "Make it anew; where rows contradict it, look at them first."
                if self.engine.dialect.name != "sqlite"
                else "Restore the table from a backup; or drop it and run `idemp db upgrade`, which loses what it held.",
                self._key_repair(table, str(live.get("name") or "PRIMARY") if key else None),
            )
        for unique in (key for key in self.tables.unique if key.table is table):
            names = [column.name for column in unique.columns]
            if not _is_unique(look, table, names):
                dialect = self.engine.dialect.name
                mend = statements([] if dialect == "sqlite" else [checks.uniqueness(table, names, dialect)])
                fix = "Make them unique; where some stand twice, look at them first."
                yield Diagnosis("failed", "unique names", checks.not_unique(table), fix, mend)

    def _key_repair(self, table: Table, existing: str | None) -> tuple[Command, ...]:
        columns = ", ".join(column.name for column in table.primary_key.columns)
        if self.engine.dialect.name == "sqlite":
            return ()
        if is_mysql(self.engine.dialect.name):
            drop = "DROP PRIMARY KEY, " if existing else ""
            return statements([f"ALTER TABLE {qualified(table, 'mysql')} {drop}ADD PRIMARY KEY ({columns})"])
        drop = f"DROP CONSTRAINT {existing}, " if existing else ""
        key = f"ADD CONSTRAINT {table.name}_pkey PRIMARY KEY ({columns})"
        return statements([f"ALTER TABLE {qualified(table)} {drop}{key}"])

    def _without_log(self, connection: Connection) -> Iterator[Diagnosis]:
        kept = (table for table in self.tables.metadata.sorted_tables if table is not self.tables.arrival)
        names = {table.name: qualified(table) for table in kept}
        for (name,) in connection.execute(_UNLOGGED, {"schema": self.tables.schema}):
            if name in names:
                detail = f"The table {name} is UNLOGGED: a crash of the server empties it, and replicas have none."
                mend = statements([f"ALTER TABLE {names[name]} SET LOGGED"])
                yield Diagnosis("failed", "unlogged", detail, "Let it be logged.", mend)

    def _without_rollback(self, connection: Connection) -> Iterator[Diagnosis]:
        engines = {row[0]: row[1] for row in connection.execute(_ENGINES, {"schema": self.tables.schema})}
        for table in self.tables.metadata.sorted_tables:
            if (engine := engines.get(table.name, "InnoDB")) != "InnoDB":
                detail = f"The table {table.name} is in the engine {engine}, which can't roll back."
                mend = statements([f"ALTER TABLE {qualified(table, 'mysql')} ENGINE = InnoDB"])
                yield Diagnosis("failed", "engine", detail, "Move it to InnoDB.", mend)

    def _probe(self) -> None:
        """What only a try shows; it is rolled back."""
        if (disk := space.look(self.engine, self.tables)) is not None:
            self.found.append(disk)
            if disk.verdict == "failed":
                return
        try:
            check(self.engine, self.tables)
        except (ConfigurationError, StoreError) as error:
            self._add("failed", "probe", error.message, error.fix)
        else:
            self._add("ok", "probe", "one id was claimed twice: the second conflicted, and nothing stayed")

    def _clocks(self, connection: Connection) -> None:
        statement = _NOW.get(connection.dialect.name)
        if statement is None:
            self._add("ok", "clock", "the database has this machine's")
            return
        # The look with the shortest round trip tells most: half of it is all that it can be wrong.
        skew, unsure = min((self._skew(connection, statement) for _ in range(_CLOCK_LOOKS)), key=lambda look: look[1])
        who = "the database's clock is ahead of" if skew > 0 else "the database's clock is behind"
        detail = f"{who} this process's by {abs(skew):.3f} s (within {unsure:.3f} s)"
        if abs(skew) <= SKEW_WARNING_SECONDS:
            self._add("ok", "clock", detail)
            return
        verdict: Verdict = "failed" if abs(skew) > SKEW_FAILED_SECONDS else "warning"
        meaning = (
            "Claims, leases and windows go by the database's clock; ids and delays that hosts make go by their own."
        )
        self._add(
            verdict,
            "clock",
            f"{detail}. {meaning}",
            "Have a time service (chrony, ntpd) set the clocks of both machines.",
        )

    def _skew(self, connection: Connection, statement: Any) -> tuple[float, float]:
        """By how many seconds the database is ahead, and how exact that is."""
        begun = time.perf_counter()
        there: datetime = connection.execute(statement).scalar_one()
        trip = time.perf_counter() - begun
        here = self.clock.now().timestamp() - trip / 2
        there = there if there.tzinfo is not None else there.replace(tzinfo=UTC)
        return there.timestamp() - here, trip / 2


_STRUCTURE: Final = frozenset({"tables", "columns", "primary key", "unique names", "engine", "rights", "isolation"})


def _is_unique(look: Any, table: Table, columns: Sequence[str]) -> bool:
    unique = look.get_unique_constraints(table.name, schema=table.schema)
    indexes = [index for index in look.get_indexes(table.name, schema=table.schema) if index["unique"]]
    return any(found["column_names"] == columns for found in (*unique, *indexes))
