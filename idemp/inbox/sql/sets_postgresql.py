"""Messages of one type by the thousand on PostgreSQL: they are copied there once, and all that follows are statements.

```
COPY ─► stage ── INSERT … SELECT … ON CONFLICT DO NOTHING ─► inbox ── what is not ours leaves the stage ── effects, outputs
```

The stage is a temporary table, made where the server connection has none, and emptied by each COMMIT; `idemp_fresh` shows
what is on it. A unit of work as any other: the proof that COMMIT ends the claims' own transaction is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from psycopg import Error as PsycopgError

from idemp.emitting import MAX_OUTPUTS
from idemp.errors import OutputError, TransientStoreError
from idemp.inbox.sql import failures, simple_query
from idemp.inbox.sql import sets_statements as sql
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.unit import SqlUnit

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from psycopg.pq.abc import PGresult

    from idemp.inbox.sql.claim_postgresql import PostgresDialect
    from idemp.inbox.sql.store import SqlStore
    from idemp.work import Consumer

_CLAIM_ATTEMPTS: Final = 5
_JSON_TYPES: Final = {114, 3802}  # json, jsonb


@dataclass(frozen=True, slots=True)
class Found:
    """What the claims of a set came to.

    Attributes:
        new: how many are ours.
        replays: how many were claimed before from the same source position.
        duplicates: how many were claimed before otherwise.
        conflicts: the places of those that were claimed with another payload or under another type's name, or share a
            digest with another id.
        others: the places of all that are not ours.
    """

    new: int
    replays: int = 0
    duplicates: int = 0
    conflicts: Sequence[int] = ()
    others: Sequence[int] = ()


class SetUnit(SqlUnit):
    """A unit of work for messages of one type. Made by `SqlStore.begin_set`, used by one thread, never twice."""

    def __init__(self, store: SqlStore, consumer: str, message_type: str) -> None:
        super().__init__(store)
        self._dialect = cast("PostgresDialect", store.dialect)
        self._consumer = consumer
        self._type = message_type
        self._inbox, self._output, self._pending = map(
            qualified, (store.tables.inbox, store.tables.output, store.tables.pending)
        )
        names = store.names
        self._ids = (
            names.id("consumer", consumer),
            names.id("message_type", message_type),
            names.id("worker", store.worker),
        )
        self._now = store.clock.now()
        self._keys: bytes = b""
        self._places: Sequence[int] = ()
        self._others: list[int] = []
        self._columns: dict[str, dict[str, int]] = {}

    def stage(self, rows: bytes, columns: Sequence[str], keys: bytes, places: Sequence[int]) -> None:
        """Copy messages to the server, each key once.

        Args:
            rows: in the format of a binary COPY, in the order of their keys.
            columns: which of `STAGED` they have.
            keys: the same keys, one after the other.
            places: the same rows' places.
        """
        with self._translated():
            beginning = simple_query.begin(self._connection)
            if beginning is None:
                self._connection.exec_driver_sql(sql.WITHOUT_JIT)  # has psycopg begin it in its own way
                beginning = ""
            # Inside of the transaction: behind a pooler the next one may have another server connection. A rollback takes
            # the table along, and the next chunk makes it again.
            making = self._making(sql.MAKE, sql.STAGE)
            simple_query.run(self._connection, f"{beginning}{sql.WITHOUT_JIT}; {making}").all()
            self._copy(sql.copy(sql.STAGE, columns), rows)
        self._keys, self._places = keys, places

    def claim_staged(self, wait: timedelta, meanwhile: Callable[[], None] | None = None) -> Found:
        """Claim all of them; what is taken is judged by what stands there.

        Args:
            wait: for somebody else who holds one of them.
            meanwhile: called while the server is at work.

        Raises:
            HeldByAnother: somebody else holds one of them.
            TransientStoreError: conflicts had gone when they were read, time and again.
        """
        new = replays = duplicates = 0
        conflicts: list[int] = []
        left: list[int] | None = None
        self._others = []
        with self._translated():
            for _ in range(_CLAIM_ATTEMPTS):
                statement = sql.claim(self._inbox, *self._ids, self._now, left)
                claimed = self._dialect.waited_for(self._connection, statement, wait, meanwhile)
                assert claimed is not None  # noqa: S101 - the transaction is open
                ours, token, again, others, *listed = _values(claimed)
                self._token = int(token)
                gone, parted, taken = map(_numbers, listed)
                new, replays, duplicates = new + int(ours), replays + int(again), duplicates + int(others)
                conflicts += parted
                self._others += taken
                if not gone:
                    self._note_ours()
                    return Found(new, replays, duplicates, sorted(conflicts), self._others)
                # Committed after this statement began to read, or purged: nobody's only if nobody has it now.
                left = gone
        raise TransientStoreError("Claims' conflicts had gone when they were read; the chunk starts over.")

    def _note_ours(self) -> None:
        """What is to be looked for if a handler ends the transaction."""
        consumer_id, _, worker_id = self._ids
        common = {"consumer_id": consumer_id, "worker_id": worker_id, "claimed_at": self._now}
        self._rows = _Rows(self._keys, self._places, frozenset(self._others), common)

    def look_staged(self) -> Found:
        """What `claim_staged` would come to now, by reading alone."""
        with self._translated():
            (looked,) = simple_query.run(self._connection, sql.look(self._inbox, *self._ids[:2])).all()
        replays, duplicates, *listed = _values(looked)
        nobodys, conflicts, _ = map(_numbers, listed)
        return Found(len(nobodys), int(replays), int(duplicates), conflicts)

    def leave_fresh(self) -> None:
        """Have the stage show what is ours, and nothing else."""
        simple_query.run(self._connection, sql.drop(self._others) + sql.ANALYZE).all()

    def run_statements(self, statements: Sequence[str]) -> None:
        """Run the user's statements over `idemp_fresh`, as they stand."""
        for statement in statements:
            self._connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    def can_store(self, outputs: str) -> bool:
        """Whether what a SELECT over `idemp_fresh` names can be stored without leaving the server."""
        columns = self._described(outputs)
        return {"place", "type"} <= columns.keys() <= {"place", "type", "body", "queue"} and columns.get(
            "body"
        ) in _JSON_TYPES

    def store_selected(self, outputs: str, consumer: Consumer, due: datetime | None) -> int:
        """Store what a SELECT over `idemp_fresh` names, under the ids that handlers' outputs have; how many there are.

        Raises:
            OutputError: one belongs to no new message, or is too large, or there are too many.
        """
        selected = sql.select(outputs, queues="queue" in self._described(outputs))
        return self._store_all(selected, consumer, due)

    def copy_outputs(self, rows: bytes) -> None:
        """Copy outputs that a function emitted to the server: their number, place, type, body and queue."""
        with self._translated():
            simple_query.run(self._connection, self._making(sql.MAKE_EMITTED, sql.EMITTED)).all()
            self._copy(sql.copy(sql.EMITTED, ["number", "place", "type", "body", "queue"]), rows)

    def store_copied(self, consumer: Consumer, due: datetime | None) -> int:
        """Store what was copied, as `store_selected` does."""
        return self._store_all(sql.COPIED, consumer, due)

    def _store_all(self, selected: str, consumer: Consumer, due: datetime | None) -> int:
        if self._broken is not None:
            raise self._broken
        statement = sql.store(
            self._output,
            self._pending,
            selected,
            consumer,
            self._ids[0],
            now=self._now,
            due=due,
            broker_id=self._store.broker_id,
        )
        found = self._connection.exec_driver_sql(statement, execution_options={"no_parameters": True}).one()
        if found.selected != found.stored:
            raise OutputError("An output belongs to a place where no new message is.", fix="Select place as it is.")
        if (found.size or 0) > consumer.max_body_bytes or (found.last or 0) >= MAX_OUTPUTS:
            raise OutputError(
                f"An output is larger than {consumer.max_body_bytes} bytes, or a message has more than {MAX_OUTPUTS}.",
                fix="Send references instead, or split the work.",
            )
        self._stored = found.token
        return int(found.stored)

    def _making(self, statement: str, table: str) -> str:
        """What makes a temporary table by this statement, and sees that it is empty."""
        del table  # each COMMIT empties it
        return sql.one_line(statement)

    def _copy(self, statement: str, rows: bytes) -> None:
        driver: Any = self._connection.connection.driver_connection
        try:
            with driver.cursor() as cursor, cursor.copy(statement) as copy:
                copy.write(rows)
        except PsycopgError as error:
            raise failures.told(self._connection, error) from error

    def _described(self, outputs: str) -> dict[str, int]:
        """The columns of a SELECT, and the server's number of each one's type."""
        if outputs in self._columns:
            return self._columns[outputs]
        found = self._connection.exec_driver_sql(
            f"SELECT * FROM ({outputs}) AS output LIMIT 0", execution_options={"no_parameters": True}
        )
        description: Any = found.cursor.description
        self._columns[outputs] = {column.name: column.type_code for column in description}
        return self._columns[outputs]


class _Rows(Sequence[Mapping[str, Any]]):
    """Claims as rows, made when somebody asks: nobody does unless a handler may have ended the transaction.

    Args:
        keys: sixteen bytes each.
        places: of the same rows.
        others: the places of those that are not ours.
        common: what is the same in all of them.
    """

    def __init__(self, keys: bytes, places: Sequence[int], others: frozenset[int], common: Mapping[str, Any]) -> None:
        self._keys, self._places, self._others, self._common = keys, places, others, common

    @cached_property
    def _made(self) -> list[Mapping[str, Any]]:
        return [
            {"message_key": UUID(bytes=self._keys[16 * number : 16 * number + 16]), **self._common}
            for number, place in enumerate(self._places)
            if place not in self._others
        ]

    def __len__(self) -> int:
        return len(self._places) - len(self._others)

    def __getitem__(self, place: Any) -> Any:
        return self._made[place]


def _values(answer: PGresult) -> list[bytes]:
    """The only row; a NULL is empty."""
    return [answer.get_value(0, column) or b"" for column in range(answer.nfields)]


def _numbers(array: bytes) -> list[int]:
    """Of an array of integers, as text."""
    return [int(each) for each in array.strip(b"{}").split(b",") if each]
