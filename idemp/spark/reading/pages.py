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

SMALL: Final = 32_768
"""Pages of a table that one task reads whole, without a snapshot that somebody has to hold: 256 MiB, a second's work."""
_WORTH: Final = 16_384
"""Pages that are worth a task of their own: 128 MiB. What Spark and a connection take for each is the time of 30 MiB."""
_MOST: Final = 64
"""Pieces at most, unless there are more parts: each is a connection while it is read."""
_SMALL_IF_ASKED: Final = 2048
_WORTH_IF_ASKED: Final = 512
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


def pieces(url: str, tables: Tables, table: Table, *, has_parts: bool, most: int | None = None) -> Sequence[Piece]:
    """The pieces of a table, which together are all of it at every moment; a small one is one piece.

    Args:
        url: the database.
        tables: idemp's.
        table: the one that is cut.
        has_parts: whether days have tables of their own for it.
        most: as many as that if they are 4 MiB each; by default as many as are worth it.

    Raises:
        SchemaError: the table is missing, or something inherits from it that is not idemp's.
        StoreUnavailable: the database can't be reached.
    """
    engine = create_engine_safely(url, poolclass=NullPool)
    with start_errors(engine), engine.connect() as connection:
        version = connection.dialect.server_version_info or ()
        sizes = {row.name: int(row.pages) for row in connection.execute(_SIZES, {"table": qualified(table)})}
    pages, small, worth = sum(sizes.values()), SMALL, _WORTH
    if most is not None:
        small, worth = _SMALL_IF_ASKED, _WORTH_IF_ASKED
    if pages <= small or most == 1:
        return [WHOLE]
    span = max(worth, -(-pages // (most or _MOST)))
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
