"""Outputs of backfills in a Delta table: each id once, however often and by however many writers they are inserted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String, cast, select

from idemp import ConfigurationError
from idemp.errors import NotInstalled
from tests.spark.conftest import Shop
from tests.spark.test_spark import APP, frame, ids, rows
from tests.worker.test_loop import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["postgresql"], indirect=True)]


def test_outputs_are_in_the_lake_once(spark: SparkSession, tables: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake import DeltaTable, write_deltalake

    from idemp.spark import lake, sink, to_lake

    def stored() -> dict[str, str]:
        output = tables.database.tables.output
        with tables.database.engine.connect() as connection:
            return {id: body.decode() for id, body in connection.execute(select(cast(output.c.output_id, String), output.c.body))}

    def there(table: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(table).to_pyarrow_table().to_pylist()
        return found

    sink(APP, parked=str(tmp_path / "parked"), run="first").run(frame(spark, rows(ids(1_000))))
    table, inserted = tmp_path / "lake" / "outputs", []

    def export() -> None:
        inserted.append(to_lake(spark, APP, str(table)))

    # Batches of Spark have 100 rows and are a commit each, so that two writers conflict.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    monkeypatch.setattr(lake, "ROWS", 1)
    try:
        in_threads(export, export)
        assert sum(inserted) == 1_000
        assert DeltaTable(table).version() >= 10
        export()
        assert inserted[2] == 0
        sink(APP, parked=str(tmp_path / "parked"), run="second").run(frame(spark, rows(ids(400, "later"))))
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "20")
        before = DeltaTable(table).version()
        export_in_thread = threading.Thread(target=export)
        export_in_thread.start()
        wait_for(lambda: DeltaTable(table).version() >= before + 2, 120)
        assert len(there(table)) < 1_400
        for pid in workers(spark):  # its task runs again
            os.kill(pid, signal.SIGKILL)
        export_in_thread.join(120)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    found = there(table)
    assert Counter(row["output_id"] for row in found) == Counter(dict.fromkeys(stored(), 1))
    assert {row["output_id"]: row["body"] for row in found} == stored()
    assert Counter(row["worker"] for row in found) == {"first": 1_000, "second": 400}
    assert {(row["consumer"], row["type"], row["kind"], row["ordinal"]) for row in found} == {
        ("shop", "shop.Shipped", "publish", 0)
    }
    assert all(row["claimed_at"].year >= 2026 for row in found)
    assert to_lake(spark, APP, str(tmp_path / "second"), run="second") == 400
    write_deltalake(tmp_path / "foreign", DeltaTable(table).to_pyarrow_table().select(["body"]))
    with pytest.raises(ConfigurationError, match="without the columns output_id"):
        to_lake(spark, APP, str(tmp_path / "foreign"))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(NotInstalled, match=r"pip install 'idemp\[lake\]'"):
        to_lake(spark, APP, str(tmp_path / "none"))


def workers(spark: SparkSession) -> list[int]:
    """Return the Python workers of Spark: children of the daemons that its JVM has started."""
    assert spark._jvm is not None
    jvm = spark._jvm.java.lang.ProcessHandle.current().pid()
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == jvm]


def in_threads(*runs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not errors, errors
