"""What can go wrong with a sink, and that it is exactly once in effect all the same: sums are asked of the database."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from idemp.spark.testing import Fault, inject, lose_checkpoint, replay_last_batch
from idemp.testing.processes import wait_until
from tests.spark.shop import Shop, shop_in
from tests.spark.streams import BATCHES, assert_exact, land, stream, write_input

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from tests.servers.postgresql import PostgreSQL

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path)
    return tmp_path


def micro_batches(query: StreamingQuery) -> list[int]:
    """Those that a query ran."""
    return [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]]


@pytest.mark.parametrize("when", ["before commit", "after commit"])
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_task_dies(how: Any, when: Any, spark: SparkSession, folder: Path, shop: Shop) -> None:
    """At its second chunk: what became of the first one stays."""
    with inject(spark, Fault(how, when, partition=0, attempt=0, transaction=2)) as fired:
        land(spark, folder, shop.url)
    assert [(each.fault.how, each.place.when, each.place.transaction) for each in fired()] == [(how, when, 2)]
    assert_exact(shop)


def test_fourth_failure_then_another_run_to_the_end(spark: SparkSession, folder: Path, shop: Shop) -> None:
    with inject(spark, Fault("kill", "before commit", partition=1, times=4)) as fired:
        query = stream(spark, folder, shop.url)
        with pytest.raises(Exception, match="crashed"):
            query.awaitTermination()
    assert [each.place.attempt for each in fired()] == [0, 1, 2, 3]
    assert micro_batches(land(spark, folder, shop.url)) == list(range(BATCHES))
    assert_exact(shop)


def test_micro_batch_is_replayed_and_then_the_checkpoint_is_lost(spark: SparkSession, folder: Path, shop: Shop) -> None:
    first = land(spark, folder, shop.url)
    assert replay_last_batch(folder / "checkpoint") == BATCHES - 1
    assert micro_batches(land(spark, folder, shop.url)) == [BATCHES - 1]
    assert_exact(shop)
    lose_checkpoint(folder / "checkpoint")
    anew = land(spark, folder, shop.url)
    assert anew.id != first.id
    assert micro_batches(anew) == list(range(BATCHES))
    assert_exact(shop)


def test_database_restarts_while_a_chunk_waits_for_its_commit(
    spark: SparkSession, folder: Path, own_postgresql: PostgreSQL
) -> None:
    with shop_in(own_postgresql.create_database("shop")) as shop:
        with inject(spark, Fault("freeze", "before commit", partition=0)) as fired:
            query = stream(spark, folder, shop.url)
            wait_until(lambda: bool(fired()), "a chunk waits before its COMMIT")
            own_postgresql.stop_immediately()
            own_postgresql.start()
            os.kill(fired()[0].place.pid, signal.SIGCONT)
            query.awaitTermination()
        assert len(fired()) == 1
        shop.engine.dispose()  # its connections are of the server before
        assert_exact(shop)
