"""The table of time budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.budgets import Spending, read_budgets

if TYPE_CHECKING:
    from pathlib import Path


def test_table_marks_what_is_over() -> None:
    spending = Spending({"main": {"tests/quick": 10, "tests/slow": 20}, "slow": {"tests/slow": 30}}, processes=2)
    took = [("quick", 3, ()), ("quick/below", 4, ()), ("slow", 300, ()), ("slow", 2, ("slow",)), ("none", 1, ())]
    for folder, seconds, marks in took:
        for when in ("setup", "call"):
            failed = when == "call" and seconds == 4
            report = SimpleNamespace(
                nodeid=f"tests/{folder}/test_x.py::test", when=when, duration=seconds, keywords=marks, failed=failed
            )
            spending.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert [line.split() for line in spending.lines()] == [
        ["folder", "tests", "failed", "seconds", "budget"],
        ["tests/none", "1", "1.0", "none"],
        ["tests/quick", "2", "1", "7.0", "10"],
        ["tests/slow", "1", "300.0", "20", "OVER"],
        ["all", "of", "the", "main", "lane", "4", "1", "308.0", "30", "OVER"],
        ["tests/slow", "1", "2.0", "30"],
        ["all", "of", "the", "slow", "lane", "1", "2.0", "30"],
    ]


@pytest.mark.parametrize("stated", ["[main]\n[slow]\n'tests/nowhere' = 1", "[main]\n[slow]\n[fast]", "[main]"])
def test_what_there_is_not_is_an_error(stated: str, tmp_path: Path) -> None:
    (tmp_path / "budgets.toml").write_text(stated)
    with pytest.raises(ValueError, match=r"no such lane or folder: (tests/nowhere|fast|slow)"):
        read_budgets(tmp_path / "budgets.toml")
