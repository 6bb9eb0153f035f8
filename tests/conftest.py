"""Fixtures: a database of one's own for each test."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from idemp import Settings
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests import world
from tests.servers import FOLDER, ask, keeping, server
from tests.servers.databases import create_database, drop_database
from tests.world import let_pass

if Path("/dev/shm").is_dir() and not os.environ.get("TMPDIR"):
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"  # the tests wait for disks otherwise

for name in [name for name in os.environ if name.startswith("IDEMP_") and not name.startswith("IDEMP_TEST_")]:
    del os.environ[name]  # the user's own settings

KEEPER = ExitStack()

LONGEST = ("test_the_promises_hold", "test_the_page_of_the_pipeline", "test_the_oldest_sqlalchemy")
DATABASES = ("sqlite", "postgresql", "mariadb")
every_database = pytest.mark.parametrize("kind", DATABASES, indirect=True)
every_path = pytest.mark.parametrize(
    "kind", [*DATABASES, "postgresql-core", pytest.param("mysql", marks=pytest.mark.slow)], indirect=True
)
"""With the statements that only some servers have, and without."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and FOLDER not in os.environ:  # a run inside of a test shares its servers
        KEEPER.enter_context(keeping())


def pytest_unconfigure() -> None:
    KEEPER.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those of Spark, so that one process has them all, and one JVM; then the longest, for which others would wait."""
    items.sort(key=lambda item: ("spark" not in getattr(item, "fixturenames", ()), not item.name.startswith(LONGEST)))


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """A test that changed what is logged would fail the later ones in its process that look for a line."""
    loggers = (logging.root, logging.getLogger("idemp"))
    before = [each.level for each in loggers]
    yield
    assert [each.level for each in loggers] == before


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of database: SQLite, unless a test is marked with `every_database` or `every_path`."""
    name = str(getattr(request, "param", "sqlite"))
    database, _, way = name.partition("-")
    if database == "mysql" and "IDEMP_TEST_MYSQL_URL" not in os.environ:
        database, way = "mariadb", "core"
    if way == "core":
        monkeypatch.setenv("IDEMP_FAST_PATH", "false")
    elif way:
        monkeypatch.setattr(world, "asynchronous", way)
        monkeypatch.setenv("IDEMP_CONCURRENCY", "1")  # so that crash points come in one order
    return database


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the URL of an upgraded database of a kind, which tests copy."""
    found: dict[str, str] = {}

    def pristine(kind: str) -> str:
        if kind not in found:
            sqlite = f"sqlite:///{tmp_path_factory.mktemp('pristine')}/test.db"
            found[kind] = sqlite if kind == "sqlite" else create_database(server(kind))
            database = Database(found[kind])
            upgrade(database)
            database.close()
        return found[kind]

    return pristine


@pytest.fixture
def new_url(kind: str, pristine: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Return the URL of an upgraded database; another one with each call."""
    made: list[str] = []

    def new_url() -> str:
        if kind == "sqlite":
            folder = tmp_path / f"database{len(made)}"
            shutil.copytree(Path(pristine(kind).removeprefix("sqlite:///")).parent, folder)
            made.append(f"sqlite:///{folder}/test.db")
        else:
            made.append(create_database(server(kind), pristine(kind)))
        return made[-1]

    yield new_url
    while world.still_open:  # also those of a test that failed: their connections would fail a later one
        world.still_open[0].close()
    for url in made if kind != "sqlite" else ():
        drop_database(url)


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    """The URL of an upgraded database."""
    return new_url()


@pytest.fixture
def vhost() -> Iterator[str]:
    """The URL of a virtual host of RabbitMQ."""
    url = ask("rabbitmq", "create_vhost")
    yield url
    ask("rabbitmq", "delete_vhost", url)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url, fast=Settings().fast_path)
    yield database
    database.close()


@pytest.fixture
def age(database: Database) -> Callable[[float], None]:
    return lambda seconds: let_pass(database, seconds)
