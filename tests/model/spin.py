"""Runs spin on the model in docs/explanation/model."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import programs

MODEL = Path(__file__).parents[2] / "docs/explanation/model/protocol.pml"
IN_THE_END = "everything_ends"
_SECONDS = 110
_DEEPEST = "1000000"

needs_spin = pytest.mark.skipif(
    bool(programs.SPIN.missing()),
    reason="!!! spin is MISSING: `python -m tests.servers.install` says what can be done; the model is NOT CHECKED",
)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        broken: the promise that does not hold, `None` if all of them do.
        states: how many different states were looked at.
        complete: whether those are all that there are.
        unreached: statements of the model that were never executed.
    """

    broken: str | None
    states: int
    complete: bool
    unreached: tuple[str, ...]


def search(folder: Path, flags: str, *, end: bool = False, shortest: bool = False) -> Found:
    """Search the model's states for a broken promise.

    `end` asks for the promise about the end, else for those that hold in every state. The `shortest` way to a broken one
    takes more states and memory, so that it suits those searches that soon find one.
    """
    _run(folder, programs.path("spin"), "-a", *_given(flags, end), str(MODEL))
    how = ["-DNFAIR=3"] if end else ["-DSAFETY", "-DNOCLAIM", *(["-DBFS"] if shortest else [])]
    # Optimised code is quicker, but takes longer to compile than most searches last.
    effort = "-O1" if "OUTPUTS" in flags else "-O0"
    _run(folder, programs.path("cc"), "-w", effort, *how, "-o", "pan", "pan.c")
    said = _run(folder, "./pan", f"-m{_DEEPEST}", "-w20", *(["-a", "-f"] if end else []))
    return _found(said)


def story(folder: Path, flags: str) -> str:
    """What happened on the way to the promise that `search` has just found broken in this folder."""
    trail = f"{MODEL.name}.trail"
    said = _run(folder, programs.path("spin"), "-t", "-T", "-k", trail, *_given(flags, end=False), str(MODEL))
    return "\n".join(re.findall(r"^(?:consumer \d|relay|cleaner|database|world): .*$", said, re.MULTILINE))


def version() -> str:
    """The version of spin that is installed."""
    return subprocess.run([programs.path("spin"), "-V"], capture_output=True, text=True, check=True).stdout.split()[2]


def _given(flags: str, end: bool) -> list[str]:
    return [f"-D{name}" for name in [*flags.split(), *(["CALM"] if end else [])]]


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _found(said: str) -> Found:
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"^\s*(\d+) states, stored", said, re.MULTILINE)
    assert errors is not None, said
    assert states is not None, said
    broken = None
    if int(errors[1]):
        assertion = re.search(r"assertion violated (\w+)", said)
        cycle = "acceptance cycle" in said
        broken = assertion[1] if assertion is not None else IN_THE_END if cycle else said
    complete = "Search not completed" not in said and "too small" not in said
    statements = [
        line for part in re.findall(r"unreached in proctype \w+\n((?:\t.*\n)*)", said) for line in part.splitlines()
    ]
    unreached = tuple(line.strip() for line in statements if ", state " in line and not line.endswith('"-end-"'))
    return Found(broken, int(states[1]), complete, unreached)
