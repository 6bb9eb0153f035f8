# ruff: noqa: S101, PLR2004, PT012 - this module is made of assertions
"""What every inbox store must do, as a pytest class: subclass it, and give it a store.

```python
class TestMyStore(StoreConformance):
    @pytest.fixture
    def store(self, clock):
        return MyStore("my://localhost", clock=clock)
```
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest

from idemp.errors import TransientStoreError
from idemp.fingerprint import Fingerprint
from idemp.identity import EffectiveId
from idemp.inbox.port import Claimed, Mark, PendingState, Verdict
from idemp.messages import Message, Output, OutputKind
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import (
    LEASE,
    MESSAGE_TYPE,
    RELAY_AFTER,
    Background,
    Bench,
    Effects,
    MemoryEffects,
    NoEffects,
    SqlEffects,
    make_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from idemp.inbox.port import InboxStore

__all__ = [
    "Background",
    "Bench",
    "Effects",
    "MemoryEffects",
    "NoEffects",
    "SqlEffects",
    "StoreConformance",
    "make_outputs",
]


class StoreConformance:
    """The cases. A subclass gives the fixture `store`: an inbox ready to use, on the clock of the fixture `clock`.

    It should also give the fixture `effects`, an `Effects`; without it nothing is said about effects. It may set:

    Attributes:
        one_writer: the store lets one unit of work write at a time; who waits too long gets a `TransientStoreError`.
        asks_again: losing a race may be a `TransientStoreError` first (REPEATABLE READ, SERIALIZABLE).
        patience: seconds that something which must happen may take.

    Example:
        >>> [case for case in dir(StoreConformance) if "consumers" in case]
        ['test_one_id_two_consumers']
    """

    one_writer: ClassVar[bool] = False
    asks_again: ClassVar[bool] = False
    patience: ClassVar[float] = 30.0

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The store's time."""
        return FakeClock()

    @pytest.fixture
    def effects(self) -> Effects:
        """Nothing is known about effects."""
        return NoEffects()

    @pytest.fixture
    def bench(self, store: InboxStore, effects: Effects, clock: FakeClock) -> Bench:
        """The store, with a consumer that nobody else uses."""
        consumer = f"conformance-{uuid4().hex[:12]}"
        store.prepare(consumer, [MESSAGE_TYPE])
        return Bench(store, effects, clock, consumer, self.asks_again, self.patience)

    def test_verify_accepts_it(self, store: InboxStore) -> None:
        """A store that is ready says so."""
        store.verify()
        assert store.worker

    # Claiming

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_claim_then_duplicate_with_identical_outputs(self, bench: Bench, late: bool) -> None:
        """Case 1: the second delivery finds what the first one stored, and does nothing."""
        claim, outputs = bench.claim(), make_outputs(4)
        assert bench.handle(claim, outputs, effect="sale", late=late).verdict is Verdict.CLAIMED
        again = bench.handle(claim, make_outputs(2), effect="sale", late=late)
        assert again.verdict is Verdict.DUPLICATE
        assert [stored.output for stored in again.outputs] == outputs
        assert all(stored.pending for stored in again.outputs)
        bench.counted("sale", 1)

    def test_outputs_keep_every_property(self, bench: Bench) -> None:
        """Case 19: destination, kind, routing key, headers, TTL, delay, priority and ids come back as they went."""
        outputs = [
            Output(
                id=(made := uuid4()),
                ordinal=ordinal,
                kind=kind,
                exchange="events" if kind is OutputKind.PUBLISH else "",
                routing_key="orders.Placed ✓",
                message=Message(
                    body=bytes(range(256)),
                    type="orders.Placed",
                    message_id=str(made),
                    content_type="application/vnd.shop+json; charset=utf-8",
                    correlation_id="conversation 7",
                    reply_to="answers.here",
                    headers={"tenant": "münchen ✓", "deep": {"list": [1, 2.5, "two", None, {}]}, "big": 2**60},
                    timestamp=datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC),
                    ttl=3600.5,
                    priority=255,
                ),
                mandatory=ordinal % 2 == 0,
                delay=1.5,
            )
            for ordinal, kind in enumerate(OutputKind)
        ]
        claim = bench.claim()
        bench.handle(claim, outputs)
        assert [stored.output for stored in bench.look(claim).outputs] == outputs

    def test_falsy_values_replay_as_themselves(self, bench: Bench) -> None:
        """Case 44: 0, "", [], {}, None and False are values like others."""
        headers = {"zero": 0, "null": 0.0, "empty": "", "no": False, "nothing": None, "list": [], "dict": {}}
        (plain,) = make_outputs(1)
        outputs = [
            replace(
                plain,
                id=(made := uuid4()),
                ordinal=ordinal,
                message=Message(
                    body=body, message_id=str(made), headers=headers, correlation_id="", ttl=0.0, priority=0
                ),
                mandatory=False,
            )
            for ordinal, body in enumerate((b"0", b'""', b"[]", b"{}", b"null", b"false", b""))
        ]
        claim = bench.claim()
        bench.handle(claim, outputs)
        assert [stored.output for stored in bench.look(claim).outputs] == outputs

    def test_a_hundred_outputs_keep_their_order(self, bench: Bench) -> None:
        """Case 20: emission order, whatever the ids are."""
        claim, outputs = bench.claim(), make_outputs(100)
        bench.handle(claim, outputs)
        assert [stored.output for stored in bench.look(claim).outputs] == outputs

    def test_large_output(self, bench: Bench) -> None:
        """Case 46: a megabyte comes back byte for byte."""
        (plain,) = make_outputs(1)
        output = replace(plain, message=replace(plain.message, body=bytes(range(256)) * 4096))
        claim = bench.claim()
        bench.handle(claim, [output])
        assert [stored.output for stored in bench.look(claim).outputs] == [output]

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_no_outputs_are_recorded_all_the_same(self, bench: Bench, late: bool) -> None:
        """Case 7: a handling that emits nothing is a handling."""
        claim, handled_at = bench.claim(), bench.clock.now()
        assert bench.handle(claim, effect="sale", late=late).verdict is Verdict.CLAIMED
        bench.clock.advance(timedelta(minutes=5))
        found = bench.handle(claim, effect="sale", late=late)
        assert found == Claimed(Verdict.DUPLICATE, claimed_at=handled_at)
        bench.counted("sale", 1)

    def test_rollback_frees_the_claim(self, bench: Bench) -> None:
        """Cases 12 and 17: what was not committed never was; only the second attempt's outputs exist."""
        claim, outputs = bench.claim(), make_outputs(2)
        with pytest.raises(ZeroDivisionError), bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            unit.store_outputs(claim, make_outputs(3), RELAY_AFTER)
            raise ZeroDivisionError
        bench.counted("sale", 0)
        assert bench.store.upkeep.pending_count() == 0
        assert bench.handle(claim, outputs, effect="sale").verdict is Verdict.CLAIMED
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.counted("sale", 1)

    def test_nothing_is_visible_before_commit(self, bench: Bench) -> None:
        """Neither effects nor outputs."""
        claim = bench.claim()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            unit.store_outputs(claim, make_outputs(), timedelta(0))
            bench.counted("sale", 0)
            if not self.one_writer:
                assert bench.store.upkeep.pending_count() == 0
                assert not bench.store.upkeep.take_pending(10, LEASE)
            unit.commit()
        bench.counted("sale", 1)
        assert bench.store.upkeep.pending_count() == 3

    def test_one_id_two_consumers(self, bench: Bench) -> None:
        """Case 5: both handle it, each with outputs of its own."""
        claims = [bench.claim("event-1", consumer=f"{bench.consumer}-{name}") for name in ("billing", "shipping")]
        outputs = [make_outputs(1), make_outputs(2)]
        for claim, own in zip(claims, outputs, strict=True):
            assert bench.handle(claim, own, effect="sale").verdict is Verdict.CLAIMED
        for claim, own in zip(claims, outputs, strict=True):
            assert [stored.output for stored in bench.look(claim).outputs] == own
        bench.counted("sale", 2)

    def test_two_claims_in_one_unit(self, bench: Bench) -> None:
        """An id and its former name: the second may be taken, then nothing of the first stays."""
        former, current = bench.claim(), bench.claim()
        bench.handle(former)
        with bench.store.begin([current, former]) as unit:
            assert unit.claim(current).verdict is Verdict.CLAIMED
            assert unit.claim(former).verdict is Verdict.DUPLICATE
        assert bench.look(current).verdict is Verdict.CLAIMED

    # Conflicts

    def test_other_payload_is_a_conflict(self, bench: Bench) -> None:
        """Case 10: the same id with other content is neither handled nor taken for a duplicate."""
        outputs = make_outputs(2)
        bench.handle(bench.claim("order-1", payload={"quantity": 1}), outputs)
        found = bench.handle(bench.claim("order-1", payload={"quantity": 2}), effect="sale")
        assert found.verdict is Verdict.CONFLICT
        assert [stored.output for stored in found.outputs] == outputs
        assert found.detail
        bench.counted("sale", 0)

    @pytest.mark.parametrize("payloads", [(None, 1), (1, None), (None, None)])
    def test_unknown_fingerprint_never_conflicts(self, bench: Bench, payloads: tuple[Any, Any]) -> None:
        """Case 25c: what is not known proves nothing."""
        first, second = payloads
        bench.handle(bench.claim("order-1", payload=first))
        assert bench.look(bench.claim("order-1", payload=second)).verdict is Verdict.DUPLICATE

    def test_fingerprints_of_other_fields_never_conflict(self, bench: Bench) -> None:
        """A changed choice of fields is no changed payload."""
        claim = bench.claim("order-1")
        bench.handle(replace(claim, fingerprint=Fingerprint().of({"a": 1})))
        other = replace(claim, fingerprint=Fingerprint("fields", ("a",)).of({"a": 2}))
        assert bench.look(other).verdict is Verdict.DUPLICATE

    def test_other_original_id_is_a_conflict(self, bench: Bench) -> None:
        """Two ids that share a digest: the second message is not the first one."""
        claim = bench.claim("order-1")
        bench.handle(claim, make_outputs(1))
        twin = replace(claim, id=EffectiveId(claim.id.key, "order-2"))
        found = bench.look(twin)
        assert (found.verdict, found.outputs) == (Verdict.CONFLICT, ())
        assert "order-1" in found.detail

    def test_ids_differ_by_case_and_blanks(self, bench: Bench) -> None:
        """What a database's collation would take for equal stays apart."""
        for text in ("Order", "order", "ORDER", "order ", "ordér"):
            assert bench.handle(bench.claim(text)).verdict is Verdict.CLAIMED
            assert bench.look(bench.claim(text)).verdict is Verdict.DUPLICATE

    # Races

    def test_racing_claimers(self, bench: Bench) -> None:
        """Case 3: exactly one commits; the others learn DUPLICATE, and their writes are gone."""
        claim, start = bench.claim(), threading.Barrier(4)
        sets = [make_outputs(2) for _ in range(4)]

        def race(outputs: list[Output], late: bool) -> Callable[[], Claimed]:
            def run() -> Claimed:
                start.wait(self.patience)
                return bench.handle(claim, outputs, effect="sale", late=late)

            return run

        racers = [Background(race(outputs, number % 2 == 0)) for number, outputs in enumerate(sets)]
        verdicts = [racer.result(self.patience) for racer in racers]
        won = [number for number, found in enumerate(verdicts) if found.verdict is Verdict.CLAIMED]
        assert len(won) == 1
        assert [found.verdict for found in verdicts].count(Verdict.DUPLICATE) == 3
        for found in verdicts:
            if found.verdict is Verdict.DUPLICATE:
                assert [stored.output for stored in found.outputs] == sets[won[0]]
        bench.counted("sale", 1)

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_second_waits_and_is_a_duplicate(self, bench: Bench, late: bool) -> None:
        """Case 2: while the first one works, the second neither runs nor fails."""
        claim, outputs = bench.claim(), make_outputs(100)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            second = Background(lambda: bench.handle(claim, make_outputs(1), effect="sale", late=late))
            unit.store_outputs(claim, outputs, RELAY_AFTER)
            assert second.running
            unit.commit()
        found = second.result(self.patience)
        assert found.verdict is Verdict.DUPLICATE
        assert [stored.output for stored in found.outputs] == outputs
        bench.counted("sale", 1)

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_second_waits_and_the_first_rolls_back(self, bench: Bench, late: bool) -> None:
        """Case 4: then the second executes."""
        claim, outputs = bench.claim(), make_outputs(2)
        with pytest.raises(ZeroDivisionError), bench.store.begin([claim]) as unit:
            unit.claim(claim)
            second = Background(lambda: bench.handle(claim, outputs, effect="sale", late=late))
            raise ZeroDivisionError
        assert second.result(self.patience).verdict is Verdict.CLAIMED
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.counted("sale", 1)

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_holder_slower_than_the_wait(self, bench: Bench, late: bool) -> None:
        """In flight, in about the time that the claim waits; the holder is not disturbed."""
        claim, patient = bench.claim(wait=1.0), bench.claim()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            since = time.monotonic()
            second = Background(lambda: bench.handle(claim, effect="sale", late=late))
            if self.one_writer:
                with pytest.raises(TransientStoreError):
                    second.result(self.patience)
            else:
                assert second.result(self.patience) == Claimed(Verdict.IN_FLIGHT)
                assert 0.8 < time.monotonic() - since < 5
                assert Background(lambda: bench.handle(patient)).result(self.patience).verdict is Verdict.CLAIMED
            unit.store_outputs(claim, make_outputs(1), RELAY_AFTER)
            unit.commit()
        assert bench.look(claim).verdict is Verdict.DUPLICATE
        bench.counted("sale", 1)

    def test_waiting_setting_does_not_outlive_the_claim(self, bench: Bench) -> None:
        """A short wait of one claim is no limit for the next one on the same connection."""
        bench.handle(bench.claim(wait=0.001))
        claim = bench.claim(wait=10.0)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            second = Background(lambda: bench.handle(claim))
            bench.store.translate(ValueError())
            assert second.running
            unit.commit()
        assert second.result(self.patience).verdict is Verdict.DUPLICATE

    def test_other_ids_do_not_wait(self, bench: Bench) -> None:
        """A slow handling holds up no other message."""
        if self.one_writer:
            pytest.skip("this store lets one unit of work write at a time")
        slow = bench.claim()
        with bench.store.begin([slow]) as unit:
            unit.claim(slow)
            others = [Background(lambda: bench.handle(bench.claim(wait=1.0), make_outputs(1))) for _ in range(4)]
            assert {other.result(self.patience).verdict for other in others} == {Verdict.CLAIMED}
            unit.commit()

    # Confirms

    def test_record_clears_exactly_the_confirmed(self, bench: Bench) -> None:
        """Case 21: the others stay pending; a duplicate sees which."""
        claim, outputs = bench.claim(), make_outputs(5)
        bench.handle(claim, outputs)
        confirmed = (outputs[0].id, outputs[3].id)
        for _ in range(2):  # recording twice is harmless
            bench.store.record([Mark(claim, confirmed), Mark(claim, (), redelivered=True)])
            assert bench.pending(claim) == [outputs[1].id, outputs[2].id, outputs[4].id]
        assert [stored.output for stored in bench.look(claim).outputs] == outputs

    def test_record_of_refusals(self, bench: Bench) -> None:
        """A refused output stays pending; its confirm, or that of another, may come in the same batch."""
        claim, outputs = bench.claim(), make_outputs(3)
        bench.handle(claim, outputs)
        refused = tuple((output.id, "nacked: the queue is full") for output in outputs[:2])
        bench.store.record([Mark(claim, (outputs[2].id,), False, refused), Mark(claim, (outputs[0].id,))])
        bench.store.record([Mark(claim, (), False, refused)])
        assert bench.pending(claim) == [outputs[1].id]

    def test_record_of_many_handlings_at_once(self, bench: Bench) -> None:
        """Marks come in batches."""
        handled = [(bench.claim(), make_outputs(2)) for _ in range(20)]
        for claim, outputs in handled:
            bench.handle(claim, outputs)
        bench.store.record([Mark(claim, (outputs[0].id,)) for claim, outputs in handled])
        assert bench.store.upkeep.pending_count() == 20
        for claim, outputs in handled:
            assert bench.pending(claim) == [outputs[1].id]

    def test_record_of_what_is_gone(self, bench: Bench) -> None:
        """A mark for a handling that nobody knows does no harm."""
        bench.store.record([Mark(bench.claim(), (uuid4(),)), Mark(bench.claim(), (), redelivered=True)])
        bench.store.record([])
        assert bench.store.upkeep.pending_count() == 0

    # Starts without an end

    def test_starts_are_counted_until_an_end(self, bench: Bench) -> None:
        """Case 35: a process that died in the handler leaves its start behind; whoever comes to an end takes all away."""
        store, key = bench.store, uuid4()
        assert [store.note_start(bench.consumer, key) for _ in range(4)] == [0, 1, 2, 3]
        store.note_end(bench.consumer, key)
        store.note_end(bench.consumer, key)  # repeating it is harmless
        assert [store.note_start(bench.consumer, key) for _ in range(2)] == [0, 1]

    def test_a_start_is_taken_back(self, bench: Bench) -> None:
        """Its handler did not run after all; what was recorded before stays, and nothing is ever added."""
        store, key = bench.store, uuid4()
        store.note_end(bench.consumer, key, 3)
        assert [store.note_start(bench.consumer, key) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            store.note_end(bench.consumer, key, 2)
        assert store.note_start(bench.consumer, key) == 2
        store.note_end(bench.consumer, key, 99)
        assert store.note_start(bench.consumer, key) == 3
        store.note_end(bench.consumer, key)
        store.note_end(bench.consumer, key, 2)
        assert store.note_start(bench.consumer, key) == 0

    def test_starts_are_each_messages_own_at_each_consumer(self, bench: Bench) -> None:
        """No death counts against another message, nor against another consumer's copy of this one."""
        store, other = bench.store, f"{bench.consumer}-other"
        mine, neighbour = uuid4(), uuid4()
        store.note_end(other, mine)  # nobody started it, nor is that consumer known
        assert store.note_start(bench.consumer, mine) == 0
        assert store.note_start(bench.consumer, neighbour) == 0
        assert store.note_start(other, mine) == 0
        store.note_end(bench.consumer, neighbour)
        store.note_end(other, mine)
        assert store.note_start(bench.consumer, mine) == 1

    def test_racing_starts_are_all_counted(self, bench: Bench) -> None:
        """Two processes with one message at once: neither is lost, and each learns another number."""
        racers, each = 2, 25
        for _ in range(each):
            key, start = uuid4(), threading.Barrier(racers)

            def race(key: UUID = key, start: threading.Barrier = start) -> int:
                start.wait(self.patience)
                return bench.store.note_start(bench.consumer, key)

            running = [Background(race) for _ in range(racers)]
            assert sorted(racer.result(self.patience) for racer in running) == list(range(racers))
            assert bench.store.note_start(bench.consumer, key) == racers

    def test_rollback_does_not_take_the_start_away(self, bench: Bench) -> None:
        """The record is no part of the handling: neither of its rollback nor of its COMMIT."""
        store, claim = bench.store, bench.claim()
        key = claim.id.key
        assert store.note_start(bench.consumer, key) == 0
        with pytest.raises(ZeroDivisionError), store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            raise ZeroDivisionError
        assert store.note_start(bench.consumer, key) == 1
        assert bench.handle(claim, make_outputs(1), effect="sale").verdict is Verdict.CLAIMED
        assert store.note_start(bench.consumer, key) == 2
        store.note_end(bench.consumer, key)
        assert store.note_start(bench.consumer, key) == 0
        bench.counted("sale", 1)

    def test_start_is_seen_by_others_at_once(self, bench: Bench) -> None:
        """It is committed before the handling begins: a process that dies then has left it behind."""
        store, claim = bench.store, bench.claim()
        store.note_start(bench.consumer, claim.id.key)
        with store.begin([claim]) as unit:
            unit.claim(claim)
            if not self.one_writer:
                other = Background(lambda: store.note_start(bench.consumer, claim.id.key))
                assert other.result(self.patience) == 1
        assert store.note_start(bench.consumer, claim.id.key) == (1 if self.one_writer else 2)

    # The handler's own errors

    def test_own_unique_violation_is_no_duplicate(self, bench: Bench) -> None:
        """Case 11: only a conflict on the inbox key counts as one."""
        claim = bench.claim()
        with pytest.raises(Exception) as raised, bench.store.begin([claim]) as unit:  # noqa: PT011 - the driver's own
            unit.claim(claim)
            bench.effects.clash(unit)
        assert bench.store.translate(raised.value) is None
        assert bench.look(claim).verdict is Verdict.CLAIMED

    def test_our_own_errors_stay_what_they_are(self, bench: Bench) -> None:
        """Translating twice changes nothing; what is no error of the store's is none."""
        error = TransientStoreError("again")
        assert bench.store.translate(error) is error
        assert bench.store.translate(ValueError("no")) is None

    # Relays

    def test_pending_waits_for_its_time(self, bench: Bench) -> None:
        """A relay takes nothing that its own worker may still be sending."""
        claim, outputs = bench.claim(), make_outputs(3)
        bench.handle(claim, outputs)
        assert bench.store.upkeep.pending_count() == 3
        assert not bench.store.upkeep.take_pending(10, LEASE)
        bench.clock.advance(RELAY_AFTER)
        taken = bench.store.upkeep.take_pending(10, LEASE)
        assert [item.output for item in taken] == outputs
        assert [item.attempts for item in taken] == [2, 2, 2], "its own worker may have sent them"

    def test_left_to_the_relay_from_the_start(self, bench: Bench) -> None:
        """Nobody else sends them: due at once, and never tried before."""
        claim, outputs = bench.claim(), make_outputs(2)
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, outputs, timedelta(0))
            unit.commit()
        taken = bench.store.upkeep.take_pending(10, LEASE)
        assert [(item.output, item.attempts) for item in taken] == [(output, 1) for output in outputs]

    def test_lease_keeps_others_away_until_it_ends(self, bench: Bench) -> None:
        """Case 24: a dead relay's work is taken over, a slow one's is not stolen."""
        bench.handle(bench.claim(), make_outputs(5))
        bench.clock.advance(RELAY_AFTER)
        first = {item.output.id for item in bench.store.upkeep.take_pending(2, LEASE)}
        second = {item.output.id for item in bench.store.upkeep.take_pending(10, LEASE)}
        assert (len(first), len(second), first & second) == (2, 3, set())
        bench.clock.advance(LEASE - timedelta(seconds=1))
        assert not bench.store.upkeep.take_pending(10, LEASE)
        bench.clock.advance(timedelta(seconds=2))
        again = bench.store.upkeep.take_pending(10, LEASE)
        assert {item.output.id for item in again} == first | second
        assert {item.attempts for item in again} == {3}

    def test_settle_pending(self, bench: Bench) -> None:
        """Confirmed ones are done, failed ones wait, quarantined ones stay visible until they are released."""
        upkeep = bench.store.upkeep
        claim, (done, failed, hopeless) = bench.claim(), make_outputs(3)
        bench.handle(claim, [done, failed, hopeless])
        bench.clock.advance(RELAY_AFTER)
        upkeep.take_pending(10, LEASE)
        upkeep.settle_pending([done.id], {failed.id: "nacked"}, timedelta(seconds=5))
        upkeep.quarantine({hopeless.id: "returned: no queue"})
        assert bench.pending(claim) == [failed.id, hopeless.id]
        assert not upkeep.take_pending(10, LEASE)
        bench.clock.advance(timedelta(seconds=5))
        assert [item.output for item in upkeep.take_pending(10, LEASE)] == [failed]
        bench.clock.advance(timedelta(days=30))
        upkeep.settle_pending([failed.id], {}, timedelta(0))
        assert not upkeep.take_pending(10, LEASE)
        assert upkeep.pending_count() == 1
        assert upkeep.release_quarantined([hopeless.id, uuid4()]) == 1
        (item,) = upkeep.take_pending(10, LEASE)
        assert (item.output, item.attempts) == (hopeless, 2)

    def test_refusals_count_apart_from_attempts(self, bench: Bench) -> None:
        """An outage says nothing about an output; what the broker refused for its own sake is counted until a release."""
        upkeep = bench.store.upkeep
        claim, (done, refused, unlucky) = bench.claim(), make_outputs(3)
        bench.handle(claim, [done, refused, unlucky])
        bench.clock.advance(RELAY_AFTER)
        assert {item.refusals for item in upkeep.take_pending(10, LEASE)} == {0}
        upkeep.settle_pending([done.id], {refused.id: "closed", unlucky.id: "closed"}, timedelta(0))
        assert {item.refusals for item in upkeep.take_pending(10, LEASE)} == {0}
        for expected in (1, 2):
            upkeep.settle_pending([], {refused.id: "returned"}, timedelta(0), refused=True)
            upkeep.settle_pending([], {unlucky.id: "nacked"}, timedelta(0))
            found = {item.output.id: item for item in upkeep.take_pending(10, LEASE)}
            assert {id_: item.refusals for id_, item in found.items()} == {refused.id: expected, unlucky.id: 0}
            assert {item.attempts for item in found.values()} == {3 + expected}
        upkeep.quarantine({refused.id: "returned"})
        assert upkeep.release_quarantined([refused.id]) == 1
        (item,) = upkeep.take_pending(10, LEASE)
        assert (item.output, item.attempts, item.refusals) == (refused, 2, 0)

    def test_confirm_beats_quarantine(self, bench: Bench) -> None:
        """What was confirmed meanwhile is confirmed, whatever a relay thinks of it."""
        claim, (output,) = bench.claim(), make_outputs(1)
        bench.handle(claim, [output])
        bench.store.record([Mark(claim, (output.id,))])
        bench.store.upkeep.quarantine({output.id: "returned"})
        bench.store.upkeep.settle_pending([], {output.id: "nacked"}, timedelta(0))
        assert bench.pending(claim) == []
        assert bench.store.upkeep.pending_count() == 0
        assert bench.store.upkeep.release_quarantined([output.id]) == 0

    def test_pending_state(self, bench: Bench) -> None:
        """How much waits, and how long already; quarantined ones wait for nobody."""
        upkeep = bench.store.upkeep
        assert upkeep.pending_state() == PendingState()
        claim, (oldest, sent, hopeless) = bench.claim(), make_outputs(3)
        bench.handle(claim, [oldest, sent, hopeless])
        bench.clock.advance(timedelta(minutes=2))
        bench.handle(bench.claim(), make_outputs(2))
        bench.store.record([Mark(claim, (sent.id,))])
        upkeep.take_pending(10, LEASE)
        assert upkeep.pending_state() == PendingState(4, 0, 120)
        upkeep.quarantine({hopeless.id: "returned: no queue"})
        bench.clock.advance(timedelta(seconds=30))
        assert upkeep.pending_state() == PendingState(4, 1, 150)
        upkeep.settle_pending([oldest.id], {}, timedelta(0))
        assert upkeep.pending_state() == PendingState(3, 1, 30)
        upkeep.release_quarantined([hopeless.id])
        assert upkeep.pending_state() == PendingState(3, 0, 150)

    def test_relay_alive_by_beat_and_retire(self, bench: Bench) -> None:
        """Only a relay's beat counts, only for a while, and not after a clean end."""
        store = bench.store
        assert not store.relay_alive()
        store.upkeep.beat("worker", relay=False, consumers=[bench.consumer])
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        assert store.relay_alive()
        assert store.upkeep.relay_alive()
        store.upkeep.retire("relay")
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        bench.clock.advance(timedelta(minutes=1))
        assert not store.relay_alive()
        store.upkeep.beat("relay", relay=True, consumers=[])
        store.upkeep.beat("relay", relay=False, consumers=[])
        assert not store.relay_alive()

    def test_announcing_wakes_a_waiting_relay(self, bench: Bench) -> None:
        """Not only by polling."""
        bench.store.upkeep.wait_for_pending(0.01)  # whatever is needed before something can be heard
        waiting = Background(lambda: bench.store.upkeep.wait_for_pending(self.patience))
        deadline = time.monotonic() + self.patience
        while waiting.running and time.monotonic() < deadline:
            bench.store.announce_pending()
        assert waiting.result(self.patience)

    # Retention

    def test_purge_keeps_the_window(self, bench: Bench) -> None:
        """Case 40: just inside still a duplicate, just past it gone; consuming time counts."""
        window, claim = timedelta(minutes=5), bench.claim()
        bench.consume(timedelta(0))
        bench.handle(claim)
        bench.consume(window)
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 0
        assert bench.look(claim).verdict is Verdict.DUPLICATE
        bench.consume(timedelta(seconds=1))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1
        assert bench.handle(claim).verdict is Verdict.CLAIMED

    def test_purge_never_touches_pending(self, bench: Bench) -> None:
        """Case 41: neither such a claim nor its outputs."""
        window, claim, outputs = timedelta(minutes=1), bench.claim(), make_outputs(2)
        bench.consume(timedelta(0))
        bench.handle(claim, outputs)
        bench.store.record([Mark(claim, (outputs[0].id,))])
        bench.consume(timedelta(minutes=2))
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 0
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.store.record([Mark(claim, (outputs[1].id,))])
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1

    def test_purge_is_bounded_and_keeps_to_its_consumer(self, bench: Bench) -> None:
        """Case 42: batches; types that are not named, and other consumers' claims, stay."""
        other = f"{bench.consumer}-other"
        theirs = bench.claim(consumer=other)
        unnamed = replace(bench.claim(), message_type="conformance.Gone")
        bench.consume(timedelta(0))
        for claim in (*(bench.claim() for _ in range(5)), theirs, unnamed):
            bench.handle(claim)
        bench.consume(timedelta(minutes=2))
        window = {MESSAGE_TYPE: timedelta(minutes=1)}
        upkeep = bench.store.upkeep
        assert [upkeep.purge(bench.consumer, window, 3) for _ in range(3)] == [3, 2, 0]
        assert bench.look(theirs).verdict is Verdict.DUPLICATE
        assert bench.look(unnamed).verdict is Verdict.DUPLICATE
        assert upkeep.purge(bench.consumer, window, 3, others=timedelta(minutes=1)) == 1
        assert bench.look(unnamed).verdict is Verdict.CLAIMED

    def test_purge_forgets_starts_that_nobody_came_back_for(self, bench: Bench) -> None:
        """Not before a day, not before the longest window, not what started again meanwhile, and not at other consumers."""
        store, other = bench.store, f"{bench.consumer}-other"
        gone, back = uuid4(), uuid4()
        purge = partial(store.upkeep.purge, bench.consumer, limit=10)
        for consumer, key in ((bench.consumer, gone), (bench.consumer, back), (other, gone)):
            store.note_start(consumer, key)
        bench.clock.advance(timedelta(hours=23))
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}) == 0
        assert store.note_start(bench.consumer, gone) == 1
        assert store.note_start(bench.consumer, back) == 1
        bench.clock.advance(timedelta(hours=25))
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}, others=timedelta(days=3)) == 0
        assert purge({MESSAGE_TYPE: timedelta(minutes=1), "conformance.Slow": timedelta(days=3)}) == 0
        assert store.note_start(bench.consumer, back) == 2
        assert purge({MESSAGE_TYPE: timedelta(minutes=1)}) == 0, "starts are not counted among the claims"
        assert store.note_start(bench.consumer, gone) == 0
        assert store.note_start(bench.consumer, back) == 3
        assert store.note_start(other, gone) == 1

    def test_purge_forgets_starts_in_batches(self, bench: Bench) -> None:
        """Bounded as everything that the cleaner does."""
        store, keys = bench.store, [uuid4() for _ in range(5)]
        for key in keys:
            store.note_start(bench.consumer, key)
        bench.clock.advance(timedelta(hours=25))
        store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: timedelta(minutes=1)}, 3)
        assert sorted(store.note_start(bench.consumer, key) for key in keys) == [0, 0, 0, 1, 1]

    def test_purge_lag(self, bench: Bench) -> None:
        """How far the oldest that could go is past its own window: pending ones, and those without a window, can't."""
        upkeep, (output,) = bench.store.upkeep, make_outputs(1)
        short, waiting, unnamed = bench.claim(), bench.claim(), replace(bench.claim(), message_type="conformance.Gone")
        windows = {MESSAGE_TYPE: timedelta(minutes=5)}
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)
        bench.consume(timedelta(0))
        bench.handle(waiting, [output])
        bench.handle(unnamed)
        bench.consume(timedelta(minutes=1))
        bench.handle(short)
        bench.consume(timedelta(minutes=5))
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)
        bench.consume(timedelta(minutes=2))
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(minutes=2)
        assert upkeep.purge_lag(bench.consumer, windows, others=timedelta(minutes=1)) == timedelta(minutes=7)
        bench.store.record([Mark(waiting, (output.id,))])
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(minutes=3)
        assert upkeep.purge(bench.consumer, windows, 10) == 2
        assert upkeep.purge_lag(bench.consumer, windows) == timedelta(0)

    def test_late_before_follows_the_window(self, bench: Bench) -> None:
        """Case 15: what lies before it may have been purged; refreshed off the hot path."""
        window = timedelta(minutes=5)
        handled_at = bench.clock.now()
        bench.consume(window + timedelta(minutes=1))
        bench.store.refresh_horizons(bench.consumer, [window])
        before = bench.store.late_before(bench.consumer, window)
        assert before == bench.store.upkeep.late_before(bench.consumer, window)
        assert handled_at < before <= bench.clock.now() - window
