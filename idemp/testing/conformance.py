"""Conformance suites of stores and schedulers. Subclass one in a test module and give its fixtures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from idemp.errors import ConfigurationError
from idemp.messages import Delivery, Output, Refusal
from idemp.ports import Claim, ClaimAnswer, Handled, Identity, NewRow, Scheduler, Store, Verdict

__all__ = ["SchedulerConformance", "StoreConformance"]

Open = Callable[[str], Any]
"""Opens an adapter on the same data under the name of a worker."""
Age = Callable[[float], None]
"""Lets a number of seconds pass."""

CONSUMER = "billing"
TYPE = "shop.Pay"
WINDOW = 604_800.0


def claim(**changes: Any) -> Claim:
    """Return a claim of a new id.

    Example:
        >>> claim(consumer="shop").consumer
        'shop'
    """
    key = uuid4()
    return replace(Claim(CONSUMER, TYPE, key, f"s:{key}", b"f" * 16), **changes)


def output(**changes: Any) -> Output:
    """Return an output to the queue `stock`.

    Example:
        >>> output(body=b"{}").routing_key
        'stock'
    """
    id = str(uuid4())
    properties = {"type": "shop.Reserve", "message_id": id, "headers": {"x": "ü"}}
    return replace(Output(id, "send", "", "stock", properties, b'{"a": "\xc3\xbc"}'), **changes)


def handle(store: Store[Any], claim: Claim, outputs: Sequence[Output] = ()) -> ClaimAnswer:
    """Claim, store outputs and commit, as the protocol does."""
    with store.connect() as tx:
        answer = store.claim(tx, [claim])[0]
        if answer.verdict is Verdict.CLAIMED:
            store.finish(tx, [Handled(claim.consumer, claim, outputs)])
    return answer


class StoreConformance:
    """A store keeps claims and outputs.

    The fixture `open_store(worker)` opens a store of a worker of that name, which knows the consumers `billing` and `shop` and the
    types `shop.Pay` and `shop.Order`; each call opens another instance on the same data. `age(seconds)` lets time pass.
    """

    def test_a_redelivery_finds_the_outputs_in_order(self, open_store: Open) -> None:
        mine, outputs = claim(), [output(body=b"%d" % number, mandatory=number > 0) for number in range(3)]
        assert handle(open_store("a"), mine, outputs).verdict is Verdict.CLAIMED
        answer = handle(open_store("b"), replace(mine, resends="pending"))
        assert answer.verdict is Verdict.DUPLICATE
        assert answer.outputs == outputs

    def test_a_handling_without_outputs_is_found(self, open_store: Open) -> None:
        mine = claim()
        handle(open_store("a"), mine)
        assert handle(open_store("b"), mine) == ClaimAnswer(Verdict.DUPLICATE, [], worker="a")

    @pytest.mark.parametrize("resends", ["due", "always"])
    def test_a_result_goes_to_duplicates_and_to_no_queue(self, open_store: Open, resends: Any) -> None:
        mine, result = claim(), output(kind="result", routing_key="", body=b"\xff42", sendable=False)
        handle(open_store("a"), mine, [output(), result])
        answer = handle(open_store("b"), replace(mine, resends=resends))
        assert answer.result == b"\xff42"
        assert [each.kind for each in answer.outputs] == ["send"]

    def test_an_empty_message_of_another_library_is_kept(self, open_store: Open) -> None:
        mine, foreign = claim(), output(kind="forward", properties={"headers": {}}, body=b"")
        handle(open_store("a"), mine, [foreign])
        assert handle(open_store("b"), replace(mine, resends="pending")).outputs == [foreign]

    def test_what_is_not_committed_is_gone(self, open_store: Open) -> None:
        mine, store = claim(), open_store("a")
        with store.connect() as tx:
            assert store.claim(tx, [mine])[0].verdict is Verdict.CLAIMED
        assert handle(open_store("b"), mine).verdict is Verdict.CLAIMED

    def test_outputs_in_their_head_start_belong_to_their_own_worker(self, open_store: Open, age: Age) -> None:
        mine, sent, delayed = claim(), output(), output(delay=3600.0, sendable=False)
        handle(open_store("a"), mine, [sent, delayed])
        states = {
            resends: [each.sendable for each in handle(open_store("b"), replace(mine, resends=resends)).outputs]
            for resends in ("due", "pending", "always")
        }
        assert states == {"due": [False, False], "pending": [True, False], "always": [True, False]}
        age(60)
        assert [each.sendable for each in handle(open_store("b"), mine).outputs] == [True, False]
        age(3600)
        assert [each.sendable for each in handle(open_store("b"), mine).outputs] == [True, True]

    @pytest.mark.parametrize(
        ("changes", "verdict"),
        [
            ({"type": "shop.Order"}, Verdict.CONFLICT),
            ({"original": "i:7"}, Verdict.CONFLICT),
            ({"fingerprint": b"g" * 16}, Verdict.CONFLICT),
            ({"fingerprint": b"g" * 16, "skips_conflicts": True}, Verdict.DUPLICATE),
            ({"type": "shop.Order", "skips_conflicts": True}, Verdict.CONFLICT),
            ({"fingerprint": None}, Verdict.DUPLICATE),
            ({"consumer": "shop"}, Verdict.CLAIMED),
        ],
        ids=str,
    )
    def test_only_the_same_message_is_a_duplicate(self, open_store: Open, changes: dict[str, Any], verdict: Verdict) -> None:
        mine = claim()
        handle(open_store("a"), mine)
        assert handle(open_store("a"), replace(mine, **changes)).verdict is verdict

    def test_what_is_committed_is_read_back(self, open_store: Open) -> None:
        mine, store, other = claim(), open_store("a"), open_store("b")
        with store.connect() as tx:
            store.claim(tx, [mine])
            store.finish(tx, [Handled(CONSUMER, mine, [output()])], lazy=store.lazy)
        theirs = replace(mine)
        assert handle(other, theirs).verdict is Verdict.DUPLICATE
        assert (list(store.read_back([mine])), list(other.read_back([theirs]))) == ([True], [True])

    def test_several_claims_share_a_transaction(self, open_store: Open) -> None:
        store, one, two = open_store("a"), claim(), claim()
        with store.connect() as tx:
            verdicts = [each.verdict for each in store.claim(tx, [one, two, one])]
            store.finish(tx, [Handled(CONSUMER, one, [output()]), Handled(CONSUMER, two, [])])
        assert verdicts == [Verdict.CLAIMED, Verdict.CLAIMED, Verdict.DUPLICATE]
        assert len(handle(open_store("b"), replace(one, resends="pending")).outputs) == 1

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_second_claimer_waits_or_is_told(self, open_store: Open, commits: bool) -> None:
        mine, first, second = claim(), open_store("a"), open_store("b")
        answers: list[Verdict] = []
        with first.connect() as tx:
            first.claim(tx, [mine])
            thread = threading.Thread(target=lambda: answers.append(handle(second, mine).verdict))
            thread.start()
            thread.join(0.2)
            assert answers in ([], [Verdict.IN_FLIGHT])
            if commits:
                first.finish(tx, [Handled(CONSUMER, mine, [])])
        thread.join(30)
        assert answers in ([Verdict.IN_FLIGHT], [Verdict.DUPLICATE if commits else Verdict.CLAIMED])

    def test_a_changed_key_is_refused(self, open_store: Open, age: Age) -> None:
        store = open_store("a")
        former, present = (Identity(CONSUMER, TYPE, f"body:{name}", WINDOW) for name in ("id", "number"))
        store.register(CONSUMER, [TYPE], [present])
        store.register(CONSUMER, [TYPE], [former])  # there are no claims yet
        handle(store, claim())
        store.register(CONSUMER, [TYPE], [former])
        with pytest.raises(ConfigurationError, match='"id" and is "number" now'):
            open_store("b").register(CONSUMER, [TYPE], [present])
        age(WINDOW + 1)
        store.register(CONSUMER, [TYPE], [present])

    def test_a_former_identity_is_claimed_beside_the_present_one(self, open_store: Open) -> None:
        store, sent = open_store("a"), output()
        old, new = claim(), claim(type="shop.Order", resends="pending")
        handle(store, old, [sent])
        assert handle(store, replace(new, former=old)) == ClaimAnswer(Verdict.DUPLICATE, [sent], worker="a")
        assert handle(store, replace(old, type="shop.Order", former=old)).verdict is Verdict.DUPLICATE  # equal keys
        assert handle(store, new).verdict is Verdict.CLAIMED  # the duplicate before took nothing
        former = claim(consumer="shop")
        both = claim(type="shop.Order", former=former, resends="pending")
        sent = output()
        assert handle(store, both, [sent]).verdict is Verdict.CLAIMED
        assert handle(store, both) == ClaimAnswer(Verdict.DUPLICATE, [sent], worker="a")
        assert [handle(open_store("b"), each).verdict for each in (both, former)] == [Verdict.DUPLICATE, Verdict.DUPLICATE]

    def test_a_former_key_is_named_until_its_claims_are_gone(self, open_store: Open, age: Age) -> None:
        former, store = Identity(CONSUMER, TYPE, "body:id", WINDOW), open_store("a")
        present = Identity(CONSUMER, TYPE, "body:number", WINDOW)

        def start(each: Identity) -> None:
            store.register(CONSUMER, [TYPE], [each])

        start(former)
        handle(store, claim())
        start(replace(present, former=former))
        start(former)  # back to the former release, and forward again
        age(WINDOW - 100)
        with pytest.raises(ConfigurationError, match=r"keep its previous=Previous"):
            start(present)  # the former release has run since, for an unknown time
        start(replace(present, former=former))
        age(200)
        handle(store, claim())
        with pytest.raises(ConfigurationError, match=r"keep its previous=Previous"):
            start(present)
        with pytest.raises(ConfigurationError, match=r"keep its previous=Previous"):
            start(replace(present, former=replace(former, consumer="shop")))
        age(WINDOW + 1)
        start(present)
        handle(store, claim())
        with pytest.raises(ConfigurationError, match='was "number" and is "id" now'):
            start(former)

    def test_one_former_identity_is_named(self, open_store: Open, age: Age) -> None:
        store = open_store("a")
        a, b, c = (Identity(CONSUMER, type, "body:id", WINDOW) for type in (TYPE, "shop.Order", "shop.Third"))
        second, third = replace(b, former=a), replace(c, former=b)

        def start(each: Identity) -> None:
            store.register(CONSUMER, [TYPE, "shop.Order", "shop.Third"], [each])

        start(a)
        handle(store, claim())
        start(second)
        with pytest.raises(ConfigurationError, match=r"shop.Order was itself changed within its retention"):
            start(third)
        age(WINDOW + 1)
        start(third)

    def test_claims_of_a_former_identity_are_kept_as_long_as_present_ones(
        self, open_store: Open, open_scheduler: Open, age: Age
    ) -> None:
        store, scheduler = open_store("a"), open_scheduler("a")
        former, old = Identity(CONSUMER, TYPE, "body:id", 100.0), claim()
        store.register(CONSUMER, [TYPE], [former])
        handle(store, old)
        longer = replace(former, retention=200.0)
        store.register(CONSUMER, [TYPE, "shop.Order"], [replace(longer, type="shop.Order", former=longer)])
        never = Identity(CONSUMER, "shop.Third", "body:id", 200.0)  # in no earlier release
        store.register(CONSUMER, ["shop.Third", "shop.Fourth"], [replace(never, type="shop.Fourth", former=never)])
        handle(store, claim(type="shop.Fourth", former=claim(type="shop.Third")))
        age(101)
        assert scheduler.purge() == 0
        age(100)
        assert scheduler.purge() == 3
        store.register(CONSUMER, ["shop.Fourth"], [replace(never, type="shop.Fourth")])  # so nothing has to be kept

    def test_a_renamed_type_is_refused_or_named(self, open_store: Open, age: Age) -> None:
        store, former = open_store("a"), Identity(CONSUMER, TYPE, "body:id", WINDOW)
        renamed = Identity(CONSUMER, "shop.Order", "body:id", WINDOW)
        types = [TYPE, "shop.Order"]

        def start(each: Identity) -> None:
            store.register(CONSUMER, ["shop.Order"], [each], complete=True)

        store.register(CONSUMER, types, [former], complete=True)
        handle(store, claim())
        with pytest.raises(ConfigurationError, match=r"shop.Order is new, and shop.Pay is not handled any more"):
            start(renamed)
        with pytest.raises(ConfigurationError, match=r'previous says that the key of shop.Pay was \{header = "x"\}'):
            start(replace(renamed, former=replace(former, descriptor="header:x")))
        start(replace(renamed, former=former))
        with pytest.raises(ConfigurationError, match=r"keep its previous=Previous"):
            start(renamed)
        with pytest.raises(ConfigurationError, match=r"shop.Order was opted in and is not now"):
            store.register(CONSUMER, ["shop.Order"], [], complete=True)
        age(WINDOW - 100)
        handle(store, claim(type="shop.Order", former=claim()))
        age(200)
        other = Identity(CONSUMER, "shop.Third", "body:id", WINDOW)
        store.register(CONSUMER, ["shop.Order", "shop.Third"], [renamed, other], complete=True)  # it is no rename of shop.Pay

    def test_a_type_that_is_not_opted_in_any_more_is_refused(self, open_store: Open, age: Age) -> None:
        store = open_store("a")
        store.register(CONSUMER, [TYPE], [Identity(CONSUMER, TYPE, "body:id", WINDOW)], complete=True)
        store.register(CONSUMER, [TYPE], [], complete=True)  # it has no claims
        handle(store, claim())
        with pytest.raises(ConfigurationError, match=r"shop.Pay was opted in and is not now"):
            store.register(CONSUMER, [TYPE], [], complete=True)
        store.register(
            CONSUMER, ["shop.Order"], [Identity(CONSUMER, "shop.Order", "body:id", WINDOW, unrelated=True)], complete=True
        )
        age(WINDOW + 1)
        store.register(CONSUMER, [TYPE], [], complete=True)

    def test_a_store_that_works_is_probed_and_unchanged(self, open_store: Open) -> None:
        assert open_store("a").probe()
        assert open_store("a").probe()

    def test_errors_of_others_are_not_classified(self, open_store: Open) -> None:
        assert open_store("a").classify(RuntimeError("boom")) is None


class SchedulerConformance:
    """A scheduler keeps what waits.

    Fixtures: `open_store(worker)` as in `StoreConformance`, `open_scheduler(worker)` with leases of 30 s, and `age(seconds)`.
    """

    queue: ClassVar[str] = CONSUMER

    def delivery(self, **changes: Any) -> Delivery:
        """Return a delivery of a new message, as a broker brings it."""
        return Delivery(self.queue, {"message_id": str(uuid4()), "type": TYPE, **changes}, b'{"id": 7}')

    def leased(self, scheduler: Scheduler, limit: int = 100) -> Sequence[Delivery]:
        """Lease what is due."""
        return scheduler.lease_messages(self.queue, limit)[0]

    # Outputs

    def test_a_confirmed_output_is_sent_again_only_on_demand(self, open_store: Open, open_scheduler: Open) -> None:
        mine, sent = claim(resends="pending"), output()
        handle(open_store("a"), mine, [sent])
        for _ in range(2):  # marking twice is harmless
            open_scheduler("a").confirm([sent.id])
        assert handle(open_store("b"), mine).outputs == []
        assert handle(open_store("b"), replace(mine, resends="always")).outputs == [sent]

    def test_many_outputs_are_confirmed_at_once(self, open_store: Open, open_scheduler: Open) -> None:
        mine, sent = claim(resends="pending"), [output() for _ in range(1_001)]
        handle(open_store("a"), mine, sent)
        open_scheduler("a").confirm([each.id for each in sent])
        assert handle(open_store("b"), mine).outputs == []

    def test_outputs_are_leased_when_they_are_due(self, open_store: Open, open_scheduler: Open, age: Age) -> None:
        sent, delayed = output(), output(delay=3600.0, sendable=False)
        handle(open_store("a"), claim(), [sent, delayed])
        assert open_scheduler("b").lease_outputs(10, 20.0) == []
        age(60)
        assert open_scheduler("b").lease_outputs(10, 20.0) == [sent]
        assert open_scheduler("c").lease_outputs(10, 20.0) == []
        open_scheduler("b").confirm([sent.id])
        age(3600)
        assert [each.id for each in open_scheduler("b").lease_outputs(10, 20.0)] == [delayed.id]
        age(30)
        assert [each.id for each in open_scheduler("c").lease_outputs(10, 20.0)] == [delayed.id]

    def test_two_relays_take_disjoint_outputs(self, open_store: Open, open_scheduler: Open, age: Age) -> None:
        for _ in range(4):
            handle(open_store("a"), claim(), [output()])
        age(60)
        taken = [open_scheduler(name).lease_outputs(2, 20.0) for name in "bcd"]
        assert sorted(map(len, taken)) == [0, 2, 2]
        assert len({each.id for part in taken for each in part}) == 4

    def test_a_delayed_output_without_claim_is_kept_until_it_is_sent(
        self, open_store: Open, open_scheduler: Open, age: Age
    ) -> None:
        store, scheduler, delayed = open_store("a"), open_scheduler("a"), output(delay=60.0, sendable=False)
        with store.connect() as tx:
            store.claim(tx, [])
            store.finish(tx, [Handled(CONSUMER, None, [output(), delayed])])
        age(61)
        scheduler.purge()
        assert [each.id for each in scheduler.lease_outputs(10, 20.0)] == [delayed.id]
        scheduler.confirm([delayed.id])
        scheduler.purge()
        assert scheduler.lease_outputs(10, 20.0) == []

    def test_an_output_whose_queue_comes_late_is_not_in_quarantine(
        self, open_store: Open, open_scheduler: Open, age: Age
    ) -> None:
        mine, sent = claim(), output()
        handle(open_store("a"), mine, [sent])
        for _ in range(13):
            age(20)
            for each in open_scheduler("b").lease_outputs(10, 20.0):
                for _ in range(3):  # copies of its message, or other relays, in the pause of the first refusal
                    open_scheduler("b").refuse({each.id: Refusal("no queue takes it", own=True)})
        age(600)
        assert [each.id for each in open_scheduler("b").lease_outputs(10, 20.0)] == [sent.id]

    @pytest.mark.parametrize("own", [True, False])
    def test_only_their_own_fault_brings_outputs_into_quarantine(
        self, open_store: Open, open_scheduler: Open, age: Age, own: bool
    ) -> None:
        mine, sent = claim(resends="always"), output()
        handle(open_store("a"), mine, [sent])
        for _ in range(8):
            age(3600)
            for each in open_scheduler("b").lease_outputs(10, 20.0):
                open_scheduler("b").refuse({each.id: Refusal("no queue takes it", own=own)})
        age(3600)
        assert [each.id for each in open_scheduler("b").lease_outputs(10, 20.0)] == ([] if own else [sent.id])
        assert len(handle(open_store("b"), mine).outputs) == (0 if own else 1)

    # The clock

    def test_nothing_waits_for_longer_than_its_delay_when_the_clock_is_set_back(
        self, open_store: Open, open_scheduler: Open, age: Age
    ) -> None:
        scheduler, sent, delayed = open_scheduler("a"), output(), output(delay=300.0, sendable=False)
        scheduler.beat("worker")
        handle(open_store("a"), claim(), [sent, delayed])
        retry, later = (Delivery("billing", {"type": TYPE, "message_id": id}, b"{}") for id in "ab")
        scheduler.settle([NewRow(retry, delay=2.0), NewRow(later, delay=300.0)], [])
        age(-3600)
        open_scheduler("b").beat("worker")  # any process that lives notices it
        found = []
        for _ in range(2):
            rows, _suspect = scheduler.lease_messages("billing", 10)
            found.append(
                ({each.id for each in scheduler.lease_outputs(10, 20.0)}, {each.properties["message_id"] for each in rows})
            )
            age(299)
        assert found[0][0] == {sent.id}
        assert found[0][1] == set()
        assert "a" in found[1][1]
        age(2)
        rows, _suspect = scheduler.lease_messages("billing", 10)
        assert delayed.id in {each.id for each in scheduler.lease_outputs(10, 20.0)}
        assert "b" in {each.properties["message_id"] for each in rows}

    # Retention

    def test_claims_are_kept_for_the_window_of_their_type(self, open_store: Open, open_scheduler: Open, age: Age) -> None:
        store, scheduler = open_store("a"), open_scheduler("a")
        windows = {TYPE: 100.0, "shop.Order": 200.0}
        store.register(CONSUMER, list(windows), [Identity(CONSUMER, type, "message_id:", each) for type, each in windows.items()])
        short, long, other = claim(), claim(type="shop.Order"), claim(consumer="shop")
        for each in (short, long, other):
            handle(store, each)
        age(99)
        assert scheduler.purge() == 0
        assert handle(store, short).verdict is Verdict.DUPLICATE
        age(2)
        assert scheduler.purge() == 1
        verdicts = [handle(store, each).verdict for each in (short, long, other)]
        assert verdicts == [Verdict.CLAIMED, Verdict.DUPLICATE, Verdict.DUPLICATE]

    def test_claims_with_pending_outputs_stay_and_hold_up_no_others(
        self, open_store: Open, open_scheduler: Open, age: Age
    ) -> None:
        store, scheduler, sent = open_store("a"), open_scheduler("a"), output()
        stays, goes = claim(), claim()
        store.register(CONSUMER, [TYPE], [Identity(CONSUMER, TYPE, "message_id:", 100.0)])
        handle(store, stays, [sent])
        handle(store, goes)
        age(1000)
        scheduler.purge()
        assert [handle(store, each).verdict for each in (stays, goes)] == [Verdict.DUPLICATE, Verdict.CLAIMED]
        scheduler.confirm([sent.id])
        scheduler.purge()
        assert handle(store, stays).verdict is Verdict.CLAIMED

    def test_a_message_is_late_if_claims_of_its_age_were_deleted(self, open_store: Open, open_scheduler: Open, age: Age) -> None:
        store, now = open_store("a"), time.time()
        store.register(CONSUMER, [TYPE], [Identity(CONSUMER, TYPE, "message_id:", 600.0)])
        assert not handle(store, claim(made_at=now - 1000)).late
        age(500)
        handle(store, claim())
        age(500)
        assert not handle(store, claim(made_at=now - 5000)).late  # nothing was deleted yet
        open_scheduler("a").purge()
        lates = [handle(store, claim(made_at=made)).late for made in (now - 1001, now - 700, None)]
        assert lates == [True, False, False]

    # Retries and dead letters

    def test_a_retry_is_leased_when_it_is_due(self, open_scheduler: Open, age: Age) -> None:
        first, history = self.delivery(), [{"rule": "handler", "times": 1}]
        open_scheduler("a").settle([NewRow(first, 60.0, attempts=2, history=history)], [])
        assert self.leased(open_scheduler("a")) == []
        age(61)
        (again,) = self.leased(open_scheduler("b"))
        assert (again.properties, again.body, again.queue) == (first.properties, first.body, first.queue)
        assert again.row is not None
        assert (again.row.attempts, again.row.deaths, again.row.history) == (2, 0, history)
        assert self.leased(open_scheduler("c")) == []

    def test_a_dead_letter_is_not_leased(self, open_scheduler: Open, age: Age) -> None:
        open_scheduler("a").settle([NewRow(self.delivery(), None, attempts=3)], [])
        age(86_400)
        assert self.leased(open_scheduler("a")) == []

    def test_a_row_that_is_done_is_gone(self, open_scheduler: Open, age: Age) -> None:
        scheduler = open_scheduler("a")
        scheduler.settle([NewRow(self.delivery(), 0.0)], [])
        (again,) = self.leased(scheduler)
        scheduler.settle([], [again.row])
        age(3600)
        assert self.leased(scheduler) == []

    def test_copies_of_a_message_make_one_row(self, open_scheduler: Open, age: Age) -> None:
        copy, same = self.delivery(), uuid4().bytes
        open_scheduler("a").settle([NewRow(copy, 10.0, attempts=1, identity=same)], [])
        open_scheduler("b").settle([NewRow(copy, 0.0, attempts=9, identity=same), NewRow(copy, None, identity=same)], [])
        assert self.leased(open_scheduler("a")) == []
        age(11)
        (row,) = [each.row for each in self.leased(open_scheduler("a"))]
        assert row is not None
        assert row.attempts == 1

    def test_messages_without_an_identity_are_not_copies(self, open_scheduler: Open) -> None:
        copy = self.delivery()
        open_scheduler("a").settle([NewRow(copy, 0.0) for _ in range(2)], [])
        assert len(self.leased(open_scheduler("a"))) == 2

    def test_a_row_that_was_moved_meets_its_copies_when_it_fails(self, open_scheduler: Open, age: Age) -> None:
        copy, moved, same = self.delivery(), (uuid4().bytes, uuid4().bytes), uuid4().bytes
        scheduler = open_scheduler("a")
        scheduler.settle([NewRow(copy, 0.0, deaths=1, identity=each) for each in moved], [])
        first, second = self.leased(scheduler)
        scheduler.settle([NewRow(first, 10.0, attempts=1, identity=same)], [])
        scheduler.settle([NewRow(second, 10.0, attempts=1, identity=same)], [])
        age(31)
        (row,) = [each.row for each in self.leased(open_scheduler("b"))]
        assert row is not None
        assert (row.attempts, row.deaths) == (1, 1)

    def test_a_copy_counts_on_a_dead_letter_and_does_not_revive_it(self, open_scheduler: Open, age: Age) -> None:
        copy, same = self.delivery(), uuid4().bytes
        scheduler = open_scheduler("a")
        scheduler.settle([NewRow(copy, None, attempts=3, identity=same)], [])
        scheduler.settle([NewRow(copy, 0.0, attempts=1, identity=same)], [])
        scheduler.settle([NewRow(copy, 0.0, deaths=1)], [])
        (again,) = self.leased(scheduler)
        scheduler.settle([NewRow(again, 0.0, attempts=1, identity=same)], [])
        age(3600)
        assert self.leased(scheduler) == []
        scheduler.settle([], [])
        assert self.dead_attempts(scheduler) == [5]

    def dead_attempts(self, scheduler: Scheduler) -> list[int]:
        """Return the attempts of all dead letters: of the SQL scheduler, by its tables."""
        from idemp.sql.records.failures import DeadLetters

        database: Any = getattr(scheduler, "database")  # noqa: B009 - of the adapter, not of the port
        return [letter.attempts for letter in DeadLetters(database).find()]

    def test_a_late_settle_changes_nothing(self, open_scheduler: Open, age: Age) -> None:
        slow = open_scheduler("slow")
        slow.beat("worker")
        slow.settle([NewRow(self.delivery(), 0.0)], [])
        (first,) = self.leased(slow)
        age(31)
        open_scheduler("slow").beat("worker")  # alive, but this instance holds no rows, so the lease is lost
        fast = open_scheduler("fast")
        (second,) = self.leased(fast)
        slow.settle([], [first.row])
        slow.settle([NewRow(first, None)], [])
        fast.settle([NewRow(second, 0.0, attempts=1)], [])
        (third,) = self.leased(fast)
        assert third.row is not None
        assert third.row.attempts == 1
        age(31)
        open_scheduler("fast").beat("worker")
        again = open_scheduler("fast")
        assert len(self.leased(again)) == 1
        fast.settle([], [third.row])  # the same holder, another delivery
        fast.settle([NewRow(third, None)], [])
        age(31)
        assert len(self.leased(open_scheduler("other"))) == 1

    @pytest.mark.parametrize(
        ("story", "deaths", "alone"),
        [
            ("calm", 0, False),
            ("moved", 1, False),
            ("holder is gone", 1, False),
            ("moved, holder is gone", 2, True),
            ("holder is alive and late", 0, False),
            ("holder was stopping", 0, False),
            ("given back", 0, False),
        ],
    )
    def test_a_suspect_is_leased_alone(self, open_scheduler: Open, age: Age, story: str, deaths: int, alone: bool) -> None:
        first, other = open_scheduler("first"), open_scheduler("other")
        first.beat("worker")
        first.settle([NewRow(self.delivery(), 0.0, deaths=int(story.startswith("moved")))], [])
        if story not in ("calm", "moved"):
            assert len(self.leased(first)) == 1
            if story == "holder was stopping":
                first.beat("worker", stopping=True)
            if story == "given back":
                first.release()
            else:
                age(31)
            if story == "holder is alive and late":
                open_scheduler("first").beat("worker")  # an instance that holds no rows
        other.settle([NewRow(self.delivery(), 0.0) for _ in range(2)], [])
        found, suspects = other.lease_messages(self.queue, 100)
        assert (len(found), suspects) == ((2, True) if alone else (3, False))
        suspect = other.lease_suspect(self.queue)
        assert (suspect is not None) == alone
        row = (suspect or found[0]).row
        assert row is not None
        assert (row.deaths, row.deaths_alone) == (deaths, 0)
        assert other.lease_suspect(self.queue) is None

    @pytest.mark.parametrize("alone", [True, False])
    def test_only_a_death_that_a_suspect_dies_alone_is_held_against_it(self, open_scheduler: Open, age: Age, alone: bool) -> None:
        first = open_scheduler("first")
        first.settle([NewRow(self.delivery(), 0.0, deaths=2)], [])
        suspect = first.lease_suspect(self.queue)
        assert suspect is not None
        assert suspect.row is not None
        if not alone:
            first.accompany(suspect.row)
        age(31)
        again = open_scheduler("other").lease_suspect(self.queue)
        assert again is not None
        assert again.row is not None
        assert again.row.deaths_alone == int(alone)

    def test_a_heartbeat_renews_leases(self, open_scheduler: Open, age: Age) -> None:
        scheduler = open_scheduler("a")
        scheduler.settle([NewRow(self.delivery(), 0.0)], [])
        assert len(self.leased(scheduler)) == 1
        for _ in range(3):
            age(20)
            scheduler.beat("worker")
        assert self.leased(open_scheduler("b")) == []

    def test_a_relay_is_alive_for_some_seconds(self, open_scheduler: Open, age: Age) -> None:
        scheduler = open_scheduler("a")
        assert not scheduler.relay_alive()
        scheduler.beat("worker")
        assert open_scheduler("b").relay_alive()
        age(20)
        assert not scheduler.relay_alive()
        age(-3600)  # a clock that was set back
        assert not scheduler.relay_alive()
        scheduler.beat("worker", stopping=True)
        assert not scheduler.relay_alive()
