"""Faults in what is decided about a message: its identity, its settlement, its guilt."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CRASHES: Final = "tests/protocol/test_crash_points.py"
_CLAIMS: Final = "tests/protocol/test_claims.py"
_OUTPUTS: Final = "tests/protocol/test_outputs.py"
_DEATHS: Final = "tests/protocol/test_deaths.py"
_FAILURES: Final = "tests/protocol/test_failures.py"
_KEYS: Final = "tests/protocol/test_keys_and_values.py"

IN_DECISIONS: Final = (
    # Identity
    Mutant(
        name="claim-without-consumer",
        file="idemp/work.py",
        old="consumer=consumer.name,\n        id=policy.key.effective",
        new='consumer="everybody",\n        id=policy.key.effective',
        breaks="Of two consumers of one event only the first handles it.",
        tests=(f"{_CLAIMS}::test_one_event_two_consumers",),
    ),
    Mutant(
        name="body-key-without-type",
        file="idemp/identity.py",
        old='{"body": message_type, "header": self.name}.get(self.scope, "")',
        new='{"header": self.name}.get(self.scope, "")',
        breaks="CancelOrder(order_id=1) is taken for a duplicate of PlaceOrder(order_id=1).",
        tests=(f"{_CLAIMS}::test_two_types_with_equal_body_keys",),
    ),
    Mutant(
        name="ids-of-any-length",
        file="idemp/identity.py",
        old="if size > MAX_ID_BYTES:",
        new="if size > 100 * MAX_ID_BYTES:",
        breaks="Ids reach databases that cut them off, so that two long ones become one.",
        tests=(f"{_KEYS}::test_values_that_cannot_be_keys",),
    ),
    Mutant(
        name="encoding-without-lengths",
        file="idemp/canonical.py",
        old='parts.append(tag + len(data).to_bytes(4, "big") + data)',
        new="parts.append(tag + data)",
        breaks='The keys ("a", "sb") and ("as", "b") are one.',
        tests=("tests/test_identity.py",),
    ),
    Mutant(
        name="payloads-never-conflict",
        file="idemp/fingerprint.py",
        old="return stored != arriving",
        new="return False",
        breaks="An id that is used again for another payload is taken for a duplicate.",
        tests=(f"{_CLAIMS}::test_other_payload_under_the_same_id",),
    ),
    Mutant(
        name="unstored-outputs-conflict",
        file="idemp/work.py",
        old="None if message.headers.get(UNSTORED_HEADER) else policy.fingerprint.of(opened.payload, opened.canonical)",
        new="policy.fingerprint.of(opened.payload, opened.canonical)",
        breaks="The second run of a handler that is not opted in words its output differently: a false alarm downstream.",
        tests=(f"{_OUTPUTS}::test_worded_differently_each_time",),
    ),
    Mutant(
        name="runs-share-a-message",
        file="idemp/work.py",
        old="return lambda: given.pop() if given else again()",
        new="return lambda: given[0]",
        breaks="A second run of a handler sees what the first one did to its message.",
        tests=(f"{_FAILURES}::test_no_run_sees_what_another_did_to_its_message",),
    ),
    # Settlement
    Mutant(
        name="attempts-not-counted",
        file="idemp/settling.py",
        old="delivery.attempt + 1",
        new="delivery.attempt",
        breaks="A message that always fails is retried for ever.",
        tests=(f"{_FAILURES}::test_exactly_so_many_attempts_then_the_dead_letter",),
    ),
    Mutant(
        name="one-attempt-too-many",
        file="idemp/settling.py",
        old="if delivery.attempt >= policy.attempts:",
        new="if delivery.attempt > policy.attempts:",
        breaks="A handler runs once more often than its policy allows.",
        tests=(f"{_FAILURES}::test_exactly_so_many_attempts_then_the_dead_letter",),
    ),
    Mutant(
        name="deadlocks-count-as-attempts",
        file="idemp/settling.py",
        old="return counter(delivery.message.headers, DEFERRED_HEADER) < MAX_DEFERRALS",
        new="return False",
        breaks="A busy database uses up the attempts of messages that it never let begin.",
        tests=(
            f"{_FAILURES}::test_not_the_messages_fault",
            f"{_FAILURES}::test_a_bounded_number_of_times",
        ),
    ),
    Mutant(
        name="endless-deferrals",
        file="idemp/settling.py",
        old="return counter(delivery.message.headers, DEFERRED_HEADER) < MAX_DEFERRALS",
        new="return True",
        breaks="A message that deadlocks each time goes round for ever.",
        tests=(f"{_DEATHS}::test_a_database_that_asks_again_for_ever_is_no_endless_loop",),
    ),
    Mutant(
        name="broker-outage-counts-as-attempt",
        file="idemp/settling.py",
        old='return isinstance(error, DispatchIncomplete) and not set(error.reasons) <= {"returned", "unsendable"}',
        new="return False",
        breaks="Messages that are not opted in are parked because the broker was away.",
        tests=(f"{_DEATHS}::test_an_output_that_no_queue_takes_is_its_handler_s_fault",),
    ),
    Mutant(
        name="commit-unknown-taken-for-failed",
        file="idemp/protocol.py",
        old="if not error.in_handler or not self.writable():",
        new="if not self.writable():",
        breaks="A COMMIT without an answer counts against the message, which is parked though it may be handled.",
        tests=(f"{_CRASHES}::test_commit_unknown_time_and_again_is_no_failure_of_the_message",),
    ),
    Mutant(
        name="commit-not-run-again",
        file="idemp/steps.py",
        old="except (TransientStoreError, StoreUnavailable) as error:\n                for watch",
        new="except StoreUnavailable as error:\n                for watch",
        breaks="A serialization failure or deadlock is not tried again at once: it goes back to the queue.",
        tests=(
            f"{_FAILURES}::test_database_asks_again",
            f"{_FAILURES}::test_serialization_failures_at_commit",
        ),
    ),
    # Guilt
    Mutant(
        name="deaths-not-counted",
        file="idemp/suspects.py",
        old="deaths = earlier if self._turns.solitary else max(0, earlier - 1)",
        new="deaths = 0",
        breaks="A message that kills its worker kills every worker, for ever.",
        tests=(f"{_DEATHS}::test_a_message_that_ends_its_process_each_time_is_parked_after_the_limit",),
    ),
    Mutant(
        name="death-in-company-counted",
        file="idemp/suspects.py",
        old="deaths = earlier if self._turns.solitary else max(0, earlier - 1)",
        new="deaths = earlier",
        breaks="The death of a process is held against all messages whose handlers ran beside the culprit's.",
        tests=(f"{_DEATHS}::test_beside_others_the_first_recorded_death_is_not_counted_either",),
    ),
    Mutant(
        name="suspects-in-company",
        file="idemp/suspects.py",
        old="with self._alone(work, earlier) if earlier else self._turns.shared():",
        new="with self._turns.shared():",
        breaks="A suspect runs beside others: its deaths are theirs, too, and neighbours are parked for them.",
        tests=(f"{_DEATHS}::test_a_suspect_runs_alone_or_its_death_is_not_counted",),
    ),
    Mutant(
        name="suspects-blamed-while-waiting",
        file="idemp/suspects.py",
        old="        self._ended(work, earlier)\n        with self._turns.alone(in_company):",
        new="        with self._turns.alone(in_company):",
        breaks="Whoever waits for its turn is held to account for the one that runs, and is parked unhandled.",
        tests=(f"{_DEATHS}::test_a_suspect_that_waits_for_its_turn_is_not_to_blame",),
    ),
    Mutant(
        name="deaths-forgotten-in-flight",
        file="idemp/suspects.py",
        old="if isinstance(outcome, Outcome) and not outcome.came_to_an_end:\n                left = earlier",
        new="if isinstance(outcome, Outcome) and not outcome.came_to_an_end:\n                left = 0",
        breaks="A killer whose claim is still held elsewhere starts from nought each time, and is never parked.",
        tests=(f"{_DEATHS}::test_deaths_outlast_a_claim_that_is_held_elsewhere",),
    ),
    Mutant(
        name="outage-forgives-deaths",
        file="idemp/suspects.py",
        old="except (WorkerDied, TransientStoreError, StoreUnavailable):",
        new="except WorkerDied:",
        breaks="An outage of the database wipes out the deaths that were counted.",
        tests=(f"{_DEATHS}::test_an_outage_takes_no_death_back",),
    ),
    Mutant(
        name="deferred-copies-unsuspected",
        file="idemp/suspects.py",
        old="return redelivered or bool(counter(work.message.headers, DEFERRED_HEADER))",
        new="return redelivered",
        breaks="A killer that was put off once is a first delivery again: its deaths are not counted.",
        tests=(_DEATHS,),
    ),
)
