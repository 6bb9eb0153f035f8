"""All queues of a consumer, not the latest one alone.

`consumer.queue` stays, and is still written: the former release reads nothing else.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}queue"
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        table,
        sa.Column("name", NAME, nullable=False),
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("used_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", "consumer_id", name=f"{table}_pkey"),
        schema=tables.schema,
        if_not_exists=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_charset="utf8mb4",
    )


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_table(f"{tables.prefix}queue", schema=tables.schema)
