"""From the database into the archive, and only then out of the database.

Each step leaves a state from which the next run goes on, wherever the process ends:

1. *finish*: what earlier runs have and did not delete is deleted, see 4.
2. *export*: expired claims without pending outputs go to Parquet in a working folder, all as of one moment.
3. *verify, publish*: the files are read back, and counts and digests compared with what was written; then the run
   gets its manifest and its name.
4. *guard, purge*: the guard file is made anew with the run's ids in it. Then exactly the claims that the run has are
   deleted, by their keys: a claim whose output was confirmed meanwhile is expired as well, and is for the next run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pyarrow.dataset as ds
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from idemp.inbox.port import HORIZON_SLACK
from idemp.inbox.sql.liveness import FAR_PAST
from idemp.plurals import counted
from idemp.spark.archive import guards
from idemp.spark.archive.folder import Archive, ArchiveDamaged, Manifest, Run, Table, data_files, described
from idemp.spark.archive.reading import Inbox

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from idemp.inbox.sql import SqlStore

_PURGED_AT_ONCE: Final = 5_000

_OF_OUTPUT: Final = (
    "consumer", "message_key", "output_id", "ordinal", "kind", "exchange", "routing_key", "envelope", "body",
)  # fmt: skip

log = logging.getLogger("idemp.archive")


@dataclass(frozen=True, slots=True)
class Windows:
    """How long claims of a consumer are kept.

    Attributes:
        consumer: whose.
        by_type: of these types.
        others: of all other types; `None` for ever.
    """

    consumer: str
    by_type: Mapping[str, timedelta]
    others: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one run.

    Attributes:
        run: its name.
        consumer: whose claims.
        claims: in the archive.
        outputs: in the archive.
        deleted: claims that were deleted from the database now.
        until: they are from before this moment.
    """

    run: str
    consumer: str
    claims: int
    outputs: int
    deleted: int
    until: datetime


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """From before when claims are expired, by type; of all other types."""

    by_type: Mapping[str, datetime]
    others: datetime | None

    @property
    def until(self) -> datetime:
        """No claim from this moment on is."""
        return max([FAR_PAST, *self.by_type.values(), *([self.others] if self.others is not None else [])])

    def condition(self) -> Column:
        """Of the claims that are."""
        moment = F.lit(self.others).cast("timestamp")
        for name, before in self.by_type.items():
            moment = F.when(F.col("type") == name, F.lit(before)).otherwise(moment)
        return F.coalesce(F.col("claimed_at") < moment, F.lit(0).cast("boolean"))

    def reach(self, earlier: Cutoffs) -> bool:
        """Whether what was expired by those is by these as well."""

        def of(cutoffs: Cutoffs, name: str) -> datetime:
            return cutoffs.by_type.get(name) or cutoffs.others or FAR_PAST

        names = {*self.by_type, *earlier.by_type}
        others = (self.others or FAR_PAST) >= (earlier.others or FAR_PAST)
        return others and all(of(self, name) >= of(earlier, name) for name in names)


class Archiver:
    """Archives expired claims with their outputs, and deletes what is archived. Run it as often as you like.

    Args:
        spark: a session.
        store: the inbox.
        archive: where runs go.
        inbox: how Spark's tasks read the same inbox.
        guard: the guard file that is made anew each time; `None` for none.
        guard_span: how far back it reaches; `None` for as far as the archive does.
    """

    def __init__(
        self,
        spark: SparkSession,
        store: SqlStore,
        archive: Archive,
        inbox: Inbox,
        *,
        guard: Path | None = None,
        guard_span: timedelta | None = None,
    ) -> None:
        self._spark = spark
        self._store = store
        self._archive = archive
        self._inbox = inbox
        self._guard = guard
        self._guard_span = guard_span

    def run(self, windows: Sequence[Windows]) -> list[Done]:
        """Archive and delete what has expired of these consumers.

        Raises:
            ConfigurationError: somebody else is archiving into the same folder.
            ArchiveDamaged: what was read back is not what was written; nothing was deleted for it.
            StoreError: the database could not do its part; run it again.
        """
        with self._archive.locked():
            cutoffs = {each.consumer: self._cutoffs(each) for each in windows}
            done = self._finish(cutoffs)
            for each in windows:
                self._export(each.consumer, cutoffs[each.consumer])
            return [*done, *self._finish(cutoffs)]

    # Which ------------------------------------------------------------------------------------------------------------

    def _cutoffs(self, windows: Windows) -> Cutoffs:
        """From before when claims are expired: as a cleaner would have it."""

        def start(window: timedelta) -> datetime:
            # A worker may still go by the start of a window that it read a while ago: see HORIZON_SLACK.
            return self._store.upkeep.late_before(windows.consumer, window + HORIZON_SLACK)

        others = start(windows.others) if windows.others is not None else None
        return Cutoffs({name: start(window) for name, window in windows.by_type.items()}, others)

    # Out of the database ----------------------------------------------------------------------------------------------

    def _export(self, consumer: str, cutoffs: Cutoffs) -> Run | None:
        """A new run, verified; none if nothing has expired."""
        if cutoffs.until <= FAR_PAST:
            return None
        name = self._archive.name_of(consumer, datetime.now(UTC))
        working = self._archive.working(name)
        with self._inbox.at_one_moment(self._spark) as read:
            claims = self._write_claims(read("inbox", consumer, cutoffs.until), cutoffs, working)
            if not claims.rows:
                return None
            outputs = self._write_outputs(read("outputs", consumer, cutoffs.until), working)
        days = self._verify(working, {"inbox": claims, "outputs": outputs})
        manifest = Manifest(
            run=name,
            consumer=consumer,
            made_at=datetime.now(UTC),
            since=self._since(consumer),
            until=cutoffs.until,
            cutoffs=cutoffs.by_type,
            others=cutoffs.others,
            tables={"inbox": claims, "outputs": outputs},
            days=days,
            files=tuple(described(working, file) for file in data_files(working)),
            after=max((run.manifest.run for run in self._archive.runs(consumer)), default=None),
        )
        return self._archive.publish(manifest)

    def _write_claims(self, inbox: DataFrame, cutoffs: Cutoffs, working: Path) -> Table:
        expired = inbox.where(cutoffs.condition() & ~F.col("pending")).drop("pending")
        dated = expired.withColumn("date", F.to_date(F.to_utc_timestamp("claimed_at", _session_zone(self._spark))))
        return _written(dated, working / "inbox")

    def _write_outputs(self, outputs: DataFrame, working: Path) -> Table:
        # Of the claims that were written: read anew, some may have become settled since (where there is no snapshot).
        archived = self._read(working / "inbox").select("message_key", "date")
        wanted = outputs.select(*_OF_OUTPUT).join(archived, "message_key").select(*_OF_OUTPUT, "date")
        return _written(wanted, working / "outputs")

    def _verify(self, working: Path, written: Mapping[str, Table]) -> dict[str, dict[str, int]]:
        """Read the files back; how many claims and outputs each day has."""
        days: dict[str, dict[str, int]] = {}
        for name, table in written.items():
            by_day = self._found(working / name)
            found = Table(
                sum(day.rows for day in by_day.values()), str(sum(int(day.digest) for day in by_day.values()))
            )
            if found != table:
                raise ArchiveDamaged(
                    f"{working / name} was read back with {found.rows} rows (digest {found.digest}), and {table.rows} "
                    f"(digest {table.digest}) were written. Nothing was deleted from the database.",
                    fix="Run it again. If that does not help, look at the disk.",
                )
            for date, day in by_day.items():
                days.setdefault(date, dict.fromkeys(written, 0))[name] = day.rows
        return dict(sorted(days.items()))

    def _found(self, path: Path) -> dict[str, Table]:
        """What the files of a table have, by day; a digest is a sum, so that those of days add up."""
        if not any(path.rglob("*.parquet")):
            return {}
        frame = self._read(path)
        rows = frame.groupBy("date").agg(*_summary(frame)).collect()
        return {row["date"].isoformat(): Table(int(row["rows"]), str(row["digest"])) for row in rows}

    def _read(self, path: Path) -> DataFrame:
        return self._spark.read.parquet(str(path)).withColumn("date", F.col("date").cast("date"))

    def _since(self, consumer: str) -> datetime:
        """From when on all claims of this consumer that were ever deleted are in the archive."""
        purged = self._store.upkeep.purged_before(consumer)
        if purged is None:
            return FAR_PAST
        last = max((run.manifest for run in self._archive.runs(consumer)), key=lambda run: run.until, default=None)
        return last.since if last is not None and last.until >= purged else purged

    # Into the guard, and away -------------------------------------------------------------------------------------------

    def _finish(self, cutoffs: Mapping[str, Cutoffs]) -> list[Done]:
        """Delete what is archived, once the guard knows it."""
        waiting = [run for run in self._archive.runs() if not run.purged and self._may_go(run, cutoffs)]
        if self._guard is not None and (waiting or not self._guard.exists()):
            guards.build(self._spark, self._archive, self._guard, span=self._guard_span)
        return [self._purge(run) for run in waiting]

    @staticmethod
    def _may_go(run: Run, cutoffs: Mapping[str, Cutoffs]) -> bool:
        """Whether its claims are expired still: somebody may have lengthened a window since."""
        now = cutoffs.get(run.manifest.consumer)
        return now is not None and now.reach(Cutoffs(run.manifest.cutoffs, run.manifest.others))

    def _purge(self, run: Run) -> Done:
        manifest, upkeep = run.manifest, self._store.upkeep
        run.check_files()
        deleted = 0
        for keys in _keys(run):
            deleted += upkeep.purge_archived(manifest.consumer, keys, manifest.until)
        upkeep.tidy_archived(manifest.consumer, manifest.until)
        run.mark_purged()
        claims, outputs = manifest.tables["inbox"].rows, manifest.tables["outputs"].rows
        log.info(
            "archived %s and %s of %s, and deleted %s",
            counted(claims, "claim"),
            counted(outputs, "output"),
            manifest.consumer,
            counted(deleted, "claim"),
            extra={
                "event": "archived",
                "consumer": manifest.consumer,
                "run": manifest.run,
                "claims": claims,
                "outputs": outputs,
                "deleted": deleted,
            },
        )
        return Done(manifest.run, manifest.consumer, claims, outputs, deleted, manifest.until)


def _written(frame: DataFrame, path: Path) -> Table:
    """Write Parquet by day; how much was written, summed up by the tasks that wrote it."""
    told = Observation()
    observed = frame.observe(told, *_summary(frame))
    observed.sortWithinPartitions("date", "message_key").write.partitionBy("date").parquet(str(path))
    summary: Mapping[str, Any] = told.get
    return Table(int(summary["rows"]), str(summary["digest"]))


def _summary(frame: DataFrame) -> tuple[Column, Column]:
    """How many rows, and a digest of all that does not depend on their order."""
    columns = sorted(frame.columns)
    digest = F.sum(F.xxhash64(*columns).cast("decimal(38,0)"))
    return F.count(F.lit(1)).alias("rows"), F.coalesce(digest.cast("string"), F.lit("0")).alias("digest")


def _session_zone(spark: SparkSession) -> str:
    zone = spark.conf.get("spark.sql.session.timeZone")
    return zone or "UTC"


def _keys(run: Run) -> Iterator[list[UUID]]:
    """The keys of a run's claims, some thousands at once."""
    files = ds.dataset(run.path("inbox"), format="parquet", partitioning="hive")
    for batch in files.to_batches(columns=["message_key"], batch_size=_PURGED_AT_ONCE):
        if len(batch):
            yield [UUID(bytes=key) for key in batch.column(0).to_pylist()]
