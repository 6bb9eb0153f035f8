"""For stores of your own that are small enough to be looked through at each call: all of the port but the unit of work.

Such a store says how its content is read and changed, and what a unit of work does; see "Write a store of your own".
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from idemp.clock import Clock, SystemClock
from idemp.errors import BrokerChanged, StoreError
from idemp.forking import renewed_in_child
from idemp.inbox.content import FAR_PAST, Content, Handling, Sending
from idemp.inbox.identities import Stored, agreement, still_used
from idemp.inbox.port import (
    DEFAULT_BROKER,
    LONGEST_WAIT,
    STARTS_KEPT,
    Claim,
    Claimed,
    PendingOutput,
    PendingState,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from uuid import UUID

    from idemp.inbox.port import Identity, Mark, UnitOfWork
    from idemp.messages import Output

__all__ = ["Content", "Handling", "PlainUnit", "Sending", "SmallStore"]

RELAY_LIFE: Final = timedelta(seconds=15)
"""How long a relay's beat says that it is alive."""
CONSUMING_GAP: Final = timedelta(seconds=60)
"""A consumer whose beats are further apart stood still in between."""


class PlainUnit(ABC):
    """A `UnitOfWork` in its simplest form. A subclass gives `session`, `connection` and the abstract methods.

    Its connection is always usable, its session holds nothing back, and a late claim is a claim followed by its outputs.

    Example:
        >>> sorted(PlainUnit.__abstractmethods__)
        ['__exit__', 'claim', 'commit', 'store_outputs']
    """

    session: Any
    connection: Any

    @abstractmethod
    def claim(self, claim: Claim) -> Claimed:
        """As `UnitOfWork.claim`."""

    @abstractmethod
    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """As `UnitOfWork.store_outputs`."""

    @abstractmethod
    def commit(self) -> None:
        """As `UnitOfWork.commit`."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __enter__(self) -> Self:
        return self

    def usable(self) -> bool:
        """The connection does not go away."""
        return True

    def flush(self) -> None:  # noqa: B027 - what most need
        """Nothing is held back."""

    def forget(self) -> bool:
        """The session knows nothing but the data."""
        return True

    def purged_before(self, consumer: str) -> datetime | None:
        """Unknown, unless a subclass knows better: whatever is not there may have been deleted."""
        del consumer
        return datetime.max.replace(tzinfo=UTC)

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """One after the other, in the order of their ids, up to one that is held."""
        answers = dict.fromkeys((claim.id.key for claim in claims), Claimed(Verdict.CLAIMED))
        for claim in sorted(claims, key=lambda claim: claim.id.key):
            answers[claim.id.key] = answer = self.claim(replace(claim, wait=min(claim.wait, wait)))
            if answer.verdict is Verdict.IN_FLIGHT:
                break
        return [answers[claim.id.key] for claim in claims]

    def look_all(self, claims: Sequence[Claim]) -> Sequence[Claimed]:
        """By claiming them; the end of the unit takes them back."""
        return self.claim_all(claims, timedelta(0))

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """One after the other."""
        for claim, outputs in handled:
            self.store_outputs(claim, outputs, relay_after)

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """One after the other."""
        claimed = self.claim(claim)
        if claimed.verdict is Verdict.CLAIMED:
            self.store_outputs(claim, outputs, relay_after)
        return claimed


def _is_due(item: Sending, now: datetime, lease: timedelta) -> bool:
    """Whether its time has come, or is so far away that a clock which was wrong must have set it."""
    never_waits = not item.output.is_effect or item.attempts == 0
    return item.due_at <= now or (never_waits and item.due_at > now + max(LONGEST_WAIT, 2 * lease))


class SmallStore(ABC):
    """An `InboxStore` whose content fits into memory. A subclass gives `begin`, `read` and `changing`.

    Everything else looks through the whole content, so the time of a call grows with it: for tests, tools, and services
    with thousands of ids in their windows, not with millions.

    Args:
        clock: source of time.
        worker: this process's name in the inbox.

    Example:
        >>> sorted(SmallStore.__abstractmethods__)
        ['begin', 'changing', 'read']
    """

    def __init__(self, clock: Clock | None = None, worker: str = "small") -> None:
        self.clock = clock or SystemClock()
        self.worker = worker
        self._announced = threading.Condition(renewed_in_child(threading.RLock()))
        self._effects_announced = threading.Event()
        self._consumed: frozenset[tuple[str, str]] = frozenset()  # consumers and queues that started by this object

    @abstractmethod
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> UnitOfWork:
        """A new unit of work."""

    @abstractmethod
    def read(self) -> Content:
        """The content as last committed. The caller does not change it."""

    def reading(self) -> AbstractContextManager[Content]:
        """What `read` answers, for a look through it. To be overridden where others could change that very object."""
        return nullcontext(self.read())

    @abstractmethod
    def changing(self) -> AbstractContextManager[Content]:
        """A short transaction: the content, to be changed. It is committed at the block's end, not after an error.

        Raises:
            TransientStoreError: somebody else is writing, for too long.
            StoreUnavailable: the content can't be read or written.
        """

    @property
    def per_entity(self) -> bool:
        """A unit of work changes whatever its handler wants to change."""
        return False

    @property
    def upkeep(self) -> SmallStore:
        """Itself: one object does both halves."""
        return self

    @property
    def data(self) -> dict[Any, Any]:
        """The effects of committed handlings."""
        return self.read().data

    def verify(self) -> None:
        """Reads it once.

        Raises:
            StoreUnavailable: it can't be read.
        """
        self.read()

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:  # noqa: B027
        """Nothing to prepare."""

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:  # noqa: B027
        """Nothing is cached."""

    def close(self) -> None:  # noqa: B027
        """Nothing is open."""

    def translate(self, error: BaseException) -> StoreError | None:
        """Our own errors mean what they say; all others are the handler's."""
        return error if isinstance(error, StoreError) else None

    # Beside the handling ----------------------------------------------------------------------------------------------

    def record(self, marks: Sequence[Mark]) -> None:
        """Confirmed outputs are no longer pending, refused ones keep the reason."""
        with self.changing() as content:
            for mark in marks:
                handling = content.handlings.get((mark.claim.consumer, mark.claim.id.key))
                for item in handling.sendings if handling else ():
                    item.pending &= item.output.id not in mark.confirmed
                    item.reason = dict(mark.refused).get(item.output.id, item.reason)

    def note_start(self, consumer: str, key: UUID) -> int:
        """A handler is about to start; how many earlier starts did not end."""
        with self.changing() as content:
            earlier, _ = content.starts.get((consumer, key), (0, FAR_PAST))
            content.starts[consumer, key] = (earlier + 1, self.clock.now())
        return earlier

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended: all but `left` of its recorded starts are forgotten."""
        with self.changing() as content:
            starts, last_at = content.starts.pop((consumer, key), (0, FAR_PAST))
            if min(left, starts) > 0:
                content.starts[consumer, key] = (min(left, starts), last_at)

    # Relays -----------------------------------------------------------------------------------------------------------

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease messages that are due."""
        return self._taken(lambda _, output: not output.is_effect, limit, lease)

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease effects of this consumer that are due."""
        return self._taken(lambda claim, output: output.is_effect and claim.consumer == consumer, limit, lease)

    def _taken(self, wanted: Callable[[Claim, Output], bool], limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        now = self.clock.now()
        with self.changing() as content:
            due = [
                (handling, item)
                for handling, item in content.pending()
                if _is_due(item, now, lease) and not item.quarantined and wanted(handling.claim, item.output)
            ]
            due.sort(key=lambda pair: (pair[1].due_at, pair[0].claim.id.key, pair[1].output.ordinal))
            for _, item in due[:limit]:
                item.due_at, item.attempts = now + lease, item.attempts + 1
            return [PendingOutput(item.output, item.attempts, item.refusals) for _, item in due[:limit]]

    def return_effects(self, effects: Mapping[UUID, str], retry_in: timedelta) -> None:
        """They were not run: due again after `retry_in`, the attempt not counted."""
        with self.changing() as content:
            for _, item in content.pending():
                if item.output.id in effects:
                    item.due_at, item.reason = self.clock.now() + retry_in, effects[item.output.id]
                    item.attempts = max(0, item.attempts - 1)

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Confirmed ones are done, failed ones wait."""
        with self.changing() as content:
            for _, item in content.pending():
                item.pending = item.output.id not in confirmed
                if item.output.id in failed:
                    item.due_at, item.reason = self.clock.now() + retry_in, failed[item.output.id]
                    item.refusals += refused

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Out of the relay's rounds."""
        with self.changing() as content:
            for _, item in content.pending():
                if item.output.id in outputs:
                    item.quarantined, item.reason = True, outputs[item.output.id]

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Back into the relay's rounds."""
        with self.changing() as content:
            found = [item for _, item in content.pending() if item.quarantined and item.output.id in outputs]
            for item in found:
                item.quarantined, item.due_at, item.attempts = False, self.clock.now(), 1
                item.refusals = int(item.output.is_effect)
            return len(found)

    def pending_count(self) -> int:
        """Outputs without a confirm."""
        with self.reading() as content:
            return sum(1 for _ in content.pending())

    def pending_state(self) -> PendingState:
        """How much waits, and how long already."""
        with self.reading() as content:
            pending = list(content.pending())
            waiting = [handling.claimed_at for handling, item in pending if not item.quarantined]
        oldest = (self.clock.now() - min(waiting)).total_seconds() if waiting else 0.0
        return PendingState(len(pending), len(pending) - len(waiting), max(0.0, oldest))

    def wait_for_pending(self, timeout: float) -> bool:
        """Until somebody in this process announces, or the time is over."""
        with self._announced:
            return self._announced.wait(timeout)

    def announce_pending(self) -> None:
        """Wake whoever waits in this process."""
        with self._announced:
            self._announced.notify_all()

    def wait_for_effects(self, timeout: float) -> bool:
        """Until somebody in this process announces effects, or has since the last call; or the time is over."""
        announced = self._effects_announced.wait(timeout)
        self._effects_announced.clear()
        return announced

    def announce_effects(self) -> None:
        """Wake who runs effects in this process, or the next one who waits."""
        self._effects_announced.set()

    def relay_alive(self) -> bool:
        """Whether a relay beat lately."""
        now = self.clock.now()
        with self.reading() as content:
            return any(abs(now - beat) < RELAY_LIFE for beat in content.relays.values())

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """Show life."""
        now = self.clock.now()
        with self.changing() as content:
            content.relays.pop(worker, None)
            if relay:
                content.relays[worker] = now
            for consumer in consumers:
                intervals = content.consumed.setdefault(consumer, [])
                goes_on = bool(intervals) and now - intervals[-1][1] <= CONSUMING_GAP
                started = intervals.pop()[0] if goes_on else now
                intervals.append((started, now))
            content.queues.update({place: now for place in self._consumed if place[0] in consumers})

    def retire(self, worker: str) -> None:
        """Take the heartbeat back."""
        with self.changing() as content:
            content.relays.pop(worker, None)

    # Retention --------------------------------------------------------------------------------------------------------

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """The moment since which the consumer has consumed for `retention` in sum."""
        del claims  # a claim goes when its own time is past, one by one
        with self.reading() as content:
            return content.late_before(consumer, retention, self.clock.now())

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """Delete expired claims without pending outputs, and forgotten starts."""
        now = self.clock.now()
        windows = [*retention.values(), *([] if others is None else [others])]
        with self.changing() as content:
            expired = [key for key, _ in content.expired(consumer, retention, others, now)][:limit]
            for key in expired:
                del content.handlings[key]
            if expired:
                content.purged[consumer] = now
            given_up = content.given_up(consumer, max(STARTS_KEPT, *windows), now) if windows else ()
            for key in list(given_up)[:limit]:
                del content.starts[key]
            return len(expired)

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far the oldest claim that could be deleted is past its window."""
        with self.reading() as content:
            expired = content.expired(consumer, retention, others, self.clock.now())
            return max((lag for _, lag in expired), default=timedelta(0))

    # Brokers and identities -----------------------------------------------------------------------------------------------

    def agree_broker(self, identity: str) -> None:
        """Note which broker the outputs go to, unless it is noted already.

        Raises:
            BrokerChanged: they go to another one.
        """
        with self.changing() as content:
            content.broker = content.broker or identity
            if content.broker != identity:
                raise BrokerChanged.of(DEFAULT_BROKER, content.broker, identity)

    def agree_identities(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Compare with the identities of this consumer and this queue, then store the current ones.

        Raises:
            IdentityChanged: one changed inside the window and is not covered.
        """
        now = self.clock.now()
        with self.changing() as content:
            users = {name: used_at for (name, place), used_at in content.queues.items() if place == queue}
            mates = {consumer, *still_used(users, retention, partial(content.late_before, now=now))}
            stored = [
                Stored(number, *key, ended_at)
                for number, (key, ended_at) in enumerate(content.identities.items())
                if key[0] in mates
            ]
            agreed = agreement(
                stored, consumer, current, covered, retention, lambda window: content.late_before(consumer, window, now)
            )
            for former in agreed.forgotten:
                del content.identities[former.key]
            content.identities.update({former.key: now for former in agreed.ended})
            content.identities.update({(consumer, item.message_type, item.descriptor): None for item in current})
            content.queues[consumer, queue] = now
            self._consumed |= {(consumer, queue)}
