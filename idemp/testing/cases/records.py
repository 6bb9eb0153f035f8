# ruff: noqa: S101, PLR2004, PT012 - this module is made of assertions
"""Cases of the store port: what is recorded beside the handling, and what errors mean."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from idemp.errors import TransientStoreError
from idemp.inbox.port import Mark, Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import Background, Bench, make_outputs

if TYPE_CHECKING:
    from uuid import UUID


class RecordCases(StoreSuite):
    """Confirms, starts without an end, and the handler's own errors."""

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
        for claim, outputs in handled:
            assert bench.pending(claim) == [outputs[1].id]

    def test_record_of_what_is_gone(self, bench: Bench) -> None:
        """A mark for a handling that nobody knows does no harm, and leaves nothing behind."""
        gone, handled, outputs = bench.claim(), bench.claim(), make_outputs(1)
        bench.handle(handled, outputs)
        bench.store.record([Mark(gone, (uuid4(),), False, ((uuid4(), "nacked"),)), Mark(gone, (), redelivered=True)])
        bench.store.record([Mark(gone, (uuid4(),)), Mark(handled, (outputs[0].id,))])
        bench.store.record([])
        assert bench.pending(handled) == []
        assert bench.look(gone).verdict is Verdict.CLAIMED

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
