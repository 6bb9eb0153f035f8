"""What drivers of their own run, for tests that kill them, their executors, or their tasks' first attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from idemp.spark.testing import Fault, inject, jvm, local_session
from tests.spark.streams import land


def landing(folder: str, url: str, session: str, faults: str) -> None:
    """The stream of orders, to its end, with faults; then what its executors were."""
    options: dict[str, Any] = json.loads(session)
    with (
        local_session(Path(folder), **options) as spark,
        inject(spark, *(Fault(**each) for each in json.loads(faults))),
    ):
        spark.range(2, numPartitions=2).count()  # all executors are there
        land(spark, Path(folder), url)
        work = jvm.spark_home() / "work" / spark.sparkContext.applicationId
        executors = len(list(work.iterdir())) if work.is_dir() else 0
    told = {"executors": executors, "work": work.exists()}
    Path(folder, "told.json").write_text(json.dumps(told))
