"""Micro-batches that run again, and checkpoints that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from idemp.errors import ConfigurationError
from idemp.spark.testing import lose_checkpoint, replay_last_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow


def drain(spark: SparkSession, folder: Path) -> list[tuple[int, list[int]]]:
    """Run a query over a folder's files, one each micro-batch: numbers of micro-batches and what they brought."""
    seen: list[tuple[int, list[int]]] = []

    def take(batch: DataFrame, number: int) -> None:
        seen.append((number, sorted(row.n for row in batch.collect())))

    query = (
        spark.readStream.schema("n INT")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder / "input"))
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of input."""
    (tmp_path / "input").mkdir()
    for number in range(2):
        (tmp_path / "input" / f"{number}.json").write_text(f'{{"n": {10 * number}}}\n{{"n": {10 * number + 1}}}\n')
    return tmp_path


def test_last_micro_batch_runs_again_and_lost_checkpoint_brings_everything(spark: SparkSession, folder: Path) -> None:
    everything = drain(spark, folder)
    assert [number for number, _ in everything] == [0, 1]
    assert sorted(each for _, rows in everything for each in rows) == [0, 1, 10, 11]
    assert drain(spark, folder) == []
    assert replay_last_batch(folder / "checkpoint") == 1
    assert drain(spark, folder) == everything[1:]
    lose_checkpoint(folder / "checkpoint")
    assert [number for number, _ in drain(spark, folder)] == [0, 1]


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    for lose in (lose_checkpoint, replay_last_batch):
        with pytest.raises(ConfigurationError, match="checkpoint"):
            lose(tmp_path)
    assert (tmp_path / "precious").exists()
