"""Reads what docs/explanation/model.md says about the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.model.spin import IN_THE_END, MODEL

PAGE = (MODEL.parents[1] / "model.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A row of one of the page's tables of runs.

    Attributes:
        flags: what is defined, without the `-D`.
        says: the second column: the promise that is broken, or the properties that were checked.
        states: the third column, where it is a number.
    """

    flags: str
    says: str
    states: int

    @property
    def end(self) -> bool:
        """Whether it is about the promise about the end."""
        return IN_THE_END in self.says


def table(name: str) -> list[list[str]]:
    """The cells of a table that stands between two comments, without its head."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)
    assert found is not None, f"the page has no table of {name}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines()[2:]]


def rows(name: str) -> list[Row]:
    """The rows of a table of runs."""
    return [_row(cells) for cells in table(name)]


def _row(cells: list[str]) -> Row:
    flags = " ".join(re.findall(r"-D([\w=]+)", cells[0]))
    states = cells[2].replace(",", "")
    return Row(flags, cells[1].strip("`"), int(states) if states.isdigit() else 0)
