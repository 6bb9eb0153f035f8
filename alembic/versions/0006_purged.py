"""Up to which moment a consumer's claims have been deleted: what a guard against late duplicates has to hold.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
COLUMN = "purged_before"


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}consumer"
    dialect = op.get_context().dialect
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    if not context.is_offline_mode():
        look = sa.inspect(op.get_bind())
        if not look.has_table(table, schema=tables.schema):
            return  # dropped by hand: whoever upgrades makes it anew, with all of its columns
        if COLUMN in {column["name"] for column in look.get_columns(table, schema=tables.schema)}:
            return
    elif dialect.name in {"postgresql", "mariadb"}:  # the others have no ADD COLUMN IF NOT EXISTS
        quote = dialect.identifier_preparer.quote
        name = ".".join(quote(part) for part in (tables.schema, table) if part is not None)
        kind = MOMENT.compile(dialect=dialect)
        op.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {COLUMN} {kind}")
        return
    op.add_column(table, sa.Column(COLUMN, MOMENT, nullable=True), schema=tables.schema)


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_column(f"{tables.prefix}consumer", COLUMN, schema=tables.schema)
