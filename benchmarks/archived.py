"""An archive of messages in Parquet and as a table, and what writes them to PostgreSQL: for the parts about Spark."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import psutil
from sqlalchemy import text

from idemp import App, Context, Idempotent
from idemp.bulk import SqlSet
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.spark import Columns, read_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Engine

WHERE: Final = "benchmarks.archived:app"
ORDER: Final = "shop.Order"
DUPLICATES: Final = 0.2

app = App("shop", broker="local://unused.db")


@app.handler(dict, type=ORDER, policy=Idempotent(batch=1000))
def order(message: dict[str, Any], ctx: Context) -> None:
    """The same effect and output as the set has."""
    ctx.connection.execute(text("INSERT INTO sale (sku) VALUES (:sku)"), {"sku": message["sku"]})
    ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")


SETS: Final = {
    ORDER: SqlSet(
        effects=["INSERT INTO sale (sku) SELECT payload ->> 'sku' FROM {fresh}"],
        outputs="SELECT place, 'stock.Reserve' AS type, jsonb_build_object('sku', payload ->> 'sku') AS body, "
        "'stock' AS queue FROM {fresh}",
    )
}
_CLAIM: Final = """
    INSERT INTO idemp_inbox
        (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id, source_position)
    SELECT key, 1, 1, 1, now(), {fingerprint}, NULL, position FROM first ORDER BY key
    ON CONFLICT (consumer_id, message_key) DO NOTHING
"""
_FIRST: Final = (
    "first AS (SELECT DISTINCT ON (key) key, position, fingerprint, body FROM arrived ORDER BY key, position)"
)
CLAIMS: Final = f"WITH {_FIRST} {_CLAIM.format(fingerprint='NULL')}"
_ENVELOPE: Final = json.dumps({
    "type": "stock.Reserve", "content_type": "application/json", "correlation_id": str(uuid.UUID(int=0)),
    "headers": {"idemp-causation-id": str(uuid.UUID(int=0)), "idemp-hops": 1}, "mandatory": True, "delay": 0.0,
})  # fmt: skip
CLAIMS_WITH_EFFECTS: Final = f"""
    WITH {_FIRST}, fresh AS ({_CLAIM.format(fingerprint="fingerprint")} RETURNING message_key),
    effect AS (
        INSERT INTO sale (sku) SELECT convert_from(body, 'UTF8')::jsonb ->> 'sku' FROM first JOIN fresh ON key = message_key
    ), sent AS (
        INSERT INTO idemp_output
            (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT gen_random_uuid(), message_key, 1, 0, 'send', '', 'stock', '{_ENVELOPE}',
            convert_to(jsonb_build_object('sku', convert_from(body, 'UTF8')::jsonb ->> 'sku')::text, 'UTF8')
        FROM first JOIN fresh ON key = message_key RETURNING output_id, message_key
    )
    INSERT INTO idemp_pending (output_id, ordinal, consumer_id, message_key, attempts, due_at)
    SELECT output_id, 0, 1, message_key, 0, now() FROM sent
"""


# The same ids in both places: a fifth of the numbers have one that another has.
_NUMBER_OF: Final = "CASE WHEN number < {first} THEN number ELSE (number * 7919) % {first} END"
_IDS: Final = """
    INSERT INTO arrived
    SELECT ({id})::uuid,
        'part-00000-00000000-0000-0000-0000-000000000000-c000.snappy.parquet#' || number,
        decode(repeat('00', 19), 'hex'), convert_to('{{"sku": "sku"}}', 'UTF8')
    FROM generate_series(CAST(0 AS bigint), {last}) AS number ORDER BY md5(CAST(-number AS text))
"""
_ARCHIVED: Final = """
    SELECT regexp_replace({id}, '(.{{8}})(.{{4}})(.{{4}})(.{{4}})(.*)', '$1-$2-$3-$4-$5') AS id,
        '{type}' AS type, '{{"sku": "sku"}}' AS body
    FROM range({rows}) AS numbers (number) ORDER BY md5(CAST(-number AS string))
"""
# Random ones, and ten in each millisecond.
_OF_SERVER: Final = {
    "random": "overlay(md5(CAST({number} AS text)) PLACING '4' FROM 13)",
    "time-ordered": "lpad(to_hex(1790000000000 + ({number}) / 10), 12, '0') || '7' "
    "|| left(md5(CAST({number} AS text)), 3) || '8' || right(md5(CAST({number} AS text)), 15)",
}
_OF_SPARK: Final = {
    "random": "overlay(md5(CAST({number} AS string)) PLACING '4' FROM 13)",
    "time-ordered": "lpad(lower(hex(1790000000000 + ({number}) DIV 10)), 12, '0') || '7' "
    "|| left(md5(CAST({number} AS string)), 3) || '8' || right(md5(CAST({number} AS string)), 15)",
}


class Place:
    """The database, and as many messages as a table in it.

    Args:
        url: the database.
        rows: messages, a fifth of them duplicates.
        ids: "random" (UUID 4), or "time-ordered" (UUID 7, ten in a millisecond).
    """

    def __init__(self, url: str, rows: int, ids: str = "random") -> None:
        self.url = url
        self.rows = rows
        self.ids = ids
        self.engine: Engine = create_engine_safely(url)
        upgrade(self.engine, Tables())
        self.run("CREATE TABLE sale (id bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL)")
        self.run("CREATE UNLOGGED TABLE arrived (key uuid NOT NULL, position text, fingerprint bytea, body bytea)")
        self.run(_IDS.format(id=_OF_SERVER[ids].format(number=_number(rows)), last=rows - 1))
        with self.engine.connect() as connection:
            self.distinct = connection.scalars(text("SELECT count(DISTINCT key) FROM arrived")).one()

    def archived(self, spark: SparkSession, path: str) -> DataFrame:
        """The same messages, in Parquet."""
        statement = _ARCHIVED.format(
            id=_OF_SPARK[self.ids].format(number=_number(self.rows)), rows=self.rows, type=ORDER
        )
        spark.sql(statement).write.parquet(path)
        return read_messages(spark, [path], "parquet", Columns())

    def empty(self) -> None:
        """As before the first message."""
        self.run("TRUNCATE idemp_inbox, idemp_output, idemp_pending, sale")
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("CHECKPOINT"))

    def run(self, statement: str) -> None:
        """One statement, committed; without JIT, as idemp works."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL jit = off")
            connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    def server(self) -> int:
        """The number of the server's first process."""
        with self.engine.connect() as connection:
            own = connection.scalars(text("SELECT pg_backend_pid()")).one()
        return psutil.Process(own).ppid()

    def counts(self) -> tuple[int, int]:
        """Claims and effects."""
        with self.engine.connect() as connection:
            claims, effects = (
                connection.scalars(text(f"SELECT count(*) FROM {table}")).one() for table in ("idemp_inbox", "sale")
            )
        return claims, effects

    def check(self, *, only_claims: bool) -> None:
        """See that each id was claimed, and had an effect where that was wanted.

        Raises:
            RuntimeError: it is not so.
        """
        wanted = (self.distinct, 0 if only_claims else self.distinct)
        if self.counts() != wanted:
            raise RuntimeError(f"the figures are void: {self.counts()} claims and effects, not {wanted}")


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _number(rows: int) -> str:
    return _NUMBER_OF.format(first=round(rows * (1 - DUPLICATES)))
