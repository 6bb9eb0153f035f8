"""The process dies around COMMIT; whoever runs the chunk again ends with each effect, and each output, once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from sqlalchemy import text

from idemp.bulk import Came
from idemp.inbox.sql import create_engine_safely
from tests.bulk.killed import NUMBER, bulk_of, chunk
from tests.inbox.sql.kept import make_tables
from tests.lanes import mostly_slow


@pytest.mark.parametrize("lane", mostly_slow(["set", "rows"]))
@pytest.mark.parametrize("point", ["before", "after"])
def test_killed_around_commit(postgresql_url: str, lane: str, point: str) -> None:
    if lane == "set":
        pytest.importorskip("pyarrow")
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sale (id TEXT PRIMARY KEY)"))
    died = subprocess.run(
        [sys.executable, "-m", "tests.bulk.killed", postgresql_url, lane, point], timeout=120, check=False
    )
    assert died.returncode == -signal.SIGKILL
    by_set = lane == "set"
    report = bulk_of(engine, by_set=by_set).run(chunk(by_set=by_set))
    assert report.counts == {Came.REPLAY if point == "after" else Came.NEW: NUMBER}
    with engine.connect() as connection:
        for table in ("sale", "idemp_inbox", "idemp_output", "idemp_pending"):
            assert connection.scalar(text(f"SELECT count(*) FROM {table}")) == NUMBER
    engine.dispose()
