"""PostgreSQL's simple query protocol, for statements of idemp's own: several of them in one round trip.

Such a message has no parameters, so what stands in it is written here as literals: numbers, times and UUIDs that were
checked to be such, and everything of the user's as hex digits. psycopg's connection is used below its own notion of
transactions (libpq itself knows where it is), and errors are those that SQLAlchemy would have raised itself.

Source: PostgreSQL, "Message Flow", 55.2.2 Simple Query and 55.2.2.1 Multiple Statements in a Simple Query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg import Error as PsycopgError
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from idemp.inbox.sql import failures

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from psycopg.pq.abc import PGconn, PGresult
    from sqlalchemy import Connection, exc

_ANSWERS: Final = {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK}
_OPEN: Final = {TransactionStatus.INTRANS, TransactionStatus.INERROR}


def integer(value: int | None) -> str:
    """A number.

    Example:
        >>> integer(7), integer(None)
        ('7', 'NULL::integer')
    """
    return "NULL::integer" if value is None else str(int(value))


def moment(value: datetime) -> str:
    """A point in time; a naive one would mean something else in each session.

    Example:
        >>> from datetime import UTC, datetime
        >>> moment(datetime(2026, 5, 4, 12, tzinfo=UTC))
        "'2026-05-04T12:00:00+00:00'::timestamptz"
    """
    if value.tzinfo is None:
        raise ValueError(f"{value} has no time zone.")
    return f"'{value.isoformat()}'::timestamptz"


def uuid(value: UUID) -> str:
    """A key.

    Example:
        >>> from uuid import UUID
        >>> uuid(UUID(int=7))
        "'00000000000000000000000000000007'::uuid"
    """
    return f"'{value.hex}'::uuid"


def octets(value: bytes | None) -> str:
    """Bytes, whatever `standard_conforming_strings` says about backslashes.

    Example:
        >>> octets(b"it's")
        "decode('69742773', 'hex')"
    """
    return "NULL::bytea" if value is None else f"decode('{value.hex()}', 'hex')"


def words(value: str | None) -> str:
    """Text of the user's.

    Example:
        >>> words("ü")
        "convert_from(decode('c3bc', 'hex'), 'UTF8')"
    """
    return "NULL::text" if value is None else f"convert_from({octets(value.encode())}, 'UTF8')"


def is_sayable(value: str | None) -> bool:
    r"""Whether the server takes this text; what it refuses should be refused as always.

    Example:
        >>> is_sayable("ü"), is_sayable("\0"), is_sayable("\ud800")
        (True, False, False)
    """
    if value is None:
        return True
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def begin(connection: Connection) -> str | None:
    """What has to precede the first statement of a transaction; `None` where psycopg has to begin it."""
    driver: Any = connection.connection.driver_connection
    if driver.pgconn.pipeline_status != PipelineStatus.OFF or driver.autocommit:
        return None
    if driver.pgconn.transaction_status != TransactionStatus.IDLE:
        return ""
    if driver.read_only is not None or driver.deferrable is not None:
        return None
    level = driver.isolation_level
    return "BEGIN; " if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}; "


def is_open(connection: Connection) -> bool:
    """Whether there is a transaction that a message can end, spoilt or not."""
    driver: Any = connection.connection.driver_connection
    pgconn: PGconn = driver.pgconn
    return pgconn.pipeline_status == PipelineStatus.OFF and pgconn.transaction_status in _OPEN


class Answers(NamedTuple):
    """What the server said to a message.

    Attributes:
        results: of each statement that succeeded.
        error: of the first that did not; none after it was run.
    """

    results: list[PGresult]
    error: exc.DBAPIError | None

    def all(self) -> list[PGresult]:
        """The results.

        Raises:
            exc.DBAPIError: a statement failed.
        """
        if self.error is not None:
            raise self.error
        return self.results


def run(connection: Connection, statements: str, meanwhile: Callable[[], None] | None = None) -> Answers:
    """Send statements in one message.

    Args:
        connection: to the server.
        statements: each with what it needs; none of them has parameters.
        meanwhile: called while the server is at work; what it raises is raised when the answers are here.

    Raises:
        exc.DBAPIError: the connection broke, and is marked as such.
    """
    driver: Any = connection.connection.driver_connection
    try:
        with driver.lock:  # as psycopg does: a thread of the handler's may still be at it
            driver.pgconn.send_query(statements.encode())
            try:
                if meanwhile is not None:
                    driver.pgconn.flush()
                    meanwhile()
            finally:
                answers: list[PGresult] = driver.wait(execute(driver.pgconn))
    except PsycopgError as error:
        raise failures.told(connection, error) from error
    for place, answer in enumerate(answers):
        if answer.status not in _ANSWERS:
            failure = error_from_result(answer, encoding=driver.info.encoding)
            return Answers(answers[:place], failures.told(connection, failure))
    return Answers(answers, None)
