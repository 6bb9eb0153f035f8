"""Parked messages of a micro-batch, as Parquet where the other sink's are: by run, batch and error."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from idemp.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa
    from pyarrow import fs

    from idemp.bulk import Parked


class Letters:
    """What can't be handled of a micro-batch. It is written before COMMIT: nothing is handled whose neighbour is lost.

    A file is named by what is in it, so that a micro-batch that runs again writes the same one, not another.

    Args:
        folder: as users name it: a path, or a URL that pyarrow knows (`s3://`, `gs://`, `hdfs://`).
        run: as it is called there.
        batch: its number.
        size: bytes of bodies that are held; beyond that they are written as they come.
    """

    def __init__(self, folder: str, run: str, batch: int, size: int) -> None:
        self._folder = folder
        self._below = f"run={quote(run, safe='')}/batch={batch}"
        self._most = size
        self._size = 0
        self._held: list[Parked] = []

    def add(self, parked: Iterable[Parked]) -> None:
        """Keep them, and write them where they are too many.

        Raises:
            StoreError: the folder takes no files.
        """
        for each in parked:
            self._held.append(each)
            self._size += len(each.row.body or b"") + len(each.row.headers or "")
        if self._size > self._most:
            self.write()

    def write(self) -> None:
        """Write what is held.

        Raises:
            StoreError: the folder takes no files.
        """
        by_error: dict[str, list[Parked]] = {}
        for each in sorted(self._held, key=_place):
            by_error.setdefault(each.error, []).append(each)
        try:
            for error, letters in by_error.items():
                self._write(error, letters)
        except OSError as reason:
            raise StoreError(
                f"Messages that can't be handled could not be parked in {self._folder}: {reason}.",
                fix="Nothing of the micro-batch was handled. Mend the folder, and start the query again.",
            ) from reason
        self._held, self._size = [], 0

    def _write(self, error: str, letters: list[Parked]) -> None:
        from pyarrow import parquet

        table = _table(letters)
        name = hashlib.sha256(repr(table.to_pylist()).encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]
        system, root = _system(self._folder)
        folder = f"{root}/{self._below}/error={quote(error, safe='')}"
        system.create_dir(folder, recursive=True)
        hidden = f"{folder}/_{name}"  # readers pass over it, until it is whole
        parquet.write_table(table, hidden, filesystem=system)
        system.move(hidden, f"{folder}/{name}.parquet")


_NAME_DIGITS: Final = 32


def _system(folder: str) -> tuple[fs.FileSystem, str]:
    from pyarrow import fs

    found, root = fs.FileSystem.from_uri(folder if "://" in folder else str(Path(folder).absolute()))
    return found, root.rstrip("/")


def _place(letter: Parked) -> tuple[str, str, bytes]:
    return letter.row.position or "", letter.row.id or "", letter.row.body or b""


def _table(letters: list[Parked]) -> pa.Table:
    import pyarrow as pa

    from idemp.bulk.arrow import KINDS

    schema = pa.schema([*KINDS.items(), ("reason", pa.string())])
    rows: list[dict[str, Any]] = [{**asdict(each.row), "reason": each.reason} for each in letters]
    return pa.Table.from_pylist(rows, schema=schema)
