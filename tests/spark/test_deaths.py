"""Drivers and executors that are killed for real, and tasks whose copies win: sums are exact, and all of them end."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from idemp.spark.testing import SPECULATION, fired_in, run_driver, standalone
from tests.spark.shop import Shop
from tests.spark.streams import ORDERS, assert_exact, write_input
from tests.spark.test_session import listening

if TYPE_CHECKING:
    from idemp.spark.testing import Ended, Fired

pytestmark = pytest.mark.timeout(600)  # each starts several JVMs, wherever it runs

_SMALL = {"spark.executor.memory": "512m"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path)
    return tmp_path


def landing(folder: Path, shop: Shop, session: dict[str, Any], *faults: dict[str, Any]) -> Ended:
    arguments = [str(folder), shop.url, json.dumps(session), json.dumps(faults)]
    return run_driver("tests.spark.drivers:landing", *arguments, log=folder / "log", seconds=300)


def landed(folder: Path, shop: Shop, session: dict[str, Any], **fault: Any) -> tuple[Fired, dict[str, Any]]:
    """To the end, with one fault; which it was, and what the driver told."""
    ended = landing(folder, shop, session, fault)
    assert ended.status == 0, ended.said
    (fired,) = fired_in(folder)
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return fired, told


def of_folder(folder: Path) -> list[str]:
    """Processes that work for a folder: drivers, executors, daemons, clusters."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(folder) in command or process.environ().get("IDEMP_SPARK_FAULTS", "").startswith(str(folder)):
                found.append(command)
    return found


def test_driver_is_killed_inside_of_a_micro_batch(folder: Path, shop: Shop) -> None:
    """One chunk of it is committed, and Spark knows nothing of that."""
    first = landing(folder, shop, {}, {"how": "kill driver", "when": "after commit", "partition": 1})
    assert first.killed, first.said
    assert of_folder(folder) == []
    (fired,) = fired_in(folder)
    assert (fired.place.partition, fired.place.transaction) == (1, 1)
    assert not list((folder / "checkpoint" / "commits").glob("[0-9]*"))
    assert 0 < shop.count("sale") < ORDERS
    again = landing(folder, shop, {})
    assert again.status == 0, again.said
    assert_exact(shop)


@pytest.mark.parametrize("when", ["before commit", "after commit"])
def test_executor_is_killed_and_another_one_takes_over(when: str, folder: Path, shop: Shop) -> None:
    session = {"master": "local-cluster[2,1,1024]", "options": _SMALL}
    fired, told = landed(folder, shop, session, how="kill executor", when=when, partition=1)
    assert not psutil.pid_exists(fired.place.executor)
    assert told == {"executors": 3, "work": False}, "one for the killed one; nothing stays in PySpark's installation"
    assert_exact(shop)


def test_copy_of_a_frozen_task_wins(folder: Path, shop: Shop) -> None:
    """The original stands still after its COMMIT; the copy, on another host, finds that done and does the rest."""
    before = psutil.Process().children()  # servers of other tests
    with standalone(folder / "cluster") as master:
        started = [child for child in psutil.Process().children() if child not in before]
        assert set.union(*map(listening, started)) == {"127.0.0.1", "127.0.0.2"}
        session = {"master": master, "options": {**SPECULATION, **_SMALL}}
        fired, _ = landed(folder, shop, session, how="freeze", when="after commit", partition=1, attempt=0)
    assert (fired.place.partition, fired.place.attempt) == (1, 0)
    assert not psutil.pid_exists(fired.place.pid)
    assert_exact(shop)
    assert of_folder(folder) == []
