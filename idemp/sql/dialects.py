"""Differences between databases: a seam of few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine, Insert, Select, Table, exc

from idemp.errors import ConfigurationError
from idemp.ports import Kind
from idemp.sql.tables import Tables

__all__ = ["Claims", "Dialect", "Ended", "FastPath", "dialect_of"]

Claims = tuple[set[tuple[int, UUID]], bool]
"""Places of claims that are new, and whether claims were purged that may be as old as these messages."""


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

    def finish(self, connection: Connection, mark: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prove the transaction, store outputs, commit.

        Raises:
            Ended: The transaction is another one; nothing was stored.
        """

    def confirm(self, connection: Connection, ids: Sequence[str]) -> None:
        """Forget outputs that the broker has confirmed, in a transaction of its own."""


class Dialect(Protocol):
    """One kind of database."""

    now: ColumnElement[float]
    """Seconds since 1970 by the clock of the database."""
    key: Callable[[UUID], Any]
    """A message key as the driver takes it."""
    refused_words: frozenset[str]
    """First words of statements that end a transaction."""
    session_words: frozenset[str]
    """First words of statements whose effect outlives a transaction: the connection is closed after the unit."""

    def begin(self, connection: Connection) -> None:
        """Start a transaction that takes write locks in turn; called by SQLAlchemy's `begin` event."""

    def queue_engine(self, engine: Engine) -> Engine:
        """Return the engine of queues, retries and workers."""

    def insert_new(self, table: Table, key: Sequence[str]) -> Insert:
        """Return an INSERT that does nothing where the key exists, with the claim as its answer."""

    def upsert(self, table: Table, key: Sequence[str], values: dict[str, Any], where: Any = None) -> Insert:
        """Return an INSERT that updates the row of the key; columns of the new row are taken by `values`."""

    def lock(self, rows: Select[Any]) -> Select[Any]:
        """Lock the rows of a query that others skip."""

    def schema(self, engine: Engine, table: str) -> str | None:
        """Return the schema of the tables, which each statement names: a handler may change the search path."""

    def fast_path(self, engine: Engine, tables: Tables) -> FastPath | None:
        """Return the way in two messages; None if there is none."""

    def mark(self, connection: Connection, name: str, inbox: Table) -> None:
        """Mark a transaction, so that `prove` can distinguish it from a later one; limit how long claims wait for others."""

    def claimed(self, connection: Connection) -> None:
        """Take the limit for claims back."""

    def in_flight(self, error: exc.DBAPIError, inbox: Table) -> bool:
        """Return whether a claim failed because another transaction holds its id."""

    def prove(self, connection: Connection, name: str) -> bool:
        """Return whether the transaction is the one that was marked."""

    def is_open(self, connection: Connection) -> bool:
        """Return whether the driver is in a transaction that takes statements; asks no server."""

    def abandon(self, connection: Connection) -> None:
        """Roll the driver's connection back, in any state of SQLAlchemy's."""

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error means."""


def dialect_of(engine: Engine) -> Dialect:
    """Return the dialect of an engine.

    Raises:
        ConfigurationError: There is none for this database.

    Example:
        >>> from sqlalchemy import create_engine
        >>> type(dialect_of(create_engine("sqlite:///shop.db"))).__name__
        'SqliteDialect'
    """
    if engine.dialect.name == "sqlite" and engine.dialect.driver in ("pysqlite", "aiosqlite"):
        from idemp.sql.sqlite import SqliteDialect

        return SqliteDialect()
    if engine.dialect.name == "postgresql" and engine.dialect.driver in ("psycopg", "asyncpg"):
        from idemp.sql.postgresql import PostgresqlDialect

        return PostgresqlDialect()
    known = "use sqlite:///FILE or postgresql+psycopg://HOST/DATABASE"
    raise ConfigurationError(f"{engine.dialect.name}+{engine.dialect.driver} is no supported database: {known}")
