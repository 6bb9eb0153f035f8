"""What is looked at before anything is consumed: server, isolation, tables, keys, and a probe that is rolled back."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import Engine, Table, delete, false, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from idemp.errors import GuaranteeError, SchemaError
from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import is_mysql, shown, start_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.engine import Inspector

    from idemp.inbox.sql.tables import Tables

# RETURNING, ON CONFLICT and what else the claim is made of. A mysql:// server that is a MariaDB counts as such.
_OLDEST: Final[Mapping[str, tuple[int, ...]]] = {
    "postgresql": (12,),
    "mariadb": (10, 5),
    "mysql": (8, 0),
    "sqlite": (3, 35),
}
_PROBE_CONSUMER: Final = 0  # interned names begin at 1

_POSTGRESQL_SETTINGS: Final = text(
    "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes')"
)
_MYSQL_SETTINGS: Final = text(
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'log_bin', 'sync_binlog', 'tcp_keepalive_time')"
)
_MYSQL_MODE: Final = text("SELECT @@sql_mode")
_MYSQL_ENGINES: Final = text(
    "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = COALESCE(:schema, DATABASE())"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting of the database, and whether it weakens a promise.

    Attributes:
        level: "ok" or "warning".
        name: the setting.
        value: what it is.
        meaning: what that means for the promises; empty when all is well.
        fix: what to do about it.
    """

    level: Literal["ok", "warning"]
    name: str
    value: str
    meaning: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReport:
    """What `check` saw in a database that can keep the promises.

    Attributes:
        dialect: kind of database.
        server_version: as the server says it.
        isolation: the engine's isolation level.
        revision: version of the tables.
        findings: settings that matter; those of level "warning" weaken a promise.
    """

    dialect: str
    server_version: str
    isolation: str
    revision: str
    findings: tuple[Finding, ...]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that weaken a promise."""
        return tuple(finding for finding in self.findings if finding.level == "warning")


def server_version(connection: Connection) -> str:
    """The server's version, refused where it is too old.

    Raises:
        GuaranteeError: too old, or another kind of database.
    """
    dialect = connection.dialect
    kind = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    version = tuple(part for part in dialect.server_version_info or () if isinstance(part, int))
    shown_version = ".".join(map(str, version))
    oldest = _OLDEST.get(kind)
    if oldest is None or version < oldest:
        needed = "postgresql, mariadb, mysql or sqlite" if oldest is None else f"{kind} {'.'.join(map(str, oldest))}"
        raise GuaranteeError(f"{kind} {shown_version} can't keep an inbox.", fix=f"Use {needed} or newer.")
    return shown_version


def isolation(connection: Connection) -> str:
    """The engine's isolation level.

    Raises:
        GuaranteeError: it is READ UNCOMMITTED.
    """
    level: str = connection.get_isolation_level()
    if level == "READ UNCOMMITTED":
        raise GuaranteeError(
            f"The engine of {shown(connection.engine)} works at READ UNCOMMITTED: a claim that is rolled back could "
            "pass for a duplicate.",
            fix='Make it with isolation_level="READ COMMITTED".',
        )
    return level


def columns_and_keys(connection: Connection, tables: Tables) -> None:
    """Compare the live columns, primary keys and unique names with those that the claim relies on.

    Raises:
        SchemaError: something is missing or altered.
        GuaranteeError: a table of MySQL's family is in an engine without transactions.
    """
    look, ours = inspect(connection), tables.metadata.tables.values()
    # All tables at once: PostgreSQL answers in one round trip for each question, where each table would need its own.
    asked: dict[str, Any] = {"schema": tables.schema, "filter_names": [table.name for table in ours]}
    live = {
        name: {column["name"]: column for column in found}
        for (_, name), found in look.get_multi_columns(**asked).items()
    }
    missing = sorted(table.name for table in ours if table.name not in live)
    if missing:
        raise SchemaError(
            f"These tables are missing: {', '.join(missing)}.",
            fix="Restore them from a backup, or let `idemp db upgrade` make them anew, without what they held.",
        )
    keys = {name: key for (_, name), key in look.get_multi_pk_constraint(**asked).items()}
    for table in ours:
        columns = live[table.name]
        lost = sorted(column.name for column in table.columns if column.name not in columns)
        if lost:
            raise SchemaError(
                f"The table {table.name} lacks the columns {', '.join(lost)}.",
                fix="Restore it from a backup; or drop it and run `idemp db upgrade`, which loses what it held.",
            )
        _fillable(table, columns)
        _primary_key(connection, table, keys[table.name])
    _unique_columns(look, tables)
    if is_mysql(connection.dialect.name):
        _innodb(connection, tables)


def _unique_columns(look: Inspector, tables: Tables) -> None:
    wanted = {key.table: [column.name for column in key.columns] for key in tables.unique}
    asked: dict[str, Any] = {"schema": tables.schema, "filter_names": [table.name for table in wanted]}
    constraints, indexes = look.get_multi_unique_constraints(**asked), look.get_multi_indexes(**asked)
    for table, columns in wanted.items():
        place = tables.schema, table.name
        unique = [index for index in indexes.get(place, ()) if index["unique"]]
        if not any(found["column_names"] == columns for found in (*constraints.get(place, ()), *unique)):
            raise SchemaError(not_unique(table), fix=f"Run {uniqueness(table, columns, look.dialect.name)}.")


def not_unique(table: Table) -> str:
    """What is wrong where a unique key beside the primary one was dropped."""
    if "name" in table.columns:
        return f"The names in {table.name} are not unique any more."
    return f"The message ids in {table.name} are not unique any more: one could be handled twice."


def uniqueness(table: Table, columns: Sequence[str], dialect: str) -> str:
    """The statement that brings it back."""
    name = f"{table.name}_{'name' if 'name' in table.columns else 'id'}_key"
    return f"ALTER TABLE {qualified(table, dialect)} ADD CONSTRAINT {name} UNIQUE ({', '.join(columns)})"


def probe(engine: Engine, tables: Tables) -> None:
    """Claim one id twice in a transaction and roll back: the second must conflict, and nothing may stay.

    Into the other tables of a handling no rows are inserted, which takes the same privileges.

    Raises:
        SchemaError: the key lets an id in twice, or this user may not write.
        GuaranteeError: what was rolled back stayed.
    """
    key = uuid.uuid4()
    inbox = tables.inbox
    row = {"message_key": key, "consumer_id": _PROBE_CONSUMER, "type_id": 0, "claimed_at": datetime.now(UTC)}
    mine = (inbox.c.consumer_id == _PROBE_CONSUMER) & (inbox.c.message_key == key)
    with engine.connect() as connection:
        conflict = _conflicts(connection, inbox, row, engine)
        for table in (tables.output, tables.pending, tables.history):
            _takes_rows(connection, table, engine)
    with engine.connect() as connection, connection.begin():
        stayed = connection.execute(select(inbox.c.message_key).where(mine)).first() is not None
        if stayed:
            connection.execute(delete(inbox).where(mine))
    if stayed:
        raise GuaranteeError(
            f"The engine of {shown(engine)} commits each statement by itself (AUTOCOMMIT): effects could stay without "
            "their claim.",
            fix="Make it without isolation_level='AUTOCOMMIT'.",
        )
    if not conflict:
        raise SchemaError(
            f"The table {inbox.name} takes one id twice.", fix=_key_repair(engine.dialect.name, inbox, None)
        )


def findings(connection: Connection, tables: Tables) -> tuple[Finding, ...]:
    """The settings that decide whether a COMMIT survives a crash of the server."""
    del tables
    dialect = connection.dialect.name
    if dialect == "postgresql":
        return _postgresql_findings({row[0]: row[1] for row in connection.execute(_POSTGRESQL_SETTINGS)})
    if is_mysql(dialect):
        settings = {row[0]: row[1] for row in connection.execute(_MYSQL_SETTINGS)}
        return _mysql_findings(settings, str(connection.scalar(_MYSQL_MODE)))
    journal = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    return _sqlite_findings(journal, int(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0))


def _postgresql_findings(settings: Mapping[str, str]) -> tuple[Finding, ...]:
    lost = "A crash of the server may lose handlings whose messages were acked."
    torn = "A crash of the server may corrupt the inbox."
    return (
        _finding("synchronous_commit", settings, bad=("off",), meaning=lost, good="on"),
        _finding("fsync", settings, bad=("off",), meaning=torn, good="on"),
        _finding("full_page_writes", settings, bad=("off",), meaning=torn, good="on"),
    )


def _mysql_findings(settings: Mapping[str, str], mode: str) -> tuple[Finding, ...]:
    lost = "A crash of the server may lose handlings whose messages were acked."
    found = [
        _finding("innodb_flush_log_at_trx_commit", settings, bad=("0", "2"), meaning=lost, good="1"),
        _finding("innodb_doublewrite", settings, bad=("OFF", "0"), meaning="A crash may corrupt the inbox.", good="ON"),
    ]
    if settings.get("log_bin") == "ON":
        # Only the binary log makes it matter: a replica could miss what the source has, and be promoted.
        bad = () if settings.get("sync_binlog") == "1" else (settings.get("sync_binlog", ""),)
        found.append(_finding("sync_binlog", settings, bad=bad, meaning=lost, good="1"))
    if "tcp_keepalive_time" in settings:
        late = (
            "The claim of a worker whose machine went dark blocks its message until the system's own keepalive ends it."
        )
        found.append(_finding("tcp_keepalive_time", settings, bad=("0",), meaning=late, good="10"))
    strict = any(name in mode for name in ("STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"))
    truncates = "" if strict else "Values of your handlers that are too long are cut off silently."
    fix = "" if strict else "Add STRICT_TRANS_TABLES to sql_mode."
    found.append(Finding("ok" if strict else "warning", "sql_mode", mode, truncates, fix))
    return tuple(found)


def _sqlite_findings(journal: str, synchronous: int) -> tuple[Finding, ...]:
    name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(synchronous, str(synchronous))
    settings = {"journal_mode": journal, "synchronous": name}
    waits = "Readers and the writer wait for each other."
    lost = "Power loss may lose handlings whose messages were acked."
    journals = ("delete", "truncate", "persist", "off")
    return (
        _finding("journal_mode", settings, bad=journals, meaning=waits, good="WAL"),
        _finding("synchronous", settings, bad=("OFF", "NORMAL"), meaning=lost, good="FULL"),
    )


def _finding(name: str, settings: Mapping[str, str], *, bad: Sequence[str], meaning: str, good: str) -> Finding:
    value = settings.get(name, "unknown")
    if value in bad:
        return Finding("warning", name, value, meaning, f"Set {name} = {good}.")
    return Finding("ok", name, value)


def _fillable(table: Table, columns: Mapping[str, Any]) -> None:
    """Columns that somebody added are no matter, unless every row needs a value in them."""
    filled = ("default", "computed", "identity")
    for name, column in columns.items():
        if name in table.columns or column["nullable"] or any(column.get(how) is not None for how in filled):
            continue
        if column.get("autoincrement") is not True:
            raise SchemaError(
                f"The table {table.name} has a column {name}, which needs a value that this release does not give it.",
                fix=f"Let it be null, or give it a default: ALTER TABLE {table.fullname} ALTER COLUMN {name} SET DEFAULT …",
            )


def _primary_key(connection: Connection, table: Table, live: Any) -> None:
    wanted = [column.name for column in table.primary_key.columns]
    found = list(live["constrained_columns"]) if live else []
    if found != wanted:
        raise SchemaError(
            f"The primary key of {table.name} is ({', '.join(found) or 'none'}), not ({', '.join(wanted)}): "
            "one id could be handled twice.",
            fix=_key_repair(connection.dialect.name, table, (live.get("name") or "PRIMARY") if found else None),
        )


def _key_repair(dialect: str, table: Table, existing: str | None) -> str:
    columns = ", ".join(column.name for column in table.primary_key.columns)
    drop = ""
    if dialect == "sqlite":
        return "Restore the table from a backup; or drop it and run `idemp db upgrade`, which loses what it held."
    if is_mysql(dialect):
        drop = "DROP PRIMARY KEY, " if existing else ""
        return f"Run ALTER TABLE {qualified(table, dialect)} {drop}ADD PRIMARY KEY ({columns})."
    drop = f"DROP CONSTRAINT {existing}, " if existing else ""
    return f"Run ALTER TABLE {qualified(table)} {drop}ADD CONSTRAINT {table.name}_pkey PRIMARY KEY ({columns})."


def _innodb(connection: Connection, tables: Tables) -> None:
    engines = {row[0]: row[1] for row in connection.execute(_MYSQL_ENGINES, {"schema": tables.schema})}
    for table in tables.metadata.tables.values():
        if (engine := engines.get(table.name)) != "InnoDB":
            raise GuaranteeError(
                f"The table {table.name} is in the engine {engine}, which can't roll back.",
                fix=f"Run ALTER TABLE {qualified(table, 'mysql')} ENGINE = InnoDB.",
            )


def _takes_rows(connection: Connection, table: Table, engine: Engine) -> None:
    columns = list(table.columns)
    none = select(*columns).where(false())
    with connection.begin() as transaction:
        try:
            connection.execute(insert(table).from_select([column.name for column in columns], none))
        except DBAPIError as error:
            raise _not_writable(table, error, engine) from error
        finally:
            transaction.rollback()


def _not_writable(table: Table, error: DBAPIError, engine: Engine) -> Exception:
    if start_error(error, engine) is not None:
        return error
    return failures.unwritable(table.name, error, "Grant this user the right to write.")


def _conflicts(connection: Connection, inbox: Table, row: Mapping[str, Any], engine: Engine) -> bool:
    transaction = connection.begin()
    try:
        connection.execute(insert(inbox), row)
    except DBAPIError as error:
        transaction.rollback()
        raise _not_writable(inbox, error, engine) from error
    try:
        connection.execute(insert(inbox), row)
    except IntegrityError:
        return True
    finally:
        transaction.rollback()
    return False
