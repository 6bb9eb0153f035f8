"""Rows of a database as Arrow batches: through ADBC from PostgreSQL where it is installed, else row by row."""

from __future__ import annotations

import importlib.util
import re
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
from sqlalchemy import Dialect, make_url
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from idemp.credentials import without_credentials
from idemp.errors import ConfigurationError, StoreError, StoreUnavailable
from idemp.inbox.sql import failures
from idemp.inbox.sql.engine import create_engine_safely, shown, start_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, Select

ADBC: Final = "adbc_driver_postgresql"
_SNAPSHOT: Final = re.compile(r"[0-9A-F]+(-[0-9A-F]+)*")
_POSTGRESQL: Final[Dialect] = postgresql.dialect()  # type: ignore[no-untyped-call]
_ROWS_AT_ONCE: Final = 10_000
_GONE: Final = "invalid snapshot identifier"
# Before the snapshot: it is the holder's lock that keeps the rows where they are, and it lives as long as the snapshot.
_LOCK: Final = "LOCK TABLE {} IN ACCESS SHARE MODE"


class Reading(Protocol):
    """One transaction that only reads, and sees one moment."""

    def batches(self, statement: Select[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a SELECT, whose columns are of these types."""
        ...


@contextmanager
def reading(url: str, *, snapshot: str | None = None, locks: Sequence[str] = ()) -> Iterator[Reading]:
    """A transaction that only reads.

    Args:
        url: the database.
        snapshot: what it sees, as `Snapshot.id` says it; by default the present.
        locks: tables that nobody may rewrite or drop meanwhile, as SQL writes them (PostgreSQL).

    Raises:
        ConfigurationError: the URL, or the snapshot's id, is none.
        StoreUnavailable: the database can't be reached.
        StoreError: the snapshot is gone, or the database refuses to read.
    """
    if snapshot is not None and _SNAPSHOT.fullmatch(snapshot) is None:
        raise ConfigurationError(f"{snapshot[:40]!r} is no snapshot's id.", fix="Take it from `Snapshot.id`.")
    begin = [_LOCK.format(table) for table in locks]
    begin += [f"SET TRANSACTION SNAPSHOT '{snapshot}'"] if snapshot is not None else []
    if is_postgresql(url) and importlib.util.find_spec(ADBC) is not None:
        with _adbc(url, begin) as made:
            yield made
    else:
        with _row_by_row(url, begin) as made:
            yield made


def is_postgresql(url: str) -> bool:
    """Whether a URL is one of PostgreSQL.

    Example:
        >>> is_postgresql("postgresql+psycopg://db/shop"), is_postgresql("sqlite://")
        (True, False)
    """
    return make_url(url).get_backend_name() in {"postgresql", "postgres"}


# Through ADBC ---------------------------------------------------------------------------------------------------------


@contextmanager
def _adbc(url: str, begin: Sequence[str]) -> Iterator[Reading]:
    from adbc_driver_manager import dbapi as manager
    from adbc_driver_postgresql import dbapi  # type: ignore[import-untyped]

    # The defaults and checks of all our connections; libpq reads the same options.
    engine = create_engine_safely(url, poolclass=NullPool)
    libpq = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with closing(dbapi.connect(libpq)) as connection, closing(connection.cursor()) as cursor:
            for statement in ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY", *begin):
                cursor.execute(statement)
            yield _Adbc(cursor)
    except manager.Error as error:
        raise _meaning(str(error), shown(engine), refused=error.sqlstate is not None) from None


class _Adbc:
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def batches(self, statement: Select[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        # COPY, which is what makes it fast, takes no parameters: all values are numbers, moments or ids of ours.
        compiled = statement.compile(dialect=_POSTGRESQL, compile_kwargs={"literal_binds": True})
        self._cursor.execute(str(compiled))
        for batch in self._cursor.fetch_record_batch():
            yield batch.cast(schema)


# Row by row -----------------------------------------------------------------------------------------------------------


@contextmanager
def _row_by_row(url: str, begin: Sequence[str]) -> Iterator[Reading]:
    engine = create_engine_safely(url, poolclass=NullPool)
    level = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
    only = {"postgresql_readonly": True} if engine.dialect.name == "postgresql" else {}
    try:
        with engine.connect().execution_options(**level, **only) as connection:
            _begin(connection)
            for statement in begin:
                connection.exec_driver_sql(statement)
            yield _RowByRow(connection)
    except SQLAlchemyError as error:
        text = str(getattr(error, "orig", error)).strip()
        if _GONE in text:
            raise _meaning(text, shown(engine), refused=True) from None
        known = start_error(error, engine) if hasattr(error, "statement") else None  # type: ignore[arg-type]
        raise known or failures.translate(error) or failures.refused(error) from error
    finally:
        engine.dispose()


def _begin(connection: Connection) -> None:
    """One moment for several statements; SQLite's driver would begin with the first that writes."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")


class _RowByRow:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def batches(self, statement: Select[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        streamed = self._connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(statement)
        for rows in streamed.partitions():
            columns = zip(*rows, strict=True)
            arrays = [pa.array(values, each.type) for values, each in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _meaning(text: str, where: str, *, refused: bool) -> StoreError:
    if _GONE in text:
        return StoreError(
            "The snapshot that this read belongs to is gone: whoever held it has ended, or its time was over. "
            "No rows were left out: the read failed as a whole.",
            fix="Read anew, and give it more time: the option snapshot_lifetime, or the lifetime of the Snapshot.",
        )
    said = without_credentials(text.strip().splitlines()[0]) if text.strip() else "no reason was given"
    if refused:
        return StoreError(
            f"The database {where} refuses to be read: {said}", fix="See what it says; nothing was changed."
        )
    return StoreUnavailable(f"The database {where} can't be read: {said}", fix="Start it, or correct the database URL.")
