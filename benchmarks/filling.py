"""An inbox of PostgreSQL that has been in use for long: rows like the newest handling's, straight into the tables."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from sqlalchemy import text

from idemp.inbox.sql import Tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Part

_AT_ONCE: Final = 100_000
_TABLES: Final = ("idemp_inbox", "idemp_output", "idemp_history")

_TIME_ORDERED: Final = """
    (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(random()::text), 1, 3)
        || '8' || substr(md5(random()::text), 1, 15))::uuid
"""
_KEYS: Final = {"time-ordered": _TIME_ORDERED, "random": "gen_random_uuid()"}

_FILL: Final = """
    WITH made AS MATERIALIZED (
        SELECT {key} AS message_key, at
        FROM (
            SELECT CAST(:first AS timestamptz) + n * CAST(:step AS interval) AS at
            FROM generate_series(CAST(:low AS bigint), CAST(:high AS bigint)) AS n
        ) AS moments
    ), claim AS MATERIALIZED (
        SELECT * FROM idemp_inbox ORDER BY claimed_at DESC LIMIT 1
    ), sent AS MATERIALIZED (
        SELECT output.* FROM idemp_output output JOIN claim USING (consumer_id, message_key)
    ), inbox AS (
        INSERT INTO {inbox} (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id)
        SELECT made.message_key, consumer_id, type_id, worker_id, at, fingerprint, original_id FROM made, claim
    ), outputs AS (
        INSERT INTO {output}
            (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT gen_random_uuid(), made.message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body
        FROM made, sent
    )
    INSERT INTO {history} (message_key, consumer_id, worker_id, at, confirmed, redelivered)
    SELECT made.message_key, consumer_id, worker_id, at, 1, 0 FROM made, claim
"""


def time_ordered() -> UUID:
    """A UUID of version 7."""
    milliseconds = time.time_ns() // 1_000_000
    return UUID(int=milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62))


MAKE_ID: Final[dict[str, Callable[[], UUID]]] = {"time-ordered": time_ordered, "random": uuid4}


def fill(
    engine: Engine, keys: str, rows: int, *, first: datetime, step: timedelta, tables: Tables | Part | None = None
) -> None:
    """Handlings from `first` on, each with its output and its confirm; there has to be one that they are made after."""
    into = tables or Tables()
    names = {"inbox": into.inbox.name, "output": into.output.name, "history": into.history.name}
    statement = text(_FILL.format(key=_KEYS[keys], **names))
    for low in range(1, rows + 1, _AT_ONCE):
        print(f"{keys}: {low - 1:,} of {rows:,} rows", end="\r", file=sys.stderr, flush=True)
        with engine.begin() as connection:
            connection.execute(
                statement, {"first": first, "step": step, "low": low, "high": min(low + _AT_ONCE - 1, rows)}
            )


def settle(engine: Engine) -> None:
    """Vacuum and analyze now, so that nothing does while it is measured."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in _TABLES:
            connection.execute(text(f"VACUUM ANALYZE {table}"))
            connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)"))


def bytes_of(engine: Engine) -> dict[str, int]:
    """How large each table is with its indexes."""
    with engine.connect() as connection:
        return {
            table.removeprefix("idemp_"): connection.scalars(
                text("SELECT pg_total_relation_size(CAST(:name AS regclass))"), {"name": table}
            ).one()
            for table in _TABLES
        }
