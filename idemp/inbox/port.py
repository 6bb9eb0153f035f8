"""The store port: what the protocol asks of a place that keeps claims and outputs.

Four verbs and a unit of work. Everything that a running service needs beside the protocol (the relay's leases, retention,
heartbeats) is the second, optional half, `Upkeep`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType
    from uuid import UUID

    from idemp.errors import StoreError
    from idemp.identity import EffectiveId
    from idemp.messages import Output


STARTS_KEPT: Final = timedelta(days=1)
"""The least time for which a start without an end is remembered, however short the retention window is."""
DEFAULT_BROKER: Final = "default"
"""Name of the broker that outputs go to where no setting names one."""
HORIZON_SLACK: Final = timedelta(minutes=5)
"""How long a worker may go by the start of a window that it read before; cleaners keep claims for so much longer."""

LONGEST_WAIT: Final = timedelta(minutes=10)
"""Longer than any output waits for its dispatcher or in a pause; what is due later is due by a clock that was wrong."""


class Verdict(enum.Enum):
    """What a claim answers. Never an exception.

    Example:
        >>> Verdict.DUPLICATE.name
        'DUPLICATE'
    """

    CLAIMED = "claimed"  #: the id is ours; nobody handled it in the window
    DUPLICATE = "duplicate"  #: it was handled, its outputs are stored
    IN_FLIGHT = "in flight"  #: somebody else handles it now, and took longer than the claim waits
    CONFLICT = "conflict"  #: it was handled with another payload or type, or another id shares its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a handling claims.

    Attributes:
        consumer: the scope of the key.
        id: the effective id.
        message_type: canonical type name. An id that a message of another type claimed is a conflict.
        fingerprint: digest of the payload, `None` for "unknown", which never conflicts.
        wait: how long to wait for another holder of the same id.
        position: where the message stood in its source ("topic/3#1201"), stable when the source is read again; `None` of
            deliveries, and where it is not known. At most 255 bytes.
        entity: which thing the message is about, as its policy's `entity` says; `None` where that says nothing.
        elsewhere: its entity is what its type was about formerly: the id is looked for there, and not taken.
        aliases: other names of the message type, under which the same message may have been claimed.

    Example:
        >>> from idemp.identity import effective_id
        >>> claim = Claim(consumer="orders", id=effective_id("envelope", "m-1"), message_type="orders.Place",
        ...               fingerprint=None, wait=timedelta(seconds=2), aliases=("orders.PlaceOrder",))
        >>> claim.is_of("orders.PlaceOrder"), claim.is_of("orders.Cancel")
        (True, False)
    """

    consumer: str
    id: EffectiveId
    message_type: str
    fingerprint: bytes | None
    wait: timedelta
    position: str | None = None
    entity: str | None = None
    elsewhere: bool = False
    aliases: tuple[str, ...] = ()

    def is_of(self, message_type: str) -> bool:
        """Return whether a stored claim of this type can be an earlier claim of the same message."""
        return message_type == self.message_type or message_type in self.aliases


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """An output in the store, and whether it still waits for the broker's confirm.

    `due_at` is when a relay may take it: until then its own dispatcher, or the relay that leased it, is at work on it.
    `None` where that is not known, or where no relay takes it any more.
    """

    output: Output
    pending: bool
    due_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim's verdict, with what the store keeps under that id when it is a duplicate or a conflict.

    Attributes:
        verdict: whose the id is.
        outputs: what was stored under it, in emission order.
        detail: for people.
        collision: the conflict is with another message (another id of the same digest, or another message type), not
            with another payload of this one; no policy takes it for a duplicate.
        claimed_at: when the handling that has the id claimed it.
        position: the source position that it claimed it from.
        of: the claim that it answers, where a message has several; what is recorded of its outputs stands under that one.
    """

    verdict: Verdict
    outputs: tuple[StoredOutput, ...] = ()
    detail: str = ""
    collision: bool = False
    claimed_at: datetime | None = None
    position: str | None = None
    of: Claim | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a handling after its COMMIT, recorded in batches.

    Attributes:
        claim: the handling.
        confirmed: ids of outputs that the broker confirmed.
        redelivered: whether this is about a redelivery, counted for `inbox explain`.
        refused: ids of outputs that stay pending, each with the reason for people.
    """

    claim: Claim
    confirmed: tuple[UUID, ...] = ()
    redelivered: bool = False
    refused: tuple[tuple[UUID, str], ...] = ()


class UnitOfWork(Protocol):
    """One database transaction. As a context manager it rolls back whatever was not committed.

    A unit may have a method `raised(error) -> bool`, which says whether it raised an error of idemp's own itself, when the
    handler asked it for something. Where it has, all others that a handler raises count as the handler's failures.
    """

    @property
    def session(self) -> Any:
        """What handlers write their effects through, in this very transaction."""
        ...

    @property
    def connection(self) -> Any:
        """The connection below `session`."""
        ...

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; the conflict is the answer. `DUPLICATE` only when the row was then *read*."""
        ...

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """`claim` for several different ids of one consumer, before anything else is done in this unit; in their order.

        It claims in an order of its own, the same in all units, so that no two wait for each other. For an id that somebody
        else holds it waits up to `wait`. If one is `IN_FLIGHT`, the unit is to be given up, whatever is said of the others;
        a store that can't tell which one it is says so of all.
        """
        ...

    def look_all(self, claims: Sequence[Claim]) -> Sequence[Claimed]:
        """What `claim_all` would answer now; the unit is to be given up, and leaves no trace of them where a store can."""
        ...

    def forget(self) -> bool:
        """After a handler, before another one in the same transaction: the session is as a new one.

        Returns:
            Whether another handler may run in this transaction: not if a setting was changed beyond it.

        Raises:
            HandlerError: a statement failed, and the handler went on.
            TransactionEnded: the handler ended the transaction, as far as one can see without asking.
        """
        ...

    def usable(self) -> bool:
        """Whether the transaction's connection is still there; if so, the database was not what a handler failed of."""
        ...

    def flush(self) -> None:
        """Send what the session still holds to the database, so that its failures count as the handler's."""
        ...

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs under a claimed id, pending, and prove that this is still the claim's transaction.

        `relay_after` from now on a relay may send those that still have no confirm; zero says that nobody else will. With
        `None` nobody is to send them: they are kept, and never pend. Effects are due at once: nobody else runs them.

        Raises:
            TransactionEnded: it is not.
        """
        ...

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """`store_outputs` for several claims, in as few statements as the store can."""
        ...

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """`claim`, and if the id is ours `store_outputs`, in as few statements as the store can."""
        ...

    def purged_before(self, consumer: str) -> datetime | None:
        """Up to which moment claims of this consumer have been deleted: what was claimed before it may be gone.

        `None` for "none ever was". Asked after a claim it knows of every deletion that the claim could have met, and no
        other is committed before this unit ends, or it is read anew.
        """
        ...

    def commit(self) -> None:
        """Commit.

        Raises:
            TransientStoreError: it was not committed, and may be tried again.
            CommitUnknown: it was sent, and no answer came.
            TransactionEnded: the handler ended the transaction itself.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Keeps claims and outputs. One per database, safe to share between threads."""

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> UnitOfWork:
        """A new unit of work, in a transaction of its own.

        `claims` are those that it is going to make, so that a store can prepare outside the transaction; `late` says that
        the handler comes before them, which the proof at the end has to know.

        Raises:
            StoreUnavailable: the database can't be reached.
            FutureMessage: the time inside an id lies in the future, for a store that keeps ids by their time.
        """
        ...

    def translate(self, error: BaseException) -> StoreError | None:
        """What an exception of the driver (met by the user's own statements, too) means for the whole delivery.

        `None` when it is the handler's own affair, such as its own unique violation.
        """
        ...

    def record(self, marks: Sequence[Mark]) -> None:
        """Record what was confirmed and redelivered, in one short transaction of its own. Repeating it is harmless."""
        ...

    def note_start(self, consumer: str, key: UUID) -> int:
        """Record, committed at once, that a handler is about to start on this message.

        Call it outside of any unit of work. A record that is still there at the message's next delivery is of a process
        that died in the handler, or of one that is in it right now. Records that nobody comes back for are purged.

        Returns:
            How many earlier starts did not end: 0 at first, then 1, 2, … up to a bound of the store's own (1,000 or more).

        Raises:
            TransientStoreError: it lost against others, time and again; nothing was recorded.
            StoreUnavailable: the database can't be reached; the start may have been recorded.
            StoreError: the database refuses it, for want of a right on the table for example; nothing was recorded.
        """
        ...

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended, well or badly: all but `left` recorded starts of this message are forgotten, at once.

        With `left` the start that was noted last is taken back, since its handler did not run after all, or not alone.
        Call it outside of any unit of work. Repeating it is harmless, and so is an end without a start; it never adds any.

        Raises:
            TransientStoreError: it lost against others, time and again; the starts are still recorded.
            StoreUnavailable: the database can't be reached; the starts may still be recorded.
            StoreError: the database refuses it; the starts are still recorded.
        """
        ...

    def relay_alive(self) -> bool:
        """Whether some relay that ships to this store's broker showed life recently.

        Only then may a pending output be left to it.
        """
        ...

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """The moment before which claims of this consumer may be purged: the window counts consuming time only.

        Where `claims` names what it is asked for, also the moment before which claims like those were purged already:
        a window that was lengthened since does not bring them back.

        Raises:
            TransientStoreError: it was read too long ago (`HORIZON_SLACK`).
        """
        ...


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """An output without a confirm, leased to a relay; or an effect that was not done yet, leased to a runner.

    Attributes:
        output: what to send.
        attempts: how often it was sent, or may have been, this time included.
        refusals: how often a relay was refused it for its own sake, up to a bound of the store's own (10,000 or more).
    """

    output: Output
    attempts: int
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class PendingState:
    """What waits for a confirm in one database. Counts and ages have an upper bound of effort: beyond it they are too low.

    Attributes:
        count: outputs without a confirm, quarantined ones included.
        quarantined: those that no relay sends any more.
        oldest_seconds: age of the oldest that is not quarantined, since its claim; 0 if there is none.

    Example:
        >>> PendingState().count
        0
    """

    count: int = 0
    quarantined: int = 0
    oldest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies, or identified, messages of one type.

    Attributes:
        message_type: canonical type name.
        descriptor: the key's name, or `"off"` for a type that is not opted in.
        consumer: the consumer that it belongs to, `None` for the one being asked about.
        aliases: further names of the type; a stored identity under one of them was renamed.
        scoped_by_type: whether ids count within the type (keys of the body) or within the consumer (the envelope's):
            a rename is harmless to the latter.
        entity: what its messages are about, as the key is named; `None` where that is not said. For stores that keep a claim
            with its entity; others need not know it.

    Example:
        >>> Identity("orders.Place", "field:order_id", aliases=("orders.PlaceOrder",)).consumer is None
        True
    """

    message_type: str
    descriptor: str
    consumer: str | None = None
    aliases: tuple[str, ...] = ()
    scoped_by_type: bool = True
    entity: str | None = None


class Upkeep(Protocol):
    """What relay, cleaner and worker ask of a store beside the protocol. Each call is one short transaction or two."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease up to `limit` messages whose time has come; no other relay gets them until the lease is over. Never effects.

        Where stores of several brokers share a database: messages of this store's broker alone.
        """
        ...

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """`take_pending` for the effects of one consumer, which its own processes know how to run.

        They are due from their COMMIT on, whatever `relay_after` said. They are settled and quarantined as messages are.
        """
        ...

    def return_effects(self, effects: Mapping[UUID, str], retry_in: timedelta) -> None:
        """Give leased effects back that were not run, for the reason given: due after `retry_in`, no attempt counted."""
        ...

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Record what a relay achieved: confirmed ones are done, failed ones wait `retry_in`, with their reason.

        `refused` says that the failures are about the outputs themselves: they count as refusals, others do not.
        """
        ...

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Take outputs out of the relay's rounds, visible with their reason until somebody resends them."""
        ...

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Give quarantined outputs back at once, counted anew: tried once, an effect refused once, too; how many."""
        ...

    def pending_count(self) -> int:
        """How many outputs wait for a confirm, quarantined ones included."""
        ...

    def pending_state(self) -> PendingState:
        """How much waits, and how long already, for metrics: one query of bounded cost."""
        ...

    def wait_for_pending(self, timeout: float) -> bool:
        """Block until some unit of work may have left outputs to the relay, or `timeout` seconds passed (`False`)."""
        ...

    def announce_pending(self) -> None:
        """Wake the relays on this database, where it has a way to."""
        ...

    def wait_for_effects(self, timeout: float) -> bool:
        """`wait_for_pending` for effects: neither wakes whoever waits for the other."""
        ...

    def announce_effects(self) -> None:
        """Wake who runs effects on this database, where it has a way to."""
        ...

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """Delete up to `limit` expired claims with their outputs, never one with pending outputs; rows deleted.

        `retention` maps message types to windows; types that it doesn't name (renamed or gone) are kept for `others`,
        or for ever. A store that keeps claims in tables of a day drops such a table whole, whatever the limit, when all
        that is in it is past the longest of these windows. Answers 0 at once when another cleaner works on this database.
        Starts without an end (`Store.note_start`) go, too, up to `limit` of them and not counted here, once they are older
        than the longest of these windows and than `STARTS_KEPT`.
        """
        ...

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far the oldest claim that `purge` could delete is past its window; zero if there is none."""
        ...

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """Show life: this worker runs, is (or is not) a relay, and these consumers consume.

        Name former consumers that a `previous=` covers, too: their windows run on with it. The queues on which these
        consumers agreed by this object (`agree_identities`) are in use, too.
        """
        ...

    def retire(self, worker: str) -> None:
        """Take a worker's heartbeat back at a clean end."""
        ...

    def relay_alive(self) -> bool:
        """Whether some relay that ships to this store's broker showed life recently."""
        ...

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The moment before which claims of this consumer may be purged: the window counts consuming time only."""
        ...

    def agree_broker(self, identity: str) -> None:
        """Note which broker has the name of the one that this store's outputs go to, unless it is noted already.

        `identity` tells brokers apart and stays the same when a broker moves to another host (`Broker.identity`).

        Raises:
            BrokerChanged: another broker has the name.
        """
        ...

    def agree_identities(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Compare with the identities stored for this consumer and this queue, then store the current ones.

        A consumer may have several queues. It has left one when it has consumed for a window in which no worker that
        started there showed life.

        `covered` maps a current type's name to the identities that its `previous=` names, in full: former consumer
        (`None` where it is the same), former type name, former descriptor.

        Raises:
            IdentityChanged: one changed inside the window and is not covered.
        """
        ...


class InboxStore(Store, Protocol):
    """A store as a running service needs it: with upkeep, and with checks at start."""

    @property
    def upkeep(self) -> Upkeep:
        """The other half."""
        ...

    @property
    def worker(self) -> str:
        """This process's name in the inbox."""
        ...

    @property
    def per_entity(self) -> bool:
        """Whether a unit of work of this store reads and writes what it keeps of one entity, and nothing else."""
        ...

    def verify(self) -> None:
        """See that the store is as the promises need it.

        Raises:
            SchemaError: it is not; the error names the command that mends it.
            GuaranteeError: it can't keep the promises as it is set up.
            StoreUnavailable: it can't be reached.
        """
        ...

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:
        """Whatever a first delivery would otherwise have to do."""
        ...

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Bring what `late_before` answers up to date; called once in a while, off the hot path."""
        ...

    def close(self) -> None:
        """End what the store itself keeps open."""
        ...

    def announce_pending(self) -> None:
        """Wake the relays: a unit of work left its outputs to them. Never raises: they look by themselves, too."""
        ...

    def announce_effects(self) -> None:
        """Wake who runs effects: a unit of work stored some. Never raises: they look by themselves, too."""
        ...
