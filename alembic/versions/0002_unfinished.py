"""Handler starts without an end.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

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


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_table(f"{tables.prefix}unfinished", schema=tables.schema)
