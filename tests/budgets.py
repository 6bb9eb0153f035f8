"""Every folder of tests states how long each lane may take there, and the end of a run says how long it took.

The statements are in budgets.toml. Folders that are not named there count towards the nearest one above them. Seconds are
of the whole run: where N processes run tests side by side, a test counts for an N-th of what it took.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = Path(__file__).with_name("budgets.toml")
LANES = ("main", "slow")


@dataclass
class Spent:
    """What the tests of one lane took in one folder."""

    tests: int = 0
    failed: int = 0
    seconds: float = 0.0

    def add(self, other: Spent) -> None:
        """Count another's, too."""
        self.tests += other.tests
        self.failed += other.failed
        self.seconds += other.seconds


class Spending:
    """Collects what the tests of each folder took, and tells it at the end."""

    def __init__(self, budgets: Mapping[str, Mapping[str, float]], processes: int = 1) -> None:
        self._budgets = budgets
        self._processes = processes
        self._spent: defaultdict[tuple[str, str], Spent] = defaultdict(Spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count setup, call and teardown."""
        lane = LANES["slow" in report.keywords]
        folder = self._folder(lane, Path(report.nodeid.partition("::")[0]).parent)
        seconds = report.duration / self._processes
        self._spent[lane, folder].add(Spent(report.when == "setup", report.failed, seconds))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if self._spent:
            terminalreporter.section(f"time budgets, {self._processes} processes side by side")
            for line in self.lines():
                terminalreporter.line(line, red="OVER" in line)

    def lines(self) -> Iterator[str]:
        """The table: folders, then the sum, for each lane."""
        yield _row("folder", "tests", "failed", "seconds", "budget")
        for lane in LANES:
            whole = Spent()
            for folder in sorted(folder for of, folder in self._spent if of == lane):
                spent = self._spent[lane, folder]
                whole.add(spent)
                yield self._line(folder, spent, self._budgets[lane].get(folder))
            if whole.tests:
                yield self._line(f"all of the {lane} lane", whole, sum(self._budgets[lane].values()))

    def _folder(self, lane: str, folder: Path) -> str:
        """The folder itself, or the nearest one above it that has a budget."""
        named = (str(above) for above in (folder, *folder.parents) if str(above) in self._budgets[lane])
        return next(named, str(folder))

    def _line(self, what: str, spent: Spent, budget: float | None) -> str:
        mark = "" if budget is None or spent.seconds <= budget else "OVER"
        seconds = f"{spent.seconds:.1f}"
        stated = "none" if budget is None else f"{budget:.0f}"
        return _row(what, str(spent.tests), str(spent.failed or ""), seconds, stated, mark)


def read_budgets(file: Path = FILE) -> dict[str, dict[str, float]]:
    """Seconds by lane and folder.

    Raises:
        ValueError: a lane that there is not, or a folder that there is not.
    """
    budgets: dict[str, dict[str, float]] = tomllib.loads(file.read_text())
    root = FILE.parents[1]
    missing = [folder for lane in budgets.values() for folder in lane if not (root / folder).is_dir()]
    unknown = [*(budgets.keys() ^ {*LANES}), *missing]
    if unknown:
        raise ValueError(f"{file}: no such lane or folder: {', '.join(unknown)}")
    return budgets


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run."""
    processes = getattr(config.option, "numprocesses", None) or 1
    config.pluginmanager.register(Spending(read_budgets(), processes), "idemp-time-budgets")


def _row(what: str, tests: str, failed: str, seconds: str, budget: str, mark: str = "") -> str:
    return f"{what:<36}{tests:>7}{failed:>8}{seconds:>10}{budget:>9}  {mark}".rstrip()
