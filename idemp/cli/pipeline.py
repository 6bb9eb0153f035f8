"""The commands `idemp pipeline backfill`, `reconcile` and `outputs`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idemp.cli.exits import AsJson, Exit, exits, fail
from idemp.cli.screen import counted, records
from idemp.errors import needs
from idemp.identity import digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark import Columns

__all__ = ["pipeline"]

pipeline = typer.Typer(help="Backfills, reconciliations and exports on Spark.", no_args_is_help=True, rich_markup_mode=None)

Target = Annotated[str, typer.Argument(help="module:app, such as shop.orders:app", metavar="MODULE:APP")]
Path = Annotated[
    str,
    typer.Argument(help="A file, a folder with its subfolders, or a glob, in any file system that Spark reads.", metavar="PATH"),
]
Format = Annotated[str, typer.Option(help="json (a message a line), csv, parquet, or another format of Spark.")]
Id = Annotated[str | None, typer.Option(help="Column or field of ids; by default `id`.")]
Type = Annotated[str | None, typer.Option(help="Column or field of types.")]
OfType = Annotated[str | None, typer.Option(help="Type of all messages.", metavar="TYPE")]
Time = Annotated[str | None, typer.Option(help="Column or field of times.")]
ContentType = Annotated[str | None, typer.Option(help="Column or field of content types.")]
CorrelationId = Annotated[str | None, typer.Option(help="Column or field of correlation ids.")]
ReplyTo = Annotated[str | None, typer.Option(help="Column or field of queues for replies.")]
Headers = Annotated[str | None, typer.Option(help="Column of headers.")]
Body = Annotated[str | None, typer.Option(help="Column of bodies; by default the whole row.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Option of Spark's reader. Repeatable.")
]
Master = Annotated[str, typer.Option(help="Spark's master; empty leaves it to spark-submit.")]


@pipeline.command()
def backfill(
    target: Target,
    path: Path,
    parked: Annotated[str, typer.Option(help="Folder for rows that are not handled, as Parquet.")],
    format: Format = "parquet",
    id: Id = None,
    type: Type = None,
    of_type: OfType = None,
    time: Time = None,
    content_type: ContentType = None,
    correlation_id: CorrelationId = None,
    reply_to: ReplyTo = None,
    headers: Headers = None,
    body: Body = None,
    option: Options = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; by default one for this app and path.")] = None,
    send: Annotated[bool, typer.Option("--send/--never-send", help="Whether outputs are sent.")] = True,
    adopt: Annotated[bool, typer.Option("--adopt", help="Claim only: the messages count as handled.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only: nothing is claimed, and no handler runs.")] = False,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks, and so connections, at once.")] = None,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Run stored messages through the handlers of an app. Messages handled before, online or by a backfill, are skipped.

    If the command fails, run it again: committed rows count as done. Exit code 1 if rows were parked.
    """
    if path.rstrip("/") == parked.rstrip("/"):
        fail(Exit.USAGE, "--parked has to be another folder than the input, whose files could be overwritten")
    with exits():
        from idemp.spark import Columns, sink

        columns = Columns(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id,
            reply_to=reply_to, headers=headers, body=body,
        )  # fmt: skip
        # The same name for the same input, so that a repeated command continues its run.
        run = run or f"backfill-{digest(target, path).hex()[:16]}"
        target_sink = sink(
            target, parked=parked, run=run, dispatch="relay" if send else "never", adopt=adopt, dry_run=dry_run, tasks=tasks
        )  # fmt: skip
        with _session(master) as spark:
            summary = target_sink.run(_read(spark, path, format, columns, option))
    result = {"run": run, "dry_run": dry_run, "rows": summary.rows, **summary.counts, "outputs": summary.outputs}
    print(json.dumps(result) if as_json else records([result]))
    refused = summary.counts["parked"] + summary.counts["conflict"]
    if refused and not as_json:
        where = "" if dry_run else f", kept in {parked}/run={run}"
        print(f"\n{counted(refused, 'row')} not handled{where}")
    if refused:
        raise SystemExit(Exit.FAILED)


@pipeline.command()
def reconcile(
    target: Target,
    path: Path,
    format: Format = "parquet",
    id: Id = None,
    type: Type = None,
    of_type: OfType = None,
    time: Time = None,
    content_type: ContentType = None,
    correlation_id: CorrelationId = None,
    reply_to: ReplyTo = None,
    headers: Headers = None,
    body: Body = None,
    option: Options = None,
    grace: Annotated[str, typer.Option(help="Time that a message and its outputs may take.")] = "15m",
    gaps: Annotated[str | None, typer.Option(help="Folder for all gaps, as Parquet.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Gaps to print.")] = 20,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Compare sent messages with those handled, produced and confirmed. Exit code 1 if there are gaps."""
    with exits():
        from idemp.spark import Columns
        from idemp.spark import reconcile as compare

        columns = Columns(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id,
            reply_to=reply_to, headers=headers, body=body,
        )  # fmt: skip
        with _session(master) as spark:
            reconciliation = compare(target, _read(spark, path, format, columns, option), grace=grace)
            if gaps is not None:
                reconciliation.gaps.write.mode("overwrite").parquet(gaps)
            result = reconciliation.as_dict(limit)
    if as_json:
        print(json.dumps(result))
    else:
        print(records([{"outcome": name, "messages": count} for name, count in result["counts"].items() if count]))
        shown = [{name: row.get(name) for name in ("gap", "type", "id", "error")} for row in result["gaps"]]
        print("\n" + records(shown) if shown else "\nno gaps")
    if not reconciliation.clean:
        raise SystemExit(Exit.FAILED)


def _session(master: str) -> SparkSession:
    from idemp.spark import session

    progress = str(sys.stderr.isatty()).lower()  # Spark's own progress line
    return session(master=master or None, options={"spark.ui.showConsoleProgress": progress})


def _read(spark: SparkSession, path: str, format: str, columns: Columns, option: list[str] | None) -> DataFrame:
    from idemp.spark import read_files

    options: dict[str, Any] = {}
    for each in option or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            fail(Exit.USAGE, f"--option {each!r}: write NAME=VALUE")
        options[name] = value
    return read_files(spark, path, format, columns, options)


@pipeline.command()
def outputs(
    target: Target,
    table: Annotated[str, typer.Argument(help="Folder or URL of a Delta table; created if there is none.", metavar="TABLE")],
    run: Annotated[str | None, typer.Option(help="Only outputs of messages that this run of a backfill handled.")] = None,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Insert the stored outputs of an app into a Delta table, each id once. If the command fails, run it again."""
    with exits():
        with needs("lake"):
            from idemp.spark import to_lake

        with _session(master) as spark:
            inserted = to_lake(spark, target, table, run=run)
    result = {"table": table, "inserted": inserted}
    print(json.dumps(result) if as_json else records([result]))
