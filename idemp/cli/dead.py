"""`idemp dead`: the dead-letter queue of a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from idemp.broker.copies import DEAD_SUFFIX, dead_queue
from idemp.cli.command import Broker, Limit, Screen, TypeName, group, verb
from idemp.cli.exits import ExitCode, NotFound
from idemp.cli.letters import COLUMNS, Filters, row, whole
from idemp.cli.mending import Mending
from idemp.cli.moving import Moved, Mover, Stop, sender
from idemp.cli.screen import plain
from idemp.cli.wiring import configured_app, existing_broker, settings_of
from idemp.deadletter import replayed_headers
from idemp.diagnosis import shell
from idemp.messages import FORCED_HEADER
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from idemp.broker.port import Broker as BrokerPort
    from idemp.broker.port import Refusal, TakenMessages

commands = group("dead", "What was parked in a dead-letter queue, and why.")

_App = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Whose dead letters.")]
_Queue = Annotated[str | None, typer.Option("--queue", help="Those of this queue; its dead letters are in QUEUE.dead.")]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Message ids.")]
_Reason = Annotated[str | None, typer.Option("--reason", metavar="CLASS", help="Only those of this error class.")]
_Error = Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Only those whose error contains this.")]
_When = "a time (2025-01-01T10:30, UTC unless it says more) or a duration ago (2h)"
_Since = Annotated[str | None, typer.Option("--since", metavar="WHEN", help=f"Last failed since: {_When}.")]
_Until = Annotated[str | None, typer.Option("--until", metavar="WHEN", help="Last failed until.")]
_Where = Annotated[
    list[str] | None, typer.Option("--where", metavar="NAME=VALUE", help="Only with this header; may be repeated.")
]
_Most = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the oldest first.")]
_Batch = Annotated[int, typer.Option("--batch", min=1, max=1000, help="So many at once; see the how-to.")]
_All = Annotated[bool, typer.Option("--all", help="All of them.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show which ones.")]

_DONE: Final = {**COLUMNS, "result": "result", "refusal": "refusal"}
_SHOWN: Final = 200
_EVERYTHING: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Place:
    """A queue with its dead letters, on a broker.

    Attributes:
        broker: there.
        queue: the queue itself.
        see: the command that lists its dead letters.
    """

    broker: BrokerPort
    queue: str
    see: str

    @property
    def dead(self) -> str:
        return dead_queue(self.queue)


@verb(commands, "list")
def list_(
    screen: Screen,
    ids: _Ids = None,
    *,
    message_type: TypeName = None,
    reason: _Reason = None,
    error: _Error = None,
    since: _Since = None,
    until: _Until = None,
    where: _Where = None,
    limit: Limit = 50,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """The dead letters, oldest first."""
    place = _place(app, queue, broker)
    filters = Filters.parse(ids, type=message_type, reason=reason, error=error, since=since, until=until, where=where)
    found = place.broker.browse(place.dead, _EVERYTHING if filters.given else limit + 1)
    wanted = [message for message in found if filters.wants(message)]
    there = f"{place.dead} at {place.broker!r}"
    empty = f"{there} holds no such dead letter." if filters.given else f"{there} is empty."
    screen.rows([row(message) for message in wanted[:limit]], COLUMNS, empty=empty)
    screen.more(wanted, limit)


@verb(commands, "show")
def show(
    screen: Screen,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Message id.")],
    *,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """One dead letter: its whole story, and the original with its properties, headers and body."""
    place = _place(app, queue, broker)
    filters = Filters(ids=frozenset({message_id}))
    with place.broker.take(place.dead, None, _EVERYTHING) as taken:
        arrived = getattr(taken, "arrived", None)
        letters = [
            whole(message, arrived[index].properties if arrived is not None else None)
            for index, message in enumerate(taken.messages)
            if filters.wants(message)
        ]
    if not letters:
        raise NotFound(f"{place.dead} holds no message {message_id}.", fix=f"Look with `{place.see}`.")
    lines = [f"{name}: {plain(value)}" for letter in letters for name, value in letter.items() if value is not None]
    screen.result(letters, *lines)


@verb(commands, "replay")
def replay(
    screen: Screen,
    ids: _Ids = None,
    *,
    message_type: TypeName = None,
    reason: _Reason = None,
    error: _Error = None,
    since: _Since = None,
    until: _Until = None,
    where: _Where = None,
    everything: _All = False,
    limit: _Most = None,
    dry_run: _DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Handle them even if they are older than the retention window.")
    ] = False,
    rate: Annotated[float | None, typer.Option("--rate", min=0.01, help="At most so many a second.")] = None,
    batch: _Batch = 1,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """Send dead letters to their queue again, as they were. Each is removed only after the broker's confirm."""
    place = _place(app, queue, broker)
    filters = Filters.parse(ids, type=message_type, reason=reason, error=error, since=since, until=until, where=where)
    _ask_for_which(filters, everything=everything)
    if dry_run:
        _show_only(screen, place, filters, limit, "would be replayed")
        return
    at = datetime.now(UTC)

    def rewrite(headers: Mapping[str, Any]) -> dict[str, Any]:
        forced = {FORCED_HEADER: 1} if force else {}
        return {**replayed_headers(headers, at), **forced}

    publisher = place.broker.publisher()

    def mover(taken: TakenMessages) -> Mover:
        return Mover(taken, sender(publisher, taken, place.queue, rewrite), done="replayed", batch=batch, rate=rate)

    try:
        moved = _move(screen, place, filters, limit, mover, "replaying")
    finally:
        publisher.close()
    _finish(screen, place, moved)


@verb(commands, "discard")
def discard(
    screen: Screen,
    ids: _Ids = None,
    *,
    message_type: TypeName = None,
    reason: _Reason = None,
    error: _Error = None,
    since: _Since = None,
    until: _Until = None,
    where: _Where = None,
    everything: _All = False,
    limit: _Most = None,
    dry_run: _DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    app: _App = None,
    queue: _Queue = None,
    broker: Broker = None,
) -> None:
    """Remove dead letters for good."""
    place = _place(app, queue, broker)
    filters = Filters.parse(ids, type=message_type, reason=reason, error=error, since=since, until=until, where=where)
    _ask_for_which(filters, everything=everything)
    if dry_run:
        _show_only(screen, place, filters, limit, "would be discarded")
        return

    def ask(count: int, total: int) -> None:
        if count and not yes:
            typer.confirm(
                f"Remove {count} of {counted(total, 'dead letter')} of {place.queue} for good?", abort=True, err=True
            )

    def mover(taken: TakenMessages) -> Mover:
        return Mover(taken, _send_nowhere, done="discarded", batch=_DROPPED_AT_ONCE)

    _finish(screen, place, _move(screen, place, filters, limit, mover, "discarding", ask))


_DROPPED_AT_ONCE: Final = 100


def _send_nowhere(indexes: Sequence[int]) -> list[Refusal | None]:
    return [None] * len(indexes)


def _move(
    screen: Screen,
    place: _Place,
    filters: Filters,
    limit: int | None,
    mover: Callable[[TakenMessages], Mover],
    doing: str,
    ask: Callable[[int, int], None] = lambda _count, _total: None,
) -> Moved:
    """Take what is wanted, and let it move; all others stay.

    A broker finds letters by AMQP's message id alone, and a CloudEvent's id stands elsewhere: all are looked at for ids.

    Args:
        screen: for the progress.
        place: where they are.
        filters: which ones.
        limit: at most so many.
        mover: moves what was taken.
        doing: what the progress is called.
        ask: called with how many there are, and of how many, before anything moves; what it raises keeps all.
    """
    total = place.broker.depth(place.dead)
    # With nothing to look for, no more than that many leave the queue for as long as this takes.
    most = _EVERYTHING if filters.given else limit or _EVERYTHING
    with place.broker.take(place.dead, None, most) as taken:
        indexes = [index for index, message in enumerate(taken.messages) if filters.wants(message)][:limit]
        ask(len(indexes), max(total, len(taken.messages)))
        with Stop.on_signals() as stop, screen.progress() as bar:
            task = bar.add_task(doing, total=len(indexes))
            return mover(taken).run(indexes, stop, lambda count: bar.advance(task, count))


def _show_only(screen: Screen, place: _Place, filters: Filters, limit: int | None, result: str) -> None:
    found = place.broker.browse(place.dead, _EVERYTHING if filters.given else limit or _EVERYTHING)
    moved = Moved(result)
    moved.tell([message for message in found if filters.wants(message)][:limit], result)
    _finish(screen, place, moved)


def _finish(screen: Screen, place: _Place, moved: Moved) -> None:
    told = moved.rows
    if not screen.json_mode and len(told) > _SHOWN:
        told = sorted(told, key=lambda item: item["result"] == moved.done)[:_SHOWN]  # what failed first
    screen.rows(told, _DONE, empty=f"No such dead letter in {place.dead}.")
    if len(told) < len(moved.rows):
        screen.say(f"… and {len(moved.rows) - len(told)} more; --json tells all.")
    if moved.rows:
        rest = len(moved.rows) - moved.count(moved.done)
        screen.say(f"{moved.count(moved.done)} {moved.done}" + (f", {rest} not." if rest else "."))
    if moved.lost is not None:
        raise moved.lost
    if moved.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if moved.count(moved.done) < max(1, len(moved.rows)):
        raise typer.Exit(ExitCode.FAILED)


def _place(app: str | None, queue: str | None, broker: str | None) -> _Place:
    if queue is not None and queue.endswith(DEAD_SUFFIX):
        raise typer.BadParameter(f"--queue takes the queue itself: {queue.removesuffix(DEAD_SUFFIX)}")
    where = Mending(app, None, {"broker": broker}).of_broker()
    named = ("--queue", queue) if queue is not None else ()
    if app is not None:
        found = configured_app(app, broker=broker)
        see = shell("idemp", "dead", "list", "--app", app, *named, *where)
        return _Place(existing_broker(found), queue or found.queue, see.text)
    if queue is None:
        raise typer.BadParameter("Say whose dead letters: --app MODULE:APP or --queue.")
    see = shell("idemp", "dead", "list", *named, *where)
    return _Place(existing_broker(settings_of(broker=broker)), queue, see.text)


def _ask_for_which(filters: Filters, *, everything: bool) -> None:
    if not filters.given and not everything:
        raise typer.BadParameter("Say which ones: ids, --type, --reason, --error, --since, --until, --where, or --all.")
