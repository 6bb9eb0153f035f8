# ruff: noqa: S101, PLR2004, PT012 - this module is made of assertions
"""Cases of the store port: several claims in one unit of work, as a batch makes them."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp.errors import TransientStoreError
from idemp.identity import EffectiveId
from idemp.inbox.port import Claimed, Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import MESSAGE_TYPE, RELAY_AFTER, Background, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.inbox.port import Claim
    from idemp.messages import Output

WAIT = timedelta(seconds=10)
BRIEFLY = timedelta(milliseconds=100)


class BatchCases(StoreSuite):
    """What claims that are made together answer, and what is kept of their handlings."""

    def test_all_are_kept(self, bench: Bench) -> None:
        """Each with its own outputs, in emission order; those without outputs as well."""
        claims = [bench.claim() for _ in range(7)]
        outputs = [make_outputs(number % 4) for number in range(7)]
        assert _verdicts(_batch(bench, claims, outputs)) == [Verdict.CLAIMED] * 7
        bench.counted("sale", 7)
        found = [bench.look(claim) for claim in claims]
        assert _verdicts(found) == [Verdict.DUPLICATE] * 7
        assert [[stored.output for stored in each.outputs] for each in found] == outputs
        assert all(stored.pending for each in found for stored in each.outputs)

    @pytest.mark.parametrize("fresh", [0, 3])
    def test_each_gets_its_own_answer(self, bench: Bench, fresh: int) -> None:
        """In the order of the claims: fresh ones, duplicates with what is stored, and conflicts, side by side."""
        known, other, plain = bench.claim("order-1"), bench.claim("order-2"), bench.claim("order-3")
        outputs = make_outputs(3)
        for claim, own in ((known, outputs), (other, make_outputs(1)), (plain, [])):
            bench.handle(claim, own)
        twin = replace(plain, id=EffectiveId(plain.id.key, "order-4"))
        claims = [replace(other, fingerprint=bench.claim(payload=2).fingerprint), twin, known]
        claims[1:1] = [bench.claim() for _ in range(fresh)]
        answers = _batch(bench, claims, [make_outputs(2) for _ in claims])
        new = [Verdict.CLAIMED] * fresh
        assert _verdicts(answers) == [Verdict.CONFLICT, *new, Verdict.CONFLICT, Verdict.DUPLICATE]
        assert [stored.output for stored in answers[-1].outputs] == outputs
        assert answers[-2].collision
        bench.counted("sale", fresh)
        again = _batch(bench, claims, [[] for _ in claims])
        assert _verdicts(again) == [Verdict.CONFLICT, *[Verdict.DUPLICATE] * fresh, Verdict.CONFLICT, Verdict.DUPLICATE]

    def test_other_types_are_conflicts(self, bench: Bench) -> None:
        """Ids that a message of another type has, beside a renamed type and a fresh id."""
        first, second = bench.claim("order-1"), bench.claim("order-2")
        for claim in (first, second):
            bench.handle(claim)
        other = replace(first, message_type="shop.Cancel", fingerprint=None)
        renamed = replace(second, message_type="shop.Cancel", aliases=(MESSAGE_TYPE,))
        answers = _batch(bench, [other, renamed, bench.claim()], [[], [], []])
        assert _verdicts(answers) == [Verdict.CONFLICT, Verdict.DUPLICATE, Verdict.CLAIMED]
        assert answers[0].collision

    def test_rollback_frees_all(self, bench: Bench) -> None:
        """One transaction: nothing of it stays."""
        claims = [bench.claim() for _ in range(3)]
        with pytest.raises(ZeroDivisionError), bench.store.begin(claims) as unit:
            unit.claim_all(claims, WAIT)
            bench.effects.write(unit, "sale")
            unit.store_all([(claim, make_outputs(2)) for claim in claims], RELAY_AFTER)
            raise ZeroDivisionError
        bench.counted("sale", 0)
        assert _verdicts([bench.look(claim) for claim in claims]) == [Verdict.CLAIMED] * 3

    def test_outputs_of_every_size_and_text(self, bench: Bench) -> None:
        """Large ones beside small ones, and texts that a statement could mistake for its own."""
        texts = ("it's", '"}\',{"', "NULL", "ü\\x41", "%s")
        for large in (True, False):
            claims, outputs = [bench.claim(f"{text} {large}") for text in texts], [make_outputs(2) for _ in texts]
            for text, own in zip(texts, outputs, strict=True):
                message = replace(own[0].message, headers={text: text}, body=text.encode())
                own[0] = replace(own[0], routing_key=text, exchange=text, message=message)
            if large:
                own[1] = replace(own[1], message=replace(own[1].message, body=bytes(range(256)) * 4096))
            _batch(bench, claims, outputs)
            assert [[stored.output for stored in bench.look(claim).outputs] for claim in claims] == outputs

    def test_source_positions_are_told(self, bench: Bench) -> None:
        """Those of the claims that have the ids, to who comes later: so an own retry is known from a duplicate."""
        claims = [replace(bench.claim(), position=f"topic/3#{number} it's ü") for number in range(3)]
        claims.append(bench.claim())
        assert _verdicts(_batch(bench, claims, [make_outputs(1) for _ in claims])) == [Verdict.CLAIMED] * 4
        elsewhere = [replace(claim, position="topic/4#0") for claim in claims]
        answers = _batch(bench, elsewhere, [[] for _ in claims])
        assert _verdicts(answers) == [Verdict.DUPLICATE] * 4
        assert [answer.position for answer in answers] == [claim.position for claim in claims]
        assert bench.look(elsewhere[0]).position == claims[0].position

    def test_looking_leaves_no_trace(self, bench: Bench) -> None:
        """It says what claiming would, and claims nothing."""
        known, fresh = bench.claim(), bench.claim()
        outputs = make_outputs(1)
        bench.handle(known, outputs)
        other = replace(known, fingerprint=bench.claim(payload=2).fingerprint)
        for _ in range(2):
            with bench.store.begin([known, fresh]) as unit:
                answers = unit.look_all([fresh, known])
            assert _verdicts(answers) == [Verdict.CLAIMED, Verdict.DUPLICATE]
            with bench.store.begin([other]) as unit:
                assert _verdicts(unit.look_all([other])) == [Verdict.CONFLICT]
        assert [stored.output for stored in answers[1].outputs] == outputs
        assert bench.handle(fresh).verdict is Verdict.CLAIMED

    @pytest.mark.parametrize("size", [10, 1 << 20])
    def test_outputs_that_nobody_sends(self, bench: Bench, size: int) -> None:
        """They are kept, and do not pend."""
        claims = [bench.claim() for _ in range(3)]
        outputs = [replace(item, message=replace(item.message, body=b"1" * size)) for item in make_outputs(2)]
        with bench.store.begin(claims) as unit:
            unit.claim_all(claims, WAIT)
            unit.store_all([(claims[0], outputs), (claims[1], []), (claims[2], make_outputs(1))], None)
            unit.commit()
        assert [stored.output for stored in bench.look(claims[0]).outputs] == outputs
        assert [bench.pending(claim) for claim in claims] == [[], [], []]

    def test_a_claim_waits_for_one_of_a_batch(self, bench: Bench) -> None:
        """And a batch for a claim: who comes second is a duplicate."""
        claims = [bench.claim() for _ in range(3)]
        with bench.store.begin(claims) as unit:
            unit.claim_all(claims, WAIT)
            second = Background(lambda: bench.handle(claims[1], effect="sale"))
            other = Background(lambda: bench.repeat(lambda: _batch(bench, claims[::-1], [[]] * 3)))
            assert second.stays(self.quiet)
            assert other.running
            unit.store_all([(claim, make_outputs(1)) for claim in claims], RELAY_AFTER)
            unit.commit()
        # One writer may have waited too long; it must have ended even so, before the next test begins.
        with suppress(TransientStoreError) if self.one_writer else nullcontext():
            assert second.result(self.patience).verdict is Verdict.DUPLICATE
        assert _verdicts(other.result(self.patience)) == [Verdict.DUPLICATE] * 3
        bench.counted("sale", 0)

    def test_one_is_held_for_too_long(self, bench: Bench) -> None:
        """The unit is given up, soon, and the one who holds the id is not disturbed."""
        claims = [bench.claim() for _ in range(4)]
        with bench.store.begin([claims[2]]) as unit:
            unit.claim(claims[2])
            since = time.monotonic()
            second = Background(lambda: _batch(bench, claims, [[]] * 4, wait=BRIEFLY))
            if self.one_writer:
                with pytest.raises(TransientStoreError):
                    second.result(self.patience)
            else:
                verdicts = _verdicts(second.result(self.patience))
                assert verdicts[2] is Verdict.IN_FLIGHT
                assert time.monotonic() - since < 5
            unit.commit()
        bench.counted("sale", 0)
        assert bench.look(claims[0]).verdict is Verdict.CLAIMED

    def test_racing_batches(self, bench: Bench) -> None:
        """In whatever order the ids come, each is handled once, and no two wait for each other."""
        claims, start = [bench.claim() for _ in range(8)], threading.Barrier(4)

        def race(number: int) -> Callable[[], Sequence[Claimed]]:
            own = claims[number:] + claims[:number] if number % 2 else claims[::-1]

            def run() -> Sequence[Claimed]:
                start.wait(self.patience)
                return bench.repeat(lambda: _batch(bench, own, [make_outputs(1) for _ in own]))

            return run

        racers = [Background(race(number)) for number in range(4)]
        verdicts = [verdict for racer in racers for verdict in _verdicts(racer.result(self.patience))]
        assert (verdicts.count(Verdict.CLAIMED), verdicts.count(Verdict.DUPLICATE)) == (8, 24)
        bench.counted("sale", 8)


def _verdicts(answers: Sequence[Claimed]) -> list[Verdict]:
    return [answer.verdict for answer in answers]


def _batch(
    bench: Bench, claims: Sequence[Claim], outputs: Sequence[Sequence[Output]], *, wait: timedelta = WAIT
) -> Sequence[Claimed]:
    """A whole batch, with an effect for each that is fresh; kept unless something is in flight."""
    with bench.store.begin(claims) as unit:
        answers = unit.claim_all(claims, wait)
        verdicts = _verdicts(answers)
        handled = []
        for claim, verdict, own in zip(claims, verdicts, outputs, strict=True):
            if verdict is Verdict.CLAIMED and Verdict.IN_FLIGHT not in verdicts:
                bench.effects.write(unit, "sale")
                unit.forget()
                handled.append((claim, own))
        if handled:
            unit.store_all(handled, RELAY_AFTER)
            unit.commit()
        return answers
