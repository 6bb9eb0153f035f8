"""Handler starts without an end; refusals of a pending output, apart from its attempts.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# The types as of this revision: nothing here may follow later changes of the package's own.
KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}unfinished"
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        table,
        sa.Column("message_key", KEY, nullable=False),
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("starts", sa.SmallInteger(), nullable=False),
        sa.Column("first_at", MOMENT, nullable=False),
        sa.Column("last_at", MOMENT, nullable=False),
        sa.Column("worker_id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "message_key", name=f"{table}_pkey"),
        schema=tables.schema,
        if_not_exists=True,
        sqlite_with_rowid=False,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_charset="utf8mb4",
    )
    _add_refusals(tables)


def _add_refusals(tables: Any) -> None:
    table = f"{tables.prefix}pending"
    dialect = op.get_context().dialect
    if not context.is_offline_mode():
        look = sa.inspect(op.get_bind())
        if not look.has_table(table, schema=tables.schema):
            return  # dropped by hand: whoever upgrades makes it anew, with all of its columns
        if "refusals" in {column["name"] for column in look.get_columns(table, schema=tables.schema)}:
            return
    elif dialect.name in {"postgresql", "mariadb"}:  # the others have no ADD COLUMN IF NOT EXISTS
        quote = dialect.identifier_preparer.quote
        name = ".".join(quote(part) for part in (tables.schema, table) if part is not None)
        op.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS refusals SMALLINT DEFAULT 0 NOT NULL")
        return
    column = sa.Column("refusals", sa.SmallInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column(table, column, schema=tables.schema)


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_column(f"{tables.prefix}pending", "refusals", schema=tables.schema)
    op.drop_table(f"{tables.prefix}unfinished", schema=tables.schema)
