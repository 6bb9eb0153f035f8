"""Snapshots of idemp's tables as DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, MetaData, Select, String, Table, cast, select, text

from idemp.process import raise_red
from idemp.settings import Settings
from idemp.sql.checks import check_tables
from idemp.sql.engine import Database
from idemp.sql.tables import Tables

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Snapshot", "TableName", "read", "snapshot"]

TableName = Literal["inbox", "outputs", "pending", "messages"]
PAGES: Final = 16_384  # of 8 KiB, a task: smaller ranges cost more than they gain
_Piece = tuple[str, str, int, int | None]  # schema, table, first page, page behind the last
ROWS: Final = 10_000  # of an Arrow batch
LEAVES: Final = """
SELECT namespace.nspname, class.relname, pg_relation_size(class.oid) / current_setting('block_size')::int AS pages
FROM pg_partition_tree(CAST(:name AS regclass)) AS part JOIN pg_class AS class ON class.oid = part.relid
JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace WHERE part.isleaf
UNION ALL SELECT relnamespace::regnamespace::name, relname, pg_relation_size(oid) / current_setting('block_size')::int
FROM pg_class WHERE oid = CAST(:name AS regclass) AND relkind <> 'p'
"""  # the partitions of a table, or the table
COLUMNS: Final[dict[TableName, str]] = {
    "inbox": "consumer string, type string, message_key string, original_id binary, fingerprint binary, claimed_at double, "
    "worker string",
    "outputs": "consumer string, message_key string, ordinal int, output_id string, kind string, exchange string, routing_key string, "
    "headers binary, body binary, pending boolean, due_at double, attempts int, quarantined_at double, reason binary",
    "pending": "consumer string, message_key string, ordinal int, output_id string, due_at double, attempts int, "
    "quarantined_at double, reason binary",
    "messages": "queue string, id bigint, due_at double, attempts int, deaths int, headers binary, body binary, history binary",
}


@dataclass(frozen=True)
class Snapshot:
    """The tables at one moment, while `snapshot` is open. On databases other than PostgreSQL, each table is as it is when it is read.

    Attributes:
        at: The moment, in seconds since 1970, by the clock of the database.
        token: Name of PostgreSQL's snapshot; empty elsewhere.
        pages: Schema, name and size in pages of each table, or of its partitions.

    Example:
        >>> Snapshot(Settings(), 0.0).token
        ''
    """

    settings: Settings = field(repr=False)
    at: float
    token: str = ""
    pages: dict[TableName, list[tuple[str, str, int]]] = field(default_factory=dict)


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
    # No secret of the broker travels to the tasks.
    settings = (settings or Settings()).model_copy(update={"broker_url": "sql://"})
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
            locked = ", ".join(quote(table) for table in (*tables.values(), database.tables.name))
            connection.execute(text(f"LOCK TABLE {locked} IN ACCESS SHARE MODE"))  # before the snapshot: a TRUNCATE has to wait
            token = connection.scalar(text("SELECT pg_export_snapshot()"))
            pages = {
                name: [
                    (row.nspname, row.relname, int(row.pages)) for row in connection.execute(text(LEAVES), {"name": quote(table)})
                ]
                for name, table in tables.items()
            }
            yield Snapshot(settings, float(connection.scalar(select(database.dialect.now)) or 0.0), str(token), pages)
    finally:
        database.close()


def read(spark: SparkSession, table: TableName, at: Snapshot) -> DataFrame:
    """Return a table of a snapshot as a DataFrame.

    On PostgreSQL each task reads a range of pages, and partitions are read apart. If the snapshot is closed, the tasks fail.

    Args:
        spark: Spark session.
        table: `inbox`; `outputs`, with their pending state; `pending`, the outputs that the broker has not confirmed, also those
            whose output is gone; or `messages`, retries and dead letters (these have no `due_at`).
        at: The snapshot.

    Example:
        >>> def dead_letters(spark: "SparkSession", moment: Snapshot) -> "DataFrame":
        ...     return read(spark, "messages", moment).where("due_at IS NULL")
    """
    pieces = _pieces(table, at)
    tasks = min(len(pieces), sum(pages for _, _, pages in at.pages.get(table, [])) // PAGES + 1)

    def rows(numbers: Any) -> Iterator[Any]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                yield from _read(table, at, pieces[number])

    return spark.range(0, len(pieces), 1, tasks).mapInArrow(rows, COLUMNS[table])


def _pieces(table: TableName, at: Snapshot) -> Sequence[_Piece | None]:
    """Return ranges of pages; the last one of a table is open, because the table may have grown. None is a whole table."""
    return [
        (schema, name, start, start + PAGES if start + PAGES < pages else None)
        for schema, name, pages in at.pages.get(table, [])
        for start in range(0, max(1, pages), PAGES)
    ] or [None]


@contextmanager
def _repeatable(engine: Engine) -> Iterator[Connection]:
    with engine.connect().execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True) as connection:
        yield connection


def _table(tables: Tables, name: TableName) -> Table:
    return {"inbox": tables.inbox, "outputs": tables.output, "pending": tables.pending, "messages": tables.message}[name]


def _read(name: TableName, at: Snapshot, piece: _Piece | None) -> Iterator[pa.RecordBatch]:
    """Read a range of pages of a table or a partition, or a whole table, in a Python worker."""
    import pyarrow as pa

    database = Database(at.settings.database_url, at.settings.table_prefix)
    engine = database.queue_engine if name == "messages" else database.engine
    source = _table(database.tables, name)
    begin = engine.connect() if piece is None else _repeatable(engine)
    try:
        with begin as connection:
            if piece is not None:
                connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{at.token}'")
                schema, leaf, start, end = piece
                source = source.to_metadata(MetaData(), schema=schema, name=leaf)
            query = _query(database, name, source)
            if piece is not None:
                where = f"{engine.dialect.identifier_preparer.format_table(source)}.ctid"
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


def _query(database: Database, name: TableName, source: Table) -> Select[Any]:
    """Return the rows of `source`, which is a table or a partition of it."""
    tables, own = database.tables, source.c
    consumer, type, pending = tables.name.alias("consumer"), tables.name.alias("type"), tables.pending
    key: Callable[[Any], Any] = (
        (lambda column: cast(column, String)) if database.engine.dialect.name == "postgresql" else (lambda column: column)
    )
    if name == "messages":
        columns = (own.queue, own.id, own.due_at, own.attempts, own.deaths)
        return select(*columns, own.headers, own.body, own.history).where(own.history.is_not(None))
    if name == "inbox":
        more = (own.original_id, own.fingerprint, own.claimed_at, own.worker)
        query = select(consumer.c.name, type.c.name, key(own.message_key), *more)
        return query.join_from(source, consumer, consumer.c.id == own.consumer_id).join(type, type.c.id == own.type_id)
    waits = pending.c if name == "outputs" else own
    rest: tuple[Any, ...] = (waits.due_at, waits.attempts, waits.quarantined_at, waits.reason)
    if name == "outputs":
        rest = (own.kind, own.exchange, own.routing_key, own.headers, own.body, waits.output_id.is_not(None), *rest)
    query = select(consumer.c.name, key(own.message_key), own.ordinal, cast(own.output_id, String), *rest)
    query = query.join_from(source, consumer, consumer.c.id == own.consumer_id)
    return query.outerjoin(pending, pending.c.output_id == own.output_id) if name == "outputs" else query
