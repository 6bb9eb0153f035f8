"""How each database claims: its statements, how long it waits, and how it proves that the transaction is the same.

| database | claim | a holder of the same id | proof |
|---|---|---|---|
| PostgreSQL | `INSERT … ON CONFLICT DO NOTHING RETURNING` | `lock_timeout`, set and reset by that statement | its id |
| SQLite | the same, under `BEGIN IMMEDIATE` | can't be: one writer at a time | savepoint |
| MariaDB | `INSERT IGNORE`, rows counted | `SET STATEMENT innodb_lock_wait_timeout` | savepoint |
| MySQL | `INSERT IGNORE`, rows counted | `SET SESSION innodb_lock_wait_timeout` around it | savepoint |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Integer, LargeBinary, Text, bindparam, exc, func, insert, select, text
from sqlalchemy.dialects import postgresql

from idemp.errors import ConfigurationError
from idemp.inbox.sql import failures
from idemp.inbox.sql.tables import KeyType, Moment, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection
    from sqlalchemy.engine import Dialect as SqlAlchemyDialect
    from sqlalchemy.sql import Executable

    from idemp.messages import Output

_SAVEPOINT: Final = "idemp_claim"
_INBOX_COLUMNS: Final = (
    "message_key", "consumer_id", "type_id", "worker_id", "claimed_at", "fingerprint", "original_id",
)  # fmt: skip
_INBOX_TYPES: Final = {
    "message_key": KeyType(), "consumer_id": Integer(), "type_id": Integer(), "worker_id": Integer(),
    "claimed_at": Moment(), "fingerprint": LargeBinary(), "original_id": Text(),
}  # fmt: skip


class HeldByAnother(Exception):
    """Another transaction holds the same id, and did not end in time."""


class Due(NamedTuple):
    """When a relay may take an output, and how often it may have been sent by then."""

    at: datetime
    tries: int

    @classmethod
    def after(cls, now: datetime, relay_after: timedelta) -> Due:
        """A unit that leaves its outputs to the relay at once does not send them itself."""
        return cls(now + relay_after, 1 if relay_after else 0)


class ClaimDialect(ABC):
    """Claims in one kind of database. Built once per store: no statement is made per message."""

    rolls_back_before_reading = False
    """Whether a conflict must be read in a fresh transaction, because the present snapshot may not show the winner."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        inbox, output, pending = tables.inbox, tables.output, tables.pending
        self.read: Executable = (
            select(
                inbox.c.original_id,
                inbox.c.fingerprint,
                inbox.c.claimed_at,
                output.c.output_id,
                output.c.ordinal,
                output.c.kind,
                output.c.exchange,
                output.c.routing_key,
                output.c.envelope,
                output.c.body,
                pending.c.output_id.label("waiting"),
            )
            .select_from(
                inbox.outerjoin(
                    output,
                    (output.c.consumer_id == inbox.c.consumer_id) & (output.c.message_key == inbox.c.message_key),
                ).outerjoin(pending, pending.c.output_id == output.c.output_id)
            )
            .where(inbox.c.consumer_id == bindparam("consumer_id"), inbox.c.message_key == bindparam("message_key"))
            .order_by(output.c.ordinal)
        )
        self._insert_output = insert(output)
        self._insert_pending = insert(pending)

    def begin(self, connection: Connection) -> None:
        """Start the transaction and whatever the proof needs."""
        connection.exec_driver_sql(f"SAVEPOINT {_SAVEPOINT}")

    @abstractmethod
    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """Insert the claim. A token that identifies the transaction, or `None` where the id is taken.

        Raises:
            HeldByAnother: somebody else holds it.
        """

    def store_outputs(
        self, connection: Connection, key: Mapping[str, Any], outputs: Sequence[Output], due: Due
    ) -> object | None:
        """Insert outputs and their pending rows; the transaction's token again where it comes for free."""
        rows = [output_row(output, key) for output in outputs]
        connection.execute(self._insert_output, rows)
        connection.execute(
            self._insert_pending,
            [
                {
                    **key,
                    "output_id": row["output_id"],
                    "ordinal": row["ordinal"],
                    "attempts": due.tries,
                    "due_at": due.at,
                }
                for row in rows
            ],
        )
        return None

    def claim_and_store(
        self,
        connection: Connection,
        row: Mapping[str, Any],
        outputs: Sequence[Output],
        due: Due,
        wait: timedelta,
    ) -> object | None:
        """Claim, and if the id is ours store the outputs."""
        token = self.claim(connection, row, wait)
        if token is not None and outputs:
            key = {"consumer_id": row["consumer_id"], "message_key": row["message_key"]}
            self.store_outputs(connection, key, outputs, due)
        return token

    def is_same_transaction(self, connection: Connection, claimed: object | None, stored: object | None) -> bool:
        """Whether the transaction that is about to commit is the one that `begin` started."""
        del claimed, stored
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        except exc.DBAPIError as error:
            if failures.translate(error) is not None:
                raise
            return False
        return True


def output_row(output: Output, key: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the output table."""
    return {
        **key,
        "output_id": output.id,
        "ordinal": output.ordinal,
        "kind": output.kind.value,
        "exchange": output.exchange,
        "routing_key": output.routing_key,
        "envelope": output.envelope(),
        "body": output.message.body,
    }


class PostgresDialect(ClaimDialect):
    """PostgreSQL through psycopg 3: one statement to claim, one for all outputs, whatever their number."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        inbox, output, pending = map(_qualified, (tables.inbox, tables.output, tables.pending))
        columns = ", ".join(_INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in _INBOX_COLUMNS)
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
            *_typed(_OUTPUT_ARRAYS),
            bindparam("due_at", type_=Moment()),
            bindparam("tries", type_=Integer()),
        ]
        self._claim = text(_one_line(claim)).bindparams(*_typed(_INBOX_TYPES), bindparam("wait", type_=Text()))
        self._store = text(_one_line("WITH " + store(""))).bindparams(
            *shared, bindparam("message_key", type_=KeyType()), bindparam("consumer_id", type_=Integer())
        )
        self._both = text(_one_line(f"WITH claimed AS ({claim}), {store(', claimed')}")).bindparams(
            *shared, *_typed(_INBOX_TYPES), bindparam("wait", type_=Text())
        )
        self._token = select(func.txid_current_if_assigned())

    def begin(self, connection: Connection) -> None:
        """Nothing to send: psycopg begins with the first statement, and the claim answers the transaction's id."""

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

    def _claimed(self, connection: Connection, statement: Executable, values: Mapping[str, Any]) -> object | None:
        try:
            found = connection.execute(statement, values).first()
        except exc.DBAPIError as error:
            if self._waited_for_same_id(error):
                raise HeldByAnother from error
            raise
        return None if found is None else found[0]

    def _waited_for_same_id(self, error: exc.DBAPIError) -> bool:
        # 55P03 comes from any lock; only the wait for a tuple of our index carries the inbox in its context.
        diagnostics = getattr(error.orig, "diag", None)
        context = getattr(diagnostics, "context", None) or ""
        return getattr(error.orig, "sqlstate", None) == "55P03" and self.tables.inbox.name in context


class SqliteDialect(ClaimDialect):
    """SQLite: one writer at a time, so nobody ever holds the same id elsewhere; a busy database is a retry."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        columns = ", ".join(_INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in _INBOX_COLUMNS)
        self._claim = text(
            f"INSERT INTO {_qualified(tables.inbox)} ({columns}) VALUES ({values}) "
            "ON CONFLICT (consumer_id, message_key) DO NOTHING"
        ).bindparams(*_typed(_INBOX_TYPES))

    def begin(self, connection: Connection) -> None:
        """Take the write lock first: a transaction that reads and then writes may find its snapshot outdated."""
        if not getattr(connection.connection.dbapi_connection, "in_transaction", False):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        super().begin(connection)

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT; the write lock is ours."""
        del wait
        return True if connection.execute(self._claim, row).rowcount == 1 else None


class MysqlDialect(ClaimDialect):
    """MySQL: INSERT IGNORE without RETURNING. Also runs on MariaDB."""

    rolls_back_before_reading = True

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        columns = ", ".join(_INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in _INBOX_COLUMNS)
        self._claim_text = f"INSERT IGNORE INTO {_qualified(tables.inbox)} ({columns}) VALUES ({values})"
        self._claim = text(self._claim_text).bindparams(*_typed(_INBOX_TYPES))
        self._probe = text(
            f"SELECT 1 FROM {_qualified(tables.inbox)} WHERE consumer_id = :consumer_id AND message_key = :message_key "
            "FOR UPDATE NOWAIT"
        ).bindparams(bindparam("message_key", type_=KeyType()))

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT IGNORE between two settings of the lock wait; what it ignored is found out by reading."""
        former = connection.info.get("idemp_lock_wait")
        if former is None:
            former = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one()
            connection.info["idemp_lock_wait"] = former
        connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {_seconds(wait)}")
        try:
            return self._insert(connection, self._claim, row)
        finally:
            if not connection.invalidated:
                connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {int(former)}")

    def _insert(self, connection: Connection, statement: Executable, row: Mapping[str, Any]) -> object | None:
        try:
            return True if connection.execute(statement, row).rowcount == 1 else None
        except exc.DBAPIError as error:
            if failures.mysql_code(error.orig) == _LOCK_WAIT and self._is_held(connection, row):
                raise HeldByAnother from error
            raise

    def _is_held(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        # A lock wait may also be for a gap or a neighbour; only a lock on the row itself is somebody with the same id.
        key = {"consumer_id": row["consumer_id"], "message_key": row["message_key"]}
        try:
            connection.execute(self._probe, key)
        except exc.DBAPIError as error:
            return failures.mysql_code(error.orig) in {_LOCK_WAIT, _LOCK_NOWAIT}
        return False


class MariadbDialect(MysqlDialect):
    """MariaDB: the lock wait is part of the statement, so that a claim is one round trip."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._by_wait: dict[int, Executable] = {}

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT IGNORE."""
        seconds = _seconds(wait)
        statement = self._by_wait.get(seconds)
        if statement is None:
            prefix = f"SET STATEMENT innodb_lock_wait_timeout={seconds} FOR "
            statement = self._by_wait[seconds] = text(prefix + self._claim_text).bindparams(*_typed(_INBOX_TYPES))
        return self._insert(connection, statement, row)


_LOCK_WAIT: Final = 1205
_LOCK_NOWAIT: Final = 3572

_OUTPUT_ARRAYS: Final = {
    "output_ids": postgresql.ARRAY(postgresql.UUID(as_uuid=True)),
    "ordinals": postgresql.ARRAY(Integer()),
    "kinds": postgresql.ARRAY(Text()),
    "exchanges": postgresql.ARRAY(Text()),
    "routing_keys": postgresql.ARRAY(Text()),
    "envelopes": postgresql.ARRAY(Text()),
    "bodies": postgresql.ARRAY(LargeBinary()),
}


def dialect_for(dialect: SqlAlchemyDialect, tables: Tables, *, without_returning: bool = False) -> ClaimDialect:
    """The claim dialect of an engine.

    Args:
        dialect: the engine's.
        tables: where the inbox lives.
        without_returning: take MySQL's path on MariaDB, too.

    Raises:
        ConfigurationError: a database, or a driver, that idemp does not know.
    """
    match dialect.name, dialect.driver:
        case "postgresql", "psycopg":
            return PostgresDialect(tables)
        case "sqlite", "pysqlite":
            return SqliteDialect(tables)
        case (("mysql" | "mariadb"), "pymysql" | "mysqldb" | "mysqlconnector" | "mariadbconnector"):
            is_mariadb = getattr(dialect, "is_mariadb", False) and not without_returning
            return MariadbDialect(tables) if is_mariadb else MysqlDialect(tables)
    raise ConfigurationError(
        f"idemp does not know the database driver {dialect.name}+{dialect.driver}.",
        fix="Use postgresql+psycopg://, mysql+pymysql://, mariadb+pymysql:// or sqlite://.",
    )


def _qualified(table: Any) -> str:
    return f"{table.schema}.{table.name}" if table.schema else str(table.name)


def _one_line(statement: str) -> str:
    return " ".join(statement.split())


def _typed(types: Mapping[str, Any]) -> list[Any]:
    return [bindparam(name, type_=kind) for name, kind in types.items()]


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


def _seconds(wait: timedelta) -> int:
    return max(1, math.ceil(wait.total_seconds()))
