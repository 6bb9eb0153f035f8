"""The stream port: what `StreamInbox` asks of a store of event streams, whose only transaction is one append."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from idemp.cloudevents import unwrap
from idemp.errors import TransientStoreError
from idemp.messages import Message, OutputKind, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from idemp.inbox.port import Claim, Mark
    from idemp.messages import Output


class WrongVersion(TransientStoreError):
    """Another commit stands at this number of the stream: nothing was appended, and the handler has to look again.

    Example:
        >>> issubclass(WrongVersion, TransientStoreError)
        True
    """

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """The error about the commit that was refused."""
        return cls(
            f"Another message took number {commit.number} of the stream {commit.stream!r} meanwhile.",
            fix="The delivery runs again, on the stream as it is now.",
        )


class AlreadyCommitted(TransientStoreError):
    """A commit of this very message is there: nothing was appended, and the delivery, run again, is a duplicate.

    Example:
        >>> issubclass(AlreadyCommitted, WrongVersion)
        False
    """

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """The error about the commit that was refused."""
        return cls(
            f"The message {commit.claim.id.text!r} was committed meanwhile, by another delivery of it.",
            fix="The delivery runs again, and is told that it is a duplicate.",
        )


@dataclass(frozen=True)
class Event:
    """One event of a stream: a message that was published.

    Attributes:
        version: its place in the stream: 1, 2, … without gaps.
        message: as it was published.

    Example:
        >>> event = Event(1, Message(body=b'{"sku": "A-1"}', type="orders.Placed"))
        >>> event.type, event.data
        ('orders.Placed', {'sku': 'A-1'})
    """

    version: int
    message: Message

    @property
    def type(self) -> str | None:
        """The message type's name."""
        return self._plain.type

    @property
    def id(self) -> str | None:
        """The message id under which it was published, each time."""
        return self.message.message_id

    @cached_property
    def data(self) -> Any:
        """The body as JSON value; that of a CloudEvent is its `data`.

        Raises:
            MessageError: it is no JSON.
        """
        return parse_json(self._plain)

    @cached_property
    def _plain(self) -> Message:
        return unwrap(self.message)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What one handling of one message appended to a stream. Written once, never changed.

    Attributes:
        stream: the stream's name.
        number: its place in the stream: 1, 2, … without gaps. The expected version of an append is the number before.
        first_version: the version of its first event, or of the next one, where it has none.
        claim: the message's consumer, id, type and fingerprint: consumer and id's key are the commit id.
        committed_at: when.
        outputs: all that the handling emitted, in order.

    Example:
        >>> from datetime import UTC, datetime, timedelta
        >>> from idemp.identity import effective_id
        >>> from idemp.inbox.port import Claim
        >>> claim = Claim(consumer="orders", id=effective_id("envelope", "message-1"), message_type="orders.Place",
        ...               fingerprint=None, wait=timedelta(0), entity="order-7")
        >>> made = Commit(stream="order-7", number=1, first_version=1, claim=claim, committed_at=datetime.now(UTC))
        >>> made.events, made.next_version
        ((), 1)
    """

    stream: str
    number: int
    first_version: int
    claim: Claim
    committed_at: datetime
    outputs: tuple[Output, ...] = ()

    @property
    def events(self) -> tuple[Event, ...]:
        """The outputs that were published; what was sent to one queue or is a reply is no event.

        New objects at each call: a handler that changes the `data` of one changes it for itself alone.
        """
        return tuple(Event(version, message) for version, message in enumerate(self._published, self.first_version))

    @property
    def next_version(self) -> int:
        """The version of the first event after it."""
        return self.first_version + len(self._published)

    @cached_property
    def _published(self) -> tuple[Message, ...]:
        return tuple(output.message for output in self.outputs if output.kind is OutputKind.PUBLISH)


class Found(NamedTuple):
    """A commit, and what is known of its outputs.

    Attributes:
        commit: what was appended.
        pending: ids of the outputs that wait for the broker's confirm.
    """

    commit: Commit
    pending: frozenset[UUID] = frozenset()


@dataclass(frozen=True)
class Pending:
    """How many outputs wait for a confirm, and since when the oldest of them does; `None` if none does.

    Example:
        >>> Pending().count
        0
    """

    count: int = 0
    since: datetime | None = None


class Streams(Protocol):
    """Streams of commits. Their only transaction is the append of one commit. Safe to share between threads.

    An adapter sends each append once. Where its answer was lost it says so (`CommitUnknown`): the delivery runs again, and
    the commit id tells. All methods raise `StoreUnavailable` where the store can't be reached, and `TransientStoreError`
    where it was too busy and changed nothing.
    """

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        """The commits of a stream with higher numbers than `after`, in order, as they are now: never a stale copy.

        It reads those commits alone: a handling of a stream that its process knows asks for the last few.
        """
        ...

    def last(self, stream: str) -> Commit | None:
        """The last commit of a stream as it is now, read by itself; `None` if the stream has none."""
        ...

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        """The commit of this id: in this stream, or, where the store can tell, in any."""
        ...

    def append(self, commit: Commit, *, pending: bool) -> None:
        """Append a commit, if its number and its id are new to the stream. With `pending` all of its outputs pend.

        Its number is the one after those that `load` answered. Both keys are the store's own constraints: of several who
        append at once, one succeeds. What pends is written with it, and every later `load` and `find` sees both.

        Raises:
            AlreadyCommitted: its id is there, at whatever number; nothing was changed.
            WrongVersion: its number is taken, by another id; nothing was changed.
            CommitUnknown: the answer was lost: it was appended, or it was not.
        """
        ...

    def confirm(self, marks: Sequence[Mark]) -> None:
        """What they say is confirmed no longer pends. Repeating it is harmless, and so are ids that nobody knows."""
        ...

    def pending(self) -> Pending:
        """What waits for a confirm, in all streams."""
        ...

    def overdue(self, consumers: Collection[str], before: datetime, limit: int) -> Sequence[Found]:
        """Commits of these consumers at or before a moment, of whose outputs some pend; the oldest first.

        Up to `limit` pending outputs in sum: of the last commit perhaps not all.
        """
        ...

    def verify(self) -> None:
        """See that the streams are there, and set up so that the above holds.

        Raises:
            SchemaError: they are not; the error names the command that mends it.
            GuaranteeError: set up as they are, they can't keep it.
            StoreUnavailable: they can't be reached.
        """
        ...

    def close(self) -> None:
        """Give back what the adapter itself opened."""
        ...
