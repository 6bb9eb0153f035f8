"""Faults in the protocol's steps and verdicts, and in what becomes of outputs."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CRASHES: Final = "tests/protocol/test_crash_points.py"
_CLAIMS: Final = "tests/protocol/test_claims.py"
_OUTPUTS: Final = "tests/protocol/test_outputs.py"
_DEATHS: Final = "tests/protocol/test_deaths.py"
_REDISPATCH: Final = "tests/protocol/test_redispatch.py"
_WINDOWS: Final = "tests/protocol/test_windows.py"

IN_PROTOCOL: Final = (
    # Order of the steps
    Mutant(
        name="dispatch-before-commit",
        file="idemp/protocol.py",
        old="        return self.after_claim(work, *self.claimed_early(work))\n",
        new="""\
        with self.store.begin(work.claims) as unit:
            claimed, outputs = self._claim(unit, work.claims), []
            if claimed.verdict is Verdict.CLAIMED:
                outputs = self.run_handler(unit, work)
                self.store_outputs(unit, work, outputs)
                self.dispatcher.dispatch(self.after_claim(work, claimed, outputs))
                unit.commit()
        return self.after_claim(work, claimed, [])
""",
        breaks="Outputs of a handling that is rolled back reach the broker.",
        tests=(f"{_CRASHES}::test_before_commit_nothing_happened",),
    ),
    Mutant(
        name="outputs-not-stored",
        file="idemp/steps.py",
        old="phases.now = Phase.STORE\n                self.store_outputs(unit, work, outputs)",
        new="phases.now = Phase.STORE\n                self.store_outputs(unit, work, [])",
        breaks="A crash after COMMIT loses the outputs: neither a redelivery nor a relay knows them.",
        tests=(f"{_CRASHES}::test_after_commit_the_outputs_go_out",),
    ),
    Mutant(
        name="ack-before-commit",
        file="idemp/consuming.py",
        old="""\
        self._in_hand = group
        try:
            for handled in self._handled(group):
                self._send(handled)
""",
        new="""\
        from idemp.broker.port import Ack

        self._in_hand = group
        try:
            for arrival in group:
                arrival.receiver.settle(arrival.delivery, Ack())
            for handled in self._handled(group):
""",
        breaks="A worker that dies in a handler takes its message with it, and nothing is retried or parked.",
        tests=("tests/simulation/test_simulation.py",),
    ),
    Mutant(
        name="ack-at-the-end-of-the-worker",
        file="idemp/consuming.py",
        old="arrival.receiver.settle(arrival.delivery, Release())",
        new='arrival.receiver.settle(arrival.delivery, __import__("idemp.broker.port").broker.port.Ack())',
        breaks="A worker that is told to end acks messages that no handler has run for.",
        tests=("tests/consuming/test_giving_back.py::test_what_no_handler_ran_for_is_given_back",),
    ),
    Mutant(
        name="ack-before-confirm",
        file="idemp/protocol.py",
        old="lambda refused: Outcome.PENDING if refused else Outcome.HANDLED",
        new="lambda refused: Outcome.HANDLED",
        breaks="A delivery is acked though its outputs have no confirm and no relay lives.",
        tests=(f"{_OUTPUTS}::test_exactly_the_unconfirmed_stay_pending",),
    ),
    Mutant(
        name="ack-while-confirms-are-underway",
        file="idemp/consuming.py",
        old="            self._underway[self._protocol.dispatcher.send(*shipments)] = sent\n",
        new="""\
            for arrival in sent:
                self._end(arrival, arrival.handling.confirmed(()))
            self._protocol.dispatcher.send(*shipments)
""",
        breaks="A delivery is acked as soon as its outputs are sent; if they are refused, nobody sends them again.",
        tests=("tests/simulation/test_simulation.py",),
    ),
    Mutant(
        name="confirms-mixed-up",
        file="idemp/dispatch.py",
        old="shipments, left = self._underway.pop(ticket), iter(answers)",
        new="shipments, left = self._underway.pop(next(reversed(self._underway))), iter(answers)",
        breaks="The confirms of one delivery's outputs settle another delivery.",
        tests=("tests/simulation/test_simulation.py",),
    ),
    Mutant(
        name="ack-unconfirmed-redispatch",
        file="idemp/protocol.py",
        old="if left or any(output.id in pending for output, _ in refused):",
        new="if left:",
        breaks="A duplicate is acked though what it should have sent was refused once more.",
        tests=(f"{_OUTPUTS}::test_broker_down_at_dispatch",),
    ),
    Mutant(
        name="pending-acked-without-relay",
        file="idemp/protocol.py",
        old="case Outcome.PENDING if not self._relay_alive():",
        new="case Outcome.PENDING if False:",
        breaks="Pending outputs are left to a relay that does not run.",
        tests=(f"{_OUTPUTS}::test_exactly_the_unconfirmed_stay_pending",),
    ),
    Mutant(
        name="unknown-relay-counts-as-alive",
        file="idemp/steps.py",
        old="except StoreError:  # then nothing is known of a relay, and the message comes again\n            return False",
        new="except StoreError:  # then nothing is known of a relay, and the message comes again\n            return True",
        breaks="Pending outputs are left to a relay of which nobody knows whether it lives.",
        tests=(f"{_OUTPUTS}::test_nobody_knows_whether_a_relay_lives",),
    ),
    Mutant(
        name="unstored-outputs-lost",
        file="idemp/protocol.py",
        old="            if refused:\n                raise DispatchIncomplete(",
        new="            if not outputs and refused:\n                raise DispatchIncomplete(",
        breaks="A type that is not opted in is acked though its outputs, stored nowhere, were refused.",
        tests=(f"{_OUTPUTS}::test_not_opted_in_and_unconfirmed",),
    ),
    Mutant(
        name="lost-delivery-committed-unclaimed",
        file="idemp/steps.py",
        old="        if work.alive():\n",
        new="        if work.alive() or not work.claims:\n",
        breaks="A delivery without a claim that is known to come again is committed all the same: its effect happens twice.",
        tests=(f"{_DEATHS}::test_not_opted_in_and_lost_is_rolled_back",),
    ),
    # Verdicts
    Mutant(
        name="in-flight-counts-as-attempt",
        file="idemp/protocol.py",
        old="return Retry(IN_FLIGHT_DELAY, counted=False)",
        new="return Retry(IN_FLIGHT_DELAY, counted=True)",
        breaks="A message that waits for its twin uses up its attempts.",
        tests=(f"{_CLAIMS}::test_in_flight_goes_back_by_a_delay",),
    ),
    Mutant(
        name="in-flight-acked",
        file="idemp/protocol.py",
        old="return Retry(IN_FLIGHT_DELAY, counted=False)",
        new="return Ack()",
        breaks="The twin of a message in work is acked; if the first one rolls back, both are gone.",
        tests=(f"{_CLAIMS}::test_in_flight_goes_back_by_a_delay",),
    ),
    Mutant(
        name="conflict-taken-for-duplicate",
        file="idemp/steps.py",
        old='(work.policy.on_conflict != "park" and not claimed.collision)',
        new="not claimed.collision",
        breaks="Another payload under a used id is skipped in silence.",
        tests=(f"{_CLAIMS}::test_other_payload_under_the_same_id",),
    ),
    Mutant(
        name="collision-taken-for-duplicate",
        file="idemp/steps.py",
        old='(work.policy.on_conflict != "park" and not claimed.collision)',
        new='work.policy.on_conflict != "park"',
        breaks="Where conflicts are redispatched, a message whose id's digest is another id's is skipped in silence.",
        tests=(f"{_CLAIMS}::test_two_ids_of_one_digest_are_no_duplicates_whatever_the_policy",),
    ),
    Mutant(
        name="late-claim-ignores-former-names",
        file="idemp/protocol.py",
        old="claimed = self._claim(unit, work.claims[1:])",
        new="pass",
        breaks="After a change of the key, messages handled under the former one are handled again by late claims.",
        tests=(f"{_WINDOWS}::TestPrevious::test_former_identity_counts",),
    ),
    Mutant(
        name="late-failure-taken-at-its-word",
        file="idemp/protocol.py",
        old="then the claim says DUPLICATE.\n            claimed = self._look(work)",
        new="then the claim says DUPLICATE.\n            claimed = Claimed(Verdict.CLAIMED)",
        breaks="A late redelivery that stumbles over its own earlier effect is a failure instead of a duplicate.",
        tests=(f"{_CLAIMS}::test_late_claim_fails_on_its_own_earlier_effect",),
    ),
    Mutant(
        name="exhausted-though-handled",
        file="idemp/protocol.py",
        old="claimed = self._look(work) if work.claims else Claimed(Verdict.CLAIMED)",
        new="claimed = Claimed(Verdict.CLAIMED)",
        breaks="A message that was handled and then killed its worker is parked, its outputs perhaps never sent.",
        tests=(f"{_DEATHS}::test_what_was_handled_after_all_is_skipped_though_it_killed",),
    ),
    Mutant(
        name="late-message-handled",
        file="idemp/steps.py",
        old="if moment >= horizon:",
        new="if True:",
        breaks="A message from before the retention window, whose claim may have been purged, is handled again.",
        tests=(f"{_WINDOWS}::TestLate::test_parked",),
    ),
    # Outputs
    Mutant(
        name="redispatch-with-new-ids",
        file="idemp/protocol.py",
        old="outputs = [item.output.marked_redispatched() for item in stored",
        new='outputs = [replace(item.output.marked_redispatched(), id=__import__("uuid").uuid4()) for item in stored',
        breaks="A redispatched output has another id than the first time: consumers downstream handle it twice.",
        tests=(f"{_REDISPATCH}::test_duplicate_after_full_dispatch",),
    ),
    Mutant(
        name="random-output-ids",
        file="idemp/steps.py",
        old="derive_id=lambda ordinal: output_id(self.consumer.namespace, self.consumer.name, key, ordinal),",
        new="derive_id=lambda ordinal: new_id(self.consumer.clock.now()),",
        breaks="A handling that runs again sends its outputs under new ids.",
        tests=(f"{_OUTPUTS}::test_ids_are_the_same_after_the_window",),
    ),
    Mutant(
        name="output-ids-without-consumer",
        file="idemp/steps.py",
        old="derive_id=lambda ordinal: output_id(self.consumer.namespace, self.consumer.name, key, ordinal),",
        new='derive_id=lambda ordinal: output_id(self.consumer.namespace, "", key, ordinal),',
        breaks="Two consumers of one event send different outputs under one id: the second is lost downstream.",
        tests=(f"{_CLAIMS}::test_one_event_two_consumers",),
    ),
    Mutant(
        name="redispatch-ripples",
        file="idemp/protocol.py",
        old='everything = work.policy.redispatch == "always" and not copy',
        new='everything = work.policy.redispatch == "always"',
        breaks="One duplicate in a flow that keeps itself going starts a second endless chain.",
        tests=(f"{_REDISPATCH}::test_redispatched_copy_does_not_ripple",),
    ),
    Mutant(
        name="redispatch-unmarked",
        file="idemp/protocol.py",
        old="outputs = [item.output.marked_redispatched() for item in stored",
        new="outputs = [item.output for item in stored",
        breaks="A redispatched copy does not say so, and is redispatched by the next consumer, and the next.",
        tests=("tests/protocol/test_flows.py",),
    ),
    Mutant(
        name="pending-not-sent-again",
        file="idemp/protocol.py",
        old="for item in stored if everything or item.output.id in sent]",
        new="for item in stored if everything]",
        breaks="A redelivery is acked though outputs without a confirm were not sent again.",
        tests=(f"{_REDISPATCH}::test_redispatched_copy_whose_outputs_wait_sends_those",),
    ),
    Mutant(
        name="mark-on-publish",
        file="idemp/dispatch.py",
        old="confirmed = tuple(output.id for output, answer in zip(outputs, answers, strict=True) if answer is None)",
        new="confirmed = tuple(output.id for output in outputs)",
        breaks="Outputs are recorded as dispatched though the broker refused them: nobody sends them again.",
        tests=(f"{_OUTPUTS}::test_exactly_the_unconfirmed_stay_pending",),
    ),
    Mutant(
        name="publisher-error-taken-for-confirm",
        file="idemp/dispatch.py",
        old='return [Refusal("unsendable", f"never sent: {described(error)}")]',
        new="return [None]",
        breaks="An output on which the publisher fails is recorded as dispatched.",
        tests=(
            "tests/test_found_by_breaking.py::test_one_output_that_a_publisher_cannot_send_does_not_hold_up_the_others",
        ),
    ),
    Mutant(
        name="unrecorded-confirms-forgotten",
        file="idemp/dispatch.py",
        old="return output_id in self._confirmed",
        new="return False",
        breaks="What is confirmed but not yet recorded counts as pending: a redispatched copy ripples after all.",
        tests=(f"{_REDISPATCH}::test_redispatched_copy_does_not_ripple",),
    ),
    Mutant(
        name="marks-dropped-in-an-outage",
        file="idemp/dispatch.py",
        old="del self._marks[:-MAX_UNRECORDED]",
        new="self._marks.clear()",
        breaks="Confirms that could not be recorded at once are forgotten, and a relay sends all of those outputs again.",
        tests=(f"{_OUTPUTS}::test_confirms_that_cannot_be_recorded_are_kept",),
    ),
    Mutant(
        name="first-of-two-events-taken",
        file="idemp/cloudevents.py",
        old="for other, repeated in others:",
        new="for other, repeated in others[:0]:",
        breaks="A message with the attributes of two CloudEvents is one of them, and nobody is told which.",
        tests=("tests/test_cloudevents.py::test_two_sets_of_attributes_that_disagree",),
    ),
)
