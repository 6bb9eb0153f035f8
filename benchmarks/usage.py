"""What all processes that take part use: CPU time by whose it is, and the most memory at one time."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS: Final = ("jvm", "python")


@dataclass
class Usage:
    """Between the beginning of a block and its end.

    Attributes:
        memory: MiB that were resident at one time at most, what processes share counted once (PSS of Linux): of Java
            ("jvm", driver and executor in one) and of all Python processes together ("python").
        seconds: of CPU time: the same two, and those of the database's server ("server").
    """

    memory: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OURS, 0.0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*OURS, "server"), 0.0))


class _Watcher:
    def __init__(self, server: int) -> None:
        self._server = psutil.Process(server)
        self._begun: dict[int, float] = {}
        self._latest: dict[int, tuple[str, float]] = {}
        self.usage = Usage()

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for each in (self._server, *self._server.children(recursive=True)):
            yield "server", each
        own = psutil.Process()
        for each in (own, *own.children(recursive=True)):
            if each.pid not in self._latest or self._latest[each.pid][0] != "server":
                with suppress(psutil.NoSuchProcess):
                    yield "jvm" if "java" in each.name() else "python", each

    def look(self, *, first: bool = False) -> None:
        """What there is now; processes that end between two looks are counted up to the last."""
        sizes = dict.fromkeys(OURS, 0.0)
        for kind, each in self._processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = each.cpu_times()
                self._latest[each.pid] = (kind, times.user + times.system)
                if first:
                    self._begun[each.pid] = times.user + times.system
                elif kind in sizes:
                    sizes[kind] += each.memory_full_info().pss / 2**20
        self.usage.memory = {kind: max(size, self.usage.memory[kind]) for kind, size in sizes.items()}
        self.usage.seconds = dict.fromkeys(self.usage.seconds, 0.0)
        for pid, (kind, seconds) in self._latest.items():
            self.usage.seconds[kind] += seconds - self._begun.get(pid, 0.0)


@contextmanager
def watched(server: int, every: float = 0.5) -> Iterator[Usage]:
    """Looks at this process, at a database's server, and at all below them, until the block ends.

    Args:
        server: its number as a process, from which all others of it come.
        every: seconds between two looks.
    """
    watcher, stop = _Watcher(server), threading.Event()
    watcher.look(first=True)

    def look() -> None:
        while not stop.wait(every):
            watcher.look()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watcher.usage
    finally:
        stop.set()
        thread.join()
        watcher.look()
