"""What handlings in several databases are made of: names of branches, the databases, and where decisions are kept.

Two-phase commit with the inbox as coordinator: its own transaction is never prepared, and its COMMIT *is* the decision. A
branch is the part of a handling in one other database.
"""

from __future__ import annotations

import base64
import enum
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from idemp.errors import HandlerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from idemp.inbox.port import UnitOfWork

INBOX_BYTES: Final = 8
TOKEN_BYTES: Final = 8
_LAYOUT: Final = struct.Struct(f">{INBOX_BYTES}sI16s{TOKEN_BYTES}s")
_TEXT: Final = re.compile(r"idemp1\.([A-Za-z0-9_-]{48})\.([0-9]|[1-9][0-9])")


@dataclass(frozen=True, slots=True)
class BranchId:
    """The name of a branch, under which a server keeps it as a prepared transaction: at most 64 bytes, for XA.

    Attributes:
        inbox: which inbox is the coordinator; a server may keep branches of several.
        consumer: the consumer's number in that inbox.
        key: what the handling claims.
        token: of one attempt: an earlier attempt's branch is not committed because a later one was.
        number: of the branch in its handling, which may have several on one server.

    Example:
        >>> id = BranchId(b"12345678", 7, UUID(int=1), b"abcdefgh", 0)
        >>> id.text, BranchId.parse(id.text) == id
        ('idemp1.MTIzNDU2NzgAAAAHAAAAAAAAAAAAAAAAAAAAAWFiY2RlZmdo.0', True)
        >>> BranchId.parse("idemp1.somebody-else's") is None
        True
    """

    inbox: bytes
    consumer: int
    key: UUID
    token: bytes
    number: int

    @property
    def text(self) -> str:
        """As the server knows it: letters, digits, dots, dashes and underscores."""
        packed = _LAYOUT.pack(self.inbox, self.consumer, self.key.bytes, self.token)
        return f"idemp1.{base64.urlsafe_b64encode(packed).decode()}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> BranchId | None:
        """What a name says; `None` if it is nobody's of ours."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        inbox, consumer, key, token = _LAYOUT.unpack(base64.urlsafe_b64decode(found.group(1)))
        return cls(inbox, consumer, UUID(bytes=key), token, int(found.group(2)))


class Ended(enum.Enum):
    """What an attempt to end a prepared branch came to.

    Example:
        >>> Ended.BUSY.name
        'BUSY'
    """

    DONE = "done"  #: it was ended by this
    GONE = "gone"  #: there is none of this name: somebody else has ended it
    BUSY = "busy"  #: it is there, and in somebody's hands: a connection that lives, or who ends it right now


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A prepared branch, as its server lists it.

    Attributes:
        id: its name.
        since: when it was prepared; `None` where the server does not say.
    """

    id: BranchId
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A branch of a decision.

    Attributes:
        database: its name in the app.
        place: the database itself, without user and password: the name may come to mean another one.
        transaction: what its server calls the transaction, where that tells later what became of it.
    """

    database: str
    place: str
    transaction: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempt of a handling that was committed, while its branches are not known to be.

    Attributes:
        consumer: the consumer's number.
        key: what was claimed.
        token: of the attempt.
        branches: by their numbers.
        decided_at: when.
    """

    consumer: int
    key: UUID
    token: bytes
    branches: tuple[Prepared, ...]
    decided_at: datetime


class Transaction(Protocol):
    """What a handler sees of another database: a transaction that ends with the claim's, never by itself."""

    @property
    def session(self) -> Any:
        """An ORM session; commit and rollback are refused."""
        ...

    @property
    def connection(self) -> Any:
        """The connection below `session`; commit, rollback and autocommit are refused."""
        ...


class Databases(Protocol):
    """The other databases of one handling, as its context asks for them."""

    def open(self, name: str) -> Transaction:
        """The transaction in one of them; it begins with the first call."""
        ...


class Branch(Transaction, Protocol):
    """A branch that is being worked on. Used by one thread; it ends by `commit`, `rollback` or `leave`."""

    @property
    def prepared(self) -> Prepared:
        """How a decision knows it."""
        ...

    @property
    def broken(self) -> Exception | None:
        """Why it must not be committed, if the handler did what forbids it."""
        ...

    def usable(self) -> bool:
        """Whether its connection is still there."""
        ...

    def flush(self) -> None:
        """Send what the session still holds, so that its failures count as the handler's."""
        ...

    def prepare(self) -> None:
        """Prove that this is still the transaction that it was at the beginning, and prepare it.

        Raises:
            HandlerError: the handler ended it, went on after an error, or used what can't be prepared.
            TransientStoreError: it was rolled back, and may be tried again.
            BranchUnavailable: the database is away, or prepares no more.
            Exception: the database's own, about what the handler wrote.
        """
        ...

    def commit(self) -> Ended:
        """Commit it, prepared.

        Raises:
            StoreError: the database could not do it; the branch stays prepared.
        """
        ...

    def rollback(self) -> None:
        """Roll it back, prepared or not; never raises: what a lost connection leaves, recovery ends."""
        ...

    def leave(self) -> None:
        """Let go of it as it is; a connection that is not as it was never goes back to its pool."""
        ...


class Database(Protocol):
    """Another database, which can prepare transactions. Safe to share between threads."""

    @property
    def name(self) -> str:
        """Its name in the app."""
        ...

    @property
    def place(self) -> str:
        """Which database it is, without user and password."""
        ...

    def begin(self, id: BranchId) -> Branch:
        """Begin a branch.

        Raises:
            BranchUnavailable: the database can't be reached.
        """
        ...

    def in_doubt(self) -> Sequence[InDoubt]:
        """All prepared branches that it lists, of whatever inbox; never anything that is no branch of ours.

        Raises:
            StoreError: the database could not say.
        """
        ...

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """End a prepared branch, whoever prepared it.

        Raises:
            StoreError: the database could not do it; the branch stays prepared.
        """
        ...

    def outcome(self, prepared: Prepared) -> bool | None:
        """Whether a branch that is gone was committed; `None` where its server does not say."""
        ...

    def verify(self) -> None:
        """See that it can do all this.

        Raises:
            ConfigurationError: it is of a kind that can't, or is not set up for it.
            StoreError: it can't be reached.
        """
        ...

    def close(self) -> None:
        """End connections that it opened itself."""
        ...


class Decisions(Protocol):
    """Where the coordinator keeps what it decided: the inbox's own database. Safe to share between threads."""

    @property
    def place(self) -> str:
        """Which database it is, without user and password."""
        ...

    def inbox(self) -> bytes:
        """Which inbox this is; random, kept with it."""
        ...

    def number(self, consumer: str) -> int:
        """A consumer's number."""
        ...

    def consumer(self, number: int) -> str:
        """The consumer of a number.

        Raises:
            KeyError: there is none.
        """
        ...

    def note(self, unit: UnitOfWork, consumer: int, key: UUID, token: bytes, branches: Sequence[Prepared]) -> Decision:
        """In the claim's own transaction: if it commits, this attempt was the one."""
        ...

    def noted(self, consumer: int, key: UUID, unit: UnitOfWork | None = None) -> Decision | None:
        """The decision about a key; `None` without branches, or once all have ended. Asked in `unit`, if there is one."""
        ...

    def unfinished(self) -> Sequence[Decision]:
        """All whose branches are not known to have ended, the oldest first."""
        ...

    def finished(self, decision: Decision) -> None:
        """All of its branches have ended: forget it."""
        ...


def in_order(branches: Mapping[str, Branch]) -> tuple[Prepared, ...]:
    """Branches as a decision keeps them: by the number in their names, which is their place here."""
    return tuple(branch.prepared for branch in branches.values())


def not_two_phase(name: str) -> HandlerError:
    """A handler asks for a database that its type's policy does not name."""
    return HandlerError(
        f"The handler asks for the database {name!r}, which its type's policy does not name.",
        fix=f'Say it in the policy, as in TwoPhase("{name}", key=…), and register it: App(…, databases={{"{name}": …}}).',
    )
