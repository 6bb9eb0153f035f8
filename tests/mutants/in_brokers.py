"""Faults in publishing, receiving and settling: RabbitMQ, and the broker in memory."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CONFIRMS: Final = "tests/broker/kombu/test_confirms.py"
_CONSUMING: Final = "tests/broker/kombu/test_consuming.py"
_CONFORMANCE: Final = "tests/broker/kombu/test_conformance.py::TestRabbitMQ"
_MEMORY: Final = "tests/broker/test_memory.py"
_OUTSTANDING: Final = "tests/broker/kombu/test_outstanding.py"
_PUBLISHER: Final = "tests/broker/kombu/test_publisher.py"
_SETTLER: Final = "tests/broker/kombu/test_settler.py"

IN_BROKERS: Final = (
    # Publishing
    Mutant(
        name="returned-taken-for-confirmed",
        file="idemp/broker/kombu/confirms.py",
        old='None if reason is None else Refusal("returned", f"{reason}: {where}")',
        new="None",
        breaks="What no queue takes counts as sent, and is gone.",
        tests=(_CONFIRMS,),
    ),
    Mutant(
        name="nack-taken-for-confirm",
        file="idemp/broker/kombu/confirms.py",
        old='self._answered(key, Refusal("nacked", f"the broker refused it, {where} may be full"))',
        new="self._answered(key, None)",
        breaks="What a full queue refuses counts as sent, and is gone.",
        tests=(_CONFIRMS,),
    ),
    Mutant(
        name="one-confirm-for-all-before",
        file="idemp/broker/kombu/confirms.py",
        old="        if not multiple:\n",
        new="        if not tag:\n",
        breaks="The confirm of one message counts for all that were sent before it.",
        tests=(_CONFIRMS,),
    ),
    Mutant(
        name="return-blames-the-latest",
        file="idemp/broker/kombu/confirms.py",
        old="for tag, (_, parcel) in self._pending.items():",
        new="for tag, (_, parcel) in reversed(self._pending.items()):",
        breaks="Of two messages to one address the wrong one counts as returned.",
        tests=(f"{_CONFIRMS}::test_of_equal_messages_the_first_is_the_returned_one",),
    ),
    Mutant(
        name="timeout-taken-for-confirm",
        file="idemp/broker/kombu/publisher.py",
        old='refusal = Refusal("timeout", "no confirm in time")',
        new="refusal = None",
        breaks="What the broker never answered counts as sent.",
        tests=(f"{_PUBLISHER}::test_frozen_broker_is_a_timeout",),
    ),
    Mutant(
        name="blocked-taken-for-confirm",
        file="idemp/broker/kombu/publisher.py",
        old='refusal = Refusal("blocked", "the broker takes no messages for now (memory or disk alarm)")',
        new="refusal = None",
        breaks="What a broker in an alarm did not take counts as sent.",
        tests=("tests/faults/test_refusals.py::test_alarm",),
    ),
    Mutant(
        name="one-guilty-for-all",
        file="idemp/broker/kombu/publisher.py",
        old="guilty = call.blame(error, [index for _, index in in_flight] if alone else [])",
        new='guilty = call.refuse(call.waiting, Refusal("unsendable", said(error))) or in_flight',
        breaks="One message that the broker won't have makes all others in flight unsendable.",
        tests=(f"{_PUBLISHER}::test_refused_message_among_good_ones_is_found",),
    ),
    Mutant(
        name="lost-sendings-forgotten",
        file="idemp/broker/kombu/publisher.py",
        old="if call.is_answered or call.sent_on is self._link or call.left < _WORTH_IT:",
        new="if call.is_answered or call.sent_on is not None:",
        breaks="What was on its way when the connection was lost is waited for in vain, though it could be sent again.",
        tests=("tests/broker/kombu/test_sending.py::test_a_lost_connection_is_made_up_for",),
    ),
    Mutant(
        name="answers-of-others",
        file="idemp/broker/kombu/publisher.py",
        old="    call, index = place\n",
        new="    call, index = place[0], 0\n",
        breaks="The answer to one of several outputs is taken for the answer to another.",
        tests=("tests/broker/kombu/test_sending.py::test_what_was_sent_is_answered_by_its_number",),
    ),
    # Receiving and settling
    Mutant(
        name="parked-though-the-copy-was-refused",
        file="idemp/broker/kombu/outstanding.py",
        old="            copy, _ = self._waiting.pop(tag)\n            if refusal is None:",
        new='            copy, _ = self._waiting.pop(tag)\n            if refusal is None or refusal.kind == "nacked":',
        breaks="A message is acked though its copy, for a retry or the dead-letter queue, was refused: it is lost.",
        tests=(f"{_OUTSTANDING}::test_refused_copy_gives_the_message_back_after_a_pause",),
    ),
    Mutant(
        name="parked-without-an-answer",
        file="idemp/broker/kombu/outstanding.py",
        old="            self._post.give_up()\n            self._take(self._post.answers())",
        new=(
            "            self._post.give_up()\n"
            "            self._confirmed += self._post.answers()\n"
            "            self._waiting.clear()"
        ),
        breaks="A message is acked though nobody said that its copy arrived.",
        tests=(f"{_OUTSTANDING}::test_copy_without_answer_is_refused_in_time",),
    ),
    Mutant(
        name="wrapped-parked-without-a-confirm",
        file="idemp/broker/kombu/settling.py",
        old="        if refusal is not None:\n            raise BrokerUnavailable(",
        new="        if refusal is not None and not copy:\n            raise BrokerUnavailable(",
        breaks="A consumer of the user's own acks a message though its copy was refused: it is lost.",
        tests=(f"{_SETTLER}::test_copy_without_a_confirm_is_no_ack",),
    ),
    Mutant(
        name="copies-that-nobody-takes",
        file="idemp/broker/kombu/settling.py",
        old='{**properties, "application_headers": dict(headers)}, mandatory=True)',
        new='{**properties, "application_headers": dict(headers)}, mandatory=False)',
        breaks="Where a delay tier or dead-letter queue is missing, retried and parked messages are lost.",
        tests=(f"{_CONSUMING}::test_tier_that_is_missing_is_declared",),
    ),
    Mutant(
        name="ack-takes-those-in-hand",
        file="idemp/broker/kombu/consuming.py",
        old="held = [*but_not, *self._unsettled, *self._outstanding.tags]",
        new="held = [*but_not, *self._outstanding.tags]",
        breaks="The ack of a retried message acks earlier ones, too, whose handlers still run.",
        tests=(f"{_OUTSTANDING}::test_ack_of_one_does_not_take_an_earlier_one_that_is_still_in_hand",),
    ),
    Mutant(
        name="ack-takes-refused-ones",
        file="idemp/broker/kombu/consuming.py",
        old="held = [*but_not, *self._unsettled, *self._outstanding.tags]",
        new="held = [*self._unsettled]",
        breaks="The ack of a retried message acks earlier ones, too, whose copies have no confirm.",
        tests=(
            f"{_OUTSTANDING}::test_ack_of_one_does_not_take_an_earlier_one_that_was_refused",
            f"{_OUTSTANDING}::test_confirmed_and_refused_copies_are_kept_apart",
        ),
    ),
    Mutant(
        name="retry-without-delay",
        file="idemp/broker/kombu/settling.py",
        old="return replace(encoded(hop.name, arrived, headers), hop=hop)",
        new="return replace(encoded(queue, arrived, headers), hop=hop)",
        breaks="A message that fails comes back at once, until its attempts are used up within a second.",
        tests=(f"{_CONSUMING}::test_retry_comes_back_after_its_delay",),
    ),
    Mutant(
        name="retry-blocks-the-queue",
        file="idemp/broker/kombu/consuming.py",
        old="            self._send_copy(delivery, settlement)\n",
        new=(
            "            time.sleep(settlement.delay.total_seconds() if isinstance(settlement, Retry) else 0)\n"
            "            self._send_copy(delivery, settlement)\n"
        ),
        breaks="Nothing else is handled while a failed message waits for its retry.",
        tests=(f"{_CONSUMING}::test_a_retry_does_not_hold_up_what_is_behind_it",),
    ),
    Mutant(
        name="uncounted-retries-count",
        file="idemp/broker/kombu/settling.py",
        old="        if settlement.counted:\n",
        new="        if settlement:\n",
        breaks="Each wait for a twin or for the broker uses up an attempt.",
        tests=(f"{_CONFORMANCE}::test_attempts_add_up",),
    ),
    Mutant(
        name="redelivery-unseen",
        file="idemp/broker/kombu/consuming.py",
        old='redelivered = bool(message.delivery_info["redelivered"])',
        new="redelivered = False",
        breaks="A message that kills its worker is a first delivery each time, and is never parked.",
        tests=(f"{_CONFORMANCE}::test_unsettled_returns_after_close",),
    ),
    Mutant(
        name="given-back-is-dropped",
        file="idemp/broker/kombu/consuming.py",
        old="self._link.channel.basic_reject(tag, requeue=True)",
        new="self._link.channel.basic_reject(tag, requeue=False)",
        breaks="What a stopping worker gives back goes to the dead-letter queue.",
        tests=(f"{_CONFORMANCE}::test_release_comes_back_at_once",),
    ),
    Mutant(
        name="taken-without-accepting",
        file="idemp/broker/kombu/taking.py",
        old="for index in indexes:\n                self._link.channel.basic_ack",
        new="for index in range(len(self._tags)):\n                self._link.channel.basic_ack",
        breaks="Replaying one dead letter drops all others that were looked at.",
        tests=(f"{_CONFORMANCE}::test_take_removes_what_is_accepted",),
    ),
    Mutant(
        name="memory-acks-on-receipt",
        file="idemp/broker/memory.py",
        old="self._store.settle(queue, entry, Release())\n            self._held",
        new="self._store.settle(queue, entry, Ack())\n            self._held",
        breaks="What a process that ends has in its hands is lost.",
        tests=(f"{_MEMORY}::TestInMemoryBroker::test_unsettled_returns_after_close",),
    ),
    Mutant(
        name="memory-retry-without-delay",
        file="idemp/broker/memory.py",
        old="queue.put_delayed(entry, self.now() + settlement.delay.total_seconds())",
        new="queue.put(entry)",
        breaks="A retried message comes back at once, before all others.",
        tests=(f"{_MEMORY}::TestInMemoryBroker::test_retry_waits_and_lets_others_pass",),
    ),
    Mutant(
        name="memory-swallows-unroutable",
        file="idemp/broker/memory.py",
        old="if not queues and output.mandatory:",
        new="if not queues and not output.mandatory:",
        breaks="What no queue takes counts as sent.",
        tests=(f"{_MEMORY}::TestInMemoryBroker::test_unroutable_mandatory_is_returned_and_others_go",),
    ),
    Mutant(
        name="missing-queue-taken-for-an-outage",
        file="idemp/broker/kombu/broker.py",
        old="            if _is_refusal(error.__cause__):",
        new="            if isinstance(error.__cause__, AccessRefused | NotAllowed):",
        breaks="A spooler whose queue was deleted waits for it for ever.",
        tests=("tests/broker/kombu/test_consuming.py::test_missing_queue_is_no_outage",),
    ),
    Mutant(
        name="node-that-is-down-taken-for-a-missing-queue",
        file="idemp/broker/kombu/broker.py",
        old='return "is down or inaccessible" not in said(error)',
        new="return True",
        breaks="A spooler ends while the node of its queue restarts.",
        tests=("tests/broker/kombu/test_consuming.py::test_queue_whose_node_is_down_is_an_outage",),
    ),
)
