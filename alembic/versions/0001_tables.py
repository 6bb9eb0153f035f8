"""The first tables of the second build. Later revisions only add."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects.mysql import BINARY

from idemp.sql.tables import INNODB

revision = "2.0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(255)
WORKER = sa.String(80)
BLOB = sa.LargeBinary(2**24)
DIGEST = sa.LargeBinary(16).with_variant(BINARY(16), "mysql", "mariadb")
KEY = DIGEST.with_variant(sa.Uuid(), "postgresql")
OUTPUT_ID = sa.String(36).with_variant(sa.Uuid(as_uuid=False), "postgresql")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    attributes = context.config.attributes
    prefix, side = attributes["tables"].prefix, attributes["side"]
    if side in ("inbox", "all"):
        inbox_tables(prefix)
    if side in ("queues", "all"):
        queue_tables(prefix)


def column(name: str, type: sa.types.TypeEngine, *, null: bool = False, **options: object) -> sa.Column:
    return sa.Column(name, type, nullable=null, **options)


def create_table(name: str, *columns: sa.schema.SchemaItem, **options: object) -> None:
    # MySQL commits each statement, so an upgrade that was interrupted begins anew.
    op.create_table(name, *columns, **options, **INNODB, if_not_exists=True)


def create_index(name: str, table: str, columns: list[str]) -> None:
    if context.is_offline_mode() or name not in {each["name"] for each in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, columns)


def inbox_tables(prefix: str) -> None:
    create_table(
        f"{prefix}name",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        column("kind", sa.String(10)),
        column("name", NAME),
    )
    create_table(
        f"{prefix}inbox",
        sa.Column("consumer_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("message_key", KEY, primary_key=True),
        column("type_id", sa.Integer()),
        column("original_id", sa.LargeBinary(4096)),
        column("fingerprint", DIGEST, null=True),
        column("claimed_at", sa.Double()),
        column("worker", WORKER),
        sqlite_with_rowid=False,
    )
    create_index(f"{prefix}inbox_claimed", f"{prefix}inbox", ["consumer_id", "type_id", "claimed_at"])
    create_table(
        f"{prefix}output",
        sa.Column("consumer_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("message_key", KEY, primary_key=True),
        sa.Column("ordinal", sa.Integer, primary_key=True, autoincrement=False),
        column("output_id", OUTPUT_ID),
        column("kind", sa.String(10)),
        column("exchange", NAME),
        column("routing_key", NAME),
        column("mandatory", sa.Boolean()),
        column("delay", sa.Double(), null=True),
        column("headers", BLOB),
        column("body", BLOB),
        sqlite_with_rowid=False,
    )
    create_table(
        f"{prefix}pending",
        sa.Column("output_id", OUTPUT_ID, primary_key=True),
        column("consumer_id", sa.Integer()),
        column("message_key", KEY),
        column("ordinal", sa.Integer()),
        column("due_at", sa.Double()),
        column("attempts", sa.SmallInteger(), server_default="0"),
        column("refusals", sa.SmallInteger(), server_default="0"),
        column("quarantined_at", sa.Double(), null=True),
        column("counts_at", sa.Double(), null=True),
        column("reason", sa.LargeBinary(4096), null=True),
        sqlite_with_rowid=False,
    )
    create_index(f"{prefix}pending_due", f"{prefix}pending", ["due_at"])
    create_table(
        f"{prefix}identity",
        sa.Column("consumer", NAME, primary_key=True),
        sa.Column("type", NAME, primary_key=True),
        column("descriptor", sa.LargeBinary(4096)),
        column("retention", sa.Double()),
        column("covers", sa.LargeBinary(4096), null=True),
        column("covers_since", sa.Double(), null=True),
        column("purged_before", sa.Double(), null=True),
    )
    create_table(
        f"{prefix}branch",
        sa.Column("xid", sa.String(64), primary_key=True),
        column("name", NAME),
        column("decided_at", sa.Double()),
        sqlite_with_rowid=False,
    )
    create_table(
        f"{prefix}commit",
        sa.Column("stream", NAME, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        column("consumer_id", sa.Integer()),
        column("message_key", KEY),
        sqlite_with_rowid=False,
    )
    create_table(
        f"{prefix}snapshot",
        sa.Column("stream", NAME, primary_key=True),
        sa.Column("fold", NAME, primary_key=True),
        column("number", sa.Integer()),
        column("state", BLOB),
        sqlite_with_rowid=False,
    )


def queue_tables(prefix: str) -> None:
    create_table(
        f"{prefix}message",
        sa.Column("id", BIG, primary_key=True, autoincrement=True),
        column("queue", NAME),
        column("due_at", sa.Double(), null=True),
        column("delay", sa.Double(), null=True),
        column("holder", WORKER, null=True),
        column("deliveries", sa.Integer(), server_default="0"),
        column("attempts", sa.SmallInteger(), server_default="0"),
        column("deaths", sa.SmallInteger(), server_default="0"),
        column("digest", DIGEST, null=True, unique=True),
        column("headers", BLOB),
        column("body", BLOB),
        column("history", BLOB, null=True),
        sqlite_autoincrement=True,
    )
    create_index(f"{prefix}message_due", f"{prefix}message", ["queue", "due_at", "id"])
    create_table(f"{prefix}queue", sa.Column("name", NAME, primary_key=True))
    create_table(
        f"{prefix}binding",
        sa.Column("exchange", NAME, primary_key=True),
        sa.Column("pattern", NAME, primary_key=True),
        sa.Column("queue", NAME, primary_key=True),
    )
    create_table(
        f"{prefix}worker",
        sa.Column("name", WORKER, primary_key=True),
        column("role", sa.String(10)),
        column("seen_at", sa.Double()),
        column("stopping", sa.Boolean()),
    )
