"""An archive through an app's handlers: what was handled online is skipped, and the other way round."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from idemp.spark.writing import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark.summary import Summary
    from idemp.spark.writing import Sink

_PARTS_PER_CORE: Final = 4
_LOOK_SECONDS: Final = 0.5


def backfill(messages: DataFrame, sink: Sink, *, tell: Callable[[int, int], object] | None = None) -> Summary:
    """Handle all messages of a DataFrame, such as `read_messages` gives; what became of them.

    Stopped at any point, run it again: what is handled is in the inbox, which is all that is asked. There is no second
    record of how far it came, which could be lost, or be right about another input.

    Args:
        messages: see `Columns`.
        sink: where to.
        tell: called twice a second with the tasks that are done, and with how many there are.

    Raises:
        ConfigurationError, StoreUnavailable, GivenUp: as `Sink.run` says.
    """
    spark = messages.sparkSession
    named = replace(sink, run_name=sink.run_name or new_run_name())
    if named.partitions is None:
        # More than there are cores: what a lost task has to do again is less, and progress shows.
        named = replace(named, partitions=_PARTS_PER_CORE * cores(spark))
    with _watched(spark, tell):
        return named.run(messages)


def new_run_name() -> str:
    """A name that no other run has, in order of time.

    Example:
        >>> new_run_name().startswith("backfill-20")
        True
    """
    return f"backfill-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:4]}"


@contextmanager
def _watched(spark: SparkSession, tell: Callable[[int, int], object] | None) -> Iterator[None]:
    """Tell how many tasks are done while the block runs; through Spark Connect nobody can."""
    if tell is None or not hasattr(spark, "_jsparkSession"):
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(spark, tell, ended), name="idemp-progress", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _watch(spark: SparkSession, tell: Callable[[int, int], object], ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    seen: dict[int, tuple[int, int]] = {}
    while not ended.wait(_LOOK_SECONDS):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                seen[stage] = info.numCompletedTasks, info.numTasks
        tell(sum(done for done, _ in seen.values()), sum(total for _, total in seen.values()))
