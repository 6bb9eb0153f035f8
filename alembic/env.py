"""Runs the migrations of idemp's tables under the schema and prefix of the user's choice.

`idemp.inbox.sql.schema` passes `tables` and `connection` (or `dialect_name`, for a script) as attributes of the
configuration. The plain `alembic` command takes `-x url=… -x schema=… -x prefix=…` instead.
"""

from __future__ import annotations

from logging.config import fileConfig
from typing import TYPE_CHECKING, Any

from alembic import context
from sqlalchemy import inspect
from sqlalchemy.schema import CreateSchema

from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.tables import DEFAULT_PREFIX, Tables

if TYPE_CHECKING:
    from sqlalchemy import Connection

config = context.config
arguments = context.get_x_argument(as_dictionary=True)
tables: Tables = config.attributes.setdefault(
    "tables", Tables(arguments.get("schema") or None, arguments.get("prefix", DEFAULT_PREFIX))
)
common: dict[str, Any] = {
    "target_metadata": tables.metadata,
    "version_table": tables.version_table,
    "version_table_schema": tables.schema,
    "include_object": lambda _object, name, kind, _reflected, _compare_to: kind != "table" or name in tables.names,
    "include_schemas": tables.schema is not None,
    "transaction_per_migration": False,
}


def run_offline() -> None:
    dialect_name = config.attributes.get("dialect_name")
    if dialect_name is None:
        dialect_name = create_engine_safely(_url()).dialect.name
    context.configure(dialect_name=dialect_name, literal_binds=True, dialect_opts={"paramstyle": "named"}, **common)
    with context.begin_transaction():
        if tables.schema is not None and dialect_name != "sqlite":
            context.execute(CreateSchema(tables.schema, if_not_exists=True))
        context.run_migrations()


def run_online(connection: Connection) -> None:
    context.configure(connection=connection, **common)
    with context.begin_transaction():
        # Looked up first: IF NOT EXISTS asks for the right to create schemas even where there is nothing to create.
        if tables.schema is not None and tables.schema not in inspect(connection).get_schema_names():
            connection.execute(CreateSchema(tables.schema))
        context.run_migrations()


def _url() -> str:
    url = arguments.get("url")
    if not url:
        raise SystemExit("Name the database: alembic -x url=postgresql://… upgrade head")
    return url


if context.is_offline_mode():
    run_offline()
elif config.attributes.get("connection") is not None:
    run_online(config.attributes["connection"])
else:
    if config.config_file_name is not None:
        fileConfig(config.config_file_name, disable_existing_loggers=False)
    with create_engine_safely(_url()).connect() as opened, opened.begin():
        run_online(opened)
