"""`idemp pipeline backfill`: an archive through the handlers of an app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import SecretStr

from idemp.cli.command import Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.loading import load_app
from idemp.cli.wiring import settings_of
from idemp.spark import require

if TYPE_CHECKING:
    from idemp.spark.columns import Columns
    from idemp.spark.summary import Summary

_Column = "SQL expression, such as a column's name (json: a field, a.b)"
_Pairs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")]


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "backfill")(backfill)


def backfill(
    screen: Screen,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Whose handlers and inbox.")],
    *,
    input: Annotated[list[str], typer.Option("--input", metavar="PATH", help="Files or folders; may be repeated.")],
    format: Annotated[str, typer.Option("--format", help="parquet, json (a message a line), csv, orc, …")] = "parquet",
    id: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help=f"Message id: {_Column}.")] = None,
    message_type: Annotated[str | None, typer.Option("--type", help="Message type of all of them.")] = None,
    type_column: Annotated[
        str | None, typer.Option("--type-column", metavar="COLUMN", help="Message type, by row.")
    ] = None,
    body: Annotated[str | None, typer.Option("--body", metavar="COLUMN", help="Body; default all columns.")] = None,
    headers: Annotated[str | None, typer.Option("--headers", metavar="COLUMN", help="Headers, a JSON object.")] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="COLUMN", help="When it was made.")] = None,
    position: Annotated[
        str | None, typer.Option("--position", metavar="COLUMN", help="Place in the source; default file and row.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="For Spark's reader; may be repeated.")
    ] = None,
    parked: Annotated[
        str, typer.Option("--parked", metavar="PATH", help="For what can't be handled.")
    ] = "idemp-parked",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be, and change nothing.")] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Mark as handled, run no handler.")] = False,
    no_dispatch: Annotated[bool, typer.Option("--no-dispatch", help="Store outputs; nobody sends them.")] = False,
    prefilter: Annotated[
        bool, typer.Option("--prefilter", help="Leave out what was handled from the same place before: faster.")
    ] = False,
    rate: Annotated[float | None, typer.Option("--rate", min=0.01, help="At most so many messages a second.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Messages in one transaction, at most.")] = 50_000,
    partitions: Annotated[int | None, typer.Option("--partitions", min=1, help="Tasks; default 4 a core.")] = None,
    master: Annotated[
        str | None, typer.Option("--master", metavar="URL", help="Spark's; default this machine.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="Spark's setting; may be repeated.")
    ] = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Handle the messages of files once: those that were handled before are skipped, wherever that was.

    Stopped or failed, run it again: it goes on. Exit code 1 says that messages were parked, or conflict.
    """
    require()
    load_app(app)  # a name that is wrong is told before Spark starts
    columns = _columns(
        id=id, type=_type(message_type, type_column), body=body, headers=headers, time=time, position=position
    )
    from idemp.spark.archives import backfill as run
    from idemp.spark.archives import new_run_name
    from idemp.spark.files import read_messages
    from idemp.spark.session import session
    from idemp.spark.writing import sink

    name = new_run_name()
    to = sink(
        app,
        parked=parked,
        database=SecretStr(database) if database is not None else None,
        settings=settings_of(schema=schema, prefix=prefix) if schema or prefix else None,
        dispatch="never" if no_dispatch else "relay",
        adopt=adopt,
        dry_run=dry_run,
        rows=rows,
        partitions=partitions,
        rate=rate,
        prefilter=prefilter,
        run_name=name,
    )
    with session(f"idemp backfill {app}", master=master, conf=_pairs(conf)) as spark, screen.progress() as bar:
        task = bar.add_task("backfill", total=None)
        messages = read_messages(spark, input, format, columns, _pairs(option))
        summary = run(messages, to, tell=lambda done, total: bar.update(task, completed=done, total=total))
    _tell(screen, summary, run=name, parked=parked, dry_run=dry_run)


def _columns(**given: str | None) -> Columns:
    from idemp.spark.columns import Columns

    return Columns(**given)  # type: ignore[arg-type]


def _type(name: str | None, column: str | None) -> str | None:
    """The expression for the message type."""
    from idemp.spark.files import literal

    if name is not None and column is not None:
        raise typer.BadParameter("--type and --type-column exclude each other.")
    return literal(name) if name is not None else column


def _pairs(given: list[str] | None) -> dict[str, str]:
    pairs = [item.partition("=") for item in given or []]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise typer.BadParameter(f"{name!r} is no NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def _tell(screen: Screen, summary: Summary, *, run: str, parked: str, dry_run: bool) -> None:
    told: dict[str, Any] = {"run": run, "dry_run": dry_run, **summary.as_dict()}
    lines = [f"{'Would be: ' if dry_run else ''}{summary}."]
    if summary.parked or summary.conflict:
        told["parked_in"] = None if dry_run else f"{parked}/run={run}"
        if not dry_run:
            lines.append(f"What was parked is in {parked}/run={run}, with the reasons.")
    screen.result(told, *lines)
    if summary.parked or summary.conflict:
        raise typer.Exit(ExitCode.FAILED)
