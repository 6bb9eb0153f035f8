"""Faults in the pipeline: how messages are cut into chunks, and where they are said to stand."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CHUNKS: Final = "tests/spark/test_chunks.py"

IN_PIPELINE: Final = (
    Mutant(
        name="chunk-parts-a-group",
        file="idemp/spark/chunks.py",
        old="    return border or before\n",
        new="    return before\n",
        breaks="A dry run counts an id that comes twice as new twice, where a chunk ends between the two.",
        tests=(f"{_CHUNKS}::test_groups_stay_together",),
    ),
    Mutant(
        name="chunk-without-end-in-bytes",
        file="idemp/spark/chunks.py",
        old="len(piece) > rows or piece.nbytes > size",
        new="len(piece) > rows",
        breaks="Ten thousand large bodies are one transaction, and more than a worker's memory holds.",
        tests=(f"{_CHUNKS}::test_chunks_are_bounded_in_bytes",),
    ),
    Mutant(
        name="chunk-forgets-the-rest",
        file="idemp/spark/chunks.py",
        old="            held = whole.slice(cut).to_batches()\n",
        new="            held = []\n",
        breaks="Messages between two chunks are neither handled nor parked, and nobody counts them.",
        tests=(f"{_CHUNKS}::test_chunks_are_bounded_in_rows",),
    ),
    Mutant(
        name="equal-rows-share-a-place",
        file="idemp/spark/chunks.py",
        old="            times = 1\n        last",
        new="            times = 0\n        last",
        breaks="The second of two equal lines of a file changes its place with where batches end: a duplicate is a replay.",
        tests=(f"{_CHUNKS}::test_equal_rows_are_numbered_however_they_come",),
    ),
)
