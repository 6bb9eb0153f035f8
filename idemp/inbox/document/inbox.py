"""An inbox in a document store: ids stand in the documents of the entities that messages are about."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

from idemp.errors import ConfigurationError
from idemp.inbox.content import Content, Sending
from idemp.inbox.document.attempts import Attempt, document_id, prefix_of
from idemp.inbox.document.books import BOOKS, decoded, encoded, start_id, starts_of
from idemp.inbox.document.collector import Collector, Rounds, scanned
from idemp.inbox.document.diagnosing import Diagnoses
from idemp.inbox.document.port import OWN, RevisionConflict
from idemp.inbox.document.state import IDS, Place, State, overlapping
from idemp.inbox.document.unit import DocumentUnit
from idemp.inbox.identities import with_entity
from idemp.inbox.located import Located
from idemp.inbox.port import HORIZON_SLACK, STARTS_KEPT, Claim, Mark, PendingState
from idemp.inbox.resending import Resending
from idemp.inbox.small import SmallStore
from idemp.inbox.unrelayed import Unrelayed
from idemp.inbox.watching import Warned

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from idemp.clock import Clock
    from idemp.diagnosis import Diagnosis
    from idemp.inbox.document.port import Documents
    from idemp.inbox.port import Identity
    from idemp.messages import Output

T = TypeVar("T")

_TRIES: Final = 12
_HORIZONS_KEPT: Final = 60.0
"""Seconds; well below HORIZON_SLACK, for which cleaners keep what is past its window."""
_LOOKED_AT: Final = 2_000
"""Attempts with pending outputs that one look at what pends goes through, at most."""


class DocumentInbox(Unrelayed, SmallStore):
    """Claims, outputs and effects in a store whose only transaction is the conditional write of one document.

    A handled message's id stands in the document of the entity that it is about, and names the attempt that handled it; the
    outputs of each attempt are a document of their own, written before. Nobody waits: two handlings of one entity at once
    both run, one write wins, and the other runs again. There is no relay: a delivery is acked only after its confirms.

    State documents must not be deleted as long as messages about them may come: their ids would go with them.

    Args:
        states: the documents that handlers change.
        own: idemp's own documents; default: the same collection. Their ids begin with `idemp/`.
        places: by message type, where an entity's document is and where in it ids are kept; default: the entity is its id,
            and the ids are in the field `idemp`.
        clock: source of time.
        worker: this process's name in the inbox.

    Raises:
        ConfigurationError: of two places' fields one is within the other.

    Example:
        >>> from idemp.inbox.document import InMemoryDocuments
        >>> DocumentInbox(InMemoryDocuments()).per_entity
        True
    """

    def __init__(
        self,
        states: Documents,
        own: Documents | None = None,
        *,
        places: Mapping[str, Place] | None = None,
        clock: Clock | None = None,
        worker: str | None = None,
    ) -> None:
        # All processes agree on the server's clock, where its answers show it.
        clock = clock or getattr(states, "clock", None)
        super().__init__(clock, worker or f"{socket.gethostname()}:{os.getpid()}")
        self.states = states
        self.own = states if own is None else own
        self._places = dict(places or {})
        self._anywhere = Place()
        self.paths = frozenset({IDS, *(place.ids for place in self._places.values())})
        if within := overlapping(self.paths):
            raise ConfigurationError(
                f"Ids can't be kept both in {within[0]!r} and in {within[1]!r}: one is within the other.",
                fix=f"Say another Place(ids=…); {IDS!r} is that of all types without one.",
            )
        self._collector = Collector(self.states, self.own, self.clock, self.paths)
        self._looks = Rounds(self.clock, self._collector.attempts)
        self.warned = Warned()
        self.resending = Resending(self.clock, self._unconfirmed, self._confirm)
        self._rounds: dict[tuple[str, str], Rounds[Attempt]] = {}
        self._lags: dict[str, timedelta] = {}
        self._pending = PendingState()
        self._windows: dict[str, Mapping[str, timedelta]] = {}
        self._horizons: dict[tuple[str, timedelta], tuple[datetime, float]] = {}

    @property
    def per_entity(self) -> bool:
        """A unit of work writes one document."""
        return True

    def place(self, message_type: str) -> Place:
        """Where documents of this type's entities are."""
        return self._places.get(message_type, self._anywhere)

    def new_attempt(self) -> str:
        """A name that no other attempt has."""
        return str(uuid4())

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        """A new unit of work. Nothing is asked of the store yet."""
        del late
        return DocumentUnit(self, claims)

    def verify(self) -> None:
        """See that the collections are there, and never answer with stale copies.

        Raises:
            GuaranteeError: they might.
            StoreUnavailable: they can't be reached.
        """
        self.states.verify()
        if self.own is not self.states:
            self.own.verify()

    def close(self) -> None:
        """Give connections back."""
        self.states.close()
        if self.own is not self.states:
            self.own.close()

    def shorten(self, state: State, consumers: Iterable[str]) -> None:
        """Take ids without outputs out of a document that is about to be written, once they are past their window.

        Those with outputs are the collector's affair, who sees whether any pends.
        """
        for consumer in consumers:
            windows = self._windows.get(consumer, {})
            expired = [
                record
                for record in state.records(consumer)
                if record.attempt is None
                and (window := windows.get(record.claim.message_type)) is not None
                and record.claimed_at < self.late_before(consumer, window + HORIZON_SLACK)
            ]
            state.forget(expired, self.clock.now())

    # Beside the handling ----------------------------------------------------------------------------------------------

    def record(self, marks: Sequence[Mark]) -> None:
        """Confirmed outputs no longer pend, refused ones were tried. One after the other; repeating it is harmless."""
        for mark in marks:
            if mark.confirmed or mark.refused:
                self._again(partial(self._record, mark))

    def _record(self, mark: Mark) -> None:
        claim = mark.claim
        place = self.place(claim.message_type)
        state = State((id_ := place.of(claim.entity)), self.states.read(id_), place.ids)
        record = state.find(claim.consumer, claim.id.key)
        if record is None or record.attempt is None:
            return
        found = self.own.read(document_id(claim, record.attempt))
        if found is None:
            return
        attempt = Attempt.restored(found)
        marked = attempt.marked(mark, self.clock.now())
        if marked != attempt:
            self.own.write(marked.id, marked.body(), found.revision)

    def locate(self, consumer: str, key: UUID) -> Located | None:
        """The document that names a message, by the message's key; `None` if this consumer did not handle it.

        A handling with outputs is found by its attempt. For others it looks through all state documents.
        """
        for attempt in self._collector.attempts(f"{prefix_of(consumer)}{key}/"):
            state, record = self._collector.named(attempt)
            if record is not None:
                sendings = [
                    Sending(each.output, record.claimed_at, 1, pending=each.pending) for each in attempt.outputs
                ]
                return Located(f"attempt {attempt.name} of the document {state.id!r}", record.handling(sendings))
        for found in scanned(self.states, ""):
            for path in self.paths if not found.id.startswith(OWN) else ():
                if (record := State(found.id, found, path, self.paths).find(consumer, key)) is not None:
                    return Located(f"an id in the document {found.id!r}", record.handling([]))
        return None

    def diagnose(self) -> list[Diagnosis]:
        """What `idemp doctor` shows of it; see `idemp.inbox.document.diagnosing`."""
        return Diagnoses(self.states, self._collector, self.clock).run()

    def note_start(self, consumer: str, key: UUID) -> int:
        """A handler is about to start; how many earlier starts did not end."""

        def noted() -> int:
            found = self.own.read(id_)
            earlier: int = found.body["starts"] if found is not None else 0
            body = {"starts": earlier + 1, "at": self.clock.now().isoformat()}
            self.own.write(id_, body, found.revision if found is not None else None)
            return earlier

        id_ = start_id(consumer, key)
        return self._again(noted)

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended: all but `left` of its recorded starts are forgotten."""

        def noted() -> None:
            found = self.own.read(id_)
            if found is None:
                return
            starts = min(left, found.body["starts"])
            if starts <= 0:
                self.own.delete(id_, found.revision)
            elif starts < found.body["starts"]:
                self.own.write(id_, {**found.body, "starts": starts}, found.revision)

        id_ = start_id(consumer, key)
        self._again(noted)

    def read(self) -> Content:
        """Consuming time, identities and queues."""
        found = self.own.read(BOOKS)
        return decoded(found.body) if found is not None else Content()

    @contextmanager
    def changing(self) -> Iterator[Content]:
        """The same, to be changed.

        Raises:
            RevisionConflict: somebody else was faster.
        """
        found = self.own.read(BOOKS)
        content = decoded(found.body) if found is not None else Content()
        yield content
        self.own.write(BOOKS, encoded(content), found.revision if found is not None else None)

    def _again(self, work: Callable[[], T]) -> T:
        """Work on one of idemp's own documents, done again where somebody else was faster."""
        for tries in range(_TRIES):
            try:
                return work()
            except RevisionConflict:
                self.pause(random.random() * 0.001 * 2**tries)  # noqa: S311 - jitter, not a secret
        return work()

    def pause(self, seconds: float) -> None:
        """Wait before idemp's own documents are tried again."""
        time.sleep(seconds)

    # No relays --------------------------------------------------------------------------------------------------------

    def relay_alive(self) -> bool:
        """Never: nothing could be left to it."""
        return False

    def pending_count(self) -> int:
        """Outputs without a recorded confirm."""
        return self.pending_state().count

    def pending_state(self) -> PendingState:
        """How much waits, and how long already; looks through all attempts, and seldom where that takes long."""
        self._pending = self._looks.looked(self._pending_of, self._pending)
        return self._pending

    def _pending_of(self, attempts: Iterator[Attempt]) -> PendingState:
        count, looked_at, oldest = 0, 0, self.clock.now()
        for attempt in attempts:
            if looked_at >= _LOOKED_AT:
                break
            if attempt.pending:
                looked_at += 1
                if self._collector.named(attempt)[1] is not None:
                    count, oldest = count + attempt.pending, min(oldest, attempt.claimed_at)
        return PendingState(count, 0, (self.clock.now() - oldest).total_seconds())

    def _unconfirmed(
        self, consumers: Collection[str], before: datetime, limit: int
    ) -> list[tuple[Attempt, Sequence[Output]]]:
        """Of attempts that counted; looks through all attempts, in several calls, and seldom where that takes long."""
        found: list[tuple[Attempt, Sequence[Output]]] = []
        for consumer in sorted(consumers):
            rounds = self._rounds_of("resend", consumer)
            if rounds.rests:
                continue
            with rounds.going() as left:
                for attempt in left:
                    if attempt.pending and attempt.tried_at <= before and self._collector.named(attempt)[1] is not None:
                        found.append((attempt, [each.output for each in attempt.outputs if each.pending]))
                        if (limit := limit - attempt.pending) <= 0:
                            return found
            rounds.ended()
        return found

    def _confirm(self, attempt: Attempt, outputs: tuple[UUID, ...]) -> None:
        def confirmed() -> None:
            found = self.own.read(attempt.id)
            if found is not None:
                self.own.write(found.id, Attempt.restored(found).confirmed(outputs).body(), found.revision)

        self._again(confirmed)

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """These consumers consume."""
        del relay
        self.resending.consumers.update(consumers)
        self._again(lambda: super(DocumentInbox, self).beat(worker, relay=False, consumers=consumers))

    def retire(self, worker: str) -> None:
        """Nothing is kept of a worker."""

    # Retention and identities -----------------------------------------------------------------------------------------

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """The moment since which the consumer has consumed for `retention` in sum, as it was a minute ago at most."""
        del claims
        kept = self._horizons.get((consumer, retention))
        if kept is None or self.clock.monotonic() - kept[1] > _HORIZONS_KEPT:
            self.refresh_horizons(consumer, [retention])
        return self._horizons[consumer, retention][0]

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Read what `late_before` answers."""
        content, now, moment = self.read(), self.clock.now(), self.clock.monotonic()
        for retention in retentions:
            self._horizons[consumer, retention] = (content.late_before(consumer, retention, now), moment)

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """Delete expired claims that have outputs, attempts that never counted, and forgotten starts.

        Expired claims without outputs go when their entity's document is written next. It looks through all attempts, in
        several calls if there is much to delete, and seldom where that takes long: meanwhile it answers 0 at once.
        """
        rounds = self._rounds_of("purge", consumer)
        if rounds.rests:
            return 0
        window, late_before = self._terms(consumer, retention, others)
        with rounds.going() as left:
            collected = self._collector.collect(consumer, left, window, late_before, limit)
        if collected.complete:
            rounds.ended()
        windows = [*retention.values(), *([] if others is None else [others])]
        if windows:
            self._forget_starts(consumer, max(STARTS_KEPT, *windows), limit)
        return collected.claims

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far the oldest claim that could be deleted is past its window; looks seldom where that takes long, too."""

        def see(attempts: Iterator[Attempt]) -> timedelta:
            window, late_before = self._terms(consumer, retention, others)
            lag = timedelta(0)
            for attempt in attempts:
                length = window(attempt.message_type)
                if length is None or not self._collector.expired(attempt, length, late_before):
                    continue
                if self._collector.named(attempt)[1] is not None:
                    lag = max(lag, late_before(length) - attempt.claimed_at)
            return lag

        rounds = self._rounds_of("lag", consumer)
        self._lags[consumer] = rounds.looked(see, self._lags.get(consumer, timedelta(0)))
        return self._lags[consumer]

    def _rounds_of(self, what: str, consumer: str) -> Rounds[Attempt]:
        if (found := self._rounds.get((what, consumer))) is None:
            found = Rounds(self.clock, partial(self._collector.attempts, prefix_of(consumer)))
            self._rounds[what, consumer] = found
        return found

    def _terms(
        self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None
    ) -> tuple[Callable[[str], timedelta | None], Callable[[timedelta], datetime]]:
        content, now = self.read(), self.clock.now()
        late_before = cache(lambda window: content.late_before(consumer, window, now))
        return lambda message_type: retention.get(message_type, others), late_before

    def _forget_starts(self, consumer: str, after: timedelta, limit: int) -> None:
        forgotten = 0
        for found in scanned(self.own, starts_of(consumer)):
            if forgotten < limit and self.clock.now() - datetime.fromisoformat(found.body["at"]) > after:
                try:
                    self.own.delete(found.id, found.revision)
                except RevisionConflict:
                    continue  # it started again
                forgotten += 1

    def agree_identities(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """As `Upkeep.agree_identities`; from now on documents that are written lose ids that are past these windows.

        Raises:
            IdentityChanged: one changed inside the window, its entity included, and is not covered.
            ConfigurationError: a type has a `Place` under a former name alone.
        """
        self._check_places(current, covered)
        agree: Any = super().agree_identities
        present = [with_entity(each) for each in current]
        former = {name: [with_entity(each) for each in identities] for name, identities in covered.items()}
        self._again(lambda: agree(consumer, queue, present, former, retention))
        self._windows[consumer] = dict(retention)

    def _check_places(self, current: Sequence[Identity], covered: Mapping[str, Sequence[Identity]]) -> None:
        for name, aliases in ((identity.message_type, identity.aliases) for identity in current):
            formers = {*aliases, *(former.message_type for former in covered.get(name, ()))} & self._places.keys()
            if formers and name not in self._places:
                raise ConfigurationError(
                    f"{name!r} has no Place, and under its former name {min(formers)!r} it has one: nobody would find there "
                    "what was handled.",
                    fix=f"Say it under the present name: places={{{name!r}: Place(…)}}.",
                )
