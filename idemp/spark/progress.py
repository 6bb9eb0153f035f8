"""Progress of a run as lines of text, for output that is no terminal, where Spark draws its own bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark import Accumulator, StatusTracker
    from pyspark.sql import SparkSession

__all__ = ["reported"]

EVERY: Final = 10.0  # seconds from line to line


@contextmanager
def reported(spark: SparkSession, progress: Callable[[str], Any] | None) -> Iterator[Accumulator[int] | None]:
    """Report how far Spark is, every 10 seconds; yield the counter of handled rows, whose value Spark brings at the end of each task.

    Args:
        spark: Spark session; over Spark Connect, which has no counters, nothing is reported.
        progress: Takes a line; None reports nothing.

    Example:
        >>> def handle(spark: "SparkSession", messages: "DataFrame") -> int:
        ...     with reported(spark, print):
        ...         return messages.count()
    """
    context = getattr(spark, "sparkContext", None)
    if progress is None or context is None:
        yield None
        return
    rows, over = context.accumulator(0), Event()
    thread = Thread(target=_report, args=(context.statusTracker(), rows, progress, over), name="idemp-progress", daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()


def _report(tracker: StatusTracker, rows: Accumulator[int], progress: Callable[[str], Any], over: Event) -> None:
    stages: dict[int, float] = {}  # and when they were first seen
    start = time.monotonic()
    while not over.wait(EVERY):
        now = time.monotonic()
        active = [found for stage in tracker.getActiveStageIds() if (found := tracker.getStageInfo(stage)) is not None]
        for each in active:
            stages.setdefault(each.stageId, now - EVERY)
        if active:
            last = max(active, key=lambda each: each.stageId)
            progress(line(last.numCompletedTasks, last.numTasks, rows.value, now - start, now - stages[last.stageId]))


def line(done: int, tasks: int, rows: int, seconds: float, in_stage: float) -> str:
    """Return a line about a stage.

    Example:
        >>> line(5, 8, 400_000, 20.0, 20.0)
        '5 of 8 tasks, 400,000 rows handled, 20,000 a second, about 12 s left'
        >>> line(0, 8, 0, 20.0, 10.0)
        '0 of 8 tasks, reading'
    """
    counted = f", {rows:,} rows handled, {rows / seconds:,.0f} a second" if rows else ", reading"
    left = f", about {in_stage * (tasks - done) / done:,.0f} s left" if done else ""
    return f"{done} of {tasks} tasks{counted}{left}"
