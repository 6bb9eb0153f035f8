"""SQLite files that are deleted or replaced while a process has them open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Identity", "OpenFile", "identity_of", "is_parents", "leave_to_parent"]

Identity = tuple[int, int]
"""Device and inode."""


def identity_of(path: str | Path) -> Identity | None:
    """Return device and inode of what a path names now, `None` if it names nothing.

    Example:
        >>> identity_of("/no/such/file") is None
        True
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - called for each transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


class OpenFile:
    """An SQLite file that is open, with the log and the index that SQLite keeps beside it.

    Whoever deletes or replaces one of the three takes from this process what it commits from then on: SQLite goes on
    without an error in a file that has no name any more.

    Args:
        path: the file.
        identity: which file it was when this process first opened it; default: the one of the first look.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "queues.db")
        ...     path.touch()
        ...     file = OpenFile(path)
        ...     file.look()
        ...     before = file.replaced()
        ...     path.unlink()
        ...     before, file.replaced() == str(path)
        (None, True)
    """

    def __init__(self, path: str | Path, identity: Identity | None = None) -> None:
        self._names = (str(path), f"{path}-wal", f"{path}-shm")
        self._known: list[Identity | None] = [identity, None, None]

    def look(self) -> None:
        """Note which files they are, those that are not known yet.

        Look while a connection reads: then SQLite itself removes none of them. Before it has read anything, whichever
        connection ends last takes the log and the index with it, and that is nobody's mistake.
        """
        for place, known in enumerate(self._known):
            if known is None:
                self._known[place] = identity_of(self._names[place])

    def replaced(self) -> str | None:
        """Return the first of the files that is not the one of the earlier looks, `None` if all are."""
        for known, name in zip(self._known, self._names, strict=True):
            if known is not None and identity_of(name) != known:
                return name
        return None


def leave_to_parent(path: str | Path) -> None:
    """Note, in a forked child, that its parent had this file open at the fork; if it had.

    SQLite keeps its locks by process, and believes in a child that it has those of the parent. So the child must not open
    such a file: what it commits could be lost when the parent closes it.
    """
    found = identity_of(path)
    if found is not None and found in _open_here():
        _parents.add(found)


def is_parents(path: str | Path) -> bool:
    """Return whether the parent of this process had the file open when it forked this process.

    Example:
        >>> is_parents("/var/lib/shop/inbox.db")
        False
    """
    return bool(_parents) and identity_of(path) in _parents


_parents: Final[set[Identity]] = set()


def _open_here() -> set[Identity | None]:
    try:
        descriptors = os.listdir("/dev/fd")  # noqa: PTH208 - names of numbers
    except OSError:
        return set()
    return {identity_of(f"/dev/fd/{each}") for each in descriptors}
