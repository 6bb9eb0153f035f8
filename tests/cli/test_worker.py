"""`idemp worker` and `idemp relay` as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cli.conftest import Cli, Shop

BLOCKING = """
import threading
from pathlib import Path
from idemp import App, Idempotent

app = App("shop")


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id"))
def order(message, ctx):
    Path("begun").touch()
    threading.Event().wait()
"""


class Running:
    """A process of `idemp`; what it says goes to files."""

    def __init__(self, shop: Shop, *arguments: str) -> None:
        self.log = shop.folder / "stderr"
        self._out = shop.folder / "stdout"
        with self.log.open("wb") as err, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "idemp.cli", *arguments],
                cwd=shop.folder,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(30)

    @property
    def data(self) -> Any:
        return json.loads(self._out.read_text())

    def events(self) -> list[str]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
        return [line["event"] for line in lines if "event" in line]  # the last one may be the command's error

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children() if self.process.poll() is None else []

    def close(self) -> None:
        for child in self.children():
            child.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(shop: Shop) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def begin(*arguments: str) -> Running:
            running = Running(shop, *arguments)
            stack.callback(running.close)
            return running

        yield begin


def test_worker_handles_until_it_is_told_to_stop(shop: Shop, start: Callable[..., Running]) -> None:
    for number in (1, 2, 2):
        shop.send({"order_id": number})
    worker = start("worker", shop.where, "--json", "--threads", "2", "--log-json")
    out = shop.app.broker
    wait_until(lambda: out.depth("shop") == 0 and out.depth("out") >= 2, "all handled", seen=worker.log.read_text)
    worker.send(signal.SIGTERM)
    assert worker.ended() == 0
    assert worker.data == {"consumers": ["shop"], "stopped_by": "SIGTERM"}
    assert {"worker_runs", "stopping", "worker_stopped"} <= set(worker.events())
    assert len({message.message_id for message in out.browse("out", 10)}) == 2


def test_second_signal_ends_it_at_once(shop: Shop, start: Callable[..., Running]) -> None:
    (shop.folder / "blocking.py").write_text(BLOCKING)
    shop.send({"order_id": 1})
    worker = start("worker", "blocking:app", "--log-json")
    wait_until((shop.folder / "begun").exists, "the handler began")
    worker.send(signal.SIGINT)
    wait_until(lambda: "stopping" in worker.events(), "the first signal arrived")
    assert worker.process.poll() is None
    worker.send(signal.SIGTERM)
    assert worker.ended() == 130
    assert worker.events()[-2:] == ["stopped_at_once", "handler_abandoned"]
    assert shop.app.broker.depth("shop") == 1


def test_worker_stops_when_its_stdin_closes(shop: Shop, start: Callable[..., Running]) -> None:
    worker = start("worker", shop.where, "--until-stdin-closes", "--log-json")
    wait_until(lambda: "worker_runs" in worker.events(), "it runs")
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.ended() == 0


def test_dead_worker_process_is_replaced(shop: Shop, start: Callable[..., Running]) -> None:
    parent = start("worker", shop.where, "--processes", "2", "--log-json", "--json")
    wait_until(lambda: parent.events().count("worker_runs") == 2, "two run")
    first = parent.children()
    assert len(first) == 2
    first[0].kill()
    wait_until(lambda: parent.events().count("worker_runs") == 3, "another one was started")
    assert "process_died" in parent.events()
    shop.send({"order_id": 1})
    wait_until(lambda: shop.app.broker.depth("out") == 1, "it was handled")
    children = parent.children()
    parent.send(signal.SIGTERM)
    assert parent.ended() == 0
    assert parent.data == {"processes": 2, "stopped_by": "SIGTERM", "exit_code": 0}
    assert not any(child.is_running() for child in children)


def test_no_child_outlives_its_parent(shop: Shop, start: Callable[..., Running]) -> None:
    parent = start("worker", shop.where, "--processes", "2", "--log-json")
    wait_until(lambda: parent.events().count("worker_runs") == 2, "two run")
    children = parent.children()
    parent.send(signal.SIGKILL)
    assert parent.ended() == -signal.SIGKILL
    wait_until(lambda: not any(child.is_running() for child in children), "the children ended")


def test_refused_configuration_is_not_tried_again(shop: Shop, start: Callable[..., Running]) -> None:
    parent = start("worker", shop.where, "--processes", "2", "--prefix", "other_", "--log-json")
    assert parent.ended() == 3
    assert "process_died" not in parent.log.read_text()
    assert "idemp db upgrade" in parent.log.read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_module_that_ends_the_process_is_refused_with_words(
    empty_shop: Shop, start: Callable[..., Running], processes: str
) -> None:
    (empty_shop.folder / "ending_shop.py").write_text("import sys\nsys.exit(0)\n")
    parent = start("worker", "ending_shop:app", "--processes", processes)
    assert parent.ended() == 3
    assert "can't be imported: it ends the process" in parent.log.read_text()


@pytest.mark.parametrize("with_app", [True, False])
def test_relay_ships_what_is_pending(shop: Shop, start: Callable[..., Running], with_app: bool) -> None:
    with shop.app.initiate(id="request-1") as unit:
        output_id = unit.send({"order_id": 1}, to="out", type="shop.Done")
    relay = start("relay", *([shop.where] if with_app else []), "--log-json", "--json")
    upkeep = shop.app.store.upkeep
    wait_until(lambda: upkeep.pending_count() == 0, "it was confirmed")
    assert [message.message_id for message in shop.app.broker.browse("out", 10)] == [str(output_id)]
    assert upkeep.relay_alive()
    relay.send(signal.SIGTERM)
    assert relay.ended() == 0
    assert relay.data == {"stopped_by": "SIGTERM"}
    assert not upkeep.relay_alive()


def test_entry_point_is_installed(cli: Cli) -> None:
    script = os.path.join(os.path.dirname(sys.executable), "idemp")  # noqa: PTH118, PTH120
    said = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == cli("--version").out
