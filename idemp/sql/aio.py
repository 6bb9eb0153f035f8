"""The store of `async def` handlers: the other store, on an asynchronous driver.

SQLAlchemy runs synchronous code above an asynchronous driver in a greenlet, which gives way to the event loop wherever the driver
waits. So the protocol of a delivery is run as a whole, and the handler is awaited in the task that runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self, TypeVar

from sqlalchemy import AdaptedConnection, Connection, Pool, QueuePool, event, exc, text

from idemp.errors import ConfigurationError, HandlerError, needs
from idemp.sql.engine import Database
from idemp.sql.guard import HandlerSession, Unit
from idemp.sql.store import SqlStore

with needs("asyncio"):
    import_module("greenlet")  # SQLAlchemy's own error has many lines
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

__all__ = ["AsyncCaller", "AsyncSqlStore", "AsyncUnit", "run_on"]

T = TypeVar("T")


class AsyncUnit(Unit):
    """A transaction of an `async def` handler."""

    __slots__ = ("_async_connection", "_async_session", "_engine")

    def __init__(self, database: Database, engine: AsyncEngine) -> None:
        super().__init__(database)
        self._engine = engine
        self._async_connection: AsyncConnection | None = None
        self._async_session: AsyncSession | None = None

    def commit(self, *arguments: Any, lazy: bool) -> None:
        """Commit; and look whether that was a commit.

        asyncpg takes a transaction on a connection that others have left in one for a savepoint, and its end is no COMMIT.

        Raises:
            PendingRollbackError: It was none, and the connection cannot be used.
        """
        super().commit(*arguments, lazy=lazy)
        if self._database.dialect.is_open(self.connection):
            self._spoiled = True
            raise exc.PendingRollbackError("the connection was in a transaction of others", code="8s2b")

    @property
    def async_connection(self) -> AsyncConnection:
        """The connection, as an `async def` handler uses it."""
        if self._async_connection is None:
            self._async_connection = AsyncConnection(self._engine, self.connection)
        return self._async_connection

    @property
    def async_session(self) -> AsyncSession:
        """The session, as an `async def` handler uses it."""
        if self._async_session is None:
            mode: dict[str, Any] = {"join_transaction_mode": "rollback_only"}
            self._async_session = AsyncSession(self.async_connection, sync_session_class=HandlerSession, **mode)
            self.adopt(self._async_session.sync_session)  # type: ignore[arg-type]
        return self._async_session


class AsyncSqlStore(SqlStore):
    """Claims and outputs in transactions of `async def` handlers. All methods of a store are called by `run`.

    Args:
        engine: Connections belong to one event loop.
        database: Tables, by this very engine.
        worker: Name of this process, which is stored in its claims.

    Example:
        >>> async def count(store: AsyncSqlStore) -> int:
        ...     return len(await store.run(store.claim, tx, []))
    """

    def __init__(self, engine: AsyncEngine, database: Database, worker: str) -> None:
        super().__init__(database, worker)
        self.engine, self._checked = engine, False
        if engine.driver == "aiosqlite" and not event.contains(engine.sync_engine, "invalidate", _interrupt):
            event.listen(engine.sync_engine, "invalidate", _interrupt)
        self._door = AsyncSession(engine)

    @classmethod
    def beside(cls, store: SqlStore, engine: AsyncEngine) -> Self:
        """Return a store on the same tables, with the same names and the same worker."""
        own = cls(engine, store.database.on(engine.sync_engine), store.worker)
        own.head_start, own.lazy = store.head_start, store.lazy and own.database.fast_path is not None
        return own

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that calls methods of this store."""
        return await self._door.run_sync(lambda _: function(*arguments))

    def connect(self) -> AsyncUnit:
        return AsyncUnit(self.database, self.engine)

    def wait(self, tx: AsyncUnit, awaitable: Awaitable[T]) -> T:
        """Wait, in a function that is run, for what a handler does."""
        found = _wait(tx.connection, awaitable)
        if tx.connection.invalidated:
            raise HandlerError(
                "a statement of the handler was interrupted, or its connection lost, and it has caught the error: let it pass"
            )
        return found

    def pause(self, seconds: float) -> None:
        """Wait, in a function that is run, for some seconds."""
        with suppress(Exception), self.database.engine.connect() as connection:
            _wait(connection, asyncio.sleep(seconds))

    def check(self) -> None:
        """Refuse what would fail later: drivers that do not fit, and statements with names behind a pooler."""
        if self._checked:
            return
        if self.engine.driver == "aiomysql" and not callable(import_module("aiomysql.connection").escape_bytes_prefixed):
            raise ConfigurationError("this PyMySQL is too new for aiomysql: pip install 'idemp[aiomysql]'")
        engine, pids = self.engine.sync_engine, []
        with engine.connect() as connection:
            findings = self.database.dialect.check(connection, self.database.tables)
        if red := [str(finding) for finding in findings if finding.level == "red"]:
            raise ConfigurationError("; ".join(red))
        if self.engine.driver == "asyncpg" and _most(self.engine.pool) != 1:
            with engine.connect() as one, engine.connect() as other:
                for connection in (one, other):
                    pids.append(connection.scalar(text("SELECT pg_backend_pid()")))
                    connection.rollback()
        if len(set(pids)) < len(pids):
            raise ConfigurationError(
                "there is a pooler in transaction mode, in which asyncpg's named statements fail: use postgresql+psycopg, "
                "or connect to the server itself"
            )
        self._checked = True

    async def close(self) -> None:
        """Close pooled connections."""
        await self.run(self.database.close)

    def limit(self, concurrency: int) -> int:
        """Return how many handlers can run at once: on SQLite one, because it has the only write lock."""
        if self.engine.dialect.name == "sqlite":
            return 1
        needed, most = concurrency + 2, _most(self.engine.pool)
        if most is not None and most < needed:
            raise ConfigurationError(
                f"the pool of the engine has {most} connections at most, and {concurrency} handlers at once need {needed}: create "
                f"it with pool_size={needed}, or set IDEMP_CONCURRENCY={max(1, most - 2)}"
            )
        return concurrency


@dataclass(frozen=True)
class AsyncCaller:
    """A transaction of the caller's.

    Example:
        >>> AsyncCaller.__name__
        'AsyncCaller'
    """

    async_session: AsyncSession

    @property
    def async_connection(self) -> AsyncConnection:
        """The connection of the session."""
        connection = self.async_session.sync_session.connection()
        return AsyncConnection(AsyncEngine(connection.engine), connection)


async def run_on(engine: AsyncEngine, function: Callable[..., T], *arguments: Any) -> T:
    """Run a plain function that uses `engine.sync_engine`, and give way to the event loop wherever it waits for the database.

    Example:
        >>> async def name(engine: AsyncEngine) -> str:
        ...     return await run_on(engine, lambda: engine.sync_engine.connect().scalar(text("SELECT current_user")))
    """
    return await AsyncSession(engine).run_sync(lambda _: function(*arguments))


def _wait(connection: Connection, awaitable: Awaitable[T]) -> T:
    adapted = connection.connection.dbapi_connection
    assert isinstance(adapted, AdaptedConnection)
    found: T = adapted.run_async(lambda _: awaitable)
    return found


def _interrupt(adapted: Any, *_: object) -> None:
    """End what a connection of SQLite was doing when its task was cancelled; else it keeps the write lock when it is closed."""
    with suppress(Exception):
        adapted.run_async(lambda driver: driver.interrupt())
        adapted.rollback()


def _most(pool: Pool) -> int | None:
    """Return how many connections a pool gives out; None if that is not limited."""
    if not isinstance(pool, QueuePool):
        return None
    overflow: int = pool._max_overflow  # noqa: SLF001 - has no public name
    return None if overflow < 0 or pool.size() == 0 else pool.size() + overflow
