"""Ports to stores, schedulers and brokers. `idemp.testing` has a conformance suite for each port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar
from uuid import UUID

from idemp.errors import HandlerError
from idemp.identity import digest
from idemp.messages import Delivery, MessageRow, Output, Refusal

__all__ = [
    "AsyncStore",
    "Broker",
    "Claim",
    "ClaimAnswer",
    "Finding",
    "Handled",
    "Identity",
    "Kind",
    "NewRow",
    "Outlet",
    "Publisher",
    "Receiver",
    "Scheduler",
    "Store",
    "Verdict",
]

T = TypeVar("T")
Tx = TypeVar("Tx")


class Verdict(Enum):
    """The answer to a claim.

    Example:
        >>> Verdict("duplicate") is Verdict.DUPLICATE
        True
    """

    CLAIMED = "claimed"
    """The id is new: run the handler."""
    DUPLICATE = "duplicate"
    """The id was handled: skip the handler, send its stored outputs."""
    IN_FLIGHT = "in flight"
    """Another transaction holds the id: deliver it again soon."""
    CONFLICT = "conflict"
    """Another message was handled under the id: a dead letter."""


class Kind(Enum):
    """Meaning of a database driver's error.

    Example:
        >>> Kind.TRANSIENT.value
        'transient'
    """

    TRANSIENT = "transient"
    """A deadlock, a serialization failure or a busy database: the same work may pass at once."""
    LOST = "lost"
    """The connection or a resource is gone: the database may be away."""
    OTHER = "other"
    """A statement failed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The rule by which two messages of a type are the same one. Stored, and compared at each start.

    Attributes:
        descriptor: Text that names the key.
        retention: Seconds for which claims are kept.
        former: Identity that was changed within the retention.
        unrelated: Whether a new type is known not to be a former one under another name.

    Example:
        >>> Identity("billing", "shop.Pay", "body:id", 604_800.0).former is None
        True
    """

    consumer: str
    type: str
    descriptor: str
    retention: float
    former: Identity | None = None
    unrelated: bool = False


@dataclass(slots=True)
class Claim:
    """A message id that a transaction claims.

    Attributes:
        original: The id with its JSON type; `key` may be a digest of it.
        fingerprint: Digest of the payload; None proves nothing.
        made_at: When the message was made, in seconds since 1970, as far as it says so.
        skips_conflicts: Whether another payload under the id counts as a duplicate.
        resends: `due` leaves outputs to the worker that stored them during its head start, `pending` brings all that are
            unconfirmed, `always` those that are confirmed, too. Delayed outputs always wait.
        former: Claim by the former identity of the type, taken together with this one. A duplicate of either is a duplicate.
        found: When the stored claim was made that is this one, or makes it a duplicate; None if a store needs no such proof to
            distinguish it from a later one.

    Example:
        >>> Claim("billing", "shop.Pay", UUID(int=7), "i:7").resends
        'due'
    """

    consumer: str
    type: str
    key: UUID
    original: str
    fingerprint: bytes | None = None
    made_at: float | None = None
    skips_conflicts: bool = False
    resends: Literal["due", "pending", "always"] = "due"
    former: Claim | None = None
    found: int | None = field(default=None, init=False, compare=False)

    @property
    def place(self) -> tuple[str, UUID]:
        """Consumer and key: the primary key of the claim."""
        return self.consumer, self.key

    def waiting_identity(self, queue: str) -> bytes:
        """Return the identity of what waits for this handling: copies of a message share it, and no other message has it.

        Example:
            >>> Claim("billing", "shop.Pay", UUID(int=7), "i:7").waiting_identity("billing").hex()
            '9945bf1159b1e8d29070e8ced0a067d5'
        """
        place = (self.consumer, self.key.bytes, self.type, self.original)
        return digest("idemp.handling", queue, *place, self.fingerprint or b"")


@dataclass(slots=True)
class ClaimAnswer:
    """A verdict and, for a duplicate, the stored outputs that are unconfirmed or to be sent again.

    Attributes:
        late: Whether claims of the age of this message have been deleted, so that a claim proves nothing.
        worker: Who had claimed a duplicate.
        result: Body of the output of kind `result` that a duplicate finds; None if there is none.

    Example:
        >>> ClaimAnswer(Verdict.CLAIMED).outputs
        ()
    """

    verdict: Verdict
    outputs: Sequence[Output] = ()
    late: bool = False
    worker: str = ""
    result: bytes | None = None


@dataclass(slots=True)
class Handled:
    """What a handling emitted, to be stored: all outputs of a claim, or the delayed ones of a type that is not opted in.

    An output of kind `result` is not to be sent: a duplicate brings its body in `ClaimAnswer.result`.

    Example:
        >>> Handled("billing", None, []).claim is None
        True
    """

    consumer: str
    claim: Claim | None
    outputs: Sequence[Output]


@dataclass(slots=True)
class NewRow:
    """A delivery that becomes a row of the message table: a retry, a dead letter, or set aside because it was redelivered.

    Attributes:
        delay: Seconds until it is due; None makes a dead letter.
        attempts: Runs that failed and count.
        deaths: 1 for a delivery that is set aside, as it may have ended its process; a leased row keeps its own count.
        history: Failures so far.
        identity: Digest that copies of the message share and no other message has; None makes a row of its own.

    Example:
        >>> NewRow(Delivery("billing", {}, b""), delay=None, attempts=3).delay is None
        True
    """

    delivery: Delivery
    delay: float | None
    attempts: int = 0
    deaths: int = 0
    history: Sequence[Mapping[str, Any]] = ()
    identity: bytes | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    r"""A result of a start-up check.

    Attributes:
        level: A worker refuses to start with a red one.
        fix: The command or setting that fixes it; statements of SQL, one a line, which end in a semicolon.

    Example:
        >>> str(Finding("red", "the table idemp_inbox is missing", "idemp db upgrade"))
        'the table idemp_inbox is missing: idemp db upgrade'
        >>> print(Finding("red", "the role shop may not SELECT (a, b)", "GRANT SELECT ON a TO shop;\nGRANT SELECT ON b TO shop;"))
        the role shop may not SELECT (a, b):
        GRANT SELECT ON a TO shop;
        GRANT SELECT ON b TO shop;
    """

    level: Literal["red", "yellow"]
    text: str
    fix: str

    def __str__(self) -> str:
        space = "\n" if "\n" in self.fix else " "
        return f"{self.text}:{space}{self.fix}"


class Store(Protocol[Tx]):
    """Claims and outputs, in the handler's transaction.

    Attributes:
        lazy: Whether `finish` may leave the wait for the disk to `read_back`.
    """

    lazy: bool

    def register(self, consumer: str, types: Sequence[str], identities: Sequence[Identity], *, complete: bool = False) -> None:
        """Learn the names that claims will use, and compare the identities of opted-in types with the stored ones.

        Args:
            consumer: Name of the consumer.
            types: All types that are handled.
            identities: Those of opted-in types.
            complete: Whether the consumer has no other types, so that a renamed or opted-out one is noticed.

        Raises:
            ConfigurationError: An identity was changed while former claims count.
        """

    def connect(self) -> AbstractContextManager[Tx]:
        """Begin a transaction; roll back what is not committed."""

    def claim(self, tx: Tx, claims: Sequence[Claim]) -> Sequence[ClaimAnswer]:
        """Mark the transaction for `finish`, and insert claims in order; a duplicate brings its stored outputs.

        A claim that is in flight is the last one answered: the transaction cannot be used then.
        """

    def limited(self, tx: Tx, seconds: float) -> AbstractContextManager[None]:
        """Let the database end statements of a plain handler in this block that take longer, as far as it can."""

    def finish(self, tx: Tx, handled: Sequence[Handled], *, lazy: bool = False) -> None:
        """Prove that the transaction still is the one that claimed, store outputs, commit.

        Args:
            tx: The transaction.
            handled: Results of its handlings.
            lazy: Whether COMMIT need not wait for the disk; only if the store is lazy.

        Raises:
            TransactionEnded: It is another one; nothing was stored.
        """

    def read_back(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Return for each claim whether it is on disk, and wait until it is: one that was new, or that a duplicate has found.

        Called before outputs are sent and deliveries acked. A claim is lost if the server died between its COMMIT and the disk.
        """

    def intact(self, tx: Tx) -> bool:
        """Return whether a transaction is open; asked between the handlers of a batch, so without a round trip."""

    def ended(self, tx: Tx) -> HandlerError | None:
        """Return the error that says how the handler ended this transaction, or was refused to; None if it did neither.

        Called before the transaction is rolled back, for any error.
        """

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error of the driver means; None if it is none."""

    def probe(self) -> bool:
        """Return whether another connection can claim and store now."""


class AsyncStore(Store[Tx], Protocol[Tx]):
    """A store for `async def` handlers: its methods are called in functions that `run` runs, in the task of the handler."""

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a plain function that gives way to the event loop wherever the database is waited for."""

    def wait(self, tx: Tx, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable, in a function that is run."""

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, in a function that is run."""

    def limit(self, concurrency: int) -> int:
        """Return how many handlers can run at once, of a number that is wanted.

        Raises:
            ConfigurationError: The pool of connections is too small for them.
        """

    def check(self) -> None:
        """Refuse a way to the database that the driver cannot take, once; in a function that is run.

        Raises:
            ConfigurationError: A pooler takes connections away between transactions, and the driver has statements on them.
        """

    async def close(self) -> None:
        """Close pooled connections."""


class Scheduler(Protocol):
    """Everything that waits: pending outputs, retries, dead letters, and who is alive."""

    def confirm(self, ids: Sequence[str]) -> None:
        """Forget the pending rows of outputs that the broker has confirmed."""

    def refuse(self, refusals: Mapping[str, Refusal]) -> None:
        """Postpone outputs that the broker did not take; their own fault leads to quarantine."""

    def lease_outputs(self, limit: int, lease: float) -> Sequence[Output]:
        """Return outputs that are due, and make them due again after `lease` seconds."""

    def settle(self, failed: Sequence[NewRow], done: Sequence[MessageRow]) -> None:
        """Store retries and dead letters, and delete rows that are done, in one transaction.

        A copy of a row that waits or is held is dropped; one of a dead letter adds its attempts to it, and does not revive it.
        """

    def lease_messages(self, queue: str, limit: int) -> tuple[Sequence[Delivery], bool]:
        """Return retries that are due, but for suspects, and whether a suspect is due."""

    def lease_suspect(self, queue: str) -> Delivery | None:
        """Return a suspect that is due; called by a process that has nothing else in hand."""

    def accompany(self, row: MessageRow) -> None:
        """Note that a leased suspect is not alone in its process any more, so that its death would not be held against it."""

    def release(self) -> None:
        """Give back leased retries that nothing ran for."""

    def beat(self, role: str, *, stopping: bool = False) -> None:
        """Show life as a `worker` or a `relay`, and keep the leases of rows."""

    def relay_alive(self) -> bool:
        """Return whether any relay has shown life lately; raise if that cannot be asked."""

    def purge(self) -> int:
        """Delete what nothing refers to, and for each stored identity a batch of claims that are older than its retention.

        Claims with pending outputs stay. What was deleted is noted in the same transaction, so that late messages are known.

        Returns:
            How many claims were deleted; if any, there may be more.
        """


class Publisher(Protocol):
    """Sends outputs. Belongs to one thread."""

    def send(self, outputs: Sequence[Output]) -> None:
        """Begin to send outputs, and wait for nothing; `publish` of the very same list follows. May do nothing."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        """Send outputs and wait, `timeout` seconds at most, for a positive confirm of each."""

    def close(self) -> None:
        """Give up the connection."""


class Receiver(Protocol):
    """Takes deliveries of one queue. Belongs to one thread, but for `keep_alive` and `wake`."""

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        """Return deliveries, after `timeout` seconds at most."""

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries of this receiver for good."""

    def keep_alive(self) -> None:
        """Keep unacknowledged deliveries while a handler runs; called by another thread."""

    def wake(self) -> None:
        """End a waiting `receive`; safe in a signal handler."""

    def close(self) -> None:
        """Give back unacknowledged deliveries."""


class Outlet(Protocol):
    """The part of a broker that a relay needs."""

    @property
    def identity(self) -> str:
        """Text that is stored with the tables: one set of tables serves one broker."""

    def publisher(self) -> Publisher:
        """Return a new publisher."""


class Broker(Outlet, Protocol):
    """Queues by name, and a topic exchange whose routing keys are message types."""

    def declare(self, queue: str, types: Sequence[str]) -> Sequence[Finding]:
        """Make the queues NAME and NAME.unstorable, and let the first one receive published messages of these types."""

    def receiver(self, queue: str, prefetch: int = 40) -> Receiver:
        """Return a new receiver, to which the broker gives `prefetch` unacknowledged messages at most."""
