"""The database of an installation: engines, tables and short transactions."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url

from idemp.errors import ConfigurationError
from idemp.sql.dialects import Dialect, FastPath, dialect_of
from idemp.sql.tables import DEFAULT_PREFIX, Tables

__all__ = ["Database", "worker_name"]


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
        ConfigurationError: The URL is of no use, or the database is not supported.

    Example:
        >>> Database("sqlite:///shop.db").queue_engine.url.database
        'shop.broker.db'
    """

    def __init__(self, url: str | Engine, prefix: str = DEFAULT_PREFIX, *, fast: bool = True) -> None:
        self.engine = url if isinstance(url, Engine) else _engine(url)
        self.dialect: Dialect = dialect_of(self.engine)
        self._prefix, self._fast = prefix, fast
        self.queue_engine = self.dialect.queue_engine(self.engine)
        # Variants of the engines share their pools, and have listeners of their own: a user's other connections have none.
        self.units = self.engine.execution_options()
        self._short, self._short_queues = self.engine.execution_options(), self.queue_engine.execution_options()
        for engine in (self.units, self._short, self._short_queues):
            event.listen(engine, "begin", self.dialect.begin)

    @cached_property
    def tables(self) -> Tables:
        """The tables, by the schema that they are in; connects."""
        return Tables(self._prefix, self.dialect.schema(self.engine, f"{self._prefix}inbox"))

    @cached_property
    def fast_path(self) -> FastPath | None:
        """The way in few messages; None if there is none, or it is switched off."""
        return self.dialect.fast_path(self.engine, self.tables) if self._fast else None

    def short(self, *, queues: bool = False) -> AbstractContextManager[Connection]:
        """Begin a short transaction of idemp's own, and commit it."""
        return (self._short_queues if queues else self._short).begin()

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


def _engine(url: str) -> Engine:
    try:
        made = make_url(url)
        arguments: dict[str, Any] = {}
        if made.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
            from idemp.sql.postgresql import engine_options

            made, arguments = engine_options(made)
        return create_engine(made, hide_parameters=True, connect_args=arguments)
    except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
        text = str(error).replace(url, "the URL")
        raise ConfigurationError(
            f"the database cannot be used ({text}): write it as in sqlite:///shop.db or postgresql://host/shop"
        ) from None
