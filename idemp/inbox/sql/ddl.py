"""Statements that make, guard, lock and drop daily tables. Names and literals in them are idemp's own, and checked."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import func, literal, select, text

from idemp.errors import ConfigurationError
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.days import first_key
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.places import guard_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import date

    from sqlalchemy import Connection, Table

    from idemp.inbox.sql.days import Layout
    from idemp.inbox.sql.tables import Part, Tables

CARRIES_TIME: Final = (
    "substr(message_key::text, 15, 1) = '7' AND substr(message_key::text, 20, 1) IN ('8', '9', 'a', 'b')"
)
"""What `UUID.version` says of a UUIDv7; immutable, so that a CHECK may say it."""
MOST_COUNTED: Final = 10_000
"""Rows that are counted one by one; a whole day of them takes longer than some roles' statements may."""
_CLAIMS_WAIT: Final = "200ms"

_OWNS: Final = text(
    """
    SELECT pg_has_role(relowner, 'USAGE') AND has_schema_privilege(relnamespace, 'CREATE')
    FROM pg_class WHERE oid = CAST(:table AS regclass)
    """
)
_ESTIMATED: Final = text("SELECT CAST(reltuples AS bigint) FROM pg_class WHERE oid = CAST(:table AS regclass)")
_EXISTS: Final = text("SELECT to_regclass(:table) IS NOT NULL")
_HOME: Final = text(
    """
    SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = CAST(:table AS regclass)
    """
)
_IS_CHILD: Final = text(
    """
    SELECT EXISTS (SELECT 1 FROM pg_inherits WHERE inhrelid = to_regclass(:table) AND inhparent = CAST(:parent AS regclass))
    """
)
_OWNERS: Final = text(
    """
    SELECT pg_get_userbyid(relowner), pg_get_userbyid(relowner) = current_user
    FROM pg_class WHERE oid = CAST(:table AS regclass)
    """
)
_FAMILY: Final = text(
    """
    SELECT CAST(:table AS regclass)::oid AS oid
    UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = CAST(:table AS regclass)
    """
)
_GRANTED: Final = text(
    """
    SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name,
           g.privilege_type || g.of_column AS granted,
           CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END AS grantee
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN LATERAL (
        SELECT privilege_type, '' AS of_column, grantee FROM aclexplode(c.relacl)
        UNION ALL
        SELECT e.privilege_type, ' (' || quote_ident(a.attname) || ')', e.grantee
        FROM pg_attribute a CROSS JOIN LATERAL aclexplode(a.attacl) e
        WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL AND NOT a.attisdropped
    ) g ON g.grantee <> c.relowner
    WHERE c.oid = ANY(:tables)
    """
)


def owns(connection: Connection, tables: Tables) -> bool:
    """Whether this user may do as the tables' owner, and make others beside them."""
    parents = (tables.inbox, tables.output, tables.history)
    return all(connection.scalar(_OWNS, {"table": qualified(table)}) for table in parents)


def count_about(connection: Connection, table: Table) -> int:
    """How many rows a table has: exactly, or where that would take long as the server's statistics say."""
    first = select(literal(1)).select_from(table).limit(MOST_COUNTED).subquery()
    counted: int = connection.scalar(select(func.count()).select_from(first)) or 0
    if counted < MOST_COUNTED:
        return counted
    return max(counted, connection.scalar(_ESTIMATED, {"table": qualified(table)}) or 0)


def make_day(connection: Connection, tables: Tables, layout: Layout, day: date) -> None:
    """Make the tables of a day, for those who may use the plain ones; what is there already stays."""
    following = day + timedelta(days=1)
    condition = f" AND message_key >= '{first_key(day)}' AND message_key < '{first_key(following)}'"
    _make(connection, tables, layout, layout.part_on(day), condition)


def make_late(connection: Connection, tables: Tables, layout: Layout) -> None:
    """Make the tables of ids that come after their day was dropped."""
    _make(connection, tables, layout, layout.late, "")


def guard(connection: Connection, tables: Tables, layout: Layout) -> None:
    """From now on the plain inbox refuses what belongs to a part; rows that are there were looked at by the caller."""
    _run(
        connection,
        f"ALTER TABLE ONLY {qualified(tables.inbox)} ADD CONSTRAINT {_guard_name(tables, layout)} CHECK (NOT ("
        f"consumer_id = {int(layout.consumer_id)} AND message_key >= '{first_key(layout.since)}' "
        f"AND message_key < '{first_key(layout.until)}' AND {CARRIES_TIME})) NO INHERIT NOT VALID",
    )


def unguard(connection: Connection, tables: Tables, layout: Layout) -> None:
    """The plain inbox refuses it no longer."""
    _run(connection, f"ALTER TABLE ONLY {qualified(tables.inbox)} DROP CONSTRAINT {_guard_name(tables, layout)}")


def lock_inbox(connection: Connection, tables: Tables) -> None:
    """Until the transaction ends nobody claims in the plain inbox; claims wait for a moment at most."""
    _run(connection, f"SET LOCAL lock_timeout = '{_CLAIMS_WAIT}'")
    _run(connection, f"LOCK TABLE ONLY {qualified(tables.inbox)} IN ACCESS EXCLUSIVE MODE")


def lock_part(connection: Connection, part: Part) -> None:
    """Until the transaction ends nobody uses a part; fails at once where somebody does."""
    names = ", ".join(map(qualified, (part.inbox, part.output, part.history)))
    _run(connection, f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE NOWAIT")


def drop(connection: Connection, part: Part) -> None:
    """Drop a part's tables."""
    _run(connection, f"DROP TABLE {', '.join(map(qualified, (part.history, part.output, part.inbox)))}")


def grant(connection: Connection, tables: Tables) -> None:
    """Give all parts the rights of the plain tables that they lack: those of a role, too, which came after them."""
    # One at a time: the server refuses two that grant on one table at once.
    with cluster_lock(connection, tables, "grants", wait_seconds=60):
        for parent in (tables.inbox, tables.output, tables.history):
            for part, right, grantee in _lacking(connection, parent):
                _run(connection, f"GRANT {right} ON {part} TO {grantee}")


def _lacking(connection: Connection, parent: Table) -> Iterator[tuple[str, str, str]]:
    """Which part lacks which right for whom."""
    family = connection.scalars(_FAMILY, {"table": qualified(parent)}).all()
    held: dict[int, tuple[str, set[tuple[str, str]]]] = {oid: ("", set()) for oid in family}
    for row in connection.execute(_GRANTED, {"tables": family}):
        held[row.oid] = row.name, held[row.oid][1] | ({(row.granted, row.grantee)} if row.granted else set())
    (_, wanted), *parts = held.values()
    for name, has in parts:
        for right, grantee in sorted(wanted - has) if name else ():  # without one: dropped a moment ago
            yield name, right, grantee


def _make(connection: Connection, tables: Tables, layout: Layout, name: str, condition: str) -> None:
    for parent, table in _pairs(tables, tables.part(name)):
        # Where the parent is, whatever schema comes first for this user: so all who find the parent find it.
        full_name = f"{connection.scalar(_HOME, {'table': qualified(parent)})}.{table.name}"
        if not connection.scalar(_EXISTS, {"table": full_name}):
            _run(
                connection,
                # The conditions keep planners away that look for other ids.
                f"CREATE TABLE {full_name} (LIKE {qualified(parent)} INCLUDING DEFAULTS INCLUDING INDEXES, "
                f"CHECK (consumer_id = {int(layout.consumer_id)}{condition})) INHERITS ({qualified(parent)})",
            )
            _hand_over(connection, parent, full_name)
        _refuse_stranger(connection, parent, table)
    grant(connection, tables)


def _pairs(tables: Tables, part: Part) -> tuple[tuple[Table, Table], ...]:
    return (tables.inbox, part.inbox), (tables.output, part.output), (tables.history, part.history)


def _hand_over(connection: Connection, parent: Table, full_name: str) -> None:
    """To the owner of the plain table."""
    owner, is_ours = connection.execute(_OWNERS, {"table": qualified(parent)}).one()
    if not is_ours:
        quoted = connection.dialect.identifier_preparer.quote_identifier(owner)
        _run(connection, f"ALTER TABLE {full_name} OWNER TO {quoted}")


def _refuse_stranger(connection: Connection, parent: Table, table: Table) -> None:
    """What is found by a part's name must be the parent's child, or claims would go where no list and no relay looks."""
    if not connection.scalar(_IS_CHILD, {"table": qualified(table), "parent": qualified(parent)}):
        raise ConfigurationError(
            f"The table {table.name} that this user finds does not inherit from {parent.name}; nothing was changed.",
            fix=f"See with `\\d *.{table.name}` where it is; rename or drop it if nobody claimed there.",
        )


def _guard_name(tables: Tables, layout: Layout) -> str:
    return f"{guard_prefix(tables)}{int(layout.consumer_id)}_{layout.since:%Y%m%d}"


def _run(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement)
