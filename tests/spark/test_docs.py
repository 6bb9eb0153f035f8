"""The pages of the pipeline, run as they stand there: one process, one session."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.docs.pages import blocks, page, query, work_until, write_files

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

BACKFILL, STREAMING, TUTORIAL = map(page, ("how-to/backfill.md", "how-to/streaming.md", "tutorial/pipeline.md"))
RUNNER = """
import contextlib, glob, io, json, pathlib, sys
from typer.testing import CliRunner
from idemp.cli import root
from idemp.spark.testing import local_session
with local_session(pathlib.Path("spark").absolute()):
    for line in sys.stdin:
        program, *words = json.loads(line)
        if program == "python":
            code = words[1] if words[0] == "-c" else pathlib.Path(words[0]).read_text()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, {"__name__": "__main__"})
            answer = 0, printed.getvalue()
        else:
            named = [glob.glob(word.replace("…", "*"))[0] if "…" in word else word for word in words]
            done = CliRunner().invoke(root, named)
            answer = done.exit_code, done.output
        print(json.dumps(answer), flush=True)
"""


@dataclass
class Terminal:
    """A folder, and a process with a session that runs commands there, as fast as if each had its own."""

    folder: Path
    process: subprocess.Popen[str]

    def __call__(self, command: str) -> tuple[int, str]:
        """Exit code, and what was printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(shlex.split(command)), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "errors").read_text()
        code, printed = json.loads(answer)
        return code, printed


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("docs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=environment,
            text=True,
        ) as process,
    ):
        yield Terminal(folder, process)


@pytest.fixture
def terminal(process: Terminal) -> Iterator[Terminal]:
    yield process
    shutil.rmtree(process.folder / "idemp-parked")  # each page has its own


def commands(text: str) -> Iterator[tuple[str, str]]:
    """What a page runs, and what it prints where it says so."""
    for kind, block in re.findall(r"```(sh|console)\n(.*?)```", text, re.DOTALL):
        if kind == "sh":
            yield from ((command, "") for command in block.splitlines())
        else:
            command, _, printed = block.removeprefix("$ ").partition("\n")
            yield command, printed


def assert_printed(told: str, printed: str) -> None:
    for line in told.splitlines():
        assert re.search(re.escape(line).replace("…", ".*"), printed), printed


@pytest.mark.timeout(540)  # a bound for crowded machines; it takes half a minute
def test_pages_do_what_they_say(terminal: Terminal) -> None:
    folder = terminal.folder
    (folder / "shop.py").write_text(blocks(BACKFILL, "python")[0])
    (folder / "orders.json").write_text(blocks(BACKFILL, "json")[0])
    (folder / "stream.py").write_text(blocks(STREAMING, "python")[0])
    (folder / "landing").mkdir()
    (folder / "landing/more.json").write_text('{"order": "o-3", "sku": "C-3"}\n{"order": "o-2", "sku": "B-2"}\n')
    engine = create_engine_safely(f"sqlite:///{folder}/shop.db")
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sale (sku TEXT)"))
    asked = list(commands(BACKFILL))
    assert [command.split()[:4] for command, _ in asked] == [["idemp", "pipeline", "backfill", "shop:app"]] * 4
    for place, (command, told) in enumerate(asked):
        code, printed = terminal(command)
        assert code == 1  # something is parked each time
        assert_printed(told, printed)
        if place == 3:
            assert "2 replay, 1 duplicate, 0 conflict, 1 parked" in printed
    assert "2 messages: 1 new, 0 replay, 1 duplicate" in terminal("python stream.py")[1]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT sku FROM sale ORDER BY sku")).scalars().all() == ["A-1", "B-2", "C-3"]
    engine.dispose()


@pytest.mark.timeout(540)
def test_tutorial(terminal: Terminal) -> None:
    folder = terminal.folder
    write_files(TUTORIAL, folder, "make_archive.py", "sales.py", "parked.py")

    def all_reserved() -> bool:
        return query(folder, "SELECT count(*) FROM reserved") == query(folder, "SELECT count(*) FROM sale")

    for command, told in commands(TUTORIAL):
        if command.startswith("idemp worker"):
            work_until(folder, command.split()[-1], all_reserved, "all to be reserved")
            continue
        code, printed = terminal(command)
        findings, parked = "pipeline reconcile" in command, "pipeline backfill" in command
        assert code == (6 if findings else 1 if parked else 0), printed
        assert_printed(told, printed)
    assert query(folder, "SELECT count(*), count(DISTINCT id) FROM sale") == [(102, 102)]
    findings = json.loads((folder / "report/summary.json").read_text())["findings"]
    assert {each["id"] for each in findings if each["kind"] == "lost"} == {"order-5"}
    report = (folder / "report/index.html").read_text()
    assert "Found in 104 messages: 1 lost, 1 conflicting, 1 unusable, 15 duplicated, " in report
    assert report.count("<svg ") == 2
