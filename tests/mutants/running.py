"""Runs tests in copies of the tree, with and without a fault."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from tests.mutants.inside import IMPORTED_ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
EVERYTHING = ("tests", "idemp", "--ignore=tests/mutants")
"""The whole suite, but for the tests of the table: they would notice any change of the code."""

# `-n 0`: two processes would find other first failures. -rf: the summary that is read here.
_OPTIONS = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-rfE", "--no-header", "--tb=short")
_FAILED = re.compile(r"^FAILED (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
_GRACE = 30.0
_TAIL = 3000

Verdict = Literal["killed", "survived", "not run"]


@dataclass(frozen=True)
class Run:
    """What became of one run of tests.

    Attributes:
        verdict: "killed" if a test failed, "survived" if all passed; "not run" if that is not known: nothing was collected,
            a fixture broke, or the time was up.
        by: the first test that failed, or what went wrong.
        seconds: how long it took.
        output: the end of what pytest printed.
    """

    verdict: Verdict
    by: str
    seconds: float
    output: str


@contextmanager
def copied_tree(source: Path = ROOT) -> Iterator[Path]:
    """A copy of what git knows or could know: tracked files and new ones, but nothing that is ignored."""
    with TemporaryDirectory(prefix="idemp-mutant-") as folder:
        tree = Path(folder).resolve()
        for name in _names(source):
            if (source / name).is_file():  # a file may be deleted and not staged
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, tree / name)
        yield tree


def run(tree: Path, tests: Sequence[str], limit: float) -> Run:
    """Run tests on the code of a copy, up to the first that fails.

    Args:
        tree: the copy.
        tests: paths and node ids.
        limit: seconds after which they are given up.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.mutants.inside", str(tree), *_OPTIONS, *tests]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        verdict, by = judged(process.returncode, output)
    except subprocess.TimeoutExpired:
        output, verdict, by = _given_up(process), "not run", f"no end within {limit:.0f} seconds"
    except BaseException:
        _given_up(process)
        raise
    return Run(verdict, by, time.monotonic() - began, output[-_TAIL:])


def run_mutant(mutant: Mutant, source: Path, tests: Sequence[str], limit: float) -> Run:
    """Seed a fault in a copy of its own, and run tests there."""
    with TemporaryDirectory(prefix="idemp-mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(source, tree)
        mutant.seed(tree)
        return run(tree, tests, limit)


def judged(code: int, output: str) -> tuple[Verdict, str]:
    """What an exit code of pytest and its summary mean: only a test that failed has caught anything."""
    failed = _FAILED.search(output)
    if code == 0:
        return "survived", ""
    if code == 1 and failed is not None:
        return "killed", failed.group(1)
    if code == IMPORTED_ELSEWHERE:
        return "not run", "idemp was imported from elsewhere"
    return "not run", f"pytest ended with {code} without a failed test"


def _names(source: Path) -> list[str]:
    if (source / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
        return sorted({name for name in listed.split("\0") if name})
    # Unpacked from a source distribution.
    found = [file.relative_to(source) for file in source.rglob("*")]
    hidden = (".", "__pycache__")
    return sorted(str(file) for file in found if not any(part.startswith(hidden) for part in file.parts))


def _given_up(process: subprocess.Popen[str]) -> str:
    """End it as Ctrl-C would, so that it stops the servers that it started; then by force."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_GRACE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
