"""Asking the archive about one id. Arrow only: neither Spark nor Java."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from idemp.spark.archive.folder import Archive, ArchiveDamaged, gaps

if TYPE_CHECKING:
    from uuid import UUID


def asking(folder: str | Path) -> Callable[[str, UUID], bool]:
    """What asks an archive whether a consumer handled an id, for `LateGuard(path, ask=…)`.

    It looks into the files of all runs of the consumer: some milliseconds each. That is meant for the few late messages of
    which the guard file says "perhaps". It answers no only if it could look: a guard is made of an archive, so that one
    without a run of the consumer is not there, such as a disk that is not mounted.

    Args:
        folder: the archive, as this process sees it.

    Raises:
        ArchiveDamaged: what is returned does: the archive is not there, or files of it are missing.

    Example:
        >>> import tempfile, uuid
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     asking(folder)("shop", uuid.uuid4())
        Traceback (most recent call last):
        ...
        idemp.spark.archive.folder.ArchiveDamaged: The archive ... lacks all runs of 'shop'. See that it is mounted ...
    """
    archive = Archive(Path(folder))

    def ask(consumer: str, key: UUID) -> bool:
        import pyarrow.dataset as ds

        runs = archive.runs(consumer)
        if not runs or gaps(runs):
            raise ArchiveDamaged(
                f"The archive {folder} lacks {'a run' if runs else 'all runs'} of {consumer!r}.",
                fix="See that it is mounted and complete; until then nobody can tell what was handled.",
            )
        for run in runs:
            run.check_there("inbox")
            claims = ds.dataset(run.path("inbox"), format="parquet", partitioning="hive")
            if claims.count_rows(filter=ds.field("message_key") == key.bytes):
                return True
        return False

    return ask
