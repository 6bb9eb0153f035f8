"""Where idemp's tables are: looked up once, so that no statement depends on what a session looks names up by.

A handler may change that for a connection, for good or for its transaction: `SET search_path` for a tenant, `USE`, a
temporary table of the same name. Statements without a schema would then claim in one place and store outputs in another.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, overload
from weakref import WeakKeyDictionary

from sqlalchemy import text

from idemp.inbox.sql.engine import is_mysql
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.tables import shared_tables

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.tables import Tables

_ON_POSTGRESQL: Final = text(
    """
    SELECT (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(:name)),
        current_schema()
    """
)
_ON_MYSQL: Final = text("SELECT DATABASE(), DATABASE()")
# What is made later on an engine may ask on a connection that a handler has left looking elsewhere.
_found: WeakKeyDictionary[Engine, dict[str, str]] = WeakKeyDictionary()

T = TypeVar("T")


def located(engine: Engine, tables: Tables) -> Tables:
    """Return the tables with the schema that this engine finds them in; where there are none yet, would make them in.

    Raises:
        ConfigurationError: the database refuses this user, or doesn't exist.
        StoreUnavailable: it can't be reached.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> located(create_engine_safely("sqlite://"), Tables()).inbox.fullname
        'main.idemp_inbox'
    """
    if tables.schema is not None:
        return tables
    home = schema_of(engine, tables.inbox.name)
    return tables if home is None else shared_tables(None, tables.prefix, home)


def schema_of(engine: Engine, name: str) -> str | None:
    """Return the schema that an engine finds a table in, or would make it in; `None` if there is no such schema.

    Raises:
        ConfigurationError, StoreUnavailable: as `located` says.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> schema_of(create_engine_safely("sqlite://"), "idemp_inbox")
        'main'
    """
    if engine.dialect.name == "sqlite":
        return "main"

    def look(connection: Connection) -> tuple[str | None, str | None]:
        mysql = is_mysql(connection.dialect.name)
        row = connection.execute(_ON_MYSQL if mysql else _ON_POSTGRESQL, {} if mysql else {"name": name}).one()
        return row[0], row[1]

    known = _found.setdefault(engine, {})
    if name not in known:
        found, default = Short(engine, at_start=True, single=True).run(look)
        if found is None:
            return default
        known[name] = found
    return known[name]


class made_once(cached_property[T]):  # noqa: N801 - a decorator
    """A property that is made at its first use, once for all threads; what depends on where the tables are.

    Example:
        >>> class Store:
        ...     @made_once
        ...     def names(self) -> list[str]:
        ...         return ["orders"]
        >>> store = Store()
        >>> store.names is store.names
        True
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Self | T:
        """Make it, unless another thread was faster."""
        if instance is None:
            return self
        made: T = vars(instance).setdefault(str(self.attrname), self.func(instance))
        return made
