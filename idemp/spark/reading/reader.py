"""The reader behind `spark.read.format("idemp")`: what is asked for, who reads which piece, and rows as Spark wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from sqlalchemy import Select, select

from idemp.errors import ConfigurationError, StoreError
from idemp.findings import nearest
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.tables import Tables
from idemp.spark.reading.arrow import Reading, is_postgresql, reading
from idemp.spark.reading.pages import WHOLE, Piece, pieces
from idemp.spark.reading.secret import settings_with
from idemp.spark.reading.snapshots import LIFETIME, Holding, bounded, hold
from idemp.spark.reading.views import Names, Rows, View, view_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from idemp.inbox.sql.names import NameKind
    from idemp.settings import Settings

_NUMBER: Final = pa.int32()
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "BINARY": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "INT": pa.int32(),
    "STRING": pa.string(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the data source; docs/reference/data-source.md says what they mean."""

    table: str = "inbox"
    consumer: tuple[str, ...] | None = None
    type: tuple[str, ...] | None = None
    since: datetime | None = None
    before: datetime | None = None
    snapshot: str | None = None
    snapshot_lifetime: float = LIFETIME.total_seconds()
    partitions: int | None = None
    url_file: str | None = None
    schema: str | None = None
    prefix: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From what Spark hands over.

        Raises:
            ConfigurationError: an unknown option or a wrong value.

        Example:
            >>> Options.read({"table": "outputs", "consumer": "shop, billing"}).consumer
            ('shop', 'billing')
            >>> Options.read({"tabel": "outputs"})
            Traceback (most recent call last):
            ...
            idemp.errors.ConfigurationError: The data source has no option 'tabel'. Did you mean 'table'?
        """
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                known = cls.__dataclass_fields__
                raise ConfigurationError(f"The data source has no option {name!r}. {nearest(name, known)}")
            values[name] = _PARSED.get(name, _text)(name, str(value))
        return cls(**values)

    def settings(self) -> Settings:
        """The settings of the process that asks."""
        return settings_with(self.url_file, self.schema, self.prefix)

    @property
    def rows(self) -> Rows:
        """Which rows are asked for."""
        return Rows(consumers=self.consumer, types=self.type, since=self.since, before=self.before)


@dataclass(frozen=True)
class Task(InputPartition):
    """What one task reads, and as of when."""

    piece: Piece
    snapshot: str | None


class Reader(DataSourceReader):
    """Reads one table at one moment.

    Args:
        options: what is asked for.
        schema: the columns that are wanted, by names and types of the view.
        settings: say where the database is, instead of the options and the tasks' own settings.

    Raises:
        ConfigurationError: a column that the view does not have.
    """

    def __init__(self, options: Options, schema: StructType, settings: Settings | None = None) -> None:
        self._options = options
        self._told = settings
        self._columns = list(schema.fieldNames())
        self._view.names(self._columns, options.rows)
        fields = self._view.fields
        for field in schema:
            wanted, found = fields[field.name].type, field.dataType.simpleString().upper()
            if wanted != found:
                raise ConfigurationError(
                    f"The column {field.name!r} is of type {wanted}, not {found}.",
                    fix="Leave the types as they are, and cast.",
                )
        self._arrow = pa.schema([(name, _TYPES[fields[name].type]) for name in self._columns])

    @property
    def _view(self) -> View:
        return view_of(self._options.table)

    @property
    def _settings(self) -> Settings:
        return self._told or self._options.settings()

    def partitions(self) -> Sequence[Task]:
        """Who reads what; a snapshot is taken where there are several."""
        options, settings = self._options, self._settings
        if not is_postgresql(settings.database_url):
            if options.snapshot is not None:
                raise ConfigurationError(
                    "Only PostgreSQL has snapshots that several readers can share.", fix="Leave the option out."
                )
            return [Task(WHOLE, None)]
        found, snapshot = self._pieces(settings), options.snapshot
        if snapshot is None and len(found) == 1:
            return [Task(found[0], None)]  # one statement sees one moment by itself
        if snapshot is None:
            place = settings.database_url, settings.schema_name, settings.table_prefix
            snapshot = hold(Holding(*place, options.snapshot_lifetime))
            found = self._pieces(settings)  # once its locks keep parts from going
        return [Task(piece, snapshot) for piece in found]

    def _pieces(self, settings: Settings) -> Sequence[Piece]:
        tables, view = Tables(settings.schema_name, settings.table_prefix), self._view
        table = getattr(tables, view.name)
        return pieces(settings.database_url, tables, table, has_parts=view.has_parts, most=self._options.partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, in a transaction of its own."""
        assert isinstance(partition, Task)  # noqa: S101
        settings, view, piece = self._settings, self._view, partition.piece
        tables = Tables(settings.schema_name, settings.table_prefix)
        rows = replace(self._options.rows, pages=piece.pages)
        url = settings.database_url
        locks = self._locks(tables, piece) if is_postgresql(url) else []
        with reading(url, snapshot=partition.snapshot, locks=locks) as source:
            names = {kind: _names(source, tables, kind) for kind in view.names(self._columns, rows)}
            statement = view.statement(
                tables, piece.part, self._columns, rows, names, postgresql=is_postgresql(url), alone=piece.alone
            )
            for batch in source.batches(statement, self._numbered):
                yield self._named(batch, names)

    def _locks(self, tables: Tables, piece: Piece) -> list[str]:
        """What must not be dropped or rewritten between the moment that is seen and its rows being read."""
        of = tables if piece.part is None or not self._view.has_parts else tables.part(piece.part)
        only = "ONLY " if piece.alone else ""
        return [only + qualified(getattr(of, name)) for name in sorted({self._view.name, "inbox"})]

    @property
    def _numbered(self) -> pa.Schema:
        """As the database answers: names are numbers still."""
        fields = self._view.fields
        return pa.schema(
            [(name, _NUMBER if fields[name].names else _TYPES[fields[name].type]) for name in self._columns]
        )

    def _named(self, batch: pa.RecordBatch, names: Names) -> pa.RecordBatch:
        fields = self._view.fields
        columns = []
        for place, name in enumerate(self._columns):
            kind = fields[name].names
            column = batch.column(place)
            columns.append(column if kind is None else _looked_up(column, names[kind], kind))
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)


def _names(source: Reading, tables: Tables, kind: NameKind) -> dict[int, str]:
    table = getattr(tables, kind)
    statement: Select[Any] = select(table.c.id, table.c.name)
    types: dict[str, pa.DataType] = {"id": _NUMBER, "name": pa.string()}
    schema = pa.schema(types)
    rows = [row for batch in source.batches(statement, schema) for row in batch.to_pylist()]
    return {row["id"]: row["name"] for row in rows}


def _looked_up(numbers: pa.Array[Any], names: Mapping[int, str], kind: str) -> pa.Array[Any]:
    """The names of numbers; none for none."""
    places = pc.index_in(numbers, value_set=pa.array(list(names), _NUMBER))
    if places.null_count != numbers.null_count:
        raise StoreError(
            f"A row has a {kind} without a name: the interned names are not those of these tables.",
            fix="See `idemp doctor`; nothing was changed.",
        )
    return pc.take(pa.array(list(names.values()), pa.string()), places)


# Options --------------------------------------------------------------------------------------------------------------


def _text(name: str, value: str) -> Any:
    del name
    return value


def _several(name: str, value: str) -> Any:
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise ConfigurationError(f"The option {name!r} names nothing.", fix="Separate names by commas.")
    return found


def _moment(name: str, value: str) -> Any:
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigurationError(
            f"The option {name!r} is no moment: {value!r}.", fix="Write it as 2026-11-22T06:00:00, UTC."
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _lifetime(name: str, value: str) -> Any:
    del name
    return bounded(value).total_seconds()


def _count(name: str, value: str) -> Any:
    if not value.isdecimal() or not int(value):
        raise ConfigurationError(f"The option {name!r} is no number above nought: {value!r}.")
    return int(value)


def _table(name: str, value: str) -> Any:
    del name
    view_of(value)
    return value


_PARSED: Final = {
    "table": _table,
    "consumer": _several,
    "type": _several,
    "since": _moment,
    "before": _moment,
    "snapshot_lifetime": _lifetime,
    "partitions": _count,
}
