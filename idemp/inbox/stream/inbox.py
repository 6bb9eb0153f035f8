"""An inbox whose record is the event stream itself: the message id is the commit id, unique in its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.clock import Clock, SystemClock
from idemp.errors import StoreError
from idemp.inbox.content import FAR_PAST
from idemp.inbox.located import Located
from idemp.inbox.port import Mark, PendingState
from idemp.inbox.resending import Resending
from idemp.inbox.stream.known import KnownCommits
from idemp.inbox.stream.unit import StreamUnit, handling_of
from idemp.inbox.unrelayed import Unrelayed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from idemp.inbox.port import Claim, Identity, InboxStore, Upkeep
    from idemp.inbox.stream.port import Streams
    from idemp.inbox.stream.stream import Stream
    from idemp.messages import Output


class StreamInbox:
    """An `InboxStore` for event-sourced handlers: what a handling publishes is appended to the stream of its entity.

    The append is the only write of a handling, and holds all: the message id, the events, and whatever else is sent. A
    duplicate finds its commit and sends that again. Nothing is ever purged, and nothing is left to a relay: a delivery is
    acked after the broker's confirms, and until then it comes again. Outputs whose confirm nobody recorded for ten minutes
    are sent once more by a worker.

    Args:
        streams: where the streams are.
        beside: an inbox for what is no handling: starts of handlers, when consumers consumed, identities. A `SqlStore` on
            the database of `SqlStreams`, an `InMemoryStore` beside `InMemoryStreams`.
        clock: source of time.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> from idemp.inbox.stream import InMemoryStreams
        >>> StreamInbox(InMemoryStreams(), InMemoryStore()).read("order-7").version
        0
    """

    per_entity = True

    def __init__(self, streams: Streams, beside: InboxStore, clock: Clock | None = None) -> None:
        self.streams = streams
        self.beside = beside
        self.clock: Clock = clock or getattr(beside, "clock", None) or SystemClock()
        self.known = KnownCommits(streams)
        self.upkeep = StreamUpkeep(streams, beside.upkeep, self.clock)

    @property
    def worker(self) -> str:
        """The name of this process, which is that of the inbox beside."""
        return self.beside.worker

    def read(self, name: str) -> Stream:
        """A stream as it is now; one without commits, where nothing was ever appended."""
        return self.known.read(name)

    def locate(self, consumer: str, key: UUID) -> Located | None:
        """The commit of a message, by its key; `None` if this consumer did not handle it."""
        found = self.streams.find("", consumer, key)
        if found is None:
            return None
        commit, events = found.commit, found.commit.events
        versions = f", events {events[0].version} to {events[-1].version}" if events else ", without events"
        return Located(f"commit {commit.number} of the stream {commit.stream!r}{versions}", handling_of(found))

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> StreamUnit:
        """A new unit of work."""
        return StreamUnit(self.streams, self.clock, claims, late=late, known=self.known)

    def translate(self, error: BaseException) -> StoreError | None:
        """Our own errors mean what they say, and those of the other inbox's database what it says."""
        return error if isinstance(error, StoreError) else self.beside.translate(error)

    def record(self, marks: Sequence[Mark]) -> None:
        """Confirmed outputs no longer pend."""
        confirming = [mark for mark in marks if mark.confirmed]
        if confirming:
            self.streams.confirm(confirming)

    def note_start(self, consumer: str, key: UUID) -> int:
        """A handler is about to start; how many earlier starts did not end."""
        return self.beside.note_start(consumer, key)

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended."""
        self.beside.note_end(consumer, key, left)

    def relay_alive(self) -> bool:
        """Never: no relay ships what is in streams."""
        return False

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """The far past: no commit is ever purged."""
        del consumer, retention, claims
        return FAR_PAST

    def verify(self) -> None:
        """See that the streams and the other inbox are as the promises need them."""
        self.beside.verify()
        self.streams.verify()

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:
        """Whatever a first delivery would otherwise have to do."""
        self.beside.prepare(consumer, message_types)

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Nothing ever gets late here."""

    def close(self) -> None:
        """End what both keep open."""
        self.streams.close()
        self.beside.close()

    def announce_pending(self) -> None:
        """Nobody waits for it."""

    def announce_effects(self) -> None:
        """There are none."""


class StreamUpkeep(Unrelayed):
    """The other half of a `StreamInbox`: the other inbox's, but for what pends.

    Args:
        streams: where the streams are.
        beside: the other inbox's.
        clock: source of time.
    """

    def __init__(self, streams: Streams, beside: Upkeep, clock: Clock) -> None:
        self._streams = streams
        self._beside = beside
        self._clock = clock
        self.resending = Resending(clock, self._unconfirmed, lambda claim, ids: streams.confirm([Mark(claim, ids)]))

    def _unconfirmed(
        self, consumers: Collection[str], before: datetime, limit: int
    ) -> Iterable[tuple[Claim, Sequence[Output]]]:
        return (
            (commit.claim, [output for output in commit.outputs if output.id in pending])
            for commit, pending in self._streams.overdue(consumers, before, limit)
        )

    def pending_count(self) -> int:
        """Outputs without a confirm."""
        return self._streams.pending().count

    def pending_state(self) -> PendingState:
        """How much waits, and how long already."""
        found = self._streams.pending()
        age = (self._clock.now() - found.since).total_seconds() if found.since else 0.0
        return PendingState(found.count, oldest_seconds=max(0.0, age))

    def wait_for_pending(self, timeout: float) -> bool:
        """Until somebody announces something, or the time is over."""
        return self._beside.wait_for_pending(timeout)

    def announce_pending(self) -> None:
        """Nobody waits for it."""

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """No commits; claims and forgotten starts of the other inbox."""
        return self._beside.purge(consumer, retention, limit, others=others)

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far behind the other inbox is."""
        return self._beside.purge_lag(consumer, retention, others=others)

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """Show life; never as a relay, which others on that database would then count on."""
        del relay
        self.resending.consumers.update(consumers)
        self._beside.beat(worker, relay=False, consumers=consumers)

    def retire(self, worker: str) -> None:
        """Take the heartbeat back."""
        self._beside.retire(worker)

    def relay_alive(self) -> bool:
        """Never."""
        return False

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The far past: no commit is ever purged."""
        del consumer, retention
        return FAR_PAST

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
        self._beside.agree_identities(consumer, queue, current, covered, retention)
