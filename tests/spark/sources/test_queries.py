"""What every source must do inside of a streaming query of Spark's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from idemp.spark.sources import register
from idemp.testing import FaultProxy
from tests.spark.sources.grounds import MOMENT, Ground, SpoolGround, StreamGround, message, messages

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.slow

END_SECONDS = 300


@dataclass
class Pipeline:
    """Queries over one source and one checkpoint, and the rows that their micro-batches had."""

    spark: SparkSession
    ground: Ground
    checkpoint: Path
    batches: list[tuple[int, list[Row]]] = field(default_factory=list)

    def run(
        self, through: Callable[[DataFrame], DataFrame] = lambda frame: frame, **options: str
    ) -> list[tuple[int, list[Row]]]:
        """Read all that is there now; what this run's micro-batches had."""
        known = len(self.batches)

        def keep(frame: DataFrame, number: int) -> None:
            self.batches.append((number, through(frame).collect()))

        reading = self.spark.readStream.format(self.ground.format).options(**{**self.ground.options, **options})
        writing = reading.load().writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        while not ended(writing.trigger(availableNow=True).start()):
            pass
        return [(number, rows) for number, rows in self.batches[known:] if rows]


def ended(query: StreamingQuery) -> bool:
    """Wait until it ends by itself; `False` if it could not begin.

    Spark gives the process that plans ten seconds to come up, of which a busy machine may have too few.
    """
    try:
        assert query.awaitTermination(END_SECONDS), "it ends by itself"
    except StreamingQueryException as error:
        if "Python worker failed to connect back" in str(error):
            return False
        raise
    finally:
        query.stop()
    return True


@pytest.fixture
def pipeline(spark: SparkSession, ground: Ground, tmp_path: Path) -> Pipeline:
    return registered(spark, ground, tmp_path)


def registered(spark: SparkSession, ground: Ground, folder: Path) -> Pipeline:
    secrets: Mapping[str, Any] = ground.secrets
    register(spark, **secrets)
    return Pipeline(spark, ground, folder / "checkpoint")


def numbers(batches: list[tuple[int, list[Row]]]) -> list[int]:
    return [int(row.id.removeprefix("m-")) for _, rows in batches for row in rows]


def test_reads_all_keeps_the_limit_and_goes_on_from_the_checkpoint(pipeline: Pipeline) -> None:
    """In order; what comes after one run is the next one's, nothing comes twice, and no secret shows."""
    ground, plans = pipeline.ground, []

    def keep_plan(frame: DataFrame) -> DataFrame:
        plans.append(frame._jdf.queryExecution().toString())
        return frame

    ground.put(messages(100))
    first = pipeline.run(keep_plan, maxOffsetsPerTrigger="40")
    assert [len(rows) for _, rows in first] == [40, 40, 20]
    assert numbers(first) == list(range(100))
    row = first[0][1][0]
    assert (row.id, row.type, bytes(row.body)) == ("m-0", "shop.Order", b'{"number": 0}')
    assert (row.time.timestamp(), row.position) == (MOMENT.timestamp(), f"{ground.partition}#0")
    ground.put(messages(30, first=100))
    again = pipeline.run(keep_plan, maxRecordsPerPartition="7")
    assert sorted(numbers(again)) == list(range(100, 130))
    assert [row.position for _, rows in again for row in sorted(rows, key=lambda each: each.id)] == [
        f"{ground.partition}#{number}" for number in range(100, 130)
    ]
    kept = [file.read_text(errors="replace") for file in pipeline.checkpoint.rglob("*") if file.is_file()]
    assert len(plans) == 4
    assert len(kept) > 4
    assert not [text for text in (*plans, *kept) if ground.secret in text]


def fails_once(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task that dies in the middle, at its first attempt."""
    from pyspark import TaskContext

    context = TaskContext.get()
    for part in parts:
        yield part.slice(0, part.num_rows // 2)
        if context is not None and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt dies here")
        yield part.slice(part.num_rows // 2)


def test_task_and_micro_batch_that_run_again_have_the_same_rows(pipeline: Pipeline) -> None:
    """Each task is tried twice. Then the checkpoint does not know that the micro-batch was done, and there is more."""

    def through(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(fails_once, frame.schema)

    pipeline.ground.put(messages(300))
    ((number, rows),) = pipeline.run(through)
    assert numbers([(number, rows)]) == list(range(300))
    for name in (f"commits/{number}", f"commits/.{number}.crc"):
        (pipeline.checkpoint / name).unlink()
    pipeline.ground.put(messages(5, first=300))
    replayed, new = pipeline.run(through)
    assert replayed == (number, rows)
    assert numbers([new]) == list(range(300, 305))


def test_what_is_gone_ends_the_query(pipeline: Pipeline) -> None:
    ground = pipeline.ground
    ground.put(messages(3))
    assert numbers(pipeline.run()) == [0, 1, 2]
    ground.put(messages(3, first=3))
    for _ in range(4 if ground.format == "idemp-spool" else 1):  # a spool goes message by message, past those three
        ground.trim()
    with pytest.raises(Exception, match=r"what lies between is lost to this reader"):
        pipeline.run()


def test_spool_is_emptied_behind_the_checkpoint(spark: SparkSession, postgresql_url: str, tmp_path: Path) -> None:
    """One micro-batch later at most; the last one is released by the next run."""
    ground = SpoolGround(postgresql_url)
    pipeline = registered(spark, ground, tmp_path)
    ground.put(messages(100))
    assert len(pipeline.run(maxOffsetsPerTrigger="40")) == 3
    assert ground.level().first >= 80
    ground.put([message(100)])
    assert numbers(pipeline.run()) == [100]
    assert ground.level().first == 100
    ground.close()


@pytest.mark.parametrize("kind", ["stream", "spool"])
def test_connection_that_is_lost_costs_an_attempt_and_no_row(
    spark: SparkSession, rabbitmq_url: str, postgresql_url: str, tmp_path: Path, kind: str
) -> None:
    url = {"stream": rabbitmq_url, "spool": postgresql_url}[kind]
    with proxy_of(url) as proxy:
        ground: Ground = StreamGround(url) if kind == "stream" else SpoolGround(url)
        ground.secrets = {"broker" if kind == "stream" else "database": proxy.through(url)}
        ground.put(messages(300))
        ground.put([message(300)])  # all that a planner ever reads of a stream
        pipeline = registered(spark, ground, tmp_path)
        cut = proxy.cut_when(b"m-150", direction="to_client")
        assert numbers(pipeline.run(startingOffsets='{"orders": 0}')) == list(range(301))
        assert cut.wait_triggered(0)
        ground.close()


def proxy_of(url: str) -> FaultProxy:
    host, port = url.partition("@")[2].partition("/")[0].split(":")
    return FaultProxy(host, int(port))
