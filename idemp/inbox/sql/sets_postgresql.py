"""Messages of one type by the thousand on PostgreSQL: they are copied there once, and all that follows are statements.

```
COPY ─► stage ── INSERT … SELECT … ON CONFLICT DO NOTHING RETURNING ─► inbox, ours ── effects and outputs of both ── COMMIT
```

`stage` and `ours` are temporary tables, made once per connection and emptied by each COMMIT; `idemp_fresh` shows what is in
both. A unit of work as any other: the proof that COMMIT ends the claims' own transaction is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from psycopg import Error as PsycopgError

from idemp.context import MAX_OUTPUTS
from idemp.errors import OutputError, TransientStoreError
from idemp.identity import output_beginning
from idemp.inbox.sql import failures, simple_query
from idemp.inbox.sql.claiming import INBOX_COLUMNS, qualified
from idemp.inbox.sql.simple_query import integer, moment, octets, words
from idemp.inbox.sql.unit import SqlUnit
from idemp.messages import CAUSATION_HEADER, HOPS_HEADER, JSON_CONTENT_TYPE

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from idemp.inbox.sql.claim_postgresql import PostgresDialect
    from idemp.inbox.sql.store import SqlStore
    from idemp.work import Consumer

FRESH: Final = "idemp_fresh"
STAGED: Final[Mapping[str, str]] = {
    "place": "integer",
    "message_key": "uuid",
    "fingerprint": "bytea",
    "original_id": "text",
    "source_position": "text",
    "id": "text",
    "body": "bytea",
    "headers": "text",
    "time": "timestamptz",
    "carried": "text",  # headers of its outputs, where they are not those of a message without any
}
"""Columns of the stage, in their order."""

_CLAIM_ATTEMPTS: Final = 5
_JSON_TYPES: Final = {114, 3802}  # json, jsonb
# OFFSET 0 keeps the body from being parsed once more for each value that is taken out of it.
_MAKE: Final = f"""
    DO $$ BEGIN
        IF to_regclass('pg_temp.{FRESH}') IS NULL THEN
            CREATE TEMPORARY TABLE idemp_stage ({", ".join(f"{name} {kind}" for name, kind in STAGED.items())})
                ON COMMIT DELETE ROWS;
            CREATE TEMPORARY TABLE idemp_ours (message_key uuid) ON COMMIT DELETE ROWS;
            CREATE TEMPORARY VIEW {FRESH} AS
                SELECT place, id, body, convert_from(body, 'UTF8')::jsonb AS payload, headers, time
                FROM pg_temp.idemp_stage JOIN pg_temp.idemp_ours USING (message_key) OFFSET 0;
        END IF;
    END $$
"""
# What the planner takes unknown tables for makes it compile statements for seconds that run for milliseconds.
_WITHOUT_JIT: Final = "SET LOCAL jit = off"
_ANALYZE: Final = "ANALYZE pg_temp.idemp_stage (place, message_key); ANALYZE pg_temp.idemp_ours"
_COPY: Final = f"COPY pg_temp.idemp_stage ({', '.join(STAGED)}) FROM STDIN (FORMAT BINARY)"


@dataclass(frozen=True, slots=True)
class Found:
    """What the claims of a set came to.

    Attributes:
        new: how many are ours.
        replays: how many were claimed before from the same source position.
        duplicates: how many were claimed before otherwise.
        conflicts: the places of those that were claimed with another payload, or share a digest with another id.
    """

    new: int
    replays: int = 0
    duplicates: int = 0
    conflicts: tuple[int, ...] = ()


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
        self._consumer_id, self._type_id = names.id("consumer", consumer), names.id("message_type", message_type)
        self._worker_id, self._now = names.id("worker", store.worker), store.clock.now()
        self._keys: bytes = b""
        self._places: Sequence[int] = ()
        self._columns: dict[str, dict[str, int]] = {}

    def stage(self, rows: bytes, keys: bytes, places: Sequence[int]) -> None:
        """Copy messages to the server, each key once.

        Args:
            rows: in the format of a binary COPY, with the columns of `STAGED`, in the order of their keys.
            keys: the same keys, one after the other.
            places: the same rows' places.
        """
        with self._translated():
            # Before the transaction begins: a rollback would take the tables along.
            simple_query.run(self._connection, _one_line(self._making)).all()
            beginning = simple_query.begin(self._connection)
            if beginning is None:
                self._connection.exec_driver_sql(_WITHOUT_JIT)  # has psycopg begin it in its own way
            else:
                simple_query.run(self._connection, beginning + _WITHOUT_JIT).all()
            driver: Any = self._connection.connection.driver_connection
            try:
                with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
                    copy.write(rows)
            except PsycopgError as error:
                raise failures.told(self._connection, error) from error
        self._keys, self._places = keys, places

    def claim_staged(self, wait: timedelta) -> Found:
        """Claim all of them; what is taken is judged by what stands there.

        Raises:
            HeldByAnother: somebody else holds one of them.
            TransientStoreError: conflicts had gone when they were read, time and again.
        """
        new = 0
        with self._translated():
            for attempt in range(_CLAIM_ATTEMPTS):
                new += self._claim_once(wait, again=attempt > 0)
                found = self._judged(new)
                if found is not None:
                    return found
        raise TransientStoreError("Claims' conflicts had gone when they were read; the chunk starts over.")

    def look_staged(self) -> Found:
        """What `claim_staged` would come to now, by reading alone."""
        with self._translated():
            found = self._read()
        return Found(found[0], *found[1:3], tuple(found[3]))

    def run_statements(self, statements: Sequence[str]) -> None:
        """Run the user's statements over `idemp_fresh`, as they stand."""
        simple_query.run(self._connection, _ANALYZE).all()
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
        if self._broken is not None:
            raise self._broken
        queue = "nullif(queue::text, '')" if "queue" in self._described(outputs) else "NULL::text"
        statement = self._storing(outputs, queue, consumer, due)
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

    @property
    def _making(self) -> str:
        """What makes the temporary tables, and sees that they are empty."""
        return _MAKE

    # Statements -----------------------------------------------------------------------------------------------------

    def _claim_once(self, wait: timedelta, *, again: bool) -> int:
        """Claim what is not ours; how many are now."""
        left = (
            "WHERE NOT EXISTS (SELECT FROM pg_temp.idemp_ours o WHERE o.message_key = s.message_key)" if again else ""
        )
        statement = f"""
            WITH claimed AS (
                INSERT INTO {self._inbox} ({", ".join(INBOX_COLUMNS)})
                SELECT message_key, {integer(self._consumer_id)}, {integer(self._type_id)}, {integer(self._worker_id)},
                    {moment(self._now)}, fingerprint, original_id, source_position
                FROM pg_temp.idemp_stage s {left} ORDER BY message_key
                ON CONFLICT (consumer_id, message_key) DO NOTHING RETURNING message_key
            ), ours AS (INSERT INTO pg_temp.idemp_ours SELECT message_key FROM claimed RETURNING message_key)
            SELECT count(*), txid_current() FROM ours
        """
        inserted = self._dialect.waited_for(self._connection, _one_line(statement), wait)
        assert inserted is not None  # noqa: S101 - the transaction is open
        self._token = int(inserted.get_value(0, 1) or b"")
        return int(inserted.get_value(0, 0) or b"")

    def _judged(self, new: int) -> Found | None:
        """What the others came to; `None` if some of them are nobody's."""
        if new == len(self._places):
            self._note_ours(())
            return Found(new)
        gone, replays, duplicates, conflicts, others = self._read()
        if gone:
            return None
        self._note_ours(others)
        return Found(new, replays, duplicates, tuple(conflicts))

    def _note_ours(self, others: Sequence[int]) -> None:
        """What is to be looked for if a handler ends the transaction: not what is somebody else's."""
        self._rows = _Rows(self._keys, self._places, frozenset(others), self._consumer_id, self._worker_id, self._now)

    def _read(self) -> tuple[int, int, int, Sequence[int], Sequence[int]]:
        """Of those that are not ours: how many nobody has, replays, duplicates, places of conflicts, and all places."""
        # A nested loop whatever the planner thinks of a table that it knows nothing about: the inbox may be large.
        statement = f"""
            SELECT count(*) FILTER (WHERE kind = 'gone'), count(*) FILTER (WHERE kind = 'replay'),
                count(*) FILTER (WHERE kind = 'duplicate'),
                coalesce(array_agg(place ORDER BY place) FILTER (WHERE kind = 'conflict'), ARRAY[]::int[]),
                coalesce(array_agg(place), ARRAY[]::int[])
            FROM (
                SELECT s.place, CASE
                    WHEN i.message_key IS NULL THEN 'gone'
                    WHEN coalesce(i.original_id, i.message_key::text) <> coalesce(s.original_id, s.message_key::text)
                        THEN 'conflict'
                    WHEN substr(i.fingerprint, 1, 3) = substr(s.fingerprint, 1, 3) AND i.fingerprint <> s.fingerprint
                        THEN 'conflict'
                    WHEN i.source_position = s.source_position THEN 'replay'
                    ELSE 'duplicate' END AS kind
                FROM pg_temp.idemp_stage s
                LEFT JOIN LATERAL (
                    SELECT message_key, original_id, fingerprint, source_position FROM ONLY {self._inbox}
                    WHERE consumer_id = {integer(self._consumer_id)} AND message_key = s.message_key OFFSET 0
                ) i ON true
                WHERE NOT EXISTS (SELECT FROM pg_temp.idemp_ours o WHERE o.message_key = s.message_key)
            ) judged
        """
        row = self._connection.exec_driver_sql(statement, execution_options={"no_parameters": True}).one()
        return tuple(row)

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

    def _storing(self, outputs: str, queue: str, consumer: Consumer, due: datetime | None) -> str:
        beginning = octets(output_beginning(consumer.namespace, consumer.name))
        cause = "coalesce(s.id, s.original_id, s.message_key::text)"
        carried = f"coalesce(s.carried::json, json_build_object('{CAUSATION_HEADER}', {cause}, '{HOPS_HEADER}', 1))"
        waiting = "SELECT 1 WHERE false"
        if due is not None:
            waiting = f"""
                INSERT INTO {self._pending} (output_id, ordinal, consumer_id, message_key, attempts, due_at)
                SELECT output_id, ordinal, {integer(self._consumer_id)}, message_key, 0, {moment(due)} FROM stored
            """
        # `identity.output_id`, word for word: a digest, with the time of the input's key where that carries one.
        return f"""
            WITH selected AS MATERIALIZED (
                SELECT row_number() OVER () AS number, place, type::text AS type, body::text AS body, {queue} AS queue
                FROM ({outputs}) AS output
            ), numbered AS (
                SELECT s.message_key, {cause} AS cause, {carried} AS headers, o.type, o.body, o.queue,
                    (row_number() OVER (PARTITION BY o.place ORDER BY o.number) - 1)::int AS ordinal
                FROM selected o JOIN pg_temp.idemp_stage s USING (place) JOIN pg_temp.idemp_ours USING (message_key)
            ), digested AS (
                SELECT *, uuid_send(message_key) AS key, sha256(
                    {beginning} || decode('7500000010', 'hex') || uuid_send(message_key) || decode('69', 'hex')
                    || int4send(length(ordinal::text)) || convert_to(ordinal::text, 'UTF8')
                ) AS digest FROM numbered
            ), identified AS (
                SELECT *, encode(CASE WHEN {_CARRIES_TIME}
                    THEN substr(key, 1, 6) || set_byte(set_byte(
                        substr(digest, 7, 10), 0, (get_byte(digest, 6) & 15) | 112), 2, (get_byte(digest, 8) & 63) | 128)
                    ELSE set_byte(set_byte(
                        substr(digest, 1, 16), 6, (get_byte(digest, 6) & 15) | 128), 8, (get_byte(digest, 8) & 63) | 128)
                    END, 'hex')::uuid AS output_id FROM digested
            ), stored AS (
                INSERT INTO {self._output}
                    (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
                SELECT output_id, message_key, {integer(self._consumer_id)}, ordinal,
                    CASE WHEN queue IS NULL THEN 'publish' ELSE 'send' END,
                    CASE WHEN queue IS NULL THEN {words(consumer.exchange)} ELSE '' END, coalesce(queue, type),
                    json_build_object('type', type, 'content_type', '{JSON_CONTENT_TYPE}', 'correlation_id', cause,
                        'headers', headers, 'mandatory', true, 'delay', 0.0)::text,
                    convert_to(body, 'UTF8')
                FROM identified ORDER BY message_key, ordinal
                RETURNING output_id, ordinal, message_key, octet_length(body) AS size
            ), waiting AS ({waiting})
            SELECT (SELECT count(*) FROM selected) AS selected, count(*) AS stored, max(size) AS size,
                max(ordinal) AS last, txid_current() AS token
            FROM stored
        """


# What `identity.time_of` takes for a time: of a UUIDv7, up to the end of Python's calendar.
_CARRIES_TIME: Final = (
    "get_byte(key, 6) >> 4 = 7 AND get_byte(key, 8) >> 6 = 2 AND substr(key, 1, 6) < decode('e677d21fdc00', 'hex')"
)


class _Rows(Sequence[Mapping[str, Any]]):
    """Claims as rows, made when somebody asks: nobody does unless a handler may have ended the transaction.

    Args:
        keys: sixteen bytes each.
        places: of the same rows.
        others: the places of those that are not ours.
        consumer_id: of all of them.
        worker_id: of all of them.
        now: when all of them are claimed.
    """

    def __init__(
        self,
        keys: bytes,
        places: Sequence[int],
        others: frozenset[int],
        consumer_id: int,
        worker_id: int,
        now: datetime,
    ) -> None:
        self._keys, self._places, self._others = keys, places, others
        self._common = {"consumer_id": consumer_id, "worker_id": worker_id, "claimed_at": now}

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


def _one_line(statement: str) -> str:
    return " ".join(statement.split())
