"""What the database user may do with each table, asked of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from idemp.diagnosis import Diagnosis, statements
from idemp.errors import SchemaError
from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import is_mysql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Table

    from idemp.inbox.sql.tables import Tables

_ALWAYS: Final = ("SELECT", "INSERT", "DELETE")
_UPDATED: Final = frozenset(
    {"pending", "worker", "activity", "identity", "broker", "consumer", "unfinished", "queue", "prepared", "barrier"}
)
_APPENDED: Final = frozenset({"commit", "coordinator"})
_ONLY_READ: Final = frozenset({"daily"})  # its owner writes it
_LOCKED: Final = frozenset({"inbox"})  # PostgreSQL asks for UPDATE on some column where rows are locked
_READ: Final = frozenset(
    {"inbox", "output", "pending", "history", "consumer", "message_type", "worker", "broker", "activity", "daily"}
)
_DENIED: Final = frozenset({1142, 1143})
_ALTERED: Final = frozenset({1054, 1146})  # a column or the table is missing

_HELD: Final = text(
    """
    SELECT c.relname, has_table_privilege(c.oid, 'SELECT') AS "SELECT", has_table_privilege(c.oid, 'INSERT') AS "INSERT",
           has_any_column_privilege(c.oid, 'UPDATE') AS "UPDATE", has_table_privilege(c.oid, 'DELETE') AS "DELETE",
           has_schema_privilege(c.relnamespace, 'USAGE') AS "USAGE"
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = COALESCE(:schema, current_schema()) AND c.relkind IN ('r', 'p')
    """
)
_PARTS: Final = text(
    """
    SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name,
           has_table_privilege(c.oid, 'SELECT') AS "SELECT", has_table_privilege(c.oid, 'INSERT') AS "INSERT",
           has_any_column_privilege(c.oid, 'UPDATE') AS "UPDATE", has_table_privilege(c.oid, 'DELETE') AS "DELETE"
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE i.inhparent = to_regclass(:parent) ORDER BY name
    """
)
_SEQUENCES: Final = text(
    """
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_depend d ON d.objid = c.oid AND d.deptype IN ('a', 'i') JOIN pg_class t ON t.oid = d.refobjid
    WHERE n.nspname = COALESCE(:schema, current_schema()) AND c.relkind = 'S' AND t.relname = ANY(:tables)
          AND CASE WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE') END ORDER BY c.relname
    """
)


def look(connection: Connection, tables: Tables) -> Diagnosis:
    """Whether this user may do with each table what a worker does. Writes nothing."""
    if connection.dialect.name == "postgresql":
        missing = list(_missing_on_postgresql(connection, tables))
    elif is_mysql(connection.dialect.name):
        missing = list(_missing_on_mysql(connection, tables))
    else:
        return Diagnosis("ok", "rights", "SQLite knows none but the file's; the probe wrote")
    if not missing:
        return Diagnosis("ok", "rights", "this user may do with each table what a worker does")
    user = _user(connection)
    lacking = ", ".join(f"{right} on {name}" for right, name, _ in missing)
    return Diagnosis(
        "failed",
        "rights",
        f"The user {user} has no {lacking}.",
        "Grant what is missing, as the owner of the tables.",
        statements(f"GRANT {right} ON {what} TO {user}" for right, _, what in missing),
    )


def check_reading(connection: Connection, tables: Tables) -> None:
    """See that this user may read what handlings read, before the first message says so.

    Raises:
        SchemaError: it may not.
    """
    missing = list(_unreadable(connection, tables))
    if missing:
        user = _user(connection)
        granting = "; ".join(f"GRANT SELECT ON {what} TO {user}" for _, what in missing)
        raise SchemaError(
            f"The user {user} has no SELECT on {', '.join(name for name, _ in missing)}.",
            fix=f"Run as the owner of the tables: {granting}",
        )


def check_parts(connection: Connection, tables: Tables) -> None:
    """See that this user may do with daily tables what a worker does, before the first message says so.

    Raises:
        SchemaError: it may not.
    """
    missing = list(_missing_on_parts(connection, tables)) if connection.dialect.name == "postgresql" else []
    if missing:
        lacking = ", ".join(f"{right} on {name}" for right, name, _ in missing)
        raise SchemaError(
            f"The user {_user(connection)} has no {lacking}.",
            fix="Grant it the rights on the plain tables (docs/how-to/least-privilege.md), then run "
            "`idemp db partition CONSUMER` as their owner, which passes them on; or grant what `idemp doctor` lists.",
        )


def _needed(tables: Tables, table: Table, *, locks: bool) -> tuple[str, ...]:
    name = table.name.removeprefix(tables.prefix)
    if name in _ONLY_READ:
        return ("SELECT",)
    if name in _APPENDED:
        return ("SELECT", "INSERT")
    return (*_ALWAYS, "UPDATE") if name in _UPDATED or (locks and name in _LOCKED) else _ALWAYS


def _missing_on_postgresql(connection: Connection, tables: Tables) -> Iterator[tuple[str, str, str]]:
    held: dict[str, Any] = {
        row["relname"]: row for row in connection.execute(_HELD, {"schema": tables.schema}).mappings()
    }
    ours = [table for table in tables.metadata.sorted_tables if table.name in held]
    schema = connection.dialect.identifier_preparer.quote(tables.schema) if tables.schema else ""
    if tables.schema and any(not held[table.name]["USAGE"] for table in ours):
        yield "USAGE", f"schema {tables.schema}", f"SCHEMA {schema}"
    for table in ours:
        for right in _needed(tables, table, locks=True):
            if not held[table.name][right]:
                column = " (worker_id)" if right == "UPDATE" and table is tables.inbox else ""
                yield right + column, table.name, f"TABLE {qualified(table)}"
    yield from _missing_on_parts(connection, tables)
    names = [table.name for table in ours]
    for (sequence,) in connection.execute(_SEQUENCES, {"schema": tables.schema, "tables": names}):
        where = f"{schema}.{sequence}" if tables.schema else sequence
        yield "USAGE", f"sequence {sequence}", f"SEQUENCE {where}"


def _missing_on_parts(connection: Connection, tables: Tables) -> Iterator[tuple[str, str, str]]:
    """One line for all daily tables of a kind: there may be hundreds."""
    for table in (tables.inbox, tables.output, tables.history):
        parts = connection.execute(_PARTS, {"parent": qualified(table)}).mappings().all()
        for right in _needed(tables, table, locks=True):
            names = [part["name"] for part in parts if part[right] is False]  # null: dropped a moment ago
            if names:
                column = " (worker_id)" if right == "UPDATE" else ""
                yield right + column, f"{len(names)} daily tables of {table.name}", f"TABLE {', '.join(names)}"


def _unreadable(connection: Connection, tables: Tables) -> Iterator[tuple[str, str]]:
    """Those of the tables that handlings read and this user may not, each also as a GRANT names it."""
    read = [table for table in tables.metadata.sorted_tables if table.name.removeprefix(tables.prefix) in _READ]
    if connection.dialect.name == "postgresql":
        held = {row["relname"]: row for row in connection.execute(_HELD, {"schema": tables.schema}).mappings()}
        for table in read:
            if table.name in held and not held[table.name]["SELECT"]:
                yield table.name, f"TABLE {qualified(table)}"
    elif is_mysql(connection.dialect.name):
        schema = tables.schema or connection.scalar(text("SELECT DATABASE()"))
        for table in read:
            columns = ", ".join(column.name for column in table.columns)
            if not _may(connection, f"SELECT {columns} FROM {qualified(table, 'mysql')} WHERE 1 = 0"):
                yield table.name, f"`{schema}`.`{table.name}`"


def _missing_on_mysql(connection: Connection, tables: Tables) -> Iterator[tuple[str, str, str]]:
    schema = tables.schema or connection.scalar(text("SELECT DATABASE()"))
    for table in tables.metadata.sorted_tables:
        columns = ", ".join(column.name for column in table.columns)
        last, name = list(table.columns)[-1].name, qualified(table, "mysql")
        probes = {
            "SELECT": f"SELECT {columns} FROM {name} WHERE 1 = 0",
            "INSERT": f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {name} WHERE 1 = 0",
            "UPDATE": f"UPDATE {name} SET {last} = {last} WHERE 1 = 0",
            "DELETE": f"DELETE FROM {name} WHERE 1 = 0",
        }
        for right in _needed(tables, table, locks=False):
            # The two in the middle read as well: what they lack may be that.
            if not _may(connection, probes[right]) and (right == "SELECT" or _may(connection, probes["SELECT"])):
                yield right, table.name, f"`{schema}`.`{table.name}`"


def _may(connection: Connection, statement: str) -> bool:
    try:
        connection.execute(text(statement)).close()
    except DBAPIError as error:
        code = failures.mysql_code(error.orig)
        if code not in _DENIED | _ALTERED:
            raise
        return code in _ALTERED  # that is another finding
    return True


def _user(connection: Connection) -> str:
    if connection.dialect.name == "postgresql":
        return connection.dialect.identifier_preparer.quote_identifier(
            str(connection.scalar(text("SELECT current_user")))
        )
    name, _, host = str(connection.scalar(text("SELECT CURRENT_USER()"))).rpartition("@")
    return f"'{name}'@'{host}'"
