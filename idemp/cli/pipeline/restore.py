"""`idemp pipeline restore`: claims and outputs back from an archive."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from idemp.cli.command import Consumer, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import NotFound
from idemp.cli.pipeline.options import Conf, Master, pairs
from idemp.cli.wiring import open_store, settings_of
from idemp.plurals import counted
from idemp.spark import require


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "restore")(restore)


def restore(
    screen: Screen,
    archive: Annotated[Path, typer.Argument(metavar="FOLDER", help="The archive.")],
    *,
    consumer: Consumer = None,
    since: Annotated[
        datetime | None,
        typer.Option("--since", formats=["%Y-%m-%d"], metavar="DAY", help="Claimed on this day, UTC, or later."),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option("--until", formats=["%Y-%m-%d"], metavar="DAY", help="Claimed before this day.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="This message's.")] = None,
    master: Master = None,
    conf: Conf = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Put archived claims and their outputs back where they are missing, nothing of them pending.

    They are past their window still: the next `idemp pipeline archive` takes them again.
    """
    require()
    store = open_store(settings_of(database=database, schema=schema, prefix=prefix))
    store.verify()

    from idemp.spark.archive.folder import Archive
    from idemp.spark.archive.restoring import Wanted
    from idemp.spark.archive.restoring import restore as bring_back
    from idemp.spark.failures import told_plainly
    from idemp.spark.session import session

    wanted = Wanted(
        consumer=consumer,
        since=since.date() if since is not None else None,
        until=until.date() if until is not None else None,
        original_id=id,
    )
    running = session("idemp restore", master=master, conf=pairs(conf))
    with running as spark, screen.progress() as bar, told_plainly():
        task = bar.add_task("claims", total=None)
        found = bring_back(spark, Archive(archive), store, wanted, advance=lambda more: bar.advance(task, more))
    if not found.found:
        raise NotFound(f"The archive {archive} has no such claim.", fix="Look into its manifests (manifest.json).")
    screen.result(asdict(found), f"Found {counted(found.found, 'claim')}, and put {found.restored} back.")
