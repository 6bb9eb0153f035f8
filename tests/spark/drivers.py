"""What drivers of their own run, for tests that kill them, their executors, or their tasks' first attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from idemp.spark.testing import Fault, inject, jvm, local_session
from tests.spark.streams import land


def landing(folder: str, session: str, rounds: str) -> None:
    """In one session the stream of orders to its end, in each round's folder, with its faults; then what executors were."""
    options: dict[str, Any] = json.loads(session)
    with local_session(Path(folder), **options) as spark:
        spark.range(2, numPartitions=2).count()  # all executors are there
        for each in json.loads(rounds):
            with inject(spark, *(Fault(**fault) for fault in each["faults"])):
                land(spark, Path(each["folder"]), each["url"])
        work = jvm.spark_home() / "work" / spark.sparkContext.applicationId
        executors = len(list(work.iterdir())) if work.is_dir() else 0
    told = {"executors": executors, "work": work.exists()}
    Path(folder, "told.json").write_text(json.dumps(told))
