"""A part of the tests on the oldest SQLAlchemy; `make test-slow` installs it beside the newest one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = Path(sys.prefix) / "sqlalchemy-2.0"
PARTS = ("tests/sql/test_guard.py", "tests/sql/test_conformance.py")


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir() and "CI" not in os.environ, reason="make test-slow installs it")
def test_the_oldest_sqlalchemy_keeps_the_promises() -> None:
    environment = {**os.environ, "PYTHONPATH": str(OLDEST)}
    said = subprocess.run(
        [sys.executable, "-c", "import sqlalchemy; print(sqlalchemy.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "2.0.36\n"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-m",
        "not slow",
        "-k",
        "not async and not aiosqlite and not asyncpg",
        "-p",
        "no:cacheprovider",
        *PARTS,
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
