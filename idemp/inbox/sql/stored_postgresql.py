"""Reading what is stored under ids on PostgreSQL, by the primary keys whatever the planner thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, column, func, literal_column, select, true
from sqlalchemy.dialects import postgresql

from idemp.inbox.sql.claiming import only
from idemp.inbox.sql.tables import KeyType

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, FromClause, Select, Table

    from idemp.inbox.sql.tables import Part, Tables


def read_one(tables: Tables | Part) -> Select[Any]:
    """What stands under `message_key` of `consumer_id`: the claim, and its outputs in their order.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> read_one(Tables()).selected_columns.keys()[-1]
        'waiting'
    """
    return _read(select(bindparam("message_key", type_=KeyType).label("message_key")).subquery("wanted"), tables)


def read_all(tables: Tables | Part) -> Select[Any]:
    """The same for `message_keys`, a list."""
    keys = func.unnest(bindparam("message_keys", type_=postgresql.ARRAY(KeyType)))
    return _read(keys.table_valued(column("message_key", KeyType)).render_derived("wanted"), tables)


def _read(wanted: FromClause, tables: Tables | Part) -> Select[Any]:
    # OFFSET 0 keeps each look a look of its own, id by id. A planner that takes the tables for empty, since ANALYZE met
    # nothing but rows of a long transaction there, would otherwise join all of them with each other.
    inbox, output, pending, kinds = tables.inbox, tables.output, tables.pending, tables.message_type
    consumer: ColumnElement[int] = bindparam("consumer_id")
    key = wanted.c.message_key
    claim = _looked_up(
        inbox,
        ("message_key", "original_id", "fingerprint", "claimed_at", "source_position", "type_id"),
        inbox.c.consumer_id == consumer,
        inbox.c.message_key == key,
    )
    kind = _looked_up(kinds, ("name",), kinds.c.id == claim.c.type_id)
    stored = _looked_up(
        output,
        ("output_id", "ordinal", "kind", "exchange", "routing_key", "envelope", "body"),
        output.c.consumer_id == consumer,
        output.c.message_key == key,
    )
    waits = _looked_up(pending, ("output_id", "due_at"), pending.c.output_id == stored.c.output_id)
    return (
        select(
            *claim.c, kind.c.name.label("message_type"), *stored.c, waits.c.due_at, waits.c.output_id.label("waiting")
        )
        .select_from(
            wanted.join(claim, true()).outerjoin(kind, true()).outerjoin(stored, true()).outerjoin(waits, true())
        )
        .order_by(stored.c.ordinal)
    )


def _looked_up(table: Table, names: tuple[str, ...], *conditions: ColumnElement[bool]) -> FromClause:
    found = select(*(table.c[name] for name in names)).where(*conditions).offset(literal_column("0"))
    return only(found, table).lateral()
