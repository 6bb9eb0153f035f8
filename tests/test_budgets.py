"""The table of time budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.budgets import PARTS, Spending, read_budget

if TYPE_CHECKING:
    from pathlib import Path


def test_table_marks_what_is_over(tmp_path: Path) -> None:
    stated = {"tests/quick": "10 core", "tests/slow": "20 core", "tests/none": None}
    for folder, budget in stated.items():
        (tmp_path / folder / "below").mkdir(parents=True)
        if budget:
            (tmp_path / folder / "BUDGET").write_text(budget + "\n")
    spending = Spending(tmp_path)
    for folder, seconds in (("quick", 3), ("quick/below", 4), ("slow", 300), ("none", 1)):
        for when in ("setup", "call"):
            report = SimpleNamespace(nodeid=f"tests/{folder}/test_x.py::test", when=when, duration=seconds / 2)
            spending.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert [line.split() for line in spending.lines()] == [
        ["folder", "tests", "seconds", "budget"],
        ["tests/none", "1", "1.0", "none"],
        ["tests/quick", "2", "7.0", "10"],
        ["tests/slow", "1", "300.0", "20", "OVER"],
        ["all", "of", "core", "307.0", f"{PARTS['core']:.0f}", "OVER"],
    ]


def test_unknown_part_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "BUDGET").write_text("10 everything")
    with pytest.raises(ValueError, match="'everything' is none of core"):
        read_budget(tmp_path)
