"""`idemp db`: idemp's tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from idemp.cli.command import Database, Prefix, Schema, Screen, group, verb
from idemp.cli.screen import table
from idemp.cli.wiring import open_store, settings_of, tables_of

commands = group("db", "Make, upgrade and check idemp's tables.")


@verb(commands, "upgrade")
def upgrade(screen: Screen, *, database: Database = None, schema: Schema = None, prefix: Prefix = None) -> None:
    """Make the tables, or bring them to this release's version. Several may run it at once."""
    from idemp.inbox.sql.engine import shown
    from idemp.inbox.sql.schema import check
    from idemp.inbox.sql.schema import upgrade as upgrade_tables

    store = open_store(settings_of(database=database, schema=schema, prefix=prefix))
    upgrade_tables(store.engine, store.tables)
    report = check(store.engine, store.tables)
    store.engine.dispose()
    where = shown(store.engine)
    screen.result(
        {"database": where, "revision": report.revision, "tables": sorted(store.tables.names)},
        f"The tables {store.tables.prefix}* in {where} are of version {report.revision}.",
    )


@verb(commands, "check")
def check(screen: Screen, *, database: Database = None, schema: Schema = None, prefix: Prefix = None) -> None:
    """See that tables, keys and server can keep the promises. Settings that weaken one are warnings."""
    from idemp.inbox.sql.engine import shown
    from idemp.inbox.sql.schema import check as check_tables

    store = open_store(settings_of(database=database, schema=schema, prefix=prefix))
    report = check_tables(store.engine, store.tables)
    findings = [asdict(finding) for finding in report.findings]
    headings = {"level": "", "name": "setting", "value": "value", "meaning": "meaning", "fix": "fix"}
    screen.result(
        {"database": shown(store.engine), **asdict(report), "findings": findings},
        f"{shown(store.engine)}: {report.dialect} {report.server_version}, {report.isolation}, "
        f"tables of version {report.revision}.",
        table(findings, headings),
    )


@verb(commands, "sql")
def sql(
    screen: Screen,
    *,
    dialect: Annotated[
        Literal["postgresql", "mariadb", "mysql", "sqlite"], typer.Option("--dialect", help="Kind of database.")
    ] = "postgresql",
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Print the script that makes the tables in an empty database."""
    from idemp.inbox.sql.schema import sql as script

    text = script(dialect, tables_of(settings_of(schema=schema, prefix=prefix)))
    screen.result({"dialect": dialect, "sql": text}, text.rstrip())
