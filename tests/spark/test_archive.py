"""The archive: what has expired is in it before it is deleted, wherever a run ends; and it comes back."""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp.errors import ConfigurationError
from idemp.lateguard import Guard
from idemp.spark.archive import Archive, ArchiveDamaged, asking, guards
from idemp.spark.archive import archiving as steps
from idemp.spark.archive.archiving import Archiver, Windows
from idemp.spark.archive.reading import Inbox as Place
from idemp.spark.archive.restoring import Restored, Wanted, restore
from tests.inbox.sql.days import new_id_at
from tests.spark.inboxes import START, Inbox, inbox_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

WEEK = timedelta(days=7)
WINDOWS = [Windows("shop", {"shop.Order": WEEK}, WEEK)]


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    """See `fill`."""
    with inbox_at(f"sqlite:///{tmp_path}/inbox.db", tmp_path) as made:
        fill(made)
        yield made


@pytest.fixture(params=["postgresql", "sqlite"])
def each_inbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inbox]:
    """See `fill`."""
    if request.param == "sqlite":
        yield request.getfixturevalue("inbox")
        return
    with inbox_at(request.getfixturevalue("postgresql_url"), tmp_path) as made:
        fill(made)
        yield made


def fill(made: Inbox) -> None:
    """Ten claims expire, one of which pends, and another is somebody else's; five do not."""
    for number in range(8):
        made.handle(f"old-{number}", outputs=number % 3)
        made.clock.advance(timedelta(hours=5))
    made.handle("waiting", outputs=1, confirmed=False)
    made.handle("other", consumer="billing", outputs=1)
    made.consumed_for(timedelta(days=8))
    for number in range(5):
        made.handle(f"new-{number}", outputs=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def archiver(spark: SparkSession, inbox: Inbox, folder: Path, **options: Any) -> Archiver:
    return Archiver(spark, inbox.store, Archive(folder), Place(url_file=inbox.url_file), **options)


def ids(inbox: Inbox) -> set[str]:
    with inbox.store.engine.connect() as connection:
        return set(connection.scalars(text("SELECT original_id FROM idemp_inbox")))


OLD = {f"old-{number}" for number in range(8)}
KEPT = {"waiting", "other", *(f"new-{number}" for number in range(5))}


class TestRun:
    def test_archives_verifies_and_deletes(self, spark: SparkSession, each_inbox: Inbox, folder: Path) -> None:
        inbox = each_inbox
        (done,) = archiver(spark, inbox, folder).run(WINDOWS)
        assert (done.consumer, done.claims, done.outputs, done.deleted) == ("shop", 8, 7, 8)
        assert ids(inbox) == KEPT
        assert inbox.count("output") == 7
        (run,) = Archive(folder).runs()
        run.check_files()
        assert run.purged
        assert run.manifest.days == {
            "2026-03-01": {"inbox": 3, "outputs": 3},
            "2026-03-02": {"inbox": 5, "outputs": 4},
        }
        claims = spark.read.parquet(run.path("inbox"))
        assert {row[0] for row in claims.select("original_id").collect()} == OLD
        assert set(claims.columns) == {
            "consumer", "message_key", "original_id", "type", "claimed_at", "fingerprint", "source_position", "worker",
            "date",
        }  # fmt: skip
        bodies = {bytes(row[0]) for row in spark.read.parquet(run.path("outputs")).select("body").collect()}
        assert bodies == {b'{"n": 0}', b'{"n": 1}'}

    def test_again_there_is_nothing_to_do(self, spark: SparkSession, inbox: Inbox, folder: Path) -> None:
        archiver(spark, inbox, folder).run(WINDOWS)
        assert archiver(spark, inbox, folder).run(WINDOWS) == []
        assert len(Archive(folder).runs()) == 1

    def test_what_was_pending_is_for_the_next_run(
        self, spark: SparkSession, inbox: Inbox, folder: Path, tmp_path: Path
    ) -> None:
        archiver(spark, inbox, folder).run(WINDOWS)
        with inbox.store.engine.begin() as connection:
            connection.execute(text("DELETE FROM idemp_pending"))
        inbox.consumed_for(timedelta(days=1))
        (done,) = archiver(spark, inbox, folder).run(WINDOWS)
        assert (done.claims, done.outputs, done.deleted) == (1, 1, 1)
        # Without the first run its ids are in no file: that they were never handled nobody may say.
        first, second = Archive(folder).runs("shop")
        shutil.rmtree(first.folder)
        guards.build(spark, Archive(folder), tmp_path / "guard")
        guard, purged = Guard(tmp_path / "guard"), inbox.store.upkeep.purged_before("shop")
        assert not guard.covers("shop", START, purged)
        assert guard.covers("shop", second.manifest.until, purged)
        with pytest.raises(ArchiveDamaged, match="lacks a run of 'shop'"):
            asking(folder)("shop", inbox.claims[0].id.key)

    def test_claims_without_any_outputs(self, spark: SparkSession, postgresql_url: str, tmp_path: Path) -> None:
        with inbox_at(postgresql_url, tmp_path) as inbox:
            inbox.handle("old-1")
            inbox.consumed_for(timedelta(days=8))
            (done,) = archiver(spark, inbox, tmp_path / "archive").run(WINDOWS)
            assert (done.claims, done.outputs, done.deleted) == (1, 0, 1)
            assert restore(spark, Archive(tmp_path / "archive"), inbox.store, Wanted()) == Restored(1, 1)

    def test_types_have_windows_of_their_own(self, spark: SparkSession, inbox: Inbox, folder: Path) -> None:
        inbox.handle("young", message_type="shop.Tick")
        inbox.consumed_for(timedelta(hours=2))
        windows = Windows(
            "shop", {"shop.Order": timedelta(days=30), "shop.Tick": timedelta(hours=1)}, timedelta(days=30)
        )
        (done,) = archiver(spark, inbox, folder).run([windows])
        assert done.claims == 1
        assert ids(inbox) == OLD | KEPT

    def test_what_expires_meanwhile_stays(
        self, spark: SparkSession, inbox: Inbox, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its output was confirmed after the files were written: it is expired, and in no file."""

        def confirmed_first(run: Any) -> Iterator[list[uuid.UUID]]:
            with inbox.store.engine.begin() as connection:
                connection.execute(text("DELETE FROM idemp_pending"))
            yield from real(run)

        real = steps._keys
        monkeypatch.setattr(steps, "_keys", confirmed_first)
        archiver(spark, inbox, folder).run(WINDOWS)
        assert ids(inbox) == KEPT

    def test_days_in_tables_of_their_own(self, spark: SparkSession, postgresql_url: str, tmp_path: Path) -> None:
        with inbox_at(postgresql_url, tmp_path) as inbox:
            inbox.store.names.id("consumer", "shop")
            inbox.store.upkeep.daily.open("shop", START.date() + timedelta(days=2), ahead=20)
            inbox.clock.advance(timedelta(days=2))
            inbox.store.places.look()
            old = str(new_id_at(inbox.clock.now()))
            inbox.handle(old, outputs=1)
            inbox.consumed_for(timedelta(days=9))
            inbox.handle(str(new_id_at(inbox.clock.now())))
            (done,) = archiver(spark, inbox, tmp_path / "archive").run(WINDOWS)
            assert (done.claims, done.deleted) == (1, 1)
            assert inbox.count() == 1
            (layout,) = inbox.store.upkeep.daily.layouts("shop")
            assert layout.dropped > layout.since, "emptied days are dropped"
            restore(spark, Archive(tmp_path / "archive"), inbox.store, Wanted())
            assert inbox.count() == 2


class Killed(BaseException):
    """The process ends here."""


def dying(function: Callable[..., Any], *, before: bool, times: int = 1) -> Callable[..., Any]:
    """What ends the process at a call."""
    calls = iter(range(times))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            return function(*arguments, **options)
        if not before:
            function(*arguments, **options)
        raise Killed

    return call


DEATHS: list[tuple[Any, str, bool]] = [
    (Archiver, "_write_claims", True),
    (Archiver, "_write_outputs", True),
    (Archiver, "_verify", True),
    (Archive, "publish", True),
    (steps.guards, "build", True),
    (Archiver, "_purge", True),
    (steps.Run, "mark_purged", True),
    (steps.Run, "mark_purged", False),
]
"""Before each step, and after the last."""


class TestEnds:
    def test_wherever_it_ends_the_next_run_goes_on(
        self, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One death after the other: each run first goes on where the one before it ended."""
        folder, guard = tmp_path / "archive", tmp_path / "guard"
        with inbox_at(f"sqlite:///{tmp_path}/inbox.db", tmp_path) as inbox:
            for round_, (owner, step, before) in enumerate(DEATHS):
                for number in range(3):
                    inbox.handle(f"old-{round_}-{number}", outputs=1)
                inbox.consumed_for(timedelta(days=8))
                inbox.handle(f"new-{round_}")
                with monkeypatch.context() as patch:
                    patch.setattr(owner, step, dying(getattr(owner, step), before=before))
                    with pytest.raises(Killed):
                        archiver(spark, inbox, folder, guard=guard).run(WINDOWS)
                in_archive = {key for run in Archive(folder).runs() for keys in steps._keys(run) for key in keys}
                gone = {claim.id.key for claim in inbox.claims if claim.id.text not in ids(inbox)}
                assert gone <= in_archive, f"{step}: deleted, and in no verified run"
                known = Guard(guard) if gone else None
                assert all(known is not None and known.perhaps("shop", key) for key in gone)
            archiver(spark, inbox, folder, guard=guard).run(WINDOWS)
            assert ids(inbox) == {f"new-{len(DEATHS) - 1}"}
            archived = sum(run.manifest.tables["inbox"].rows for run in Archive(folder).runs())
            assert archived == len(inbox.claims) - 1, "each claim once"
            assert not list(folder.glob("_working*"))
            assert restore(spark, Archive(folder), inbox.store, Wanted()) == Restored(archived, archived)

    def test_in_the_middle_of_a_purge(
        self, spark: SparkSession, inbox: Inbox, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(steps, "_PURGED_AT_ONCE", 2)
        upkeep = inbox.store.upkeep
        real, calls = upkeep.purge_archived, iter(range(2))

        def purge(*arguments: Any) -> int:
            if next(calls, None) is None:
                raise Killed
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(upkeep, "purge_archived", purge)
            with pytest.raises(Killed):
                archiver(spark, inbox, folder).run(WINDOWS)
        assert 0 < len(ids(inbox) & OLD) < len(OLD)
        (done,) = archiver(spark, inbox, folder).run(WINDOWS)
        assert (done.claims, ids(inbox)) == (8, KEPT)

    def test_a_window_that_was_lengthened_meanwhile_counts(
        self, spark: SparkSession, inbox: Inbox, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was archived and not deleted yet is a duplicate within the new window."""
        with monkeypatch.context() as patch:
            patch.setattr(Archiver, "_purge", dying(Archiver._purge, before=True))
            with pytest.raises(Killed):
                archiver(spark, inbox, folder).run(WINDOWS)
        longer = [Windows("shop", {"shop.Order": timedelta(days=30)}, timedelta(days=30))]
        assert archiver(spark, inbox, folder).run(longer) == []
        assert ids(inbox) == OLD | KEPT
        archiver(spark, inbox, folder).run(WINDOWS)
        assert ids(inbox) == KEPT


class TestDamage:
    def test_what_was_read_back_differs(
        self, spark: SparkSession, inbox: Inbox, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Archiver._write_claims

        def loses_a_file(self: Archiver, frame: Any, cutoffs: Any, working: Path) -> Any:
            written = real(self, frame, cutoffs, working)
            next((working / "inbox").rglob("*.parquet")).unlink()
            return written

        monkeypatch.setattr(Archiver, "_write_claims", loses_a_file)
        with pytest.raises(ArchiveDamaged, match=r"was read back with . rows .* Nothing was deleted"):
            archiver(spark, inbox, folder).run(WINDOWS)
        assert ids(inbox) == OLD | KEPT
        assert Archive(folder).runs() == []

    @pytest.mark.parametrize("damage", ["missing", "altered"])
    def test_files_are_looked_at_before_anything_depends_on_them(
        self, spark: SparkSession, inbox: Inbox, folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Archiver, "_purge", dying(Archiver._purge, before=True))
            with pytest.raises(Killed):
                archiver(spark, inbox, folder).run(WINDOWS)
        (file, *_) = sorted(folder.rglob("*.parquet"))
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(ArchiveDamaged, match=damage):
            archiver(spark, inbox, folder).run(WINDOWS)
        with pytest.raises(ArchiveDamaged, match=damage):
            restore(spark, Archive(folder), inbox.store, Wanted())
        assert ids(inbox) == OLD | KEPT

    def test_a_manifest_of_another_version(self, spark: SparkSession, inbox: Inbox, folder: Path) -> None:
        archiver(spark, inbox, folder).run(WINDOWS)
        (manifest,) = folder.glob("*/manifest.json")
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
        with pytest.raises(ArchiveDamaged, match="not of version 1"):
            Archive(folder).runs()

    def test_one_run_at_a_time(self, folder: Path) -> None:
        told: list[BaseException] = []

        def another() -> None:
            try:
                with Archive(folder).locked():
                    pass
            except ConfigurationError as error:
                told.append(error)

        with Archive(folder).locked():
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()
        assert "Somebody else is archiving" in str(told[0])


class TestRestore:
    def test_brings_back_what_is_missing(self, spark: SparkSession, each_inbox: Inbox, folder: Path) -> None:
        inbox = each_inbox
        with inbox.store.engine.connect() as connection:
            columns = "message_key, type_id, worker_id, claimed_at, fingerprint, original_id, source_position"
            every = text(f"SELECT {columns} FROM idemp_inbox ORDER BY message_key")
            outputs = text("SELECT * FROM idemp_output ORDER BY message_key, ordinal")
            before = connection.execute(every).all(), connection.execute(outputs).all()
        archiver(spark, inbox, folder).run(WINDOWS)
        assert restore(spark, Archive(folder), inbox.store, Wanted(consumer="shop")) == Restored(8, 8)
        assert restore(spark, Archive(folder), inbox.store, Wanted()) == Restored(8, 0)
        with inbox.store.engine.connect() as connection:
            assert (connection.execute(every).all(), connection.execute(outputs).all()) == before

    def test_what_is_wanted(self, spark: SparkSession, inbox: Inbox, folder: Path) -> None:
        archiver(spark, inbox, folder).run(WINDOWS)
        archive, store = Archive(folder), inbox.store
        assert restore(spark, archive, store, Wanted(consumer="billing")) == Restored(0, 0)
        assert restore(spark, archive, store, Wanted(original_id="old-1")) == Restored(1, 1)
        second = START.date() + timedelta(days=1)
        assert restore(spark, archive, store, Wanted(since=second)) == Restored(5, 5)
        assert restore(spark, archive, store, Wanted(until=second)) == Restored(3, 2)


class TestGuard:
    def test_knows_what_was_deleted(self, spark: SparkSession, inbox: Inbox, folder: Path, tmp_path: Path) -> None:
        archiver(spark, inbox, folder, guard=tmp_path / "guard").run(WINDOWS)
        guard, purged = Guard(tmp_path / "guard"), inbox.store.upkeep.purged_before("shop")
        assert purged is not None
        by_text = {claim.id.text: claim.id.key for claim in inbox.claims}
        assert {text_ for text_, key in by_text.items() if guard.perhaps("shop", key)} == OLD
        assert guard.covers("shop", START, purged)
        assert not guard.covers("shop", START, purged + timedelta(microseconds=1))

    def test_reaches_back_as_far_as_it_is_told(
        self, spark: SparkSession, inbox: Inbox, folder: Path, tmp_path: Path
    ) -> None:
        from idemp.clock import SystemClock

        span = SystemClock().now() - (START + timedelta(days=1))
        archiver(spark, inbox, folder, guard=tmp_path / "guard", guard_span=span).run(WINDOWS)
        guard = Guard(tmp_path / "guard")
        assert guard.description.ids == 5
        assert not guard.covers("shop", START, START)
        assert guard.covers("shop", START + timedelta(days=1, minutes=10), START)

    def test_begins_anew_after_a_purge_that_no_archive_has(
        self, spark: SparkSession, inbox: Inbox, folder: Path, tmp_path: Path
    ) -> None:
        inbox.store.upkeep.purge("shop", {"shop.Order": timedelta(days=8)}, 2)
        purged = inbox.store.upkeep.purged_before("shop")
        assert purged is not None
        archiver(spark, inbox, folder, guard=tmp_path / "guard").run(WINDOWS)
        guard, now = Guard(tmp_path / "guard"), inbox.store.upkeep.purged_before("shop")
        assert not guard.covers("shop", purged - timedelta(seconds=1), now)
        assert guard.covers("shop", purged, now)

    def test_without_anything_archived(self, spark: SparkSession, tmp_path: Path) -> None:
        with inbox_at(f"sqlite:///{tmp_path}/inbox.db", tmp_path) as inbox:
            assert archiver(spark, inbox, tmp_path / "archive", guard=tmp_path / "guard").run(WINDOWS) == []
        assert Guard(tmp_path / "guard").description.ids == 0

    def test_asking_the_archive(self, spark: SparkSession, inbox: Inbox, folder: Path) -> None:
        archiver(spark, inbox, folder).run(WINDOWS)
        ask, by_text = asking(folder), {claim.id.text: claim.id.key for claim in inbox.claims}
        assert ask("shop", by_text["old-3"])
        assert not ask("shop", by_text["new-3"])
        with pytest.raises(ArchiveDamaged, match="lacks all runs of 'billing'"):  # a disk that is not mounted looks so
            ask("billing", by_text["old-3"])
        next(folder.glob("*/inbox/*/*.parquet")).unlink()
        with pytest.raises(ArchiveDamaged, match="is missing"):
            ask("shop", by_text["new-3"])
