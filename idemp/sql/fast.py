"""The fast path on PostgreSQL: `BEGIN; claim; mark` is one message, and `proof; outputs; COMMIT` is one.

They are simple queries of libpq, below psycopg's cursors and SQLAlchemy. As literals they hold numbers, UUIDs and hex digits that
were made here, and no text of a user's. `IDEMP_FAST_PATH=false` switches to the statements that all other databases run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.generators import execute
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import namedtuple_row
from sqlalchemy import AdaptedConnection, Connection, Engine, Table, exc

from idemp.sql.dialects import Claims, Ended, Times
from idemp.sql.tables import Tables

__all__ = [
    "COMMIT_WAITS",
    "GIVE_BACK",
    "SimpleQueries",
    "driver_of",
    "exchange",
    "idle_driver",
    "limit",
    "reported",
    "table_limit",
    "text_literal",
]

LONGEST: Final = 65_536  # bytes of an output, or of several in a message; a longer output takes the other way
ENDED: Final = "idemp.ended"  # is not a number
Driver = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
GIVE_BACK: Final = "SELECT set_config('lock_timeout',current_setting('idemp.lock_timeout'),true)"
"""Gives the transaction the `lock_timeout` back that `table_limit` found, whoever had set it."""
LAZY: Final = "SET LOCAL synchronous_commit=off;"
COMMIT_WAITS: Final = "SELECT pg_logical_emit_message(true,'idemp','')"
"""Lets a COMMIT wait for the disk: one of a transaction that has written nothing to the log waits for nothing. Any role may do so."""
NOW: Final = "extract(epoch FROM statement_timestamp())::double precision"
DAY: Final = 86_400.0


class SimpleQueries:
    """Messages of several statements.

    Args:
        tables: They are named with their schema.
        limits: Seconds that a claim waits for its table, and for another transaction with its id.

    Example:
        >>> SimpleQueries.__name__
        'SimpleQueries'
    """

    def __init__(self, engine: Engine, tables: Tables, limits: tuple[float, float]) -> None:
        name = engine.dialect.identifier_preparer.format_table
        table = name(tables.inbox)
        self._begin = f"{table_limit(limits[0])};LOCK TABLE ONLY {table} IN ROW EXCLUSIVE MODE;{limit(limits[1])};"
        self._claim = f"INSERT INTO {table} ({_columns(tables.inbox)}) VALUES "
        self._claimed = (
            " ON CONFLICT (consumer_id,message_key) DO NOTHING RETURNING consumer_id,message_key,(claimed_at*1000000)::bigint;"
        )
        self._identity = name(tables.identity)
        self._stored = (
            "SELECT i.type_id,i.original_id,i.fingerprint,i.worker,(i.claimed_at*1000000)::bigint AS claimed_us,o.*,"
            f"p.due_at,p.quarantined_at,p.due_at<={NOW} AS due FROM {table} i "
            f"LEFT JOIN {name(tables.output)} o ON o.consumer_id=i.consumer_id AND o.message_key=i.message_key "
            f"LEFT JOIN {name(tables.pending)} p ON p.output_id=o.output_id"
        )
        self._standing = (
            f"BEGIN;{limit(limits[0])};SELECT consumer_id,message_key,(claimed_at*1000000)::bigint FROM {table} WHERE "
        )
        self._forget = f"DELETE FROM {name(tables.pending)} WHERE output_id IN"
        self._output = f"INSERT INTO {name(tables.output)} ({_columns(tables.output)}) VALUES "
        self._pend = f"INSERT INTO {name(tables.pending)} (output_id,consumer_id,message_key,ordinal,due_at) VALUES "

    def claim(self, connection: Connection, mark: str, worker: str, rows: Sequence[Mapping[str, Any]]) -> Claims | None:
        """Begin, insert claims and mark; None if this connection has to take the other way."""
        driver = driver_of(connection)
        if driver.isolation_level is not None or driver.read_only is not None or driver.deferrable is not None:
            return None
        begin = "BEGIN;" if driver.info.transaction_status == TransactionStatus.IDLE else ""
        made = [row["made"] for row in rows if row["made"] is not None]
        holder = text_literal(worker)
        insert = f"{self._claim}{','.join([_claim(row, holder) for row in rows])}{self._claimed}" if rows else ""
        late = f",EXISTS(SELECT FROM {self._identity} WHERE purged_before>={min(made)!r})" if made else ""
        mark = f"{GIVE_BACK},set_config('idemp.mark','{mark}',true){late}"
        answers = exchange(connection, begin + self._begin + insert + mark)
        answers = [each for each in answers if each.status == ExecStatus.TUPLES_OK]
        return _times(answers[1]) if rows else {}, bool(made) and answers[-1].get_value(0, 2) == b"t"

    def stored(self, connection: Connection, row: Mapping[str, Any], *, last: bool) -> Sequence[Any]:
        """Return what a claim and its outputs have stored; roll back in the same message if that is the last one."""
        where = f"WHERE i.consumer_id={row['consumer']} AND i.message_key='{row['key'].hex}' ORDER BY o.ordinal"
        statement = f"{self._stored} {where}{';ROLLBACK' if last else ''}".encode()
        with reported(connection, self._stored):
            driver = idle_driver(connection)
            if isinstance(driver, psycopg.Connection):
                return driver.cursor(row_factory=namedtuple_row).execute(statement).fetchall()
            found: Sequence[Any] = _adapted(connection).run_async(partial(_rows_of, statement=statement))
            return found

    def too_long(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an output is too long for a message."""
        return any(len(row["body"]) > LONGEST for row in rows)

    def finish(self, connection: Connection, mark: str, rows: Sequence[Mapping[str, Any]], *, lazy: bool) -> None:
        """Prove the transaction, store outputs, commit; in further messages, if the outputs are long.

        Args:
            connection: In the transaction.
            mark: Of the transaction.
            rows: Outputs.
            lazy: Whether COMMIT waits for no disk.

        Raises:
            Ended: The transaction is another one; nothing was stored.
        """
        message = f"SELECT (CASE current_setting('idemp.mark',true) WHEN '{mark}' THEN '1' ELSE '{ENDED}' END)::int;"
        try:
            for some in _portions(rows):
                if len(message) > LONGEST:
                    exchange(connection, message)
                    message = ""
                message += self._store(some)
            answers = exchange(connection, f"{message}{LAZY if lazy else ''}COMMIT")
        except exc.DBAPIError as error:
            if isinstance(error.orig, psycopg.errors.InvalidTextRepresentation) and ENDED in str(error.orig):
                raise Ended from error
            raise
        if answers[-1].command_status != b"COMMIT":
            raise Ended

    def _store(self, rows: Sequence[Mapping[str, Any]]) -> str:
        outputs, pending = [], []
        for row in rows:
            place = f"{row['consumer_id']},'{row['message_key'].hex}',{row['ordinal']}"
            id, delay = _id(row["output_id"]), "NULL" if row["delay"] is None else f"{row['delay']!r}"
            texts = f"{text_literal(row['kind'])},{text_literal(row['exchange'])},{text_literal(row['routing_key'])}"
            mandatory = "true" if row["mandatory"] else "false"
            outputs.append(f"({place},{id},{texts},{mandatory},{delay},{_bytes(row['headers'])},{_bytes(row['body'])})")
            if row["wait"] is not None:
                pending.append(f"({id},{place},{NOW}+{row['wait']!r})")
        waiting = f"{self._pend}{','.join(pending)};" if pending else ""
        return f"{self._output}{','.join(outputs)};{waiting}"

    def confirm(self, connection: Connection, ids: Sequence[str]) -> None:
        """Forget outputs that the broker has confirmed, and wait for no disk: those that come back are sent again."""
        exchange(connection, f"BEGIN;{LAZY}{self._forget} ({','.join(map(_id, ids))});COMMIT")

    def read_back(self, connection: Connection, keys: Mapping[int, Sequence[UUID]]) -> Times:
        """Return the claims that stand under keys of consumers, in a transaction of its own that waits for the disk.

        The log is flushed in its order, so with this COMMIT all is on disk that the transaction has read: on whatever server
        answers, and on its synchronous standbys. A flush by itself would prove nothing, because the server may have restarted since.
        """
        places = [f"consumer_id={number} AND message_key IN ({','.join(map(_key, some))})" for number, some in keys.items()]
        answers = exchange(connection, f"{self._standing}{' OR '.join(places)};{COMMIT_WAITS};COMMIT")
        return _times(answers[2])


def table_limit(seconds: float) -> str:
    """Return the statement that limits waits for locks, and keeps the limit that was there.

    The nested call is evaluated first: it keeps what the outer one changes.

    Example:
        >>> table_limit(10.0).count("set_config")
        2
    """
    kept = "set_config('idemp.lock_timeout',current_setting('lock_timeout'),true)"
    return f"SELECT set_config('lock_timeout','{round(seconds * 1000)}ms',{kept} IS NOT NULL)"


def limit(seconds: float) -> str:
    """Return the statement that limits waits for locks; at least a millisecond, because 0 means no limit.

    Example:
        >>> limit(2.0)
        "SET LOCAL lock_timeout='2000ms'"
    """
    return f"SET LOCAL lock_timeout='{max(1, round(seconds * 1000))}ms'"


def _claim(row: Mapping[str, Any], worker: str) -> str:
    made = "" if row["made"] is None else f",{row['made']!r}"
    payload = "NULL" if row["payload"] is None else _bytes(row["payload"])
    return (
        f"({row['consumer']},'{row['key'].hex}',{row['type']},{_bytes(row['original'])},{payload},"
        f"least(greatest({NOW}{made}),{NOW}+{DAY}),{worker})"
    )


def _portions(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    start = size = 0
    for number, row in enumerate(rows):
        size += len(row["body"]) + len(row["headers"])
        if size > LONGEST // 2 or number == len(rows) - 1:
            yield rows[start : number + 1]
            start, size = number + 1, 0


def exchange(connection: Connection, message: str) -> list[PGresult]:
    """Send one message, and return the answers to its statements. Errors are reported to SQLAlchemy as its own.

    Example:
        >>> def current_user(connection: Connection) -> str:
        ...     return exchange(connection, "SELECT current_user")[-1].get_value(0, 0).decode()
    """
    with reported(connection, message[:100]):
        driver = idle_driver(connection)
        answers: list[PGresult]
        if isinstance(driver, psycopg.Connection):
            with driver.lock:
                driver.pgconn.send_query(message.encode())
                answers = driver.wait(execute(driver.pgconn))
        else:
            answers = _adapted(connection).run_async(partial(_exchange, message=message.encode()))
        if answers[-1].status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(answers[-1], driver.info.encoding)
    return answers


async def _exchange(driver: psycopg.AsyncConnection[Any], message: bytes) -> list[PGresult]:
    async with driver.lock:
        driver.pgconn.send_query(message)
        return await driver.wait(execute(driver.pgconn))


async def _rows_of(driver: psycopg.AsyncConnection[Any], statement: bytes) -> Sequence[Any]:
    cursor = await driver.cursor(row_factory=namedtuple_row).execute(statement)
    return await cursor.fetchall()


def _adapted(connection: Connection) -> AdaptedConnection:
    adapted = connection.connection.dbapi_connection
    assert isinstance(adapted, AdaptedConnection)
    return adapted


def driver_of(connection: Connection) -> Driver:
    """Return psycopg's connection."""
    driver: Driver = connection.connection.driver_connection  # type: ignore[assignment]
    return driver


def idle_driver(connection: Connection) -> Driver:
    """Return psycopg's connection if it takes a statement; it would wait for ever for a stream or a COPY that was left open."""
    driver = driver_of(connection)
    if driver.lock.locked() or driver.info.transaction_status == TransactionStatus.ACTIVE:
        raise psycopg.ProgrammingError(
            "the handler has left a statement open: read a stream to its end, leave a COPY by its `with`, await each task"
        )
    if driver.pgconn.pipeline_status != PipelineStatus.OFF:
        raise psycopg.ProgrammingError("the handler has left a pipeline open: leave it by its `with`")
    return driver


@contextmanager
def reported(connection: Connection, statement: str) -> Iterator[None]:
    """Report errors of the driver to SQLAlchemy, as those of its own statements are; a task's end costs the connection, too."""
    kind: type[Exception] = connection.dialect.dbapi.Error  # type: ignore[union-attr]
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        connection.invalidate()
        raise
    except kind as error:
        driver: Any = connection.connection.driver_connection
        closed = driver.closed if isinstance(driver, psycopg.BaseConnection) else driver.is_closed()  # psycopg's or asyncpg's
        wrapped = exc.DBAPIError.instance(statement, None, error, kind, connection_invalidated=closed)
        if closed:
            connection.invalidate(error)  # and all pooled ones, which have gone, too
        raise wrapped from error


def _times(answer: PGresult) -> Times:
    rows = [[(answer.get_value(row, column) or b"").decode() for column in range(3)] for row in range(answer.ntuples)]
    return {(int(number), UUID(key)): int(at) for number, key, at in rows}


def _columns(table: Table) -> str:
    return ",".join(column.name for column in table.columns)


def _key(key: UUID) -> str:
    return f"'{key.hex}'"


def _id(id: str) -> str:
    return f"'{bytes.fromhex(id.replace('-', '')).hex()}'"


def _bytes(value: bytes) -> str:
    return f"decode('{value.hex()}','hex')"


def text_literal(value: str) -> str:
    """Return text as SQL, by hex digits.

    Example:
        >>> text_literal("a'b")
        "convert_from(decode('612762','hex'),'UTF8')"
    """
    return f"convert_from({_bytes(value.encode())},'UTF8')"
