"""A project with migrations of its own, beside idemp's tables, by Alembic's own commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from alembic.config import main
from sqlalchemy import create_engine, inspect, text

from idemp.errors import ConfigurationError
from idemp.sql.checks import check_database
from idemp.sql.engine import Database
from idemp.sql.partition import partition
from idemp.sql.schema import REVISION, upgrade
from tests.servers import server
from tests.servers.databases import create_database, drop_database, query

ENV = """
import os
from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, create_engine
from idemp.integrations.alembic import leave_out_idemp

metadata = MetaData()
Table("customer", metadata, Column("id", Integer, primary_key=True))
Table("idemp_customer", metadata, Column("id", Integer, primary_key=True))
options = dict(target_metadata=metadata, include_name=leave_out_idemp(os.environ["PREFIX"]), include_schemas=bool(os.environ.get("SCHEMAS")))
if context.is_offline_mode():
    context.configure(url=os.environ["URL"], literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(os.environ["URL"], poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
"""
MAKO = """
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
from alembic import op
import sqlalchemy as sa
from idemp.integrations.alembic import upgrade_idemp

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
"""


class Project:
    """A folder with `alembic.ini`."""

    def __init__(self, folder: Path, url: str, **environment: str) -> None:
        self.folder, self.url = folder, url
        (folder / "migrations" / "versions").mkdir(parents=True)
        (folder / "migrations" / "env.py").write_text(ENV)
        (folder / "migrations" / "script.py.mako").write_text(MAKO)
        (folder / "alembic.ini").write_text("[alembic]\nscript_location = migrations\n")
        self.environment = {"PREFIX": "idemp_", "URL": url, **environment}

    def run(self, *arguments: str) -> str:
        with chdir(self.folder), patch.dict("os.environ", self.environment), redirect_stdout(StringIO()) as out:
            main(arguments, "alembic")
        return out.getvalue()

    def revise(self, *lines: str) -> str:
        """Make a migration: with lines, those; else by `--autogenerate`."""
        before = self.scripts()
        self.run("revision", "-m", "next", *([] if lines else ["--autogenerate"]))
        (path,) = self.scripts() - before
        if lines:
            path.write_text(path.read_text().replace("    pass", "\n".join(f"    {line}" for line in lines), 1))
        return path.read_text().partition("def downgrade")[0]

    def scripts(self) -> set[Path]:
        return set((self.folder / "migrations" / "versions").glob("*.py"))


@pytest.fixture
def at(kind: str, tmp_path: Path) -> Callable[[], str]:
    return lambda: f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else create_database(server(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "prefix"), [("sqlite", "idemp_"), ("postgresql", "shop_"), ("mariadb", "idemp_")], indirect=["kind"]
)
def test_a_chain_of_migrations_creates_the_tables_and_drops_none(
    kind: str, prefix: str, at: Callable[[], str], tmp_path: Path
) -> None:
    url = at()
    project, database = Project(tmp_path, url, PREFIX=prefix), Database(url, prefix)
    assert "create_table('customer'" in project.revise()
    project.revise(f"upgrade_idemp({REVISION!r}, {prefix!r})")
    offline = project.run("upgrade", "head", "--sql")
    assert f"{prefix}inbox" in offline
    assert f"INSERT INTO {prefix}version (version_num) VALUES ('{REVISION}')" in offline
    project.run("upgrade", "head")
    if kind == "sqlite":
        (finding,) = check_database(database)
        assert (finding.level, finding.fix) == ("red", "idemp db upgrade")  # for the second file
        upgrade(database)
    else:
        assert [finding.level for finding in check_database(database) if finding.level == "red"] == []
    if kind == "postgresql":
        partition(database, 2)
    empty = project.revise()
    assert "drop_" not in empty
    assert "create_" not in empty
    project.revise(f"upgrade_idemp({REVISION!r}, {prefix!r})")  # once more, which is nothing to do
    project.run("upgrade", "head")
    project.run("check")
    assert {"customer", "idemp_customer", f"{prefix}inbox"} <= set(inspect(database.engine).get_table_names())
    database.close()
    if kind != "sqlite":
        drop_database(url)


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_tables_in_a_schema_of_their_own_are_left_out(kind: str, at: Callable[[], str], tmp_path: Path) -> None:
    url = at()
    query(url, "CREATE SCHEMA inbox")
    own = f"{url}?options=-csearch_path%3Dinbox"
    database = Database(own)
    upgrade(database)
    database.close()
    project = Project(tmp_path, url, SCHEMAS="yes")
    assert "drop_" not in project.revise()
    project.run("upgrade", "head")
    project.run("check")
    drop_database(url)


def test_what_cannot_be_upgraded_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    project = Project(tmp_path, url)
    project.revise("upgrade_idemp('3.0007')")
    wrong = f"the revision '3.0007' is not of this release of idemp, whose newest is {REVISION}"
    with pytest.raises(ConfigurationError, match=re.escape(wrong)):
        project.run("upgrade", "head")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE idemp_inbox (id INTEGER)"))
    engine.dispose()
    for path in project.scripts():
        path.unlink()
    project.revise(f"upgrade_idemp({REVISION!r})")
    with pytest.raises(ConfigurationError, match="belongs to the first build of idemp"):
        project.run("upgrade", "head")
