"""idemp's tables beside your own in a project with Alembic: left out of `--autogenerate`, and created by your migrations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from alembic import context, op
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError

from idemp.errors import ConfigurationError
from idemp.settings import Settings
from idemp.sql.schema import refuse_first_build, script_folder
from idemp.sql.tables import Tables

__all__ = ["leave_out_idemp", "upgrade_idemp"]

PARTITION: Final = re.compile(r"_p\d+$")  # `idemp db partition` adds it to the name of a table


def leave_out_idemp(prefix: str | None = None) -> Callable[[str | None, str, Any], bool]:
    """Return an `include_name` for `context.configure`, so that `alembic revision --autogenerate` does not drop idemp's tables.

    Args:
        prefix: By default that of the settings (`IDEMP_TABLE_PREFIX`). Only the names of idemp's tables are left out, in each
            schema, and not all names with the prefix.

    Example:
        >>> include_name = leave_out_idemp()
        >>> include_name("idemp_inbox", "table", {}), include_name("customer", "table", {}), include_name("sales", "schema", {})
        (False, True, True)
    """
    tables = Tables(prefix or Settings().table_prefix)
    own = {table.name for table in (*tables.metadata.sorted_tables, *tables.queue_metadata.sorted_tables)}
    own |= {tables.version_table, f"{tables.prefix}barrier"}  # the latter is the one of `SqlBarrier`

    def include_name(name: str | None, kind: str, _parents: Any = None) -> bool:
        return kind != "table" or name is None or PARTITION.sub("", name) not in own

    return include_name


def upgrade_idemp(revision: str, prefix: str | None = None) -> None:
    """Create idemp's tables in a migration of yours, or upgrade them to a revision. Older ones are not changed back.

    It also works for `alembic upgrade --sql`. On SQLite, run `idemp db upgrade` after your migrations: it creates the
    second file, which holds the queues.

    Args:
        revision: As `idemp db upgrade` prints it. A later release of idemp that has new tables needs a migration more.
        prefix: By default that of the settings (`IDEMP_TABLE_PREFIX`).

    Raises:
        ConfigurationError: This release has no such revision, or the tables are the first build's.

    Example:
        In `upgrade()` of a migration:

        >>> def upgrade() -> None:
        ...     upgrade_idemp("2.0001")
    """
    tables, offline = Tables(prefix or Settings().table_prefix), op.get_context().as_sql
    version = sa.table(tables.version_table, sa.column("version_num", sa.String(32)))
    stored = None
    if not offline:
        connection = op.get_bind()
        refuse_first_build(connection, tables)
        if sa.inspect(connection).has_table(tables.version_table):
            stored = connection.scalar(sa.select(version.c.version_num))
    scripts = ScriptDirectory(str(script_folder()))
    try:
        chain = [script.revision for script in scripts.iterate_revisions(revision, "base")]  # the newest first
    except RevisionError as error:
        newest = scripts.get_current_head()
        raise ConfigurationError(
            f"the revision {revision!r} is not of this release of idemp, whose newest is {newest}"
        ) from error
    if stored is not None and stored not in chain[1:]:  # they are of this revision, or of a later one
        return
    side = "inbox" if op.get_context().dialect.name == "sqlite" else "all"
    context.config.attributes.update(tables=tables, side=side)
    for each in reversed(chain if stored is None else chain[: chain.index(stored)]):
        scripts.get_revision(each).module.upgrade()
    if stored is None:
        op.create_table(tables.version_table, sa.Column("version_num", sa.String(32), primary_key=True), if_not_exists=True)
        op.execute(sa.insert(version).values(version_num=revision))
    else:
        op.execute(sa.update(version).values(version_num=revision))
