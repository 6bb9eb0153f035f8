"""Run the migrations of idemp's tables. `idemp.sql.schema` passes a connection, the tables and the side of them."""

from __future__ import annotations

from typing import Any

from alembic import context

attributes = context.config.attributes
common: dict[str, Any] = {"version_table": attributes["tables"].version_table}

if "dialect" in attributes:  # as a script
    context.configure(dialect_name=attributes["dialect"], literal_binds=True, **common)
else:
    context.configure(connection=attributes["connection"], **common)
with context.begin_transaction():
    context.run_migrations()
