"""Stores that fail their relays, cleaners and deploys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from idemp.errors import IdentityChanged
from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, Identity, PendingOutput, PendingState
from idemp.inbox.small import Content
from idemp.messages import Output
from tests.testing.store_mutants.sound import Store, breaks

_Key = tuple[str, UUID]
_Windows = Mapping[str, timedelta]
_Expired = Iterator[tuple[_Key, timedelta]]


# Relays


@breaks("pending_waits_for_its_time")
class DueAtOnce(Store):
    """A relay takes what its worker is sending right now."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs, timedelta(0))


@breaks("pending_waits_for_its_time")
class RelayOutOfOrder(Store):
    """A relay gets the outputs of a handling in another order."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(limit, lease)[::-1]


@breaks("pending_waits_from_the_storing_on")
class DueFromTheClaimOn(Store):
    """After a slow handler, a relay takes what its worker is about to send."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            handling = self._handlings[claim.consumer, claim.id.key]
            handling.keep(outputs, handling.claimed_at, relay_after)


@breaks("left_to_the_relay_from_the_start")
class AttemptsFromTwo(Store):
    """What was never sent counts as tried."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        taken = super().take_pending(limit, lease)
        return [replace(item, attempts=max(2, item.attempts)) for item in taken]


@breaks("due_by_a_clock_that_was_wrong")
class WaitsForAWrongClock(Store):
    """After a step back of the clock, outputs wait until it shows again what it showed."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        due = {item.output.id for _, item in self.content.pending() if item.due_at <= self.clock.now()}
        return [item for item in super().take_pending(limit, lease) if item.output.id in due]


@breaks("relays_see_what_is_committed")
class RelaysReadUncommitted(Store):
    """A relay sees outputs of a unit of work that still runs, or that rolled back."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs, relay_after)
            self._store.content.handlings.update(self._handlings)


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
        super().settle_pending(list(outputs), {}, timedelta(0))


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
        kept = [(item, item.attempts, item.refusals) for _, item in self.content.pending()]
        number = super().release_quarantined(outputs)
        for item, attempts, refusals in kept:
            item.attempts, item.refusals = attempts, refusals
        return number


@breaks("confirm_beats_quarantine")
class QuarantineBeatsConfirm(Store):
    """What a relay quarantines is pending again, though it was confirmed meanwhile."""

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        for handling in self.content.handlings.values():
            for item in handling.sendings:
                item.pending |= item.output.id in outputs
        super().quarantine(outputs)


@breaks("pending_state")
class AgeOfQuarantined(Store):
    """What is quarantined counts as waiting."""

    def pending_state(self) -> PendingState:
        claimed = [handling.claimed_at for handling, _ in self.content.pending()]
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

    def relay_alive(self) -> bool:
        return bool(self.content.relays)


@breaks("relay_alive_by_beat_and_retire")
class RelaysStayAfterTheirEnd(Store):
    """A relay that ended cleanly is taken for alive."""

    def retire(self, worker: str) -> None:
        """Nothing."""


@breaks("outputs_belong_to_one_broker")
class AnyBrokerTakesTheName(Store):
    """The relay of a second broker ships the outputs of the first."""

    def agree_broker(self, identity: str) -> None:
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

    class contents(Content):  # noqa: N801
        def expired(self, consumer: str, retention: _Windows, others: timedelta | None, now: datetime) -> _Expired:
            halves = {name: window / 2 for name, window in retention.items()}
            return super().expired(consumer, halves, others, now)


@breaks("purge_keeps_the_window")
class NeverPurges(Store):
    """Claims stay for ever."""

    class contents(Content):  # noqa: N801
        def expired(self, consumer: str, retention: _Windows, others: timedelta | None, now: datetime) -> _Expired:
            yield from ()


@breaks("window_stands_still_with_its_consumer")
class WindowsByTheClock(Store):
    """A consumer's standstill counts."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        super().beat(worker, relay=relay, consumers=consumers)
        with self.changing() as content:
            for consumer in consumers:
                content.consumed[consumer] = [(datetime.min.replace(tzinfo=UTC), self.clock.now())]


@breaks("window_stands_still_with_its_consumer")
class StandstillEndsTheWindow(Store):
    """After a standstill the window starts anew."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        super().beat(worker, relay=relay, consumers=consumers)
        with self.changing() as content:
            content.consumed = {consumer: intervals[-1:] for consumer, intervals in content.consumed.items()}


@breaks("purge_never_touches_pending", "purge_lag")
class PurgesPending(Store):
    """Claims go although their outputs wait for a confirm."""

    class contents(Content):  # noqa: N801
        def expired(self, consumer: str, retention: _Windows, others: timedelta | None, now: datetime) -> _Expired:
            for key, handling in self.handlings.items():
                alone = Content({key: replace(handling, sendings=[])}, consumed=self.consumed)
                yield from alone.expired(consumer, retention, others, now)


@breaks("purge_is_bounded_and_keeps_to_its_consumer")
class PurgesAllConsumers(Store):
    """Claims of other consumers go, too."""

    class contents(Content):  # noqa: N801
        def expired(self, consumer: str, retention: _Windows, others: timedelta | None, now: datetime) -> _Expired:
            for name in {name for name, _ in self.handlings}:
                self.consumed[name] = self.consumed[consumer]
                yield from super().expired(name, retention, others, now)


@breaks("purge_is_bounded_and_keeps_to_its_consumer")
class PurgesAllTypes(Store):
    """Types that nobody named go with the longest window of the others."""

    class contents(Content):  # noqa: N801
        def expired(self, consumer: str, retention: _Windows, others: timedelta | None, now: datetime) -> _Expired:
            return super().expired(consumer, retention, others or max(retention.values()), now)


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

    class contents(Content):  # noqa: N801
        def given_up(self, consumer: str, after: timedelta, now: datetime) -> Iterator[_Key]:
            yield from ()


@breaks("purge_forgets_starts_that_nobody_came_back_for")
class StartsGoWithAnyWindow(Store):
    """Starts go after a day, though a window is longer."""

    class contents(Content):  # noqa: N801
        def given_up(self, consumer: str, after: timedelta, now: datetime) -> Iterator[_Key]:
            return super().given_up(consumer, timedelta(days=1), now)


@breaks("purge_forgets_starts_that_nobody_came_back_for")
class StartsOfOthersGo(Store):
    """Starts of other consumers go, too."""

    class contents(Content):  # noqa: N801
        def given_up(self, consumer: str, after: timedelta, now: datetime) -> Iterator[_Key]:
            for name in {name for name, _ in self.starts}:
                yield from super().given_up(name, after, now)


@breaks("purge_lag")
class LagOfTheYoungest(Store):
    """The lag is that of the claim that could go last."""

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        expired = self.content.expired(consumer, retention, others, self.clock.now())
        return min((lag for _, lag in expired), default=timedelta(0))


@breaks("purged_before_is_known_to_later_claims")
class ForgetsDeletions(Store):
    """Nothing was ever deleted, as far as anybody learns."""

    class unit(MemoryUnit):  # noqa: N801
        def purged_before(self, consumer: str) -> datetime | None:
            return None


@breaks("purged_before_is_known_to_later_claims")
class DeletionsEverywhere(Store):
    """Claims may always be gone."""

    class unit(MemoryUnit):  # noqa: N801
        def purged_before(self, consumer: str) -> datetime | None:
            return datetime.max.replace(tzinfo=UTC)


@breaks("late_before_follows_the_window")
class HorizonStandsStill(Store):
    """What may have been purged is worked out at the start, and never again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.since = self.clock.now()

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> Any:
        return self.since - retention


@breaks("late_before_follows_the_window")
class HorizonInsideTheWindow(Store):
    """Messages inside the window are taken for late."""

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> Any:
        return self.clock.now() - retention / 2


# Identities


@breaks("changed_type_of_a_field_is_refused")
class NamesOfKeysOnly(Store):
    """How a key's fields are read is cut off."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        names = [replace(item, descriptor=item.descriptor.partition(";")[0]) for item in current]
        super().agree_identities(consumer, queue, names, *others)


@breaks("changed_identity_is_refused", "renamed_consumer_of_a_queue_is_refused")
class IdentitiesIgnored(Store):
    """A deploy may change the key in silence."""

    def agree_identities(self, *arguments: Any, **options: Any) -> None:
        """Nothing."""


@breaks("changed_identity_is_refused")
class RefusedAndStored(Store):
    """What was refused is the identity from then on: the second start succeeds."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        try:
            super().agree_identities(consumer, queue, current, *others)
        except IdentityChanged:
            with self.changing() as content:
                content.identities = {(consumer, item.message_type, item.descriptor): None for item in current}
            raise


@breaks("changed_identity_is_covered_for_a_window")
class CoveredIsForgotten(Store):
    """An identity that was once covered needs no cover any more."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        super().agree_identities(consumer, queue, current, *others)
        with self.changing() as content:
            content.identities = {key: ended for key, ended in content.identities.items() if ended is None}


@breaks("changed_identity_is_covered_for_a_window")
class CoveredForEver(Store):
    """A former identity has to be named for ever."""

    def agree_identities(self, consumer: str, queue: str, current: Sequence[Identity], *others: Any) -> None:
        super().agree_identities(consumer, queue, current, *others)
        with self.changing() as content:
            content.identities = dict.fromkeys(content.identities)


@breaks("renamed_consumer_of_a_queue_is_refused")
class QueuesIgnored(Store):
    """Only the consumer's own name is looked at."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, f"{queue} of {consumer}", *others)


@breaks("renamed_consumer_of_a_queue_is_refused")
class OneQueueForAll(Store):
    """A consumer of another queue is taken for the same one, renamed."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, "", *others)


@breaks("renamed_consumer_is_refused_by_each_of_its_queues", "queue_that_a_consumer_left_is_free_after_a_window")
class OnlyTheLatestQueue(Store):
    """Of a consumer's queues only the one counts that started last."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, queue, *others)
        with self.changing() as content:
            for place in [place for place in content.queues if place[0] == consumer and place[1] != queue]:
                del content.queues[place]


@breaks("queue_that_a_consumer_left_is_free_after_a_window")
class QueuesForEver(Store):
    """Whoever takes over a queue has to name those who left it long ago."""

    def agree_identities(self, consumer: str, queue: str, *others: Any) -> None:
        super().agree_identities(consumer, queue, *others)
        with self.changing() as content:
            content.queues = dict.fromkeys(content.queues, datetime.max.replace(tzinfo=UTC))


@breaks("queue_that_a_consumer_left_is_free_after_a_window")
class QueuesEndWhileInUse(Store):
    """A worker that runs for longer than a window has left its queue."""

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        with self.changing() as content:
            used = dict(content.queues)
        super().beat(worker, relay=relay, consumers=consumers)
        with self.changing() as content:
            content.queues = used
