"""Faults in what keeps the order of messages."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_UNIT: Final = "tests/test_ordering.py"
_ANY_FATE: Final = f"{_UNIT}::test_each_key_keeps_its_order"
_RECEIVER: Final = "tests/broker/kombu/test_keeping_order.py"
_CONSUMING: Final = "idemp/broker/kombu/consuming.py"

IN_ORDERING: Final = (
    Mutant(
        name="order-retries-by-a-copy",
        file="idemp/consuming.py",
        old="if arrival.order is not None and isinstance(settlement, Retry) and outcome",
        new="if arrival.order is None and isinstance(settlement, Retry) and outcome",
        breaks="A message that failed waits in a delay tier, and those of its key overtake it.",
        tests=(_ANY_FATE,),
    ),
    Mutant(
        name="order-nobody-joins-a-line",
        file="idemp/consuming.py",
        old=" and not self._lines.join(arrival)]",
        new="]",
        breaks="A message that failed waits in the hand, and those of its key overtake it all the same.",
        tests=(_ANY_FATE,),
    ),
    Mutant(
        name="order-failed-ones-to-the-end-of-the-line",
        file="idemp/ordering.py",
        old="        line.waiting.appendleft(arrival)",
        new="        line.waiting.append(arrival)",
        breaks="A message that fails twice is overtaken by those that wait behind it.",
        tests=(_ANY_FATE,),
    ),
    Mutant(
        name="order-line-in-no-order",
        file="idemp/ordering.py",
        old="        line.waiting.append(arrival)",
        new="        line.waiting.appendleft(arrival)",
        breaks="What arrives behind a message that failed overtakes it, and all that wait.",
        tests=(_ANY_FATE,),
    ),
    Mutant(
        name="order-a-line-that-outlives-its-connection",
        file="idemp/consuming.py",
        old="            for arrival in self._lines.drop():\n                arrival.handling.abandon()\n",
        new="",
        breaks="What a lost connection took back is handled from the hand as well, and can't be settled.",
        tests=(f"{_UNIT}::test_what_is_held_goes_with_its_connection",),
    ),
    Mutant(
        name="order-all-wait-for-one",
        file="idemp/ordering.py",
        old="        line = self._lines.get(arrival.order) if arrival.order is not None else None",
        new="        line = next(iter(self._lines.values()), None)",
        breaks="One message that fails holds back all others, whatever their keys.",
        tests=(f"{_UNIT}::test_a_failing_key_holds_back_no_other",),
    ),
    Mutant(
        name="order-never-let-go",
        file="idemp/ordering.py",
        old="        if not line.waiting:\n            del self._lines[key]",
        new="        if line.waiting:\n            del self._lines[key]",
        breaks="Those that wait behind a message are forgotten when it is handled: unsettled, and never handled.",
        tests=(_ANY_FATE,),
    ),
    Mutant(
        name="order-attempts-without-end",
        file="idemp/ordering.py",
        old="attempt = (retry.attempt or delivery.attempt + 1) if retry.counted else delivery.attempt",
        new="attempt = delivery.attempt",
        breaks="A message that always fails is never parked, and holds back its key for ever.",
        tests=(f"{_UNIT}::test_attempts_are_counted_in_the_hand",),
    ),
    Mutant(
        name="order-by-type",
        file="idemp/identity.py",
        old="        return encode(texts)",
        new="        return encode([message_type, *texts])",
        breaks="Messages of two types about one thing overtake each other.",
        tests=(f"{_UNIT}::test_one_order_for_all_types",),
    ),
    Mutant(
        name="order-anywhere",
        file="idemp/startup.py",
        old="    if ordered and not guarantees.single_active:",
        new="    if ordered and not guarantees.at_least_once:",
        breaks="An order is promised where several consumers have messages of a queue in hand.",
        tests=(f"{_UNIT}::test_brokers_that_hand_messages_to_several",),
    ),
    Mutant(
        name="order-of-several-consumers",
        file="idemp/broker/kombu/topology.py",
        old='{"x-single-active-consumer": True} if single_active else {}',
        new='{"x-single-active-consumer": True} if not single_active else {}',
        breaks="Workers handle messages of one key at the same time.",
        tests=(f"{_RECEIVER}::test_the_next_one_begins_where_it_ended",),
    ),
    Mutant(
        name="order-given-back-by-cancelling",
        file=_CONSUMING,
        old="        if self._keeps_order or not self._link.lock.acquire(timeout=_BRIEFLY):",
        new="        if not self._link.lock.acquire(timeout=_BRIEFLY):",
        breaks="A worker that is told to end, and still runs a handler, gives later messages to the next one.",
        tests=(f"{_RECEIVER}::test_the_next_one_begins_where_it_ended",),
    ),
    Mutant(
        name="order-given-back-one-by-one",
        file=_CONSUMING,
        old="        if isinstance(settlement, Release) and self._keeps_order:",
        new="        if isinstance(settlement, Release) and not self._keeps_order:",
        breaks="What is given back comes behind all that came after it.",
        tests=(f"{_RECEIVER}::test_the_next_one_begins_where_it_ended",),
    ),
    Mutant(
        name="order-refused-copies-given-back",
        file=_CONSUMING,
        old="                if refused and self._keeps_order:",
        new="                if refused and not self._keeps_order:",
        breaks="A message that could not be parked comes again behind all that came after it.",
        tests=(f"{_RECEIVER}::test_a_refused_copy_costs_the_connection",),
    ),
    Mutant(
        name="order-parked-perhaps",
        file=_CONSUMING,
        old="            make_sure_of_acks(self._link, self._queues, self._settle_timeout)\n\n    def keep_alive",
        new="            pass\n\n    def keep_alive",
        breaks="A message whose successors were handled, since it was parked, comes again, and is handled after them.",
        tests=(f"{_RECEIVER}::test_what_ended_cannot_come_again",),
    ),
    Mutant(
        name="order-by-any-prefetch",
        file="idemp/app.py",
        old="            return ORDERED_PREFETCH\n",
        new="            return self.settings.prefetch\n",
        breaks="A worker takes less than its predecessor gave back, and when it ends the oldest come last.",
        tests=("tests/consuming/test_order.py::test_whatever_the_prefetch",),
    ),
    Mutant(
        name="order-forgotten-by-failures-to-decode",
        file="idemp/protocol.py",
        old="        handling.order = self._order\n",
        new="        handling.order = self._order if handling.member else None\n",
        breaks="A message whose key can't be read for now is copied to a delay tier, and those of its key overtake it.",
        tests=(f"{_UNIT}::test_who_has_no_id_for_now_is_waited_for",),
    ),
    Mutant(
        name="order-of-one-message-in-two-queues",
        file="idemp/startup.py",
        old="        if len(subscribed) > 1:",
        new="        if len(subscribed) > 2:",
        breaks="Partitions that all get what is published start, and their order is nobody's.",
        tests=(f"{_UNIT}::test_partitions_that_all_get_what_is_published",),
    ),
    Mutant(
        name="order-attempts-of-one-connection",
        file="idemp/consuming.py",
        old="                more = self._lines.recalled(more)\n",
        new="",
        breaks="A message whose attempts take longer than a connection lasts fails for ever, and holds back its key.",
        tests=(f"{_UNIT}::test_attempts_outlive_connections",),
    ),
)
