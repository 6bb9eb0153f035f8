"""`idemp db`: idemp's tables."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from idemp.cli.command import Database, Prefix, Schema, Screen, group, verb
from idemp.cli.screen import Rows
from idemp.cli.wiring import open_store, settings_of, tables_of
from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.days import Layout

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
    headings = {"level": "level", "name": "setting", "value": "value", "meaning": "meaning", "fix": "fix"}
    screen.result(
        {"database": shown(store.engine), **asdict(report), "findings": findings},
        f"{shown(store.engine)}: {report.dialect} {report.server_version}, {report.isolation}, "
        f"tables of version {report.revision}.",
        Rows(findings, headings),
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


_LAYOUT: Final = {
    "since": "from",
    "until": "until",
    "first_kept": "first kept",
    "made_until": "made until",
    "days": "days",
}


@verb(commands, "partition")
def partition(
    screen: Screen,
    consumer: Annotated[str, typer.Argument(help="Whose ids.")],
    *,
    since: Annotated[
        datetime | None, typer.Option("--from", formats=["%Y-%m-%d"], metavar="DAY", help="First day, UTC.")
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option("--until", formats=["%Y-%m-%d"], metavar="DAY", help="Back to the plain tables from this day on."),
    ] = None,
    switch_on: Annotated[bool, typer.Option("--on", help="Begin with the day after tomorrow, UTC.")] = False,
    ahead: Annotated[int, typer.Option("--ahead", min=1, help="Days to make tables for in advance.")] = 14,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Make the daily tables of days to come, for a consumer that keeps its ids that carry their time in such (PostgreSQL).

    --on and --from switch that on, --until ends it, or calls it off before it begins; without them nothing is switched.
    Run it as the tables' owner, and each day where workers run as somebody else.
    """
    if (since is not None) + (until is not None) + switch_on > 1:
        raise ConfigurationError(
            "--on, --from and --until exclude each other.", fix="Nothing was changed. Run it once for each."
        )
    store = open_store(settings_of(database=database, schema=schema, prefix=prefix))
    first, end = (day.date() if day is not None else None for day in (since, until))
    try:
        found = _laid_out(store, consumer, first, end, ahead, switch_on=switch_on)
    finally:
        store.engine.dispose()
    screen.result(
        {"consumer": consumer, "layouts": [_shown(layout) for layout in found]},
        *_told(consumer, found),
    )


def _laid_out(
    store: SqlStore, consumer: str, since: date | None, until: date | None, ahead: int, *, switch_on: bool
) -> Sequence[Layout]:
    """A consumer's layouts, once they are as was asked for."""
    daily = store.upkeep.daily
    daily.refuse_others()
    store.verify()
    known = daily.layouts(consumer)
    if store.names.known("consumer", consumer) is None:
        raise ConfigurationError(
            f"No consumer {consumer!r} is known here.", fix="Start its worker once, then repeat this."
        )
    if until is not None:
        daily.close(consumer, until)
    elif since is not None and all(layout.since != since for layout in known):
        daily.open(consumer, since, ahead)
    elif switch_on and not daily.reaches_beyond(known):
        daily.open(consumer, ahead=ahead)
    else:
        for layout in known:
            daily.mend(layout)
            daily.make_ahead(layout, ahead)
    return daily.layouts(consumer)


def _told(consumer: str, found: Sequence[Layout]) -> tuple[Any, ...]:
    if not found:
        switch = f"`idemp db partition {consumer} --on`"
        return (f"{consumer} keeps no daily tables. {switch} begins with the day after tomorrow.",)
    meaning = "Ids of these days that carry their time are in tables of a day; all others are in the plain ones."
    return Rows([_shown(layout) for layout in found], _LAYOUT), meaning


def _shown(layout: Layout) -> dict[str, Any]:
    return {
        "since": layout.since,
        "until": layout.until,
        "first_kept": layout.dropped,
        "made_until": layout.made,
        "days": len(layout.days),
    }
