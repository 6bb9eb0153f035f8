"""Stores whose units of work or claims are broken."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from idemp.errors import TransientStoreError
from idemp.identity import EffectiveId, effective_id
from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.inbox.small import Handling
from idemp.messages import Output
from tests.testing.store_mutants.sound import Store, breaks, changed_message, of_any_type

# What a unit of work keeps


@breaks("verify_accepts_it")
class Nameless(Store):
    """It has no name for its process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.worker = ""


@breaks("claim_then_duplicate_with_identical_outputs")
class LastOutputLost(Store):
    """The last output is not stored."""

    class unit(MemoryUnit):  # noqa: N801 - an attribute that happens to be a class
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs[:-1], relay_after)


@breaks("claim_then_duplicate_with_identical_outputs")
class LateClaimWithoutOutputs(Store):
    """A late claim keeps the id and forgets the outputs."""

    class unit(MemoryUnit):  # noqa: N801
        def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
            return super().claim_and_store(claim, (), relay_after)


@breaks("other_type_is_a_conflict")
class TypesOverlooked(Store):
    """Whoever claimed an id, the second message is a duplicate."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(of_any_type(claim))


@breaks("renamed_type_is_a_duplicate")
class AliasesOverlooked(Store):
    """A renamed type is another one."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(replace(claim, aliases=()))


@breaks("outputs_keep_every_property")
class WholeSeconds(Store):
    """Times lose what is below a second."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            rounded = [
                replace(item, message=replace(item.message, timestamp=item.message.timestamp.replace(microsecond=0)))
                if item.message.timestamp
                else item
                for item in outputs
            ]
            super().store_outputs(claim, rounded, relay_after)


@breaks("outputs_keep_every_property")
class DelayForgotten(Store):
    """A delayed output comes back without its delay."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, [replace(output, delay=0.0) for output in outputs], relay_after)


@breaks("falsy_values_replay_as_themselves")
class FalsyHeadersLost(Store):
    """Only headers that are true are kept."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            kept = [
                changed_message([item], headers={name: value for name, value in item.message.headers.items() if value})
                for item in outputs
            ]
            super().store_outputs(claim, [item for (item,) in kept], relay_after)


@breaks("falsy_values_replay_as_themselves")
class FalsyPropertiesLost(Store):
    """Empty and zero properties become absent ones."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            kept = [
                changed_message([item], ttl=item.message.ttl or None, priority=item.message.priority or None)[0]
                for item in outputs
            ]
            super().store_outputs(claim, kept, relay_after)


@breaks("a_hundred_outputs_keep_their_order")
class OutputsById(Store):
    """Outputs come back in the order of their ids."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, sorted(outputs, key=lambda output: output.id), relay_after)


@breaks("a_hundred_outputs_keep_their_order")
class OutputsByOrdinalText(Store):
    """Outputs come back in the order of their ordinals as text: 1, 10, 2."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, sorted(outputs, key=lambda output: str(output.ordinal)), relay_after)


@breaks("large_output")
class BodiesCutOff(Store):
    """A body is cut off at 64 KiB, as a BLOB of MySQL would."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            cut = [changed_message([item], body=item.message.body[:65535])[0] for item in outputs]
            super().store_outputs(claim, cut, relay_after)


@breaks("no_outputs_are_recorded_all_the_same")
class NothingToKeep(Store):
    """A handling without outputs leaves no row."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            empty = [key for key, handling in self._handlings.items() if not handling.sendings]
            super().commit()
            for key in empty:
                del self._store.content.handlings[key]


@breaks("rollback_frees_the_claim", "second_waits_and_the_first_rolls_back")
class ClaimSurvivesRollback(Store):
    """The claim is committed by itself, before the handler runs."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            claimed = super().claim(claim)
            self._store.content.handlings.update(self._handlings)
            return claimed


@breaks("rollback_frees_the_claim", "nothing_is_visible_before_commit")
class EffectsAtOnce(Store):
    """Effects are committed one by one (AUTOCOMMIT)."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs, relay_after)
            self.committed.update(self.session.changes())


@breaks("nothing_is_visible_before_commit")
class ReadsUncommitted(Store):
    """A second claim sees the row of a transaction that still runs."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            holder = self._store.holders.get((claim.consumer, claim.id.key))
            if holder is not None and holder is not self:
                return Claimed(Verdict.DUPLICATE)
            return super().claim(claim)


@breaks("handler_cannot_commit")
class HandlersCommit(Store):
    """`commit` of the session commits what was done so far."""

    class unit(MemoryUnit):  # noqa: N801
        def refuse(self, what: str) -> None:
            self.committed.update(self.session.changes())


@breaks("handler_cannot_roll_back")
class HandlersRollBack(Store):
    """`rollback` of the session undoes the effects, and the claim stays."""

    class unit(MemoryUnit):  # noqa: N801
        def refuse(self, what: str) -> None:
            self.session._changes.clear()


@breaks("handler_cannot_roll_back")
class RefusalsAreForgotten(Store):
    """A handler that swallows the refusal goes on as if nothing was."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            self._broken = None
            super().store_outputs(claim, outputs, relay_after)


@breaks("one_id_two_consumers")
class ClaimWithoutConsumer(Store):
    """The key is the id alone."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(replace(claim, consumer=""))

        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(replace(claim, consumer=""), outputs, relay_after)


@breaks("two_claims_in_one_unit")
class DuplicateCommits(Store):
    """Who learns that an id is taken commits what the unit claimed before."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            claimed = super().claim(claim)
            if claimed.verdict is Verdict.DUPLICATE:
                self.commit()
            return claimed


# Conflicts


@breaks("other_payload_is_a_conflict")
class PayloadsIgnored(Store):
    """The same id with other content is taken for a duplicate."""

    def found(self, former: Handling, claim: Claim) -> Claimed:
        return super().found(former, replace(claim, fingerprint=None))


@breaks("other_payload_is_a_conflict")
class ConflictWithoutOutputs(Store):
    """A conflict doesn't tell what was stored."""

    def found(self, former: Handling, claim: Claim) -> Claimed:
        found = super().found(former, claim)
        return replace(found, outputs=()) if found.verdict is Verdict.CONFLICT else found


@breaks("unknown_fingerprint_never_conflicts")
class UnknownIsAValue(Store):
    """`None` is compared as a fingerprint like others."""

    def found(self, former: Handling, claim: Claim) -> Claimed:
        found = super().found(former, claim)
        if former.claim.fingerprint != claim.fingerprint:
            return replace(found, verdict=Verdict.CONFLICT, detail="other payload")
        return found


@breaks("fingerprints_of_other_fields_never_conflict")
class FieldsIgnored(Store):
    """Fingerprints are compared whatever they were made of."""

    def found(self, former: Handling, claim: Claim) -> Claimed:
        found = super().found(former, claim)
        if None not in {former.claim.fingerprint, claim.fingerprint} and former.claim.fingerprint != claim.fingerprint:
            return replace(found, verdict=Verdict.CONFLICT, detail="other payload")
        return found


@breaks("other_original_id_is_a_conflict")
class DigestIsEnough(Store):
    """Two ids of one digest are taken for the same id."""

    def found(self, former: Handling, claim: Claim) -> Claimed:
        return super().found(former, replace(claim, id=former.claim.id))


class _IdsByText(MemoryUnit):
    """The id is what a database makes of its text."""

    def column(self, text: str) -> str:
        raise NotImplementedError

    def _stored(self, claim: Claim) -> Claim:
        text = self.column(claim.id.text)
        return replace(claim, id=EffectiveId(effective_id("envelope", text).key, text))

    def claim(self, claim: Claim) -> Claimed:
        return super().claim(self._stored(claim))

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        super().store_outputs(self._stored(claim), outputs, relay_after)


@breaks("ids_differ_by_case_and_blanks")
class CaseInsensitiveIds(Store):
    """`Order` and `order` are one id."""

    class unit(_IdsByText):  # noqa: N801
        def column(self, text: str) -> str:
            return text.casefold()


@breaks("ids_differ_by_case_and_blanks")
class PaddedIds(Store):
    """Blanks at the end don't count."""

    class unit(_IdsByText):  # noqa: N801
        def column(self, text: str) -> str:
            return text.rstrip()


@breaks("long_ids_differ_in_their_last_character")
class TruncatedIds(Store):
    """The column is one byte too short, and the database cuts off."""

    class unit(_IdsByText):  # noqa: N801
        def column(self, text: str) -> str:
            return text[:254]


# Races


@breaks("racing_claimers")
class CheckThenInsert(Store):
    """It looks first and inserts then: whoever looked meanwhile inserts, too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.looked = threading.Barrier(4)

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            key = (claim.consumer, claim.id.key)
            with self._store.changed:
                taken = key in self._store.content.handlings
            self._store.looked.wait(10)  # type: ignore[attr-defined]
            claimed = super().claim(claim)
            return claimed if taken else self._insert(claim)

        def _insert(self, claim: Claim) -> Claimed:
            for taken in (self._store.holders, self._store.content.handlings, self._handlings):
                taken.pop((claim.consumer, claim.id.key), None)
            return super().claim(claim)


@breaks("second_waits_and_is_a_duplicate", "holder_slower_than_the_wait")
class NeverWaits(Store):
    """An id that somebody holds is in flight at once."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(replace(claim, wait=timedelta(0)))


@breaks("second_waits_and_the_first_rolls_back")
class NoRowMeansDuplicate(Store):
    """Who had to wait answers DUPLICATE without reading the row."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            waits = (claim.consumer, claim.id.key) in self._store.holders
            claimed = super().claim(claim)
            return Claimed(Verdict.DUPLICATE) if waits and claimed.verdict is Verdict.CLAIMED else claimed


@breaks("holder_slower_than_the_wait")
class WaitsLonger(Store):
    """It waits much longer than the claim says."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(replace(claim, wait=claim.wait * 10))


@breaks("holder_slower_than_the_wait")
class InFlightIsAnError(Store):
    """A claim that waited in vain is told as a failure of the database."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            claimed = super().claim(replace(claim, wait=timedelta(0)))
            if claimed.verdict is Verdict.IN_FLIGHT:
                raise TransientStoreError("lock wait timeout exceeded")
            return claimed


@breaks("waiting_setting_does_not_outlive_the_claim")
class WaitOutlivesTheClaim(Store):
    """The shortest wait so far stays set on the connection."""

    shortest = timedelta.max

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            store: Any = self._store
            store.shortest = min(store.shortest, claim.wait)
            return super().claim(replace(claim, wait=store.shortest))


@breaks("other_ids_do_not_wait")
class OneClaimAtATime(Store):
    """A claim locks its consumer, not its id."""

    class unit(MemoryUnit):  # noqa: N801
        def claim(self, claim: Claim) -> Claimed:
            return super().claim(replace(claim, id=replace(claim.id, key=UUID(int=0))))

        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(replace(claim, id=replace(claim.id, key=UUID(int=0))), outputs, relay_after)
