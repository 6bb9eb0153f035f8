"""What tasks of Spark's stage for a transaction of another process: rows that may be lost, and are told to be.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}arrival"
    dialect = op.get_context().dialect
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        table,
        sa.Column("token", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("messages", sa.Integer(), nullable=False),
        sa.Column("arrived_at", MOMENT, nullable=False),
        sa.Column("content", BODY, nullable=False),
        sa.PrimaryKeyConstraint("token", "number", name=f"{table}_pkey"),
        schema=tables.schema,
        if_not_exists=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_charset="utf8mb4",
    )
    if dialect.name == "postgresql":
        quote = dialect.identifier_preparer.quote
        name = ".".join(quote(part) for part in (tables.schema, table) if part is not None)
        # What is lost is staged anew, so that no WAL is written for it; and it comes compressed.
        op.execute(f"ALTER TABLE {name} SET UNLOGGED, ALTER COLUMN content SET STORAGE EXTERNAL")


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_table(f"{tables.prefix}arrival", schema=tables.schema)
