"""Every error that idemp raises, in one tree.

```
IdempError
├── ConfigurationError      found at start: nothing was consumed, nothing was written
│   ├── SchemaError         tables are missing, old or altered; names the command that mends them
│   ├── IdentityChanged     a deploy changed what makes two messages "the same" inside the window
│   ├── BrokerChanged       outputs in the database belong to another broker of the same name
│   ├── GuaranteeError      the broker or the database can't keep the promises
│   └── GuardUnusable       the file of the guard against late duplicates is missing, altered or of another version
├── OffsetsLost             a source no longer has messages that were not read yet: never skipped in silence
├── MessageError            this message can't be handled, now or ever: parked at once
│   ├── UndecodableMessage, UnsupportedContentType, OversizedMessage
│   ├── UnknownMessageType, MissingId, InvalidId, LateMessage, FutureMessage
│   ├── NotOptedIn          its type is not, so that nobody can tell in bulk whether it was handled
│   ├── UnorderableMessage  its type keeps an order, and the message has no usable value to keep it by
│   ├── UnaddressableMessage  its store keeps one document or stream an entity, and the message names none
│   ├── UnusableState       what a document store keeps for the message's entity can't be read, or is gone in part
│   ├── PayloadConflict     same id, other payload
│   ├── TooManyHops         the message is the result of a longer chain of messages than its policy allows
│   ├── WorkerDied          its handler was started again and again, and each time the process died
│   └── Refuse              raised by handlers to park a message without retries
├── HandlerError            the handler did what no handler may do; its work was rolled back
│   ├── OutputError         an output that can't be sent, or emitted too late
│   └── TransactionEnded    commit, rollback, DDL or AUTOCOMMIT on the claim's transaction
├── StoreError
│   ├── TransientStoreError deadlock, serialization failure, lock wait: run the delivery again; also where somebody was
│   │                       faster with a document (RevisionConflict) or a stream (WrongVersion, AlreadyCommitted)
│   ├── StoreUnavailable    the database can't be reached: wait, then run the delivery again
│   ├── StoreReplaced       its file was deleted or replaced while it was open: the worker stops
│   ├── CommitUnknown       COMMIT was sent and no answer came: run it again, the claim knows
│   ├── BranchUnavailable   another database of a handling is away, or prepares no more: nothing was committed anywhere
│   └── BranchUnfinished    committed in the inbox's database, and still prepared in another one: recovery completes it
├── BrokerError
│   ├── BrokerUnavailable   the broker can't be reached
│   │   ├── BrokerReplaced      the embedded broker's file was deleted or replaced while it was open: the worker stops
│   │   ├── LostBeforeCommit    the delivery is lost to us: rolled back, nothing happened
│   │   └── LostAfterCommit     committed, and then the delivery could not be settled
│   └── DispatchIncomplete  some outputs have no confirm
├── PreparedError           a prepared message: `committed` is about its producer's local work
│   ├── PreparedConflict    the same id was prepared with another message; nothing was stored
│   ├── UnknownPrepared     a decision about a message that nobody prepared, or that was forgotten; never taken for success
│   ├── OppositeDecision    the opposite was decided before, and stays
│   ├── Undecided           the decision could not be made or written: the checker will decide
│   ├── RolledBack          the checker came before the local work, which must not commit any more
│   └── AlreadyPassed       local work for this message was committed before
├── EffectLater             raised by effects: not now; tried again, after the time that the other side asked for
├── EffectRefused           raised by effects: not now or ever; quarantined at once
├── IdInFlight              an initiation, or a call of a wrapped function, whose id is being handled elsewhere
└── AlreadyHandled          an initiation with an id that was handled before
```

Each error says what happened, whether the database was committed (`committed`: "no", "yes" or
"unknown") and what to do next (`fix`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self

from idemp.showing import class_of, described, guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.messages import Output

Committed = Literal["no", "yes", "unknown"]

_COMMITTED_TEXT: dict[str, str] = {
    "no": "The database was not committed.",
    "yes": "The database was committed.",
    "unknown": "Whether the database was committed is unknown.",
}

_REPLACED = "was deleted or replaced while this process had it open"
_PUT_BACK = "Stop all processes that use it, put the right file in its place, and start them again."


class IdempError(Exception):
    """Base of every error that idemp raises.

    Args:
        message: what happened, one sentence.
        committed: whether the handling's database transaction was committed.
        fix: what to do next, one sentence or command.

    Example:
        >>> print(IdempError("The queue is gone.", fix="Declare it."))
        The queue is gone. The database was not committed. Declare it.
        >>> print(BrokerUnavailable("The broker said: see the logfile.."))
        The broker said: see the logfile.
    """

    says_committed: bool = True
    """Whether the text says `committed`; not where no handling is on its way, as for a failed connect."""

    def __init__(self, message: str, *, committed: Committed = "no", fix: str = "") -> None:
        text: object = message  # handlers give all kinds of things
        if isinstance(text, str) and text.endswith("..") and not text.endswith("..."):
            message = text[:-1]  # it ends with the sentence of a server
        super().__init__(message)
        self.message = message
        self.committed: Committed = committed
        self.fix = fix

    def __str__(self) -> str:
        state = _COMMITTED_TEXT[self.committed] if self.says_committed else ""
        return " ".join(_sentence(part) for part in (self.message, state, self.fix) if part)


def _sentence(text: str) -> str:
    return text if text.rstrip()[-1:] in {".", "!", "?", "…"} else f"{text.rstrip()}."


class ConfigurationError(IdempError):
    """Found at start; nothing was consumed and nothing was written.

    Example:
        >>> from idemp import Idempotent
        >>> try:
        ...     Idempotent(retentoin="7d")
        ... except ConfigurationError as error:
        ...     print(error)
        Idempotent: unknown option 'retentoin'. Did you mean 'retention'?
    """

    says_committed = False


class SchemaError(ConfigurationError):
    """The inbox tables are missing, of another version, or their unique key was altered."""


class IdentityChanged(ConfigurationError):
    """Key, consumer name, type name or opt-in changed while claims of the former kind still count."""


class BrokerChanged(ConfigurationError):
    """Outputs in the database belong to another broker of the same name."""

    @classmethod
    def of(cls, name: str, stored: str, identity: str) -> Self:
        """Describe both brokers.

        Example:
            >>> BrokerChanged.of("default", "cluster a", "cluster b").message
            "Outputs of this database's broker 'default' belong to cluster a; this is cluster b. Nothing was sent."
        """
        return cls(
            f"Outputs of this database's broker {name!r} belong to {stored}; this is {identity}. Nothing was sent.",
            fix="If both are in use, give each a name (IDEMP_BROKER_NAME, or broker_name in idemp.toml) in all processes "
            "that use it. If this one takes the other's place, run `idemp broker adopt MODULE:APP` once.",
        )


class GuaranteeError(ConfigurationError):
    """The broker or the database, as set up, can't keep idemp's promises."""


class OffsetsLost(IdempError):
    """A source no longer has what comes next: it was trimmed, or made anew. Nothing is skipped in silence."""

    says_committed = False

    @classmethod
    def trimmed(cls, source: str, start: int, first: int | None) -> Self:
        """The source begins after what is to be read next.

        Example:
            >>> print(OffsetsLost.trimmed("orders", 700, 900))
            'orders' keeps nothing before offset 900, and offset 700 is next: what lies between is lost to this reader. ...
        """
        kept = "nothing" if first is None else f"nothing before offset {first}"
        return cls(
            f"{source!r} keeps {kept}, and offset {start} is next: what lies between is lost to this reader.",
            fix="Fetch it from an archive (`idemp pipeline backfill`), or accept the loss: begin with another checkpoint "
            "and startingOffsets=earliest; what was handled before is skipped by its inbox.",
        )

    @classmethod
    def made_anew(cls, source: str, start: int, end: int) -> Self:
        """The source ends before what is to be read next: it is another one of the same name.

        Example:
            >>> print(OffsetsLost.made_anew("orders", 700, 3))
            'orders' ends at offset 3, and offset 700 is next: it was made anew, or another broker answers. ...
        """
        return cls(
            f"{source!r} ends at offset {end}, and offset {start} is next: it was made anew, or another broker answers.",
            fix="If that is right, begin with another checkpoint; what was handled before is skipped by its inbox.",
        )


class GuardUnusable(ConfigurationError):
    """The guard file is missing, cut off, altered or of another version; late messages are parked as long as that is so."""


class MessageError(IdempError):
    """The message can't be handled, however often it is delivered: it is parked at once.

    Example:
        >>> from idemp.messages import Message, parse_json
        >>> try:
        ...     parse_json(Message(body=b"NaN"))
        ... except MessageError as error:
        ...     print(type(error).__name__, error.committed)
        UndecodableMessage no
    """


class UndecodableMessage(MessageError):
    """The body is no JSON, or no JSON that fits the handler's message type."""


class UnsupportedContentType(MessageError):
    """The content type is not JSON. Pickle is never decoded."""


class OversizedMessage(MessageError):
    """The body is larger than `max_body_bytes`."""


class UnknownMessageType(MessageError):
    """No handler of this consumer takes messages of this type.

    Attributes:
        queue_is_ours: handlers of this process have taken other messages of the same queue.
    """

    queue_is_ours = False


class MissingId(MessageError):
    """The message lacks what its policy takes as key; no id is ever invented."""


class InvalidId(MessageError):
    """The id is empty, too long, or of a type that can't be a key."""


class NotOptedIn(MessageError):
    """The message's type is not opted in: it comes in bulk, where nobody could tell whether it was handled before."""


class UnorderableMessage(MessageError):
    """The message has no usable value for its type's `ordered_by`, so that nobody knows which messages it comes after."""


class UnaddressableMessage(MessageError):
    """The message has no usable value for its type's `entity`: nobody knows which document or stream it is about."""


class UnusableState(MessageError):
    """The document of the message's entity can't be read, or the outputs that it names are gone; others are not affected."""


class LateMessage(MessageError):
    """The message is older than the retention window: whether it was handled is no longer known."""


class FutureMessage(MessageError):
    """The time inside the message's id lies in the future: its consumer keeps daily tables, and none for that day."""


class PayloadConflict(MessageError):
    """A message with this id was handled before, with another payload."""


class TooManyHops(MessageError):
    """The message is the last of a chain, each caused by the one before, that is longer than `max_hops` allows."""


class WorkerDied(MessageError):
    """The message's handler was started as often as its policy allows, and each time the process died.

    `attempts` says how often, failures without a death included.
    """

    def __init__(self, message: str, *, attempts: int, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.attempts = attempts


class Refuse(MessageError):
    """Raise it in a handler to park the message at once, without retries.

    Example:
        >>> raise Refuse("no such customer")
        Traceback (most recent call last):
        ...
        idemp.errors.Refuse: no such customer. The database was not committed.
    """


class HandlerError(IdempError):
    """A handler did what no handler may do; its work was rolled back.

    Attributes:
        raised: what the handler raised, if this is about an error that can't be taken as it is; `None` otherwise.

    Example:
        >>> error = HandlerError.of(StoreUnavailable("The archive is away."))
        >>> error.message, type(error.raised).__name__
        ('The handler raised StoreUnavailable: The archive is away.', 'StoreUnavailable')
    """

    raised: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> HandlerError:
        """Return what this amounts to, which the handler raised: an error of idemp's own, about another handling perhaps.

        Whether that one was committed is not said: whoever reads it takes it for what became of this one.
        """

        def without_state() -> str:
            assert isinstance(error, IdempError)  # noqa: S101 - else it is described
            return f"{class_of(error)}: " + " ".join(_sentence(part) for part in (error.message, error.fix) if part)

        made = HandlerError(f"The handler raised {guarded(without_state, lambda _: described(error))}")
        made.raised = error
        return made

    @classmethod
    def if_closed(cls, error: Exception) -> Exception:
        """Return the error; or, where its class does not let Python's own machinery handle it, one that tells of it.

        Context managers set an exception's traceback, and ask what it is. Of a frozen dataclass another error comes out.

        Example:
            >>> class Frozen(Exception):
            ...     def __setattr__(self, name, value):
            ...         raise TypeError("frozen")
            >>> HandlerError.if_closed(Frozen("no stock")).message
            'The handler raised Frozen: no stock'
        """

        def handled() -> Exception:
            error.__traceback__ = error.__traceback__
            isinstance(error, IdempError)
            return error

        return guarded(handled, lambda _: cls.of(error))


class OutputError(HandlerError):
    """An output can't be sent (no destination, no known type), or was emitted after the unit of work ended."""


class TransactionEnded(HandlerError):
    """A handler ended, or tried to end, the transaction that holds its claim."""


class StoreError(IdempError):
    """The store could not do its part.

    Example:
        >>> print(StoreUnavailable("The database is away."))
        The database is away. The database was not committed.
        >>> CommitUnknown("COMMIT was sent, and no answer came.").committed
        'unknown'
    """


class TransientStoreError(StoreError):
    """Deadlock, serialization failure or lock wait: the whole delivery may run again at once."""


class StoreUnavailable(StoreError):
    """The database can't be reached; the delivery runs again when it is back.

    Attributes:
        refuses_writes: the server answers, and takes no writes: a replica after a failover, or a full disk.
        used_up: the server answers, and a resource of it is used up: memory, disk, connections.
    """

    refuses_writes = False
    used_up = False


class CommitUnknown(StoreUnavailable):
    """COMMIT was sent and its answer was lost; running the delivery again tells which it was."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message, committed="unknown", fix=fix)


class StoreReplaced(StoreUnavailable):
    """The database's file was deleted or replaced while this process had it open: what was committed since is lost.

    Nothing is acked or sent any more, and the worker stops: waiting does not bring the file back.

    Example:
        >>> print(StoreReplaced.of("/var/lib/shop/inbox.db"))
        /var/lib/shop/inbox.db was deleted or replaced while this process had it open. Whether the database was committed ...
    """

    @classmethod
    def of(cls, path: str) -> Self:
        """Return the error about this file."""
        return cls(f"{path} {_REPLACED}", committed="unknown", fix=_PUT_BACK)


class BranchUnavailable(StoreError):
    """Another database of a handling can't be reached, or prepares no transaction now. Nothing was committed in any of them.

    The delivery comes again, which counts as no attempt, unless `answers`.

    Attributes:
        answers: the connection was lost while the handler ran, and the database answers on another one.
    """

    answers = False


class BranchUnfinished(StoreError):
    """A handling is committed in the inbox's database, and its part in another one is not yet: it is prepared there.

    It can't be lost: the redelivery completes it, or `idemp recover`, or any worker of the app.

    Attributes:
        is_lost: somebody rolled it back by hand, or its database is registered no more: only a person can mend that.

    Example:
        >>> BranchUnfinished("The database 'ledger' did not commit.").committed
        'yes'
    """

    def __init__(self, message: str, *, fix: str = "", is_lost: bool = False) -> None:
        super().__init__(message, committed="yes", fix=fix)
        self.is_lost = is_lost


class BrokerError(IdempError):
    """The broker could not do its part.

    Example:
        >>> issubclass(BrokerUnavailable, BrokerError)
        True
    """


class BrokerUnavailable(BrokerError):
    """The broker can't be reached."""

    says_committed = False


class BrokerReplaced(BrokerUnavailable):
    """The embedded broker's file was deleted or replaced while this process had it open.

    Nothing is confirmed or settled any more, and the worker stops.

    Example:
        >>> BrokerReplaced.of("/var/lib/shop/queues.db").message
        '/var/lib/shop/queues.db was deleted or replaced while this process had it open'
    """

    @classmethod
    def of(cls, path: str) -> Self:
        """Return the error about this file."""
        return cls(f"{path} {_REPLACED}", committed="unknown", fix=_PUT_BACK)


class LostBeforeCommit(BrokerUnavailable):
    """The connection that brought the delivery was gone before COMMIT: rolled back, and the broker delivers it again.

    Only for types that are not opted in; the others commit, since their claim makes the next delivery a duplicate.
    """

    says_committed = True


class LostAfterCommit(BrokerUnavailable):
    """The handling is committed, and the delivery could not be settled: the broker delivers it again.

    Example:
        >>> LostAfterCommit("The connection was lost before the ack.").committed
        'yes'
    """

    says_committed = True

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message, committed="yes", fix=fix)


class DispatchIncomplete(BrokerError):
    """Some outputs were not confirmed by the broker. `reasons` has one entry for each; it is empty where they are stored."""

    def __init__(self, message: str, *, committed: Committed, reasons: Sequence[str], fix: str = "") -> None:
        super().__init__(message, committed=committed, fix=fix)
        self.reasons = tuple(reasons)


class PreparedError(IdempError):
    """About a prepared message; `committed` says what is known of its producer's local work.

    Example:
        >>> print(RolledBack("The checker was first."))
        The checker was first. The database was not committed.
        >>> AlreadyPassed("This work was done before.").committed
        'yes'
    """


class PreparedConflict(PreparedError):
    """The id was prepared before with another message; nothing was stored, and no local work was done."""


class UnknownPrepared(PreparedError):
    """No message of this id is prepared: it never was, or it was decided so long ago that it is forgotten."""


class OppositeDecision(PreparedError):
    """The opposite was decided before: that stays, and this decision changed nothing."""


class Undecided(PreparedError):
    """The decision could not be made or written. It is not lost: the checker will decide."""

    def __init__(self, message: str, *, committed: Committed = "unknown", fix: str = "") -> None:
        super().__init__(message, committed=committed, fix=fix or "Do nothing: the checker will decide.")


class RolledBack(PreparedError):
    """The checker was first and decided for rollback: the local work must not commit, nor can it."""


class AlreadyPassed(PreparedError):
    """Local work for this message is committed already; it must not be done a second time."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message, committed="yes", fix=fix)


class EffectLater(IdempError):
    """Raise it in an effect that did not take place and may later: any other exception says so, too, but not when.

    Args:
        message: what happened, one sentence.
        after: how long to wait; without it the effect's own policy says so. A day at most.

    Raises:
        TypeError: `after` is no `timedelta`; in an effect that is a failure as any other.

    Example:
        >>> from datetime import timedelta
        >>> raise EffectLater("503", after=timedelta(seconds=30))
        Traceback (most recent call last):
        ...
        idemp.errors.EffectLater: 503.
    """

    says_committed = False

    def __init__(self, message: str, *, after: timedelta | None = None) -> None:
        if after is not None and not isinstance(after, timedelta):
            raise TypeError(f"EffectLater(after={after!r}): a timedelta says how long to wait")
        super().__init__(message, committed="yes")
        self.after = after


class EffectRefused(IdempError):
    """Raise it in an effect that will never take place as it is: it is quarantined without further attempts.

    Example:
        >>> EffectRefused("550 no such mailbox").committed
        'yes'
    """

    says_committed = False

    def __init__(self, message: str) -> None:
        super().__init__(message, committed="yes")


class IdInFlight(IdempError):
    """An initiation, or another call of a wrapped function, with this id is running elsewhere; it outlasted `claim_wait`."""


class AlreadyHandled(IdempError):
    """An initiation's id was handled before; `outputs` are those stored then.

    Example:
        >>> print(AlreadyHandled("Initiation 'r-1' was handled before.", outputs=[]))
        Initiation 'r-1' was handled before. The database was committed.
    """

    def __init__(self, message: str, outputs: Sequence[Output]) -> None:
        super().__init__(message, committed="yes")
        self.outputs = tuple(outputs)
