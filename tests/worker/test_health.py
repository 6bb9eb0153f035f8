"""Health checks: what fails them, and what does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from idemp import ConfigurationError
from idemp.worker import health
from idemp.worker import worker as worker_module
from idemp.worker.health import combine, serve_health, status
from tests.worker.test_loop import wait_for
from tests.world import World


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, Any]:
    try:
        with urlopen(f"http://{host}:{port}{path}", timeout=30) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error) if error.code != 404 else None


def test_answers() -> None:
    said = status({"relay": 1.0})
    server = serve_health("127.0.0.1", 0, lambda: said)
    try:
        assert get(server.port, "/health")[0] == get(server.port, "/ready")[0] == 200
        said = status({"relay": 1.0}, obstacle="disk full")
        assert (get(server.port, "/health")[0], get(server.port, "/ready")) == (200, (503, said))
        said = combine([said, status({"relay": health.SILENT})])
        assert (get(server.port, "/health")[0], get(server.port, "/ready")[0], get(server.port, "/")[0]) == (503, 503, 404)
        with pytest.raises(ConfigurationError, match=f"health_port={server.port} cannot be used"):
            serve_health("127.0.0.1", server.port, lambda: said)
    finally:
        server.close()


def test_an_outage_fails_ready_alone_and_a_running_handler_neither(url: str, caplog: Any, monkeypatch: Any) -> None:
    seen = []

    def handle(*_: Any) -> None:
        worker._seen -= 1000
        seen.append(worker.status())
        if len(seen) > 3:
            raise RuntimeError("boom")
        for _ in range(2):  # upkeep runs in another thread
            worker.watch(time.monotonic() + 1000 * len(seen))
            seen.append({})

    world = World(url, handle)
    worker = world.worker()
    worker._seen -= 1000  # nothing else has happened
    assert (worker.status()["healthy"], worker.status()["ready"]) == (False, False)
    world.send("1")
    worker.step(poll=0.0)
    assert (seen[0]["ready"], seen[0]["running"]) == (True, "shop.Order")
    assert [record.fields["type"] for record in caplog.records if record.event == "handler.slow"] == ["shop.Order"]
    monkeypatch.setattr(worker.adapters.store, "probe", lambda: False)
    monkeypatch.setattr(worker.adapters.store, "connect", lambda: (_ for _ in ()).throw(ConnectionError("gone")))
    world.send("2")
    worker.step(poll=0.0)
    found = worker.status()
    assert (found["healthy"], found["ready"], found["obstacle"]) == (True, False, "ConnectionError: gone")
    monkeypatch.undo()
    world.work(worker)
    assert (worker.status()["ready"], worker.status()["running"]) == (True, "")  # although the handler has failed
    worker.stop()
    assert not worker.status()["ready"]
    assert worker_module.SLOW == 60.0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_processes_answer_together(url: str, tmp_path: Path, processes: str) -> None:
    host = f"127.0.0.{1 + int(processes)}"
    environment = {
        **os.environ,
        "IDEMP_DATABASE_URL": url,
        "IDEMP_HEALTH_PORT": "0",
        "IDEMP_HEALTH_HOST": host,
        "IDEMP_TEST_FOLDER": str(tmp_path),
    }
    command = [sys.executable, "-m", "idemp", "worker", "tests.apps", "--json", "--processes", processes]
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stderr=log)

    def port() -> int:
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        return next((line["port"] for line in lines if line["event"] == "health.started"), 0)

    try:
        wait_for(port)
        wait_for(lambda: get(port(), "/ready", host)[0] == 200)
        code, said = get(port(), "/health", host)
        assert code == 200
        if processes == "2":
            assert [each["ready"] for each in said["processes"]] == [True, True]
        else:
            assert set(said["threads"]) == {"consuming", "upkeep", "relay", "purge"}
    finally:
        worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
