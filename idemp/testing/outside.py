"""What reaches beyond the databases: the interpreter's audit events (PEP 578), and which of them mean something.

What C libraries do on their own (a driver that opens its own socket, say) raises no event. Log files, the import system's
caches and temporary files that are gone when the handler ends are no effects.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_NETWORK: Final = {
    "socket.connect", "socket.sendto", "socket.getaddrinfo", "smtplib.connect", "smtplib.send", "http.client.connect",
    "http.client.send", "urllib.Request", "ftplib.connect", "imaplib.open", "poplib.connect",
}  # fmt: skip
_PROCESSES: Final = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
_FILES: Final = {
    "open": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.truncate": (0,),
    "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,), "os.setxattr": (0,), "os.removexattr": (0,),
    "os.link": (1,), "os.symlink": (1,), "shutil.move": (0, 1), "shutil.copyfile": (1,), "shutil.rmtree": (0,),
}  # fmt: skip
"""Which of an event's arguments are changed."""
_WITH_OBJECT_FIRST: Final = _NETWORK - {"socket.getaddrinfo", "urllib.Request"}
_CONNECTED: Final = "sqlite3.connect"
AUDITED: Final = frozenset({*_NETWORK, *_PROCESSES, *_FILES, _CONNECTED})
"""The events that mean something."""
_WRITING_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_HEADER: Final = 100  # bytes at the beginning of a SQLite file, which count its changes
_LONGEST: Final = 160
_IMPORTING: Final = {"importlib._bootstrap_external", "_frozen_importlib_external"}


class Outside:
    """Collects what one run of a handler did to files, networks and processes, and to SQLite files that it opened itself.

    Attributes:
        found: (kind, detail); kinds are "network", "process", "file" and "database".

    Example:
        >>> import sys
        >>> outside = Outside()
        >>> outside.add("os.mkdir", ("letters", 0o777, -1), sys._getframe())
        >>> outside.found
        [('file', 'os.mkdir letters')]
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._temporary: set[str] = set()
        self._held: list[tuple[str, tuple[str, str]]] = []
        self._databases: dict[str, list[bytes]] = {}

    def add(self, name: str, arguments: tuple[Any, ...], frame: FrameType) -> None:
        """Something is about to happen that `frame` asked for."""
        if name == _CONNECTED:
            if not is_called_by(frame, "sqlalchemy"):  # its statements are seen as such
                path = str(_path(arguments[0])).removeprefix("file:").partition("?")[0]
                self._databases.setdefault(path, _contents(path))
            return
        if name in _NETWORK:
            kind = "network"
        elif name in _PROCESSES:
            kind = "process"
        else:
            kind = "file"
        told = (kind, f"{name} {_detail(name, arguments)}".strip())
        if kind == "file":
            self._add_file(name, arguments, frame, told)
        elif not is_called_by(frame, "logging"):
            self.found.append(told)

    def end(self) -> None:
        """The handler has ended: temporary files that it left behind are files like others."""
        self.found += [told for root, told in self._held if os.path.lexists(root)]
        self.found += [
            ("database", f"{_CONNECTED} {path}")
            for path, before in self._databases.items()
            if _contents(path) != before
        ]

    def _add_file(self, name: str, arguments: tuple[Any, ...], frame: FrameType, told: tuple[str, str]) -> None:
        paths = [path for path in map(_path, (arguments[index] for index in _FILES[name])) if path is not None]
        module = frame.f_globals.get("__name__")
        if not paths or all(map(_is_harmless, paths)) or module in _IMPORTING or is_called_by(frame, "logging"):
            return
        if module == "shutil" and name.startswith("os."):  # parts of what it has an event of its own for
            return
        if name == "open" and not _opens_to_write(paths[0], arguments):
            return
        if module == "tempfile":
            self._temporary.add(paths[0])
        roots = [self._root(path) for path in paths]
        if None in roots:
            self.found.append(told)
        else:
            self._held += [(root, told) for root in roots if root is not None]

    def _root(self, path: str) -> str | None:
        """The temporary file or folder of this run that a path is, or lies in."""
        return next((root for root in self._temporary if path == root or path.startswith(root + os.sep)), None)


def is_called_by(frame: FrameType, package: str) -> bool:
    """Whether a module of a package stands in a stack."""
    names = (str(each.f_globals.get("__name__", "")) for each in _stack(frame))
    return any(name == package or name.startswith(f"{package}.") for name in names)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _path(value: Any) -> str | None:
    try:
        return os.fsdecode(value)
    except TypeError:  # a file descriptor
        return None


def _contents(path: str) -> list[bytes]:
    """What differs when a SQLite file was changed: its header, its size and its write-ahead log's."""
    told = []
    for file in (Path(path), Path(f"{path}-wal")):
        with suppress(OSError, ValueError), file.open("rb") as opened:
            told.append(b"%d %s" % (file.stat().st_size, opened.read(_HEADER)))
    return [each for each in told if each != b"0 "]


def _is_harmless(path: str) -> bool:
    return path == os.devnull or "__pycache__" in path


def _opens_to_write(path: str, arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if not (any(letter in mode for letter in "wax+") if isinstance(mode, str) else flags & _WRITING_FLAGS):
        return False
    return not Path(path).is_dir()  # else it is a nameless file in that folder


def _detail(name: str, arguments: tuple[Any, ...]) -> str:
    picked = arguments[1:3] if name in _WITH_OBJECT_FIRST else arguments[:1]
    return ", ".join(str(item)[:_LONGEST] for item in picked)
