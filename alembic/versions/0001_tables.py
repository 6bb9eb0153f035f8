"""The first tables of the second build. Later revisions only add."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "2.0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(255)
WORKER = sa.String(80)
BLOB = sa.LargeBinary(2**24)
KEY = sa.LargeBinary(16).with_variant(sa.Uuid(), "postgresql")
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


def inbox_tables(prefix: str) -> None:
    op.create_table(
        f"{prefix}name",
        sa.Column("id", sa.Integer, primary_key=True),
        column("kind", sa.String(10)),
        column("name", NAME),
        sa.UniqueConstraint("kind", "name", name=f"{prefix}name_unique"),
    )
    op.create_table(
        f"{prefix}inbox",
        sa.Column("consumer_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("message_key", KEY, primary_key=True),
        column("type_id", sa.Integer()),
        column("original_id", sa.LargeBinary(4096)),
        column("fingerprint", sa.LargeBinary(16), null=True),
        column("claimed_at", sa.Double()),
        column("worker", WORKER),
        sqlite_with_rowid=False,
    )
    op.create_index(f"{prefix}inbox_claimed", f"{prefix}inbox", ["claimed_at"])
    op.create_table(
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
    op.create_table(
        f"{prefix}pending",
        sa.Column("output_id", OUTPUT_ID, primary_key=True),
        column("consumer_id", sa.Integer()),
        column("message_key", KEY),
        column("ordinal", sa.Integer()),
        column("due_at", sa.Double()),
        column("attempts", sa.SmallInteger(), server_default="0"),
        column("refusals", sa.SmallInteger(), server_default="0"),
        column("quarantined_at", sa.Double(), null=True),
        column("reason", sa.LargeBinary(4096), null=True),
        sqlite_with_rowid=False,
    )
    op.create_index(f"{prefix}pending_due", f"{prefix}pending", ["due_at"])
    op.create_table(
        f"{prefix}identity",
        sa.Column("consumer", NAME, primary_key=True),
        sa.Column("type", NAME, primary_key=True),
        column("descriptor", sa.LargeBinary(4096)),
        column("retention", sa.Double()),
        column("covers", sa.LargeBinary(4096), null=True),
        column("covers_since", sa.Double(), null=True),
        column("purged_before", sa.Double(), null=True),
    )


def queue_tables(prefix: str) -> None:
    op.create_table(
        f"{prefix}message",
        sa.Column("id", BIG, primary_key=True, autoincrement=True),
        column("queue", NAME),
        column("due_at", sa.Double(), null=True),
        column("holder", WORKER, null=True),
        column("deliveries", sa.Integer(), server_default="0"),
        column("attempts", sa.SmallInteger(), server_default="0"),
        column("deaths", sa.SmallInteger(), server_default="0"),
        column("digest", sa.LargeBinary(16), null=True, unique=True),
        column("headers", BLOB),
        column("body", BLOB),
        column("story", BLOB, null=True),
        sqlite_autoincrement=True,
    )
    op.create_index(f"{prefix}message_due", f"{prefix}message", ["queue", "due_at", "id"])
    op.create_table(f"{prefix}queue", sa.Column("name", NAME, primary_key=True))
    op.create_table(
        f"{prefix}binding",
        sa.Column("exchange", NAME, primary_key=True),
        sa.Column("pattern", NAME, primary_key=True),
        sa.Column("queue", NAME, primary_key=True),
    )
    op.create_table(
        f"{prefix}worker",
        sa.Column("name", WORKER, primary_key=True),
        column("role", sa.String(10)),
        column("seen_at", sa.Double()),
        column("stopping", sa.Boolean()),
    )
