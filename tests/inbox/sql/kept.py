"""Databases that serve a whole class of tests, emptied before each."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, MetaData, text

from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.testing.store_conformance import SqlEffects

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def database(server: Any, **options: Any) -> Iterator[Engine]:
    """An engine on a database of its own, which is dropped at the end."""
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine_safely(server.create_database(name), **options)
    yield engine
    engine.dispose()
    server.drop_database(name)


_known: WeakKeyDictionary[Engine, dict[tuple[str | None, str], list[str]]] = WeakKeyDictionary()


def empty(engine: Engine, tables: Tables) -> None:
    """Make the tables, or take everything out of them, and out of all others that tests left."""
    known = _known.setdefault(engine, {})
    names = known.get((tables.schema, tables.prefix))
    if names is None:
        upgrade(engine, tables)
        SqlEffects(engine)
        found = MetaData()
        for schema in {None, tables.schema}:
            found.reflect(engine, schema=schema)
        names = [table.fullname for table in found.tables.values() if not table.name.endswith("alembic_version")]
        known[tables.schema, tables.prefix] = names
    with engine.begin() as connection:
        for name in names:
            connection.execute(text(f"DELETE FROM {name}"))
