"""A small sink for tests of the faults themselves: ids are claimed, and each one that is new has an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import psycopg
from sqlalchemy import make_url, text

from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.servers.postgresql import query

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

CONSUMER = "tests"


def prepare(url: str) -> None:
    """Tables, idemp's and a user's."""
    engine = create_engine_safely(url)
    upgrade(engine, Tables())
    SqlStore(engine).prepare(CONSUMER, ["tests.Row"])
    engine.dispose()
    query(url, "CREATE TABLE effect (id text, attempt int)")
    query(url, "CREATE TABLE attempt (part int, number int, pid int)")


def effects(url: str) -> list[tuple[object, ...]]:
    """How many effects there are, of how many ids."""
    return query(url, "SELECT count(*), count(DISTINCT id) FROM effect")


def attempts(url: str) -> dict[int, list[object]]:
    """Which attempts of each partition's task began, told outside of any transaction."""
    began: dict[int, list[object]] = {}
    for part, number in query(url, "SELECT part, number FROM attempt ORDER BY part, number"):
        began.setdefault(int(str(part)), []).append(number)
    return began


def pour(frame: DataFrame, url: str) -> int:
    """Handle a frame's ids, a transaction for each batch of a task; how many came out of its tasks."""
    return frame.mapInArrow(chunks_into(url), frame.schema).count()


def chunks_into(url: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What the tasks run."""

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        note_attempt(url, task.partitionId(), task.attemptNumber())
        for batch in batches:
            handle_chunk(store_of(url), [str(each) for each in batch.column(0).to_pylist()], task.attemptNumber())
            yield batch

    return handle


def handle_chunk(store: SqlStore, ids: list[str], attempt: int) -> None:
    claims = [
        Claim(
            consumer=CONSUMER,
            id=effective_id("envelope", each),
            message_type="tests.Row",
            fingerprint=None,
            wait=timedelta(seconds=30),
        )
        for each in ids
    ]
    with store.begin(claims) as unit:
        for claim, claimed in zip(claims, unit.claim_all(claims, timedelta(seconds=30)), strict=True):
            if claimed.verdict is Verdict.CLAIMED:
                row = {"id": claim.id.text, "attempt": attempt}
                unit.connection.execute(text("INSERT INTO effect VALUES (:id, :attempt)"), row)
        unit.commit()


@cache
def store_of(url: str) -> SqlStore:
    """One for each Python worker, which is used again by its next task."""
    return SqlStore(create_engine_safely(url, pool_size=1, max_overflow=0))


def note_attempt(url: str, part: int, number: int) -> None:
    import os

    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(address, autocommit=True)) as connection:
        connection.execute("INSERT INTO attempt VALUES (%s, %s, %s)", (part, number, os.getpid()))
