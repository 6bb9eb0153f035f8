"""How a task cuts what comes into chunks, and numbers rows that are equal."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp.spark.chunks import GROUP, chunks, numbered


def batches(*groups: list[str], body: bytes = b"") -> list[pa.RecordBatch]:
    schema = pa.schema([("id", pa.string()), ("body", pa.binary()), (GROUP, pa.string())])
    return [
        pa.RecordBatch.from_pylist([{"id": group, "body": body, GROUP: group} for group in names], schema=schema)
        for names in groups
    ]


def ids(tables: Any) -> list[list[str]]:
    return [table.column("id").to_pylist() for table in tables]


def test_chunks_are_bounded_in_rows() -> None:
    assert ids(chunks(batches(["a", "b"], ["c"], [], ["d", "e"]), 3, 10**6)) == [["a", "b", "c"], ["d", "e"]]


def test_large_batches_are_cut() -> None:
    assert all(len(chunk) <= 3 for chunk in ids(chunks(batches(list("abcdefgh")), 3, 10**6)))


def test_chunks_are_bounded_in_bytes() -> None:
    found = ids(chunks(batches(["a", "b", "c", "d"], body=b"x" * 1000), 100, 2500))
    assert [len(chunk) for chunk in found] == [2, 2]


def test_one_row_that_is_too_large_is_a_chunk() -> None:
    assert ids(chunks(batches(["a", "b"], body=b"x" * 1000), 100, 10)) == [["a"], ["b"]]


def test_groups_stay_together() -> None:
    assert ids(chunks(batches(["a", "b"], ["b", "c"]), 3, 10**6)) == [["a"], ["b", "b", "c"]]


def test_a_group_that_is_more_than_a_chunk_is_parted() -> None:
    assert ids(chunks(batches(["a", "a"], ["a", "a"]), 2, 10**6)) == [["a", "a"], ["a", "a"]]


def test_the_column_of_groups_is_gone() -> None:
    (table,) = chunks(batches(["a"]), 3, 10**6)
    assert table.column_names == ["id", "body"]


@given(
    names=st.lists(st.sampled_from("abcdef"), max_size=60).map(sorted),
    cuts=st.lists(st.integers(1, 7), min_size=1),
    rows=st.integers(1, 20),
)
def test_nothing_is_lost_or_parted_without_need(names: list[str], cuts: list[int], rows: int) -> None:
    parts, at = [], 0
    while at < len(names):
        size = cuts[len(parts) % len(cuts)]
        parts.append(names[at : at + size])
        at += size
    found = ids(chunks(batches(*parts), rows, 10**6))
    assert [name for chunk in found for name in chunk] == names
    for chunk, following in itertools.pairwise(found):
        if chunk[-1] == following[0]:
            assert set(chunk) == {chunk[0]}  # a group by itself


def places(*positions: list[str | None]) -> list[list[str | None]]:
    given_batches = [pa.RecordBatch.from_pydict({"position": pa.array(each, pa.string())}) for each in positions]
    return [batch.column("position").to_pylist() for batch in numbered(given_batches)]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_equal_rows_are_numbered_however_they_come(width: int) -> None:
    came: list[str | None] = ["f#~A", "f#~A", "f#~A", "f#~B", "f#~C", "f#~C", None]
    cut = [came[at : at + width] for at in range(0, len(came), width)]
    found = [place for batch in places(*cut) for place in batch]
    assert found == ["f#~A", "f#~A.2", "f#~A.3", "f#~B", "f#~C", "f#~C.2", None]


def test_exact_positions_stay() -> None:
    assert places(["f#1", "f#1"], [None, None]) == [["f#1", "f#1"], [None, None]]
