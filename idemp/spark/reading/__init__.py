"""Reading the inbox with Spark: `spark.read.format("idemp")`, at one moment, in parallel.

Example:
    >>> from idemp.spark.reading import Snapshot  # with Snapshot() as moment: moment.read(spark, "inbox")
"""

from __future__ import annotations

from idemp.spark.reading.snapshots import Snapshot

__all__ = ["Snapshot"]
