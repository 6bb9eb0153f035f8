"""Faults in the archive and the guard against late duplicates."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_GUARD: Final = "tests/protocol/test_guard.py::TestWithAFile"
_FILE: Final = "tests/test_lateguard.py"
_PURGED: Final = "tests/inbox/sql/test_purged.py"

IN_ARCHIVE: Final = (
    Mutant(
        name="guard-older-than-the-purge",
        file="idemp/lateguard.py",
        old="span.since <= moment and span.until >= purged_before",
        new="span.since <= moment",
        breaks="A guard file that was copied too early lets late duplicates through.",
        tests=(
            f"{_GUARD}::test_file_that_is_older_than_the_purge_counts_for_nothing",
            f"{_FILE}::test_span",
        ),
    ),
    Mutant(
        name="guard-knows-no-consumers",
        file="idemp/lateguard.py",
        old="return encode((_DERIVATION, consumer))",
        new='return encode((_DERIVATION, "all"))',
        breaks="What one consumer handled is parked at another one.",
        tests=(f"{_FILE}::test_ids_of_other_consumers_are_others",),
    ),
    Mutant(
        name="guard-stays-as-it-was-read",
        file="idemp/lateness.py",
        old="        if seen != self._seen:\n            with",
        new="        if self._seen == ():\n            with",
        breaks="A worker goes by the guard file that it found when it started.",
        tests=(f"{_GUARD}::test_a_new_file_is_read",),
    ),
    Mutant(
        name="guard-overlooks-former-names",
        file="idemp/lateness.py",
        old="        for claim in claims:\n",
        new="        for claim in claims[:1]:\n",
        breaks="After a rename, what the former consumer handled long ago is handled again.",
        tests=(f"{_GUARD}::test_former_names_count",),
    ),
    Mutant(
        name="purges-what-was-claimed-anew",
        file="idemp/inbox/sql/cleaning.py",
        old="deleted += expired.delete_those(connection, consumer_id, own, before)",
        new="deleted += expired.delete_those(connection, consumer_id, own, self._liveness.ago(timedelta(0)))",
        breaks="A forced replay that comes between archive and purge loses its claim.",
        tests=(f"{_PURGED}::TestArchived::test_not_what_was_claimed_anew",),
    ),
    Mutant(
        name="purge-goes-unnoted",
        file="idemp/inbox/sql/purged.py",
        old="            before = max(before, noted + _NEXT)",
        new="            return",
        breaks="After a purge that no archive has, a guard still passes for complete.",
        tests=(f"{_PURGED}::TestNote::test_what_no_archive_has_moves_it_on_in_any_case",),
    ),
)
