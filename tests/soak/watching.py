"""What is watched while it runs: memory, threads and descriptors of one process, and afterwards what workers have logged."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from idemp.cli.exits import ExitCode

SAMPLE_SECONDS = 2.0
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process."""

    at: float
    resident: int
    threads: int
    descriptors: int


class Watcher:
    """Looks at one process every few seconds, in a thread of its own.

    Args:
        pid: the process.
        began: when the soak began, by `time.monotonic()`.
    """

    def __init__(self, pid: int, began: float) -> None:
        self._process = psutil.Process(pid)
        self._began = began
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                self.samples.append(self._look())
            except psutil.NoSuchProcess:
                return

    def _look(self) -> Sample:
        with self._process.oneshot():
            resident, threads = self._process.memory_info().rss, self._process.num_threads()
        return Sample(time.monotonic() - self._began, resident, threads, self._process.num_fds())


def median(samples: list[Sample], within: tuple[float, float] | None, of: Callable[[Sample], float]) -> float | None:
    """The median of what was seen within some seconds."""
    if within is None:
        return None
    found = [of(sample) for sample in samples if within[0] <= sample.at < within[1]]
    return statistics.median(found) if found else None


def mebibytes(sample: Sample) -> float:
    """The resident memory."""
    return round(sample.resident / _MEBIBYTE, 2)


@dataclass
class Logged:
    """What workers wrote to stderr.

    Attributes:
        events: how often each event of level warning or worse was logged.
        unexpected: errors that nothing explains, the first few of each kind.
    """

    events: Counter[str]
    unexpected: list[str]


def read_logs(folder: Path, *, never_ends: str, expected: Callable[[dict[str, Any]], bool]) -> Logged:
    """Read all workers' logs.

    Args:
        folder: one folder a group of workers, with a file for each.
        never_ends: the group of which nothing explains that one of them ended by itself.
        expected: whether an event of level error or worse is as it should be.
    """
    logged = Logged(Counter(), [])
    for file in sorted(folder.glob("**/*.log")):
        for line in file.read_text(errors="replace").splitlines():
            entry = _parsed(line)
            logged.events[_name_of(entry)] += 1
            if not _is_fine(entry, expected, may_end=file.parent.name != never_ends) and len(logged.unexpected) < 50:
                logged.unexpected.append(f"{file.name}: {line[:2000]}")
    return logged


def _parsed(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _name_of(entry: dict[str, Any]) -> str:
    if "level" not in entry and "error" in entry:
        return f"ended: {entry['error']['kind']}"
    outcome = f" {entry['outcome']}" if "outcome" in entry else ""
    return f"{entry.get('level', 'no log line')} {entry.get('event') or entry.get('message', '')}{outcome}".strip()


def _is_fine(entry: dict[str, Any], expected: Callable[[dict[str, Any]], bool], *, may_end: bool) -> bool:
    if "level" not in entry:
        return may_end and entry.get("error", {}).get("exit_code") == ExitCode.UNREACHABLE
    if entry.get("level") in {"error", "critical"}:
        return expected(entry)
    return True


def tails(folder: Path, lines: int = 40) -> str:
    """The last lines of every log that is not empty."""
    said = [(file, file.read_text(errors="replace").splitlines()) for file in sorted(folder.glob("**/*.log"))]
    return "\n".join(f"--- {file.name}\n" + "\n".join(text[-lines:]) for file, text in said if text)
