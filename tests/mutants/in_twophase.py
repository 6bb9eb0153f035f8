"""Faults of handlings in several databases."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_RACES: Final = "tests/twophase/test_races.py"
_SIMULATION: Final = "tests/simulation/test_twophase.py"
_RECOVERY: Final = "idemp/twophase/recovery.py"
_KINDS: Final = "idemp/twophase/sql/kinds.py"

IN_TWOPHASE = (
    Mutant(
        name="earlier-branches-seen-after-the-claim",
        file="idemp/twophase/branches.py",
        old="for branch in self._earlier[database.name]:",
        new="for branch in [doubt.id for doubt in database.in_doubt() if doubt.id.inbox == self._inbox]:",
        breaks="An attempt that has lost its claim rolls back what its successor has just decided to commit.",
        tests=(f"{_RACES}::test_attempt_that_lost_its_claim_ends_nobody_elses_branch",),
    ),
    Mutant(
        name="recovery-reads-the-claim",
        file=_RECOVERY,
        old="verdict = unit.claim(claim).verdict",
        new="verdict = unit.look_all([claim])[0].verdict",
        breaks="Recovery rolls back what a handling in work is about to commit.",
        tests=(f"{_RACES}::test_recovery_waits_for_work_in_flight",),
    ),
    Mutant(
        name="recovery-without-token",
        file=_RECOVERY,
        old="commit = decision is not None and decision.token == branch.token",
        new="commit = verdict is not Verdict.CLAIMED",
        breaks="An attempt that came too late is committed beside the one that was decided: its effect is there twice.",
        tests=(f"{_RACES}::test_token_tells_attempts_apart",),
    ),
    Mutant(
        name="recovery-of-other-inboxes",
        file=_RECOVERY,
        old="if doubt.id.inbox == inbox]",
        new="if doubt.id.inbox]",
        breaks="Another inbox's transactions are rolled back.",
        tests=("tests/twophase/test_kills.py::test_what_is_decided_is_told",),
    ),
    Mutant(
        name="purged-before-all-have-committed",
        file="idemp/inbox/sql/cleaning.py",
        old="for table in (tables.pending, tables.decision)",
        new="for table in (tables.pending,)",
        breaks="Recovery finds the id of a committed handling free, and rolls back the other database's part.",
        tests=(f"{_RACES}::test_claim_is_kept_while_a_branch_may_be_prepared",),
    ),
    Mutant(
        name="day-dropped-before-all-have-committed",
        file="idemp/inbox/sql/dropping.py",
        old="for table in (self._tables.pending, self._tables.decision)",
        new="for table in (self._tables.pending,)",
        breaks="The same, where ids that carry their time are in tables of a day.",
        tests=("tests/inbox/sql/test_dropping.py::TestWhatIsNeeded",),
    ),
    Mutant(
        name="xa-in-other-hands-taken-for-gone",
        file=_KINDS,
        old="return Ended.BUSY if listed else Ended.GONE",
        new="return Ended.GONE",
        breaks="On MariaDB a transaction whose connection lives passes for ended, and its locks stay.",
        tests=(f"{_RACES}::test_branch_in_other_hands_is_left",),
    ),
    Mutant(
        name="rolled-back-while-nobody-knows",
        file="idemp/twophase/branches.py",
        old='return error.committed == "no"',
        new="return True",
        breaks="A COMMIT whose answer is lost took place, and the other database rolls back.",
        tests=(f"{_RACES}::test_commit_that_took_place_and_whose_answer_is_lost",),
    ),
    Mutant(
        name="prepares-another-transaction",
        file=_KINDS,
        old="        if number != begun:\n            raise AnotherTransaction\n",
        new="",
        breaks="What a handler committed behind SQLAlchemy's back is not noticed: half of its effects come twice.",
        tests=("tests/twophase/test_handlers.py::test_driver_ends_it_behind_our_back",),
    ),
    Mutant(
        name="duplicate-acked-before-all-have-committed",
        file="idemp/protocol.py",
        old="            self.consumer.coordinator.finish(claimed.of or work.claims[0])",
        new="            pass",
        breaks="Outputs go out and the message is acked while one of the databases does not have its part.",
        tests=(f"{_RACES}::test_committed_here_and_not_there",),
    ),
    Mutant(
        name="decided-before-it-is-prepared",
        file="idemp/steps.py",
        old="branches.prepare(unit)\n                    branches.decide(unit)",
        new="branches.decide(unit)\n                    branches.prepare(unit)",
        breaks="The inbox commits, and the other database may still refuse to prepare.",
        tests=(_SIMULATION,),
    ),
    Mutant(
        name="decision-forgotten-unfinished",
        file="idemp/twophase/coordinator.py",
        old="        if unfinished:\n            why",
        new="        if unfinished:\n            self.decisions.finished(decision)\n            why",
        breaks="What one database could not commit yet is rolled back by the next recovery.",
        tests=(_SIMULATION,),
    ),
    Mutant(
        name="handler-waits-for-earlier-branches",
        file="idemp/twophase/branches.py",
        old="        self._end_earlier(database)\n",
        new="",
        breaks="A handler waits for the locks of an earlier attempt until somebody recovers.",
        tests=(f"{_SIMULATION}::test_schedule_by_hand",),
    ),
    Mutant(
        name="role-of-the-handlers-prepares",
        file="idemp/twophase/sql/kinds.py",
        old="if role != connection.info[_ROLE]:",
        new="if False:",
        breaks="What a handler's role has prepared on PostgreSQL stays in doubt: nobody else may commit it.",
        tests=("tests/twophase/test_handlers.py::test_a_role_of_the_handlers_prepares_nothing",),
    ),
)
