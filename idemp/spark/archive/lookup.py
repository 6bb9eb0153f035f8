"""Asking the archive about one id. Arrow only: neither Spark nor Java."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from idemp.spark.archive.folder import Archive

if TYPE_CHECKING:
    from uuid import UUID


def asking(folder: str | Path) -> Callable[[str, UUID], bool]:
    """What asks an archive whether a consumer handled an id, for `LateGuard(path, ask=…)`.

    It looks into the files of all runs of the consumer: some milliseconds each. That is meant for the few late messages of
    which the guard file says "perhaps".

    Args:
        folder: the archive, as this process sees it.

    Example:
        >>> import tempfile, uuid
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     asking(folder)("shop", uuid.uuid4())
        False
    """
    archive = Archive(Path(folder))

    def ask(consumer: str, key: UUID) -> bool:
        import pyarrow.dataset as ds

        for run in archive.runs(consumer):
            claims = ds.dataset(run.path("inbox"), format="parquet", partitioning="hive")
            if claims.count_rows(filter=ds.field("message_key") == key.bytes):
                return True
        return False

    return ask
