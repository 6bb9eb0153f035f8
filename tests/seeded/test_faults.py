"""Each seeded fault is caught by its test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code: tests failed; others say that none ran

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.path}-{number}" for number, fault in enumerate(FAULTS)])
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    for name in ("idemp", "tests", "alembic"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "idemp" / fault.path
    text = source.read_text()
    assert text.count(fault.old) == 1
    source.write_text(text.replace(fault.old, fault.new))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    paths, *names = fault.test.split("::")
    kinds = ["not aiosqlite"]
    if fault.path != "bulk/sets.py" and not {"mariadb", "postgresql"}.intersection(names):
        kinds.append("not postgresql")  # SQLite shows it sooner
    picked = " and ".join([*names, *kinds])
    options = ["-n0", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", picked]
    command = [sys.executable, "-m", "pytest", *options, *paths.split()]
    found = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == FAILED, found.stdout
