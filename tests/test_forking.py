"""Whatever belongs to a process is told of its forks, each for itself. (`tests/forks` has the connections of a service.)"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from idemp.broker.local.file import Link
from idemp.errors import BrokerUnavailable

if TYPE_CHECKING:
    from pathlib import Path

FORK = """
import os, sys
from pathlib import Path
from idemp.broker.local.file import Link
from idemp.forking import ForkAware

class Told(ForkAware):
    def before_fork(self): fail("before")
    def after_fork_in_parent(self): fail("parent")
    def after_fork_in_child(self): fail("child")

def fail(when):
    os.write(1, f"{when} ".encode())  # at once: two processes write here
    raise RuntimeError(when)

closed = Link(Path(sys.argv[1]))
closed.close()
others = [Told() for _ in range(3)]
for each in others:
    each.track()
if not os.fork():
    os._exit(0)
os.wait()
"""


def test_one_that_can_not_follow_leaves_nobody_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "queues.db")], check=True, capture_output=True, text=True
    )
    assert sorted(done.stdout.split()) == ["before"] * 3 + ["child"] * 3 + ["parent"] * 3
    assert done.stderr.count("Told did not follow a fork") == 9
    assert "closed" not in done.stderr


def test_closed_link_says_so(tmp_path: Path) -> None:
    link = Link(tmp_path / "queues.db")
    link.close()
    link.close()
    with pytest.raises(BrokerUnavailable, match="is closed"):
        link.rows("SELECT 1")
