"""Claims on PostgreSQL, through psycopg 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg import Error as PsycopgError
from psycopg.generators import execute
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from sqlalchemy import Integer, LargeBinary, Text, bindparam, exc, func, select, text
from sqlalchemy.dialects import postgresql

from idemp.errors import StoreError
from idemp.inbox.sql.claiming import INBOX_COLUMNS, INBOX_TYPES, ClaimDialect, HeldByAnother, qualified, typed
from idemp.inbox.sql.tables import KeyType, Moment, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from psycopg.pq.abc import PGconn, PGresult
    from sqlalchemy import Connection
    from sqlalchemy.sql import Executable

    from idemp.inbox.sql.claiming import Due
    from idemp.messages import Output

_GAVE_UP_WAITING: Final = {"55P03", "57014"}  # lock_timeout, or a statement_timeout that is shorter
_OUTPUT_ARRAYS: Final = {
    "output_ids": postgresql.ARRAY(postgresql.UUID(as_uuid=True)),
    "ordinals": postgresql.ARRAY(Integer()),
    "kinds": postgresql.ARRAY(Text()),
    "exchanges": postgresql.ARRAY(Text()),
    "routing_keys": postgresql.ARRAY(Text()),
    "envelopes": postgresql.ARRAY(Text()),
    "bodies": postgresql.ARRAY(LargeBinary()),
}


class PostgresDialect(ClaimDialect):
    """PostgreSQL through psycopg 3: one statement to claim, one for all outputs, whatever their number."""

    proves_from_start = False

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        inbox, output, pending = map(qualified, (tables.inbox, tables.output, tables.pending))
        columns = ", ".join(INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in INBOX_COLUMNS)
        # lock_timeout is set for the wait on this very id and put back by RETURNING; on a conflict the transaction ends
        # after one read, and on a timeout it is over.
        claim = f"""
            WITH before AS MATERIALIZED (
                SELECT current_setting('lock_timeout') AS value, set_config('lock_timeout', :wait, true) AS changed
            )
            INSERT INTO {inbox} ({columns})
            SELECT {values} FROM before
            ON CONFLICT (consumer_id, message_key) DO NOTHING
            RETURNING txid_current(), (SELECT set_config('lock_timeout', value, true) FROM before)
        """
        rows = """
            SELECT * FROM unnest(:output_ids, :ordinals, :kinds, :exchanges, :routing_keys, :envelopes, :bodies)
                AS item (output_id, ordinal, kind, exchange, routing_key, envelope, body)
        """

        def store(condition: str) -> str:
            return f"""
                fresh AS (
                    INSERT INTO {output} (output_id, ordinal, kind, exchange, routing_key, envelope, body,
                                          consumer_id, message_key)
                    SELECT item.*, :consumer_id, :message_key FROM ({rows}) AS item{condition}
                    RETURNING output_id, ordinal, consumer_id, message_key
                )
                INSERT INTO {pending} (output_id, ordinal, consumer_id, message_key, attempts, due_at)
                SELECT output_id, ordinal, consumer_id, message_key, :tries, :due_at FROM fresh
                RETURNING txid_current()
            """

        shared = [
            *typed(_OUTPUT_ARRAYS),
            bindparam("due_at", type_=Moment()),
            bindparam("tries", type_=Integer()),
        ]
        self._claim = text(_one_line(claim)).bindparams(*typed(INBOX_TYPES), bindparam("wait", type_=Text()))
        self._store = text(_one_line("WITH " + store(""))).bindparams(
            *shared, bindparam("message_key", type_=KeyType()), bindparam("consumer_id", type_=Integer())
        )
        self._both = text(_one_line(f"WITH claimed AS ({claim}), {store(', claimed')}")).bindparams(
            *shared, *typed(INBOX_TYPES), bindparam("wait", type_=Text())
        )
        self._first_token = select(func.txid_current())
        self._token = select(func.txid_current_if_assigned())

    def begin(self, connection: Connection) -> None:
        """Nothing to send: psycopg begins with the first statement, and the claim answers the transaction's id."""

    def token(self, connection: Connection) -> object | None:
        """The transaction's id: a late claim comes after the handler, so something else has to stand at the beginning."""
        token: object = connection.execute(self._first_token).scalar_one()
        return token

    def is_aborted(self, connection: Connection) -> bool:
        """As libpq saw it with the last answer: no round trip."""
        driver: Any = connection.connection.driver_connection
        return bool(driver.info.transaction_status.name == "INERROR")

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT."""
        return self._claimed(connection, self._claim, {**row, "wait": _milliseconds(wait)})

    def store_outputs(
        self, connection: Connection, key: Mapping[str, Any], outputs: Sequence[Output], due: Due
    ) -> object | None:
        """One statement for all outputs and their pending rows."""
        values = {**key, **_output_arrays(outputs), "due_at": due.at, "tries": due.tries}
        return connection.execute(self._store, values).scalars().first()

    def claim_and_store(
        self,
        connection: Connection,
        row: Mapping[str, Any],
        outputs: Sequence[Output],
        due: Due,
        wait: timedelta,
    ) -> object | None:
        """One statement for claim and outputs."""
        if not outputs:
            return self.claim(connection, row, wait)
        values = {
            **row,
            **_output_arrays(outputs),
            "due_at": due.at,
            "tries": due.tries,
            "wait": _milliseconds(wait),
        }
        return self._claimed(connection, self._both, values)

    def is_same_transaction(self, connection: Connection, claimed: object | None, stored: object | None) -> bool:
        """Compares transaction ids; storing outputs brought the present one along."""
        if claimed is None:
            return True  # no claim to protect
        present = stored if stored is not None else connection.execute(self._token).scalar_one()
        return present == claimed

    def is_same_rolled_back(self, connection: Connection, claimed: object | None) -> bool:
        """Both in one round trip."""
        answers = _ended_by(connection, b"SELECT txid_current_if_assigned(); ROLLBACK")
        if not answers:
            return self.is_same_transaction(connection, claimed, None)
        return answers[0].get_value(0, 0) == str(claimed).encode()

    def roll_back(self, connection: Connection) -> None:
        """One round trip."""
        _ended_by(connection, b"ROLLBACK")

    def _claimed(self, connection: Connection, statement: Executable, values: Mapping[str, Any]) -> object | None:
        try:
            found = connection.execute(statement, values).first()
        except exc.DBAPIError as error:
            if self._waited_for_same_id(error):
                raise HeldByAnother from error
            raise
        return None if found is None else found[0]

    def _waited_for_same_id(self, error: exc.DBAPIError) -> bool:
        # They come from any lock; only the wait for a tuple of our index carries the inbox in its context.
        diagnostics = getattr(error.orig, "diag", None)
        context = getattr(diagnostics, "context", None) or ""
        return getattr(error.orig, "sqlstate", None) in _GAVE_UP_WAITING and self.tables.inbox.name in context


def _ended_by(connection: Connection, command: bytes) -> list[PGresult]:
    """What the server answered to a command that ends the transaction; nothing where that can't be sent.

    psycopg's own rollback makes the server forget every prepared statement, for fear that they are about tables which
    the transaction had created (`PrepareManager` in `psycopg/_preparing.py`). That is one more round trip, and for each
    statement five executions with plans of their own until it is prepared again. A server notices such tables by itself.

    Raises:
        StoreError: an answer was an error, or none came.
    """
    driver: Any = connection.connection.driver_connection
    pgconn: PGconn = driver.pgconn
    if pgconn.transaction_status == TransactionStatus.IDLE or pgconn.pipeline_status != PipelineStatus.OFF:
        return []
    try:
        with driver.lock:  # as psycopg does: a thread of the handler's may still be at it
            pgconn.send_query(command)
            answers: list[PGresult] = driver.wait(execute(pgconn))
    except PsycopgError as error:
        raise StoreError(f"A rollback was not answered: {error}") from error
    for answer in answers:
        if answer.status not in {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK}:
            raise StoreError(f"A rollback was refused: {answer.error_message.decode(errors='replace')}")
    return answers


def _one_line(statement: str) -> str:
    return " ".join(statement.split())


def _output_arrays(outputs: Sequence[Output]) -> dict[str, Any]:
    return {
        "output_ids": [output.id for output in outputs],
        "ordinals": [output.ordinal for output in outputs],
        "kinds": [output.kind.value for output in outputs],
        "exchanges": [output.exchange for output in outputs],
        "routing_keys": [output.routing_key for output in outputs],
        "envelopes": [output.envelope() for output in outputs],
        "bodies": [output.message.body for output in outputs],
    }


def _milliseconds(wait: timedelta) -> str:
    return str(max(1, round(wait.total_seconds() * 1000)))
