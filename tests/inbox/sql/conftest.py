"""Each kind of database in turn, with a clock that tests move."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import delete

from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.tables import Tables, shared_tables
from tests.inbox.sql.kept import make_tables
from tests.inbox.sql.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

DATABASES = ("sqlite", "postgresql", "mariadb")


class MovedClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self._now = datetime(2026, 3, 1, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._now.timestamp()

    def move(self, **by: float) -> datetime:
        self._now += timedelta(**by)
        return self._now


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """SQLAlchemy URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/inbox.db"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def empty_engine(database_url: str) -> Iterator[Engine]:
    """An engine on an empty database."""
    made = create_engine_safely(database_url)
    yield made
    made.dispose()


@pytest.fixture
def tables() -> Tables:
    return shared_tables()


@pytest.fixture(scope="module", params=DATABASES)
def shared_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine on a database with idemp's tables, one for all tests of a module: making them takes its time."""
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    server = None
    url = f"sqlite:///{tmp_path_factory.mktemp('inbox')}/inbox.db"
    if request.param != "sqlite":
        server = request.getfixturevalue(request.param)
        url = server.create_database(name)
    made = create_engine_safely(url)
    make_tables(made)
    yield made
    made.dispose()
    if server is not None:
        server.drop_database(name)


@pytest.fixture
def engine(shared_engine: Engine, tables: Tables) -> Engine:
    """An engine on a database with idemp's tables, all of them empty."""
    with shared_engine.begin() as connection:
        for table in tables.metadata.tables.values():
            connection.execute(delete(table))
    return shared_engine


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def rows(engine: Engine, tables: Tables, clock: MovedClock) -> Rows:
    return Rows(engine, tables, clock)
