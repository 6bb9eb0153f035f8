"""Where Spark can't run, its tests are left out, and the run says so in one loud line. In CI they fail instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from idemp.errors import ConfigurationError
from idemp.spark import require
from tests.servers.install import in_ci

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "tests" / "spark", ROOT / "idemp" / "spark")


def missing() -> str | None:
    """What Spark lacks on this machine."""
    try:
        require()
    except ConfigurationError as error:
        return str(error)
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules of the pipeline may not even be importable. A folder that was asked for by name is asked file by file."""
    ours = any(collection_path.is_relative_to(folder) for folder in FOLDERS)
    return True if ours and missing() and not in_ci() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line, where this run would have had them."""
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    if any(meets(path, folder) for path in asked for folder in FOLDERS) and (lacks := missing()) and not in_ci():
        terminalreporter.line(f"!!! SPARK'S TESTS WERE LEFT OUT: {lacks}", red=True, bold=True)


def meets(one: Path, other: Path) -> bool:
    """Whether one of two paths lies in the other."""
    return one.is_relative_to(other) or other.is_relative_to(one)
