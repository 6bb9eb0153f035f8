"""`idemp pipeline archive`: expired claims to Parquet, into the guard, and then out of the database."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from idemp.cli.command import Database, Prefix, Schema, Screen, verb, window_of
from idemp.cli.pipeline.options import Conf, Master, UrlFile, pairs, place_of
from idemp.cli.wiring import configured_app, open_store, settings_of
from idemp.errors import ConfigurationError
from idemp.spark import require

if TYPE_CHECKING:
    from datetime import timedelta

    from idemp.inbox.sql import SqlStore
    from idemp.settings import Settings
    from idemp.spark.archive.archiving import Windows

_DONE: Final = {"run": "run", "consumer": "consumer", "claims": "claims", "outputs": "outputs", "deleted": "deleted"}


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "archive")(archive)


def archive(
    screen: Screen,
    app: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="By the windows of its policies.")] = None,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The archive; mounted where tasks run.")],
    guard: Annotated[
        Path | None, typer.Option("--guard", metavar="FILE", help="Make the guard against late duplicates anew.")
    ] = None,
    guard_span: Annotated[
        str | None,
        typer.Option("--guard-span", help="How far back it reaches, such as 400d; default all of the archive."),
    ] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Instead of an app: this consumer's.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Window for types without a policy here, such as 30d.")
    ] = None,
    master: Master = None,
    conf: Conf = None,
    url_file: UrlFile = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Archive expired claims with their outputs, verify what was written, then delete exactly that.

    Stopped or failed, run it again: it goes on. Workers have to leave expired claims alone: purge = false in the settings.
    """
    require()
    options = {"database": database, "schema": schema, "prefix": prefix}
    store, windows = (
        _of_app(app, window_of(older_than), **options) if app else _of(consumer, window_of(older_than), **options)
    )
    span = window_of(guard_span)
    store.verify()

    from idemp.spark.archive.archiving import Archiver
    from idemp.spark.archive.folder import Archive
    from idemp.spark.failures import told_plainly
    from idemp.spark.session import session

    running = session("idemp archive", master=master, conf=pairs(conf))
    with place_of(store, url_file) as inbox, running as spark, told_plainly():
        done = Archiver(spark, store, Archive(to), inbox, guard=guard, guard_span=span).run(windows)
    screen.rows([asdict(each) for each in done], _DONE, empty="Nothing has expired.")


def _of_app(where: str, others: timedelta | None, **options: str | None) -> tuple[SqlStore, list[Windows]]:
    from idemp.inbox.sql import SqlStore
    from idemp.spark.archive.archiving import Windows

    app = configured_app(where, **options)
    app.registry.build(app.settings.messages)
    _refuse_purging_workers(app.settings)
    if not isinstance(app.store, SqlStore):
        raise ConfigurationError(f"{app.name!r} keeps its inbox in no SQL database.", fix="Only such can be archived.")
    by_type = app.retentions()
    rest = others or max(by_type.values(), default=None)
    return app.store, [Windows(name, by_type, rest) for name in app.consumers()]


def _of(consumer: str | None, others: timedelta | None, **options: str | None) -> tuple[SqlStore, list[Windows]]:
    from idemp.spark.archive.archiving import Windows

    if consumer is None or others is None:
        raise typer.BadParameter("Say whose claims: MODULE:APP, or --consumer with --older-than.")
    settings = settings_of(**options)
    _refuse_purging_workers(settings)
    return open_store(settings), [Windows(consumer, {}, others)]


def _refuse_purging_workers(settings: Settings) -> None:
    if settings.purge:
        raise ConfigurationError(
            "By the settings workers delete expired claims themselves; what they delete is in no archive.",
            fix="Say purge = false in idemp.toml (or IDEMP_PURGE=false), here and for the workers, and restart those.",
        )
