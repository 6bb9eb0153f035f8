"""`idemp demo`: the promises, kept and broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, inspect, text

from idemp.demo import Plan
from idemp.demo.place import Place
from idemp.demo.proof import prove
from idemp.demo.storm import Storm

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

CHECKOUT = Path(__file__).parents[3]


def demo(*arguments: str) -> tuple[int, str]:
    """Run it as people do."""
    command = [sys.executable, "-m", "idemp.cli", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd="/", check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, (done.returncode, done.stderr)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_demo_keeps_its_promises() -> None:
    code, out = demo("--messages", "200", "--kills", "4", "--seed", "7", "--json")
    result: dict[str, Any] = json.loads(out)
    assert (code, result["broken"], result["kept"]) == (0, {}, True)
    assert (result["fed"], result["duplicates"], result["executions"]) == (200, 40, 480)
    assert result["effects"] == {"orders": 160, "reservations": 160, "confirmations": 160, "pieces": 480}
    assert (result["kills"], result["kills_unsettled"] >= 1) == (4, True)  # how many is chance: workers are quick
    assert result["outputs_stored"] == 640
    assert result["skipped"] + result["rolled_back"] > 0
    assert result["seed"] == 7


@pytest.mark.slow
def test_table_for_people_ends_with_one_sentence() -> None:
    before = set(Path(gettempdir()).glob("idemp-demo-*"))
    code, out = demo("--messages", "20", "--kills", "1", "--workers", "1")
    *_, last = out.strip().splitlines()
    assert code == 0
    for words in ("deliveries", "redeliveries", "executions", "kills while unsettled", "lost", "doubled"):
        assert words in out
    assert last.startswith("In ")
    assert "examples/orders" in last
    assert set(Path(gettempdir()).glob("idemp-demo-*")) <= before


@pytest.mark.slow
def test_what_broke_is_seen() -> None:
    """The proof looks at tables and queues: so what is changed there by hand must show."""
    plan = Plan(messages=20, kills=0, seed=3, workers=1)
    with Place() as place:
        proof = Storm(plan, place, lambda *_: None).run()
        assert proof.broken == {}
        assert proof.effects["pieces"] == plan.pieces

        def broken_after(*statements: str) -> dict[str, int]:
            with place.engine.begin() as connection:
                for statement in statements:
                    connection.execute(text(statement))
            return prove(plan, place, kills=0, kills_unsettled=0, seconds=0, at_rest=True).broken

        row = "(order_id, sku, quantity, confirmations)"
        doubled = broken_after(f"INSERT INTO orders {row} SELECT order_id, sku, quantity, 0 FROM orders WHERE id = 1")
        assert doubled == {"doubled": 1}
        assert broken_after("DELETE FROM orders WHERE id IN (1, 2)", "DELETE FROM orders WHERE confirmations = 0")[
            "lost"
        ]
        assert broken_after("UPDATE stock SET quantity = quantity - 1 WHERE sku = 'sku-0'")["doubled"] == 1
        with place.broker.take(place.audit, None, 1) as taken:
            taken.accept(0)
        assert broken_after()["never_seen"] == 1


HOLDS_THE_FILE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode = EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


def test_worker_that_stands_within_a_lock_is_not_killed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it holds something unsettled can't be read while it stands there."""
    monkeypatch.setattr("idemp.demo.place._WITNESS_SECONDS", 0.1)
    with Place() as place:
        command = [sys.executable, "-c", HOLDS_THE_FILE, place.broker_url.removeprefix("local://")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"held\n"
            storm = Storm(Plan(messages=20, kills=1, seed=3, workers=1), place, lambda *_: None)
            storm._workers = [worker]
            assert not storm._kill_one(effects=0)
            worker.communicate(timeout=30)  # it goes on
            assert worker.returncode == 0


@pytest.mark.slow
def test_demo_on_servers_leaves_nothing_behind(postgresql_url: str, rabbitmq_url: str) -> None:
    servers = ["--database", postgresql_url, "--broker", rabbitmq_url]
    code, out = demo("--messages", "50", "--kills", "2", "--workers", "2", "--json", *servers)
    assert (code, json.loads(out)["broken"]) == (0, {})
    engine = create_engine(postgresql_url.replace("postgresql://", "postgresql+psycopg://"))
    assert inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.slow
def test_unreachable_servers(cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli("demo", "--database", "postgresql://me:secret@127.0.0.1:1/x").code == 4
    assert cli("demo", "--broker", "pyamqp://me:secret@127.0.0.1:1//").code == 4
    assert cli("demo", "--broker", "redis://127.0.0.1:1/").code == 3
    assert os.listdir(tmp_path) == []  # noqa: PTH208
