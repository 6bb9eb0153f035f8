"""`idemp worker --reload`: a real worker, whose source files change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import descendants, has_ended
from tests.worker.conftest import ROOT
from tests.worker.test_loop import wait_for
from tests.world import World

APP = """
import time
from pathlib import Path
from pydantic import BaseModel
from idemp import App
from rules import GREETING

class Greet(BaseModel):
    __message_type__ = "shop.Greet"
    order_id: str

app = App("shop")

@app.handler(Greet)
def greet(message: Greet) -> None:
    print(GREETING, message.order_id, flush=True)
    while message.order_id == "slow" and not Path("go on").exists():
        time.sleep(0.01)
"""


class Reloading:
    """A worker with `--reload` in a folder of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.world = folder, World(url)
        self.environment = {**os.environ, "IDEMP_DATABASE_URL": url, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
        self.write("shop.py", APP)
        self.write("rules.py", "GREETING = 'hello'\n")

    def write(self, name: str, text: str) -> None:
        new = self.folder / "new"
        new.write_text(f"{text:40}\n")
        os.utime(new, (1, 1))  # only the text differs, as in a quick change
        new.replace(self.folder / name)  # one change, however slow the disk is

    def start(self, *options: str) -> None:
        with (self.folder / "out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "idemp", "worker", "shop", "--reload", *options],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        try:
            wait_for(lambda: self.out().count(text) >= times or self.process.poll() is not None)
        finally:
            assert self.out().count(text) >= times, self.out()

    def greet(self, name: str, text: str) -> None:
        self.world.send(name, type="shop.Greet")
        self.wait_for(f"{text} {name}\n")

    def stopping(self) -> int:
        """Return how many workers have said that they stop."""
        worker = self.world.database.tables.worker
        with self.world.database.queue_engine.connect() as connection:
            return sum(row.stopping for row in connection.execute(worker.select()))

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        pids = descendants(self.process.pid)
        os.killpg(self.process.pid, number)  # as a terminal does
        code = self.process.wait(60)
        assert all(map(has_ended, pids))
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            for pid in descendants(self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self.world.close()


@pytest.fixture
def reloading(url: str, tmp_path: Path) -> Iterator[Reloading]:
    (tmp_path / "app").mkdir()
    found = Reloading(url, tmp_path / "app")
    yield found
    found.kill()


def test_a_change_starts_the_worker_again_and_an_error_waits_for_the_next_change(reloading: Reloading) -> None:
    reloading.start()
    reloading.greet("Ada", "hello")
    reloading.write("notes.txt", "no source file")
    reloading.write("rules.py", "GREETING = 'good morning'\n")
    reloading.wait_for("consuming shop", 2)
    assert "worker.reloaded: rules.py changed: the worker starts again" in reloading.out()
    assert "worker.stopped" in reloading.out()
    reloading.greet("Bob", "good morning")
    reloading.write("rules.py", "GREETING = = 'good night'\n")
    reloading.wait_for("the worker ended with 3, and starts again when a source file changes")
    assert "Traceback" in reloading.out()
    assert "SyntaxError: invalid syntax (rules.py, line 1)" in reloading.out()
    reloading.write("rules.py", "GREETING = 'good night'\n")
    reloading.wait_for("consuming shop", 3)
    reloading.greet("slow", "good night")
    before = reloading.stopping()
    os.killpg(reloading.process.pid, signal.SIGINT)
    wait_for(lambda: reloading.stopping() > before)  # a second signal would end the worker at once
    reloading.write("go on", "")
    assert reloading.process.wait(60) == 0
    assert reloading.out().count(" changed: ") == 3  # notes.txt did nothing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_worker_that_failed_is_stopped_with_exit_code_0(reloading: Reloading, number: signal.Signals) -> None:
    reloading.write("rules.py", "raise SystemExit(1)\n")
    reloading.start()
    reloading.wait_for("the worker ended with 3")
    assert reloading.stop(number) == 0


@pytest.mark.slow
def test_a_change_and_a_signal_let_the_handler_finish(reloading: Reloading) -> None:
    reloading.start("--processes", "2", "--json")
    reloading.wait_for('"event": "worker.started"', 2)
    reloading.greet("slow", "hello")
    reloading.write("rules.py", "GREETING = 'good morning'\n")
    reloading.wait_for('"event": "worker.reloaded"')
    reloading.write("go on", "")
    reloading.wait_for('"event": "worker.started"', 4)
    assert reloading.out().count("hello slow") == 1  # the handler was not interrupted
    (reloading.folder / "go on").unlink()
    reloading.greet("slow", "good morning")
    reloading.write("rules.py", "GREETING = 'good night'\n")
    reloading.wait_for('"event": "worker.reloaded"', 2)
    reloading.process.send_signal(signal.SIGTERM)  # the worker has been told already
    reloading.write("go on", "")
    assert reloading.process.wait(30) == 0
    assert reloading.out().count("good morning slow") == 1
    assert reloading.out().count('"event": "worker.started"') == 4
