"""Claims on PostgreSQL, through psycopg 3."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import Integer, Text, bindparam, exc, func, select, text
from sqlalchemy.dialects import postgresql

from idemp.inbox.sql import many_postgresql, simple_query, stored_postgresql
from idemp.inbox.sql.claiming import (
    INBOX_COLUMNS,
    INBOX_TYPES,
    AnotherTransaction,
    ClaimDialect,
    HeldByAnother,
    output_rows,
    qualified,
    typed,
)
from idemp.inbox.sql.due import EFFECT
from idemp.inbox.sql.simple_query import integer, moment, octets, uuid, words
from idemp.inbox.sql.tables import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from psycopg.pq.abc import PGresult
    from sqlalchemy import Connection
    from sqlalchemy.sql import Executable

    from idemp.inbox.sql.claiming import Handled, History
    from idemp.inbox.sql.due import Due
    from idemp.inbox.sql.tables import Part, Tables
    from idemp.messages import Output

LONGEST_MESSAGE: Final = 8 * 1024
"""Bytes of the user's that go into a message as literals, for one handling; more of them are bound parameters."""
LONGEST_OF_BATCH: Final = 256 * 1024
"""The same for a batch, however many handlings there are in it."""
_WORTH_ARRAYS: Final = 5  # rows; fewer are faster as VALUES

_GAVE_UP_WAITING: Final = {"55P03", "57014"}  # lock_timeout, or a statement_timeout that is shorter
_DIVISION_BY_ZERO: Final = "22012"
_LOCK_TIMEOUT: Final = "idemp lock_timeout"  # in a connection's `info`: what it was before the last claim
_REPORTED: Final = (
    b"default_transaction_read_only", b"session_authorization", b"is_superuser", b"TimeZone", b"DateStyle",
    b"IntervalStyle", b"client_encoding", b"search_path",
)  # fmt: skip
"""Of the settings that the server reports (the last one since PostgreSQL 18), those that change what statements mean."""
_MARK: Final = "SELECT set_config('idemp.unclaimed', 'whole', true)"
_MARKED: Final = "current_setting('idemp.unclaimed', true) = 'whole'"
_TEXTS: Final = ("kind", "exchange", "routing_key", "envelope")
_OUTPUT_COLUMNS: Final = ("output_id", "message_key", "consumer_id", "ordinal", *_TEXTS, "body")
_PENDING_COLUMNS: Final = ("output_id", "message_key", "consumer_id", "ordinal", "attempts", "due_at", "broker_id")
_OUTPUT_ARRAYS: Final = {
    "output_ids": postgresql.ARRAY(postgresql.UUID(as_uuid=True)),
    "message_keys": postgresql.ARRAY(postgresql.UUID(as_uuid=True)),
    "consumer_ids": postgresql.ARRAY(Integer()),
    "ordinals": postgresql.ARRAY(Integer()),
    "kinds": postgresql.ARRAY(Text()),
    "exchanges": postgresql.ARRAY(Text()),
    "routing_keys": postgresql.ARRAY(Text()),
    "envelopes": postgresql.ARRAY(Text()),
    "bodies": postgresql.ARRAY(Text()),
}


class PostgresDialect(ClaimDialect):
    """PostgreSQL through psycopg 3: one statement to claim, one for all outputs, whatever their number."""

    proves_from_start = False

    def __init__(self, tables: Tables | Part) -> None:
        super().__init__(tables)
        self.read, self.read_all = stored_postgresql.read_one(tables), stored_postgresql.read_all(tables)
        inbox, output, pending = map(qualified, (tables.inbox, tables.output, tables.pending))
        columns = ", ".join(INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in INBOX_COLUMNS)
        # lock_timeout is set for the wait on this very id and put back right after; on a timeout the transaction is over.
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
            SELECT output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, decode(body, 'hex')
            FROM unnest(:output_ids, :message_keys, :consumer_ids, :ordinals, :kinds, :exchanges, :routing_keys,
                        :envelopes, :bodies)
                AS given (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        """

        def store(condition: str) -> str:
            return f"""
                fresh AS (
                    INSERT INTO {output} ({", ".join(_OUTPUT_COLUMNS)})
                    SELECT item.* FROM ({rows}) AS item{condition}
                    RETURNING output_id, ordinal, consumer_id, message_key, kind
                )
                INSERT INTO {pending} (output_id, ordinal, consumer_id, message_key, attempts, due_at, broker_id)
                SELECT output_id, ordinal, consumer_id, message_key,
                    CASE kind WHEN '{EFFECT}' THEN 0 ELSE :tries END,
                    CASE kind WHEN '{EFFECT}' THEN :effects_at ELSE :due_at END,
                    CASE kind WHEN '{EFFECT}' THEN NULL ELSE :broker_id END
                FROM fresh
                RETURNING txid_current()
            """

        shared = [
            *typed(_OUTPUT_ARRAYS),
            bindparam("due_at", type_=Moment()),
            bindparam("effects_at", type_=Moment()),
            bindparam("tries", type_=Integer()),
            bindparam("broker_id", type_=Integer()),
        ]
        self._claim = text(_one_line(claim)).bindparams(*typed(INBOX_TYPES), bindparam("wait", type_=Text()))
        self._store = text(_one_line("WITH " + store(""))).bindparams(*shared)
        keep = f"INSERT INTO {output} ({', '.join(_OUTPUT_COLUMNS)}) {rows} RETURNING txid_current()"
        self._keep = text(_one_line(keep)).bindparams(*typed(_OUTPUT_ARRAYS))
        self._both = text(_one_line(f"WITH claimed AS ({claim}), {store(', claimed')}")).bindparams(
            *shared, *typed(INBOX_TYPES), bindparam("wait", type_=Text())
        )
        # What lock_timeout was is shown along, and guessed before: as it was at this connection's last claim. The table's
        # own lock is not waited for in the time of a claim: nobody has the id only because an index is being built.
        self._waiting = _one_line(f"""
            LOCK TABLE ONLY {inbox} IN ROW EXCLUSIVE MODE; SHOW lock_timeout; SET LOCAL lock_timeout = %s; %s;
            SET LOCAL lock_timeout = '%s'
        """)
        self._claim_literally = _one_line(f"""
            INSERT INTO {inbox} ({columns}) VALUES (%s) ON CONFLICT (consumer_id, message_key) DO NOTHING
            RETURNING txid_current()
        """)
        self._names = inbox, output, pending
        self._output_literally = f"INSERT INTO {output} ({', '.join(_OUTPUT_COLUMNS)}) VALUES %s; "
        self._pending_literally = f"INSERT INTO {pending} ({', '.join(_PENDING_COLUMNS)}) VALUES %s; "
        self._first_token = select(func.txid_current())
        self._token = select(func.txid_current_if_assigned())

    def begin(self, connection: Connection) -> None:
        """Nothing to send: the first statement begins, and the claim answers the transaction's id."""

    def token(self, connection: Connection) -> object | None:
        """The transaction's id: a late claim comes after the handler, so something else has to stand at the beginning."""
        beginning = simple_query.begin(connection)
        if beginning is not None:
            *_, answered = simple_query.run(connection, f"{beginning}SELECT txid_current()").all()
            return _number(answered)
        token: object = connection.execute(self._first_token).scalar_one()
        return token

    def mark(self, connection: Connection) -> bool:
        """A setting that ends with the transaction, in one message with BEGIN: no round trip more, and no id is used up."""
        beginning = simple_query.begin(connection)
        if beginning is None:
            return False
        simple_query.run(connection, beginning + _MARK).all()
        return True

    def last_marked(self, connection: Connection) -> str:
        """One round trip, which is COMMIT's."""
        del connection
        return f"SELECT 1 / coalesce(({_MARKED})::int, 0); COMMIT"

    def reported_settings(self, connection: Connection) -> object:
        """As libpq saw them last; they show what was sent past SQLAlchemy."""
        driver: Any = connection.connection.driver_connection
        return tuple(map(driver.pgconn.parameter_status, _REPORTED))

    def is_aborted(self, connection: Connection) -> bool:
        """As libpq saw it with the last answer: no round trip."""
        driver: Any = connection.connection.driver_connection
        return bool(driver.info.transaction_status.name == "INERROR")

    def is_over(self, connection: Connection) -> bool:
        """As libpq saw it with the last answer: no round trip."""
        driver: Any = connection.connection.driver_connection
        return bool(driver.info.transaction_status.name == "IDLE")

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT, and the BEGIN before it in the same round trip."""
        if _is_sayable(row):
            inserted = self.waited_for(connection, self._claim_literally % _inbox_literals(row), wait)
            if inserted is not None:
                return _number(inserted)
        return self._claimed(connection, self._claim, {**row, "wait": _milliseconds(wait)})

    def claim_all(
        self, connection: Connection, rows: Sequence[Mapping[str, Any]], wait: timedelta
    ) -> tuple[object | None, frozenset[UUID] | None]:
        """One INSERT for all of them."""
        if all(map(_is_sayable, rows)):
            statement = many_postgresql.claim(self._names[0], ", ".join(INBOX_COLUMNS), rows)
            inserted = self.waited_for(connection, statement, wait)
            if inserted is not None:
                keys = frozenset(UUID(_text(inserted, row, 0)) for row in range(inserted.ntuples))
                return (int(_text(inserted, 0, 1)) if keys else None), keys
        return super().claim_all(connection, rows, wait)

    def waited_for(
        self, connection: Connection, claim: str, wait: timedelta, meanwhile: Callable[[], None] | None = None
    ) -> PGresult | None:
        """Run a claim that waits so long for another holder; `None` where such messages can't be sent.

        `meanwhile` is called while the server is at work.
        """
        beginning = simple_query.begin(connection)
        if beginning is None:
            return None
        guess = connection.info.get(_LOCK_TIMEOUT, "0")
        with self._telling_who_holds_it():
            statement = beginning + self._waiting % (_milliseconds(wait), claim, guess)
            *_, shown, _, inserted, _ = simple_query.run(connection, statement, meanwhile).all()
        if (was := _word(shown)) != guess:
            simple_query.run(connection, f"SET LOCAL lock_timeout = '{was}'").all()
            connection.info[_LOCK_TIMEOUT] = was
        return inserted

    def store_outputs(self, connection: Connection, handled: Handled, due: Due | None) -> object | None:
        """One statement for all outputs and their pending rows."""
        if due is None:
            return connection.execute(self._keep, _output_arrays(handled)).scalars().first()
        values = {**_output_arrays(handled), **_due_values(due)}
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
        key = {"consumer_id": row["consumer_id"], "message_key": row["message_key"]}
        values = {
            **row,
            **_output_arrays([(key, outputs)]),
            **_due_values(due),
            "wait": _milliseconds(wait),
        }
        return self._claimed(connection, self._both, values)

    def last_message(self, connection: Connection, claimed: object, stored: str = "") -> str | None:
        """The proof, the outputs and COMMIT in one round trip."""
        if not simple_query.is_open(connection):
            return None
        # A statement of its own, the first: whatever fails after it, the transaction was the same one.
        return f"SELECT 1 / coalesce((txid_current_if_assigned() = {claimed})::int, 0); {stored}COMMIT"

    def stored_literally(self, handled: Handled, due: Due | None) -> str | None:
        """Two INSERTs, unless the outputs are large."""
        rows = output_rows(handled)
        if not _is_short(rows, len(handled)):
            return None
        _, output, pending = self._names
        if len(rows) >= _WORTH_ARRAYS:
            return many_postgresql.store(output, pending, rows, due)
        said: str = self._output_literally % ", ".join(map(_output_literals, rows))
        if due is not None:
            said += self._pending_literally % ", ".join(_pending_literals(row, due) for row in rows)
        return said

    def commit_with(self, connection: Connection, last_message: str) -> None:
        """One round trip."""
        answers = simple_query.run(connection, last_message)
        if not answers.results and _sqlstate(answers.error) == _DIVISION_BY_ZERO:
            raise AnotherTransaction from answers.error
        *_, commit = answers.all()
        if commit.command_status != b"COMMIT":
            raise AnotherTransaction(commit.command_status)

    def record(self, connection: Connection, confirmed: Sequence[UUID], history: History) -> bool:
        """One round trip."""
        if simple_query.begin(connection) is None:
            return False
        statements = many_postgresql.confirm(self._names[2], confirmed) if confirmed else ""
        statements += "".join(many_postgresql.record(qualified(table), rows) for table, rows in history.items())
        # Nobody waits for the disk: marks that a crash of the server takes along cost a redispatch under the same ids.
        simple_query.run(connection, f"BEGIN; SET LOCAL synchronous_commit TO off; {statements}COMMIT").all()
        return True

    def is_same_transaction(self, connection: Connection, claimed: object | None, stored: object | None) -> bool:
        """Compares transaction ids; storing outputs brought the present one along."""
        if claimed is None:
            return True  # no claim to protect
        present = stored if stored is not None else connection.execute(self._token).scalar_one()
        return present == claimed

    def is_same_rolled_back(self, connection: Connection, claimed: object | None) -> bool:
        """Both in one round trip."""
        if not simple_query.is_open(connection):
            return self.is_same_transaction(connection, claimed, None)
        present, _ = simple_query.run(connection, "SELECT txid_current_if_assigned(); ROLLBACK").all()
        return _number(present) == claimed

    def roll_back(self, connection: Connection) -> None:
        """One round trip.

        psycopg's own rollback makes the server forget every prepared statement, for fear that they are about tables which
        the transaction had created (`PrepareManager` in `psycopg/_preparing.py`). That is one more round trip, and for
        each statement five executions with plans of their own until it is prepared again. A server notices such tables
        by itself.
        """
        if simple_query.is_open(connection):
            simple_query.run(connection, "ROLLBACK").all()

    def _claimed(self, connection: Connection, statement: Executable, values: Mapping[str, Any]) -> object | None:
        with self._telling_who_holds_it():
            found = connection.execute(statement, values).first()
        return None if found is None else found[0]

    @contextmanager
    def _telling_who_holds_it(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            if self._waited_for_same_id(error):
                raise HeldByAnother from error
            raise

    def _waited_for_same_id(self, error: exc.DBAPIError) -> bool:
        # They come from any lock; only the wait for a tuple of our index carries the inbox in its context.
        diagnostics = getattr(error.orig, "diag", None)
        context = getattr(diagnostics, "context", None) or ""
        return _sqlstate(error) in _GAVE_UP_WAITING and self.tables.inbox.name in context


def _sqlstate(error: exc.DBAPIError | None) -> str | None:
    return getattr(error.orig, "sqlstate", None) if error is not None else None


def _word(result: PGresult) -> str:
    """The one value of a result, which the server wrote: a number with its unit."""
    value = (result.get_value(0, 0) or b"").decode()
    if not value.isalnum():
        raise ValueError(f"not a number with its unit: {value!r}")
    return value


def _text(result: PGresult, row: int, column: int) -> str:
    return (result.get_value(row, column) or b"").decode()


def _number(result: PGresult) -> int | None:
    """The one number of a result, if it has a row."""
    value = result.get_value(0, 0) if result.ntuples else None
    return None if value is None else int(value)


def _inbox_literals(row: Mapping[str, Any]) -> str:
    """In the order of `INBOX_COLUMNS`."""
    return ", ".join((
        uuid(row["message_key"]), integer(row["consumer_id"]), integer(row["type_id"]), integer(row["worker_id"]),
        moment(row["claimed_at"]), octets(row["fingerprint"]), words(row["original_id"]), words(row["source_position"]),
    ))  # fmt: skip


def _is_sayable(row: Mapping[str, Any]) -> bool:
    return simple_query.is_sayable(row["original_id"]) and simple_query.is_sayable(row["source_position"])


def _output_literals(row: Mapping[str, Any]) -> str:
    """In the order of `_OUTPUT_COLUMNS`."""
    texts = (words(row[name]) for name in _TEXTS)
    numbers = (uuid(row["output_id"]), uuid(row["message_key"]), integer(row["consumer_id"]), integer(row["ordinal"]))
    return f"({', '.join((*numbers, *texts, octets(row['body'])))})"


def _pending_literals(row: Mapping[str, Any], due: Due) -> str:
    """In the order of `_PENDING_COLUMNS`."""
    numbers = (uuid(row["output_id"]), uuid(row["message_key"]), integer(row["consumer_id"]), integer(row["ordinal"]))
    attempts, due_at, broker_id = due.of(row["kind"])
    return f"({', '.join((*numbers, integer(attempts), moment(due_at), integer(broker_id)))})"


def _due_values(due: Due) -> dict[str, Any]:
    return {"due_at": due.at, "effects_at": due.effects_at, "tries": due.tries, "broker_id": due.broker_id}


def _is_short(rows: Sequence[Mapping[str, Any]], handlings: int) -> bool:
    texts = [row[name] for row in rows for name in _TEXTS]
    if not all(map(simple_query.is_sayable, texts)):
        return False
    size = sum(len(row["body"]) for row in rows) + sum(len(each.encode()) for each in texts)
    return size <= min(LONGEST_MESSAGE * handlings, LONGEST_OF_BATCH)


def _one_line(statement: str) -> str:
    return " ".join(statement.split())


def _output_arrays(handled: Handled) -> dict[str, Any]:
    rows = output_rows(handled)
    arrays = {f"{name}s": [row[name] for row in rows] for name in (*_OUTPUT_COLUMNS[:4], *_TEXTS)}
    # psycopg sends arrays of bytes with backslashes, which are doubled without standard_conforming_strings.
    return {**arrays, "bodies": [row["body"].hex() for row in rows]}


def _milliseconds(wait: timedelta) -> str:
    return str(max(1, round(wait.total_seconds() * 1000)))
