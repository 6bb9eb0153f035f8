"""The database's own clock: nobody else's time counts here, so that no two clocks have to agree."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from idemp.inbox.sql.tables import Moment

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler


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
