"""Chunks of messages, as a task cuts them from what Spark hands it. Arrow only, no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.spark.columns import BY_CONTENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

GROUP: Final = "together"
"""The column whose equal values are to be in one chunk; what comes is sorted by it."""
_POSITION: Final = "position"


def chunks(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.Table]:
    """Chunks of up to so many rows, and bytes, without the column `GROUP`.

    A group is never parted, unless it is more than a chunk by itself: the second message of an id finds the first one in its
    own transaction, and a dry run, which leaves nothing for a later chunk to find, counts right.

    Example:
        >>> import pyarrow as pa
        >>> batch = pa.RecordBatch.from_pydict({"id": ["1", "2", "2"], GROUP: ["1", "2", "2"]})
        >>> [chunk.column("id").to_pylist() for chunk in chunks([batch], rows=2, size=1_000)]
        [['1'], ['2', '2']]
    """
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    for piece in pieces(batches, rows, size):
        if held and (
            sum(map(len, held)) + len(piece) > rows or sum(each.nbytes for each in held) + piece.nbytes > size
        ):
            whole = pa.Table.from_batches([*held, piece])
            cut = _last_border(whole, before=whole.num_rows - len(piece))
            yield whole.slice(0, cut).drop_columns([GROUP])
            held = whole.slice(cut).to_batches()
        else:
            held.append(piece)
    if held:
        yield pa.Table.from_batches(held).drop_columns([GROUP])


def pieces(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Batches as they come; what is too large by itself, by halves; nothing empty.

    Example:
        >>> import pyarrow as pa
        >>> [len(piece) for piece in pieces([pa.RecordBatch.from_pydict({"id": ["1", "2", "3"]})], rows=2, size=1_000)]
        [1, 2]
    """
    for batch in batches:
        waiting = [batch]
        while waiting:
            piece = waiting.pop()
            if len(piece) > 1 and (len(piece) > rows or piece.nbytes > size):
                middle = len(piece) // 2
                waiting += [piece.slice(middle), piece.slice(0, middle)]
            elif len(piece):
                yield piece


def _last_border(table: pa.Table, before: int) -> int:
    """The last row, up to that one, that begins a group; that one itself if all before it is a single group."""
    group = table.column(GROUP)
    held = group[before]
    border = before
    while border and group[border - 1] == held:
        border -= 1
    return border or before


def gathered(tables: Iterable[pa.Table], rows: int, size: int) -> Iterator[pa.Table]:
    """Small tables together, up to so many rows and bytes.

    Example:
        >>> import pyarrow as pa
        >>> one = pa.table({"id": ["1"]})
        >>> [chunk.num_rows for chunk in gathered([one, one, one], rows=2, size=1_000)]
        [2, 1]
    """
    import pyarrow as pa

    held: list[pa.Table] = []
    for table in tables:
        if held and (
            sum(each.num_rows for each in held) + table.num_rows > rows
            or sum(each.nbytes for each in held) + table.nbytes > size
        ):
            yield pa.concat_tables(held)
            held = []
        held.append(table)
    if held:
        yield pa.concat_tables(held)


def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows that are equal and stand in one file get positions of their own: `…#~digest`, `…#~digest.2`, `…#~digest.3`.

    They are interchangeable, so that any order of them gives the same positions. What comes is sorted by position within
    each group, and equal rows are of one group.

    Example:
        >>> import pyarrow as pa
        >>> batch = pa.RecordBatch.from_pydict({"position": ["a.json#~9F", "a.json#~9F"]})
        >>> next(numbered([batch])).column("position").to_pylist()
        ['a.json#~9F', 'a.json#~9F.2']
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    last, times = None, 1
    for batch in batches:
        if not len(batch):
            continue
        place = batch.schema.get_field_index(_POSITION)
        positions = batch.column(place)
        before = pa.concat_arrays([pa.array([last], positions.type), positions.slice(0, len(batch) - 1)])
        again = pc.and_kleene(pc.equal(positions, before), pc.match_substring(positions, BY_CONTENT))
        if pc.any(again).as_py():
            told: list[str | None] = []
            for position, repeats in zip(positions.to_pylist(), again.to_pylist(), strict=True):
                times = times + 1 if repeats else 1
                told.append(f"{position}.{times}" if repeats else position)
            batch = batch.set_column(place, batch.schema.field(place), pa.array(told, positions.type))  # noqa: PLW2901
        else:
            times = 1
        last = positions[-1].as_py()
        yield batch
