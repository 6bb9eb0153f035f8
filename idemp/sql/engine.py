"""The database of an installation: engines, tables and short transactions."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, AsyncAdaptedQueuePool, Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.util import memoized_property

from idemp.errors import ConfigurationError, NotInstalled, needs
from idemp.forks import forget_in_children, let_go
from idemp.sql.dialects import Dialect, FastPath
from idemp.sql.tables import DEFAULT_PREFIX, Tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from idemp.settings import Settings

__all__ = ["Database", "dialect_of", "engines", "open_engine", "refusal_of_url", "spelt", "worker_name"]

EXTRAS = {
    "mariadb": ("mysql", "aiomysql"),
    "mysql": ("mysql", "aiomysql"),
    "postgres": ("postgresql", "asyncio,postgresql"),
    "postgresql": ("postgresql", "asyncio,postgresql"),
    "sqlite": ("", "aiosqlite"),
}
"""Extras for plain and for `async def` handlers."""
ASYNCHRONOUS = {"sqlite": "sqlite+aiosqlite", "sqlite+pysqlite": "sqlite+aiosqlite"}
SYNCHRONOUS = {
    "mariadb+aiomysql": "mysql",
    "mysql+aiomysql": "mysql",
    "postgresql+asyncpg": "postgresql",
    "postgresql+psycopg_async": "postgresql",
    "sqlite+aiosqlite": "sqlite",
}


def worker_name() -> str:
    """Return a new name for this process: host, process id and chance.

    Example:
        >>> worker_name() == worker_name()
        False
    """
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


class Database:
    """Engines and tables of one installation. Connects at first use.

    Args:
        url: URL of the database, or an engine of the user's.
        prefix: Begins the name of each table.
        fast: Whether to claim, to finish and to confirm in one message each, where the database can.

    Attributes:
        engine: For the inbox, the outputs and the handlers' own tables.
        units: Variant of it for units of work.
        queue_engine: For queues, retries and workers; the same engine but on SQLite.

    Raises:
        ConfigurationError: The URL is invalid, or the database is not supported.

    Example:
        >>> Database("sqlite:///shop.db").queue_engine.url.database
        'shop.broker.db'
    """

    def __init__(self, url: str | Engine, prefix: str = DEFAULT_PREFIX, *, fast: bool = True) -> None:
        self.engine = url if isinstance(url, Engine) else _engine(url)
        self.dialect: Dialect = dialect_of(self.engine, fast=fast)
        self._prefix, self._fast, self._inherited = prefix, fast, list[object]()
        self.queue_engine = self.dialect.queue_engine(self.engine)
        # Variants of the engines share their pools, and have listeners of their own: a user's other connections have none.
        self.units = self.engine.execution_options()
        self._short, self._short_queues = self.engine.execution_options(), self.queue_engine.execution_options()
        for engine in (self.units, self._short, self._short_queues):
            event.listen(engine, "begin", self.dialect.begin)
        forget_in_children(self)

    # functools.cached_property has a lock in Python 3.11, which a forked child may find taken.

    @memoized_property
    def tables(self) -> Tables:
        """The tables, by the schema that they are in; connects."""
        return Tables(self._prefix, self.dialect.schema(self.engine, f"{self._prefix}inbox"))

    @memoized_property
    def fast_path(self) -> FastPath | None:
        """The way in few messages; None if there is none, or it is switched off."""
        return self.dialect.fast_path(self.engine, self.tables) if self._fast else None

    def short(self, *, queues: bool = False) -> AbstractContextManager[Connection]:
        """Begin a short transaction of idemp's own, and commit it."""
        return (self._short_queues if queues else self._short).begin()

    def forget(self) -> None:
        """Begin new pools, in a forked child."""
        self._inherited += [let_go(engine) for engine in {self.engine, self.queue_engine}]

    def missing_files(self) -> list[Path]:
        """Return the files of an SQLite database that do not exist; connecting would create them."""
        if self.engine.dialect.name != "sqlite":
            return []
        files = [Path(engine.url.database or "") for engine in (self.engine, self.queue_engine)]
        return [file for file in files if not file.exists()]

    def close(self) -> None:
        """Close pooled connections."""
        self.engine.dispose()
        if self.queue_engine is not self.engine:
            self.queue_engine.dispose()

    @contextmanager
    def apart(self) -> Iterator[Database]:
        """Open the same database by a pool of its own: callers may hold all connections of the other one.

        The engine keeps its listeners, which may set a role or a search path.
        """
        engine = copy(self.engine)
        if not isinstance(engine, OptionEngine):  # which has the pool of another
            engine.pool = self.engine.pool.recreate()
        own = Database(engine, self._prefix, fast=self._fast)
        try:
            yield own
        finally:
            if engine.pool is not self.engine.pool:
                engine.dispose()

    def on(self, engine: Engine) -> Database:
        """Return the same tables, by another engine.

        Raises:
            ConfigurationError: The engine is of another database, as far as their URLs say.
        """
        ours, theirs = ((each.dialect.name == "sqlite", _place(each.url)) for each in (self.engine, engine))
        if ours[0] != theirs[0] or (None not in (ours[1], theirs[1]) and ours[1] != theirs[1]):
            raise ConfigurationError(
                f"{engine.url.render_as_string()} is not the database of idemp's tables, {self.engine.url.render_as_string()}: "
                "nothing was changed"
            )
        other = Database(engine, self._prefix, fast=self._fast)
        other.tables = self.tables
        return other


def _place(url: URL) -> str | None:
    return os.path.realpath(url.database) if url.database and url.get_backend_name() == "sqlite" else url.database


def _engine(url: str) -> Engine:
    with refusal_of_url(url):
        parsed = make_url(url)
        parsed = parsed.set(drivername=SYNCHRONOUS.get(parsed.drivername, parsed.drivername))
        if parsed.drivername == "postgresql" and "ssl" in parsed.query:  # as asyncpg has it
            parsed = parsed.difference_update_query(["ssl"]).update_query_dict({"sslmode": parsed.query["ssl"]})
        parsed, options = spelt(parsed)
        return create_engine(parsed, hide_parameters=True, **options)


def engines(settings: Settings, engine: Engine | AsyncEngine | None) -> tuple[str | Engine, Callable[[], AsyncEngine]]:
    """Return what connections of idemp's own go by, and what opens the engine of `async def` handlers.

    Raises:
        ConfigurationError: The engine and the settings lead to different databases.

    Example:
        >>> from idemp import Settings
        >>> engines(Settings(database_url="sqlite:///shop.db"), None)[0]
        'sqlite:///shop.db'
    """
    url = settings.database_url
    if engine is None:

        def opened() -> AsyncEngine:
            return open_engine(url, settings.concurrency)

        return url, opened
    if isinstance(engine, Engine):

        def refused() -> AsyncEngine:
            raise ConfigurationError("the engine of the app is not asynchronous: make it by create_async_engine()")

        return engine, refused
    if "database_url" not in settings.model_fields_set:
        url = engine.url.render_as_string(hide_password=False)
    elif make_url(url).database != engine.url.database:
        raise ConfigurationError("database_url and the engine of the app lead to different databases")
    return url, lambda: engine


def open_engine(url: str, concurrency: int) -> AsyncEngine:
    """Return an asynchronous engine of our own for a number of handlers.

    Raises:
        ConfigurationError: The URL is invalid, or its driver is not installed.

    Example:
        >>> open_engine("sqlite:///shop.db", 1).url.drivername
        'sqlite+aiosqlite'
    """
    with needs("asyncio"):
        import_module("greenlet")  # SQLAlchemy's own error has many lines
        from sqlalchemy.ext.asyncio import create_async_engine
    with refusal_of_url(url, asynchronous=True):
        parsed, options = spelt(make_url(url), asynchronous=True)
        parsed = parsed.set(drivername=ASYNCHRONOUS.get(parsed.drivername, parsed.drivername))
        size = {"poolclass": AsyncAdaptedQueuePool, "pool_size": concurrency + 2, "max_overflow": 0}
        return create_async_engine(parsed, hide_parameters=True, **options, **size)


def spelt(url: URL, *, asynchronous: bool = False) -> tuple[URL, dict[str, Any]]:
    """Return a URL with the driver that is meant, and the options of an engine of our own.

    Example:
        >>> spelt(make_url("sqlite:///shop.db"))
        (sqlite:///shop.db, {'connect_args': {'timeout': 10}})
    """
    if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        from idemp.sql import postgresql

        return postgresql.engine_options(url)
    if url.drivername in ("mariadb", "mysql") or url.drivername.endswith(("+aiomysql", "+pymysql")):
        from idemp.sql import mysql

        return mysql.engine_options(url, asynchronous=asynchronous)
    if url.get_backend_name() == "sqlite":
        from idemp.sql import sqlite

        return sqlite.engine_options(url)
    return url, {}


@contextmanager
def refusal_of_url(url: str, *, asynchronous: bool = False) -> Iterator[None]:
    """Refuse a URL that makes no engine, without showing it.

    Raises:
        ConfigurationError: It makes none.
        NotInstalled: Its driver is not installed.

    Example:
        >>> with refusal_of_url("nonsense"):
        ...     make_url("nonsense")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the database cannot be used (Could not parse SQLAlchemy URL from ...
    """
    backend, _, driver = url.partition(":")[0].partition("+")
    extra = EXTRAS.get(backend, ("", ""))[asynchronous] if driver in ("", "psycopg", "pymysql", "pysqlite") else ""
    if driver in ("aiomysql", "aiosqlite", "asyncpg"):
        extra = driver
    try:
        with needs(extra) if extra else nullcontext():
            yield
    except NotInstalled:
        raise
    except (ImportError, exc.ArgumentError, exc.NoSuchModuleError) as error:
        text = str(error).replace(url, "the URL") if url else str(error)
        raise ConfigurationError(
            f"the database cannot be used ({text}): write it as in sqlite:///shop.db, postgresql://host/shop or mysql://host/shop"
        ) from None


def dialect_of(engine: Engine, *, fast: bool = True) -> Dialect:
    """Return the dialect of an engine.

    Args:
        engine: Decides it by its URL.
        fast: Whether to take the shorter ways that some servers have.

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
        with needs("postgresql"):  # of which asyncpg needs a part
            from idemp.sql.postgresql import PostgresqlDialect

        return PostgresqlDialect()
    if engine.dialect.name in ("mysql", "mariadb") and engine.dialect.driver in ("pymysql", "aiomysql"):
        from idemp.sql.mysql import MysqlDialect

        return MysqlDialect(fast=fast)
    known = "use sqlite:///FILE, postgresql+psycopg://HOST/DATABASE or mysql+pymysql://HOST/DATABASE"
    raise ConfigurationError(f"{engine.dialect.name}+{engine.dialect.driver} is not supported: {known}")
