"""Stores whose units of work are broken for several claims at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.messages import Output
from tests.testing.store_mutants.sound import Store, breaks, changed_message, of_any_type

Handled = Sequence[tuple[Claim, Sequence[Output]]]


@breaks("all_are_kept")
class FirstOfABatchOnly(Store):
    """The outputs of the others are not stored."""

    class unit(MemoryUnit):  # noqa: N801
        def store_all(self, handled: Handled, relay_after: timedelta | None) -> None:
            with_outputs = [each for each in handled if each[1]]
            super().store_all(with_outputs[:1], relay_after)


@breaks("each_gets_its_own_answer")
class AnswersInTheOrderOfIds(Store):
    """As they were claimed, and not as they were asked for."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            return super().claim_all(sorted(claims, key=lambda claim: claim.id.key), wait)


@breaks("other_types_are_conflicts")
class TypesOfABatchOverlooked(Store):
    """Whoever claimed an id, the second message is a duplicate."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            return super().claim_all([of_any_type(claim) for claim in claims], wait)


@breaks("rollback_frees_all")
class BatchClaimsStay(Store):
    """They are committed at once."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            answers = super().claim_all(claims, wait)
            self._store.content.handlings.update(self._handlings)
            return answers


@breaks("outputs_of_every_size_and_text")
class BodiesOfABatchCutOff(Store):
    """At 64 KiB."""

    class unit(MemoryUnit):  # noqa: N801
        def store_all(self, handled: Handled, relay_after: timedelta | None) -> None:
            cut = [
                (claim, [changed_message([item], body=item.message.body[: 1 << 16])[0] for item in outputs])
                for claim, outputs in handled
            ]
            super().store_all(cut, relay_after)


@breaks("source_positions_are_told")
class PositionsOfABatchForgotten(Store):
    """Nobody learns from where an id was claimed."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            return super().claim_all([replace(claim, position=None) for claim in claims], wait)


@breaks("looking_leaves_no_trace")
class LookingClaims(Store):
    """What was looked at once is nobody's to claim."""

    class unit(MemoryUnit):  # noqa: N801
        def look_all(self, claims: Sequence[Claim]) -> Sequence[Claimed]:
            answers = super().look_all(claims)
            self._store.content.handlings.update(self._handlings)
            return answers


@breaks("outputs_that_nobody_sends")
class EverythingPends(Store):
    """What nobody is to send is left to the relay."""

    class unit(MemoryUnit):  # noqa: N801
        def store_all(self, handled: Handled, relay_after: timedelta | None) -> None:
            super().store_all(handled, relay_after or timedelta(0))


@breaks("a_claim_waits_for_one_of_a_batch")
class BatchHoldsNothing(Store):
    """Others do not wait for its ids."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            answers = super().claim_all(claims, wait)
            for key in self._handlings:
                self._store.holders.pop(key, None)
            return answers


@breaks("one_is_held_for_too_long")
class BatchWaitsLikeAClaim(Store):
    """As long as the claims say."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            del wait
            return super().claim_all(claims, max(claim.wait for claim in claims))


@breaks("racing_batches")
class DuplicatesOfABatchClaimed(Store):
    """What another batch has handled is handled again."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
            answers = super().claim_all(claims, wait)
            return [Claimed(Verdict.CLAIMED) if each.verdict is Verdict.DUPLICATE else each for each in answers]

        def store_all(self, handled: Handled, relay_after: timedelta | None) -> None:
            super().store_all([each for each in handled if each[0].id.key in self._own()], relay_after)

        def _own(self) -> set[object]:
            return {key for _, key in self._handlings}
