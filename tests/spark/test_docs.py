"""The how-tos of the pipeline, run as they stand there: one process, one session."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs/how-to"
RUNNER = """
import glob, json, pathlib, sys
from typer.testing import CliRunner
from idemp.cli import root
from idemp.spark.testing import local_session
with local_session(pathlib.Path("spark").absolute()):
    for command in json.load(sys.stdin):
        if command[0] == "python":
            exec(open(command[1]).read(), {"__name__": "__main__"})
            continue
        found = [(glob.glob(word.replace("…", "*")) or [word])[0] for word in command[1:]]
        answer = CliRunner().invoke(root, found)
        print(f"exit {answer.exit_code}\\n{answer.output}", end="")
"""


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the pages, and the tables."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "shop.py").write_text(blocks("backfill.md", "python")[0])
    (folder / "orders.json").write_text(blocks("backfill.md", "json")[0])
    (folder / "stream.py").write_text(blocks("streaming.md", "python")[0])
    (folder / "landing").mkdir()
    (folder / "landing/more.json").write_text('{"order": "o-3", "sku": "C-3"}\n{"order": "o-2", "sku": "B-2"}\n')
    engine = create_engine_safely(f"sqlite:///{folder}/shop.db")
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sale (sku TEXT)"))
    engine.dispose()
    return folder


def commands() -> Iterator[tuple[list[str], str]]:
    """What the page on backfills runs, and what it prints."""
    for block in blocks("backfill.md", "console"):
        command, _, printed = block.removeprefix("$ ").partition("\n")
        yield shlex.split(command), printed


@pytest.mark.timeout(540)  # a bound for crowded machines; it takes half a minute
def test_pages_do_what_they_say(folder: Path) -> None:
    asked = [command for command, _ in commands()]
    assert [command[:4] for command in asked] == [["idemp", "pipeline", "backfill", "shop:app"]] * 4
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([*asked, ["python", "stream.py"]]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("exit ")[1:]
    for (_, told), answer in zip(commands(), answers, strict=True):
        for line in told.splitlines():
            assert re.search(re.escape(line).replace("…", ".*"), answer), answer
    assert [answer[0] for answer in answers] == ["1", "1", "1", "1"]  # something is parked each time
    assert "3 replay" not in answers[3]
    assert "2 replay, 1 duplicate, 0 conflict, 1 parked" in answers[3]
    assert "2 messages: 1 new, 0 replay, 1 duplicate" in done.stdout
    engine = create_engine_safely(f"sqlite:///{folder}/shop.db")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT sku FROM sale ORDER BY sku")).scalars().all() == ["A-1", "B-2", "C-3"]
    engine.dispose()
