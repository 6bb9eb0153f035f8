"""`idemp inbox`: what became of messages, and their stored outputs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from idemp.cli.command import (
    Broker,
    Consumer,
    Database,
    Limit,
    Prefix,
    Schema,
    Screen,
    TypeName,
    group,
    verb,
    window_of,
)
from idemp.cli.databases import unfinished_in
from idemp.cli.exits import ExitCode, NotFound
from idemp.cli.screen import plain, shown, table
from idemp.cli.wiring import configured_app, open_broker, open_store, settings_of
from idemp.errors import ConfigurationError, StoreUnavailable
from idemp.inbox.port import HORIZON_SLACK
from idemp.messages import OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.queries import Story

commands = group("inbox", "What became of messages, and their stored outputs.")

_Id = Annotated[str, typer.Argument(metavar="ID", help="Message id, a body key such as 42 or type#42, or the key.")]

_CLAIMS: Final = {
    "original_id": "id",
    "message_type": "type",
    "consumer": "consumer",
    "claimed_at": "claimed at",
    "worker": "by",
}
_PENDING: Final = {
    "original_id": "id of the input",
    "consumer": "consumer",
    "output_id": "output",
    "destination": "to",
    "attempts": "attempts",
    "due_at": "due at",
    "quarantined_at": "quarantined at",
    "reason": "reason",
}
_OUTPUTS: Final = {"id": "output", "message_type": "type", "destination": "to", "state": "state", "size": "bytes"}
_REDISPATCHED: Final = {"id": "output", "destination": "to", "confirmed": "confirmed", "refusal": "refusal"}
_CONFIRM_SECONDS: Final = 20.0
_MANY: Final = 100_000
_PURGE_BATCH: Final = 1_000


@verb(commands, "list")
def list_(
    screen: Screen,
    *,
    pending: Annotated[bool, typer.Option("--pending", help="Outputs without a confirm, instead of claims.")] = False,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Of these, only those given up.")] = False,
    consumer: Consumer = None,
    message_type: TypeName = None,
    limit: Limit = 50,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """The newest claims, or the outputs that still wait for the broker's confirm."""
    from idemp.cli import stored

    queries = stored.queries(_store(database, schema, prefix, reading=True))
    if pending or quarantined:
        found = queries.list_pending(
            consumer, quarantined_only=quarantined, limit=limit + 1 if message_type is None else _MANY
        )
        waiting = [row for row in found if message_type in {None, row.message_type}]
        rows = [_without_far_future(asdict(row)) for row in waiting[:limit]]
        screen.rows(rows, _PENDING, empty="No output is pending.")
        screen.more(waiting, limit)
    else:
        claims = queries.list_inbox(consumer, message_type, limit=limit)
        screen.rows([asdict(row) for row in claims], _CLAIMS, empty="The inbox has no such claim.")


@verb(commands, "show")
def show(
    screen: Screen,
    message_id: _Id,
    *,
    consumer: Consumer = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """One message's claim, and the stored outputs with their bodies."""
    from idemp.cli import stored

    store = _store(database, schema, prefix, reading=True)
    results = []
    for story in _stories(store, message_id, consumer):
        outputs = stored.outputs(store, story)
        bodies = {output.id: output for output in outputs}
        details = [
            {
                **_without_far_future(asdict(item)),
                "headers": dict(bodies[item.id].message.headers),
                "body": bodies[item.id].message.body,
            }
            for item in story.outputs
        ]
        results.append({**asdict(story.claim), "outputs": details})
    screen.result(results, *(line for result in results for line in _shown(result)))


@verb(commands, "explain")
def explain(
    screen: Screen,
    message_id: _Id,
    *,
    consumer: Consumer = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """One message's story: claimed when and by whom, what it produced, what was confirmed when, how often it came."""
    from idemp.cli import stored

    store = _store(database, schema, prefix, reading=True)
    stories = _stories(store, message_id, consumer)
    unfinished = [unfinished_in(store, story) for story in stories]
    screen.result(
        [{**stored.explained(story), "unfinished_in": names} for story, names in zip(stories, unfinished, strict=True)],
        *(line for story, names in zip(stories, unfinished, strict=True) for line in (*_told(story), *_left(names))),
    )


@verb(commands, "redispatch")
def redispatch(
    screen: Screen,
    message_id: _Id,
    *,
    consumer: Consumer = None,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Send a message's stored outputs again, quarantined ones included, and wait for the confirm of each.

    Effects in quarantine are given back to the workers of their consumer; those that were done are not run again.
    """
    from idemp.cli import stored

    settings = settings_of(database=database, broker=broker, schema=schema, prefix=prefix)
    store = open_store(settings)
    stories = _stories(store, message_id, consumer)
    publisher = open_broker(settings).publisher()
    try:
        sent = stored.redispatch(store, publisher, stories, _CONFIRM_SECONDS)
    finally:
        publisher.close()
    screen.rows(sent, _REDISPATCHED, empty="It produced no outputs.")
    if any(row["confirmed"] is False for row in sent):
        raise typer.Exit(ExitCode.FAILED)


@verb(commands, "release")
def release(
    screen: Screen,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    consumer: Consumer = None,
    message_type: TypeName = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Give quarantined outputs back to the relay, and effects to the workers, once what they missed is there."""
    from idemp.cli import stored

    if not everything and consumer is None and message_type is None:
        raise typer.BadParameter("Say which ones: --consumer, --type, or --all.")
    store = _store(database, schema, prefix)
    found = stored.queries(store).list_pending(consumer, quarantined_only=True, limit=_MANY)
    released = store.upkeep.release_quarantined(
        [row.output_id for row in found if message_type in {None, row.message_type}]
    )
    alive = store.upkeep.relay_alive()
    hint = "" if alive or not released else " No relay is alive: run `idemp relay`."
    text = f"{released} outputs were given back: messages to the relay, effects to the workers.{hint}"
    screen.result({"released": released, "relay_alive": alive}, text)


@verb(commands, "purge")
def purge(
    screen: Screen,
    app: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="By the windows of its policies.")] = None,
    *,
    consumer: Consumer = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Window for types without a policy here, such as 30d.")
    ] = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Delete expired claims now, in batches; workers do it by themselves. Claims with pending outputs stay."""
    windows: dict[str, timedelta] = {}
    options = {"database": database, "schema": schema, "prefix": prefix}
    if app is not None:
        found = configured_app(app, **options)
        found.registry.build(found.settings.messages)
        name, upkeep, windows = found.name, found.store.upkeep, found.retentions()
        found.store.verify()
        settings = found.settings
    elif consumer is not None and older_than is not None:
        store = _store(database, schema, prefix)
        name, upkeep, settings = consumer, store.upkeep, settings_of(**options)
    else:
        raise typer.BadParameter("Say whose claims: MODULE:APP, or --consumer with --older-than.")
    if not settings.purge:
        raise ConfigurationError(
            "The settings leave expired claims to the archive (purge = false); nothing was deleted.",
            fix="Run `idemp pipeline archive`, or with IDEMP_PURGE=true delete them without archiving them.",
        )
    # As the worker's own cleaner does it: see HORIZON_SLACK.
    windows = {kind: window + HORIZON_SLACK for kind, window in windows.items()}
    older = window_of(older_than)
    others = older + HORIZON_SLACK if older is not None else max(windows.values(), default=None)
    deleted = 0
    with screen.progress() as bar:
        task = bar.add_task("claims", total=None)
        while gone := upkeep.purge(name, windows, _PURGE_BATCH, others=others):
            deleted += gone
            bar.update(task, completed=deleted)
    screen.result({"consumer": name, "deleted": deleted}, f"{deleted} expired claims of {name} were deleted.")


@verb(commands, "erase")
def erase(
    screen: Screen,
    message_id: _Id,
    *,
    consumer: Consumer = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Drop the bytes of a message's stored outputs, and keep its key: a redelivery is still a duplicate."""
    from idemp.cli import stored

    store = _store(database, schema, prefix)
    found = _stories(store, message_id, consumer)
    stored.check_all_done(found)
    numbers = [len(story.outputs) for story in found]
    erased = _taken_away("Erase {} outputs", found, numbers, stored.erasing(store).erase, ask=not yes)
    screen.rows(erased, {"original_id": "id", "consumer": "consumer", "outputs": "outputs erased"})


@verb(commands, "discard")
def discard(
    screen: Screen,
    message_id: _Id,
    *,
    consumer: Consumer = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Give up a message's quarantined outputs for good: no relay sends them, no worker runs them. Its story tells."""
    from idemp.cli import stored

    store = _store(database, schema, prefix)
    found = _stories(store, message_id, consumer)
    numbers = [sum(output.state == "quarantined" for output in story.outputs) for story in found]
    discarded = _taken_away(
        "Discard {} quarantined outputs", found, numbers, stored.erasing(store).discard, ask=not yes
    )
    screen.rows(discarded, {"original_id": "id", "consumer": "consumer", "outputs": "outputs discarded"})


def _taken_away(
    what: str, found: list[Story], numbers: list[int], take: Callable[[str, UUID], int], *, ask: bool
) -> list[dict[str, Any]]:
    """Ask about each message, if it has any such outputs; then take them away, a row for each message."""
    for story, number in zip(found, numbers, strict=True):
        if ask and number:
            claim = story.claim
            typer.confirm(f"{what.format(number)} of {claim.original_id} at {claim.consumer}?", abort=True, err=True)
    return [
        {
            "consumer": story.claim.consumer,
            "original_id": story.claim.original_id,
            "outputs": take(story.claim.consumer, story.claim.key),
        }
        for story in found
    ]


def _store(
    database: str | None = None, schema: str | None = None, prefix: str | None = None, *, reading: bool = False
) -> SqlStore:
    from idemp.inbox.sql.engine import give_up_on_locks

    store = open_store(settings_of(database=database, schema=schema, prefix=prefix))
    give_up_on_locks(store.engine)
    try:
        store.verify()
    except StoreUnavailable as error:
        if not (reading and error.refuses_writes):  # then it tells what it has all the same
            raise
    return store


def _stories(store: SqlStore, message_id: str, consumer: str | None) -> list[Story]:
    from idemp.cli import stored

    found = stored.stories(store, message_id, consumer)
    if not found:
        where = f"consumer {consumer!r}" if consumer else "any consumer"
        raise NotFound(
            f"Nothing is known of {message_id!r} at {where}: it was never handled, its handling rolled back, "
            "its window is over, or it is known by a key in its body, as TYPE#KEY.",
            fix="Look with `idemp inbox list`, and at the dead letters with `idemp dead list --app MODULE:APP`.",
        )
    return found


def _without_far_future(row: dict[str, Any]) -> dict[str, Any]:
    """An output that was given up is never due; the table keeps it behind all others by a far date."""
    given_up = row.get("quarantined_at") is not None or row.get("state") == "quarantined"
    return {**row, "due_at": None} if given_up else row


def _shown(result: dict[str, Any]) -> list[Any]:
    head = f"{result['original_id']} ({result['message_type']}) at {result['consumer']}, key {result['key']}"
    lines: list[Any] = [head, f"claimed {shown(result['claimed_at'])} by {result['worker']}"]
    if not result["outputs"]:
        return [*lines, "no outputs"]
    lines.append(table(result["outputs"], _OUTPUTS))
    for output in result["outputs"]:
        body = "(erased)" if output["erased"] else plain(output["body"])
        lines.append(f"{output['id']}: {body}")
    return lines


def _told(story: Story) -> list[str]:
    claim = story.claim
    who = claim.worker or "an unknown worker"
    lines = [
        f"{claim.original_id} ({claim.message_type}) at consumer {claim.consumer}",
        f"  {shown(claim.claimed_at)}  claimed and committed by {who}, with {len(story.outputs)} outputs",
    ]
    lines += [f"    {output.ordinal}. {_output_line(output)}" for output in story.outputs]
    for entry in story.history:
        parts = [f"{entry.confirmed} confirms"] if entry.confirmed else []
        parts += [f"{entry.redelivered} redeliveries skipped"] if entry.redelivered else []
        lines.append(f"  {shown(entry.at)}  {' and '.join(parts)}, recorded by {entry.worker or 'an unknown worker'}")
    times = sum(entry.redelivered for entry in story.history)
    lines.append(f"  It was redelivered {times} times, and its handler's work was committed once.")
    return lines


def _left(names: list[str]) -> list[str]:
    told = (
        f"  Its part in {', '.join(names)} is not known to be committed yet: `idemp recover MODULE:APP` completes it, "
        "or says why not."
    )
    return [told] if names else []


def _output_line(output: Any) -> str:
    if output.kind == OutputKind.EFFECT:
        state = "done" if output.state == "confirmed" else output.state
        text = f"effect {output.destination} as {output.id}: {state}"
    else:
        text = f"{output.kind} {output.message_type or ''} to {output.destination} as {output.id}: {output.state}"
    if output.erased:
        text += ", erased"
    if output.state == "pending":
        text += f", due {shown(output.due_at)} after {output.attempts} attempts"
    return text + (f" ({output.reason})" if output.reason else "")
