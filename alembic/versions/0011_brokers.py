"""Brokers that share a database: which one each pending output goes to, and each relay ships to.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from idemp.errors import ConfigurationError

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
COLUMN = "broker_id"


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    broker = f"{tables.prefix}broker"
    options: dict[str, Any] = {
        "schema": tables.schema,
        "if_not_exists": True,
        "mysql_engine": "InnoDB",
        "mariadb_engine": "InnoDB",
        "mysql_charset": "utf8mb4",
        "mariadb_charset": "utf8mb4",
    }
    op.create_table(
        broker,
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("identity", TEXT, nullable=True),
        sa.UniqueConstraint("name", name=f"{broker}_name_key"),
        **options,
    )
    for name in ("pending", "worker"):
        _add_column(f"{tables.prefix}{name}", tables.schema)


def _add_column(table: str, schema: str | None) -> None:
    dialect = op.get_context().dialect
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    if not context.is_offline_mode():
        look = sa.inspect(op.get_bind())
        if not look.has_table(table, schema=schema):
            return  # dropped by hand: the upgrade makes it anew, with all of its columns
        if COLUMN in {column["name"] for column in look.get_columns(table, schema=schema)}:
            return
    elif dialect.name in {"postgresql", "mariadb"}:  # the others have no ADD COLUMN IF NOT EXISTS
        quote = dialect.identifier_preparer.quote
        name = ".".join(quote(part) for part in (schema, table) if part is not None)
        op.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {COLUMN} INTEGER")
        return
    op.add_column(table, sa.Column(COLUMN, sa.Integer(), nullable=True), schema=schema)


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    # MariaDB, MySQL and SQLite keep what was dropped dropped: a downgrade that broke off further down can be run again.
    named = [table for table in (tables.pending, tables.worker) if context.is_offline_mode() or _has_column(table)]
    if tables.pending in named and not context.is_offline_mode():
        _check_none_named(tables.pending)
    for table in named:
        op.drop_column(table.name, COLUMN, schema=tables.schema)
    op.drop_table(f"{tables.prefix}broker", schema=tables.schema, if_exists=True)


def _has_column(table: sa.Table) -> bool:
    columns = sa.inspect(op.get_bind()).get_columns(table.name, schema=table.schema)
    return COLUMN in {column["name"] for column in columns}


def _check_none_named(pending: sa.Table) -> None:
    named = sa.select(pending.c.output_id).where(pending.c.broker_id.is_not(None))
    if op.get_bind().scalar(sa.select(sa.exists(named))):
        raise ConfigurationError(
            f"{pending.name} holds outputs of named brokers, which the former release sends to any. Nothing was changed.",
            fix="Run the relays of these brokers (`idemp relay`) until none is left.",
        )
