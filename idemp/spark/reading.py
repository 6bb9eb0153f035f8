"""Snapshots of idemp's tables as DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, Select, String, Table, cast, select, text

from idemp.process import raise_red
from idemp.settings import Settings
from idemp.sql.checks import check_tables
from idemp.sql.engine import Database
from idemp.sql.tables import Tables

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Snapshot", "TableName", "read", "snapshot"]

TableName = Literal["inbox", "outputs", "messages"]
PAGES: Final = 16_384  # of 8 KiB, a task: smaller ranges cost more than they gain
ROWS: Final = 10_000  # of an Arrow batch
COLUMNS: Final[dict[TableName, str]] = {
    "inbox": "consumer string, type string, message_key string, original_id binary, fingerprint binary, claimed_at double, "
    "worker string",
    "outputs": "consumer string, message_key string, ordinal int, output_id string, kind string, exchange string, routing_key string, "
    "headers binary, body binary, pending boolean, due_at double, attempts int, quarantined_at double, reason binary",
    "messages": "queue string, id bigint, due_at double, attempts int, deaths int, headers binary, body binary, history binary",
}


@dataclass(frozen=True)
class Snapshot:
    """The tables at one moment, while `snapshot` is open. On databases other than PostgreSQL, each table is as it is when it is read.

    Attributes:
        at: The moment, in seconds since 1970, by the clock of the database.
        token: Name of PostgreSQL's snapshot; empty elsewhere.
        pages: Size of each table.

    Example:
        >>> Snapshot(Settings(), 0.0).token
        ''
    """

    settings: Settings = field(repr=False)
    at: float
    token: str = ""
    pages: dict[TableName, int] = field(default_factory=dict)


@contextmanager
def snapshot(settings: Settings | None = None) -> Iterator[Snapshot]:
    """Open a snapshot for `read`. On PostgreSQL all tables and tasks see the same moment, and purges go on.

    Args:
        settings: By default read from the environment.

    Raises:
        ConfigurationError: A start-up check has a red finding.

    Example:
        >>> def count(spark: "SparkSession") -> int:
        ...     with snapshot() as moment:
        ...         return read(spark, "inbox", moment).count()
    """
    settings = settings or Settings()
    database = Database(settings.database_url, settings.table_prefix)
    try:
        raise_red(check_tables(database))
        if database.engine.dialect.name != "postgresql":
            with database.engine.connect() as connection:
                at = float(connection.scalar(select(database.dialect.now)) or 0.0)
            yield Snapshot(settings, at)
            return
        with _repeatable(database.engine) as connection:
            tables = {name: _table(database.tables, name) for name in COLUMNS}
            quote = database.engine.dialect.identifier_preparer.format_table
            locked = ", ".join(quote(table) for table in (*tables.values(), database.tables.pending, database.tables.name))
            connection.execute(text(f"LOCK TABLE {locked} IN ACCESS SHARE MODE"))  # before the snapshot: a TRUNCATE has to wait
            token = connection.scalar(text("SELECT pg_export_snapshot()"))
            size = "SELECT pg_relation_size(CAST(:name AS regclass)) / current_setting('block_size')::int"
            pages = {name: int(connection.scalar(text(size), {"name": quote(table)}) or 0) for name, table in tables.items()}
            yield Snapshot(settings, float(connection.scalar(select(database.dialect.now)) or 0.0), str(token), pages)
    finally:
        database.close()


def read(spark: SparkSession, table: TableName, at: Snapshot) -> DataFrame:
    """Return a table: `inbox`, `outputs` (with their pending state), or `messages` (retries and dead letters; these have no `due_at`).

    On PostgreSQL each task reads a range of pages. If the snapshot is closed, the tasks fail.

    Args:
        spark: Spark session.
        table: Name of the table.
        at: The snapshot.

    Example:
        >>> def dead_letters(spark: "SparkSession", moment: Snapshot) -> "DataFrame":
        ...     return read(spark, "messages", moment).where("due_at IS NULL")
    """
    size = PAGES
    pieces = max(1, -(-at.pages.get(table, 0) // size))

    def pages(numbers: Any) -> Iterator[Any]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                yield from _read(table, at, number * size, None if number == pieces - 1 else (number + 1) * size)

    return spark.range(0, pieces, 1, pieces).mapInArrow(pages, COLUMNS[table])


@contextmanager
def _repeatable(engine: Engine) -> Iterator[Connection]:
    with engine.connect().execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True) as connection:
        yield connection


def _table(tables: Tables, name: TableName) -> Table:
    return {"inbox": tables.inbox, "outputs": tables.output, "messages": tables.message}[name]


def _read(name: TableName, at: Snapshot, start: int, end: int | None) -> Iterator[pa.RecordBatch]:
    """Read a range of pages of a table, in a Python worker; the last one is open, because a table may have grown."""
    import pyarrow as pa

    database = Database(at.settings.database_url, at.settings.table_prefix)
    engine = database.queue_engine if name == "messages" else database.engine
    query, plain = _query(database, name), at.token == ""
    begin = engine.connect() if plain else _repeatable(engine)
    try:
        with begin as connection:
            if not plain:
                connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{at.token}'")
                table, schema = _table(database.tables, name).name, database.tables.metadata.schema
                where = f'"{schema}"."{table}".ctid' if schema else f'"{table}".ctid'
                until = "" if end is None else f" AND {where} < '({end},0)'::tid"
                query = query.where(text(f"{where} >= '({start},0)'::tid{until}"))
            names = [column.split()[0] for column in COLUMNS[name].split(", ")]
            types = [_TYPES[column.split()[1]] for column in COLUMNS[name].split(", ")]
            schema_of_batches = pa.schema([pa.field(each, getattr(pa, kind)()) for each, kind in zip(names, types, strict=True)])
            for rows in connection.execution_options(stream_results=True).execute(query).partitions(ROWS):
                columns = zip(*rows, strict=True)
                arrays = [
                    pa.array([_plain(value, field.name) for value in values], field.type)
                    for values, field in zip(columns, schema_of_batches, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema_of_batches)
    finally:
        database.close()


_TYPES: Final = {
    "string": "string",
    "binary": "binary",
    "double": "float64",
    "int": "int32",
    "bigint": "int64",
    "boolean": "bool_",
}


def _plain(value: Any, name: str) -> Any:
    if name == "message_key" and isinstance(value, bytes):  # where the database has no UUIDs
        return str(UUID(bytes=value))
    return str(value) if isinstance(value, UUID) else value


def _query(database: Database, name: TableName) -> Select[Any]:
    tables = database.tables
    inbox, output, pending, message = tables.inbox, tables.output, tables.pending, tables.message
    consumer, type = tables.name.alias("consumer"), tables.name.alias("type")
    key: Callable[[Any], Any] = (
        (lambda column: cast(column, String)) if database.engine.dialect.name == "postgresql" else (lambda column: column)
    )
    if name == "messages":
        columns = (message.c.queue, message.c.id, message.c.due_at, message.c.attempts, message.c.deaths)
        return select(*columns, message.c.headers, message.c.body, message.c.history).where(message.c.history.is_not(None))
    if name == "inbox":
        rest = (inbox.c.original_id, inbox.c.fingerprint, inbox.c.claimed_at, inbox.c.worker)
        query = select(consumer.c.name, type.c.name, key(inbox.c.message_key), *rest)
        return query.join_from(inbox, consumer, consumer.c.id == inbox.c.consumer_id).join(type, type.c.id == inbox.c.type_id)
    own = (output.c.kind, output.c.exchange, output.c.routing_key, output.c.headers, output.c.body)
    waits = (pending.c.output_id.is_not(None), pending.c.due_at, pending.c.attempts, pending.c.quarantined_at, pending.c.reason)
    query = select(consumer.c.name, key(output.c.message_key), output.c.ordinal, cast(output.c.output_id, String), *own, *waits)
    query = query.join_from(output, consumer, consumer.c.id == output.c.consumer_id)
    return query.outerjoin(pending, pending.c.output_id == output.c.output_id)
