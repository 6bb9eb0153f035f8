"""Outputs of backfills in a Delta table: each id once, however often and by however many writers they are inserted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String, cast, select

from idemp import ConfigurationError
from idemp.errors import NotInstalled
from tests.spark import shop
from tests.spark.conftest import ROOT, Shop, java_options
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

    sink(APP, parked=str(tmp_path / "parked"), run="first").run(frame(spark, rows(ids(3_000))))
    table, inserted = tmp_path / "lake" / "outputs", []

    def export() -> None:
        inserted.append(to_lake(spark, APP, str(table)))

    # Batches of Spark have 200 rows and are a commit each, so that two writers conflict.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "200")
    monkeypatch.setattr(lake, "ROWS", 200)
    try:
        in_threads(export, export)
        assert sum(inserted) == 3_000
        assert DeltaTable(table).version() >= 15
        export()
        assert inserted[2] == 0
        sink(APP, parked=str(tmp_path / "parked"), run="second").run(frame(spark, rows(ids(1_000, "later"))))
        killed(table)
        assert 3_000 < len(there(table)) < 4_000  # an orphan of the killed process may finish its commit meanwhile
        in_threads(export, export)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    found = there(table)
    assert Counter(row["output_id"] for row in found) == Counter(dict.fromkeys(stored(), 1))
    assert {row["output_id"]: row["body"] for row in found} == stored()
    assert Counter(row["worker"] for row in found) == {"first": 3_000, "second": 1_000}
    assert {(row["consumer"], row["type"], row["kind"], row["ordinal"]) for row in found} == {
        ("shop", "shop.Shipped", "publish", 0)
    }
    assert all(row["claimed_at"].year >= 2026 for row in found)
    assert to_lake(spark, APP, str(tmp_path / "second"), run="second") == 1_000
    write_deltalake(tmp_path / "foreign", DeltaTable(table).to_pyarrow_table().select(["body"]))
    with pytest.raises(ConfigurationError, match="without the columns output_id"):
        to_lake(spark, APP, str(tmp_path / "foreign"))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(NotInstalled, match=r"pip install 'idemp\[lake\]'"):
        to_lake(spark, APP, str(tmp_path / "none"))


def killed(table: Path) -> None:
    """Kill an export, with its JVM and its Python workers, after its second commit."""
    from deltalake import DeltaTable

    script = f"""
from idemp.spark import lake, session, to_lake
lake.ROWS = 50
options = {{"spark.driver.extraJavaOptions": {java_options()!r}, "spark.sql.execution.arrow.maxRecordsPerBatch": "50"}}
to_lake(session(options=options), {APP!r}, {str(table)!r})
"""
    before = DeltaTable(table).version()
    settings = shop.app.settings
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IDEMP_DATABASE_URL": settings.database_url}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT, start_new_session=True)
    try:
        wait_for(lambda: DeltaTable(table).version() >= before + 2, 120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
