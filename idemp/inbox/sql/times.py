"""The database's own clock: nobody else's time counts here, so that no two clocks have to agree."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Float, bindparam, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from idemp.clock import CarriedClock, SystemClock, elapsed
from idemp.forking import renewed_in_child
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.tables import Moment

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine
    from sqlalchemy.sql.compiler import SQLCompiler

    from idemp.clock import Clock

_KEPT_SECONDS: Final = 30.0
_BAD_TRIP_SECONDS: Final = 1.0
"""A reading that took longer does not replace a former one: half of it is how far it may be wrong."""


class DatabaseTime(FunctionElement[datetime]):
    """The moment so many seconds from now, by the database's clock; before now, if they are negative.

    Args:
        seconds: how many, or the name of the parameter that says so.

    Example:
        >>> from sqlalchemy import select
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> with create_engine_safely("sqlite://").connect() as connection:
        ...     row = connection.execute(select(DatabaseTime(0.0), DatabaseTime("later")), {"later": 1.5}).one()
        >>> (row[1] - row[0]).total_seconds()
        1.5
    """

    inherit_cache = True
    name = "idemp_time"
    type = Moment()

    def __init__(self, seconds: float | str) -> None:
        super().__init__(
            bindparam(seconds, type_=Float()) if isinstance(seconds, str) else bindparam(None, seconds, type_=Float())
        )


@compiles(DatabaseTime, "postgresql")
def _on_postgresql(element: DatabaseTime, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    # One moment for the whole statement, so that an index serves a comparison; `clock_timestamp` is another for each row.
    return f"(statement_timestamp() + make_interval(secs => CAST({seconds} AS double precision)))"


@compiles(DatabaseTime, "mysql", "mariadb")
def _on_mysql(element: DatabaseTime, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"TIMESTAMPADD(MICROSECOND, CAST({seconds} * 1000000 AS SIGNED), UTC_TIMESTAMP(6))"


@compiles(DatabaseTime, "sqlite")
def _on_sqlite(element: DatabaseTime, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    # Milliseconds are what it knows; the zeros are those that SQLAlchemy writes, too.
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('%+f seconds', {seconds}))"


class DatabaseClock(CarriedClock):
    """The database server's clock, read off the hot path and carried on by this process.

    So all processes that share a database date their claims, beats and windows by one clock, whatever their hosts' clocks
    show, and no statement of a delivery has to ask for the time.

    Args:
        engine: on PostgreSQL, MariaDB or MySQL.
        host: this machine's clock.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> DatabaseClock(create_engine_safely("postgresql://db/shop"), SystemClock()).monotonic() > 0
        True
    """

    def __init__(self, engine: Engine, host: Clock) -> None:
        super().__init__(host)
        self._short = Short(engine, single=True)
        self._lock = renewed_in_child(threading.Lock())
        self._next: float | None = None

    def now(self) -> datetime:
        """The server's time; asked for, if it never was.

        Raises:
            StoreUnavailable: it has to be asked for, and the database can't be reached.
        """
        if self._next is None:
            self.refresh_if_due()
        return super().now()

    def refresh_if_due(self) -> None:
        """Read the server's clock if that was not done for some time; never inside of a transaction.

        Raises:
            StoreUnavailable: the database can't be reached.
        """
        if self._next is None or self.monotonic() >= self._next:
            with self._lock:
                if self._next is None or self.monotonic() >= self._next:
                    self._short.run(self._look)

    def _look(self, connection: Connection) -> None:
        statement, began = select(DatabaseTime(0.0)), elapsed()
        there: datetime = connection.execute(statement).scalar_one()
        trip = elapsed() - began
        if self._next is None or trip < _BAD_TRIP_SECONDS:
            self.set(there + timedelta(seconds=trip / 2))
        self._next = self.monotonic() + _KEPT_SECONDS


def shared_clock(engine: Engine, clock: Clock) -> Clock:
    """The clock that all who share this database agree on.

    A clock that was injected goes before the server's; SQLite has none but that of the one host which has the file.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> type(shared_clock(create_engine_safely("sqlite://"), SystemClock())).__name__
        'SystemClock'
    """
    if isinstance(clock, SystemClock) and engine.dialect.name != "sqlite":
        return DatabaseClock(engine, clock)
    return clock


def refresh(clock: Clock) -> None:
    """Have a database's clock read if that is due; never inside of a transaction.

    Raises:
        StoreUnavailable: the database can't be reached.

    Example:
        >>> refresh(SystemClock())
    """
    if isinstance(clock, DatabaseClock):
        clock.refresh_if_due()


class Moments:
    """Moments from now on, by the one clock that all who share the database agree on.

    That is the database's own: what one host has leased must not be over for another whose clock is ahead. A clock that was
    injected goes before it, and SQLite has none but that of the one host which has the file.

    Example:
        >>> from datetime import timedelta
        >>> from sqlalchemy import select
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> engine = create_engine_safely("sqlite://")
        >>> moments = Moments(engine, SystemClock())
        >>> said = {**moments.said("then", timedelta(hours=1)), **moments.said("now")}
        >>> with engine.connect() as connection:
        ...     row = connection.execute(select(moments.at("then"), moments.at("now")), said).one()
        >>> row[0] - row[1] >= timedelta(minutes=59)
        True
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._clock = clock
        self._by_database = isinstance(clock, (SystemClock, DatabaseClock)) and engine.dialect.name != "sqlite"

    def at(self, name: str) -> ColumnElement[datetime]:
        """The moment of this name, in a statement."""
        return DatabaseTime(name) if self._by_database else bindparam(name, type_=Moment())

    def said(self, name: str, after: timedelta = timedelta(0)) -> dict[str, float | datetime]:
        """Its parameter: so long from now."""
        return {name: after.total_seconds() if self._by_database else self._clock.now() + after}
