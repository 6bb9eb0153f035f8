"""Prepared messages, and the barriers that tell the fate of local work.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

from idemp.errors import ConfigurationError

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
FINGERPRINT = sa.LargeBinary().with_variant(mysql.VARBINARY(32), "mysql", "mariadb")
BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    prepared, barrier = f"{tables.prefix}prepared", f"{tables.prefix}barrier"
    options: dict[str, Any] = {
        "schema": tables.schema,
        "if_not_exists": True,
        "mysql_engine": "InnoDB",
        "mariadb_engine": "InnoDB",
        "mysql_charset": "utf8mb4",
        "mariadb_charset": "utf8mb4",
    }
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        prepared,
        sa.Column("id", KEY, nullable=False),
        sa.Column("producer", NAME, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("prepared_at", MOMENT, nullable=False),
        sa.Column("due_at", MOMENT, nullable=False),
        sa.Column("checks", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("reason", TEXT, nullable=True),
        sa.Column("fingerprint", FINGERPRINT, nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("exchange", NAME, nullable=False),
        sa.Column("routing_key", NAME, nullable=False),
        sa.Column("envelope", TEXT, nullable=False),
        sa.Column("body", BODY, nullable=False),
        sa.PrimaryKeyConstraint("id", name=f"{prepared}_pkey"),
        **options,
    )
    _index(prepared, "due_at", "producer", "state", "due_at")
    op.create_table(
        barrier,
        sa.Column("id", KEY, nullable=False),
        sa.Column("reason", sa.String(8), nullable=False),
        sa.Column("passed_at", MOMENT, nullable=False),
        sa.Column("settled_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=f"{barrier}_pkey"),
        **options,
    )
    _index(barrier, "settled_at", "settled_at")


def _index(table: str, suffix: str, *columns: str) -> None:
    schema, name = context.config.attributes["tables"].schema, f"{table}_{suffix}"
    by_server = op.get_context().dialect.name != "mysql"  # MySQL proper has no CREATE INDEX IF NOT EXISTS
    if not by_server and not context.is_offline_mode():
        existing = sa.inspect(op.get_bind()).get_indexes(table, schema=schema)
        if name in {index["name"] for index in existing}:
            return
    op.create_index(name, table, list(columns), schema=schema, if_not_exists=by_server or None)


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    for table in (tables.barrier, tables.prepared):
        if not context.is_offline_mode():
            _check_empty(table, tables.schema)
        op.drop_table(table.name, schema=tables.schema, if_exists=True)


def _check_empty(table: sa.Table, schema: str | None) -> None:
    connection = op.get_bind()
    # MariaDB, MySQL and SQLite keep what was dropped dropped: a downgrade that broke off further down can be run again.
    there = sa.inspect(connection).has_table(table.name, schema=schema)
    if there and connection.scalar(sa.select(sa.exists(table.select()))):
        raise ConfigurationError(
            f"{table.name} holds prepared messages or their fate; nothing was changed.",
            fix="See `idemp prepared list`; when all are decided and nobody prepares any more, delete its rows.",
        )
