"""Whatever belongs to a process is told of its forks, each for itself. (`tests/forks` has the connections of a service.)"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from idemp.broker.local.file import Link
from idemp.errors import BrokerUnavailable
from tests.lanes import mostly_slow

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


HANDLER_FORKS = """
import os, sys
from idemp import Idempotent
from tests.house import SELL, sale, sql_house

way, policy = sys.argv[1], {"early": {}, "late": {"claim": "late"}, "together": {"batch": 2}, "bare": None}[sys.argv[2]]
statuses = []

def sell(message, ctx):
    house.effects.write(ctx, "sale")
    child = os.fork()
    if child == 0:
        if way == "raises":
            raise RuntimeError("in the child")
        if way == "exits":
            sys.exit(7)
        if way == "emits":
            ctx.send({}, to="stock", type="stock.Reserve")
        return {"n": 1}
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ctx.send({}, to="stock", type="stock.Reserve")

with sql_house() as house:
    house.app.handler(dict, type=SELL, policy=policy if policy is None else Idempotent(attempts=1, **policy))(sell)
    if sys.argv[2] == "together":
        came_to = house.together(sale("sale-1"), sale("sale-2"))
    else:
        came_to = [house.handle(sale("sale-1"))]
    print(os.getpid(), [outcome.name for outcome, _ in came_to], statuses, house.sales(), len(house.sent()))
"""


@pytest.mark.parametrize(
    ("way", "status"), mostly_slow([("returns", 0), ("emits", 1), ("raises", 1), ("exits", 7)], first=2)
)
@pytest.mark.parametrize("policy", mostly_slow(["early", "together", "late", "bare"]))
def test_a_child_of_a_handler_ends_where_the_handler_does(way: str, status: int, policy: str) -> None:
    """It would settle the delivery, too, and then take the next ones, beside its parent and after it."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLER_FORKS, way, policy], check=True, capture_output=True, text=True
    )
    many = 2 if policy == "together" else 1
    (line,) = done.stdout.splitlines()
    assert line.partition(" ")[2] == f"{['HANDLED'] * many} {[status] * many} {many} {many}"
    assert done.stderr.count("A child that sell forked came to its end there") == many
    assert ("emitted in a process that its handler had forked" in done.stderr) is (way == "emits")


def test_closed_link_says_so(tmp_path: Path) -> None:
    link = Link(tmp_path / "queues.db")
    link.close()
    link.close()
    with pytest.raises(BrokerUnavailable, match="is closed"):
        link.rows("SELECT 1")
