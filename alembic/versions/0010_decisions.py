"""Handlings in several databases: which inbox has them prepared, and which attempt of each was committed.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

from idemp.errors import ConfigurationError

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    coordinator, decision = f"{tables.prefix}coordinator", f"{tables.prefix}decision"
    options: dict[str, Any] = {
        "schema": tables.schema,
        "if_not_exists": True,
        "mysql_engine": "InnoDB",
        "mariadb_engine": "InnoDB",
        "mysql_charset": "utf8mb4",
        "mariadb_charset": "utf8mb4",
    }
    op.create_table(
        coordinator,
        sa.Column("number", sa.SmallInteger(), nullable=False, autoincrement=False),
        sa.Column("inbox", sa.String(16), nullable=False),
        sa.Column("since", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name=f"{coordinator}_pkey"),
        **options,
    )
    op.create_table(
        decision,
        sa.Column("message_key", KEY, nullable=False),
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(16), nullable=False),
        sa.Column("branches", TEXT, nullable=False),
        sa.Column("decided_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "message_key", name=f"{decision}_pkey"),
        sqlite_with_rowid=False,
        **options,
    )


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    if not context.is_offline_mode():
        _check_empty(tables.decision, tables.schema)
    for table in (tables.decision, tables.coordinator):
        op.drop_table(table.name, schema=tables.schema, if_exists=True)


def _check_empty(table: sa.Table, schema: str | None) -> None:
    connection = op.get_bind()
    # MariaDB, MySQL and SQLite keep what was dropped dropped: a downgrade that broke off further down can be run again.
    there = sa.inspect(connection).has_table(table.name, schema=schema)
    if there and connection.scalar(sa.select(sa.exists(table.select()))):
        raise ConfigurationError(
            f"{table.name} holds decisions that other databases have not carried out yet; nothing was changed.",
            fix="Run `idemp recover MODULE:APP` until nothing is left in doubt.",
        )
