"""Where a message stood in its source, for those that are claimed in bulk: tells our own retry from a duplicate.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
COLUMN = "source_position"


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}inbox"
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
        kind = NAME.compile(dialect=dialect)
        op.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {COLUMN} {kind}")
        return
    # Without ONLY: tables of days inherit the column.
    op.add_column(table, sa.Column(COLUMN, NAME, nullable=True), schema=tables.schema)


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    op.drop_column(f"{tables.prefix}inbox", COLUMN, schema=tables.schema)
