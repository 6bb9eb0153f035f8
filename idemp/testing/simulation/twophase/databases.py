"""Databases that prepare transactions, and decisions beside an inbox, in memory: the state of both can be compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from idemp.errors import BranchUnavailable, TransientStoreError
from idemp.inbox.memory import InMemoryStore
from idemp.twophase import BranchId, Decision, Ended, InDoubt, Prepared

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from uuid import UUID

    from idemp.inbox.port import UnitOfWork

_DECISION: Final = "idemp_decision"
_ONLY: Final = 1


@dataclass(slots=True)
class _Transaction:
    number: int
    changes: Counter[str] = field(default_factory=Counter)
    locks: set[str] = field(default_factory=set)
    connected: bool = True
    prepared: bool = False


class InMemoryDatabase:
    """The port `Database` in memory, as PostgreSQL does it: what is prepared belongs to no connection.

    What handlers write there are rows, which they insert, any number alike; or update, which keeps others off to the end.

    Args:
        name: in the app.

    Attributes:
        rows: what is committed, and how often.
        in_hands: what is prepared can't be ended by others while its connection lives.

    Example:
        >>> from uuid import UUID
        >>> ledger = InMemoryDatabase("ledger")
        >>> branch = ledger.begin(BranchId(bytes(8), 1, UUID(int=1), bytes(8), 0))
        >>> branch.session.insert("sale")
        >>> branch.prepare()
        >>> ledger.rows["sale"], branch.commit(), ledger.rows["sale"]
        (0, <Ended.DONE: 'done'>, 1)
    """

    in_hands: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: Counter[str] = Counter()
        self._transactions: dict[str, _Transaction] = {}
        self._outcomes: dict[int, bool] = {}

    @property
    def place(self) -> str:
        """Its name."""
        return f"memory:{self.name}"

    def begin(self, id: BranchId) -> InMemoryBranch:
        """As the port says."""
        self._transactions[id.text] = _Transaction(int.from_bytes(id.token))
        return InMemoryBranch(self, id)

    def in_doubt(self) -> Sequence[InDoubt]:
        """As the port says."""
        found = (BranchId.parse(name) for name in self.prepared)
        return [InDoubt(branch) for branch in found if branch is not None]

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """As the port says."""
        found = self._transactions.get(id.text)
        if found is None or not found.prepared:
            return Ended.GONE
        if self.in_hands and found.connected:
            return Ended.BUSY
        return self.end_own(id, commit=commit)

    def outcome(self, prepared: Prepared) -> bool | None:
        """As the port says."""
        return None if prepared.transaction is None else self._outcomes.get(prepared.transaction)

    def verify(self) -> None:
        """It can do all that."""

    def close(self) -> None:
        """Nothing was opened."""

    # For its branches and for tests

    @property
    def prepared(self) -> list[str]:
        """The names of all that is prepared, of whomever."""
        return [name for name, each in self._transactions.items() if each.prepared]

    def forget(self, token: bytes) -> None:
        """What became of an attempt of which nobody knows any more: its token is to be another's."""
        self._outcomes.pop(int.from_bytes(token), None)

    def plant(self, name: str) -> None:
        """Somebody else prepares a transaction."""
        self._transactions[name] = _Transaction(0, connected=False, prepared=True)

    def of(self, id: BranchId) -> _Transaction:
        """A branch that is not over.

        Raises:
            BranchUnavailable: it is.
        """
        found = self._transactions.get(id.text)
        if found is None or found.prepared:
            raise BranchUnavailable(f"The connection to {self.name!r} was lost.")
        return found

    def is_locked(self, row: str, id: BranchId) -> bool:
        """Whether somebody else has updated it."""
        return any(row in each.locks for name, each in self._transactions.items() if name != id.text)

    def is_connected(self, id: BranchId) -> bool:
        """Whether the server still has the connection of a branch that is not over."""
        return id.text in self._transactions and self._transactions[id.text].connected

    def minds(self, id: BranchId) -> bool:
        """Whether it makes a difference to others that a connection has ended."""
        found = self._transactions[id.text]
        return self.in_hands if found.prepared else bool(found.locks)

    def disconnect(self, id: BranchId) -> None:
        """The server sees that the connection is gone: what is not prepared is rolled back."""
        found = self._transactions.get(id.text)
        if found is not None:
            found.connected = False
            if not found.prepared:
                self.end_own(id, commit=False)

    def end_own(self, id: BranchId, *, commit: bool) -> Ended:
        """End a branch on its own connection; one that is not prepared can't be committed, and is rolled back."""
        found = self._transactions.pop(id.text, None)
        if found is None:
            return Ended.GONE
        commits = commit and found.prepared
        if commits:
            self.rows.update(found.changes)
        if not self.in_hands:
            self._outcomes[found.number] = commits
        return Ended.DONE if commits is commit else Ended.GONE

    def picture(self, tokens: Collection[bytes]) -> Hashable:
        """All that its later answers depend on, as long as nobody asks about tokens but these."""
        numbers = {int.from_bytes(token) for token in tokens}
        return (
            frozenset(self.rows.items()),
            frozenset(
                (name, frozenset(each.changes), bool(each.locks), each.connected, each.prepared)
                for name, each in self._transactions.items()
            ),
            frozenset(item for item in self._outcomes.items() if item[0] in numbers),
        )

    def tokens(self) -> set[bytes]:
        """Those of all branches that are not over."""
        found = (BranchId.parse(name) for name in self._transactions)
        return {branch.token for branch in found if branch is not None}


class InMemoryXA(InMemoryDatabase):
    """As MariaDB does it: what is prepared is in its connection's hands, and nobody tells later what became of it.

    Example:
        >>> from uuid import UUID
        >>> books = InMemoryXA("books")
        >>> branch = books.begin(id := BranchId(bytes(8), 1, UUID(int=1), bytes(8), 0))
        >>> branch.prepare()
        >>> books.end(id, commit=False)
        <Ended.BUSY: 'busy'>
    """

    in_hands = True


class InMemoryBranch:
    """A transaction in an `InMemoryDatabase`, whose `session` writes rows. Made by its `begin`.

    Attributes:
        id: its name.
        is_over: it has ended on its own connection.
    """

    broken = None

    def __init__(self, database: InMemoryDatabase, id: BranchId) -> None:
        self.id = id
        self.is_over = False
        self._database = database
        self._connected = True
        self.session = self.connection = self

    def insert(self, row: str) -> None:
        """Write one more of these.

        Raises:
            BranchUnavailable: the connection is lost.
        """
        self._database.of(self.id).changes[row] += 1

    def update(self, row: str) -> None:
        """Write it, and keep others off.

        Raises:
            TransientStoreError: somebody else has it.
            BranchUnavailable: the connection is lost.
        """
        if self._database.is_locked(row, self.id):
            raise TransientStoreError(f"{row} is locked in {self._database.name!r}.")
        self.insert(row)
        self._database.of(self.id).locks.add(row)

    @property
    def prepared(self) -> Prepared:
        """As the port says."""
        number = None if self._database.in_hands else int.from_bytes(self.id.token)
        return Prepared(self._database.name, self._database.place, number)

    def usable(self) -> bool:
        """As the port says."""
        return self._connected

    def flush(self) -> None:
        """Nothing is held back."""

    def prepare(self) -> None:
        """As the port says."""
        self._database.of(self.id).prepared = True

    def commit(self) -> Ended:
        """On its own connection; where that is gone, on another one."""
        if self.is_over or not self.usable():
            return self._database.end(self.id, commit=True)
        self.is_over = True
        return self._database.end_own(self.id, commit=True)

    def rollback(self) -> None:
        """As the port says."""
        if not self.is_over and self.usable():
            self.is_over = True
            self._database.end_own(self.id, commit=False)

    def lose(self) -> None:
        """The client's end of the connection is gone; the server sees it when `leave` is called."""
        self._connected = False

    def leave(self) -> None:
        """As the port says."""
        if not self.is_over:
            self._connected = False
            self._database.disconnect(self.id)


class DecidingStore(InMemoryStore):
    """An `InMemoryStore` with decisions among its data: their claims are not purged before all branches have ended.

    Example:
        >>> list(DecidingStore().decisions())
        []
    """

    def decisions(self) -> Iterator[Decision]:
        """All that are committed."""
        return (each for key, each in self.content.data.items() if key[0] == _DECISION)

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """As the port says."""
        unfinished = {decision.key for decision in self.decisions()}
        with self.changing() as content:
            kept = {key: each for key, each in content.handlings.items() if key[1] in unfinished}
            for key in kept:
                del content.handlings[key]
            gone = super().purge(consumer, retention, limit, others=others)
            content.handlings.update(kept)
        return gone


class InMemoryDecisions:
    """The port `Decisions` beside a `DecidingStore` with one consumer.

    Args:
        store: the inbox.
        consumer: the one.

    Example:
        >>> decisions = InMemoryDecisions(DecidingStore(), "shop")
        >>> decisions.consumer(decisions.number("shop")), decisions.unfinished()
        ('shop', [])
    """

    place = "memory:inbox"

    def __init__(self, store: DecidingStore, consumer: str) -> None:
        self._store = store
        self._consumer = consumer

    def inbox(self) -> bytes:
        """As the port says; always the same, since nothing here is left to chance."""
        return b"this one"

    def number(self, consumer: str) -> int:
        """As the port says."""
        assert consumer == self._consumer  # noqa: S101 - there is no other
        return _ONLY

    def consumer(self, number: int) -> str:
        """As the port says."""
        return {_ONLY: self._consumer}[number]

    def note(self, unit: UnitOfWork, consumer: int, key: UUID, token: bytes, branches: Sequence[Prepared]) -> Decision:
        """As the port says."""
        decision = Decision(consumer, key, token, tuple(branches), self._store.clock.now())
        unit.session[_DECISION, consumer, key] = decision
        return decision

    def noted(self, consumer: int, key: UUID, unit: UnitOfWork | None = None) -> Decision | None:
        """As the port says."""
        data = self._store.content.data if unit is None else unit.session
        found: Decision | None = data.get((_DECISION, consumer, key))
        return found

    def unfinished(self) -> Sequence[Decision]:
        """As the port says."""
        return sorted(self._store.decisions(), key=lambda decision: decision.decided_at)

    def finished(self, decision: Decision) -> None:
        """As the port says."""
        if self.noted(decision.consumer, decision.key) == decision:
            with self._store.changing() as content:
                del content.data[_DECISION, decision.consumer, decision.key]
