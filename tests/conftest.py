"""What every test may use: real servers (`tests/servers/fixtures.py`), and a time budget for every folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest_plugins = ("tests.servers.fixtures", "tests.budgets")


@pytest.fixture(autouse=True)
def log_levels_as_they_were() -> Iterator[None]:
    """The command line sets the level of idemp's log for its process, which here is that of all tests."""
    log = logging.getLogger("idemp")
    level, disabled = log.level, logging.root.manager.disable
    yield
    log.setLevel(level)
    logging.disable(disabled)
