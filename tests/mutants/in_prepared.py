"""Faults in prepared messages."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_DECIDING: Final = "idemp/prepared/deciding.py"
_CHECKING: Final = "idemp/prepared/checking.py"
_PRODUCING: Final = "idemp/prepared/producing.py"
_HOME: Final = "idemp/prepared/sql/home.py"
_BARRIER: Final = "idemp/prepared/sql/barrier.py"
_TESTS: Final = "tests/prepared/test_producing.py"
_SQLITE: Final = "tests/prepared/test_sql.py::TestSqlite"

IN_PREPARED: Final = (
    Mutant(
        name="prepared-committed-without-the-barrier",
        file=_DECIDING,
        old="        if self._barrier is not None:\n            self._agree(",
        new="        if self._barrier is None:\n            self._agree(",
        breaks="A producer that commits inside its transaction sends a message whose work is rolled back.",
        tests=(f"{_TESTS}::test_commit_before_the_works_commit_is_refused",),
    ),
    Mutant(
        name="prepared-lost-commit-is-rollback",
        file=_DECIDING,
        old="        try:\n            answer = barrier.probe(prepared.id)\n        except StoreError:\n",
        new="        try:\n            answer = Answer.ROLLBACK\n        except StoreError:\n",
        breaks="A COMMIT of the work that took place, and whose answer was lost, is followed by no message.",
        tests=("tests/prepared/test_commits.py::test_commit_without_an_answer",),
    ),
    Mutant(
        name="prepared-refusal-taken-for-published",
        file=_DECIDING,
        old="        if refusal is not None:\n            log.warning(",
        new="        if refusal is None:\n            log.warning(",
        breaks="A message that no queue took counts as published.",
        tests=(f"{_TESTS}::test_broker_that_refuses",),
    ),
    Mutant(
        name="prepared-outage-burns-checks",
        file=_CHECKING,
        old='checked=False)\n        return "unasked"',
        new='checked=True)\n        return "unasked"',
        breaks="While the business database is away messages use up their checks, and are parked unasked.",
        tests=(f"{_TESTS}::test_outage_is_no_check",),
    ),
    Mutant(
        name="prepared-dropped-when-asked-too-often",
        file=_CHECKING,
        old="if not self._home.park(taken, f\"{counted(checks, 'check')}: {why}\"):",
        new="if self._home.decide(taken, Decision.ROLLBACK, timedelta(0)):",
        breaks="A message of which nobody knows is dropped, though its work may be committed.",
        tests=(f"{_TESTS}::test_unknown_is_parked_in_the_end",),
    ),
    Mutant(
        name="prepared-barrier-goes-with-its-message",
        file=_PRODUCING,
        old="self.barrier.purge(self.barrier_retention, limit)",
        new="self.barrier.purge(self.barrier_retention * 0, limit)",
        breaks="A barrier's row is gone with its message: work that comes late commits after its rollback.",
        tests=(f"{_TESTS}::test_barrier_rows_outlive_their_messages",),
    ),
    Mutant(
        name="prepared-opposite-decision-accepted",
        file=_HOME,
        old="update(prepared).where(one, prepared.c.state.in_([state.value for state in _UNDECIDED]))",
        new="update(prepared).where(one)",
        breaks="A commit after the rollback publishes.",
        tests=(f"{_SQLITE}::test_the_opposite_is_refused",),
    ),
    Mutant(
        name="prepared-none-is-success",
        file=_HOME,
        old="            raise unknown(prepared.id, decision)\n",
        new="            return False\n",
        breaks="A decision about a message that is not there is taken for done.",
        tests=(f"{_SQLITE}::test_none_is_no_success",),
    ),
    Mutant(
        name="prepared-taken-by-all",
        file=_HOME,
        old="            if found:\n                leased",
        new="            if not found:\n                leased",
        breaks="Every checker takes what another one has.",
        tests=(f"{_SQLITE}::test_leased_to_one",),
    ),
    Mutant(
        name="barrier-only-looked-at",
        file=_BARRIER,
        old="                reason = self._insert(connection, id, Decision.ROLLBACK)\n",
        new='                reason = connection.scalar(self._reason, {"one": id}) and Decision.COMMIT\n',
        breaks="The checker looks instead of inserting: work that comes later commits after its rollback.",
        tests=(f"{_SQLITE}::test_late_work_is_refused",),
    ),
    Mutant(
        name="barrier-reason-from-an-old-snapshot",
        file=_BARRIER,
        old="read = self._sql.reason_now if is_mysql(connection.dialect.name) else self._sql.reason",
        new="read = self._sql.reason",
        breaks="On MariaDB work at REPEATABLE READ stumbles over the checker's row, and does not see why.",
        tests=("tests/prepared/test_sql.py::TestMariadb::test_old_snapshot_is_no_way_around",),
    ),
)
