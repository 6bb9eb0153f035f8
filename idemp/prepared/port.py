"""The ports of prepared messages: where they are kept (`Home`), and what tells the fate of the local work (`Barrier`)."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta
    from uuid import UUID

    from idemp.messages import Message, Output


class Decision(enum.StrEnum):
    """What becomes of a prepared message; made once, and never turned round.

    Example:
        >>> Decision.COMMIT
        <Decision.COMMIT: 'commit'>
    """

    COMMIT = "commit"  #: the local work is committed: the message is to be published
    ROLLBACK = "rollback"  #: it is not, and never will be


class Answer(enum.StrEnum):
    """What a checker says about the local work.

    Example:
        >>> Answer.UNKNOWN
        <Answer.UNKNOWN: 'unknown'>
    """

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"  #: nobody can say yet: ask again later

    @property
    def decision(self) -> Decision | None:
        """The decision that it amounts to; `None` for "unknown".

        Example:
            >>> Answer.ROLLBACK.decision, Answer.UNKNOWN.decision
            (<Decision.ROLLBACK: 'rollback'>, None)
        """
        return None if self is Answer.UNKNOWN else Decision(self.value)


class State(enum.StrEnum):
    """Where a prepared message stands.

    Example:
        >>> [state.value for state in State if state.is_final]
        ['published', 'rolled_back']
    """

    PREPARED = "prepared"  #: durable, invisible, undecided
    COMMITTED = "committed"  #: decided; the broker has not confirmed the final message yet
    PUBLISHED = "published"  #: the broker confirmed it
    ROLLED_BACK = "rolled_back"  #: decided; it will never be published
    PARKED = "parked"  #: checked too often, or set aside by hand; neither dropped nor published

    @property
    def is_final(self) -> bool:
        """Whether nothing is left to do."""
        return self in {State.PUBLISHED, State.ROLLED_BACK}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message that waits for the fate of its producer's local work.

    Attributes:
        output: the final message: its id, destination, properties and bytes.
        fingerprint: digest of what the producer said, by which two messages of one id are told apart.

    Example:
        >>> from uuid import UUID
        >>> from idemp.messages import Message, Output, OutputKind
        >>> id = UUID("0192c8a4-7d3e-7000-8000-000000000001")
        >>> message = Message(body=b'{"sku":"A-1"}', type="stock.Reserve", message_id=str(id))
        >>> where = {"kind": OutputKind.SEND, "exchange": "", "routing_key": "stock"}
        >>> prepared = Prepared.of(Output(id=id, ordinal=0, message=message, **where))
        >>> prepared.id == id, len(prepared.fingerprint)
        (True, 32)
    """

    output: Output
    fingerprint: bytes

    @classmethod
    def of(cls, output: Output, said: Message | None = None) -> Prepared:
        """One of an output.

        Args:
            output: the final message.
            said: the message before it was given its form on the wire, which may hold a time of its own.
        """
        message = said or output.message
        place = [output.kind.value, output.exchange, output.routing_key, message.type, message.content_type]
        return cls(output, hashlib.sha256(json.dumps(place).encode() + b"\n" + message.body).digest())

    @property
    def id(self) -> UUID:
        """The id of the final message: consumers' inboxes absorb what is published twice."""
        return self.output.id

    @property
    def message(self) -> Message:
        """The final message."""
        return self.output.message

    @property
    def key(self) -> str | None:
        """What the producer called it, such as the id of an order."""
        return self.message.causation_id


@dataclass(frozen=True, slots=True)
class Taken(Prepared):
    """A prepared message in the hands of one checker, until it is decided, published, postponed or parked.

    Attributes:
        state: `PREPARED`: to be checked; `COMMITTED`: only to be published.
        checks: how often the checker was asked before, and did not know.
        attempts: how often a publish was refused before.
        tag: the home's own handle.
    """

    state: State = State.PREPARED
    checks: int = 0
    attempts: int = 0
    tag: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Record:
    """What a home knows of one prepared message, for people.

    Attributes:
        prepared: the message.
        state: where it stands; a broker knows `PREPARED` and `PARKED` only.
        checks: how often the checker was asked, and did not know.
        attempts: how often a publish was refused.
        reason: why it was postponed or parked the last time; `None` if it never was.
        prepared_at: by the home's clock, where it knows.
        due_at: when a checker takes it next, where the home knows and there is such a time.
    """

    prepared: Prepared
    state: State
    checks: int = 0
    attempts: int = 0
    reason: str | None = None
    prepared_at: datetime | None = None
    due_at: datetime | None = None


class Home(Protocol):
    """Keeps prepared messages, durable and invisible to consumers. Safe to share between threads.

    It reads one clock, its own: the database's, or the broker's. All times in arguments are durations.

    All methods raise `StoreError` or `BrokerError` where the home can't do its part: `committed` says "unknown" where the
    answer was lost. Every method is harmless to repeat.

    Attributes:
        decides: whether it can compare and set. Where it can't (a broker), the barrier *is* the decision, and
            `PreparedMessages` makes sure of the barrier before it calls `decide`.
        place: where it is, without secrets; barriers and stores in the same database name the same place.
    """

    decides: bool

    @property
    def place(self) -> str: ...  # noqa: D102

    def verify(self) -> None:
        """See that all is there, and on a broker make it so.

        Raises:
            ConfigurationError: tables are missing, or a queue has other arguments.
        """
        ...

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """Store it; durable when this returns. A checker takes it after `check_after`, unless it is decided before.

        The same id with the same fingerprint again changes nothing, whatever state it is in by now. (A broker may keep two
        copies: their fate is one.)

        Raises:
            PreparedConflict: the id is there with another fingerprint; nothing was stored. (A broker can't tell.)
        """
        ...

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        """Compare and set: an undecided message (a parked one, too) becomes `COMMITTED` or `ROLLED_BACK`.

        What becomes `COMMITTED` is the caller's to publish: no checker takes it for as long as `lease`. Where the home
        can't decide, this notes what the barrier says, as far as it can; with a `Taken` a rollback ends it.

        Returns:
            Whether it is to be published now: committed, and not known to be published.

        Raises:
            OppositeDecision: the opposite was decided before; nothing was changed.
            UnknownPrepared: there is no such message, which is never success. (A broker can't tell.)
        """
        ...

    def published(self, prepared: Prepared) -> None:
        """The broker confirmed the final message: `COMMITTED` becomes `PUBLISHED`. Ends a `Taken`."""
        ...

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """What is due to be checked, or to be published, for the caller alone.

        What it neither decides, publishes, postpones nor parks is due again after `lease` at the earliest, or when the
        caller is dead. Answers at once, with nothing if nothing is due; only messages in states `PREPARED` and `COMMITTED`.
        """
        ...

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """Due again after `retry_in`, where the home can tell times apart (a queue has one delay for all).

        Args:
            taken: what `take` answered; nothing happens if it was decided meanwhile.
            reason: why, for people.
            retry_in: the delay.
            checked: the checker was asked and did not know: counts as a check. Else it counts as an attempt to publish,
                if it is `COMMITTED`; what can't be asked is not counted.
        """
        ...

    def park(self, prepared: Prepared, reason: str) -> bool:
        """Set an undecided message aside, until `resume` or a decision; whether it was undecided."""
        ...

    def resume(self, id: UUID) -> bool:
        """A parked message is to be checked again, at once and with a new count of checks; whether it was parked."""
        ...

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """Up to `limit` messages in this state (`None`: in any that is not final), the oldest first where it can tell."""
        ...

    def find(self, id: UUID) -> Record | None:
        """One message."""
        ...

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:
        """Up to `limit` messages that have been in a final state for longer; none where the home forgets by itself."""
        ...

    def forget(self, ids: Collection[UUID]) -> None:
        """Delete those of them that are in a final state."""
        ...

    def close(self) -> None:
        """Give connections and what was taken back."""
        ...


class Barrier(Protocol):
    """Tells whether the local work was committed: by a row under the prepared id, in the local work's own transaction.

    The checker inserts the same row with the reason "rollback": so it waits for work in flight, and what comes later is
    refused. Safe to share between threads. Methods without a `work` raise `StoreError` where the store can't do its part.

    Attributes:
        place: where it is, without secrets; see `Home.place`.
    """

    @property
    def place(self) -> str: ...  # noqa: D102

    def verify(self) -> None:
        """See that all is there.

        Raises:
            ConfigurationError: tables are missing.
        """
        ...

    def begin(self) -> AbstractContextManager[Any]:
        """A unit of local work (a session): commits at the end of the block, rolls back on an exception.

        Raises:
            TransientStoreError: it lost against others, and is certainly rolled back; it may run again.
        """
        ...

    def pass_(self, work: Any, id: UUID) -> None:
        """Insert the row with the reason "commit", in the transaction of the local work, as its first statement best.

        Args:
            work: the session or connection of the local work.
            id: the prepared message.

        Raises:
            RolledBack: the checker was first. End the transaction: it must not commit.
            AlreadyPassed: local work for this id is committed; do it no second time, and end the transaction.
        """
        ...

    def probe(self, id: UUID) -> Answer:
        """The fate of the local work, decided now if nothing is: insert the row with the reason "rollback".

        Waits for work in flight, for a bounded time; then the answer is "unknown". After "rollback" no local work of this
        id commits any more, after "commit" it is committed.
        """
        ...

    def settle(self, ids: Collection[UUID]) -> None:
        """Their messages are published, or rolled back for good: the rows may go after the barrier's retention."""
        ...

    def is_settled(self, id: UUID) -> bool:
        """Whether `settle` was called for it: a copy that still turns up on a broker need not be published again."""
        ...

    def purge(self, retention: timedelta, limit: int) -> int:
        """Delete up to `limit` rows that were settled longer ago; how many. Those that are not settled stay for ever."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...
