"""Documents in the simulation: each request to the document store is a step, and a write may be slow.

>>> from idemp.testing.simulation import Parts, Simulation
>>> parts = Parts(inbox=DocumentsInbox)
>>> Simulation(parts=parts, workers=1, copies=1, relays=0, purges=0, jumps=(), crashes=0).explore().violation is None
True
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from idemp.errors import CommitUnknown
from idemp.inbox.content import Content
from idemp.inbox.document.attempts import ATTEMPTS
from idemp.inbox.document.books import BOOKS, encoded
from idemp.inbox.document.collector import Collector
from idemp.inbox.document.inbox import DocumentInbox
from idemp.inbox.document.memory import InMemoryDocuments
from idemp.inbox.document.port import OWN, RevisionConflict
from idemp.inbox.port import Verdict
from idemp.testing.document_conformance import DocumentEffects
from idemp.testing.simulation.inboxes import QUEUE, TYPE, WINDOW, SimulatedInbox
from idemp.testing.simulation.ports import SteppedStore

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence
    from types import TracebackType

    from idemp.clock import Clock
    from idemp.inbox.document.port import Document
    from idemp.inbox.document.unit import DocumentUnit
    from idemp.inbox.port import Claim, Claimed, Mark
    from idemp.messages import Output
    from idemp.testing.simulation.options import Parts
    from idemp.testing.simulation.stage import Actor
    from idemp.testing.simulation.world import World

LOST: Final = "its answer is lost"
FAILED: Final = "it never arrives"
SLOW: Final = "it is slow"


class CountedDocuments(InMemoryDocuments):
    """Documents whose revisions are counted for each by itself, so that orders without a difference come to one state."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: dict[str, int] = {}
        self.attempts = 0

    def _next_revision(self, id: str) -> str:
        self._writes[id] = self._writes.get(id, 0) + 1
        return str(self._writes[id])

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        return (frozenset(self._kept.items()), self.attempts)


class SteppedDocuments:
    """The documents as one process has them. What is kept beside the handlings is no step: it changes nothing of them.

    Attributes:
        committing: what the next write of a state document commits: messages, each with its outputs.
    """

    def __init__(self, inner: CountedDocuments, world: World, actor: Actor) -> None:
        self.inner = inner
        self.largest = inner.largest
        self.committing: Sequence[tuple[str, Sequence[Output]]] = ()
        self._world = world
        self._actor = actor

    def read(self, id: str) -> Document | None:
        """As the port says."""
        if _beside(id):
            found = self.inner.read(id)
            self._actor.memory = hash((self._actor.memory, repr(found)))
            return found
        self._actor.point(f"read {_kind(id)}")
        found = self.inner.read(id)
        told = _told(found.body) if found is not None else "there is none"
        self._actor.tell(
            f"read {_kind(id)}", told, kept=(found and found.revision, repr(found), self._world.clock.time)
        )
        return found

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """As the port says; or its answer is lost, or it never arrives, or it arrives at any time after it was given up."""
        if _beside(id):
            return self.inner.write(id, body, expected)
        call, committing = f"write {_kind(id)}", self.committing if not id.startswith(OWN) else ()

        def arrive() -> str:
            revision = self.inner.write(id, body, expected)
            for message, outputs in committing:
                self._world.witness.commits(message, outputs)
            return revision

        chosen = self._actor.point(call, faults=tuple(f"{call}, {fault}" for fault in (LOST, FAILED, SLOW)))
        if chosen == call:
            return self._answered(call, arrive)
        if chosen.endswith(LOST):
            with suppress(RevisionConflict):
                arrive()
        elif chosen.endswith(SLOW):
            self._slowly(f"a write of {self._actor.name} arrives", arrive, (id, json.dumps(body), expected))
        self._actor.tell(chosen)
        raise CommitUnknown("The simulation took the answer away.")

    def _slowly(self, name: str, arrive: Callable[[], object], detail: object) -> None:
        def late() -> None:
            with suppress(RevisionConflict):
                arrive()

        self._world.later("network", name, late, detail)

    def _answered(self, call: str, ask: Callable[[], str]) -> str:
        try:
            revision = ask()
        except RevisionConflict:
            self._actor.tell(call, "conflict")
            raise
        self._actor.tell(call, f"revision {revision}" if revision else "")
        return revision

    def delete(self, id: str, expected: str) -> None:
        """As the port says."""
        if _beside(id):
            self.inner.delete(id, expected)
            return

        def gone() -> str:
            self.inner.delete(id, expected)
            return ""

        self._actor.point(f"delete {_kind(id)}")
        self._answered(f"delete {_kind(id)}", gone)

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """As the port says, and never stale."""
        if _beside(prefix):
            beside = self.inner.scan(prefix, cursor, limit)
            self._actor.memory = hash((self._actor.memory, repr(beside)))
            return beside
        self._actor.point("scan outputs")
        page, cursor = self.inner.scan(prefix, cursor, limit)
        names = ", ".join(each.id.partition(ATTEMPTS)[2].rpartition("/")[2] for each in page)
        self._actor.tell("scan outputs", names or "there are none", kept=repr(page))
        return page, cursor

    def next_attempt(self) -> str:
        """A name by number, so that it does not matter which of the processes takes it."""
        self.inner.attempts += 1
        return f"attempt {self.inner.attempts}"

    def verify(self) -> None:
        """Nothing is wrong with it."""

    def close(self) -> None:
        """They are the world's."""


class SteppedUnit:
    """A unit of work of one actor, whose documents know what it commits."""

    def __init__(self, inner: DocumentUnit, documents: SteppedDocuments) -> None:
        self.inner = inner
        self._documents = documents
        self._handled: list[tuple[str, Sequence[Output]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """As the port says."""
        claimed = self.inner.claim_and_store(claim, outputs, relay_after)
        if claimed.verdict is Verdict.CLAIMED:
            self._handled.append((claim.id.text, outputs))
        return claimed

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """As the port says."""
        self._handled.append((claim.id.text, outputs))
        self.inner.store_outputs(claim, outputs, relay_after)

    def commit(self) -> None:
        """As the port says."""
        self._documents.committing = tuple(self._handled)
        try:
            self.inner.commit()
        finally:
            self._documents.committing = ()

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)


class SteppedInbox(SteppedStore):
    """The inbox as one actor has it: its requests to the documents are the steps, and not the calls of the store port."""

    def __init__(self, inner: DocumentInbox, documents: SteppedDocuments, world: World, actor: Actor) -> None:
        super().__init__(inner, world, actor)
        self._documents = documents

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> Any:
        """As the port says."""
        return SteppedUnit(self.inner.begin(claims, late=late), self._documents)

    def record(self, marks: Sequence[Mark]) -> None:
        """As the port says."""
        self._world.witness.marks(output for mark in marks for output in mark.confirmed)
        self.inner.record(list(marks))

    def relay_alive(self) -> bool:
        """Never."""
        return False

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """As the port says; while there are no attempts at all, nobody asks."""
        self._actor.point("purge", ready=self._world.something_is_stored)
        self._actor.tell("purge")
        gone: int = self.inner.purge(consumer, retention, limit, others=others)
        self._actor.tell("purged", f"{gone} claims")
        return gone


class DocumentsInbox(SimulatedInbox):
    """A `DocumentInbox` for each process, on documents in memory.

    Attributes:
        kind: the inbox; a test may give another.
    """

    per_entity = True
    mortal_cleaner = True
    kind: ClassVar[type[DocumentInbox]] = DocumentInbox

    def __init__(self, clock: Clock, parts: Parts) -> None:
        super().__init__(clock, parts)
        self.documents = CountedDocuments()
        self.effects = DocumentEffects(self.documents)

    def of(self, world: World, actor: Actor) -> SteppedInbox:
        """An inbox that knows nothing but the documents."""
        documents = SteppedDocuments(self.documents, world, actor)
        return SteppedInbox(_quiet(self.kind)(documents, clock=self.clock, worker=actor.name), documents, world, actor)

    def consumes(self, since: datetime, until: datetime) -> None:
        """As if its workers had beaten all the while."""
        found = self.documents.read(BOOKS)
        body = encoded(Content(consumed={QUEUE: [(since, until)]}))
        self.documents.write(BOOKS, body, found.revision if found is not None else None)

    def pends(self) -> bool:
        """There is no relay to look."""
        return False

    def keeps(self) -> bool:
        """Whether there are attempts."""
        return bool(self.documents.scan(ATTEMPTS, None, 1)[0])

    def would_resend(self, outputs: Sequence[Output]) -> bool:
        """Whether their attempt is there, and a state document names it."""
        collector = Collector(self.documents, self.documents, self.clock)
        found = [
            {stored.output.id for stored in attempt.outputs}
            for attempt in collector.attempts()
            if collector.named(attempt)[1] is not None
        ]
        return bool(outputs) and any({output.id for output in outputs} <= ids for ids in found)

    def picture(self) -> Hashable:
        """All documents."""
        return self.documents.picture()


@cache
def _quiet(kind: type[DocumentInbox]) -> Callable[..., DocumentInbox]:
    """An inbox without chance, without waiting, and without a memory of its own."""

    class Inbox(kind):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._windows = {QUEUE: {TYPE: WINDOW}}  # as after its start

        def new_attempt(self) -> str:
            return self.own.next_attempt()  # type: ignore[no-any-return]

        def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
            self._horizons.clear()
            moment: datetime = super().late_before(consumer, retention, claims)
            return moment

        def pause(self, seconds: float) -> None:
            del seconds

    return Inbox


def _beside(id: str) -> bool:
    return id.startswith(OWN) and not id.startswith(ATTEMPTS)


def _kind(id: str) -> str:
    return "outputs" if id.startswith(ATTEMPTS) else "state"


def _told(body: Mapping[str, Any]) -> str:
    """What a person wants to know of a document."""
    if "outputs" in body:
        pending = sum(each["pending"] for each in body["outputs"])
        return f"{pending} of {len(body['outputs'])} outputs pending"
    ids: Iterable[Mapping[str, Any]] = body.get("idemp", {}).get(QUEUE, {}).get("ids", {}).values()
    return "names " + (", ".join(str(each.get("attempt", each["id"])) for each in ids) or "nothing")
