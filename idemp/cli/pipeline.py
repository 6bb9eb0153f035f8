"""The commands `idemp pipeline`: backfills, parked rows, reconciliations and exports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from idemp.cli.exits import AsJson, Exit, exits, fail
from idemp.cli.screen import counted, records
from idemp.errors import needs
from idemp.identity import digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark import Columns

__all__ = ["finish", "pipeline", "run_name"]

ANSWERS: Final = ("new", "replay", "duplicate", "conflict", "parked")  # of idemp.bulk.Answer, which may not be installed

pipeline = typer.Typer(help="Backfills, reconciliations and exports on Spark.", no_args_is_help=True, rich_markup_mode=None)

Target = Annotated[str, typer.Argument(help="module:app, such as shop.orders:app", metavar="MODULE:APP")]
Input = Annotated[
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
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="First time to judge; by default that of the first message in the log.")
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help="Last time to judge; by default that of the last message in the log.")
]
Judged = Annotated[list[str] | None, typer.Option("--only", metavar="TYPE", help="Type of messages to judge. Repeatable.")]
Produces = Annotated[
    list[str] | None, typer.Option(metavar="TYPE=COUNT", help="Least number of outputs of each message of a type. Repeatable.")
]
Send = Annotated[bool, typer.Option("--send/--never-send", help="Whether outputs are sent.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count only: nothing is claimed, and no handler runs.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Tasks, and so connections, at once.")]
Folder = Annotated[str, typer.Argument(help="Folder that a backfill got as --parked.", metavar="PARKED")]
Master = Annotated[str, typer.Option(help="Spark's master; empty leaves it to spark-submit.")]


@pipeline.command()
def backfill(
    target: Target,
    path: Input,
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
    send: Send = True,
    adopt: Annotated[bool, typer.Option("--adopt", help="Claim only: the messages count as handled.")] = False,
    dry_run: DryRun = False,
    tasks: Tasks = None,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Run stored messages through the handlers of an app. Messages handled before, online or by a backfill, are skipped.

    If the command fails, run it again: committed rows count as done. Exit code 1 if rows were parked.
    """
    if f"{parked.rstrip('/')}/".startswith(f"{path.rstrip('/')}/"):
        fail(Exit.USAGE, "--parked has to be outside of the input, or the next run would read its rows, too: see replay-parked")
    with exits():
        from idemp.spark import Columns, sink

        columns = Columns(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id,
            reply_to=reply_to, headers=headers, body=body,
        )  # fmt: skip
        run = run or run_name(target, path)
        target_sink = sink(
            target, parked=parked, run=run, dispatch="relay" if send else "never", adopt=adopt, dry_run=dry_run, tasks=tasks
        )  # fmt: skip
        with _session(master) as spark:
            summary = target_sink.run(_read(spark, path, format, columns, option), progress=_progress())
    finish(
        summary.run, summary.counts, summary.outputs, dry_run=dry_run, as_json=as_json, kept=f"{parked}/run={quote(run, safe='')}"
    )


@pipeline.command()
def reconcile(
    target: Target,
    path: Input,
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
    since: Since = None,
    until: Until = None,
    only: Judged = None,
    produces: Produces = None,
    gaps: Annotated[str | None, typer.Option(help="Folder for all gaps, as Parquet.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Gaps to print.")] = 20,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Compare sent messages with those handled, produced and confirmed. Exit code 1 if there are gaps.

    A TIME is 2026-11-24 (the start of that day), 2026-11-24T10:00, both in UTC, or seconds since 1970.
    """
    first, last = _moment(since, "--since"), _moment(until, "--until")
    least = {type: int(count) for type, count in _pairs(produces, "--produces TYPE=COUNT")}
    with exits():
        from idemp.spark import Columns
        from idemp.spark import reconcile as compare

        columns = Columns(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id,
            reply_to=reply_to, headers=headers, body=body,
        )  # fmt: skip
        with _session(master) as spark:
            log = _read(spark, path, format, columns, option)
            reconciliation = compare(
                target, log, grace=grace, since=first, until=last, type=only or (), produces=least
            )  # fmt: skip
            if gaps is not None:
                reconciliation.gaps.write.mode("overwrite").parquet(gaps)
            result = reconciliation.as_dict(limit)
    print(json.dumps(result) if as_json else _described(result))
    if not reconciliation.clean:
        raise SystemExit(Exit.FAILED)


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


@pipeline.command()
def parked(
    folder: Folder,
    limit: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 20,
    master: Master = "local[*,4]",
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows, each as a line of JSON that can be edited.")] = False,
) -> None:
    """Show the open rows of a folder of parked rows: those that no replay has replaced. Exit code 1 if there are any."""
    with exits():
        from idemp.bulk.lines import readable
        from idemp.spark.parked import read_parked

        with _session(master) as spark:
            rows = read_parked(spark, folder).orderBy("type", "id", "row")
            count = rows.count()
            if as_json:
                for row in rows.toLocalIterator():
                    print(json.dumps(readable(row.asDict()), ensure_ascii=False))
            else:
                shown = [
                    row.asDict() for row in rows.select("row", "type", "id", "answer", "rule", "error").limit(limit).collect()
                ]
                hidden = (
                    f"{counted(count - len(shown), 'row')} not shown" if count > len(shown) else "" if count else "no open rows"
                )
                print("\n\n".join(filter(None, (records(shown), hidden))))
    if count:
        raise SystemExit(Exit.FAILED)


@pipeline.command("replay-parked")
def replay_parked(
    target: Target,
    folder: Folder,
    corrected: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Lines of `parked --json`, edited: only these rows are handled. By default all open ones."
        ),
    ] = None,
    send: Send = True,
    dry_run: DryRun = False,
    tasks: Tasks = None,
    master: Master = "local[*,4]",
    as_json: AsJson = False,
) -> None:
    """Run parked rows through the handlers again. Rows that fail again stay open, as do rows without a line in FILE.

    Nothing in the folder is overwritten. If the command fails, run it again. Exit code 1 if rows were parked again.
    """
    with exits():
        from idemp.spark import sink

        lines = None if corrected is None else corrected.read_text().splitlines()
        target_sink = sink(target, parked=folder, dispatch="relay" if send else "never", dry_run=dry_run, tasks=tasks)
        with _session(master) as spark:
            summary = target_sink.replay(spark, lines, progress=_progress())
    finish(summary.run, summary.counts, summary.outputs, dry_run=dry_run, as_json=as_json, kept=folder)


def run_name(target: str, path: str) -> str:
    """Return a name that is the same for the same input, so that a repeated command continues its run.

    Example:
        >>> run_name("shop", "archive")
        'backfill-5b3ab6ec3017b291'
    """
    return f"backfill-{digest(target, path).hex()[:16]}"


def finish(run: str, counts: Mapping[str, int], outputs: int, *, dry_run: bool, as_json: bool, kept: str) -> None:
    """Print the answers to the rows of a run, and where it kept those that were not handled; exit with 1 if there are any.

    Args:
        run: Name of the run.
        counts: Rows by answer.
        outputs: Number of messages that new rows produced.
        dry_run: Whether nothing was handled.
        as_json: Whether to print JSON.
        kept: Where rows are that were not handled.

    Example:
        >>> finish("backfill", {"new": 2}, 0, dry_run=False, as_json=True, kept="parked")  # doctest: +ELLIPSIS
        {"run": "backfill", "dry_run": false, "rows": 2, "new": 2, "replay": 0, "duplicate": 0, ...}
    """
    answers = {name: counts.get(name, 0) for name in ANSWERS}
    result = {"run": run, "dry_run": dry_run, "rows": sum(answers.values()), **answers, "outputs": outputs}
    print(json.dumps(result) if as_json else records([result]))
    if refused := answers["parked"] + answers["conflict"]:
        if not as_json:
            print(f"\n{counted(refused, 'row')} not handled{'' if dry_run else f', kept in {kept}'}")
        raise SystemExit(Exit.FAILED)


def _described(result: dict[str, Any]) -> str:
    """Return a reconciliation as text: outcomes, gaps, and how many of these are not shown."""
    outcomes = records([{"outcome": name, "messages": count} for name, count in result["counts"].items() if count])
    shown = [{name: row.get(name) for name in ("gap", "type", "id", "error")} for row in result["gaps"]]
    hidden = result["gap_count"] - len(shown)
    last = f"{counted(hidden, 'gap')} not shown" if hidden else "" if shown else "no gaps"
    return "\n\n".join(filter(None, (outcomes, records(shown), last)))


def _session(master: str) -> SparkSession:
    from idemp.spark import session

    own_bar = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    return session(master=master or None, options={} if master.startswith("sc://") else own_bar)


def _progress() -> Callable[[str], None] | None:
    """Return what prints lines about the progress; None on a terminal."""
    return None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr, flush=True)


def _read(spark: SparkSession, path: str, format: str, columns: Columns, option: list[str] | None) -> DataFrame:
    from idemp.spark import read_files

    return read_files(spark, path, format, columns, dict(_pairs(option, "--option NAME=VALUE")))


def _pairs(values: list[str] | None, usage: str) -> Iterator[tuple[str, str]]:
    """Return names and values of a repeatable option."""
    option, _, form = usage.partition(" ")
    for each in values or ():
        name, equals, value = each.partition("=")
        if not equals or not name or (form.endswith("COUNT") and not value.isdecimal()):
            fail(Exit.USAGE, f"{option} {each!r}: write {form}")
        yield name, value


def _moment(text: str | None, option: str) -> float | None:
    """Return a time in seconds since 1970."""
    if text is None:
        return None
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return fail(Exit.USAGE, f"{option} {text!r}: write 2026-11-24, 2026-11-24T10:00 (UTC), or seconds since 1970")
