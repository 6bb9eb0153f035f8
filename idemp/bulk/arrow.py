"""Arrow tables whose columns are the fields of a `Row`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from idemp.bulk.rows import COLUMNS, Row
from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

KINDS: Final[Mapping[str, Any]] = {
    "id": pa.string(), "type": pa.string(), "body": pa.binary(), "headers": pa.string(),
    "time": pa.timestamp("us", tz="UTC"), "position": pa.string(),
}  # fmt: skip


def as_columns(chunk: pa.Table) -> dict[str, Any]:
    """A table's columns in one piece each, of the types of a row's fields; empty ones for those that are missing.

    Raises:
        ConfigurationError: there are other columns, or none that says which message a row is, or one of another type.

    Example:
        >>> as_columns(pa.table({"id": ["m-1"], "body": ["{}"]}))["body"].to_pylist()
        [b'{}']
    """
    check_columns(chunk.schema.names)
    try:
        return {name: _column(chunk, name) for name in COLUMNS}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigurationError(
            f"A chunk's column is not of the type of a row's field: {error}.",
            fix=f"Cast it: {', '.join(f'{name} {kind}' for name, kind in KINDS.items())}.",
        ) from error


def rows_in(chunk: pa.Table) -> list[Row]:
    """A table's rows, one by one.

    Raises:
        ConfigurationError: as `as_columns` says.
    """
    columns = [column.to_pylist() for column in as_columns(chunk).values()]
    return [Row(**dict(zip(COLUMNS, values, strict=True))) for values in zip(*columns, strict=True)]


def taken(chunk: pa.Table, places: Iterable[int]) -> pa.Table:
    """Some of a table's rows."""
    return chunk.take(pa.array(list(places), pa.int64()))


def check_columns(names: Sequence[str]) -> None:
    """See that a table's columns are those of a `Row`; those that are missing count as empty.

    Raises:
        ConfigurationError: others are there, or none that says which message a row is.

    Example:
        >>> check_columns(["id", "type", "payload"])
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: A chunk has the columns 'payload', which mean nothing here. Name them: id, ...
    """
    if strange := sorted(set(names) - set(COLUMNS)):
        raise ConfigurationError(
            f"A chunk has the columns {', '.join(map(repr, strange))}, which mean nothing here.",
            fix=f"Name them: {', '.join(COLUMNS)}; leave out what a message does not need.",
        )
    if not {"id", "headers", "body"} & set(names):
        raise ConfigurationError(
            "A chunk has neither of the columns 'id', 'headers' and 'body': nothing says which message a row is.",
            fix="Map the source's columns to these names.",
        )


def in_one_piece(column: Any) -> Any:
    """A column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _column(chunk: pa.Table, name: str) -> Any:
    kind = KINDS[name]
    if name not in chunk.schema.names:
        return pa.nulls(chunk.num_rows, kind)
    column = chunk.column(name)
    return in_one_piece(column.cast(kind, safe=name != "time"))  # what is below a microsecond may go
