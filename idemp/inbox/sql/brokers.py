"""Brokers of one database: the names under which outputs belong to them, and which broker has each name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select, update

from idemp.errors import BrokerChanged
from idemp.inbox.port import DEFAULT_BROKER
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Engine, Table

    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables


class OwnBroker:
    """The broker that a store's outputs go to, as rows name it: by number, the default one by null.

    Args:
        names: where the name is interned.
        name: its name.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> OwnBroker(names).id, OwnBroker(names, "eu").id is None
        (None, False)
    """

    def __init__(self, names: Names, name: str = DEFAULT_BROKER) -> None:
        self._names = names
        self.name = name

    @property
    def id(self) -> int | None:
        """The number; asked before a unit of work begins, since a new name is stored.

        Raises:
            StoreUnavailable: the database can't be reached.
        """
        return None if self.name == DEFAULT_BROKER else self._names.id("broker", self.name)

    def owns(self, table: Table) -> ColumnElement[bool]:
        """The condition that a row of a table is of this broker, for statements that are run with `said`."""
        column = table.c.broker_id
        return column.is_(None) if self.name == DEFAULT_BROKER else column == bindparam("own_broker")

    def said(self) -> dict[str, Any]:
        """The parameters of `owns`."""
        return {} if self.name == DEFAULT_BROKER else {"own_broker": self.id}


class Brokers:
    """Which broker has which name in this database.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> brokers = Brokers(engine, tables, Names(engine, tables))
        >>> brokers.agree("default", "cluster a")
        >>> brokers.agree("default", "cluster b")
        Traceback (most recent call last):
        ...
        idemp.errors.BrokerChanged: Outputs of this database's broker 'default' belong to cluster a; this is cluster b...
        >>> brokers.adopt("default", "cluster b")
        'cluster a'
    """

    def __init__(self, engine: Engine, tables: Tables, names: Names) -> None:
        self._short = Short(engine)
        self._names = names
        broker = tables.broker
        own = broker.c.id == bindparam("own")
        self._first = update(broker).where(own, broker.c.identity.is_(None)).values(identity=bindparam("said"))
        self._change = update(broker).where(own).values(identity=bindparam("said"))
        self._stored = select(broker.c.identity).where(broker.c.name == bindparam("name"))

    def agree(self, name: str, identity: str) -> None:
        """Note that this broker has the name, unless it is noted of one already.

        Raises:
            BrokerChanged: another broker has the name.
        """
        stored = self.stored(name)
        if stored is None:
            values = {"own": self._names.id("broker", name), "said": identity}
            self._short.run(lambda connection: connection.execute(self._first, values))
            stored = self.stored(name)  # another process may have been faster
        _check(name, stored, identity)

    def check(self, name: str, identity: str) -> None:
        """What `agree` would raise; stores nothing."""
        _check(name, self.stored(name), identity)

    def adopt(self, name: str, identity: str) -> str | None:
        """Note that from now on this broker has the name; the identity of the one that had it, if there was one."""
        former = self.stored(name)
        values = {"own": self._names.id("broker", name), "said": identity}
        self._short.run(lambda connection: connection.execute(self._change, values))
        return former

    def stored(self, name: str) -> str | None:
        """The identity of the broker that has the name; `None` where no worker or relay has connected to it yet."""
        found: str | None = self._short.run(lambda connection: connection.scalar(self._stored, {"name": name}))
        return found


def _check(name: str, stored: str | None, identity: str) -> None:
    if stored is not None and stored != identity:
        raise BrokerChanged.of(name, stored, identity)
