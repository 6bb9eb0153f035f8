"""Event streams: commits, whose number and whose message id are unique, and their outputs without a confirm.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

from idemp.errors import ConfigurationError

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
FINGERPRINT = sa.LargeBinary().with_variant(mysql.VARBINARY(32), "mysql", "mariadb")


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    commit, unconfirmed = f"{tables.prefix}commit", f"{tables.prefix}unconfirmed"
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        commit,
        sa.Column("stream", NAME, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_version", sa.Integer(), nullable=False),
        sa.Column("message_key", KEY, nullable=False),
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("type_id", sa.Integer(), nullable=False),
        sa.Column("committed_at", MOMENT, nullable=False),
        sa.Column("fingerprint", FINGERPRINT, nullable=True),
        sa.Column("original_id", NAME, nullable=True),
        sa.Column("source_position", NAME, nullable=True),
        sa.Column("outputs", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("stream", "number", name=f"{commit}_pkey"),
        sa.UniqueConstraint("consumer_id", "message_key", name=f"{commit}_id_key"),
        schema=tables.schema,
        if_not_exists=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_charset="utf8mb4",
    )
    op.create_table(
        unconfirmed,
        sa.Column("message_key", KEY, nullable=False),
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("output_id", KEY, nullable=False),
        sa.Column("committed_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "message_key", "output_id", name=f"{unconfirmed}_pkey"),
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
    if not context.is_offline_mode() and op.get_bind().scalar(sa.select(sa.exists(tables.commit.select()))):
        raise ConfigurationError(
            f"{tables.commit.name} holds event streams, which exist nowhere else; nothing was changed.",
            fix="Copy them to where they are to be from now on, and delete its rows.",
        )
    op.drop_table(f"{tables.prefix}unconfirmed", schema=tables.schema)
    op.drop_table(f"{tables.prefix}commit", schema=tables.schema)
