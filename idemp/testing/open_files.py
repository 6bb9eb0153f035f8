"""Files that were open before a handler ran: what is written to them raises no audit event, but changes them."""

from __future__ import annotations

import logging
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCRIPTORS: Final = Path("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd")
_SQLITE: Final = b"SQLite format 3\0"
_OF_SQLITE: Final = ("-wal", "-shm", "-journal")
_STANDARD: Final = (1, 2)


class OpenFiles:
    """The files that are open for writing now, and later which of them were written to.

    Log files are left out, and standard output; databases of SQLite are looked at elsewhere.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(prefix="journal") as file:
        ...     before = OpenFiles()
        ...     _ = file.write(b"7;charged"), file.flush()
        ...     before.changed() == [file.name]
        True
    """

    def __init__(self) -> None:
        self._before = dict(_states())

    def changed(self) -> list[str]:
        """The names of the files that were written to since."""
        after = dict(_states())
        return [name for file, (name, told) in self._before.items() if file in after and after[file][1] != told]


def _states() -> Iterator[tuple[tuple[int, int], tuple[str, tuple[int, int]]]]:
    """For each file its name, its size, and when it was changed."""
    left_out = set(_log_files())
    with suppress(OSError):  # this system does not list them
        for entry in list(_DESCRIPTORS.iterdir()):
            with suppress(OSError, ValueError):
                number = int(entry.name)
                told = os.fstat(number)
                file = told.st_dev, told.st_ino
                if stat.S_ISREG(told.st_mode) and file not in left_out and _may_be_written(number):
                    name = str(entry.readlink())
                    if not _is_special(number, name):
                        yield file, (name, (told.st_size, told.st_mtime_ns))


def _may_be_written(descriptor: int) -> bool:
    import fcntl  # not on Windows, which lists no descriptors, either

    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _is_special(descriptor: int, name: str) -> bool:
    if name.endswith(_OF_SQLITE) or ".log" in Path(name).name:
        return True
    with suppress(OSError):  # it can't be read
        return os.pread(descriptor, len(_SQLITE), 0) == _SQLITE
    return False


def _log_files() -> Iterator[tuple[int, int]]:
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]  # noqa: SLF001 - there is no other list
    streams: list[Any] = [sys.stdout, sys.stderr, *(getattr(handler, "stream", None) for handler in handlers)]
    for stream in (*_STANDARD, *streams):
        with suppress(Exception):  # closed, or no file
            told = os.fstat(stream if isinstance(stream, int) else stream.fileno())
            yield told.st_dev, told.st_ino
