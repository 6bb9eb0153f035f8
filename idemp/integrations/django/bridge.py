"""SQLAlchemy on the connections of Django, and the handlers of `idemp worker` in its transactions."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import Any, Final, NoReturn, Self

import django
from django.apps import apps
from django.db import Error, close_old_connections, connections, transaction
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine

from idemp.errors import ConfigurationError, TransactionRolledBack
from idemp.ports import Kind
from idemp.process import Adapters
from idemp.settings import Settings
from idemp.sql.engine import Database, dialect_of, spelt
from idemp.sql.guard import UNIT, Unit
from idemp.sql.store import SqlStore

__all__ = ["AtomicRolledBack", "Bridge", "DjangoStore", "DjangoUnit", "on_django", "open_database", "own_engine", "url_of"]

DRIVERS: Final = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}
LEFT_TO_DJANGO: Final = ("do_begin", "do_commit", "do_rollback", "do_close", "do_terminate")
OF_DJANGO: Final = ["client_flag", "context", "conv", "cursor_factory", "prepare_threshold", "transaction_mode"]
"""Parameters for Django's own use of a connection."""


class AtomicRolledBack(TransactionRolledBack):
    """A database error was caught in an `atomic()` block, which Django can only roll back. Nothing was committed.

    Example:
        >>> AtomicRolledBack("a database error that it caught").committed
        False
    """

    who = "the block"
    ends = "nothing was committed; catch database errors around a transaction.atomic() of their own"


def url_of(using: str = "default") -> URL:
    """Return the URL of a database of `settings.DATABASES`, with its OPTIONS.

    Args:
        using: Alias of the database.

    Raises:
        ConfigurationError: idemp cannot work on it, or cannot take over an option.

    Example:
        >>> def show() -> None:
        ...     print(url_of("default").render_as_string())
    """
    own: Any = connections[using]
    said, vendor, driver = own.settings_dict, own.vendor, own.Database.__name__
    on_sqlite, name, options = vendor == "sqlite", str(said["NAME"]), said["OPTIONS"]
    refusals = {
        f"is {vendor}: idemp works on PostgreSQL, SQLite, MariaDB and MySQL": vendor not in DRIVERS,
        "uses psycopg2, on which idemp has no statements: pip install 'psycopg[binary]'": driver == "psycopg2",
        "uses mysqlclient, which hides whether a transaction is open: call pymysql.install_as_MySQLdb()": driver == "MySQLdb",
        "has AUTOCOMMIT False, so that atomic() commits nothing: remove it": not said["AUTOCOMMIT"],
        "is in memory, so on one connection: name a file, also in 'TEST': {'NAME': …}": on_sqlite and own.is_in_memory_db(),
        "names a URI: name the file itself": on_sqlite and name.startswith("file:"),
    }
    for reason in (text for text, refused in refusals.items() if refused):
        raise ConfigurationError(f"DATABASES[{using!r}] {reason}")
    given = {**options, "init_command": None} if on_sqlite else own.get_connection_params()
    query = {key: value for key, value in given.items() if key not in OF_DJANGO and value is not None}
    query |= {f"ssl_{key}": value for key, value in query.pop("ssl", {}).items()}
    if role := options.get("assume_role"):
        query["options"] = f"{query.get('options', '')} -c role={role}".strip()
    place = {"username": query.pop("user", None), "password": query.pop("password", None)}
    place["database"] = name if on_sqlite else query.pop("dbname", None) or query.pop("database", None)
    if not set("/,") & set(str(query.get("host", "/"))):  # neither a socket nor several hosts
        place |= {"host": query.pop("host"), "port": int(query.pop("port", 0)) or None}
    for key, value in query.items():
        if not isinstance(value, str | int) or isinstance(value, bool):
            kind = type(value).__name__
            raise ConfigurationError(
                f"DATABASES[{using!r}] has the option {key!r} as a {kind}: write it as text or a whole number"
            )
    return URL.create(DRIVERS[vendor], **place, query={key: str(value) for key, value in query.items()})


def own_engine(using: str = "default") -> Engine:
    """Return an engine for idemp's own short transactions, whose connections are kept as long as CONN_MAX_AGE says.

    Example:
        >>> own_engine.__name__
        'own_engine'
    """
    url, options = spelt(url_of(using))
    age = connections[using].settings_dict["CONN_MAX_AGE"]
    kept: dict[str, Any] = {"poolclass": NullPool} if age == 0 else {"pool_size": 2, "pool_recycle": -1 if age is None else age}
    return create_engine(url, hide_parameters=True, **kept, **options)


def open_database(using: str) -> Database:
    """Return idemp's tables in a database of Django's, which the caller closes.

    Example:
        >>> open_database.__name__
        'open_database'
    """
    return Database(own_engine(using), Settings().table_prefix)


class Bridge:
    """SQLAlchemy on the driver's connection that Django holds for a thread. Django begins, commits and rolls back.

    Args:
        using: Alias of the database.
        own: Engine of idemp's own connections to it.

    Attributes:
        engine: Its connections are Django's, and stay open.
        units: Variant of it for units of work of a worker.

    Example:
        >>> Bridge.__name__
        'Bridge'
    """

    def __init__(self, using: str, own: Engine) -> None:
        self.using = using
        own.connect().close()  # the first connection lets the dialect know the server
        dialect = copy(own.dialect)
        for name in LEFT_TO_DJANGO:
            setattr(dialect, name, lambda *_: None)
        # Not create_engine(): at each connect it would change what Django has set, such as SQLite's REGEXP.
        self.engine = Engine(NullPool(self._driver, dialect=dialect), dialect, own.url, hide_parameters=True)
        self.units, self._dialect = self.engine.execution_options(), dialect_of(own)
        Unit.guard(self.units)

    @property
    def django(self) -> Any:
        """Django's connection of this thread."""
        return connections[self.using]

    def _driver(self) -> Any:
        self.django.ensure_connection()
        return self.django.connection

    def check(self, connection: Connection) -> None:
        """Refuse a transaction that can only be rolled back, which Django or PostgreSQL would do without an error.

        Raises:
            AtomicRolledBack: It can only be rolled back.
        """
        aborted = self.django.vendor == "postgresql" and not self._dialect.is_open(connection)
        if self.django.needs_rollback or aborted:
            raise AtomicRolledBack("a database error that was caught, or by set_rollback(True)")


class DjangoUnit(Unit):
    """A unit of work in `transaction.atomic(durable=True)`.

    Example:
        >>> issubclass(DjangoUnit, Unit)
        True
    """

    __slots__ = ("_atomic", "_bridge", "_renews")

    def __init__(self, database: Database, bridge: Bridge, *, renews: bool = True) -> None:
        super().__init__(database)
        self._bridge, self._atomic, self._renews = bridge, ExitStack(), renews

    @property
    def using(self) -> str:
        """Alias of the database."""
        return self._bridge.using

    def __enter__(self) -> Self:
        if self._renews:
            close_old_connections()  # as Django does before and after a request
        self._atomic.enter_context(transaction.atomic(using=self._bridge.using, durable=True))
        self.connection = self._bridge.units.connect().execution_options(**{UNIT: self})
        self.connection.begin()
        return self

    def commit(self, *arguments: Any, **options: Any) -> None:
        """Flush, prove the transaction, store outputs, and let Django commit and run the hooks of `on_commit`.

        Raises:
            AtomicRolledBack: Django would roll the transaction back.
        """
        self._bridge.check(self.connection)
        super().commit(*arguments, **options)  # in SQLAlchemy's books only
        own = self._bridge.django
        # A hook that raises after COMMIT is logged: the handler has not failed, and the hooks after it are to run.
        own.run_on_commit = [(ids, hook, True) for ids, hook, _ in own.run_on_commit]
        self._atomic.close()

    def _close(self) -> None:
        self.connection.close()
        if not self._committed:
            transaction.set_rollback(True, using=self._bridge.using)
        self._atomic.close()
        if self._spoiled:  # a setting of the session would outlive the unit
            self._bridge.django.close()


class DjangoStore(SqlStore):
    """Claims and outputs of units on Django's connection; all else goes by connections of idemp's own.

    Example:
        >>> issubclass(DjangoStore, SqlStore)
        True
    """

    def __init__(self, database: Database, worker: str, bridge: Bridge, *, renews: bool = True) -> None:
        super().__init__(database, worker)
        self._bridge, self._fast, self.lazy = bridge, None, False  # the fast path begins and commits itself
        self._renews = renews

    def connect(self) -> DjangoUnit:
        """Begin a unit of work."""
        return DjangoUnit(self.database, self._bridge, renews=self._renews)

    def classify(self, error: BaseException) -> Kind | None:
        """Ask the dialect about the driver's error under one of Django's."""
        return super().classify(error.__cause__ if isinstance(error, Error) and error.__cause__ else error)


def on_django(using: str = "default") -> Callable[[Adapters], Adapters]:
    """Return a function for `app.on_open`, with which the handlers of an app's worker run in transactions of Django.

    The changes of Django's ORM are committed with the claim. It calls `django.setup()` if that was not done.

    Args:
        using: Alias of the database.

    Raises:
        ConfigurationError: When the worker starts: it is on another database, or has `async def` handlers.

    Example:
        >>> from idemp import App
        >>> app = App("shop")
        >>> def register() -> None:
        ...     app.on_open.append(on_django())
    """
    if not apps.ready:
        django.setup()

    def adapt(adapters: Adapters) -> Adapters:
        engine = adapters.database.engine
        ours, theirs = engine.url.database or "", url_of(using).database or ""
        if os.path.realpath(ours) != os.path.realpath(theirs):
            raise ConfigurationError(
                f"the worker is on the database {ours!r}, and DATABASES[{using!r}] is {theirs!r}: start it by "
                "python manage.py idemp worker …, or set IDEMP_DATABASE_URL"
            )
        store = DjangoStore(adapters.database, adapters.worker, Bridge(using, engine))
        return replace(adapters, store=store, open_async=_refuse_async)

    return adapt


def _refuse_async() -> NoReturn:
    raise ConfigurationError("async def handlers cannot run in a transaction of Django: write them as def")
