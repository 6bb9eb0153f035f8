"""The database's own clock: nobody else's time counts here, so that no two clocks have to agree."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from idemp.clock import SystemClock
from idemp.inbox.sql.tables import Moment

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Engine
    from sqlalchemy.sql.compiler import SQLCompiler

    from idemp.clock import Clock


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
        self._by_database = isinstance(clock, SystemClock) and engine.dialect.name != "sqlite"

    def at(self, name: str) -> ColumnElement[datetime]:
        """The moment of this name, in a statement."""
        return DatabaseTime(name) if self._by_database else bindparam(name, type_=Moment())

    def said(self, name: str, after: timedelta = timedelta(0)) -> dict[str, float | datetime]:
        """Its parameter: so long from now."""
        return {name: after.total_seconds() if self._by_database else self._clock.now() + after}
