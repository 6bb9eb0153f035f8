"""`idemp bulk`: a file of stored messages through the handlers of an app, in this process."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

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
from idemp.cli.screen import counted, escape
from idemp.errors import describe_error

if TYPE_CHECKING:
    from idemp.bulk import Parked, Row
    from idemp.bulk.lines import Fields

__all__ = ["bulk"]

ROWS = 50_000  # of a chunk, in memory
MOST = 5  # reasons that are printed


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
    if kept.resolve() == file.resolve() or (kept.exists() and file.exists() and kept.samefile(file)):
        fail(Exit.USAGE, "--parked has to be another file than the input")
    with exits(), ExitStack() as stack:
        from idemp.bulk import Bulk
        from idemp.bulk.lines import Fields, read_lines

        fields = Fields(
            id=id, type=type, of_type=of_type, time=time, content_type=content_type, correlation_id=correlation_id, reply_to=reply_to
        )  # fmt: skip
        if replay and (fields.given or of_type):
            fail(Exit.USAGE, "--replay reads ids, types and times where idemp has written them: name no fields")
        app = load_app(target)
        app.configure()
        if of_type is not None and of_type not in app.handlers:
            fail(Exit.USAGE, f"--of-type {of_type}: no handler takes it: {app.name} takes {', '.join(sorted(app.handlers))}")
        run = run or run_name(target, str(file))
        work = stack.enter_context(Bulk(app, run=run, dispatch="relay" if send else "never", adopt=adopt, dry_run=dry_run))
        bar = stack.enter_context(
            Progress(TextColumn("{task.completed:,.0f} rows"), console=Console(stderr=True), disable=not sys.stderr.isatty())
        )
        out = None if dry_run else stack.enter_context(_keeping(kept))
        task, counts, reasons, outputs = bar.add_task("", total=None), Counter[str](), Counter[str](), 0
        for lines in read_lines(file, ROWS):
            if not replay and not counts:
                fields.check([line for _, line in lines])
            rows, refused = _rows(lines, None if replay else fields)
            report = work.run(rows)
            counts.update({answer.value: count for answer, count in report.counts.items()}, parked=len(refused))
            outputs += report.outputs
            parked_rows = [(rows[each.place], each) for each in report.parked] + refused
            reasons.update(f"{each.rule}: {each.error}" for _, each in parked_rows)
            if out is not None:
                _keep(out, kept, parked_rows)
            bar.advance(task, len(lines))
    if not as_json:
        for reason, count in reasons.most_common(MOST):
            print(f"{counted(count, 'row')}: {escape(reason)}", file=sys.stderr)
    finish(run, counts, outputs, dry_run=dry_run, as_json=as_json, kept=str(kept))


def _rows(lines: list[tuple[int, bytes]], fields: Fields | None) -> tuple[list[Row], list[tuple[Row, Parked]]]:
    """Return lines as rows, and those that are parked at once; without fields, they are parked rows of an earlier run."""
    from idemp.bulk import Answer, Parked
    from idemp.bulk.lines import reread

    rows: list[Row] = []
    refused: list[tuple[Row, Parked]] = []
    for number, line in lines:
        row, error = (reread(number, line), None) if fields is None else fields.row(line)
        if error is None:
            rows.append(row)
        else:
            refused.append((row, Parked(0, Answer.PARKED, "unreadable", describe_error(error))))
    return rows, refused


@contextmanager
def _keeping(path: Path) -> Iterator[IO[str]]:
    """Open a file that is added to; remove it if it is new, and nothing was."""
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        fail(Exit.USAGE, f"--parked {path}: {error.strerror}; nothing was handled")
    try:
        with file:
            yield file
    finally:
        if path.is_file() and not path.stat().st_size:
            path.unlink()


def _keep(file: IO[str], path: Path, parked: list[tuple[Row, Parked]]) -> None:
    from idemp.bulk.lines import parked_line

    try:
        file.writelines(f"{parked_line(row, why)}\n" for row, why in parked)
        file.flush()
        if path.is_file():  # and no pipe
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}; rows that were not handled are in the input alone"
        fail(Exit.FAILED, f"{text}: run the command again with another --parked")
