"""What every test may use: real servers (`tests/servers/fixtures.py`), and a time budget for every folder."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from tests.servers import keeper

pytest_plugins = ("tests.servers.fixtures", "tests.budgets", "tests.lanes", "tests.without_spark")

IN_MEMORY = Path("/dev/shm")
ROOM_GIB = 4


def pytest_configure(config: pytest.Config) -> None:
    """One process keeps the servers of the run; see `_in_memory` for where their data is."""
    _in_memory()
    _patient()
    if not hasattr(config, "workerinput"):
        stack = ExitStack()
        stack.enter_context(keeper.keeping())
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What each process collects stays to the end: nobody shall look for garbage among it, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Examples in docstrings are the product's: looking for some in the tests themselves takes seconds in each process."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def _patient() -> None:
    """How fast an example is says how busy the machine is, and nothing about the code."""
    settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def _in_memory() -> None:
    """Servers and SQLite sync to a file system in memory where there is room: a killed process loses nothing there either.

    The suite waits for disks a third of its time otherwise. TMPDIR names another place.
    """
    # PyMySQL reads all of the system's certificates for each connection, which takes it 20 ms. No test server has one, so
    # one certificate will do, whose key nobody has; with none at all, httpx would not start.
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "servers" / "nobody.pem")
    if "TMPDIR" in os.environ or not IN_MEMORY.is_dir() or shutil.disk_usage(IN_MEMORY).free < ROOM_GIB * 2**30:
        return
    os.environ["TMPDIR"] = str(IN_MEMORY)  # of all processes that tests start, too
    tempfile.tempdir = None


@pytest.fixture(autouse=True)
def log_levels_as_they_were() -> Iterator[None]:
    """The command line sets the level of idemp's log for its process, which here is that of all tests."""
    log = logging.getLogger("idemp")
    level, disabled = log.level, logging.root.manager.disable
    yield
    log.setLevel(level)
    logging.disable(disabled)
