# ruff: noqa: S101, PLR2004, PT012 - this module is made of assertions
"""Cases of the store port: claims, conflicts, races."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from idemp.errors import TransactionEnded, TransientStoreError
from idemp.fingerprint import Fingerprint
from idemp.identity import MAX_ID_BYTES, EffectiveId
from idemp.inbox.port import Claimed, Verdict
from idemp.messages import Message, Output, OutputKind
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import MESSAGE_TYPE, RELAY_AFTER, Background, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.inbox.port import InboxStore


class ClaimCases(StoreSuite):
    """What a unit of work keeps, and what claims answer."""

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
        """Case 46: a megabyte comes back byte for byte, or as much as the store takes."""
        (plain,) = make_outputs(1)
        output = replace(plain, message=replace(plain.message, body=bytes(range(256)) * (self.largest_output // 256)))
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
        assert bench.handle(claim, outputs, effect="sale").verdict is Verdict.CLAIMED
        assert [stored.output for stored in bench.look(claim).outputs] == outputs
        bench.counted("sale", 1)

    def test_nothing_is_visible_before_commit(self, bench: Bench) -> None:
        """Neither effects nor outputs, and all of them afterwards."""
        claim, outputs = bench.claim(), make_outputs()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            unit.store_outputs(claim, outputs, timedelta(0))
            bench.counted("sale", 0)
            if self.waits and not self.one_writer:
                other = Background(lambda: bench.look(replace(claim, wait=timedelta(milliseconds=1))))
                assert other.result(self.patience) == Claimed(Verdict.IN_FLIGHT)
            unit.commit()
        bench.counted("sale", 1)
        assert bench.pending(claim) == [output.id for output in outputs]

    @pytest.mark.parametrize("through", ["session", "connection"])
    def test_handler_cannot_commit(self, bench: Bench, through: str) -> None:
        """What handlers write through has no `commit`, or refuses it: a failure afterwards still undoes everything."""
        claim = bench.claim()
        with pytest.raises((ZeroDivisionError, TransactionEnded)), bench.store.begin([claim]) as unit:
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            with suppress(AttributeError, TransactionEnded):
                getattr(unit, through).commit()
            raise ZeroDivisionError
        bench.counted("sale", 0)
        assert bench.look(claim).verdict is Verdict.CLAIMED

    @pytest.mark.parametrize("through", ["session", "connection"])
    def test_handler_cannot_roll_back(self, bench: Bench, through: str) -> None:
        """Nor can it undo a part: the handling is whole, or it is refused, also if the handler swallows the refusal."""
        claim, outputs, told, ended = bench.claim(), make_outputs(2), False, False
        try:
            with bench.store.begin([claim]) as unit:
                unit.claim(claim)
                bench.effects.write(unit, "sale")
                try:
                    getattr(unit, through).rollback()
                except TransactionEnded:
                    told = True
                except AttributeError:
                    pass
                unit.store_outputs(claim, outputs, RELAY_AFTER)
                unit.commit()
        except TransactionEnded:
            ended = True
        assert ended or not told, "it was refused, and committed all the same"
        bench.counted("sale", 0 if ended else 1)
        found = bench.look(claim)
        assert found.verdict is (Verdict.CLAIMED if ended else Verdict.DUPLICATE)
        assert [stored.output for stored in found.outputs] == ([] if ended else outputs)

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
        former = bench.claim()
        current = replace(bench.claim(), entity=former.entity)
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

    @pytest.mark.parametrize("payload", [1, None], ids=["same payload", "unknown payload"])
    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_other_type_is_a_conflict(self, bench: Bench, late: bool, payload: Any) -> None:
        """One id for two message types: the second message is not the first one, whatever is in it."""
        placed = bench.claim("order-1", payload=payload)
        bench.handle(placed, make_outputs(2))
        found = bench.handle(replace(placed, message_type="shop.Cancel"), make_outputs(1), effect="sale", late=late)
        assert (found.verdict, found.outputs, found.collision) == (Verdict.CONFLICT, (), True)
        assert MESSAGE_TYPE in found.detail
        bench.counted("sale", 0)

    def test_renamed_type_is_a_duplicate(self, bench: Bench) -> None:
        """A type's aliases are the same type."""
        placed, outputs = bench.claim("order-1"), make_outputs(2)
        bench.handle(placed, outputs)
        found = bench.look(replace(placed, message_type="shop.Placed", aliases=("shop.Put", MESSAGE_TYPE)))
        assert found.verdict is Verdict.DUPLICATE
        assert [stored.output for stored in found.outputs] == outputs

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

    def test_long_ids_differ_in_their_last_character(self, bench: Bench) -> None:
        """What a column that is too short would cut off."""
        ids = ["x" * (MAX_ID_BYTES - 1) + last for last in "ab"]
        for text in ids:
            assert bench.handle(bench.claim(text)).verdict is Verdict.CLAIMED
        for text in ids:
            assert bench.look(bench.claim(text)).verdict is Verdict.DUPLICATE

    def test_ids_differ_in_each_byte(self, bench: Bench) -> None:
        """One bit makes another message, wherever it stands, and so does the random part of ids of one millisecond."""
        key, moment = uuid4().int, 0x0190_0000_0000_7000_8000_0000_0000_0000
        near = [key ^ 1 << place for place in (*range(0, 128, 8), 127)]
        keys = [UUID(int=number) for number in (key, *near, moment | key >> 66, moment | uuid4().int >> 66)]
        claims = [replace(bench.claim(), id=EffectiveId(key, str(key)), entity="one") for key in keys]
        outputs = [make_outputs(1) for _ in claims]
        bench.handle(claims[0], outputs[0])
        with bench.store.begin(claims[1:]) as unit:
            assert {unit.claim(claim).verdict for claim in claims[1:]} == {Verdict.CLAIMED}
            for claim, own in zip(claims[1:], outputs[1:], strict=True):
                unit.store_outputs(claim, own, RELAY_AFTER)
            unit.commit()
        with bench.store.begin(claims) as unit:
            found = [unit.claim(claim) for claim in claims]
        assert [[stored.output for stored in one.outputs] for one in found] == outputs
        assert [bench.store.note_start(bench.consumer, keys[place]) for place in (0, 1, 16, 17)] == [0] * 4

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

    def test_other_ids_do_not_wait(self, bench: Bench) -> None:
        """A slow handling holds up no other message; where it has to, that is a retry, and never in flight."""
        slow = bench.claim()
        with bench.store.begin([slow]) as unit:
            unit.claim(slow)
            others = [Background(lambda: bench.handle(bench.claim(wait=1.0), make_outputs(1))) for _ in range(4)]
            for other in others:
                if self.one_writer:
                    with pytest.raises(TransientStoreError):
                        other.result(self.patience)
                else:
                    assert other.result(self.patience).verdict is Verdict.CLAIMED
            unit.commit()
