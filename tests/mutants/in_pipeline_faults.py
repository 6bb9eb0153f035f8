"""Faults in the kit that has faults in pipelines: it must not claim what did not happen."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_INJECTION: Final = "tests/spark/test_injection.py"

IN_PIPELINE_FAULTS: Final = (
    Mutant(
        name="fault-fires-without-counting",
        file="idemp/spark/testing/plans.py",
        old="        except FileExistsError:\n            return False\n",
        new="        except FileExistsError:\n            return True\n",
        breaks="A fault that is to fire once fires at every attempt of a task, until Spark gives the job up.",
        tests=(f"{_INJECTION}::TestPlan::test_each_fault_fires_as_often_as_it_says_whoever_comes",),
    ),
    Mutant(
        name="fault-is-not-choosy",
        file="idemp/spark/testing/plans.py",
        old="all(limit in {None, actual}",
        new="any(limit in {None, actual}",
        breaks="A fault of one partition or attempt happens in all of them.",
        tests=(f"{_INJECTION}::test_transactions_are_counted_by_task",),
    ),
    Mutant(
        name="fault-counts-for-its-process",
        file="idemp/spark/testing/injection.py",
        old="            self._last_task, self._committed = task.taskAttemptId(), 0",
        new="            self._last_task = task.taskAttemptId()",
        breaks="A Python worker runs many tasks: the second transaction of one is taken for that of another.",
        tests=(f"{_INJECTION}::test_transactions_are_counted_by_task",),
    ),
    Mutant(
        name="fault-after-no-commit",
        file="idemp/spark/testing/injection.py",
        old='        event.listen(engine, "handle_error", self._fails)\n',
        new="",
        breaks='A COMMIT that failed has an "after commit", and a test proves something that never was.',
        tests=(f"{_INJECTION}::test_commit_that_failed_has_no_after",),
    ),
    Mutant(
        name="fault-outside-of-chunks",
        file="idemp/spark/testing/injection.py",
        old="    return options.get(UNIT_OPTION) is not None or STAGING_OPTION in options",
        new="    return True",
        breaks="Faults happen in transactions that are no chunk's: of tables' checks, and of interned names.",
        tests=(f"{_INJECTION}::test_only_tasks_and_their_chunks_count",),
    ),
)
