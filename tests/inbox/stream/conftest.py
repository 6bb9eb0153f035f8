"""Each kind of database, one for all tests of a class or module: they use streams and consumers of their own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import create_engine_safely
from tests.inbox.sql import kept
from tests.servers import given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


@contextmanager
def database(request: pytest.FixtureRequest, kind: str, **options: Any) -> Iterator[Engine]:
    """An engine on a database of this kind, with idemp's tables."""
    if kind == "sqlite":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("streams")
        made = create_engine_safely(f"sqlite:///{folder}/inbox.db", **options)
        kept.make_tables(made)
        yield made
        kept.dispose(made)
        return
    server = given.GivenMariaDB(given.url_of("MYSQL") or "") if kind == "mysql" else request.getfixturevalue(kind)
    with kept.database(server, **options) as made:
        kept.make_tables(made)
        yield made


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Of the kind that the test's class names."""
    with database(request, request.cls.kind) as made:
        yield made
