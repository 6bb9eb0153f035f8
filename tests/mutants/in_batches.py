"""Faults in what deliveries share: transactions, claims, failures."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_BATCHES: Final = "tests/protocol/test_batches.py"
_BULK: Final = "tests/bulk/test_bulk.py"
_MARIADB: Final = "tests/inbox/sql/test_store_mariadb.py::TestMariadb"

IN_BATCHES: Final = (
    Mutant(
        name="batch-claims-an-id-twice",
        file="idemp/bulk/batch.py",
        old="            groups[times].append(place)",
        new="            groups[0].append(place)",
        breaks="A message that comes twice in one batch is handled twice, or claims what it claimed itself.",
        tests=(f"{_BATCHES}::test_duplicates_within_a_batch",),
    ),
    Mutant(
        name="batch-takes-what-is-held",
        file="idemp/bulk/batch.py",
        old="if apart := {*held, *filter(self._stays_alone, fresh), *self._late(unit, fresh)}:",
        new="if apart := {*filter(self._stays_alone, fresh), *self._late(unit, fresh)}:",
        breaks="A message that another worker handles right now is settled as if it had been handled.",
        tests=(f"{_BATCHES}::test_in_flight_elsewhere",),
    ),
    Mutant(
        name="batch-of-suspects",
        file="idemp/bulk/batch.py",
        old="return Suspects.counts(self._members[place].work, redelivered=self._members[place].redelivered)",
        new="return False",
        breaks="A message whose handler ends the process does so again and again: no start of it is recorded.",
        tests=(f"{_BATCHES}::test_redelivered_ones_that_are_fresh_run_alone",),
    ),
    Mutant(
        name="batch-of-late-ones",
        file="idemp/bulk/batch.py",
        old="                self.came_to[place] = error\n                late.append(place)\n",
        new="                del error\n",
        breaks="A message from before the retention window, whose claim may have been purged, is handled again.",
        tests=(f"{_BATCHES}::test_late_ones_are_parked_alone",),
    ),
    Mutant(
        name="batch-blames-the-first",
        file="idemp/bulk/batch.py",
        old="            raise _Failed(places) from error",
        new="            raise _Failed([min(self._ran)]) from error",
        breaks="Another message than the one that fails is run alone, and the failing one spoils each batch anew.",
        tests=(f"{_BATCHES}::test_one_fails",),
    ),
    Mutant(
        name="batch-runs-what-may-be-committed",
        file="idemp/bulk/batch.py",
        old="            return [[place for place in group if place not in self._ran]]",
        new="            self.came_to[:] = [None] * len(self.came_to)\n            return _halves(group)",
        breaks="A handler commits on its own, and those before it, whose effects it committed, have them again.",
        tests=(f"{_BATCHES}::test_one_ends_it_behind_our_back",),
    ),
    Mutant(
        name="batch-asks-nobody-after-a-handler",
        file="idemp/bulk/batch.py",
        old="settings_changed = unit.forget() is False",
        new="settings_changed = False",
        breaks="A statement's error that a handler swallows counts against the message after it.",
        tests=(f"{_BATCHES}::test_one_swallows_a_failed_statement", f"{_BATCHES}::test_sessions_of_two_handlers"),
    ),
    Mutant(
        name="batch-outputs-under-the-first-claim",
        file="idemp/inbox/sql/claiming.py",
        old="return [output_row(output, key) for key, outputs in handled for output in outputs]",
        new="return [output_row(output, handled[0][0]) for key, outputs in handled for output in outputs]",
        breaks="Redeliveries send outputs of other messages, or none.",
        tests=("tests/inbox/sql/test_store_postgresql.py::TestReadCommitted::test_all_are_kept",),
    ),
    Mutant(
        name="batch-claims-lost-by-starting-over",
        file="idemp/inbox/sql/unit.py",
        old="                    self._start_over()\n                    ours = frozenset()\n",
        new="                    self._start_over()\n                    ours = frozenset(claim.id.key for claim in left)\n",
        breaks="On MySQL and MariaDB duplicates in a batch pass for claimed, and nothing keeps what was claimed before.",
        tests=(f"{_MARIADB}::test_each_gets_its_own_answer",),
    ),
    Mutant(
        name="batch-too-large-for-ever",
        file="idemp/bulk/batch.py",
        old="            if self._steps.obstacle() is not None:\n                raise",
        new="            if phase_of(error) is not Phase.HANDLER:\n                raise",
        breaks="A batch that is too large for the database is tried again for ever, though each message would go through.",
        tests=(f"{_BATCHES}::test_too_large_together",),
    ),
    Mutant(
        name="batch-one-by-one-when-many-fail",
        file="idemp/bulk/batch.py",
        old="*(_halves(after) if len(after) > _MANY else [after]),",
        new="after,",
        breaks="When all fail, each failure takes back the claims of all that are left.",
        tests=(f"{_BATCHES}::test_many_fail",),
    ),
    Mutant(
        name="bulk-replay-of-anybody",
        file="idemp/bulk/report.py",
        old="same = claim.position is not None and claim.position == claimed.position",
        new="same = claim.position == claimed.position",
        breaks="What a worker handled passes for a backfill's own retry: nobody sees that an archive overlaps.",
        tests=(f"{_BULK}::test_one_row_alone",),
    ),
    Mutant(
        name="bulk-conflicts-dropped",
        file="idemp/bulk/core.py",
        old="            parked_with = result.conflict\n",
        new="            parked_with = None\n",
        breaks="A row whose id was used with another payload is counted, and lost.",
        tests=(f"{_BULK}::test_what_each_row_comes_to",),
    ),
    Mutant(
        name="bulk-late-rows-handled",
        file="idemp/bulk/core.py",
        old="        if not self._adopt:\n            super().check_age(work, unit)",
        new="        if self._adopt:\n            super().check_age(work, unit)",
        breaks="An archive older than the retention window is handled again.",
        tests=(f"{_BULK}::test_late_rows_are_parked",),
    ),
    Mutant(
        name="bulk-never-pends-all-the-same",
        file="idemp/bulk/core.py",
        old="timedelta(0) if self._leaves_to_relay else None",
        new="timedelta(0)",
        breaks="A backfill without dispatch sends ten years of messages.",
        tests=(f"{_BULK}::test_outputs_that_are_never_sent",),
    ),
    Mutant(
        name="bulk-dry-run-judges-by-the-last",
        file="idemp/bulk/core.py",
        old="            claimed = known.answer(claim) if known is not None else answer\n",
        new="            claimed = answer\n",
        breaks="A dry run counts an id that comes twice in a chunk as new twice.",
        tests=(f"{_BULK}::test_a_dry_run_says_what_would_be",),
    ),
    Mutant(
        name="bulk-own-digests-taken-for-ids",
        file="idemp/bulk/keys.py",
        old="plain = canonical & (versions(octets) != _OWN_DIGEST)",
        new="plain = canonical",
        breaks="An id that looks like a digest of idemp's is another one in bulk than online: it is handled twice.",
        tests=("tests/bulk/test_keys.py::test_they_are_those_of_single_ids",),
    ),
    Mutant(
        name="claims-not-withdrawn-forgotten",
        file="idemp/inbox/sql/store.py",
        old="            self._owed.append(_Debt(rows, told))\n",
        new="",
        breaks="Claims that a handler committed stay if the database is away for a moment: its neighbours pass for handled.",
        tests=(f"{_BATCHES}::test_the_database_goes_before_claims_are_withdrawn",),
    ),
    Mutant(
        name="acks-told-beside-the-other-thread",
        file="idemp/broker/kombu/consuming.py",
        old="        with self._settling:\n            if self._acked:",
        new="        if True:\n            if self._acked:",
        breaks="A delivery whose copy was refused is acked along with a later one, and lost.",
        tests=("tests/broker/kombu/test_consuming.py::test_acks_while_another_thread_gives_back",),
    ),
)
