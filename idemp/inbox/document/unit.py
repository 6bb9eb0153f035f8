"""A unit of work over documents: one conditional write of the entity's document, which names the attempt that wins."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime
from typing import TYPE_CHECKING, Any

from idemp.errors import (
    CommitUnknown,
    HandlerError,
    IdempError,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    UnusableState,
)
from idemp.inbox.content import Handling, Sending
from idemp.inbox.document.attempts import Attempt, document_id
from idemp.inbox.document.port import OWN, DocumentRefused, DocumentTooLarge, UnreadableDocument, size_of
from idemp.inbox.document.state import Record, State
from idemp.inbox.port import Claim, Claimed, StoredOutput, Verdict
from idemp.inbox.small import PlainUnit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta
    from types import TracebackType
    from uuid import UUID

    from idemp.inbox.document.inbox import DocumentInbox
    from idemp.inbox.document.port import Document
    from idemp.messages import Output


class DocumentSession:
    """What a handler writes its effects through: the entity's document, which COMMIT writes if nobody else did meanwhile.

    Example:
        >>> from idemp.inbox.document import DocumentInbox, InMemoryDocuments
        >>> inbox = DocumentInbox(InMemoryDocuments())
        >>> with inbox.begin() as unit:
        ...     unit.session.open("cart-7")["items"] = 3
        ...     unit.commit()
        >>> inbox.states.read("cart-7").body
        {'items': 3}
    """

    def __init__(self, unit: DocumentUnit) -> None:
        self._unit = unit

    @property
    def document(self) -> dict[str, Any]:
        """The entity's document, without idemp's field. Change it in place; empty where it does not exist yet.

        Raises:
            HandlerError: the message's type is not opted in, and no document was opened.
        """
        return self._unit.state().document

    @property
    def exists(self) -> bool:
        """Whether the entity's document existed, when it was read."""
        return self._unit.state().exists

    def open(self, id: str) -> dict[str, Any]:
        """The one document that a handler without a claim changes, by its id.

        Raises:
            HandlerError: there is another one already; the only transaction is the write of one document.
        """
        return self._unit.opened(id).document

    def read(self, id: str) -> dict[str, Any] | None:
        """A copy of any other document as it is now, without idemp's field; what is changed in it is not written.

        Raises:
            HandlerError: it is one of idemp's own.
        """
        return self._unit.looked_at(id)

    def commit(self) -> None:
        """Refused: the handling's end commits."""
        self._unit.refuse("commit")

    def rollback(self) -> None:
        """Refused: an exception rolls back."""
        self._unit.refuse("rollback")


class DocumentUnit(PlainUnit):
    """One handling on a `DocumentInbox`. Nothing is written before its end.

    The claim reads the entity's document, and remembers the revision. COMMIT writes the attempt's document with the outputs,
    and then the entity's document, with the ids that were claimed, under that revision: whatever happened meanwhile, one
    write wins. A loser's outputs never counted, since no document names its attempt.

    Args:
        inbox: what it is a unit of.
        claims: those that it is going to make.
    """

    def __init__(self, inbox: DocumentInbox, claims: Sequence[Claim]) -> None:
        self._inbox = inbox
        self._announced = claims[0] if claims else None
        self._state: State | None = None
        self._path = ""
        self._claims: dict[tuple[str, UUID], tuple[Claim, datetime]] = {}
        self._outputs: dict[tuple[str, UUID], list[StoredOutput]] = {}
        self._broken: TransactionEnded | None = None
        self._away = False
        self._raised: Exception | None = None
        self.session = self.connection = DocumentSession(self)

    # What the session asks -------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The document that this unit is about, read at the first call."""
        if self._state is not None:
            return self._state
        if self._announced is None:
            raise HandlerError(
                "A handler whose type is not opted in is about no entity.",
                fix="Open the one document that it changes, with ctx.session.open(id), or opt its type in.",
            )
        with self._noting():
            return self._read_for(self._announced)

    def opened(self, id: str) -> State:
        """The document with this id, which is then what the unit is about."""
        if self._state is None and self._announced is None:
            self._check_foreign(id)
            self._state = State(id, self._read_for_handler(id), None, self._inbox.paths)
        elif self.state().id != id:
            raise HandlerError(
                f"The handler opened {id!r}, and its transaction is the write of {self.state().id!r} alone.",
                fix="Send a message that has the other document changed.",
            )
        return self.state()

    def looked_at(self, id: str) -> dict[str, Any] | None:
        """A copy of the user's part of a document."""
        self._check_foreign(id)
        state = State(id, self._read_for_handler(id), None, self._inbox.paths)
        return deepcopy(state.document) if state.exists else None

    def refuse(self, what: str) -> None:
        """A handler tried to end the unit."""
        self._broken = TransactionEnded(
            f"The handler called {what} on the session that its claim is committed with; nothing of it was written.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back.",
        )
        self._raised = self._broken
        raise self._broken

    def _check_foreign(self, id: str) -> None:
        if not id or id.startswith(OWN):
            raise HandlerError(f"{id!r} is no document of yours: {OWN!r} is where idemp's own ids begin.")

    def _read(self, id: str) -> Document | None:
        try:
            with self._noting():
                return self._inbox.states.read(id)
        except StoreUnavailable:
            self._away = True
            raise

    def _read_for_handler(self, id: str) -> Document | None:
        try:
            return self._read(id)
        except UnreadableDocument as error:
            raise HandlerError(error.message, fix=error.fix) from error

    # The unit of work ------------------------------------------------------------------------------------------------

    def _read_for(self, claim: Claim) -> State:
        place = self._inbox.place(claim.message_type)
        id_ = place.of(claim.entity)
        if self._state is None:
            self._path, self._state = place.ids, self._read_anew(claim)
        elif self._state.id != id_:
            raise StoreError(
                f"A unit of work is about the document {self._state.id!r}, and a further claim about {id_!r}.",
                fix="Say batch=1; one transaction of this store is the write of one document.",
            )
        return self._state

    def _read_anew(self, claim: Claim) -> State:
        place = self._inbox.place(claim.message_type)
        id_ = place.of(claim.entity)
        try:
            return State(id_, self._read(id_), place.ids, self._inbox.paths)
        except UnreadableDocument as error:
            raise UnusableState(error.message, fix=f"{error.fix} Then replay the message.") from error

    def claim(self, claim: Claim) -> Claimed:
        """What the entity's document says of the id. Nobody waits for others: the write at the end tells who was first."""
        state = self._read_anew(claim) if claim.elsewhere else self._read_for(claim)
        record = state.find(claim.consumer, claim.id.key)
        if record is not None:
            return self._joined(claim, record).answer(claim)
        if not claim.elsewhere:
            self._claims[claim.consumer, claim.id.key] = (claim, self._inbox.clock.now())
        return Claimed(Verdict.CLAIMED)

    def _joined(self, claim: Claim, record: Record) -> Handling:
        """A record with its outputs.

        Raises:
            TransientStoreError: they went with the window, just now.
            UnusableState: they are gone, or can't be read.
        """
        if record.attempt is None:
            return Handling(record.claim, record.claimed_at)
        try:
            found = self._inbox.own.read(document_id(record.claim, record.attempt))
        except UnreadableDocument as error:
            raise UnusableState(error.message, fix="Restore it, then replay the message.") from error
        if found is None:
            raise self._gone(claim, record)
        outputs = Attempt.restored(found).outputs
        sendings = [Sending(each.output, record.claimed_at, 1, pending=each.pending) for each in outputs]
        return Handling(record.claim, record.claimed_at, sendings)

    def _gone(self, claim: Claim, record: Record) -> IdempError:
        """Why the outputs are not there: the id may have expired since the state was read."""
        state, text = self._read_anew(claim), record.claim.id.text
        now = state.find(record.claim.consumer, record.claim.id.key)
        if now is None or now.attempt != record.attempt:
            return TransientStoreError(f"What is kept of {text!r} expired while it was read; once more.")
        return UnusableState(
            f"The outputs of {text!r} are gone: {state.id!r} names attempt {record.attempt} with {record.outputs} of them, "
            "and its document does not exist.",
            fix=f"Restore {document_id(record.claim, record.attempt or '')!r}; idemp deletes none that is named.",
        )

    def purged_before(self, consumer: str) -> datetime | None:
        """When ids were last taken out of the entity's document."""
        if self._state is None and self._announced is None:
            return super().purged_before(consumer)
        return self.state().purged(consumer)

    def usable(self) -> bool:
        """Whether every read of the handler's was answered."""
        return not self._away

    def raised(self, error: Exception) -> bool:
        """Whether it raised this error itself in the handler's hands."""
        return error is self._raised

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Around what the handler's session asks."""
        try:
            yield
        except Exception as error:
            self._raised = error
            raise

    def flush(self) -> None:
        """See that the document can be kept; a refusal that the handler swallowed is raised."""
        if self._broken is not None:
            raise self._broken
        if self._state is not None:
            self._state.body()

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs for the claimed id."""
        self.flush()
        pending = relay_after is not None
        self._outputs[claim.consumer, claim.id.key] = [StoredOutput(output, pending) for output in outputs]

    def commit(self) -> None:
        """Write the attempt, then the document that names it.

        Raises:
            RevisionConflict: somebody else wrote the entity's document first; run again.
            CommitUnknown: the answer to the second write was lost.
            DocumentTooLarge: one of the two.
            HandlerError: the store refuses what the handler wrote into the document.
        """
        self.flush()
        state = self._state
        if state is None or not (self._claims or state.changed):
            return
        self._inbox.shorten(state, {claim.consumer for claim, _ in self._claims.values()})
        attempts = [self._kept(state, claim, claimed_at) for claim, claimed_at in self._claims.values()]
        body = state.body()
        if (size := size_of(body)) > (largest := self._inbox.states.largest):
            raise DocumentTooLarge.of(state.id, size, largest, size - size_of(state.document))
        for attempt in attempts:
            if attempt is not None:
                self._write_attempt(attempt)
        try:
            self._inbox.states.write(state.id, body, state.revision)
        except DocumentRefused as error:
            raise HandlerError(error.message, fix=error.fix) from error
        self._warn(state, size)

    def _warn(self, state: State, size: int) -> None:
        """Of what will be refused before long, and of consumers that share the entity."""
        consumers, warned = {consumer for consumer, _ in self._claims}, self._inbox.warned
        for consumer in consumers:
            warned.nearly_full(consumer, state.id, size, self._inbox.states.largest, state.ids)
            for other in state.consumers - consumers:
                warned.shared(consumer, other, state.id)

    def _kept(self, state: State, claim: Claim, claimed_at: datetime) -> Attempt | None:
        """Note the id in the state, and make its attempt if there are outputs."""
        outputs = self._outputs.get((claim.consumer, claim.id.key), [])
        name = self._inbox.new_attempt() if outputs else None
        state.keep(Record(claim, claimed_at, name, len(outputs)))
        if name is None:
            return None
        return Attempt(
            id=document_id(claim, name),
            state=state.id,
            path=self._path,
            expects=state.revision,
            consumer=claim.consumer,
            key=claim.id.key,
            message_type=claim.message_type,
            claimed_at=claimed_at,
            tried_at=claimed_at,
            outputs=outputs,
        )

    def _write_attempt(self, attempt: Attempt) -> None:
        try:
            self._inbox.own.write(attempt.id, attempt.body(), None)
        except CommitUnknown as error:  # whether it is there or not: nothing names it
            raise StoreUnavailable("The answer to the write of an attempt's outputs was lost.") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._broken is not None and isinstance(error, Exception) and error is not self._broken:
            raise self._broken from error  # the handler swallowed it, and failed of its consequences
