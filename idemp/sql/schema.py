"""Tables by Alembic: upgrade, print as SQL, and look at what is there.

Alembic is imported only here, in functions, because a worker starts without it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, inspect, text

from idemp.errors import ConfigurationError
from idemp.sql.engine import Database
from idemp.sql.tables import Tables

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = ["REVISION", "refuse_first_build", "script_folder", "sql", "stored_revision", "upgrade"]

REVISION: Final = "2.0001"
"""The newest revision; a test compares it with the folder."""


def upgrade(database: Database) -> None:
    """Create or upgrade the tables, and on SQLite the files.

    Raises:
        ConfigurationError: The tables are the first build's.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     database = Database(f"sqlite:///{folder}/shop.db")
        ...     upgrade(database)
        ...     stored_revision(database.engine, database)
        '2.0001'
    """
    from alembic import command

    with _config(database) as config:
        for engine, side in _sides(database):
            with engine.connect() as connection:
                if engine.dialect.name == "sqlite":
                    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # or two upgrades would begin at once
                with database.dialect.alone(connection, f"{database.tables.version_table}.upgrade"):
                    refuse_first_build(connection, database.tables)
                    config.attributes.update(connection=connection, side=side)
                    command.upgrade(config, "head")
                    connection.commit()


def sql(database: Database) -> str:
    """Return the statements of an upgrade from nothing, for a database administrator.

    Example:
        >>> "CREATE TABLE IF NOT EXISTS idemp_inbox" in sql(Database("sqlite:///shop.db"))
        True
    """
    from alembic import command

    text = io.StringIO()
    with _config(database) as config:
        config.output_buffer = text
        for engine, side in _sides(database):
            if engine.dialect.name == "sqlite":
                text.write(f"-- {engine.url.database}\n")
            config.attributes.update(dialect=engine.dialect.name, side=side)
            command.upgrade(config, "head", sql=True)
    return text.getvalue()


def stored_revision(engine: Engine, database: Database) -> str | None:
    """Return the revision of the tables in a database; None if there are none."""
    table = database.tables.version_table
    with engine.connect() as connection:
        if not inspect(connection).has_table(table):
            refuse_first_build(connection, database.tables)
            return None
        return connection.execute(text(f"SELECT version_num FROM {table}")).scalar()  # noqa: S608 - our own name


def _sides(database: Database) -> list[tuple[Engine, str]]:
    if database.queue_engine is database.engine:
        return [(database.engine, "all")]
    return [(database.engine, "inbox"), (database.queue_engine, "queues")]


def refuse_first_build(connection: Connection, tables: Tables) -> None:
    """Refuse tables of the first build, whose version table had another name.

    Raises:
        ConfigurationError: These are its tables.

    Example:
        >>> from sqlalchemy import create_engine
        >>> with create_engine("sqlite://").connect() as connection:
        ...     refuse_first_build(connection, Tables())
    """
    prefix = tables.prefix
    found = set(inspect(connection).get_table_names())
    if f"{prefix}inbox" in found and tables.version_table not in found:
        raise ConfigurationError(
            f"the table {prefix}inbox belongs to the first build of idemp, which cannot be upgraded: let its queues run empty, "
            "then use another database or another prefix (IDEMP_TABLE_PREFIX)"
        )


def script_folder() -> Path:
    """Return the folder of the migrations: in a wheel, or in a checkout.

    Example:
        >>> (script_folder() / "env.py").exists()
        True
    """
    here = Path(__file__).parent.parent
    shipped, checkout = here / "_alembic", here.parent / "alembic"
    return shipped if shipped.exists() else checkout


@contextmanager
def _config(database: Database) -> Iterator[Config]:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(script_folder()).replace("%", "%%"))
    config.attributes["tables"] = database.tables
    yield config
