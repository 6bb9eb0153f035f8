"""Handlers stay typed: the decorator refuses another message class, and keeps signatures, for mypy and for pyright."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SUBJECT = Path(__file__).with_name("handlers.py")

Findings = dict[int, list[str]]


def by_mypy() -> tuple[Findings, Findings]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(SUBJECT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert not done.stderr, done.stderr
    errors: Findings = defaultdict(list)
    revealed: Findings = defaultdict(list)
    for line in done.stdout.splitlines():
        if (found := re.match(r".*handlers\.py:(\d+): (error|note): (.*)", line)) is None:
            continue
        number, kind, words = int(found[1]), found[2], found[3]
        if kind == "error":
            errors[number].append(words)
        elif words.startswith("Revealed type is"):
            revealed[number].append(words)
    return errors, revealed


def by_pyright() -> tuple[Findings, Findings]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(SUBJECT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        line = f"pyright could not run (at its first run it downloads itself): {(done.stderr or done.stdout)[-300:]}"
        if os.environ.get("CI"):
            pytest.fail(line)
        pytest.skip(line)
    errors: Findings = defaultdict(list)
    revealed: Findings = defaultdict(list)
    for item in report["generalDiagnostics"]:
        number = item["range"]["start"]["line"] + 1
        kind = {"error": errors, "information": revealed}.get(item["severity"])
        if kind is not None:
            kind[number].append(item["message"])
    return errors, revealed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [by_mypy, by_pyright], ids=["mypy", "pyright"])
def test_handlers(checker: object) -> None:
    errors, revealed = checker()  # type: ignore[operator]
    lines = SUBJECT.read_text().splitlines()
    expected = [number for number, line in enumerate(lines, 1) if "# expect: error" in line]
    # mypy reports a decorator's error at the decorator, pyright may do so at the function below.
    found = sorted({number if number in expected else number - 1 for number in errors})
    assert found == expected, {number: errors[number] for number in errors if number not in expected}
    for number, line in enumerate(lines, 1):
        if "# reveal: " in line:
            words = line.split("# reveal: ")[1].split()
            assert revealed[number], f"line {number} revealed nothing"
            for word in words:
                assert word in revealed[number][0], revealed[number]
