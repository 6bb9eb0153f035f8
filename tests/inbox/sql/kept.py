"""Databases that serve a whole class of tests, emptied before each; further stores on them, and COMMITs that fail there.

And idemp's tables on an empty database, without their migrations where that is quicker.
"""

from __future__ import annotations

import resource
import uuid
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, MetaData, event, inspect, text

from idemp.inbox.sql import SqlStore, Tables, create_engine_safely, guard, shared_tables
from idemp.inbox.sql.schema import sql, upgrade
from idemp.testing.store_conformance import SqlEffects
from tests.inbox.sql.rows import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def database(server: Any, **options: Any) -> Iterator[Engine]:
    """An engine on a database of its own, which is dropped at the end."""
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine_safely(server.create_database(name), **options)
    yield engine
    dispose(engine)
    server.drop_database(name)


def make_tables(engine: Engine) -> None:
    """idemp's tables where there are none: by the script, or on SQLite as a copy; migrations take several times as long."""
    if inspect(engine).has_table(shared_tables().version_table):
        return
    if engine.dialect.name != "sqlite":
        run_script(engine, _script(engine.dialect.name))
        return
    with _pattern().connect() as source, engine.connect() as target:
        copy: Any = source.connection.driver_connection
        copy.backup(target.connection.driver_connection)


@cache
def _script(dialect: str) -> str:
    return sql(dialect, shared_tables())


@cache
def _pattern() -> Engine:
    made = create_engine_safely("sqlite://")
    upgrade(made, shared_tables())
    return made


_others: WeakKeyDictionary[Engine, Engine] = WeakKeyDictionary()
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
    deletions = [f"DELETE FROM {name}" for name in names]
    with engine.begin() as connection:
        for statement in ["; ".join(deletions)] if engine.dialect.name == "postgresql" else deletions:
            connection.exec_driver_sql(statement)


def another(store: SqlStore, *, without_returning: bool = False, **options: Any) -> SqlStore:
    """A store on the same database with connections of its own, as another process has it."""
    engine = _other(store.engine, **options)
    return SqlStore(engine, tables=store.tables, clock=store.clock, without_returning=without_returning)


def _other(engine: Engine, **options: Any) -> Engine:
    """One for all stores that are opened beside the engine's own: connecting takes longer than most cases."""
    if engine not in _others:
        _others[engine] = create_engine_safely(engine.url, **options)
    return _others[engine]


def dispose(engine: Engine) -> None:
    """Close all connections of an engine, and those of other stores on its database."""
    engine.dispose()
    if (other := _others.pop(engine, None)) is not None:
        other.dispose()


@contextmanager
def lost_at_commit(store: SqlStore, **options: Any) -> Iterator[None]:
    """The server ends each connection of the store between its last statement and its COMMIT."""

    def end(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        on_postgresql = store.engine.dialect.name == "postgresql"
        # Of the server's process: behind a pooler libpq knows another number.
        number = driver.execute("SELECT pg_backend_pid()").fetchone()[0] if on_postgresql else driver.thread_id()
        ending = f"SELECT pg_terminate_backend({number}, 10000)" if on_postgresql else f"KILL {number}"
        with _other(store.engine, **options).connect() as other:
            other.execute(text(ending))

    # Before the store's own listener, which may send COMMIT; SQLAlchemy does not heed `insert=` here.
    event.remove(store.engine, "commit", guard._on_commit)
    event.listen(store.engine, "commit", end)
    guard.install(store.engine)
    try:
        yield
    finally:
        event.remove(store.engine, "commit", end)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be written to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
