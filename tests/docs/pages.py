"""What pages tell their readers to do, done: files written, commands run, a worker until something is so."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.servers.process import wait_until

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    """The text of a page, such as "how-to/guard.md"."""
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    """Its blocks in a language, without the indentation of a list that they stand in."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def write_files(page: str, folder: Path, *files: str) -> None:
    """The Python blocks that follow the first mention of each file."""
    for file in files:
        found = re.search(rf"`{re.escape(file)}`.*?```python\n(.*?)```", page, re.DOTALL)
        assert found is not None, f"there is no block for {file}"
        (folder / file).write_text(found[1], encoding="utf-8")


def run(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def work_until(folder: Path, app: str, done: Callable[[], bool], what: str, **environment: str) -> None:
    """Run a worker, interrupt it once something is so."""
    with (folder / "printed").open("w") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "idemp", "worker", app],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            wait_until(done, what)
        finally:
            worker.send_signal(signal.SIGINT)
            assert worker.wait(30) == 0


def query(folder: Path, statement: str) -> list[tuple[int, ...]]:
    with closing(sqlite3.connect(folder / "idemp.db")) as connection:
        return connection.execute(statement).fetchall()
