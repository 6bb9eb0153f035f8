"""`idemp prepared`: messages whose work is undecided."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from idemp.cli.exits import AsJson, Exit, exits, fail, open_database
from idemp.cli.screen import moment, records
from idemp.prepared.table import PreparedRecord, TableHome

__all__ = ["prepared"]

prepared = typer.Typer(help="Prepared messages.", no_args_is_help=True, rich_markup_mode=None)
Ids = Annotated[list[str], typer.Argument(help="Ids or keys of messages, as the list shows them.")]


@prepared.command("list")
def list_(
    parked: Annotated[bool, typer.Option(help="Only parked messages, which are not checked any more.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000)] = 100,
    as_json: AsJson = False,
) -> None:
    """List messages that are undecided, or were refused by the broker, oldest first."""
    with exits():
        messages = TableHome(open_database()).find(parked=parked, limit=limit + 1)
    more, messages = len(messages) > limit, messages[:limit]
    if as_json:
        print(json.dumps({"prepared": [asdict(message) for message in messages], "more": more}, indent=2))
        return
    print(records([{**asdict(message), "due_at": moment(message.due_at)} for message in messages]) or "no prepared messages")
    if more:
        print(f"… and more: --limit {limit * 10}")


@prepared.command()
def resume(ids: Ids, as_json: AsJson = False) -> None:
    """Let workers check messages now, with a new count, or send those in quarantine again."""
    with exits():
        home = TableHome(open_database())
        count = home.resume([message.id for message in _find(home, ids)])
    print(json.dumps({"resumed": count}) if as_json else f"{count} to be checked or sent")


@prepared.command()
def park(
    ids: Ids,
    reason: Annotated[str, typer.Option(help="Shown in the list.")] = "by an operator",
    as_json: AsJson = False,
) -> None:
    """Stop checks of messages until they are resumed. Their producers may still decide."""
    with exits():
        home = TableHome(open_database())
        count = home.park_ids([message.id for message in _find(home, ids)], reason)
    print(json.dumps({"parked": count}) if as_json else f"{count} parked")


def _find(home: TableHome, ids: list[str]) -> list[PreparedRecord]:
    messages = home.find(ids)
    if missing := sorted(set(ids) - {message.id for message in messages} - {message.key for message in messages}):
        fail(Exit.FAILED, f"there is no prepared message {', '.join(missing)}: idemp prepared list")
    return messages
