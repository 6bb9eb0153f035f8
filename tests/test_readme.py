"""The README's five minutes, as printed, in an empty folder."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.worker.test_loop import wait_for

ROOT = Path(__file__).parent.parent


def test_the_first_five_minutes(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    shop, send = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "send.py").write_text(send)
    (shell,) = [each for each in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if "send.py" in each]
    *lines, look = shell.splitlines()
    commands = [line.split("#")[0].split() for line in lines]
    assert commands == [["idemp", "db", "upgrade"], ["python", "send.py"], ["idemp", "worker", "shop"]]
    bin = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    for command in commands[:2]:
        subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    with (tmp_path / "out").open("w") as out:
        worker = subprocess.Popen(commands[2], cwd=tmp_path, stdout=out, env=environment)
    try:
        wait_for(lambda: "receipt" in (tmp_path / "out").read_text())
        wait_for(lambda: query(tmp_path / "idemp.broker.db", "SELECT count(*) FROM idemp_message") == 0)
    finally:
        worker.terminate()
    assert worker.wait(60) == 0
    assert (tmp_path / "out").read_text() == "receipt for 7\n"
    shown = subprocess.run(look, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout == look.split("# ")[1] + "\n"


def query(file: Path, statement: str) -> int:
    connection = sqlite3.connect(file)
    try:
        return int(connection.execute(statement).fetchone()[0])
    finally:
        connection.close()


def test_the_readme_states_every_promise() -> None:
    readme = (ROOT / "README.md").read_text()
    promises = (
        "effect once",
        "outputs at least once, same id",
        "nothing sent without commit",
        "nothing marked sent without the broker's word",
        "nothing lost",
        "settled once",
        "no false duplicates",
        "What is not promised",
    )
    assert all(promise in readme for promise in promises)
