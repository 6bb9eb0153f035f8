"""PostgreSQL connections whose server connection changes from one transaction to the next, as behind PgBouncer.

Whatever a session keeps on the server (named prepared statements, settings, LISTEN) belongs to another client after the
next COMMIT. So behind a pooler idemp prepares no statements, changes no setting for longer than a transaction, and polls
where it would listen.

A pooler answers the start-up packet before it has a server connection: the process number that libpq knows is not the
number of the server process that answers. Session mode looks the same, and loses nothing by being treated alike.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event

from idemp.errors import GuaranteeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

_SHARED: Final = "idemp server connection is shared"  # in a connection's `info`
_IDLE: Final = 0  # libpq's PQTRANS_IDLE
# The server, too, has to notice a client whose machine went dark: only this frees the claim of a dead worker. SET
# instead of the start-up packet's `options`, which PgBouncer refuses; and nothing at all where another client would get
# the settings: a pooler has its own.
_PREPARE: Final = "DO $$BEGIN IF pg_backend_pid() = {pid} THEN {settings} END IF; END$$; SELECT pg_backend_pid()"
_KEEPALIVES: Final = (
    "PERFORM set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false), "
    "set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '20000', false); "
    # A server busy with a dead worker's statement would not check whether its client is still there. Since 14, and not
    # on all systems that a server may run on.
    "BEGIN PERFORM set_config('client_connection_check_interval', '5s', false); "
    "EXCEPTION WHEN OTHERS THEN NULL; END;"
)


def prepare(driver: Any, record: Any, *, keepalives: bool) -> None:
    """Set up a new connection of idemp's own engines, in one round trip.

    Args:
        driver: psycopg's connection.
        record: SQLAlchemy's record of it.
        keepalives: have the server watch the connection, too, unless the URL says how.
    """
    settings = _KEEPALIVES if keepalives else "NULL;"
    (pid,) = _row(driver, _PREPARE.format(pid=driver.info.backend_pid, settings=settings))
    record.info[_SHARED] = pid != driver.info.backend_pid
    if record.info[_SHARED]:
        driver.prepare_threshold = None


def is_shared(connection: Connection) -> bool:
    """Return whether a pooler may give the server connection to another client between two transactions.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> with create_engine_safely("sqlite://").connect() as connection:
        ...     is_shared(connection)
        False
    """
    if connection.dialect.driver != "psycopg":
        return False
    return _is_shared(connection.connection.driver_connection, connection.info)


def is_driver_shared(driver: Any) -> bool:
    """Return the same for psycopg's own connection, asked in a round trip."""
    (pid,) = _row(driver, "SELECT pg_backend_pid()")
    return bool(pid != driver.info.backend_pid)


def refuse_prepared_statements(connection: Connection) -> None:
    """Check that an engine prepares no named statements behind a pooler.

    Two clients whose statements have the same name execute each other's: effects are lost, without an error.

    Raises:
        GuaranteeError: it does.
    """
    driver: Any = connection.connection.driver_connection
    if is_shared(connection) and driver.prepare_threshold is not None:
        raise GuaranteeError(
            "A connection pooler (such as PgBouncer) stands before the database, and this engine's prepared statements "
            "would be mixed up with those of other clients: effects would be lost.",
            fix='Create the engine with connect_args={"prepare_threshold": None}, or by idemp\'s create_engine_safely.',
        )


def with_settings(engine: Engine, statement: str) -> None:
    """Have all new sessions of an engine run a SELECT of `set_config`; behind a pooler, each transaction.

    Args:
        engine: on PostgreSQL.
        statement: with `{local}` as the last argument of each `set_config`. Repeating it is harmless.
    """
    on_connect, on_begin = _listeners(statement)
    if not event.contains(engine, "connect", on_connect):
        event.listen(engine, "connect", on_connect)
        event.listen(engine, "begin", on_begin)


@cache
def _listeners(statement: str) -> tuple[Callable[[Any, Any], None], Callable[[Connection], None]]:
    def on_connect(driver: Any, record: Any) -> None:
        if not _is_shared(driver, record.info):
            _row(driver, statement.format(local="false"))

    def on_begin(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if not driver.autocommit and _is_shared(driver, connection.info):
            driver.execute(statement.format(local="true"))

    return on_connect, on_begin


def _is_shared(driver: Any, info: dict[Any, Any]) -> bool:
    if _SHARED not in info:
        info[_SHARED] = is_driver_shared(driver)
    return bool(info[_SHARED])


def _row(driver: Any, statements: str) -> Any:
    """Run statements, and return the last one's row. No transaction begins."""
    autocommit = driver.autocommit
    if driver.info.transaction_status == _IDLE:
        driver.autocommit = True  # a setting made inside of a transaction would go with its rollback
    try:
        with driver.cursor() as cursor:
            cursor.execute(statements)
            while cursor.nextset():
                pass
            return cursor.fetchone()
    finally:
        if driver.autocommit != autocommit:
            driver.autocommit = autocommit
