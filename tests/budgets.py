"""Every folder of tests states how long it may take, and the end of a run says how long it took.

A folder's file BUDGET holds the seconds and the part of the suite that they count towards: `60 core`. Folders below it
without such a file count towards it. The parts' totals stand here. They are seconds of the whole run: where N processes
run tests side by side, a test counts for an N-th of what it took.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = {"core": 240.0, "brokers and storms": 240.0, "testing kit and simulation": 180.0, "Spark": 240.0}


@dataclass(frozen=True)
class Budget:
    """What a folder states."""

    seconds: float
    part: str


def read_budget(folder: Path) -> Budget | None:
    """The budget that a folder states, if it does."""
    file = folder / "BUDGET"
    if not file.exists():
        return None
    seconds, _, part = file.read_text().strip().partition(" ")
    if part not in PARTS:
        raise ValueError(f"{file}: {part!r} is none of {', '.join(PARTS)}")
    return Budget(float(seconds), part)


class Spending:
    """Collects what each folder's tests took, and tells it at the end."""

    def __init__(self, root: Path, processes: int = 1) -> None:
        self._root = root
        self._processes = processes
        self._tests: Counter[Path] = Counter()
        self._seconds: dict[Path, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count setup, call and teardown."""
        folder = self._folder(Path(report.nodeid.partition("::")[0]).parent)
        self._tests[folder] += report.when == "setup"
        self._seconds[folder] = self._seconds.get(folder, 0.0) + report.duration / self._processes

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if self._seconds:
            terminalreporter.section(f"time budgets, {self._processes} processes side by side")
            for line in self.lines():
                terminalreporter.line(line, red="OVER" in line)

    def lines(self) -> Iterator[str]:
        """The table: folders, then the parts that they count towards."""
        spent_on: Counter[str] = Counter()
        yield _row("folder", "tests", "seconds", "budget")
        for folder, seconds in sorted(self._seconds.items()):
            budget = read_budget(self._root / folder)
            yield _row(str(folder), str(self._tests[folder]), *_spent(seconds, budget.seconds if budget else None))
            if budget:
                spent_on[budget.part] += seconds  # type: ignore[assignment]
        for part, seconds in spent_on.items():
            yield _row(f"all of {part}", "", *_spent(seconds, PARTS[part]))

    def _folder(self, folder: Path) -> Path:
        """The folder itself, or the nearest one above it that states a budget."""
        stating = (above for above in (folder, *folder.parents) if (self._root / above / "BUDGET").exists())
        return next(stating, folder)


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run."""
    processes = getattr(config.option, "numprocesses", None) or 1
    config.pluginmanager.register(Spending(config.rootpath, processes), "idemp-time-budgets")


def _spent(seconds: float, budget: float | None) -> tuple[str, str, str]:
    if budget is None:
        return f"{seconds:.1f}", "none", ""
    return f"{seconds:.1f}", f"{budget:.0f}", "OVER" if seconds > budget else ""


def _row(what: str, tests: str, seconds: str, budget: str, mark: str = "") -> str:
    return f"{what:<36}{tests:>7}{seconds:>10}{budget:>9}  {mark}".rstrip()
