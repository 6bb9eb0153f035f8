"""`idemp bulk`: a file of stored messages through the handlers of an app, in this process."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from idemp.app import load_app
from idemp.cli.exits import AsJson, Exit, exits, fail
from idemp.cli.pipeline import (
    ContentType,
    CorrelationId,
    DryRun,
    Id,
    OfType,
    ReplyTo,
    Send,
    Target,
    Time,
    Type,
    finish,
    run_name,
)

__all__ = ["bulk"]

ROWS = 50_000  # of a chunk, in memory


def bulk(
    target: Target,
    file: Annotated[Path, typer.Argument(help="A message a line, in JSON; .gz is unpacked.", metavar="FILE")],
    parked: Annotated[
        Path | None, typer.Option(help="File for rows that are not handled, which is added to; by default FILE.parked.")
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="FILE has parked rows, edited or not.")] = False,
    id: Id = None,
    type: Type = None,
    of_type: OfType = None,
    time: Time = None,
    content_type: ContentType = None,
    correlation_id: CorrelationId = None,
    reply_to: ReplyTo = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; by default one for this app and file.")] = None,
    send: Send = True,
    adopt: Annotated[bool, typer.Option("--adopt", help="Claim only: the messages count as handled.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a file of stored messages through the handlers of an app, without Spark. Messages handled before are skipped.

    If the command fails, run it again: committed rows count as done. Exit code 1 if rows were parked.
    """
    kept = parked or file.with_name(f"{file.name}.parked")
    if kept.resolve() == file.resolve():
        fail(Exit.USAGE, "--parked has to be another file than the input")
    with exits(), ExitStack() as stack:
        from idemp.bulk import Bulk
        from idemp.bulk.lines import Fields, parked_line, read_lines, reread

        fields = Fields(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id, reply_to=reply_to
        )  # fmt: skip
        if replay and (fields.given or of_type):
            fail(Exit.USAGE, "--replay reads ids, types and times where idemp has written them: name no fields")
        run = run or run_name(target, str(file))
        work = stack.enter_context(
            Bulk(load_app(target), run=run, dispatch="relay" if send else "never", adopt=adopt, dry_run=dry_run)
        )
        bar = Progress(TextColumn("{task.completed:,.0f} rows"), console=Console(stderr=True), disable=not sys.stderr.isatty())
        stack.enter_context(bar)
        task, out, first = bar.add_task("", total=None), None, 1
        counts, outputs = Counter[str](), 0
        for lines in read_lines(file, ROWS):
            if first == 1:
                fields.check(lines)
            rows = reread(lines, first) if replay else list(map(fields.row, lines))
            report = work.run(rows)
            counts.update({answer.value: count for answer, count in report.counts.items()})
            outputs += report.outputs
            if report.parked and not dry_run:
                out = out or stack.enter_context(kept.open("a", encoding="utf-8"))
                _keep(out, [parked_line(rows[each.place], each) for each in report.parked])
            first += len(lines)
            bar.advance(task, len(lines))
    finish(run, counts, outputs, dry_run=dry_run, as_json=as_json, kept=str(kept))


def _keep(file: IO[str], lines: list[str]) -> None:
    file.writelines(f"{line}\n" for line in lines)
    file.flush()
    os.fsync(file.fileno())
