"""Which consumers keep ids that carry their time in tables of a day.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from idemp.errors import ConfigurationError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    tables = context.config.attributes["tables"]
    table = f"{tables.prefix}daily"
    # MariaDB and MySQL commit after each statement: a migration that broke off half-way can be run again.
    op.create_table(
        table,
        sa.Column("consumer_id", sa.Integer(), nullable=False),
        sa.Column("since", sa.Date(), nullable=False),
        sa.Column("until", sa.Date(), nullable=False),
        sa.Column("dropped", sa.Date(), nullable=False),
        sa.Column("made", sa.Date(), nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "since", name=f"{table}_pkey"),
        schema=tables.schema,
        if_not_exists=True,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_charset="utf8mb4",
    )


def downgrade() -> None:
    tables = context.config.attributes["tables"]
    if not context.is_offline_mode() and op.get_bind().scalar(sa.select(sa.exists(tables.daily.select()))):
        # Nobody would know which table a claim is in, and the plain inbox would refuse ids of those days for good.
        raise ConfigurationError(
            f"{tables.daily.name} says that some consumers keep daily tables; nothing was changed.",
            fix="Switch each of them back with `idemp db partition CONSUMER --until DAY`, and wait until its days "
            "were dropped; then delete its row, and the constraint that `idemp db check` names.",
        )
    op.drop_table(f"{tables.prefix}daily", schema=tables.schema)
