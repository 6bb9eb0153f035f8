"""A tenth of the storms; `python -m tests.storms` runs them in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("storm", ["rabbitmq", "rabbitmq --database mariadb", "sql --pooler"])
def test_a_storm_keeps_the_promises(storm: str) -> None:
    command = [sys.executable, "-m", "tests.storms", *storm.split(), "--messages", "500", "--kills", "10", "--restarts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["messages"], report["copies"], report["kills"]) == (500, 100, 10)
