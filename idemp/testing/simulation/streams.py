"""Event streams in the simulation: each request to the streams is a step, and an append may be slow.

>>> from idemp.testing.simulation import Parts, Simulation
>>> parts = Parts(inbox=StreamsInbox)
>>> Simulation(parts=parts, workers=1, copies=1, relays=0, purges=0, jumps=(), crashes=0).explore().violation is None
True
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from idemp.errors import CommitUnknown, TransientStoreError
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.stream import InMemoryStreams, StreamInbox, stream_of
from idemp.testing.simulation.inboxes import SimulatedInbox
from idemp.testing.simulation.ports import SteppedStore

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from idemp.clock import Clock
    from idemp.context import Context
    from idemp.inbox.port import Claim, Mark, UnitOfWork
    from idemp.inbox.stream import Commit, Found, Pending
    from idemp.testing.simulation.options import Parts
    from idemp.testing.simulation.stage import Actor
    from idemp.testing.simulation.world import World

LOST: Final = "append, its answer is lost"
FAILED: Final = "append, it never arrives"
SLOW: Final = "append, it is slow"
DECIDED_ON_WHAT_IS: Final = "decided on the stream as it is"
_EFFECT: Final = "shop.Sold"


class EventEffects:
    """Effects that are events, each of which says which version its handler meant it to have.

    Example:
        >>> EventEffects(InMemoryStreams()).count("message-1")
        0
    """

    def __init__(self, streams: InMemoryStreams) -> None:
        self._streams = streams

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Publish one; the simulation gives the handler's context for its unit."""
        ctx = cast("Context", unit)
        ctx.publish({"name": name, "version": stream_of(ctx).version + 1}, type=_EFFECT, mandatory=False)

    def count(self, name: str) -> int:
        """Those in any stream."""
        commits = [commit for stream in self._streams.commits.values() for commit in stream]
        return sum(event.data["name"] == name for commit in commits for event in commit.events)

    def clash(self, unit: UnitOfWork) -> None:
        """Streams have no constraints of the handler's own."""
        del unit
        raise KeyError("taken")


class SteppedStreams:
    """The streams as one process has them."""

    def __init__(self, inner: InMemoryStreams, world: World, actor: Actor) -> None:
        self.inner = inner
        self._world = world
        self._actor = actor

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        """As the port says."""
        self._actor.point("find")
        found = self.inner.find(stream, consumer, key)
        told = f"number {found.commit.number}, {len(found.pending)} outputs pending" if found else "there is none"
        self._actor.tell("find", told, kept=(told, found and frozenset(found.pending)))
        return found

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        """As the port says."""
        self._actor.point("load")
        commits = self.inner.load(stream, after)
        self._actor.tell("load", f"{len(commits)} commits", kept=(tuple(map(_named, commits)), self._world.clock.time))
        return commits

    def last(self, stream: str) -> Commit | None:
        """As the port says."""
        self._actor.point("last")
        commit = self.inner.last(stream)
        told = f"number {commit.number}" if commit else "there is none"
        self._actor.tell("last", told, kept=(commit and _named(commit), self._world.clock.time))
        return commit

    def append(self, commit: Commit, *, pending: bool) -> None:
        """As the port says; or its answer is lost, or it never arrives, or it arrives at any time after it was given up."""

        def arrive() -> None:
            self.inner.append(commit, pending=pending)
            self._world.witness.commits(commit.claim.id.text, commit.outputs)
            self._see(commit)

        chosen = self._actor.point("append", faults=(LOST, FAILED, SLOW))
        if chosen == "append":
            try:
                arrive()
            except TransientStoreError as error:
                self._actor.tell("append", type(error).__name__)
                raise
            self._actor.tell("append", f"number {commit.number} of {commit.stream}")
            return

        def late() -> None:
            with suppress(TransientStoreError):
                arrive()

        if chosen == LOST:
            late()
        elif chosen == SLOW:
            self._world.later("network", f"an append of {self._actor.name} arrives", late, _named(commit))
        self._actor.tell(chosen)
        raise CommitUnknown("The simulation took the answer away.")

    def confirm(self, marks: Sequence[Mark]) -> None:
        """As the port says."""
        self._actor.point("record")
        self.inner.confirm(marks)
        self._actor.tell("record", f"{sum(len(mark.confirmed) for mark in marks)} confirmed")

    def overdue(self, consumers: Collection[str], before: datetime, limit: int) -> Sequence[Found]:
        """As the port says."""
        return self.inner.overdue(consumers, before, limit)

    def pending(self) -> Pending:
        """As the port says."""
        return self.inner.pending()

    def verify(self) -> None:
        """Nothing is wrong with them."""

    def close(self) -> None:
        """They are the world's."""

    def _see(self, commit: Commit) -> None:
        there = next(each for each in self.inner.load(commit.stream) if each.outputs == commit.outputs)
        for event in there.events:
            if event.data["version"] != event.version:
                detail = (
                    f"an event of {commit.claim.id.text} has version {event.version}, and its handler saw other ones"
                )
                self._world.breaks(DECIDED_ON_WHAT_IS, detail)


class SteppedInbox(SteppedStore):
    """The inbox as one actor has it: its requests to the streams are the steps, and not the calls of the store port."""

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> Any:
        """As the port says."""
        return self.inner.begin(claims, late=late)

    def record(self, marks: Sequence[Mark]) -> None:
        """As the port says."""
        self._world.witness.marks(output for mark in marks for output in mark.confirmed)
        self.inner.record(list(marks))

    def relay_alive(self) -> bool:
        """Never."""
        return False

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """As the port says: always the same."""
        moment: datetime = self.inner.late_before(consumer, retention, claims)
        return moment


class StreamsInbox(SimulatedInbox):
    """A `StreamInbox` for each process, on streams in memory.

    Attributes:
        kind: the inbox; a test may give another.
        streams_kind: likewise the streams.
    """

    per_entity = True
    kind: ClassVar[type[StreamInbox]] = StreamInbox
    streams_kind: ClassVar[type[InMemoryStreams]] = InMemoryStreams

    def __init__(self, clock: Clock, parts: Parts) -> None:
        super().__init__(clock, parts)
        self.streams = self.streams_kind()
        self.beside = InMemoryStore(clock)
        self.effects = EventEffects(self.streams)

    def of(self, world: World, actor: Actor) -> SteppedInbox:
        """An inbox that knows nothing but the streams."""
        streams = SteppedStreams(self.streams, world, actor)
        return SteppedInbox(self.kind(streams, self.beside, self.clock), world, actor)

    def consumes(self, since: datetime, until: datetime) -> None:
        """No window depends on it."""

    def pends(self) -> bool:
        """There is no relay to look."""
        return False

    def keeps(self) -> bool:
        """Nothing that a cleaner would take."""
        return False

    def picture(self) -> Hashable:
        """All commits, what pends, and starts without an end."""
        return (
            frozenset((name, tuple(map(_named, commits))) for name, commits in self.streams.commits.items()),
            frozenset(self.streams.unconfirmed),
            frozenset(self.beside.content.starts.items()),
        )


def _named(commit: Commit) -> Hashable:
    return (
        commit.stream,
        commit.number,
        commit.claim.id.key,
        commit.first_version,
        commit.outputs and commit.outputs[0].message.body,
    )
