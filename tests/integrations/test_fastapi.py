"""The service of the page on FastAPI, under a real server and on PostgreSQL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from tests.servers.databases import query
from tests.worker.test_loop import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "fastapi.md"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_an_order_is_accepted_if_and_only_if_it_is_committed(url: str, tmp_path: Path) -> None:
    (service,) = re.findall(r"```python\n# service.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(service.splitlines()) <= 60
    (tmp_path / "service.py").write_text(service)
    query(url, "CREATE TABLE shop_order (id INTEGER PRIMARY KEY, state TEXT)")
    environment = {**os.environ, "IDEMP_DATABASE_URL": url, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "uvicorn", "service:api", "--host", "127.0.0.1", "--port", "0"]
    out = tmp_path / "out"
    with out.open("w") as file:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        wait_for(lambda: "running on" in out.read_text() or server.poll() is not None)
        found = re.search(r"running on (http://127.0.0.1:\d+)", out.read_text())
        assert found, out.read_text()

        def place(id: int) -> int:
            return httpx.post(f"{found[1]}/orders", json={"order_id": id, "sku": "lamp"}, timeout=30).status_code

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(place, range(40))) == [202] * 40
        assert place(0) == 500  # the row is there, so neither a second one nor a message is
        query(url, "ALTER TABLE idemp_output RENAME TO away")  # so that the COMMIT fails, after the endpoint has returned
        assert place(50) == 500
        query(url, "ALTER TABLE away RENAME TO idemp_output")
        assert place(51) == 202
    finally:
        server.terminate()
        assert server.wait(30) in (0, -15)
    assert sorted(id for (id,) in query(url, "SELECT id FROM shop_order")) == [*range(40), 51]
    assert query(url, "SELECT count(*) FROM idemp_message WHERE queue = 'orders'") == [(41,)]
    assert query(url, "SELECT count(*) FROM idemp_pending") == [(0,)]
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM idemp_inbox")) == 41
    engine.dispose()
