"""Arrow tables whose columns are the fields of a `Row`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from idemp.bulk.rows import COLUMNS, Row
from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KINDS: Final[Mapping[str, Any]] = {
    "id": pa.string(), "type": pa.string(), "body": pa.binary(), "headers": pa.string(),
    "time": pa.timestamp("us", tz="UTC"), "position": pa.string(),
}  # fmt: skip
_BEGINNING: Final = datetime(1, 1, 1, tzinfo=UTC)  # of Python's calendar
_END: Final = datetime(9999, 12, 31, tzinfo=UTC)


def as_columns(chunk: pa.Table) -> dict[str, Any]:
    """A table's columns in one piece each, of the types of a row's fields; empty ones for those that are missing.

    One value that Python can't read must not cost the whole chunk: see `readable_texts`; a time beyond Python's calendar is
    unknown.

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
    column = in_one_piece(chunk.column(name).cast(kind, safe=name != "time"))  # what is below a microsecond may go
    if name == "time":
        return _in_calendar(column)
    return readable_texts(column, _INSTEAD[name]) if pa.types.is_string(kind) else column


def readable_texts(column: Any, instead: Callable[[bytes], str | None] = lambda _: None) -> Any:
    r"""A column of texts, with something else for what is no UTF-8: Spark hands over whatever bytes a source had.

    Args:
        column: of texts, in one piece.
        instead: what stands for such bytes. Where ids are read, never a replacement character: different ids would be one.

    Example:
        >>> readable_texts(pa.array([b"m-1", b"m-\xff"]).view(pa.string())).to_pylist()
        ['m-1', None]
    """
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([_text(each, instead) for each in column.cast(pa.binary()).to_pylist()], pa.string())
    return column


def _text(value: bytes | None, instead: Callable[[bytes], str | None]) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return instead(value or b"")


def _never_json(value: bytes) -> str:
    """Headers that are no JSON object, so that the message is parked for them."""
    return f"\ufffd{value.decode(errors='replace')}"


_INSTEAD: Final[Mapping[str, Callable[[bytes], str | None]]] = {
    "id": lambda _: None,
    "type": lambda value: value.decode(errors="replace"),  # unknown; without any it would be the app's default
    "headers": _never_json,
    "position": lambda _: None,
}


def _in_calendar(times: Any) -> Any:
    """Times, but for those that no `datetime` can be."""
    first, last = (pa.scalar(moment, times.type) for moment in (_BEGINNING, _END))
    there: Any = pc.and_(pc.greater_equal(times, first), pc.less_equal(times, last))
    return pc.if_else(there, times, pa.scalar(None, times.type))
