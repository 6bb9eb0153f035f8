"""Fixtures: a database of one's own for each test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests.world import let_pass

if Path("/dev/shm").is_dir() and not os.environ.get("TMPDIR"):
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"  # the tests wait for disks otherwise

for name in [name for name in os.environ if name.startswith("IDEMP_") and not name.startswith("IDEMP_TEST_")]:
    del os.environ[name]  # the user's own settings


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an upgraded database; tests copy it."""
    folder = tmp_path_factory.mktemp("pristine")
    database = Database(f"sqlite:///{folder}/test.db")
    upgrade(database)
    database.close()
    return folder


@pytest.fixture
def url(pristine: Path, tmp_path: Path) -> str:
    """The URL of an upgraded database."""
    for file in pristine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return f"sqlite:///{tmp_path}/test.db"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    yield database
    database.close()


@pytest.fixture
def age(database: Database) -> Callable[[float], None]:
    return lambda seconds: let_pass(database, seconds)
