"""Each seeded fault is caught by its test; `IDEMP_TEST_EVERY=1` takes all of them, else there is one for each folder, and those of the promises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.seeded.faults import FAULTS, PROMISES, Fault

ROOT = Path(__file__).parents[2]
FAILED = "1\n"  # pytest's exit code: tests failed; others say that none ran
SOME = {(Path(each.path).parent, each.test if each.test.startswith(PROMISES) else ""): each for each in reversed(FAULTS)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Path, list[str]], str]]:
    """Runs pytest in a folder."""
    command, environment = (
        [sys.executable, "-m", "tests.seeded.parent"],
        {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "IDEMP_TEST_PATIENCE": "6"},
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None

        def run(folder: Path, options: list[str]) -> str:
            print(json.dumps([str(folder), options]), file=parent.stdin, flush=True)
            return parent.stdout.readline()

        yield run
        parent.stdin.close()


@pytest.mark.parametrize("fault", FAULTS if "IDEMP_TEST_EVERY" in os.environ else SOME.values(), ids=lambda fault: fault.path)
def test_a_fault_is_caught(fault: Fault, run: Callable[[Path, list[str]], str], tmp_path: Path) -> None:
    for name in ("idemp", "tests", "alembic"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "idemp" / fault.path
    text = source.read_text()
    assert text.count(fault.old) == 1
    source.write_text(text.replace(fault.old, fault.new))
    paths, *names = fault.test.split("::")
    kinds = ["not aiosqlite"]
    if fault.path != "bulk/sets.py" and not {"mariadb", "postgresql"}.intersection(names):
        kinds.append("not postgresql")  # SQLite shows it sooner
    options = ["-n0", "-x", "-q", "-p", "no:cacheprovider", "-k", " and ".join([*names, *kinds])]
    if fault.path not in ("integrations/celery.py", "integrations/faststream.py"):  # whose tests need servers
        options += ["-m", "not slow"]
    options += ["--timeout=120", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that the parent has imported
    assert run(tmp_path, [*options, *paths.split()]) == FAILED, (tmp_path / "out").read_text()
