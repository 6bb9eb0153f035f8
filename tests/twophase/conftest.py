"""A world whose other database is of each kind, for all tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.servers import given
from tests.servers.fixtures import private
from tests.servers.mariadb import MariaDB
from tests.servers.postgresql import PostgreSQL
from tests.twophase.world import Consumer, World, world

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def postgresql() -> Iterator[PostgreSQL | given.GivenPostgreSQL]:
    """Not the run's: some of these tests leave no room for what others prepare."""
    if url := given.url_of("POSTGRESQL"):
        yield given.GivenPostgreSQL(url)
        return
    with private(PostgreSQL) as server:
        yield server


@pytest.fixture(scope="package")
def mariadb() -> Iterator[MariaDB | given.GivenMariaDB]:
    """Not the run's: some of these tests change its settings."""
    if url := given.url_of("MARIADB"):
        yield given.GivenMariaDB(url)
        return
    with private(MariaDB) as server:
        yield server


@pytest.fixture(scope="package", params=("postgresql", "mariadb"))
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(request, tmp_path_factory.mktemp("twophase"), "postgresql", ledger=request.param) as made:
        yield made


@pytest.fixture
def other(shop: World) -> Iterator[Consumer]:
    """Another process."""
    made = Consumer(shop.place)
    yield made
    made.close()
