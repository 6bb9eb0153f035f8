"""Claiming, whatever the database: what every dialect shares, and what each has to say for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy import Delete, Integer, LargeBinary, Select, Text, bindparam, exc, insert, literal, select
from sqlalchemy.engine.default import DefaultDialect

from idemp.inbox.content import FAR_PAST
from idemp.inbox.sql import failures
from idemp.inbox.sql.engine import is_mysql
from idemp.inbox.sql.tables import KeyType, Moment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from uuid import UUID

    from sqlalchemy import BindParameter, ColumnElement, Connection, Table, TableClause
    from sqlalchemy.sql import Executable

    from idemp.inbox.sql.due import Due
    from idemp.inbox.sql.tables import Part, Tables
    from idemp.messages import Output

_ANSI: Final = DefaultDialect().identifier_preparer
SAVEPOINT: Final = "idemp_claim"
_MOST_BYTES: Final = 32 * 1024 * 1024  # of outputs in one statement
INBOX_COLUMNS: Final = (
    "message_key", "consumer_id", "type_id", "worker_id", "claimed_at", "fingerprint", "original_id", "source_position",
)  # fmt: skip
INBOX_TYPES: Final = {
    "message_key": KeyType(), "consumer_id": Integer(), "type_id": Integer(), "worker_id": Integer(),
    "claimed_at": Moment(), "fingerprint": LargeBinary(), "original_id": Text(), "source_position": Text(),
}  # fmt: skip


class HeldByAnother(Exception):
    """Another transaction holds the same id, and did not end in time.

    Attributes:
        keys: which ids of several; empty where that is not known.
    """

    def __init__(self, *keys: UUID) -> None:
        super().__init__(*keys)
        self.keys = keys


class StillWriting(Exception):
    """A statement of the handler's has rows that were not read, so that SQLite ends no transaction."""


class AnotherTransaction(Exception):
    """The one that was about to commit is not the one that holds the claim; nothing of it was committed."""


Handled = Sequence[tuple[Mapping[str, Any], Sequence["Output"]]]
"""Handlings' keys as bound values, with their outputs."""

History = Mapping["Table", Sequence[Mapping[str, Any]]]
"""Lines of history, by the table that they belong to."""


class ClaimDialect(ABC):
    """Claims in one kind of database. Built once per store: no statement is made per message."""

    proves_from_start = True
    """Whether `begin` did what `is_same_transaction` needs, or the claim (or `token`) does."""

    rolls_back_before_reading = False
    """Whether a conflict must be read in a fresh transaction, because the present snapshot may not show the winner."""

    def __init__(self, tables: Tables | Part) -> None:
        self.tables = tables
        inbox, output, pending, kind = tables.inbox, tables.output, tables.pending, tables.message_type
        stored = (
            select(
                inbox.c.message_key,
                inbox.c.original_id,
                inbox.c.fingerprint,
                inbox.c.claimed_at,
                inbox.c.source_position,
                kind.c.name.label("message_type"),
                output.c.output_id,
                output.c.ordinal,
                output.c.kind,
                output.c.exchange,
                output.c.routing_key,
                output.c.envelope,
                output.c.body,
                pending.c.due_at,
                pending.c.output_id.label("waiting"),
            )
            .select_from(
                inbox.outerjoin(kind, kind.c.id == inbox.c.type_id)
                .outerjoin(
                    output,
                    (output.c.consumer_id == inbox.c.consumer_id) & (output.c.message_key == inbox.c.message_key),
                )
                .outerjoin(pending, pending.c.output_id == output.c.output_id)
            )
            .where(inbox.c.consumer_id == bindparam("consumer_id"))
            .order_by(output.c.ordinal)
        )
        stored = only(only(stored, inbox), output)
        self.read: Executable = stored.where(inbox.c.message_key == bindparam("message_key"))
        self.read_all: Executable = stored.where(inbox.c.message_key.in_(bindparam("message_keys", expanding=True)))
        self._insert_output = insert(output)
        self._insert_pending = insert(pending)

    def begin(self, connection: Connection) -> None:
        """Start the transaction and whatever the proof needs."""
        connection.exec_driver_sql(f"SAVEPOINT {SAVEPOINT}")

    def token(self, connection: Connection) -> object | None:
        """What identifies the transaction before it has claimed anything; `None` where `begin` took care of that."""
        del connection
        return None

    def mark(self, connection: Connection) -> bool:
        """Mark a transaction in which nothing is claimed; `False` where `begin` took care of that, or nothing can."""
        del connection
        return False

    def last_marked(self, connection: Connection) -> str:
        """What proves that the transaction still has its mark and commits, for `commit_with`."""
        raise NotImplementedError

    def is_aborted(self, connection: Connection) -> bool:
        """Whether a failed statement has spoilt the transaction, so that its COMMIT would be a ROLLBACK."""
        del connection
        return False

    def is_over(self, connection: Connection) -> bool:
        """Whether the transaction has ended, as far as one can see without asking the server."""
        del connection
        return False

    def reported_settings(self, connection: Connection) -> object:
        """The session's settings of which the server reports each change by itself: no round trip."""
        del connection
        return None

    def was_committed(self, connection: Connection) -> bool | None:
        """Whether a COMMIT that was about to be sent took place; `None` where one can't see it."""
        return self.is_over(connection)

    @abstractmethod
    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """Insert the claim. A token that identifies the transaction, or `None` where the id is taken.

        Raises:
            HeldByAnother: somebody else holds it.
        """

    def claim_all(
        self, connection: Connection, rows: Sequence[Mapping[str, Any]], wait: timedelta
    ) -> tuple[object | None, frozenset[UUID] | None]:
        """Insert several claims of one consumer, which come in the order of their keys.

        Returns:
            The token as of `claim`, and which keys are ours; `None` where it is only known that not all of them are.

        Raises:
            HeldByAnother: somebody else holds one.
        """
        token, ours = None, []
        for row in rows:
            try:
                claimed = self.claim(connection, row, wait)
            except HeldByAnother as held:
                raise HeldByAnother(row["message_key"]) from held
            if claimed is not None:
                token = claimed
                ours.append(row["message_key"])
        return token, frozenset(ours)

    def store_outputs(self, connection: Connection, handled: Handled, due: Due | None) -> object | None:
        """Insert outputs, and pending rows if they are due; the transaction's token again where it comes for free."""
        rows = output_rows(handled)
        connection.execute(self._insert_output, rows)
        if due is None:
            return None
        connection.execute(self._insert_pending, [_pending_row(row, due) for row in rows])
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
            self.store_outputs(connection, [(key, outputs)], due)
        return token

    def is_same_transaction(self, connection: Connection, claimed: object | None, stored: object | None) -> bool:
        """Whether the transaction that is about to commit is the one that `begin` started."""
        del claimed, stored
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {SAVEPOINT}")
        except exc.DBAPIError as error:
            if failures.translate(error) is not None:
                raise
            return False
        return True

    def stored_literally(self, handled: Handled, due: Due | None) -> str | None:
        """What stores these outputs in a `last_message`; `None` where they had better be sent by themselves."""
        del handled, due
        return None

    def last_message(self, connection: Connection, claimed: object, stored: str = "") -> str | None:
        """What proves that the transaction is still the same, stores outputs and commits, for `commit_with`.

        `None` where these are sent one by one.
        """
        del connection, claimed, stored
        return None

    def commit_with(self, connection: Connection, last_message: str) -> None:
        """Send it; the driver's own commit, which always follows, finds nothing to do.

        Raises:
            AnotherTransaction: it is not the same.
        """
        raise NotImplementedError

    def record(self, connection: Connection, confirmed: Sequence[UUID], history: History) -> bool:
        """Record marks in a transaction of their own, in one round trip; `False` where there is no such way."""
        del connection, confirmed, history
        return False

    def is_same_rolled_back(self, connection: Connection, claimed: object | None) -> bool:
        """`is_same_transaction`, and a rollback in the same breath where that is cheaper than the driver's."""
        return self.is_same_transaction(connection, claimed, None)

    def roll_back(self, connection: Connection) -> None:  # noqa: B027 - nothing is what most of them do
        """End the transaction where that is cheaper than the driver's rollback, which always follows."""


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


def _pending_row(row: Mapping[str, Any], due: Due) -> dict[str, Any]:
    attempts, due_at, broker_id = due.of(row["kind"])
    names = ("consumer_id", "message_key", "output_id", "ordinal")
    return {**{name: row[name] for name in names}, "attempts": attempts, "due_at": due_at, "broker_id": broker_id}


def output_rows(handled: Handled) -> list[dict[str, Any]]:
    """The rows of several handlings' outputs."""
    return [output_row(output, key) for key, outputs in handled for output in outputs]


Statement = TypeVar("Statement", bound=Select[Any] | Delete)


def only(statement: Statement, table: Table) -> Statement:
    """The statement without the tables that inherit from this one."""
    hinted = (
        statement.with_hint(table, "ONLY", "postgresql")
        if isinstance(statement, Select)
        else statement.with_hint("ONLY", table, "postgresql")
    )
    return cast("Statement", hinted)


def timed(inbox: Table) -> ColumnElement[bool]:
    """True of every claim; a statement that says it may use the index on the time of the claim."""
    return inbox.c.claimed_at > literal(FAR_PAST, inbox.c.claimed_at.type)


def qualified(table: Table | TableClause, dialect: str = "postgresql") -> str:
    """Return a table's name as SQL text: the table's own is a plain identifier, its schema's is quoted where need be."""
    if not table.schema:
        return str(table.name)
    schema = f"`{table.schema.replace('`', '``')}`" if is_mysql(dialect) else _ANSI.quote(table.schema)
    return f"{schema}.{table.name}"


def typed(types: Mapping[str, Any]) -> list[BindParameter[Any]]:
    """Bound parameters with their types."""
    return [bindparam(name, type_=kind) for name, kind in types.items()]


def by_size(stored: Handled) -> Iterator[Handled]:
    """Handlings whose outputs fit into one statement: servers have a limit, which single messages keep far from."""
    part: list[tuple[Mapping[str, Any], Sequence[Output]]] = []
    size = 0
    for key, outputs in stored:
        own = sum(len(output.message.body) for output in outputs)
        if part and size + own > _MOST_BYTES:
            yield part
            part, size = [], 0
        part.append((key, outputs))
        size += own
    yield part
