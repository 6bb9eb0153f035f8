"""Commands and exit codes."""

from __future__ import annotations

import calendar
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from idemp import Context, Idempotent, Retry
from idemp.cli.main import Exit, main
from idemp.cli.pipeline import _described, _moment
from idemp.sql.records.failures import DeadLetters
from tests.worker.test_loop import wait_for
from tests.world import SINK, Order, World, effect, insert_and_send


def run(*arguments: str) -> int:
    sys.argv = ["idemp", *arguments]
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])


def test_tables_are_made_checked_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("db", "check") == Exit.FAILED
    assert capsys.readouterr().out == "red: the file idemp.db does not exist: idemp db upgrade\n"
    assert run("db", "check", "--json") == Exit.FAILED
    assert json.loads(capsys.readouterr().out)[0]["fix"] == "idemp db upgrade"
    assert run("db", "upgrade") == Exit.OK
    assert capsys.readouterr().out == "sqlite:///idemp.db has the tables of revision 2.0001\n"
    assert run("db", "check") == Exit.OK
    assert capsys.readouterr().out == "ok\n"
    assert run("db", "sql") == Exit.OK
    assert "CREATE TABLE IF NOT EXISTS idemp_message" in capsys.readouterr().out


def test_usage_and_settings_have_exit_codes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("nothing") == Exit.USAGE
    monkeypatch.setenv("IDEMP_DATABASE_URL", "sqlite:///nowhere/x.db")
    assert run("db", "upgrade") == Exit.UNREACHABLE
    assert "unable to open database file" in capsys.readouterr().err
    monkeypatch.setenv("IDEMP_DATABASE", "x")
    assert run("db", "upgrade") == Exit.REFUSED
    assert capsys.readouterr().err == "idemp: IDEMP_DATABASE is not a setting: did you mean IDEMP_DATABASE_URL?\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("2026-11-24", 1_795_478_400.0),
        ("2026-11-24T10:00", 1_795_514_400.0),
        ("2026-11-24T10:00:00+01:00", 1_795_510_800.0),
        ("nan", None),
        ("yesterday", None),
    ],
)
def test_a_window_is_given_in_utc(text: str, seconds: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    if seconds is not None:
        assert _moment(text, "--since") == seconds
        return
    assert run("pipeline", "reconcile", "shop", "log", "--since", text) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"idemp: --since '{text}': write 2026-11-24")


def test_gaps_that_are_not_shown_are_counted() -> None:
    gap = {"gap": "lost", "type": "shop.Pay", "id": "7", "error": None}
    counts = {"handled": 2, "lost": 3}
    assert _described({"counts": counts, "gap_count": 3, "gaps": []}).endswith("lost     3\n\n3 gaps not shown")
    assert _described({"counts": counts, "gap_count": 3, "gaps": [gap]}).endswith("7\n\n2 gaps not shown")
    assert _described({"counts": counts, "gap_count": 1, "gaps": [gap]}).endswith("7")
    assert _described({"counts": {"handled": 2}, "gap_count": 0, "gaps": []}).endswith("2\n\nno gaps")
    assert run("pipeline", "reconcile", "shop", "log", "--produces", "shop.Pay=x") == Exit.USAGE


def test_a_small_demo_keeps_the_promises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("demo", "--messages", "60", "--kills", "2", "--json", "--folder", str(tmp_path / "demo")) == Exit.OK
    report = json.loads(capsys.readouterr().out)
    assert {name: report[name] for name in ("messages", "copies", "kills", "lost", "doubled", "two_ids", "left", "kept")} == {
        "messages": 60,
        "copies": 12,
        "kills": 2,
        "lost": 0,
        "doubled": 0,
        "two_ids": 0,
        "left": 0,
        "kept": True,
    }
    assert (tmp_path / "demo" / "demo.db").exists()
    assert run("demo", "--folder", str(tmp_path / "demo")) == Exit.FAILED


@pytest.mark.slow
def test_the_demo_keeps_the_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--json", "--seed", "1") == Exit.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["messages"], report["copies"], report["kills"], report["kept"]) == (2000, 400, 20, True)


def test_importing_idemp_loads_no_database_and_no_broker() -> None:
    code = "import idemp, sys; print([name for name in ('sqlalchemy', 'alembic', 'kombu', 'typer', 'rich', 'greenlet', 'psycopg', 'asyncpg', 'http.server') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout == "[]\n"


def test_dead_letters_are_shown_replayed_and_discarded(
    capsys: pytest.CaptureFixture[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id == "commits":
            ctx.connection.connection.driver_connection.commit()  # type: ignore[union-attr]
        elif world.runs[message.order_id] == 1:
            raise RuntimeError("boom\x1b[2J")

    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=1)))
    assert run("dead", "list") == Exit.OK
    assert capsys.readouterr().out == "no dead letters\n"
    world.send("fails", "discarded", message_id="7")
    world.send("commits")
    worker = world.worker()
    world.work(worker)
    capsys.readouterr()

    def output(*arguments: str, code: int = Exit.OK) -> str:
        assert run("dead", *arguments) == code
        captured = capsys.readouterr()
        return captured.out if code == Exit.OK else captured.err

    first, second, third = [letter["id"] for letter in json.loads(output("list", "--json"))["dead"]]
    monkeypatch.setenv("COLUMNS", "200")
    fields = output("list").splitlines()[1].split()
    assert [fields[0], *fields[3:]] == [str(first), "shop", "shop.Order", "handler:", "RuntimeError:", "boom\\x1b[2J"]
    assert abs(time.time() - calendar.timegm(time.strptime(" ".join(fields[1:3]), "%Y-%m-%d %H:%M"))) < 120
    monkeypatch.setenv("COLUMNS", "20")
    lines = output("list", "--limit", "1").splitlines()
    assert (lines[0], lines[2]) == (f"id      {first}", "queue   shop")
    shown = output("show", str(first))
    assert "RuntimeError: boom\\x1b[2J" in shown
    assert "test_commands.py" in shown
    assert shown.endswith(f"idemp dead replay {first}\n")
    assert output("show", "99", code=Exit.FAILED) == "idemp: there is no dead letter 99: idemp dead list\n"
    assert "use --force" in output("replay", "--all", code=Exit.FAILED)
    assert "use --all" in output("replay", code=Exit.USAGE)
    assert output("discard", str(second)) == "1 deleted\n"
    assert output("replay", str(first)) == "1 made due\n"
    world.work(worker)
    assert world.effects() == {"fails": 1, "commits": 1}
    world.handle = insert_and_send
    assert output("show", str(third)).endswith(f"idemp dead replay {third} --force\n")
    assert output("replay", str(third), "--force") == "1 made due\n"
    world.work(worker)
    assert (world.effects(), world.rows()) == ({"fails": 1, "commits": 2}, [])
    assert set(world.sent()) == {("commits", 0), ("commits", 1)}


def test_numbers_and_limits_have_bounds() -> None:
    assert run("db", "upgrade", "--json") == Exit.OK
    for arguments in (["list", "--limit", str(10**20)], ["show", str(10**20)], ["replay", "0"], ["discard", "-1"]):
        assert run("dead", *arguments) == Exit.USAGE


def test_a_relay_sends_what_waits(url: str) -> None:
    world = World(url)
    app = world.app()
    with app.initiate() as unit:
        unit.send(Order(order_id="1"), to=SINK, delay=0.5)
    environment = {**os.environ, "IDEMP_DATABASE_URL": url}
    relay = subprocess.Popen([sys.executable, "-m", "idemp", "relay"], env=environment, cwd=Path(__file__).parents[2])
    try:
        wait_for(lambda: world.rows(SINK))
        wait_for(lambda: not world.pending())
        assert app.adapters().scheduler.relay_alive()
    finally:
        relay.terminate()
    assert relay.wait(60) == 0
    assert not app.adapters().scheduler.relay_alive()


def test_a_second_replay_of_an_old_list_withdraws_no_claim(url: str) -> None:
    def commit(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if world.runs["1"] == 1:
            ctx.connection.connection.driver_connection.commit()  # type: ignore[union-attr]

    world = World(url, commit)
    world.send("1")
    worker = world.worker()
    world.work(worker)
    letters = DeadLetters(world.database)
    listed = letters.find()
    assert letters.replay(listed) == 1
    world.work(worker)
    assert (letters.replay(listed), world.claims(), world.effects()) == (0, 1, {"1": 2})


@pytest.mark.parametrize(
    "arguments",
    [["dead", "list", "--queue", "\udcff"], ["dead", "replay", "--all", "--queue", "\udcff"], ["inbox", "show", "\udcff"]],
)
def test_arguments_that_are_no_text_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("db", "upgrade") == Exit.OK
    assert run(*arguments) in (Exit.USAGE, Exit.FAILED)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_output_to_a_terminal_that_knows_ascii_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    for arguments in (["db", "upgrade"], ["inbox", "show", "\u00e9"]):
        done = subprocess.run(
            [sys.executable, "-m", "idemp", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "\\xe9" in done.stderr


def test_the_version_and_the_commands_in_order(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("COLUMNS", "80")
    assert run("--version") == Exit.OK
    assert capsys.readouterr().out == f"idemp {version('idemp')}\n"
    run("--help")
    commands = capsys.readouterr().out.partition("Commands:\n")[2]
    names = re.findall(r"^  (\w+)  ", commands, re.MULTILINE)
    assert names == sorted(names)
    assert {"db", "dead", "worker"} <= set(names)
