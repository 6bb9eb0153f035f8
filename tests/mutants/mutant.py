"""A seeded fault: one small replacement in the product's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes:
        name: what it is called on the command line.
        file: where it is, from the root of the tree.
        old: the text that it replaces, which must occur exactly once.
        new: the text instead.
        breaks: what goes wrong by it, in one sentence.
        tests: the tests that are expected to catch it.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def seed(self, tree: Path) -> None:
        """Put it into a copy of the tree.

        Raises:
            ValueError: the old text does not occur there exactly once: the code has moved on, and the table has to follow.
        """
        file = tree / self.file
        text = file.read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the text to replace occurs {found} times in {self.file}")
        file.write_text(text.replace(self.old, self.new))
