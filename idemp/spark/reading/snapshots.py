"""One moment of a PostgreSQL database for many readers, and who holds it open.

A snapshot that PostgreSQL exports lives exactly as long as the transaction that exported it. Whoever reads takes it over at
the start of its own transaction, and needs its holder no more from then on. So the holder must live until the *last*
task of a read has begun; and if it doesn't, that task fails: there is no way to read something else instead.

The holder keeps `VACUUM` from removing rows that died since, and that is why its time is bounded, here and by the server
itself. Its locks keep anybody from rewriting or dropping the tables, which would move rows out of the pages that tasks read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import IO, TYPE_CHECKING, Any, Final, Self

from sqlalchemy import text
from sqlalchemy.pool import NullPool

from idemp.durations import parse_duration
from idemp.errors import ConfigurationError, StoreError
from idemp.inbox.sql.claiming import qualified
from idemp.inbox.sql.engine import create_engine_safely, shown, start_errors
from idemp.inbox.sql.tables import Tables
from idemp.spark.reading.arrow import is_postgresql
from idemp.spark.reading.secret import settings_with

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection

    from idemp.durations import DurationLike

LIFETIME: Final = timedelta(minutes=10)
_LONGEST: Final = timedelta(days=1)
_LOCK_WAIT: Final = "10s"
_LOOK_SECONDS: Final = 1.0
_EXPORT: Final = text("SELECT pg_export_snapshot() AS id, clock_timestamp() AS taken_at")


_holders: list[subprocess.Popen[str]] = []
"""Those that this process started and that still run: they end by themselves."""


class Snapshot:
    """A moment of the database, for any number of DataFrames; held by this process, inside of a `with` block.

    Only PostgreSQL has such. Without one each DataFrame has a moment of its own.

    Args:
        url_file: a file with the database's URL; by default the settings say where it is.
        schema: database schema of idemp's tables.
        prefix: prefix of idemp's tables.
        lifetime: how long it may be held at most, a day at the most: after that the server itself ends it.

    Raises:
        ConfigurationError: it is another kind of database, or the lifetime is none.
        StoreUnavailable: the database can't be reached.
        StoreError: somebody has held an exclusive lock on the tables for ten seconds.

    Example:
        >>> Snapshot(lifetime="2d")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: A snapshot may be held for up to 1 day, 0:00:00, not 2 days, 0:00:00. ...
    """

    def __init__(
        self,
        *,
        url_file: str | None = None,
        schema: str | None = None,
        prefix: str | None = None,
        lifetime: DurationLike = LIFETIME,
    ) -> None:
        self.lifetime = bounded(lifetime)
        self._place = {"url_file": url_file, "schema": schema, "prefix": prefix}
        self._held: _Held | None = None

    def __enter__(self) -> Self:
        settings = settings_with(**self._place)
        self._held = _Held(
            Holding(settings.database_url, settings.schema_name, settings.table_prefix, self.lifetime.total_seconds())
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def id(self) -> str:
        """What PostgreSQL calls it; no secret."""
        return self._open().id

    @property
    def taken_at(self) -> datetime:
        """The moment, by the server's clock."""
        return self._open().taken_at

    def read(self, spark: SparkSession, table: str, **options: str | int) -> DataFrame:
        """A table at that moment; every action on it has to begin while the snapshot is held.

        Args:
            spark: a session, in which this registers the data source.
            table: as in the option `table`.
            options: further options of the data source.
        """
        from idemp.spark.datasource import register

        register(spark)
        place = {name: value for name, value in self._place.items() if value is not None}
        reader = spark.read.format("idemp").options(table=table, snapshot=self.id, **place, **options)
        return reader.load()

    def _open(self) -> _Held:
        if self._held is None:
            raise ConfigurationError("This snapshot is not held.", fix="Use it inside of `with Snapshot() as moment:`.")
        return self._held


def bounded(lifetime: DurationLike) -> timedelta:
    """A lifetime that a snapshot may have.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        found = parse_duration(lifetime)
    except ValueError as error:
        raise ConfigurationError(f"The lifetime of a snapshot: {error}.", fix='Write it as "10m".') from None
    if not timedelta(0) < found <= _LONGEST:
        raise ConfigurationError(
            f"A snapshot may be held for up to {_LONGEST}, not {found}.",
            fix="While it is held, no dead row can be removed: read in parts, or copy the tables.",
        )
    return found


@dataclass(frozen=True, slots=True)
class Holding:
    """What a holder has to know."""

    url: str
    schema: str | None
    prefix: str
    seconds: float


class _Held:
    """A transaction that exported a snapshot, and stays open."""

    def __init__(self, what: Holding) -> None:
        if not is_postgresql(what.url):
            raise ConfigurationError(
                "Only PostgreSQL has snapshots that several readers can share.",
                fix="Leave the snapshot out: a DataFrame is read by one task then, which sees one moment by itself.",
            )
        with ExitStack() as stack:
            engine = create_engine_safely(what.url, poolclass=NullPool)
            stack.enter_context(start_errors(engine))
            options: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._connection = stack.enter_context(engine.connect().execution_options(**options))
            self._where = shown(engine)
            self.id, self.taken_at = self._export(self._connection, what)
            stack.pop_all()

    @staticmethod
    def _export(connection: Connection, what: Holding) -> tuple[str, datetime]:
        tables = Tables(what.schema, what.prefix)
        locked = ", ".join(map(qualified, (tables.inbox, tables.output, tables.history)))
        # None of these takes the snapshot, so that it comes after the locks: what is locked is as it sees it.
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {int(what.seconds * 1000)}")
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'")
        connection.exec_driver_sql(f"LOCK TABLE {locked} IN ACCESS SHARE MODE")  # and those that inherit from them
        found = connection.execute(_EXPORT).one()
        return str(found.id), found.taken_at

    def close(self) -> None:
        """Let go of it."""
        with suppress(Exception):  # the server ended it, perhaps: gone it is either way
            self._connection.close()


# A process of its own -------------------------------------------------------------------------------------------------


def hold(what: Holding) -> str:
    """Have a process of its own hold a snapshot for so long; the snapshot's id.

    Spark ends the process that plans a read as soon as it is planned. The holder outlives that one, and ends with
    the driver's JVM, or when its time is over.

    Raises:
        StoreError: it could not be taken; the error says why.
    """
    holder = subprocess.Popen(
        [sys.executable, "-m", "idemp.spark.reading"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
        text=True,
    )
    _holders[:] = [each for each in _holders if each.poll() is None] + [holder]
    # By a pipe: arguments and environments can be looked at.
    said = _answer(holder, json.dumps({"holding": asdict(what), "driver": os.getppid()}))
    answer = json.loads(said) if said else {"error": "it ended without a word"}
    if "error" in answer:
        raise StoreError(f"No snapshot could be taken: {answer['error']}")
    return str(answer["id"])


def _answer(holder: subprocess.Popen[str], question: str) -> str:
    assert holder.stdin is not None  # noqa: S101
    assert holder.stdout is not None  # noqa: S101
    with suppress(BrokenPipeError), holder.stdin as questions:
        questions.write(question)
    with holder.stdout as answers:
        return answers.readline()


def serve(questions: IO[str], answers: IO[str]) -> None:
    """The process that `hold` starts."""
    question = json.loads(questions.read())
    what = Holding(**question["holding"])
    end = time.monotonic() + what.seconds
    try:
        held = _Held(what)
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    answers.write(json.dumps({"id": held.id}) + "\n")
    answers.close()
    while time.monotonic() < end and _lives(question["driver"]):
        time.sleep(_LOOK_SECONDS)
    held.close()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
