"""How a table of PostgreSQL is cut into pieces that tasks read in parallel: by its pages, parts of days by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import text
from sqlalchemy.pool import NullPool

from idemp.errors import SchemaError
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import create_engine_safely, start_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Table

    from idemp.inbox.sql.tables import Tables

SMALL: Final = 2048
"""Pages of a table that one task reads whole, without a snapshot that somebody has to hold: 16 MiB."""
_LEAST: Final = 512
"""Pages that are worth a task of their own: 4 MiB."""
MOST: Final = 64
"""Pieces at most, unless there are more parts: each is a connection while it is read."""
_RANGES_SINCE: Final = (14,)  # before, each range would read the whole table
_SIZES: Final = text(
    """
    SELECT c.relname AS name, pg_relation_size(c.oid) / CAST(current_setting('block_size') AS bigint) AS pages
    FROM pg_class c WHERE c.oid = CAST(:table AS regclass)
        OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = CAST(:table AS regclass))
    ORDER BY c.relname
    """
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads.

    Attributes:
        part: the part of a day, `None` for the plain table.
        pages: the first of its pages, and the one after the last, `None` for all that follow.
        alone: whether parts of the plain table are left to other tasks.
    """

    part: str | None = None
    pages: tuple[int, int | None] | None = None
    alone: bool = False


WHOLE: Final = Piece()
"""A table with all of its parts."""


def pieces(url: str, tables: Tables, table: Table, *, has_parts: bool, most: int = MOST) -> Sequence[Piece]:
    """The pieces of a table, which together are all of it at every moment; a small one is one piece.

    Raises:
        SchemaError: the table is missing, or something inherits from it that is not idemp's.
        StoreUnavailable: the database can't be reached.
    """
    engine = create_engine_safely(url, poolclass=NullPool)
    with start_errors(engine), engine.connect() as connection:
        version = connection.dialect.server_version_info or ()
        sizes = {row.name: int(row.pages) for row in connection.execute(_SIZES, {"table": qualified(table)})}
    if sum(sizes.values()) <= SMALL or most == 1:
        return [WHOLE]
    span = max(_LEAST, -(-sum(sizes.values()) // most))
    found: list[Piece] = []
    for name, size in sizes.items():
        part = _part(tables, table, name, has_parts=has_parts)
        starts = list(range(0, max(size, 1), span)) if version >= _RANGES_SINCE else [0]
        # The last has no end: what was added since belongs to it, and is left out by the snapshot.
        ends = [*starts[1:], None]
        found += [Piece(part, (start, end), alone=True) for start, end in zip(starts, ends, strict=True)]
    return found


def _part(tables: Tables, table: Table, name: str, *, has_parts: bool) -> str | None:
    if name == table.name:
        return None
    if not has_parts or not tables.is_ours(name) or not name.startswith(f"{table.name}_"):
        raise SchemaError(
            f"The table {name} inherits from {table.name} and is none of idemp's.",
            fix=f"Take it out: ALTER TABLE {name} NO INHERIT {table.name}.",
        )
    return name.removeprefix(f"{table.name}_")
