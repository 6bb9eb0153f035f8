"""The model holds every promise, and the page about it speaks of what is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.model.page import PAGE, Row, rows, table
from tests.model.spin import MODEL, needs_spin, search, version

pytestmark = pytest.mark.slow

MODEL_TEXT = MODEL.read_text(encoding="utf-8")
STATED_VERSION = re.search(r"Spin (\d[\d.]+)", PAGE)


@needs_spin
@pytest.mark.parametrize(
    "row", rows("runs"), ids=lambda row: f"{row.flags or 'as it is'} {'end' if row.end else ''}".strip()
)
def test_every_promise_holds(row: Row, tmp_path: Path) -> None:
    found = search(tmp_path, row.flags, end=row.end)
    assert (found.broken, found.complete, found.unreached) == (None, True, ())
    assert STATED_VERSION is not None
    if version() == STATED_VERSION[1]:  # another one may search in another order, and skip other states for that
        assert found.states == row.states


def test_page_names_what_the_code_has() -> None:
    names = set(re.findall(r"`(idemp(?:\.\w+)+)`", PAGE))
    assert len(names) > 30
    assert [name for name in sorted(names) if not _exists(name)] == []


def test_a_name_that_the_code_has_not_is_noticed() -> None:
    assert _exists("idemp.protocol.Protocol.handle")
    assert not _exists("idemp.protocol.Protocol.hand")
    assert not _exists("idemp.protocols.Protocol")


def test_page_holds_each_step_of_the_model_against_the_code() -> None:
    steps = set(re.findall(r"^inline (\w+)\(", MODEL_TEXT, re.MULTILINE)) - {"promises", "promises_about"}
    assert {name for cells in table("steps") for name in re.findall(r"`([a-z_]+)`", cells[0])} == steps


def test_page_explains_each_promise_of_the_model() -> None:
    promised = {*re.findall(r"promise\((\w+),", MODEL_TEXT), *re.findall(r"^ltl (\w+)", MODEL_TEXT, re.MULTILINE)}
    assert {cells[0].strip("`") for cells in table("promises")} == promised - {"name"}


def test_page_shows_every_variant_and_mutant_of_the_model() -> None:
    chosen = re.findall(r"^#if(?:n?def| ).*$", MODEL_TEXT, re.MULTILINE)
    there = {name for line in chosen for name in re.findall(r"[A-Z_]{3,}", line)}
    told = {name for kind in ("runs", "mutants") for row in rows(kind) for name in re.findall("[A-Z_]+", row.flags)}
    assert told | {"MESSAGES", "CALM"} == there | {"OUTPUTS"}


def _exists(name: str) -> bool:
    """Whether a dotted name is a module's, or something's in a module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False
