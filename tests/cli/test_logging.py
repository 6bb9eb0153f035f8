"""Logging of `idemp worker`: the app's own comes first."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from idemp.cli.main import Exit
from idemp.sql.records.waiting import read_waiting
from tests.cli.test_commands import run
from tests.cli.test_doctor import stopping
from tests.world import World

APP = """
{configured}
import logging
from idemp import App, Idempotent
from tests.world import Order

app = App("shop")
own = logging.getLogger(__name__)

@app.handler(Order, policy=Idempotent(key="order_id"))
def handle(message: Order) -> None:
    own.info("handled %s", message.order_id)
    if message.order_id == "bad":
        raise ValueError("no such order")
"""
BASIC = "import logging; logging.basicConfig(format='MINE %(levelname)s %(message)s', level={level!r})"
DICTIONARY = """
import logging.config
logging.config.dictConfig({"version": 1, "formatters": {"mine": {"format": "MINE %(levelname)s %(message)s"}},
    "handlers": {"it": {"class": "logging.StreamHandler", "formatter": "mine"}}, "root": {"level": "INFO", "handlers": ["it"]}})
"""


@pytest.fixture
def worker(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., list[str]]]:
    """Return a function that runs a worker for one message and its copy; it returns the lines that were logged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    root, own = logging.getLogger(), logging.getLogger("idemp")
    before = [(each, list(each.handlers), each.level) for each in (root, own)]
    world = World(url)

    def start(configured: str, *options: str, ids: tuple[str, ...] = ("1", "1")) -> list[str]:
        name = f"logged_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(APP.replace("{configured}", configured))
        sys.modules.pop(name, None)
        root.handlers, own.handlers = [], []  # pytest's own
        own.setLevel(logging.NOTSET)
        root.setLevel(logging.WARNING)
        world.send(*ids, message_id="m7")
        with monkeypatch.context() as patched:
            stopping(patched, lambda: not any(each.messages for each in read_waiting(world.database).queues))
            capsys.readouterr()
            assert run("worker", name, *options) == Exit.OK
        return capsys.readouterr().err.splitlines()

    yield start
    world.close()
    for each, handlers, level in before:
        each.handlers = handlers
        each.setLevel(level)
    for logger in logging.Logger.manager.loggerDict.values():  # which `logging.config` has disabled
        if isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.mark.parametrize("configured", [BASIC.format(level="INFO"), DICTIONARY], ids=["basicConfig", "dictConfig"])
def test_the_logging_of_the_app_is_kept(worker: Callable[..., list[str]], configured: str) -> None:
    options = [] if configured is DICTIONARY else ["--json"]
    lines = worker(configured, *options)
    if options:
        assert lines.pop(0).startswith("MINE WARNING worker.logging: --json changes nothing, because the app configures logging")
    assert lines == ["MINE INFO worker.started: consuming shop", "MINE INFO handled 1", "MINE INFO worker.stopped: stopped"]


def test_an_app_without_logging_of_its_own(worker: Callable[..., list[str]]) -> None:
    assert [line.split(maxsplit=5)[5] for line in worker("")] == ["worker.started: consuming shop", "worker.stopped: stopped"]
    lines = worker("", "--log-level", "INFO", ids=("2",))
    assert any(" INFO    logged_" in line and line.endswith("handled 2") for line in lines)


def test_verbose_logs_each_delivery(worker: Callable[..., list[str]]) -> None:
    records = [json.loads(line) for line in worker("", "-v", "--json")]
    first, second = (record for record in records if record["event"] == "delivery.settled")
    assert first["text"] == "delivery.settled: 'shop.Order' (id 'm7', claim 's:1'): claimed, done, 0 outputs"
    assert (first["level"], second["verdict"], second["outcome"]) == ("DEBUG", "duplicate", "done")
    kept = worker(BASIC.format(level="WARNING"), "-v", ids=("bad",))
    assert "MINE DEBUG delivery.settled: 'shop.Order' (id 'm7', claim 's:bad'): claimed, retry, 0 outputs" in kept
    assert not any("handled" in line for line in kept)


def test_verbose_shows_the_traceback_of_an_app_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "shop_fails.py").write_text("1 / 0\n")
    assert run("worker", "shop_fails") == Exit.REFUSED
    assert len(capsys.readouterr().err.splitlines()) == 1
    for command in ("worker", "relay"):
        assert run(command, "shop_fails", "-v") == Exit.REFUSED
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1].startswith("idemp: shop_fails cannot be imported: ZeroDivisionError: division by zero (")
