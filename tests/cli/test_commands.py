"""Commands and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from idemp.cli.main import Exit, main


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
    assert "CREATE TABLE idemp_message" in capsys.readouterr().out


def test_usage_and_settings_have_exit_codes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("nothing") == Exit.USAGE
    monkeypatch.setenv("IDEMP_DATABASE_URL", "sqlite:///nowhere/x.db")
    assert run("db", "upgrade") == Exit.UNREACHABLE
    assert "unable to open database file" in capsys.readouterr().err
    monkeypatch.setenv("IDEMP_DATABASE", "x")
    assert run("db", "upgrade") == Exit.REFUSED
    assert capsys.readouterr().err == "idemp: IDEMP_DATABASE is no setting: did you mean IDEMP_DATABASE_URL?\n"


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
@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_demo_keeps_the_promises(capsys: pytest.CaptureFixture[str], seed: str) -> None:
    assert run("demo", "--json", "--seed", seed) == Exit.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["messages"], report["copies"], report["kills"], report["kept"]) == (2000, 400, 20, True)


def test_importing_idemp_loads_no_database_and_no_broker() -> None:
    code = (
        "import idemp, sys; print([name for name in ('sqlalchemy', 'alembic', 'kombu', 'typer', 'rich') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout == "[]\n"
