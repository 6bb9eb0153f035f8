"""A tenth of the storms, or less; `python -m tests.storms` runs them in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storm", "messages", "restarts"),
    [
        ("rabbitmq --database unwritten", 200, 2),
        ("rabbitmq --database mariadb", 200, 1),
        ("sql --pooler", 200, 1),
        ("activemq", 100, 1),
    ],
)
def test_a_storm_keeps_the_promises(storm: str, messages: int, restarts: int) -> None:
    options = ["--messages", str(messages), "--kills", "10", "--restarts", str(restarts)]
    command = [sys.executable, "-m", "tests.storms", *storm.split(), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["messages"], report["copies"], report["kills"]) == (messages, messages // 5, 10)
