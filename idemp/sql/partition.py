"""Hash partitions of the inbox and the outputs, on PostgreSQL."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Table, exc, text

from idemp.errors import ConfigurationError
from idemp.sql.engine import Database

__all__ = ["SMALL", "partition", "unpartitioned"]

SMALL: Final = 100_000_000
"""Bytes that are copied within seconds."""
LOCK_SECONDS: Final = 5  # for which claims wait behind this command; they wait for at most 10 for their table
FACTS: Final = text("""
SELECT relkind = 'p' AS partitioned, pg_total_relation_size(oid) AS bytes, relowner::regrole::text AS owner,
    array_to_string(reloptions, ', ') AS options, (SELECT quote_ident(spcname) FROM pg_tablespace WHERE oid = reltablespace) AS space,
    relrowsecurity OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = class.oid AND NOT tgisinternal)
        OR EXISTS (SELECT FROM pg_rewrite WHERE ev_class = class.oid)
        OR EXISTS (SELECT FROM pg_inherits WHERE class.oid IN (inhrelid, inhparent))
        OR EXISTS (SELECT FROM pg_publication_rel WHERE prrelid = class.oid)
        OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = class.oid AND attacl IS NOT NULL) AS special,
    ARRAY(SELECT format('GRANT %s ON {table} TO %s%s', privilege_type,
        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
        FROM aclexplode(relacl) WHERE grantee <> relowner) AS grants,
    ARRAY(SELECT format('ALTER TABLE {table} ADD CONSTRAINT %I %s', conname, pg_get_constraintdef(oid))
        FROM pg_constraint WHERE conrelid = class.oid AND contype IN ('p', 'u', 'x', 'f'))
    || ARRAY(SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = class.oid
        AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)) AS indexes
FROM pg_class AS class WHERE oid = to_regclass(:name)
""")


def unpartitioned(database: Database) -> dict[str, int]:
    """Return the tables that `partition` would change, with their sizes in bytes.

    Raises:
        ConfigurationError: The database is not PostgreSQL, or has no tables of idemp.

    Example:
        >>> unpartitioned(Database("sqlite:///shop.db"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: only tables on PostgreSQL can be partitioned; nothing was changed
    """
    if database.engine.dialect.name != "postgresql":
        raise ConfigurationError("only tables on PostgreSQL can be partitioned; nothing was changed")
    sizes = {}
    with database.engine.connect() as connection:
        for table in (database.tables.inbox, database.tables.output):
            facts = connection.execute(FACTS, {"name": _quoted(connection, table)}).one_or_none()
            if facts is None:
                raise ConfigurationError(f"there is no table {table.name}; nothing was changed: idemp db upgrade")
            if not facts.partitioned:
                sizes[table.name] = int(facts.bytes)
    return sizes


def partition(database: Database, count: int) -> list[str]:
    """Copy the inbox and the outputs into hash partitions by `message_key`, in one transaction, and return the changed tables.

    Workers wait meanwhile. A table that has partitions stays as it is.

    Args:
        database: On PostgreSQL, by the owner of its tables.
        count: Number of partitions of each table.

    Raises:
        ConfigurationError: Nothing was changed, because the tables are in use, or have what a copy would lose.

    Example:
        >>> partition(Database("sqlite:///shop.db"), 16)
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: only tables on PostgreSQL can be partitioned; nothing was changed
    """
    if not unpartitioned(database):
        return []
    tables = (database.tables.inbox, database.tables.output)
    try:
        with database.short() as connection, database.dialect.alone(connection, f"{database.tables.version_table}.upgrade"):
            names = ", ".join(_quoted(connection, table) for table in tables)
            _run(connection, f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'", f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
            changed = [table for table in tables if _rebuild(connection, table, count)]
    except exc.DBAPIError as error:
        if error.connection_invalidated:  # it may have been lost by the COMMIT
            raise
        busy = getattr(error.orig, "sqlstate", None) == "55P03"
        why = f"a transaction uses the tables for longer than {LOCK_SECONDS} s" if busy else f"PostgreSQL says: {error.orig}"
        fix = ": run the command again, or stop the workers first" if busy else ""
        raise ConfigurationError(f"the tables cannot be partitioned, and nothing was changed{fix} ({why})") from None
    with database.short() as connection:  # statistics for the planner, when the workers go on already
        _run(connection, *(f"ANALYZE {_quoted(connection, table)}" for table in changed))
    return [table.name for table in changed]


def _rebuild(connection: Connection, table: Table, count: int) -> bool:
    name, old = _quoted(connection, table), f"{table.name}_unpartitioned"
    facts = connection.execute(FACTS, {"name": name}).one()
    if facts.partitioned:
        return False
    if facts.special:
        raise ConfigurationError(
            f"{table.name} has triggers, rules, row security, rights on columns, heirs or a publication, which a copy would lose; "
            "nothing was changed: remove these first, and create them again afterwards"
        )
    # The names of partitions begin with that of the table: a claim that waits for another one is recognized by it.
    parts = [_quoted(connection, table, f"{table.name}_p{number}") for number in range(count)]
    space = f" TABLESPACE {facts.space}" if facts.space else ""
    options = f" WITH ({facts.options})" if facts.options else ""
    _run(
        connection,
        f"ALTER TABLE {name} RENAME TO {connection.dialect.identifier_preparer.quote(old)}",
        f"CREATE TABLE {name} (LIKE {_quoted(connection, table, old)} INCLUDING ALL EXCLUDING INDEXES) "
        f"PARTITION BY HASH (message_key){space}",
        *(
            f"CREATE TABLE {part} PARTITION OF {name} FOR VALUES WITH (MODULUS {count}, REMAINDER {number}){options}{space}"
            for number, part in enumerate(parts)
        ),
        f"INSERT INTO {name} SELECT * FROM {_quoted(connection, table, old)}",  # noqa: S608 - our own names
        f"DROP TABLE {_quoted(connection, table, old)}",  # which frees the names of its indexes
        *(index.replace("{table}", name) for index in facts.indexes),
    )
    for each in (name, *parts):
        _run(
            connection, f"ALTER TABLE {each} OWNER TO {facts.owner}", *(grant.replace("{table}", each) for grant in facts.grants)
        )
    return True


def _quoted(connection: Connection, table: Table, name: str | None = None) -> str:
    preparer = connection.dialect.identifier_preparer
    schema = f"{preparer.quote_schema(table.schema)}." if table.schema else ""
    return f"{schema}{preparer.quote(name or table.name)}"


def _run(connection: Connection, *statements: str) -> None:
    for statement in statements:
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)
