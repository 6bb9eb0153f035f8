"""Event streams in the simulation: the cases that are run in full, and seeded faults in `StreamInbox` and its streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from idemp.errors import CommitUnknown
from idemp.identity import EffectiveId
from idemp.inbox.stream import AlreadyCommitted, InMemoryStreams, StreamInbox, WrongVersion
from idemp.inbox.stream.unit import StreamUnit
from idemp.testing.simulation import Parts, Simulation
from idemp.testing.simulation.streams import StreamsInbox
from tests.simulation.mutants import Mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.inbox.port import Claim
    from idemp.inbox.stream import Commit, Found


def case(
    unit: type[StreamUnit] = StreamUnit, streams: type[InMemoryStreams] = InMemoryStreams, **options: Any
) -> Simulation:
    class Inbox(StreamInbox):
        def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> StreamUnit:
            return unit(self.streams, self.clock, claims, late=late, known=self.known)

    class Simulated(StreamsInbox):
        kind = Inbox
        streams_kind = streams

    alone: dict[str, Any] = {"relays": 0, "purges": 0, "jumps": (), "workers": 1, "copies": 1, "crashes": 0}
    return Simulation(parts=Parts(inbox=Simulated), **{**alone, **options})


def small() -> dict[str, Simulation]:
    """Those of the suite."""
    return {
        "two workers, a message twice, a crash": case(workers=2, copies=2, crashes=1),
        "two workers, two messages of one stream, a lost or slow append": case(workers=2, messages=2, faults=1),
        "two workers, a message once, a crash and a fault, late claim": case(
            workers=2, crashes=1, faults=1, claim="late", batch=1
        ),
    }


def full() -> dict[str, Simulation]:
    """Those by command: larger ones, too."""
    return {
        **small(),
        "two workers, two messages of one stream, a crash": case(workers=2, messages=2, crashes=1),
        "two workers, a message twice, a crash and a fault": case(workers=2, copies=2, crashes=1, faults=1),
        "two workers, two messages of one stream, a crash and a fault": case(
            workers=2, messages=2, crashes=1, faults=1
        ),
        "two workers, two messages of one stream, both twice": case(workers=2, messages=2, copies=2),
        "two workers, two messages of two streams, a crash": case(workers=2, messages=2, entities=2, crashes=1),
    }


class NoIds(InMemoryStreams):
    """The stream is no record of what was handled."""

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        return None

    def append(self, commit: Commit, *, pending: bool) -> None:
        other = EffectiveId(UUID(int=len(self.load(commit.stream))), commit.claim.id.text)
        super().append(replace(commit, claim=replace(commit.claim, id=other)), pending=pending)


class LooksAndAppends(InMemoryStreams):
    """Ids are looked for at the claim, and are no constraint of the append; nor are numbers."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        self._ids.pop((commit.claim.consumer, commit.claim.id.key), None)
        last = self.load(commit.stream)[-1:]
        number, first = (last[0].number + 1, last[0].next_version) if last else (1, 1)
        super().append(replace(commit, number=number, first_version=first), pending=pending)


class AnyVersion(InMemoryStreams):
    """The commit is put behind what was appended meanwhile, though its handler did not see that."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        last = self.load(commit.stream)[-1:]
        number, first = (last[0].number + 1, last[0].next_version) if last else (1, 1)
        super().append(replace(commit, number=number, first_version=first), pending=pending)


class ConflictIsDuplicate(StreamUnit):
    """Whoever comes too late is taken for a duplicate, whose work is done."""

    def commit(self) -> None:
        try:
            super().commit()
        except (WrongVersion, AlreadyCommitted):
            return


class LostIsDone(StreamUnit):
    """No answer is taken for a good one."""

    def commit(self) -> None:
        try:
            super().commit()
        except CommitUnknown:
            return


class EventsOnly(StreamUnit):
    """What is sent, and is no event, is not kept in the commit."""

    def store_outputs(self, claim: Any, outputs: Any, relay_after: Any) -> None:
        super().store_outputs(claim, [each for each in outputs if each.kind.value == "publish"], relay_after)


MUTANTS = [
    Mutant("no commit ids", case(streams=NoIds, copies=2)),
    Mutant("commit ids are looked for, and not unique", case(streams=LooksAndAppends, workers=2, copies=2)),
    Mutant("appends at any version", case(streams=AnyVersion, workers=2, messages=2)),
    Mutant("a conflict is taken for a duplicate", case(ConflictIsDuplicate, workers=2, messages=2)),
    Mutant("a lost answer is taken for a good one", case(LostIsDone, faults=1)),
    Mutant("what is sent is not kept", case(EventsOnly, copies=2, crashes=1)),
]
