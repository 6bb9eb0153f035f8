"""What a task of Spark's does, in a Python worker: messages through `idemp.bulk`, chunk by chunk, each one transaction."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast
from uuid import uuid4

from idemp.bulk import Bulk, Came
from idemp.errors import ConfigurationError, StoreUnavailable, TransientStoreError
from idemp.inbox.sql import pooler
from idemp.loading import load_app
from idemp.spark.chunks import chunks, numbered
from idemp.spark.columns import MESSAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa
    from sqlalchemy import Engine

    from idemp.app import App
    from idemp.bulk import Report, SetHandler
    from idemp.inbox.sql import SqlStore
    from idemp.settings import Settings

T = TypeVar("T")

RESULT: Final = (
    f"{MESSAGE}, error STRING, reason STRING, "
    "new BIGINT, replay BIGINT, duplicate BIGINT, conflict BIGINT, parked BIGINT, outputs BIGINT"
)
"""What a task answers: a row with counts for each chunk, and one with an error for each message that was parked."""

# A transaction whose executor is gone, or hangs, must not hold what another attempt of its task needs.
_SETTINGS: Final = (
    "SELECT set_config('lock_timeout', '60s', {local}), "
    "set_config('idle_in_transaction_session_timeout', '120s', {local})"
)
_PATIENCE_SECONDS: Final = 60.0
_FIRST_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of a sink need to know; it travels to them with their code.

    Attributes:
        app: `MODULE:APP`.
        settings: the driver's, so that all tasks have the same policies; the database's URL is in neither plan nor UI.
        override: whether the database is that of the settings, even if the app's code names one.
        folder: the driver's working directory; modules are looked for there, too, where a worker has it.
        dispatch, adopt, dry_run, sets: as for `Bulk`.
        rows: of a chunk, at most.
        size: of a chunk, in bytes, at most.
        rate: rows a second for each task, at most.
        token: tells jobs apart within a Python worker, which outlives its tasks.
    """

    app: str
    settings: Settings = field(repr=False)
    override: bool = False
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    dispatch: Literal["relay", "never"] = "relay"
    adopt: bool = False
    dry_run: bool = False
    sets: Mapping[type | str, SetHandler] = field(default_factory=dict)
    rows: int = 50_000
    size: int = 64 * 2**20
    rate: float | None = None
    token: str = field(default_factory=lambda: uuid4().hex)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A task: rows of messages in, rows of `RESULT` out."""
        bulk = _workplace.bulk(self)
        pace = Pace(self.rate)
        for chunk in chunks(numbered(batches), self.rows, self.size):
            report = persistently(partial(bulk.run, chunk))
            yield from _answered(report)
            pace.wait(chunk.num_rows)

    def load(self) -> App:
        """The app, with this job's settings; its database is not touched yet.

        Raises:
            ConfigurationError: there is no such app, or it is in use with other settings.
        """
        if self.folder not in sys.path and Path(self.folder).is_dir():
            sys.path.append(self.folder)
        app = load_app(self.app)
        app.configure(self.settings, database=self.override)
        app.registry.build(self.settings.messages)
        return app

    def store(self, app: App) -> SqlStore:
        """The app's inbox.

        Raises:
            ConfigurationError: it is in no SQL database.
        """
        from idemp.inbox.sql import SqlStore

        if not isinstance(app.store, SqlStore):
            raise ConfigurationError(
                f"The inbox of {app.name!r} is a {type(app.store).__name__}, which the processes of Spark can't share.",
                fix="Give the app a database: App(…, database=…), or IDEMP_DATABASE_URL.",
            )
        free_locks_in_time(app.store.engine)
        return app.store

    def bulk(self, app: App, store: SqlStore | None = None) -> Bulk:
        """What runs chunks; on another store of the same inbox where one is given.

        Raises:
            ConfigurationError: as `store` says; or its schema or identities are not as they must be.
            StoreUnavailable: the database can't be reached.
        """
        store = store or self.store(app)
        made = Bulk(app, store=store, sets=self.sets, dispatch=self.dispatch, adopt=self.adopt, dry_run=self.dry_run)
        made.start()
        return made

    def check(self) -> Settings:
        """See on the driver that tasks will be able to do their work; the settings, with the database that the app has.

        Raises:
            ConfigurationError, StoreUnavailable: as `load` and `bulk` say.
        """
        app = self.load()
        try:
            self.bulk(app)
            url: str = cast("SqlStore", app.store).engine.url.render_as_string(hide_password=False)
        finally:
            app.close()
        return self.settings.model_copy(update={"database_url": url})


def _answered(report: Report) -> Iterator[pa.RecordBatch]:
    """A report as rows of `RESULT`."""
    import pyarrow as pa

    letters = [{**asdict(each.row), "error": each.error, "reason": each.reason} for each in report.parked]
    counts = {came.value: report.counts[came] for came in Came} | {"outputs": report.outputs}
    yield pa.RecordBatch.from_pylist([counts, *letters], schema=_result_schema())


def _result_schema() -> pa.Schema:
    import pyarrow as pa

    kinds: dict[str, pa.DataType] = {
        "STRING": pa.string(),
        "BINARY": pa.binary(),
        "TIMESTAMP": pa.timestamp("us", "UTC"),
        "BIGINT": pa.int64(),
    }
    columns = (column.split() for column in RESULT.split(", "))
    return pa.schema([(name, kinds[kind]) for name, kind in columns])


class _Workplace:
    """The app that this Python worker has open: one for all tasks of a job, so that they share a connection."""

    def __init__(self) -> None:
        self._token = ""
        self._app: App | None = None
        self._bulk: Bulk | None = None

    def bulk(self, job: Job) -> Bulk:
        """What runs chunks of this job; the connection of another job ends."""
        if self._bulk is None or self._token != job.token:
            if self._app is not None:
                self._app.close()
            self._bulk, self._app = None, job.load()
            self._bulk = persistently(partial(job.bulk, self._app))
            self._token = job.token
        return self._bulk


_workplace: Final = _Workplace()


def free_locks_in_time(engine: Engine) -> None:
    """Have the server end what a process that is gone, or hangs, leaves open."""
    if engine.dialect.name == "postgresql":
        pooler.with_settings(engine, _SETTINGS)


def persistently(run: Callable[[], T]) -> T:
    """Run it, again while the database is away or somebody holds what it needs; what was committed is a replay then.

    Example:
        >>> persistently(lambda: "done")
        'done'
    """
    begun, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    while True:
        try:
            return run()
        except (StoreUnavailable, TransientStoreError):
            if time.monotonic() - begun + pause > _PATIENCE_SECONDS:
                raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class Pace:
    """Lets so many rows a second pass.

    Example:
        >>> Pace(None).wait(1_000_000)
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._begun = time.monotonic()
        self._rows = 0

    def wait(self, rows: int) -> None:
        """So many were just handled: wait until that is not too many."""
        if self._rate is None:
            return
        self._rows += rows
        early = self._begun + self._rows / self._rate - time.monotonic()
        if early > 0:
            time.sleep(early)
