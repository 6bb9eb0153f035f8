"""`idemp dead`: dead letters."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, NoReturn

import typer

from idemp.cli.exits import AsJson, Exit, exits, fail, open_database
from idemp.cli.screen import counted, escape, fields, moment, records
from idemp.sql.records.failures import DeadLetters, FailedMessage

__all__ = ["dead"]

dead = typer.Typer(help="Dead letters.", no_args_is_help=True, rich_markup_mode=None)

WIDE = 1_000_000  # columns

Number = Annotated[int, typer.Argument(min=1, max=2**63 - 1, help="Number of a dead letter, as the list shows it.")]
Numbers = Annotated[list[int], typer.Argument(min=1, max=2**63 - 1, help="Numbers of dead letters, as the list shows them.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000_000)]
Queue = Annotated[str | None, typer.Option(help="Only those of a queue.")]


@dead.command("list")
def list_(queue: Queue = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List dead letters, oldest first: when they failed last (UTC), and why."""
    with exits():
        letters = _open().find(queue=queue, limit=limit + 1)  # one more than shown, to know whether there are more
    more, letters = len(letters) > limit, letters[:limit]
    if as_json:
        print(json.dumps({"dead": [letter.as_dict() for letter in letters], "more": more}, indent=2))
        return
    rows = [
        {
            "id": letter.id,
            "failed": "" if letter.at is None else moment(letter.at)[: len("2026-01-31 20:15")],
            "queue": letter.queue,
            "type": letter.type,
            "reason": f"{letter.rule}: {letter.error}",
        }
        for letter in letters
    ]
    whole = not sys.stdout.isatty() and "COLUMNS" not in os.environ  # for grep and files
    print(records(rows, WIDE if whole else None, cut=True) or "no dead letters")
    if more:
        print(f"… and more: --limit {limit * 10}")


@dead.command()
def show(id: Number, as_json: AsJson = False) -> None:
    """Show one dead letter, or a retry: the reason, the message and its history."""
    with exits():
        (letter,) = _find([id], retries=True)
    if as_json:
        print(json.dumps(letter.as_dict(), indent=2))
        return
    names = ("id", "queue", "type", "message_id", "rule", "error", "failures", "attempts", "deaths", "committed")
    pairs = [(name, getattr(letter, name)) for name in names]
    print(fields(pairs if letter.due_at is None else [*pairs, ("retry", f"due {moment(letter.due_at)}")]))
    for entry in letter.history:
        place = f"in {entry.get('phase')} by {entry.get('worker')}"
        where = f"{counted(entry['times'], 'time')} until {moment(entry.get('at', 0.0))} {place}"
        print(fields([("failed", f"{where}: {entry.get('error')}")]))
    if letter.history and letter.history[-1].get("trace"):
        print("\n".join(escape(line) for line in letter.history[-1]["trace"].splitlines()))
    print(fields([("properties", json.dumps(letter.properties, ensure_ascii=False)), ("body", letter.body)]))
    if letter.due_at is None:
        print(f"\nidemp dead replay {letter.id}{' --force' if letter.committed or letter.late else ''}")


@dead.command()
def replay(
    ids: Annotated[list[int] | None, typer.Argument(min=1, max=2**63 - 1, help="Numbers of dead letters.")] = None,
    queue: Queue = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters (of the queue).")] = False,
    force: Annotated[bool, typer.Option(help="Also those whose effects are or may be committed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make dead letters due again, with fresh attempts."""
    if bool(ids) == every:
        fail(Exit.USAGE, "name dead letters, or use --all")
    with exits():
        letters = _open().find(queue=queue, limit=1_000_000) if every else _find(ids or [])
        doubtful = [letter.id for letter in letters if letter.committed or letter.late]
        if doubtful and not force:
            _refuse(doubtful)
        replayed = _open().replay(letters)
    print(json.dumps({"made_due": replayed}) if as_json else f"{replayed} made due")


@dead.command()
def discard(ids: Numbers, as_json: AsJson = False) -> None:
    """Delete dead letters permanently."""
    with exits():
        discarded = _open().discard(_find(ids))
    print(json.dumps({"deleted": discarded}) if as_json else f"{discarded} deleted")


def _open() -> DeadLetters:
    return DeadLetters(open_database())


def _find(ids: list[int], *, retries: bool = False) -> list[FailedMessage]:
    letters = _open().find(ids, limit=len(ids), retries=retries)
    if missing := sorted(set(ids) - {letter.id for letter in letters}):
        fail(Exit.FAILED, f"there is no dead letter {', '.join(map(str, missing))}: idemp dead list")
    return letters


def _refuse(doubtful: list[int]) -> NoReturn:
    numbers = ", ".join(map(str, doubtful))
    fail(
        Exit.FAILED, f"effects of {numbers} are committed or may be, so a replay could repeat them: check them, then use --force"
    )
