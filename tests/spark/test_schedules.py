"""Faults of many kinds at random places of a stream, which is run again or anew: exactly once in effect, each time."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from idemp.spark.testing import Fault, inject, lose_checkpoint, replay_last_batch
from tests.spark.shop import Shop
from tests.spark.streams import assert_exact, land, write_input

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SCHEDULES = int(os.environ.get("IDEMP_TEST_SCHEDULES", "5"))
"""Each takes four seconds. `IDEMP_TEST_SCHEDULES=20` for a longer look."""


def scheduled(chance: random.Random) -> Iterator[Fault]:
    """Faults somewhere, one at least that happens; at most three in one partition, so that its task comes through."""
    for partition in (0, 1):
        for number in range(chance.randint(1 - partition, 3)):
            how: Any = chance.choice(["raise", "exit", "kill"])
            when: Any = chance.choice(["before begin", "before commit", "after commit"])
            transaction = chance.choice([None, 1, 2, 3]) if number else None
            yield Fault(how, when, partition=partition, transaction=transaction)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_schedule(seed: int, spark: SparkSession, tmp_path: Path, shop: Shop) -> None:
    write_input(tmp_path)
    chance = random.Random(seed)
    faults = list(scheduled(chance))
    with inject(spark, *faults) as fired:
        land(spark, tmp_path, shop.url, rows=chance.choice([7, 20, 1000]))
        after = chance.choice(["nothing", "replay", "loss"])
        if after == "replay":
            replay_last_batch(tmp_path / "checkpoint")
        elif after == "loss":
            lose_checkpoint(tmp_path / "checkpoint")
        land(spark, tmp_path, shop.url)
    assert fired(), faults
    assert_exact(shop)
