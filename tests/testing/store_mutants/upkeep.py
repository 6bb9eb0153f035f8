"""Stores that fail their relays, cleaners and deploys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from idemp.errors import IdentityChanged
from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, Identity, Mark, PendingOutput, PendingState
from idemp.messages import Output
from tests.testing.store_mutants.sound import LastingStore, Store, breaks

_Found = tuple[tuple[str, UUID], timedelta]


# Relays


@breaks("pending_waits_for_its_time")
class DueAtOnce(Store):
    """A relay takes what its worker is sending right now."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> None:
            super().store_outputs(claim, outputs, timedelta(0))


@breaks("pending_waits_for_its_time")
class RelayOutOfOrder(Store):
    """A relay gets the outputs of a handling in another order."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(limit, lease)[::-1]


@breaks("left_to_the_relay_from_the_start")
class AttemptsFromTwo(Store):
    """What was never sent counts as tried."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        taken = super().take_pending(limit, lease)
        return [replace(item, attempts=max(2, item.attempts)) for item in taken]


@breaks("relays_see_what_is_committed")
class RelaysReadUncommitted(Store):
    """A relay sees outputs of a unit of work that still runs, or that rolled back."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> None:
            super().store_outputs(claim, outputs, relay_after)
            with self._store.begin() as other:
                other._rows, other._due = dict(self._rows), dict(self._due)
                other.commit()


@breaks("lease_keeps_others_away_until_it_ends")
class NoLease(Store):
    """Two relays get the same outputs."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(limit, timedelta(0))


@breaks("lease_keeps_others_away_until_it_ends")
class LeaseForEver(Store):
    """What a dead relay had taken nobody gets."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(limit, timedelta(days=365))


@breaks("lease_keeps_others_away_until_it_ends")
class TakesMoreThanAsked(Store):
    """The limit is not kept."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(10 * limit, lease)


@breaks("settle_pending")
class RetriesAtOnce(Store):
    """What failed does not wait."""

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        super().settle_pending(confirmed, failed, timedelta(0), refused=refused)


@breaks("settle_pending")
class QuarantineIsDeletion(Store):
    """Nobody sees what was quarantined, or can release it."""

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        for output_id in outputs:
            self.state.pending.pop(output_id, None)


@breaks("settle_pending")
class QuarantineEnds(Store):
    """What was quarantined is taken again when its lease is over."""

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Only for people."""


@breaks("refusals_count_apart_from_attempts")
class OutagesAreRefusals(Store):
    """Every failure counts as a refusal."""

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        super().settle_pending(confirmed, failed, retry_in, refused=bool(failed))


@breaks("refusals_count_apart_from_attempts", "settle_pending")
class ReleasedWithItsHistory(Store):
    """A released output keeps its attempts and refusals, and goes back into quarantine at once."""

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        kept = {item: (found.attempts, found.refusals) for item, found in self.state.pending.items()}
        number = super().release_quarantined(outputs)
        for item, (attempts, refusals) in kept.items():
            self.state.pending[item].attempts, self.state.pending[item].refusals = attempts, refusals
        return number


@breaks("confirm_beats_quarantine")
class QuarantineBeatsConfirm(Store):
    """What a relay quarantines is pending again, though it was confirmed meanwhile."""

    def record(self, marks: Sequence[Mark]) -> None:
        self.former = dict(self.state.pending)
        super().record(marks)

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        self.state.pending.update({item: self.former[item] for item in outputs if item in self.former})
        super().quarantine(outputs)


@breaks("pending_state")
class AgeOfQuarantined(Store):
    """What is quarantined counts as waiting."""

    def pending_state(self) -> PendingState:
        claimed = [self.state.rows[item.key].claimed_at for item in self.state.pending.values()]
        found = super().pending_state()
        if not claimed:
            return found
        return replace(found, oldest_seconds=(self.clock.now() - min(claimed)).total_seconds(), quarantined=0)


@breaks("pending_state")
class AgeSinceLastTry(Store):
    """The age is that of the last attempt."""

    def pending_state(self) -> PendingState:
        found = super().pending_state()
        return replace(found, oldest_seconds=min(found.oldest_seconds, 60.0))


@breaks("relay_alive_by_beat_and_retire")
class EveryBeatIsARelays(Store):
    """A worker that is no relay is taken for one."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        super().beat(worker, relay=True, consumers=consumers)


@breaks("relay_alive_by_beat_and_retire")
class RelaysLiveForEver(Store):
    """A relay that died without a word is taken for alive."""

    relay_life = timedelta(days=365)


@breaks("relay_alive_by_beat_and_retire")
class RelaysStayAfterTheirEnd(Store):
    """A relay that ended cleanly is taken for alive."""

    def retire(self, worker: str) -> None:
        """Nothing."""


@breaks("announcing_wakes_a_waiting_relay")
class PollingOnly(Store):
    """Nobody wakes a relay."""

    def announce_pending(self) -> None:
        """Nothing."""


# Retention


@breaks("purge_keeps_the_window")
class WindowCutShort(Store):
    """Claims go before their window is over."""

    def _expired(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None) -> Iterator[_Found]:
        yield from super()._expired(consumer, {name: window / 2 for name, window in retention.items()}, others)


@breaks("purge_keeps_the_window")
class NeverPurges(Store):
    """Claims stay for ever."""

    def _expired(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None) -> Iterator[_Found]:
        yield from ()


@breaks("window_stands_still_with_its_consumer")
class WindowsByTheClock(LastingStore):
    """A consumer's standstill counts."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        with self.changing() as content:
            for consumer in consumers:
                content.consumed[consumer] = [(datetime.min.replace(tzinfo=UTC), self.clock.now())]


@breaks("window_stands_still_with_its_consumer")
class StandstillEndsTheWindow(LastingStore):
    """After a standstill the window starts anew."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        super().beat(worker, relay=relay, consumers=consumers)
        with self.changing() as content:
            content.consumed = {consumer: intervals[-1:] for consumer, intervals in content.consumed.items()}


@breaks("purge_never_touches_pending", "purge_lag")
class PurgesPending(Store):
    """Claims go although their outputs wait for a confirm."""

    def _expired(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None) -> Iterator[_Found]:
        pending, self.state.pending = self.state.pending, {}
        found = list(super()._expired(consumer, retention, others))
        self.state.pending = pending
        yield from found


@breaks("purge_is_bounded_and_keeps_to_its_consumer")
class PurgesAllConsumers(Store):
    """Claims of other consumers go, too."""

    def _expired(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None) -> Iterator[_Found]:
        for name in {name for name, _ in self.state.rows}:
            yield from super()._expired(name, retention, others)


@breaks("purge_is_bounded_and_keeps_to_its_consumer")
class PurgesAllTypes(Store):
    """Types that nobody named go with the longest window of the others."""

    def _expired(self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None) -> Iterator[_Found]:
        yield from super()._expired(consumer, retention, others or max(retention.values()))


@breaks("purge_is_bounded_and_keeps_to_its_consumer", "purge_forgets_starts_in_batches")
class PurgesWithoutBound(Store):
    """One call deletes all there is."""

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        return super().purge(consumer, retention, 1_000_000, others=others)


@breaks("purge_forgets_starts_that_nobody_came_back_for")
class StartsStayForEver(Store):
    """Starts without an end pile up."""

    def _forget_starts(self, consumer: str, windows: Sequence[timedelta], limit: int) -> None:
        """Nothing."""


@breaks("purge_forgets_starts_that_nobody_came_back_for")
class StartsGoWithAnyWindow(Store):
    """Starts go after a day, though a window is longer."""

    def _forget_starts(self, consumer: str, windows: Sequence[timedelta], limit: int) -> None:
        super()._forget_starts(consumer, [timedelta(0), timedelta(0)], limit)


@breaks("purge_forgets_starts_that_nobody_came_back_for")
class StartsOfOthersGo(Store):
    """Starts of other consumers go, too."""

    def _forget_starts(self, consumer: str, windows: Sequence[timedelta], limit: int) -> None:
        for name in {name for name, _ in self.state.unfinished}:
            super()._forget_starts(name, windows, limit)


@breaks("purge_lag")
class LagOfTheYoungest(Store):
    """The lag is that of the claim that could go last."""

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        return min((lag for _, lag in self._expired(consumer, retention, others)), default=timedelta(0))


@breaks("late_before_follows_the_window")
class HorizonStandsStill(Store):
    """What may have been purged is worked out at the start, and never again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.since = self.clock.now()

    def late_before(self, consumer: str, retention: timedelta) -> Any:
        return self.since - retention


@breaks("late_before_follows_the_window")
class HorizonInsideTheWindow(Store):
    """Messages inside the window are taken for late."""

    def late_before(self, consumer: str, retention: timedelta) -> Any:
        return self.clock.now() - retention / 2


# Identities


@breaks("changed_identity_is_refused", "renamed_consumer_of_a_queue_is_refused")
class IdentitiesIgnored(LastingStore):
    """A deploy may change the key in silence."""

    def agree_identities(self, *arguments: Any, **options: Any) -> None:
        """Nothing."""


@breaks("changed_identity_is_refused")
class RefusedAndStored(LastingStore):
    """What was refused is the identity from then on: the second start succeeds."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        try:
            super().agree_identities(consumer, queue, current, *others)
        except IdentityChanged:
            with self.changing() as content:
                content.identities = {(consumer, item.message_type, item.descriptor): None for item in current}
            raise


@breaks("changed_identity_is_covered_for_a_window")
class CoveredIsForgotten(LastingStore):
    """An identity that was once covered needs no cover any more."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        super().agree_identities(consumer, queue, current, *others)
        with self.changing() as content:
            content.identities = {key: ended for key, ended in content.identities.items() if ended is None}


@breaks("changed_identity_is_covered_for_a_window")
class CoveredForEver(LastingStore):
    """A former identity has to be named for ever."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        super().agree_identities(consumer, queue, current, *others)
        with self.changing() as content:
            content.identities = dict.fromkeys(content.identities)


@breaks("renamed_consumer_of_a_queue_is_refused")
class QueuesIgnored(LastingStore):
    """Only the consumer's own name is looked at."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, f"{queue} of {consumer}", *others)


@breaks("renamed_consumer_of_a_queue_is_refused")
class OneQueueForAll(LastingStore):
    """A consumer of another queue is taken for the same one, renamed."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, "", *others)
