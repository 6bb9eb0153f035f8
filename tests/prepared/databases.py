"""Databases of each kind for a class of tests, with idemp's tables."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from idemp.inbox.sql import create_engine_safely
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from sqlalchemy import Engine

SQLITE_WAIT = 0.2
"""Seconds for which a connection waits for the file's write lock."""


@contextmanager
def database(request: pytest.FixtureRequest, kind: str, **options: Any) -> Iterator[Engine]:
    """An engine on a database of this kind, with idemp's tables."""
    if kind == "sqlite":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("prepared")
        options = {"connect_args": {"timeout": SQLITE_WAIT}, **options}
        made = create_engine_safely(f"sqlite:///{folder}/business.db", **options)
        kept.make_tables(made)
        yield made
        kept.dispose(made)
        return
    with kept.database(request.getfixturevalue(kind), **options) as made:
        kept.make_tables(made)
        yield made


def another(engine: Engine) -> Engine:
    """Another engine on the same database, as another process has one."""
    if engine.dialect.name == "sqlite":
        return create_engine_safely(engine.url, connect_args={"timeout": SQLITE_WAIT})
    return kept._other(engine)
