"""What `sets_postgresql` says to the server: SQL over `idemp_stage`, a temporary table with a row for each message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.identity import output_beginning
from idemp.inbox.sql.claiming import INBOX_COLUMNS
from idemp.inbox.sql.simple_query import integer, moment, octets, words
from idemp.messages import CAUSATION_HEADER, HOPS_HEADER, JSON_CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from idemp.work import Consumer

FRESH: Final = "idemp_fresh"
STAGE: Final = "pg_temp.idemp_stage"
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

# OFFSET 0 keeps the body from being parsed once more for each value that is taken out of it. Three hundred rows tell the
# planner all that it has to know of the stage: how many rows there are, and that each place stands there once.
MAKE: Final = f"""
    DO $$ BEGIN
        IF to_regclass('pg_temp.{FRESH}') IS NULL THEN
            CREATE TEMPORARY TABLE idemp_stage ({", ".join(f"{name} {kind}" for name, kind in STAGED.items())})
                ON COMMIT DELETE ROWS;
            ALTER TABLE {STAGE} ALTER COLUMN place SET STATISTICS 1;
            CREATE TEMPORARY VIEW {FRESH} AS
                SELECT place, id, body, convert_from(body, 'UTF8')::jsonb AS payload, headers, time
                FROM {STAGE} OFFSET 0;
        END IF;
    END $$
"""
EMITTED: Final = "pg_temp.idemp_emitted"
MAKE_EMITTED: Final = """
    CREATE TEMPORARY TABLE IF NOT EXISTS idemp_emitted (number integer, place integer, type text, body text, queue text)
        ON COMMIT DELETE ROWS
"""
# What the planner takes unknown tables for makes it compile statements for seconds that run for milliseconds.
WITHOUT_JIT: Final = "SET LOCAL jit = off"
ANALYZE: Final = f"ANALYZE {STAGE} (place)"
# A nested loop whatever the planner thinks of a table that it knows nothing about: the inbox may be large. The second
# OFFSET 0 keeps a row from being judged anew in each count.
_JUDGED: Final = f"""
    SELECT s.place, CASE
        WHEN i.message_key IS NULL THEN 'gone'
        WHEN coalesce(i.original_id, i.message_key::text) <> coalesce(s.original_id, s.message_key::text) THEN 'conflict'
        WHEN i.type_id <> %s THEN 'conflict'
        WHEN substr(i.fingerprint, 2, 2) = substr(s.fingerprint, 2, 2)
            AND substr(i.fingerprint, 4) <> substr(s.fingerprint, 4) THEN 'conflict'
        WHEN i.source_position = s.source_position THEN 'replay'
        ELSE 'duplicate' END AS kind
    FROM {STAGE} s
    LEFT JOIN LATERAL (
        SELECT message_key, type_id, original_id, fingerprint, source_position FROM ONLY %s
        WHERE consumer_id = %s AND message_key = s.message_key OFFSET 0
    ) i ON true
    WHERE %s OFFSET 0
"""
_NOT_OURS: Final = "NOT EXISTS (SELECT FROM claimed c WHERE c.message_key = s.message_key)"
_COUNTED: Final = """
    count(*) FILTER (WHERE kind = 'replay'), count(*) FILTER (WHERE kind = 'duplicate'),
    array_agg(place) FILTER (WHERE kind = 'gone'), array_agg(place ORDER BY place) FILTER (WHERE kind = 'conflict'),
    array_agg(place) FILTER (WHERE kind <> 'gone')
"""
# What `identity.time_of` takes for a time: of a UUIDv7, up to the end of Python's calendar.
_CARRIES_TIME: Final = (
    "get_byte(key, 6) >> 4 = 7 AND get_byte(key, 8) >> 6 = 2 AND substr(key, 1, 6) < decode('e677d21fdc00', 'hex')"
)


def copy(table: str, columns: Iterable[str]) -> str:
    """What takes those columns of rows.

    Example:
        >>> copy(STAGE, ["place", "message_key"])
        'COPY pg_temp.idemp_stage (place, message_key) FROM STDIN (FORMAT BINARY)'
    """
    return f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)"


def drop(places: Sequence[int]) -> str:
    """Take rows off the stage.

    Example:
        >>> drop([3, 4])
        "DELETE FROM pg_temp.idemp_stage WHERE place = ANY ('{3,4}'::int[]); "
    """
    return f"DELETE FROM {STAGE} WHERE place = ANY ({_array(places)}); " if places else ""


def claim(
    inbox: str, consumer_id: int, type_id: int, worker_id: int, now: datetime, places: Sequence[int] | None
) -> str:
    """Claim what is on the stage, or some of it, and judge by what stands there what is taken.

    Answers how many are ours, the transaction, how many replays and duplicates there are, and the places of those that
    nobody has (as far as this statement sees), of conflicts, and of all that are somebody else's.
    """
    some = "true" if places is None else f"s.place = ANY ({_array(places)})"
    return one_line(f"""
        WITH claimed AS (
            INSERT INTO {inbox} ({", ".join(INBOX_COLUMNS)})
            SELECT message_key, {integer(consumer_id)}, {integer(type_id)}, {integer(worker_id)}, {moment(now)},
                fingerprint, original_id, source_position
            FROM {STAGE} s WHERE {some} ORDER BY message_key
            ON CONFLICT (consumer_id, message_key) DO NOTHING RETURNING message_key
        ), judged AS (
            {_JUDGED % (integer(type_id), inbox, integer(consumer_id), f"{some} AND {_NOT_OURS}")}
        )
        SELECT (SELECT count(*) FROM claimed), txid_current(), {_COUNTED} FROM judged
    """)


def look(inbox: str, consumer_id: int, type_id: int) -> str:
    """What `claim` would answer, from the number of replays on; those that nobody has would be ours."""
    return one_line(
        f"SELECT {_COUNTED} FROM ({_JUDGED % (integer(type_id), inbox, integer(consumer_id), 'true')}) judged"
    )


def store(
    output: str,
    pending: str,
    selected: str,
    consumer: Consumer,
    consumer_id: int,
    *,
    now: datetime,
    due: datetime | None,
    broker_id: int | None,
) -> str:
    """Store outputs that a SELECT names, and that they are pending if they are ever due.

    Answers how many it named, how many were stored, the size of the largest, the highest ordinal, and the transaction.
    """
    beginning = octets(output_beginning(consumer.namespace, consumer.name))
    waiting = "SELECT 1 WHERE false"
    if due is not None:
        waiting = f"""
            INSERT INTO {pending} (output_id, ordinal, consumer_id, message_key, attempts, due_at, broker_id)
            SELECT output_id, ordinal, {integer(consumer_id)}, message_key, 0, {moment(due)}, {integer(broker_id)}
            FROM stored
        """
    # `identity.output_id`, word for word: a digest, with the time of the input's key where that carries one. OFFSET 0
    # keeps it from being made anew wherever it is named. Envelopes are `Output.envelope`, put together as text: the
    # server's functions for JSON take as long as the INSERT.
    return f"""
        WITH selected AS MATERIALIZED ({selected}), numbered AS (
            SELECT s.message_key, coalesce(s.id, s.original_id, s.message_key::text) AS cause, s.carried,
                o.type, o.body, o.queue,
                (row_number() OVER (PARTITION BY s.message_key ORDER BY o.number) - 1)::int AS ordinal
            FROM selected o JOIN {STAGE} s USING (place)
        ), digested AS (
            SELECT *, uuid_send(message_key) AS key, to_json(cause)::text AS told, sha256(
                {beginning} || decode('7500000010', 'hex') || uuid_send(message_key) || decode('69', 'hex')
                || int4send(length(ordinal::text)) || convert_to(ordinal::text, 'UTF8')
            ) AS digest FROM numbered OFFSET 0
        ), stored AS (
            INSERT INTO {output}
                (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
            SELECT encode(CASE WHEN {_CARRIES_TIME}
                    THEN substr(key, 1, 6) || set_byte(set_byte(
                        substr(digest, 7, 10), 0, (get_byte(digest, 6) & 15) | 112), 2, (get_byte(digest, 8) & 63) | 128)
                    ELSE set_byte(set_byte(
                        substr(digest, 1, 16), 6, (get_byte(digest, 6) & 15) | 128), 8, (get_byte(digest, 8) & 63) | 128)
                    END, 'hex')::uuid,
                message_key, {integer(consumer_id)}, ordinal, CASE WHEN queue IS NULL THEN 'publish' ELSE 'send' END,
                CASE WHEN queue IS NULL THEN {words(consumer.exchange)} ELSE '' END, coalesce(queue, type),
                '{{"type": ' || coalesce(to_json(type)::text, 'null') || ', "content_type": "{JSON_CONTENT_TYPE}", '
                    || '"correlation_id": ' || told || ', "headers": '
                    || coalesce(carried, '{{"{CAUSATION_HEADER}": ' || told || ', "{HOPS_HEADER}": 1}}')
                    || ', "timestamp": "{now.isoformat()}", "mandatory": true, "delay": 0.0}}',
                convert_to(body, 'UTF8')
            FROM digested ORDER BY message_key
            RETURNING output_id, ordinal, message_key, octet_length(body) AS size
        ), waiting AS ({waiting})
        SELECT (SELECT count(*) FROM selected) AS selected, count(*) AS stored, max(size) AS size,
            max(ordinal) AS last, txid_current() AS token
        FROM stored
    """


def select(outputs: str, *, queues: bool) -> str:
    """What a SELECT over `idemp_fresh` names, numbered, for `store`."""
    queue = "nullif(queue::text, '')" if queues else "NULL::text"
    return (
        f"SELECT row_number() OVER () AS number, place, type::text AS type, body::text AS body, {queue} AS queue "
        f"FROM ({outputs}) AS output"
    )


COPIED: Final = f"SELECT number, place, type, body, nullif(queue, '') AS queue FROM {EMITTED}"
"""Outputs that a function emitted, for `store`."""


def one_line(statement: str) -> str:
    """A statement of idemp's own, as logs show it best."""
    return " ".join(statement.split())


def _array(places: Sequence[int]) -> str:
    return f"'{{{','.join(map(str, map(int, places)))}}}'::int[]"
