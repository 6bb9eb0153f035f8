"""The table of cases names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "cases.md"
NAMES = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
ROWS = re.compile(r"^\| (?!case |point |-)(.+?) \| (.*) \|$", re.MULTILINE)


def exists(file: str, name: str) -> bool:
    """Whether a test stands in a file, by itself or in a class."""
    nodes: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    *classes, function = name.split("::")
    for wanted in classes:
        found = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == wanted]
        nodes = found[0].body if found else []
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in nodes)


def test_every_row_names_tests_and_each_of_them_exists() -> None:
    rows = ROWS.findall(PAGE.read_text())
    assert len(rows) > 40
    named = {case: NAMES.findall(tests) for case, tests in rows}
    assert [case for case, tests in named.items() if not tests] == []
    assert [f"{file}::{name}" for tests in named.values() for file, name in tests if not exists(file, name)] == []


@pytest.mark.parametrize("number", [*range(17, 40), "16a", "16b", "16c", "16d", "25a", "25b", "25c", "35a"])
def test_every_case_has_a_row(number: int | str) -> None:
    assert re.search(rf"^\| {number}\. ", PAGE.read_text(), re.MULTILINE)


def test_it_would_notice() -> None:
    assert not exists("tests/faults/test_cases.py", "test_that_nobody_wrote")
    assert not exists("tests/faults/test_cases.py", "TestNobody::test_it_would_notice")
