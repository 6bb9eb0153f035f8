"""What the database user may do with each table, asked of the server."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import table as named_table
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from idemp.diagnosis import Diagnosis, statements
from idemp.errors import SchemaError
from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import is_mysql

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, Engine, Table

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
_WORD: Final = re.compile(r"\w+")
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
    if connection.dialect.name == "sqlite":
        return Diagnosis("ok", "rights", "SQLite knows none but the file's; the probe wrote")
    missing = _missing(connection, tables)
    if not missing:
        return Diagnosis("ok", "rights", "this user may do with each table what a worker does")
    user = _user(connection)
    fix = "Grant what is missing, as the owner of the tables."
    return Diagnosis("failed", "rights", _told(user, missing), fix, statements(_granting(user, missing)))


def check_reading(connection: Connection, tables: Tables) -> None:
    """See that this user may read what handlings read, before the first message says so.

    Raises:
        SchemaError: it may not; names the GRANT of all that is missing.
    """
    if unreadable := _unreadable(connection, tables):
        user, missing = _user(connection), _missing(connection, tables)
        raise SchemaError(_told(user, [("SELECT", name, "") for name in unreadable]), fix=_how(user, missing))


def hidden(connection: Connection, tables: Tables) -> frozenset[str]:
    """The names of the tables that the server does not show to this user, whether they exist or not.

    MySQL's family shows a table only to those who may do something with it, and its columns only to those who may read it.
    """
    return frozenset(_unreadable(connection, tables) if is_mysql(connection.dialect.name) else ())


@contextmanager
def granted(engine: Engine, tables: Tables) -> Iterator[None]:
    """Name the GRANT where this user is denied something in the block.

    Raises:
        SchemaError: it is.
    """
    try:
        yield
    except (DBAPIError, SchemaError) as error:
        cause = error.__cause__ if isinstance(error, SchemaError) else error
        if not failures.is_denied(getattr(cause, "orig", None)):
            raise
        with engine.connect() as connection:
            missing, user = _missing(connection, tables), _user(connection)
        if not missing:
            raise
        what = error.message if isinstance(error, SchemaError) else _told(user, missing)
        raise SchemaError(what, fix=_how(user, missing)) from error


def explain(connection: Connection, tables: Tables, denial: str) -> bool:
    """Whether a right that this user lacks is what a server's denial is about, as far as it names a table."""
    named = {word for word in _WORD.findall(denial) if tables.is_ours(word)}
    return any(
        not named or named & set(_WORD.findall(f"{name} {what}")) for _, name, what in _missing(connection, tables)
    )


def check_parts(connection: Connection, tables: Tables) -> None:
    """See that this user may do with daily tables what a worker does, before the first message says so.

    Raises:
        SchemaError: it may not.
    """
    missing = list(_missing_on_parts(connection, tables)) if connection.dialect.name == "postgresql" else []
    if missing:
        raise SchemaError(
            _told(_user(connection), missing),
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


def _missing(connection: Connection, tables: Tables) -> list[tuple[str, str, str]]:
    """Each right that is missing, on what, and this as a GRANT names it; none on SQLite, which knows no rights."""
    if connection.dialect.name == "postgresql":
        return list(_missing_on_postgresql(connection, tables))
    return list(_missing_on_mysql(connection, tables)) if is_mysql(connection.dialect.name) else []


def _told(user: str, missing: Sequence[tuple[str, str, str]]) -> str:
    """All that is missing, the rights that the same tables need in one phrase."""
    names: dict[str, list[str]] = {}
    for rights, name in _together([(right, name) for right, name, _ in missing]):
        names.setdefault(rights, []).append(name)
    return (
        f"The user {user} has no " + "; no ".join(f"{rights} on {', '.join(on)}" for rights, on in names.items()) + "."
    )


def _granting(user: str, missing: Sequence[tuple[str, str, str]]) -> list[str]:
    return [f"GRANT {rights} ON {what} TO {user}" for rights, what in _together([(r, what) for r, _, what in missing])]


def _how(user: str, missing: Sequence[tuple[str, str, str]]) -> str:
    return f"Run as the owner of the tables: {'; '.join(_granting(user, missing))}"


def _together(missing: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rights on each thing as one text."""
    rights: dict[str, list[str]] = {}
    for right, what in missing:
        rights.setdefault(what, []).append(right)
    return [(", ".join(own), what) for what, own in rights.items()]


def _missing_on_postgresql(connection: Connection, tables: Tables) -> Iterator[tuple[str, str, str]]:
    held: dict[str, Any] = {
        row["relname"]: row for row in connection.execute(_HELD, {"schema": tables.schema}).mappings()
    }
    ours = [table for table in tables.metadata.sorted_tables if table.name in held]
    schema = connection.dialect.identifier_preparer.quote(tables.schema) if tables.schema else ""
    usable = all(held[table.name]["USAGE"] for table in ours)
    if tables.schema and not usable:
        yield "USAGE", f"schema {tables.schema}", f"SCHEMA {schema}"
    version = tables.version_table
    if version in held and not held[version]["SELECT"]:
        yield "SELECT", version, f"TABLE {_beside(tables, version)}"
    for table in ours:
        for right in _needed(tables, table, locks=True):
            if not held[table.name][right]:
                column = " (worker_id)" if right == "UPDATE" and table is tables.inbox else ""
                yield right + column, table.name, f"TABLE {qualified(table)}"
    if usable:  # else the daily tables can't be looked up by name
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


def _unreadable(connection: Connection, tables: Tables) -> list[str]:
    """The tables that this user may not read, of those that handlings read; on MySQL of all, else they can't be checked."""
    ours = tables.metadata.sorted_tables
    if connection.dialect.name == "postgresql":
        held = {row["relname"]: row for row in connection.execute(_HELD, {"schema": tables.schema}).mappings()}
        read = [table.name for table in ours if table.name.removeprefix(tables.prefix) in _READ]
        return [name for name in read if name in held and not held[name]["SELECT"]]
    if is_mysql(connection.dialect.name):
        return [table.name for table in ours if not _may(connection, _reading(table))]
    return []


def _reading(table: Table) -> str:
    return f"SELECT {', '.join(column.name for column in table.columns)} FROM {qualified(table, 'mysql')} WHERE 1 = 0"


def _beside(tables: Tables, name: str, dialect: str = "postgresql") -> str:
    """A table of idemp's own that is not among its metadata."""
    return qualified(named_table(name, schema=tables.schema), dialect)


def _missing_on_mysql(connection: Connection, tables: Tables) -> Iterator[tuple[str, str, str]]:
    schema = tables.schema or connection.scalar(text("SELECT DATABASE()"))
    version = _beside(tables, tables.version_table, "mysql")
    if not _may(connection, f"SELECT version_num FROM {version} WHERE 1 = 0"):
        yield "SELECT", tables.version_table, f"`{schema}`.`{tables.version_table}`"
    for table in tables.metadata.sorted_tables:
        columns = [column.name for column in table.columns]
        name, values = qualified(table, "mysql"), ", ".join("0" for _ in columns)
        probes = {  # none of the last three reads a column, which takes SELECT as well
            "SELECT": _reading(table),
            "INSERT": f"INSERT INTO {name} ({', '.join(columns)}) SELECT {values} FROM DUAL WHERE 1 = 0",
            "UPDATE": f"UPDATE {name} SET {columns[-1]} = 0 WHERE 1 = 0",
            "DELETE": f"DELETE FROM {name} WHERE 1 = 0",
        }
        for right in _needed(tables, table, locks=False):
            if not _may(connection, probes[right]):
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
