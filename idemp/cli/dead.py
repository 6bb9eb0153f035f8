"""`idemp dead`: the dead-letter queue of a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from idemp.broker.copies import dead_queue
from idemp.cli.command import Broker, Limit, Screen, TypeName, group, verb
from idemp.cli.exits import ExitCode, NotFound
from idemp.cli.screen import plain
from idemp.cli.wiring import configured_app, open_broker, settings_of
from idemp.deadletter import without_story
from idemp.messages import DEAD_PREFIX, FORCED_HEADER, Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.broker.port import Broker as BrokerPort

commands = group("dead", "What was parked in a dead-letter queue, and why.")

_App = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Whose dead letters.")]
_Queue = Annotated[str | None, typer.Option("--queue", help="Those of this queue; its dead letters are in QUEUE.dead.")]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Message ids.")]
_All = Annotated[bool, typer.Option("--all", help="All of them.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show which ones.")]

_LIST: Final = {
    "message_id": "id",
    "type": "type",
    "reason": "reason",
    "attempts": "attempts",
    "last_at": "last at",
    "error": "error",
}
_DONE: Final = {"message_id": "id", "type": "type", "result": "result", "refusal": "refusal"}
_CONFIRM_SECONDS: Final = 20.0
_EVERYTHING: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Place:
    """A queue with its dead letters, on a broker."""

    broker: BrokerPort
    queue: str

    @property
    def dead(self) -> str:
        return dead_queue(self.queue)


@verb(commands, "list")
def list_(
    screen: Screen,
    *,
    app: _App = None,
    queue: _Queue = None,
    message_type: TypeName = None,
    limit: Limit = 50,
    broker: Broker = None,
) -> None:
    """The dead letters, oldest first."""
    place = _place(app, queue, broker)
    found = place.broker.browse(place.dead, limit if message_type is None else _EVERYTHING)
    wanted = [message for message in found if message_type in {None, message.type}][:limit]
    screen.rows([_row(message) for message in wanted], _LIST, empty=f"{place.dead} is empty.")


@verb(commands, "show")
def show(
    screen: Screen,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Message id.")],
    *,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """One dead letter: its whole story, its headers, its body."""
    place = _place(app, queue, broker)
    found = [item for item in place.broker.browse(place.dead, _EVERYTHING) if item.message_id == message_id]
    if not found:
        raise _not_found(place, [message_id])
    letters = [{**_row(message), **_whole(message)} for message in found]
    lines = [f"{name}: {plain(value)}" for letter in letters for name, value in letter.items() if value is not None]
    screen.result(letters, *lines)


@verb(commands, "replay")
def replay(
    screen: Screen,
    ids: _Ids = None,
    *,
    message_type: TypeName = None,
    everything: _All = False,
    dry_run: _DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Handle them even if they are older than the retention window.")
    ] = False,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """Send dead letters to their queue again, as they were. Each is removed only after the broker's confirm."""
    place = _place(app, queue, broker)
    wanted = _wanted(ids, message_type, everything=everything)
    publisher = place.broker.publisher()

    def send(message: Message) -> str | None:
        (refusal,) = publisher.publish([_again(message, place.queue, force=force)], _CONFIRM_SECONDS)
        return None if refusal is None else f"{refusal.kind}: {refusal.detail}".rstrip(": ")

    try:
        rows = _move(screen, place, ids, wanted, dry_run=dry_run, done="replayed", act=send)
    finally:
        publisher.close()
    _finish(screen, place, rows)


@verb(commands, "discard")
def discard(
    screen: Screen,
    ids: _Ids = None,
    *,
    message_type: TypeName = None,
    everything: _All = False,
    dry_run: _DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """Remove dead letters for good."""
    place = _place(app, queue, broker)
    wanted = _wanted(ids, message_type, everything=everything)
    if not yes and not dry_run:
        typer.confirm(f"Remove dead letters of {place.queue} for good?", abort=True, err=True)
    rows = _move(screen, place, ids, wanted, dry_run=dry_run, done="discarded", act=lambda _: None)
    _finish(screen, place, rows)


def _move(
    screen: Screen,
    place: _Place,
    ids: Sequence[str] | None,
    wanted: Callable[[Message], bool],
    *,
    dry_run: bool,
    done: str,
    act: Callable[[Message], str | None],
) -> list[dict[str, Any]]:
    """Take what is wanted, act on each, and remove those that `act` did not refuse; all others stay."""
    if dry_run:
        found = [message for message in place.broker.browse(place.dead, _EVERYTHING) if wanted(message)]
        return [{**_row(message), "result": f"would be {done}", "refusal": None} for message in found]
    rows: list[dict[str, Any]] = []
    with place.broker.take(place.dead, ids or None, _EVERYTHING) as taken, screen.progress() as bar:
        chosen = [(index, message) for index, message in enumerate(taken.messages) if wanted(message)]
        for index, message in bar.track(chosen, description=done):
            refusal = act(message)
            if refusal is None:
                taken.accept(index)
            result = done if refusal is None else "kept"
            rows.append({**_row(message), "result": result, "refusal": refusal})
    return rows


def _finish(screen: Screen, place: _Place, rows: list[dict[str, Any]]) -> None:
    screen.rows(rows, _DONE, empty=f"No such dead letter in {place.dead}.")
    if not rows or any(row["refusal"] for row in rows):
        raise typer.Exit(ExitCode.FAILED)


def _place(app: str | None, queue: str | None, broker: str | None) -> _Place:
    if app is not None:
        found = configured_app(app, broker=broker)
        return _Place(found.broker, queue or found.queue)
    if queue is None:
        raise typer.BadParameter("Say whose dead letters: --app MODULE:APP or --queue.")
    return _Place(open_broker(settings_of(broker=broker)), queue)


def _wanted(ids: list[str] | None, message_type: str | None, *, everything: bool) -> Callable[[Message], bool]:
    if not ids and message_type is None and not everything:
        raise typer.BadParameter("Say which ones: ids, --type, or --all.")
    chosen = frozenset(ids or ())

    def wanted(message: Message) -> bool:
        return (not chosen or message.message_id in chosen) and message_type in {None, message.type}

    return wanted


def _again(message: Message, queue: str, *, force: bool) -> Output:
    original = without_story(message)
    if force:
        original = original.with_headers(**{FORCED_HEADER: 1})
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=original)


def _row(message: Message) -> dict[str, Any]:
    story = _story(message)
    fields = ("reason", "error", "attempts", "first_at", "last_at", "consumer", "host", "version")
    return {
        "message_id": message.message_id,
        "type": message.type,
        **{name: story.get(name) for name in fields},
    }


def _whole(message: Message) -> dict[str, Any]:
    headers = {name: value for name, value in message.headers.items() if not name.startswith(DEAD_PREFIX)}
    return {
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "timestamp": message.timestamp,
        "content_type": message.content_type,
        "headers": headers,
        "body": message.body,
        "stack": _story(message).get("stack"),
    }


def _story(message: Message) -> dict[str, Any]:
    return {
        name.removeprefix(DEAD_PREFIX).replace("-", "_"): value
        for name, value in message.headers.items()
        if name.startswith(DEAD_PREFIX)
    }


def _not_found(place: _Place, ids: Sequence[str]) -> NotFound:
    return NotFound(f"{place.dead} holds no message {', '.join(ids)}.", fix="Look with `idemp dead list`.")
