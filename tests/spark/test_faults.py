"""Faults in tasks: each happens where and as often as it was said, and a sink that claims its ids survives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from idemp.errors import ConfigurationError
from idemp.spark.testing import Fault, inject
from idemp.spark.testing.plans import When
from tests.spark import chunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

ROWS = 40


@pytest.fixture
def url(postgresql_url: str) -> str:
    chunks.prepare(postgresql_url)
    return postgresql_url


def frame(spark: SparkSession) -> DataFrame:
    """Two partitions with as many ids each."""
    return spark.range(ROWS, numPartitions=2).selectExpr("cast(id as string) id")


@pytest.mark.parametrize("when", get_args(When))
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_task_dies_once_and_runs_again(how: str, when: str, spark: SparkSession, url: str) -> None:
    with inject(spark, Fault(how, when, partition=1, attempt=0)) as fired:  # type: ignore[arg-type]
        assert chunks.pour(frame(spark), url) == ROWS
    (only,) = fired()
    assert (only.place.when, only.place.partition, only.place.attempt, only.place.transaction) == (when, 1, 0, 1)
    assert chunks.attempts(url) == {0: [0], 1: [0, 1]}
    assert chunks.effects(url) == [(ROWS, ROWS)]


def test_fires_as_often_as_it_was_said(spark: SparkSession, url: str) -> None:
    with inject(spark, Fault("kill", "after commit", partition=0, times=2)) as fired:
        chunks.pour(frame(spark), url)
    assert [each.place.attempt for each in fired()] == [0, 1]
    assert chunks.attempts(url) == {0: [0, 1, 2], 1: [0]}


def test_four_failures_fail_the_job_and_it_can_be_run_again(spark: SparkSession, url: str) -> None:
    from pyspark.errors import PySparkException

    with (
        inject(spark, Fault("raise", "before commit", partition=0, times=4)) as fired,
        pytest.raises(PySparkException, match="before commit 1 of partition 0, attempt 3"),
    ):
        chunks.pour(frame(spark), url)
    assert len(fired()) == 4
    assert chunks.pour(frame(spark), url) == ROWS
    assert chunks.effects(url) == [(ROWS, ROWS)]


def test_nothing_happens_outside_of_the_block(spark: SparkSession, url: str) -> None:
    with inject(spark, Fault("kill", "before commit")) as fired:
        pass
    chunks.pour(frame(spark), url)
    assert fired() == []
    assert chunks.attempts(url) == {0: [0], 1: [0]}


def test_third_transaction_of_a_task(spark: SparkSession, url: str) -> None:
    """Two are committed by then, and the next attempt finds them done."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "5")
    try:
        with inject(spark, Fault("exit", "before commit", partition=0, transaction=3)) as fired:
            chunks.pour(frame(spark), url)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert [each.place.transaction for each in fired()] == [3]
    assert chunks.effects(url) == [(ROWS, ROWS)]
    by_attempt = chunks.query(url, "SELECT attempt, count(*) FROM effect GROUP BY attempt ORDER BY attempt")
    assert by_attempt == [(0, 10 + ROWS // 2), (1, 10)]


def test_who_can_be_killed(spark: SparkSession) -> None:
    for how, fix in (("kill executor", "local-cluster"), ("kill driver", "run_driver")):
        with pytest.raises(ConfigurationError, match=fix), inject(spark, Fault(how, "after commit")):  # type: ignore[arg-type]
            pass
