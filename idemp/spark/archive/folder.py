"""An archive on disk: runs, each with its Parquet files and a manifest. A run is there as a whole, or not at all.

```
FOLDER/
  20261122T061500Z-shop/        one run: what had expired of one consumer
    inbox/date=2026-11-01/…       claims, by the day (UTC) on which they were made
    outputs/date=2026-11-01/…     their outputs, by the same day
    manifest.json                 counts and digests; what is behind it was read back and compared
    purged                        what the run has is deleted from the database
  _working-…/                   a run that did not come to its end: nothing of it counts, and the next run removes it
```

The folder has to be on this machine, or mounted: a run appears by being renamed, and Spark's tasks write into it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from idemp.errors import ConfigurationError, StoreError

MANIFEST: Final = "manifest.json"
MANIFEST_VERSION: Final = 1
TABLES: Final = ("inbox", "outputs")
_PURGED: Final = "purged"
_WORKING: Final = "_working-"
_LOCK: Final = ".lock"


class ArchiveDamaged(StoreError):
    """Files of an archive are missing or not as they were written. Nothing was deleted from the database for them."""

    says_committed = False


@dataclass(frozen=True, slots=True)
class Table:
    """What a manifest says of one table of a run.

    Attributes:
        rows: how many.
        digest: of all of them, whatever their order: the sum of Spark's `xxhash64` over each row.
    """

    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class File:
    """A file of a run: its path below the run's folder, its size, and the SHA-256 of its bytes in hex digits."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run has.

    Attributes:
        run: its name.
        consumer: whose claims.
        made_at: when it was verified.
        since: claims of this consumer that were deleted from before this moment on are in no run.
        until: its claims are from before this moment.
        cutoffs: until when claims of each type were archived.
        others: likewise for types that have no window of their own; `None` if there were none.
        tables: by `inbox` and `outputs`.
        days: claims and outputs of each day.
        files: all of them.
        after: the consumer's run before it; `None` for the first one.
    """

    run: str
    consumer: str
    made_at: datetime
    since: datetime
    until: datetime
    cutoffs: Mapping[str, datetime]
    others: datetime | None
    tables: Mapping[str, Table]
    days: Mapping[str, Mapping[str, int]]
    files: tuple[File, ...]
    after: str | None = None

    def to_json(self) -> str:
        """As it stands in the folder."""
        return json.dumps(
            {"version": MANIFEST_VERSION, **asdict(self)}, default=datetime.isoformat, indent=2, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Out of the folder.

        Raises:
            ArchiveDamaged: it is none, or of another version.
        """
        try:
            said: dict[str, Any] = json.loads(text)
            if said.pop("version") != MANIFEST_VERSION:
                raise ArchiveDamaged(f"The manifest is not of version {MANIFEST_VERSION}.", fix="Use a newer release.")
            moments = {name: datetime.fromisoformat(said[name]) for name in ("made_at", "since", "until")}
            others = said["others"]
            return cls(
                **{
                    **said,
                    **moments,
                    "cutoffs": {name: datetime.fromisoformat(at) for name, at in said["cutoffs"].items()},
                    "others": datetime.fromisoformat(others) if others is not None else None,
                    "tables": {name: Table(**table) for name, table in said["tables"].items()},
                    "files": tuple(File(**file) for file in said["files"]),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArchiveDamaged(f"The manifest can't be read: {error!r}.", fix=_RESTORE_COPY) from None


_RESTORE_COPY: Final = (
    "Bring the run back from a copy. If you have none, remove its folder: the next guard file reaches no further back."
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is whole."""

    folder: Path
    manifest: Manifest

    @property
    def purged(self) -> bool:
        """Whether what it has is deleted from the database."""
        return (self.folder / _PURGED).exists()

    def mark_purged(self) -> None:
        """So that nobody looks for its rows in the database again."""
        (self.folder / _PURGED).touch()
        sync(self.folder)

    def path(self, table: str) -> str:
        """Where the files of a table are; it may have none."""
        return str(self.folder / table)

    def check_there(self, table: str) -> None:
        """See that no file of a table is missing or cut off; what is in them is not read.

        Raises:
            ArchiveDamaged: one is.
        """
        for file in self.manifest.files:
            place = self.folder / file.path
            if file.path.startswith(f"{table}/") and not (place.is_file() and place.stat().st_size == file.size):
                raise ArchiveDamaged(f"The file {file.path} of the run {self.folder} is missing.", fix=_RESTORE_COPY)

    def check_files(self) -> None:
        """See that all files are as they were written.

        Raises:
            ArchiveDamaged: one is not.
        """
        for file in self.manifest.files:
            found = described(self.folder, self.folder / file.path) if (self.folder / file.path).is_file() else None
            if found != file:
                what = "is missing" if found is None else "was altered"
                raise ArchiveDamaged(f"The file {file.path} of the run {self.folder} {what}.", fix=_RESTORE_COPY)


def gaps(runs: Sequence[Run]) -> dict[str, datetime]:
    """Until when claims of a consumer may be missing, because a run is that another one came after.

    Args:
        runs: all that there are, the oldest first.
    """
    names = {run.manifest.run for run in runs}
    behind = [run.manifest for run in runs if run.manifest.after not in {None, *names}]
    return {manifest.consumer: manifest.until for manifest in behind}


class Archive:
    """A folder of runs.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Archive(Path(folder)).runs()
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()  # Spark's own process may have another working directory

    def runs(self, consumer: str | None = None) -> list[Run]:
        """The runs that are whole, the oldest first.

        Raises:
            ArchiveDamaged: a manifest can't be read.
        """
        found = []
        for path in sorted(self.folder.glob(f"[!_.]*/{MANIFEST}")):
            try:
                manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
            except ArchiveDamaged as error:
                raise ArchiveDamaged(f"{path}: {error.message}", fix=error.fix) from None
            found.append(Run(path.parent, manifest))
        return [run for run in found if consumer in {None, run.manifest.consumer}]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While nobody else changes it; what others left unfinished is removed first.

        Raises:
            ConfigurationError: somebody else does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    f"Somebody else is archiving into {self.folder}.", fix="Nothing was changed. Try again later."
                ) from None
            for path in self.folder.glob(f"{_WORKING}*"):
                shutil.rmtree(path)
            yield

    def name_of(self, consumer: str, moment: datetime) -> str:
        """A new run's name."""
        plain = "".join(each if each.isalnum() else "-" for each in consumer)
        told = hashlib.sha256(consumer.encode()).hexdigest()[:8]
        return f"{moment.astimezone(UTC):%Y%m%dT%H%M%S%fZ}-{plain[:40]}-{told}"

    def working(self, name: str) -> Path:
        """Where a run is made."""
        return self.folder / f"{_WORKING}{name}"

    def publish(self, manifest: Manifest) -> Run:
        """A run that was verified takes its place among the others."""
        working, place = self.working(manifest.run), self.folder / manifest.run
        for file in manifest.files:
            sync(working / file.path)
        told = working / MANIFEST
        told.write_text(manifest.to_json(), encoding="utf-8")
        sync(told)
        for folder in {path.parent for path in working.rglob("*")}:
            sync(folder)
        working.rename(place)
        sync(self.folder)
        return Run(place, manifest)


def described(run: Path, file: Path) -> File:
    """What a manifest says of a file."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return File(str(file.relative_to(run)), file.stat().st_size, digest)


def data_files(run: Path) -> list[Path]:
    """The Parquet files of a run; what Spark keeps beside them for itself is none."""
    return sorted(path for table in TABLES for path in (run / table).rglob("*.parquet") if path.name[0] not in "._")


def sync(path: Path) -> None:
    """So that a file, or the names in a folder, outlive a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
