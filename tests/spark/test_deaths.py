"""Drivers and executors that are killed for real, and tasks whose copies win: sums are exact, and all of them end."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from idemp.spark.testing import SPECULATION, fired_in, run_driver, standalone
from tests.spark.shop import Shop, shop_in
from tests.spark.streams import ORDERS, assert_exact, land, write_input
from tests.spark.test_session import listening

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from idemp.spark.testing import Ended, Fired
    from idemp.spark.testing.plans import When
    from tests.servers.postgresql import PostgreSQL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each starts several JVMs, wherever it runs

_SMALL = {"spark.executor.memory": "512m"}


@pytest.fixture
def other_shop(postgresql: PostgreSQL, unique_name: str) -> Iterator[Shop]:
    with shop_in(postgresql.create_database(f"{unique_name}_other")) as made:
        yield made
    postgresql.drop_database(f"{unique_name}_other")


@dataclass(frozen=True)
class Round:
    """A stream of its own, and what happens to it."""

    folder: Path
    shop: Shop
    fault: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, shop: Shop, **fault: Any) -> Round:
        folder.mkdir(exist_ok=True)
        write_input(folder)
        return cls(folder, shop, fault)


def landing(folder: Path, session: dict[str, Any], *rounds: Round) -> Ended:
    told = [{"folder": str(each.folder), "url": each.shop.url, "faults": [each.fault]} for each in rounds]
    arguments = [str(folder), json.dumps(session), json.dumps(told)]
    return run_driver("tests.spark.drivers:landing", *arguments, log=folder / "log", seconds=300)


def landed(folder: Path, session: dict[str, Any], *rounds: Round) -> tuple[list[Fired], dict[str, Any]]:
    """To the end, with one fault in each round; which they were, and what the driver told."""
    ended = landing(folder, session, *rounds)
    assert ended.status == 0, ended.said
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return fired_in(folder), told


def of_folder(folder: Path) -> list[str]:
    """Processes that work for a folder: drivers, executors, daemons, clusters."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(folder) in command or process.environ().get("IDEMP_SPARK_FAULTS", "").startswith(str(folder)):
                found.append(command)
    return found


def test_driver_is_killed_inside_of_a_micro_batch(spark: SparkSession, tmp_path: Path, shop: Shop) -> None:
    """One chunk of it is committed, and Spark knows nothing of that. Another driver goes on."""
    killed = Round.of(tmp_path, shop, how="kill driver", when="after commit", partition=1)
    first = landing(tmp_path, {}, killed)
    assert first.killed, first.said
    assert of_folder(tmp_path) == []
    (fired,) = fired_in(tmp_path)
    assert (fired.place.partition, fired.place.transaction) == (1, 1)
    assert not list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    assert 0 < shop.count("sale") < ORDERS
    land(spark, tmp_path, shop.url)
    assert_exact(shop)


def test_executors_are_killed_and_others_take_over(tmp_path: Path, shop: Shop, other_shop: Shop) -> None:
    """In one driver's life: one executor before a COMMIT, and another one, of the next stream, after it."""
    session = {"master": "local-cluster[2,1,1024]", "options": _SMALL}
    places: tuple[When, ...] = ("before commit", "after commit")
    rounds = [
        Round.of(tmp_path / when, at, how="kill executor", when=when, partition=1)
        for when, at in zip(places, (shop, other_shop), strict=True)
    ]
    fired, told = landed(tmp_path, session, *rounds)
    assert tuple(each.place.when for each in fired) == places
    assert len({each.place.executor for each in fired}) == 2
    assert not [each for each in fired if psutil.pid_exists(each.place.executor)]
    assert told == {"executors": 4, "work": False}, "one for each killed one; nothing stays in PySpark's installation"
    assert_exact(shop)
    assert_exact(other_shop)


def test_copy_of_a_frozen_task_wins(tmp_path: Path, shop: Shop) -> None:
    """The original stands still after its COMMIT; the copy, on another host, finds that done and does the rest."""
    others = set(psutil.Process().children())  # servers of other tests in this process, which may listen elsewhere
    with standalone(tmp_path / "cluster") as master:
        cluster = set(psutil.Process().children()) - others
        assert set().union(*map(listening, cluster)) == {"127.0.0.1", "127.0.0.2"}
        session = {"master": master, "options": {**SPECULATION, **_SMALL}}
        frozen = Round.of(tmp_path, shop, how="freeze", when="after commit", partition=1, attempt=0)
        (fired,), _ = landed(tmp_path, session, frozen)
    assert (fired.place.partition, fired.place.attempt) == (1, 0)
    assert not psutil.pid_exists(fired.place.pid)
    assert_exact(shop)
    assert of_folder(tmp_path) == []
