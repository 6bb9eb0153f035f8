"""Names, inbox, outputs, pending, history, activity, identities.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql, postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# The types as of this revision: nothing here may follow later changes of the package's own.
KEY = sa.BINARY(16).with_variant(postgresql.UUID(), "postgresql")
MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
FINGERPRINT = sa.LargeBinary().with_variant(mysql.VARBINARY(32), "mysql", "mariadb")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_names()
    _create_claims()
    _create_history()


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    for name in ("identity", "activity", "history", "pending", "output", "inbox", "worker", "message_type", "consumer"):
        op.drop_table(f"{tables.prefix}{name}", schema=tables.schema)


def _create_names() -> None:
    _create("consumer", _serial(), _column("name", NAME), sa.Column("queue", NAME, nullable=True), unique="name")
    _create("message_type", _serial(), _column("name", NAME), unique="name")
    _create(
        "worker",
        _serial(),
        _column("name", NAME),
        _column("started_at", MOMENT),
        sa.Column("seen_at", MOMENT, nullable=True),
        _column("relay", sa.Boolean()),
        unique="name",
    )


def _create_claims() -> None:
    _create(
        "inbox",
        _column("message_key", KEY),
        _column("consumer_id", sa.Integer()),
        _column("type_id", sa.Integer()),
        sa.Column("worker_id", sa.Integer(), nullable=True),
        _column("claimed_at", MOMENT),
        sa.Column("fingerprint", FINGERPRINT, nullable=True),
        sa.Column("original_id", NAME, nullable=True),
        primary_key=("consumer_id", "message_key"),
    )
    _index("inbox", "claimed_at", "consumer_id", "type_id", "claimed_at", where="claimed_at IS NOT NULL")
    _create(
        "output",
        _column("output_id", KEY),
        _column("message_key", KEY),
        _column("consumer_id", sa.Integer()),
        _column("ordinal", sa.Integer()),
        _column("kind", sa.String(8)),
        _column("exchange", NAME),
        _column("routing_key", NAME),
        _column("envelope", TEXT),
        _column("body", BODY),
        primary_key=("consumer_id", "message_key", "ordinal"),
    )
    _create(
        "pending",
        _column("output_id", KEY),
        _column("message_key", KEY),
        _column("consumer_id", sa.Integer()),
        _column("ordinal", sa.Integer()),
        _column("attempts", sa.SmallInteger()),
        _column("due_at", MOMENT),
        sa.Column("quarantined_at", MOMENT, nullable=True),
        sa.Column("reason", TEXT, nullable=True),
        primary_key=("output_id",),
    )
    _index("pending", "due_at", "due_at")
    _index("pending", "key", "consumer_id", "message_key")


def _create_history() -> None:
    _create(
        "history",
        _column("message_key", KEY),
        _column("consumer_id", sa.Integer()),
        _column("worker_id", sa.Integer()),
        _column("at", MOMENT),
        _column("confirmed", sa.Integer()),
        _column("redelivered", sa.Integer()),
        primary_key=("consumer_id", "message_key", "at", "worker_id"),
    )
    _create(
        "activity",
        _column("consumer_id", sa.Integer()),
        _column("started_at", MOMENT),
        _column("ended_at", MOMENT),
        primary_key=("consumer_id", "started_at"),
        sqlite_with_rowid=True,
    )
    _create(
        "identity",
        sa.Column("id", SERIAL, primary_key=True, autoincrement=True),
        _column("consumer_id", sa.Integer()),
        _column("type_id", sa.Integer()),
        _column("descriptor", TEXT),
        _column("since", MOMENT),
        sa.Column("ended_at", MOMENT, nullable=True),
    )


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _serial() -> sa.Column[Any]:
    return sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True)


def _create(
    name: str, *parts: Any, primary_key: tuple[str, ...] = (), unique: str = "", sqlite_with_rowid: bool = False
) -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}{name}"
    options: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
    options |= {"mariadb_engine": "InnoDB", "mariadb_charset": "utf8mb4"}
    if primary_key:
        parts = (*parts, sa.PrimaryKeyConstraint(*primary_key, name=f"{table}_pkey"))
        options["sqlite_with_rowid"] = sqlite_with_rowid
    if unique:
        parts = (*parts, sa.UniqueConstraint(unique, name=f"{table}_{unique}_key"))
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(table, *parts, schema=tables.schema, if_not_exists=True, **options)


def _index(table: str, suffix: str, *columns: str, where: str | None = None) -> None:
    tables = context.config.attributes["tables"]
    name = f"{tables.prefix}{table}_{suffix}"
    table = f"{tables.prefix}{table}"
    by_server = op.get_context().dialect.name != "mysql"  # MySQL proper has no CREATE INDEX IF NOT EXISTS
    if not by_server and not context.is_offline_mode():
        existing = sa.inspect(op.get_bind()).get_indexes(table, schema=tables.schema)
        if name in {index["name"] for index in existing}:
            return
    op.create_index(
        name,
        table,
        list(columns),
        schema=tables.schema,
        if_not_exists=by_server or None,
        postgresql_where=sa.text(where) if where is not None else None,
    )
