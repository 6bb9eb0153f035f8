"""A suite is worth what it finds: each test of the conformance suites fails with an adapter that breaks its promise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import delete, update

from idemp.errors import Unavailable
from idemp.messages import Refusal
from idemp.ports import ClaimAnswer, Kind, Verdict
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.testing import BrokerConformance, MemoryBroker, SchedulerConformance, StoreConformance
from tests.world import unreachable

Override = Callable[..., Any]


class Broken:
    """An adapter of which some methods are replaced: each replacement gets the adapter, its method and the arguments."""

    def __init__(self, port: Any, overrides: dict[str, Override]) -> None:
        self._port, self._overrides = port, overrides

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._port, name)
        if name in ("receiver", "publisher"):
            return lambda *arguments: Broken(value(*arguments), self._overrides)
        if (override := self._overrides.get(name)) is None:
            return value
        return lambda *arguments, **options: override(self._port, value, *arguments, **options)


# What is wrong with a store


def reverses_outputs(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return [replace(answer, outputs=list(answer.outputs)[::-1]) for answer in call(tx, claims)]


def takes_no_outputs_for_new(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return [
        each if each.outputs or each.verdict is not Verdict.DUPLICATE else ClaimAnswer(Verdict.CLAIMED)
        for each in call(tx, claims)
    ]


def sends_results(port: Any, call: Any, tx: Any, handled: Any) -> None:
    call(tx, [replace(each, outputs=[replace(output, kind="send") for output in each.outputs]) for each in handled])


def drops_empty_messages(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return [replace(answer, outputs=[each for each in answer.outputs if each.body]) for answer in call(tx, claims)]


def commits_the_claim_at_once(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    answers = call(tx, claims)
    port.finish(tx, [])
    return answers


def knows_no_grace(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return call(tx, [replace(each, resends="pending") for each in claims])


def takes_any_message_for_a_duplicate(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return [replace(each, verdict=Verdict.DUPLICATE) if each.verdict is Verdict.CONFLICT else each for each in call(tx, claims)]


def claims_only_the_first(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return call(tx, claims[:1])


def ignores_former_claims(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return call(tx, [replace(each, former=None) for each in claims])


def never_says_late(port: Any, call: Any, tx: Any, claims: Any) -> Any:
    return [replace(each, late=False) for each in call(tx, claims)]


def stores_no_identities(port: Any, call: Any, consumer: Any, types: Any, identities: Any, **options: Any) -> None:
    call(consumer, types, [], **options)


def forgets_former_identities(port: Any, call: Any, consumer: Any, types: Any, identities: Any, **options: Any) -> None:
    call(consumer, types, [replace(each, former=None) for each in identities], **options)


def compares_no_types(port: Any, call: Any, consumer: Any, types: Any, identities: Any, **options: Any) -> None:
    call(consumer, types, identities)


def drops_delayed_outputs(port: Any, call: Any, tx: Any, handled: Any) -> None:
    call(tx, [replace(each, outputs=[output for output in each.outputs if output.delay is None]) for each in handled])


def reads_nothing_back(port: Any, call: Any, claims: Any) -> Any:
    return [False] * len(claims)


# What is wrong with a scheduler


def confirms_nothing(port: Any, call: Any, ids: Any) -> None:
    pass


def confirms_a_thousand(port: Any, call: Any, ids: Any) -> None:
    call(ids[:1000])


def leases_for_no_time(port: Any, call: Any, limit: int, lease: float) -> Any:
    return call(limit, 0.0)


def counts_copies(port: Any, call: Any, refusals: Any) -> None:
    for _ in range(2):
        with port.database.short() as connection:
            connection.execute(update(port.database.tables.pending).values(counts_at=None))
        call(refusals)


def blames_every_output(port: Any, call: Any, refusals: Any) -> None:
    call({id: Refusal(each.reason, own=True) for id, each in refusals.items()})


def sees_no_step(port: Any, call: Any, *arguments: Any, **options: Any) -> None:
    port._begun = True
    with port.database.short(queues=True) as connection:
        connection.execute(delete(port.database.tables.worker))
    call(*arguments, **options)


def purges_nothing(port: Any, call: Any) -> int:
    return 0


def purges_pending_outputs(port: Any, call: Any) -> int:
    with port.database.short() as connection:
        connection.execute(delete(port.database.tables.pending))
    found: int = call()
    return found


def settles(change: Callable[[Any], Any]) -> Override:
    """Return a settle that changes what has failed."""

    def settle(port: Any, call: Any, failed: Any, done: Any) -> None:
        call([change(each) for each in failed], done)

    return settle


def keeps_done_rows(port: Any, call: Any, failed: Any, done: Any) -> None:
    call(failed, [])


def revives_dead_letters(port: Any, call: Any, failed: Any, done: Any) -> None:
    message = port.database.tables.message
    with port.database.short(queues=True) as connection:
        connection.execute(update(message).where(message.c.due_at.is_(None)).values(due_at=0.0))
    call(failed, done)


def holds_all_deaths_against_it(port: Any, call: Any, row: Any) -> None: ...


def deletes_rows_of_others(port: Any, call: Any, failed: Any, done: Any) -> None:
    message = port.database.tables.message
    with port.database.short(queues=True) as connection:
        connection.execute(delete(message).where(message.c.id.in_([row.id for row in done])))
    call(failed, [])


def leases_suspects_in_company(port: Any, call: Any, queue: str, limit: int) -> Any:
    rows, suspects = call(queue, limit)
    return [*rows, *filter(None, [port.lease_suspect(queue)])], suspects


def renews_nothing(port: Any, call: Any, role: str, **options: Any) -> None:
    pass


# What is wrong with a broker


class Hasty(BrokerConformance):
    """The suite of brokers, which does not wait for long: what a broken adapter does not do, it never does."""

    lease, patience, pause = 30.0, 0.3, 0.05


def drops_headers(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    return call([replace(each, properties=each.properties | {"headers": {}}) for each in outputs], timeout)


def strips_bodies(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    return call([replace(each, body=each.body.strip()) for each in outputs], timeout)


def replaces_what_is_no_text(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    return call([replace(each, body=each.body.decode("utf-8", "replace").encode()) for each in outputs], timeout)


def takes_length_for_an_outage(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    long = [len(each.body) > 16_000_000 for each in outputs]
    return [Refusal("an outage") if each else answer for each, answer in zip(long, call(outputs, timeout), strict=True)]


def refuses_neighbours_of_what_is_no_text(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    try:
        [each.body.decode() for each in outputs]
    except ValueError:
        return [Refusal("no text", own=True) for _ in outputs]
    return call(outputs, timeout)


def blames_outputs(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    return [each and replace(each, own=True) for each in call(outputs, timeout)]


def sends_twice(port: Any, call: Any, outputs: Any) -> None:
    port.publish(outputs, 1.0)


def binds_nothing(port: Any, call: Any, queue: str, types: Any) -> Any:
    return call(queue, [])


def unbinds_others(port: Any, call: Any, queue: str, types: Any) -> Any:
    port.bindings.clear()
    return call(queue, types)


def empties_queues(port: Any, call: Any, queue: str, types: Any) -> Any:
    if queue in port.queues:
        port.queues[queue].clear()
    return call(queue, types)


def makes_one_queue(port: Any, call: Any, queue: str, types: Any) -> Any:
    call(queue, types)
    del port.queues[f"{queue}.unstorable"]
    return []


def confirms_what_no_queue_takes(port: Any, call: Any, outputs: Any, timeout: float) -> Any:
    call(outputs, timeout)
    return [None for _ in outputs]


def flags_nothing(port: Any, call: Any, limit: int, timeout: float) -> Any:
    return [replace(each, redelivered=False) for each in call(limit, timeout)]


def acks_nothing(port: Any, call: Any, deliveries: Any) -> None: ...


def settles_redelivered_messages_together(port: Any, call: Any, deliveries: Any) -> None:
    call(deliveries)
    if any(each.redelivered for each in deliveries):
        port.unacknowledged.clear()
        port._broker.queues[port._queue].clear()


def stays_lost(port: Any, call: Any, limit: int, timeout: float) -> Any:
    if hasattr(port, "connected") and not port.unacknowledged:
        time.sleep(timeout)
        raise Unavailable("the connection was lost")
    port.connected = True
    return call(limit, timeout)


def keeps_nothing_alive(port: Any, call: Any) -> None: ...


def ignores_prefetch(port: Any, call: Any, limit: int, timeout: float) -> Any:
    port._prefetch = 1000
    return call(limit, timeout)


def drops_what_it_has(port: Any, call: Any) -> None:
    port.unacknowledged.clear()
    call()


def keeps_what_it_has(port: Any, call: Any) -> None: ...


def flags_what_it_gives_back(port: Any, call: Any) -> None:
    port.give_back(delivered=True)


def delivers_to_all(port: Any, call: Any, limit: int, timeout: float) -> Any:
    found = call(limit, timeout)
    port._broker.queues[port._queue].extend(port.unacknowledged.values())
    return found


def acks_by_place(port: Any, call: Any, deliveries: Any) -> None:
    for receiver in port._broker.receivers:
        for each in deliveries:
            receiver.unacknowledged.pop(each.tag, None)


def wakes_nobody(port: Any, call: Any) -> None:
    pass


def keeps_no_order(port: Any, call: Any, limit: int, timeout: float) -> Any:
    return call(limit, timeout)[::-1]


def breaks(test: str, method: str, override: Override, **arguments: Any) -> tuple[str, str, Override, dict[str, Any]]:
    """Say what breaks a test, and the arguments of one that has parameters."""
    return f"test_{test}", method, override, arguments


CASES = [
    breaks("a_redelivery_finds_the_outputs_in_order", "claim", reverses_outputs),
    breaks("a_handling_without_outputs_is_found", "claim", takes_no_outputs_for_new),
    breaks("a_result_goes_to_duplicates_and_to_no_queue", "finish", sends_results, resends="always"),
    breaks("an_empty_message_of_another_library_is_kept", "claim", drops_empty_messages),
    breaks("what_is_not_committed_is_gone", "claim", commits_the_claim_at_once),
    breaks("outputs_in_their_head_start_belong_to_their_own_worker", "claim", knows_no_grace),
    breaks(
        "only_the_same_message_is_a_duplicate",
        "claim",
        takes_any_message_for_a_duplicate,
        changes={"type": "shop.Order"},
        verdict=Verdict.CONFLICT,
    ),
    breaks("what_is_committed_is_read_back", "read_back", reads_nothing_back),
    breaks("several_claims_share_a_transaction", "claim", claims_only_the_first),
    breaks("a_second_claimer_waits_or_is_told", "claim", commits_the_claim_at_once, commits=False),
    breaks("a_changed_key_is_refused", "register", stores_no_identities),
    breaks("a_former_identity_is_claimed_beside_the_present_one", "claim", ignores_former_claims),
    breaks("a_former_key_is_named_until_its_claims_are_gone", "register", forgets_former_identities),
    breaks("one_former_identity_is_named", "register", stores_no_identities),
    breaks("claims_of_a_former_identity_are_kept_as_long_as_present_ones", "register", forgets_former_identities),
    breaks("a_renamed_type_is_refused_or_named", "register", compares_no_types),
    breaks("a_type_that_is_not_opted_in_any_more_is_refused", "register", compares_no_types),
    breaks("a_store_that_works_is_probed_and_unchanged", "probe", lambda port, call: False),
    breaks("errors_of_others_are_not_classified", "classify", lambda port, call, error: Kind.OTHER),
    breaks("a_confirmed_output_is_sent_again_only_on_demand", "confirm", confirms_nothing),
    breaks("many_outputs_are_confirmed_at_once", "confirm", confirms_a_thousand),
    breaks("outputs_are_leased_when_they_are_due", "lease_outputs", leases_for_no_time),
    breaks("two_relays_take_disjoint_outputs", "lease_outputs", leases_for_no_time),
    breaks("a_delayed_output_without_claim_is_kept_until_it_is_sent", "finish", drops_delayed_outputs),
    breaks("an_output_whose_queue_comes_late_is_not_in_quarantine", "refuse", counts_copies),
    breaks("only_their_own_fault_brings_outputs_into_quarantine", "refuse", blames_every_output, own=False),
    breaks("nothing_waits_for_longer_than_its_delay_when_the_clock_is_set_back", "beat", sees_no_step),
    breaks("claims_are_kept_for_the_window_of_their_type", "purge", purges_nothing),
    breaks("claims_with_pending_outputs_stay_and_hold_up_no_others", "purge", purges_pending_outputs),
    breaks("a_message_is_late_if_claims_of_its_age_were_deleted", "claim", never_says_late),
    breaks("a_retry_is_leased_when_it_is_due", "settle", settles(lambda each: replace(each, delay=0.0))),
    breaks("a_dead_letter_is_not_leased", "settle", settles(lambda each: replace(each, delay=1.0))),
    breaks("a_row_that_is_done_is_gone", "settle", keeps_done_rows),
    breaks("copies_of_a_message_make_one_row", "settle", settles(lambda each: replace(each, identity=None))),
    breaks("messages_without_an_identity_are_not_copies", "settle", settles(lambda each: replace(each, identity=bytes(16)))),
    breaks("a_row_that_was_moved_meets_its_copies_when_it_fails", "settle", settles(lambda each: replace(each, identity=None))),
    breaks("a_copy_counts_on_a_dead_letter_and_does_not_revive_it", "settle", revives_dead_letters),
    breaks("a_late_settle_changes_nothing", "settle", deletes_rows_of_others),
    breaks(
        "a_suspect_is_leased_alone",
        "lease_messages",
        leases_suspects_in_company,
        story="moved, holder is gone",
        deaths=2,
        alone=True,
    ),
    breaks("only_a_death_that_a_suspect_dies_alone_is_held_against_it", "accompany", holds_all_deaths_against_it, alone=False),
    breaks("a_heartbeat_renews_leases", "beat", renews_nothing),
    breaks("a_relay_is_alive_for_some_seconds", "relay_alive", lambda port, call: True),
    breaks("messages_are_delivered_as_they_were_sent", "publish", drops_headers),
    breaks("messages_are_delivered_as_they_were_sent", "publish", strips_bodies),
    breaks("an_unusual_body_is_taken_whole_or_refused_as_its_own_fault", "publish", replaces_what_is_no_text),
    breaks("an_unusual_body_is_taken_whole_or_refused_as_its_own_fault", "publish", takes_length_for_an_outage),
    breaks("an_unusual_body_is_taken_whole_or_refused_as_its_own_fault", "publish", refuses_neighbours_of_what_is_no_text),
    breaks("what_no_queue_takes_is_its_own_fault_and_holds_nobody_up", "publish", confirms_what_no_queue_takes),
    breaks("an_outage_is_no_fault_of_an_output", "publish", blames_outputs),
    breaks("messages_that_were_begun_to_be_sent_are_published_once", "send", sends_twice),
    breaks("a_published_message_reaches_the_queues_of_its_type", "declare", binds_nothing),
    breaks("a_queue_that_is_declared_again_keeps_its_messages_and_bindings", "declare", unbinds_others),
    breaks("a_queue_that_is_declared_again_keeps_its_messages_and_bindings", "declare", empties_queues),
    breaks("there_is_a_queue_for_what_cannot_be_stored", "declare", makes_one_queue),
    breaks("acknowledged_messages_are_gone_and_others_come_back_flagged", "receive", flags_nothing),
    breaks("acknowledged_messages_are_gone_and_others_come_back_flagged", "ack", acks_nothing),
    breaks("redelivered_messages_are_settled_one_by_one", "ack", settles_redelivered_messages_together),
    breaks("a_receiver_goes_on_after_its_connection_was_lost", "receive", stays_lost),
    breaks("messages_are_held_while_they_are_kept_alive", "keep_alive", keeps_nothing_alive),
    breaks("a_receiver_holds_no_more_messages_than_its_prefetch", "receive", ignores_prefetch),
    breaks("a_closed_receiver_gives_back_its_messages_at_once", "close", drops_what_it_has),
    breaks("a_closed_receiver_gives_back_its_messages_at_once", "close", keeps_what_it_has),
    breaks("a_closed_receiver_gives_back_its_messages_at_once", "close", flags_what_it_gives_back),
    breaks("two_receivers_take_disjoint_messages", "receive", delivers_to_all),
    breaks("a_late_acknowledgement_changes_nothing", "ack", acks_by_place),
    breaks("a_waiting_receiver_is_woken", "wake", wakes_nobody),
    breaks("order_is_kept", "receive", keeps_no_order),
]
SUITES = (StoreConformance, SchedulerConformance, Hasty)
ON_TABLES = ("an_outage_is_no_fault_of_an_output", "messages_are_held_while_they_are_kept_alive")
"""Tests of what a broker in memory has not: leases, and a server."""


@pytest.mark.parametrize(
    ("test", "method", "override", "arguments"),
    CASES,
    ids=lambda value: str(getattr(value, "__name__", "")),
)
def test_a_broken_adapter_fails(
    database: Database, age: Any, test: str, method: str, override: Override, arguments: dict[str, Any]
) -> None:
    broker, on_tables = MemoryBroker(), test.removeprefix("test_") in ON_TABLES

    def open_store(worker: str) -> Any:
        store = SqlStore(database, worker)
        for consumer in ("billing", "shop"):
            store.register(consumer, ["shop.Pay", "shop.Order"], [])
        return Broken(store, {method: override})

    fixtures = {
        "open_store": open_store,
        "open_scheduler": lambda worker: Broken(SqlScheduler(database, worker, 30.0), {method: override}),
        "open_broker": lambda worker: Broken(SqlBroker(database, worker) if on_tables else broker, {method: override}),
        "lose": broker.lose,
        "outage": partial(unreachable, database),
        "age": age,
    }
    suite = next(each for each in SUITES if hasattr(each, test))
    function = getattr(suite(), test)
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    given = {name: arguments[name] if name in arguments else fixtures[name] for name in names}
    with pytest.raises(AssertionError if suite is Hasty else (Exception, pytest.fail.Exception)):
        function(**given)


def test_each_promise_has_its_broken_adapter() -> None:
    promises = {name for suite in SUITES for name in dir(suite) if name.startswith("test_")}
    assert promises == {test for test, *_ in CASES}
