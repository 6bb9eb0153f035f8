"""Differences between databases: a seam of few methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine, Insert, Select, Table, exc

from idemp.errors import ConfigurationError
from idemp.ports import Finding, Kind
from idemp.sql.tables import Tables

__all__ = ["CLAIM_SECONDS", "Claims", "Dialect", "Ended", "FastPath", "Times", "autocommit_refused", "no_right"]

CLAIM_SECONDS: Final = 2.0
"""Seconds for which a claim waits for another transaction with its id."""
Times = dict[tuple[int, UUID], int]
"""When claims were stored, in microseconds since 1970, by consumer and key: drivers and settings round fractions."""
Claims = tuple[Times, bool]
"""Claims that are new, and whether claims were purged that may be as old as these messages."""


class Ended(exc.SQLAlchemyError):
    """The mark is gone: the transaction was committed or rolled back below SQLAlchemy.

    Example:
        >>> issubclass(Ended, exc.SQLAlchemyError)
        True
    """


class FastPath(Protocol):
    """The statements of a unit of work in two messages to the server."""

    def claim(self, connection: Connection, mark: str, worker: str, rows: Sequence[Mapping[str, Any]]) -> Claims | None:
        """Begin, insert claims and mark; None if this has to be done in the other way."""

    def stored(self, connection: Connection, row: Mapping[str, Any], *, last: bool) -> Sequence[Any]:
        """Return what a claim and its outputs have stored; roll back in the same message if that is the last one."""

    def too_long(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an output is too long for a message."""

    def finish(self, connection: Connection, mark: str, rows: Sequence[Mapping[str, Any]], *, lazy: bool) -> None:
        """Prove the transaction, store outputs, commit.

        Raises:
            Ended: The transaction is another one; nothing was stored.
        """

    def read_back(self, connection: Connection, keys: Mapping[int, Sequence[UUID]]) -> Times:
        """Return the claims that stand under keys of consumers, in a transaction of its own that waits for the disk."""

    def confirm(self, connection: Connection, ids: Sequence[str]) -> None:
        """Forget outputs that the broker has confirmed, in a transaction of its own."""


class Dialect(ABC):
    """One kind of database."""

    now: ColumnElement[float]
    """Seconds since 1970 by the clock of the database."""
    key: Callable[[UUID], Any]
    """A message key as the driver takes it."""
    insert: Callable[[Table], Any]
    """SQLAlchemy's INSERT of this dialect."""
    refused_words: frozenset[str]
    """First words of statements that end a transaction, or take its mark away."""
    session_words: frozenset[str]
    """First words of statements whose effect outlives a transaction: the connection is closed after the unit."""
    deletes_in_queries = False
    """Whether a WITH query may delete, and say what."""
    unmarked: str = "a rollback"
    """What takes the mark from a transaction, and its claims with it."""
    local_words: frozenset[str] = frozenset()
    """Words after SET whose effect ends with the transaction."""
    shows_early = False
    """Whether others may see a COMMIT before it is on disk."""

    def begin(self, connection: Connection) -> None:
        """Start a transaction that takes write locks in turn; called by SQLAlchemy's `begin` event."""
        if self.autocommits(connection):
            raise autocommit_refused()

    @abstractmethod
    def autocommits(self, connection: Connection) -> bool:
        """Return whether the driver commits each statement."""

    def queue_engine(self, engine: Engine) -> Engine:
        """Return the engine of queues, retries and workers."""
        return engine

    def insert_new(self, table: Table, key: Sequence[str]) -> Insert:
        """Return an INSERT that does nothing where the key exists."""
        made: Insert = self.insert(table).on_conflict_do_nothing(index_elements=key)
        return made

    def upsert(self, table: Table, key: Sequence[str], values: dict[str, Any], where: Any = None) -> Insert:
        """Return an INSERT that updates the row of the key; None means the value of the new row."""
        new = self.insert(table)
        changes = {name: new.excluded[name] if value is None else value for name, value in values.items()}
        made: Insert = new.on_conflict_do_update(index_elements=key, set_=changes, where=where)
        return made

    def lock(self, rows: Select[Any]) -> Select[Any]:
        """Lock the rows of a query that others skip."""
        return rows.with_for_update(skip_locked=True)

    def newest(self, rows: Select[Any]) -> Select[Any]:
        """Read rows that were committed after the snapshot of the transaction, too."""
        return rows

    def schema(self, engine: Engine, table: str) -> str | None:  # noqa: ARG002
        """Return the schema of the tables, which each statement names: a handler may change the search path."""
        return None

    def fast_path(self, engine: Engine, tables: Tables) -> FastPath | None:  # noqa: ARG002
        """Return the way in two messages; None if there is none."""
        return None

    def alone(self, connection: Connection, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Let no other process be in a block of this name, in a transaction of idemp's own that ends after it."""
        return nullcontext()

    @abstractmethod
    def mark(self, connection: Connection, name: str, inbox: Table) -> None:
        """Mark a transaction, so that `prove` can distinguish it from a later one; limit how long claims wait for others."""

    @abstractmethod
    def mark_within(self, connection: Connection, name: str) -> None:
        """Mark the transaction of a caller's; marks may be nested."""

    def prove_within(self, connection: Connection, name: str) -> bool:
        """Return whether the transaction is the one that `mark_within` marked last; take the mark away."""
        return self.prove(connection, name)

    def claim_statement(self, inbox: Table) -> Insert:
        """Return the INSERT of a claim."""
        return self.insert_new(inbox, ["consumer_id", "message_key"]).returning(inbox.c.type_id)

    def claim(self, connection: Connection, statement: Insert, row: Mapping[str, Any], wait: float = CLAIM_SECONDS) -> bool:  # noqa: ARG002
        """Insert a claim; return whether it is new. It waits for another one where each statement says so; else see `limited`."""
        return connection.execute(statement, row).first() is not None

    def claimed(self, connection: Connection) -> None:  # noqa: B027
        """Give back the limit that was there before `mark`."""

    def limited(self, connection: Connection, inbox: Table, wait: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Limit how long claims wait in a transaction of a caller's, and give back the limit that was there."""
        return nullcontext()

    def handler_limited(self, connection: Connection, seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Limit how long a statement of a handler may take, and its transaction may be idle; a shorter limit stays as it is."""
        return nullcontext()

    def impatient(self, connection: Connection) -> AbstractContextManager[None]:  # noqa: ARG002
        """Limit how long statements wait for locks, in a transaction of idemp's own."""
        return nullcontext()

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:  # noqa: ARG002
        """Return whether a claim failed because another transaction holds its id."""
        return False

    def let_commit_wait(self, connection: Connection) -> None:  # noqa: B027
        """Let COMMIT wait for the disk, although the transaction may have written nothing; what it has read is on disk then."""

    @abstractmethod
    def prove(self, connection: Connection, name: str) -> bool:
        """Return whether the transaction is the one that was marked."""

    @abstractmethod
    def is_open(self, connection: Connection) -> bool:
        """Return whether the driver is in a transaction that takes statements; asks no server."""

    @abstractmethod
    def abandon(self, connection: Connection, *, committed: bool) -> None:
        """Roll the driver's connection back, in any state of SQLAlchemy's; `committed` if nothing ran after idemp's COMMIT."""

    def check_rights(self, connection: Connection, tables: Tables) -> list[Finding]:  # noqa: ARG002
        """Return the rights that the role of a worker does not have."""
        return []

    def check(self, connection: Connection, tables: Tables) -> list[Finding]:  # noqa: ARG002
        """Return what is wrong with the server, or with the connections of the engine."""
        return []

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error means; None if it is none of the database's."""
        if isinstance(error, exc.TimeoutError):  # the pool has no connection left
            return Kind.LOST
        driver: BaseException = (error.orig if isinstance(error, exc.DBAPIError) else None) or error
        if (kind := self.kind(driver, error)) is not None:
            return kind
        gone = isinstance(error, exc.PendingRollbackError) and error.code == "8s2b"
        return Kind.LOST if gone else Kind.OTHER if isinstance(error, exc.SQLAlchemyError) else None

    @abstractmethod
    def kind(self, driver: BaseException, error: BaseException) -> Kind | None:
        """Return what an error of the driver means, as SQLAlchemy raised it; None if it is none."""


def autocommit_refused() -> ConfigurationError:
    """Return the refusal of a connection that commits each statement: after a rollback, the next one would be without a claim.

    Example:
        >>> str(autocommit_refused()).partition(":")[0]
        'the engine commits each statement'
    """
    return ConfigurationError(
        "the engine commits each statement: create it without isolation_level='AUTOCOMMIT', and without connect_args, an execution "
        "option or a listener that sets autocommit or isolation_level of a connection; nothing was claimed"
    )


def no_right(role: str, missing: Mapping[str, Sequence[str]], grants: Sequence[str]) -> Finding:
    """Return the finding about missing rights.

    Args:
        role: Name of the database's user.
        missing: Rights that it does not have, by table.
        grants: Statements that give it all rights of a worker.

    Example:
        >>> str(no_right("shop", {"idemp_inbox": ["INSERT"]}, ["GRANT INSERT ON idemp_inbox TO shop;"]))
        'the role shop may not INSERT (idemp_inbox): GRANT INSERT ON idemp_inbox TO shop;'
    """
    tables: dict[str, list[str]] = {}
    for table, rights in missing.items():
        tables.setdefault("/".join(rights), []).append(table)
    said = ", ".join(f"{rights} ({_some(names)})" for rights, names in tables.items())
    return Finding("red", f"the role {role} may not {said}", "\n".join(grants))


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
