"""Faults in sources that are read by offsets, and in the spool."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_PLANNING: Final = "tests/spark/sources/test_planning.py"
_STORE: Final = "tests/spool/test_store.py"

IN_SOURCES: Final = (
    Mutant(
        name="source-admits-all",
        file="idemp/spark/sources/planning.py",
        old="        share = min(left, -(-has * left // lag)) if lag else 0",
        new="        share = has",
        breaks="A micro-batch has all that is there, whatever limit the user set.",
        tests=(f"{_PLANNING}::test_admitted_keeps_the_limit_and_wastes_none_of_it",),
    ),
    Mutant(
        name="source-never-ends",
        file="idemp/spark/sources/planning.py",
        old="            ends = self._until\n",
        new="            ends = self._ask(start)\n",
        breaks="A query for what is available now goes on as long as somebody publishes.",
        tests=(f"{_PLANNING}::test_every_offset_is_in_one_micro_batch",),
    ),
    Mutant(
        name="source-made-anew-unnoticed",
        file="idemp/spark/sources/planning.py",
        old="            if partition in ends and ends[partition] < begin:",
        new="            if partition not in {*ends, *start}:",
        breaks="A queue that was deleted and made anew is not read until it has grown beyond the old offset.",
        tests=(f"{_PLANNING}::test_log_that_ends_before_the_checkpoint_raises",),
    ),
    Mutant(
        name="spool-skips-in-silence",
        file="idemp/spool/store.py",
        old="        if follows < end:\n            raise",
        new="        if follows < start:\n            raise",
        breaks="A query whose messages somebody else released goes on without them.",
        tests=(f"{_STORE}::test_released_rows_are_gone_and_make_room",),
    ),
    Mutant(
        name="spool-stops-at-a-large-message",
        file="idemp/spool/store.py",
        old="            if too_much and level.messages > len(rows):",
        new="            if too_much:",
        breaks="A message larger than the spool may be stops the queue for ever.",
        tests=(f"{_STORE}::test_full_spool_takes_nothing_and_an_empty_one_takes_anything",),
    ),
    Mutant(
        name="spool-keeps-its-bytes",
        file="idemp/spool/store.py",
        old="stored_bytes=spool.c.stored_bytes - int(size)",
        new="stored_bytes=spool.c.stored_bytes",
        breaks="A spool that was read is taken for full, and spooling never goes on.",
        tests=(f"{_STORE}::test_released_rows_are_gone_and_make_room",),
    ),
)
