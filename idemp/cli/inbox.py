"""`idemp inbox`: what became of messages, and their stored outputs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer
from rich.text import Text

from idemp.cli import entities
from idemp.cli.command import (
    Broker,
    BrokerName,
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
from idemp.cli.parked import Parked
from idemp.cli.screen import Paragraph, Rows, plain, shown
from idemp.cli.wiring import configured_app, existing_broker, open_store, settings_of
from idemp.errors import ConfigurationError
from idemp.inbox.port import HORIZON_SLACK
from idemp.messages import OutputKind
from idemp.plurals import counted
from idemp.settings import Settings
from idemp.startup import agree_broker

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from idemp.app import App
    from idemp.inbox.located import Located
    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.queries import Story

commands = group("inbox", "What became of messages, and their stored outputs.")

_Id = Annotated[str, typer.Argument(metavar="ID", help="Message id, a body key such as 42 or type#42, or the key.")]

_App = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Whose database and broker.")]

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
_INDENT: Final = Text("  ")
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
        if message_type is not None and len(found) == _MANY:
            screen.note(f"… and perhaps there are more: only {_MANY} pending outputs were looked at.", more=True)
    else:
        claims = queries.list_inbox(consumer, message_type, limit=limit + 1)
        names = [(row.consumer, row.original_id) for row in claims[:limit]]
        columns = _CLAIMS if len(set(names)) == len(names) else {**_CLAIMS, "key": "key"}  # ids that are written alike
        screen.rows([asdict(row) for row in claims[:limit]], columns, empty="The inbox has no such claim.")
        screen.more(claims, limit)


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
    app: Annotated[
        str | None, typer.Option("--app", metavar="MODULE:APP", help="Ask this app's inbox; needed for documents.")
    ] = None,
    consumer: Consumer = None,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """One message's story: claimed when and by whom, what it produced, what was confirmed when, how often it came.

    Copies of it that were parked are shown, too, if the broker can be asked.

    Reads tables and event streams of a database, and with --app an app's documents. A message without outputs is looked for
    in all documents.
    """
    from idemp.cli import stored

    located: list[Located] = []
    whose: App | Settings
    store: Any = None
    if app is not None:
        found = configured_app(app, database=database, broker=broker, schema=schema, prefix=prefix)
        whose, queues = found, [found.queue]
        if found.store.per_entity:
            found.store.verify()
            found.registry.build(found.settings.messages)
            types = [name for item in found.registry.registrations() for name in (item.message_type, *item.aliases)]
            located = entities.located(found.store, message_id, [consumer] if consumer else found.consumers(), types)
        else:
            store = _verified(found, reading=True)
    else:
        store = _store(database, schema, prefix, reading=True)
        located = entities.located_in(store, message_id, consumer)
        whose, queues = settings_of(broker=broker), stored.queues_of(store, consumer)
    stories = stored.stories(store, message_id, consumer) if store is not None else []
    ids = {message_id, *(story.claim.original_id for story in stories)}
    parked = Parked.of(whose, queues, ids | {each.handling.claim.id.text for each in located})
    if not stories and not located and not parked.letters:
        raise _unknown(message_id, consumer)
    unfinished = [unfinished_in(store, story) for story in stories]
    screen.result(
        parked.beside(
            [
                *(
                    {**stored.explained(story), "unfinished_in": names}
                    for story, names in zip(stories, unfinished, strict=True)
                ),
                *map(entities.explained, located),
            ]
        ),
        *(line for story, names in zip(stories, unfinished, strict=True) for line in (*_told(story), *_left(names))),
        *(line for each in located for line in entities.told(each)),
        *parked.lines(app, broker),
    )


@verb(commands, "redispatch")
def redispatch(
    screen: Screen,
    message_id: _Id,
    *,
    app: _App = None,
    consumer: Consumer = None,
    database: Database = None,
    broker: Broker = None,
    broker_name: BrokerName = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Send a message's stored outputs again, quarantined ones included, and wait for the confirm of each.

    Effects in quarantine are given back to the workers of their consumer; those that were done are not run again.
    """
    from idemp.cli import stored

    options = {"database": database, "broker": broker, "broker_name": broker_name, "schema": schema, "prefix": prefix}
    found = configured_app(app, **options) if app is not None else settings_of(**options)
    store = _verified(found)
    stories = _one_at_each(_stories(store, message_id, consumer), message_id)
    sending_to = existing_broker(found)
    agree_broker(store, sending_to)
    stored.check_broker(store, stories)
    publisher = sending_to.publisher()
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
    app: _App = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Give quarantined outputs back to the relay, and effects to the workers, once what they missed is there."""
    from idemp.cli import stored

    if not everything and consumer is None and message_type is None:
        raise typer.BadParameter("Say which ones: --consumer, --type, or --all.")
    store = _store(database, schema, prefix, app=app)
    found = stored.queries(store).list_pending(consumer, quarantined_only=True, limit=_MANY)
    released = store.upkeep.release_quarantined(
        [row.output_id for row in found if message_type in {None, row.message_type}]
    )
    alive = store.upkeep.relay_alive()
    unserved = sorted(stored.unserved(store)) if released else []
    hint = (
        f" No relay is alive for the broker {' and '.join(unserved)}: run `idemp relay MODULE:APP`." if unserved else ""
    )
    if len(found) == _MANY:
        screen.note("… and there are more: run it again.", more=True, limit=_MANY)
    text = f"Gave {counted(released, 'output')} back: messages to the relay, effects to the workers.{hint}"
    screen.result({"released": released, "relay_alive": alive, "brokers_without_relay": unserved}, text)


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
    screen.result({"consumer": name, "deleted": deleted}, f"Deleted {counted(deleted, 'expired claim')} of {name}.")


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
    found = _one_at_each(_stories(store, message_id, consumer), message_id)
    stored.check_all_done(found)
    numbers = [len(story.outputs) for story in found]
    erased = _taken_away("Erase", "output", found, numbers, stored.erasing(store).erase, ask=not yes)
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
    found = _one_at_each(_stories(store, message_id, consumer), message_id)
    numbers = [sum(output.state == "quarantined" for output in story.outputs) for story in found]
    discarded = _taken_away("Discard", "quarantined output", found, numbers, stored.erasing(store).discard, ask=not yes)
    screen.rows(discarded, {"original_id": "id", "consumer": "consumer", "outputs": "outputs discarded"})


def _taken_away(
    verb: str, noun: str, found: list[Story], numbers: list[int], take: Callable[[str, UUID], int], *, ask: bool
) -> list[dict[str, Any]]:
    """Ask about each message, if it has any such outputs; then take them away, a row for each message."""
    for story, number in zip(found, numbers, strict=True):
        if ask and number:
            claim = story.claim
            typer.confirm(
                f"{verb} {counted(number, noun)} of {claim.original_id} at {claim.consumer}?", abort=True, err=True
            )
    return [
        {
            "consumer": story.claim.consumer,
            "original_id": story.claim.original_id,
            "outputs": take(story.claim.consumer, story.claim.key),
        }
        for story in found
    ]


def _sql_store(found: App | Settings) -> SqlStore:
    """The inbox of an app or of settings.

    Raises:
        ConfigurationError: the app's inbox is not in SQL.
    """
    if isinstance(found, Settings):
        return open_store(found)
    store: Any = getattr(found.store, "beside", found.store)  # streams in a database have their inbox there, too
    if not hasattr(store, "engine"):
        raise ConfigurationError(f"The inbox of {found.name!r} is a {type(store).__name__}, not a SQL database.")
    return cast("SqlStore", store)


def _store(
    database: str | None = None,
    schema: str | None = None,
    prefix: str | None = None,
    *,
    app: str | None = None,
    reading: bool = False,
) -> SqlStore:
    options = {"database": database, "schema": schema, "prefix": prefix}
    found = configured_app(app, **options) if app is not None else settings_of(**options)
    return _verified(found, reading=reading)


def _verified(found: App | Settings, *, reading: bool = False) -> SqlStore:
    """The inbox of an app or of settings, once its tables are known to be there.

    Args:
        found: whose inbox.
        reading: whether a database that takes no writes, or a user who may only read, will do.

    Raises:
        ConfigurationError: the app's inbox is not in SQL, or it has no tables; no file was made.
        StoreUnavailable: the database can't be reached, or takes no writes.
    """
    from idemp.inbox.sql.engine import give_up_on_locks

    store = _sql_store(found)
    give_up_on_locks(store.engine)
    store.verify(writes=not reading)
    return store


def _stories(store: SqlStore, message_id: str, consumer: str | None) -> list[Story]:
    from idemp.cli import stored

    found = stored.stories(store, message_id, consumer)
    if not found:
        raise _unknown(message_id, consumer)
    return found


def _one_at_each(found: list[Story], message_id: str) -> list[Story]:
    """Return the stories if an id stands for one message at each consumer; former ids of that message count as the same.

    Raises:
        ConfigurationError: it stands for several with outputs.
    """
    messages: dict[str, dict[frozenset[UUID], Story]] = {}
    for story in found:
        if story.outputs:
            outputs = frozenset(output.id for output in story.outputs)
            messages.setdefault(story.claim.consumer, {}).setdefault(outputs, story)
    for consumer, stories in messages.items():
        if len(stories) > 1:
            keys = ", ".join(f"{each.claim.key} ({each.claim.message_type})" for each in stories.values())
            raise ConfigurationError(
                f"{message_id!r} stands for {counted(len(stories), 'message')} of {consumer}: {keys}. Nothing was changed.",
                fix="Say the key of the one that is meant; `idemp inbox show KEY` shows its outputs.",
            )
    return found


def _unknown(message_id: str, consumer: str | None) -> NotFound:
    where = f"consumer {consumer!r}" if consumer else "any consumer"
    return NotFound(
        f"Nothing is known of {message_id!r} at {where}: it was never handled, its handling rolled back, "
        "its window is over, or it is known by a key in its body, as TYPE#KEY.",
        fix="Look with `idemp inbox list`, and at the dead letters with `idemp dead list --app MODULE:APP`.",
    )


def _without_far_future(row: dict[str, Any]) -> dict[str, Any]:
    """An output that was given up is never due; the table keeps it behind all others by a far date."""
    given_up = row.get("quarantined_at") is not None or row.get("state") == "quarantined"
    return {**row, "due_at": None} if given_up else row


def _shown(result: dict[str, Any]) -> list[Any]:
    head = f"{result['original_id']} ({result['message_type']}) at {result['consumer']}, key {result['key']}"
    lines: list[Any] = [head, f"claimed {shown(result['claimed_at'])} by {result['worker']}"]
    if not result["outputs"]:
        return [*lines, "no outputs"]
    lines.append(Rows(result["outputs"], _OUTPUTS))
    for output in result["outputs"]:
        body = "(erased)" if output["erased"] else plain(output["body"])
        lines.append(f"{output['id']}: {body}")
    return lines


def _told(story: Story) -> list[Paragraph]:
    claim = story.claim
    who = claim.worker or "an unknown worker"
    number = counted(len(story.outputs), "output")
    lines = [
        Paragraph(Text(), f"{claim.original_id} ({claim.message_type}) at consumer {claim.consumer}"),
        _at(claim.claimed_at, f"claimed and committed by {who}, with {number}"),
    ]
    lines += [Paragraph(Text(f"    {output.ordinal}. "), _output_line(output)) for output in story.outputs]
    for entry in story.history:
        parts = [counted(entry.confirmed, "confirm")] if entry.confirmed else []
        parts += [f"{counted(entry.redelivered, 'redelivery', 'redeliveries')} skipped"] if entry.redelivered else []
        lines.append(_at(entry.at, f"{' and '.join(parts)}, recorded by {entry.worker or 'an unknown worker'}"))
    times = counted(sum(entry.redelivered for entry in story.history), "time")
    return [*lines, Paragraph(_INDENT, f"It was redelivered {times}, and its handler's work was committed once.")]


def _left(names: list[str]) -> list[Paragraph]:
    told = (
        f"Its part in {', '.join(names)} is not known to be committed yet: `idemp recover MODULE:APP` completes it, "
        "or says why not."
    )
    return [Paragraph(_INDENT, told)] if names else []


def _at(when: datetime, text: str) -> Paragraph:
    return Paragraph(Text(f"  {shown(when)}  "), text)


def _output_line(output: Any) -> str:
    if output.kind == OutputKind.EFFECT:
        state = "done" if output.state == "confirmed" else output.state
        text = f"effect {output.destination} as {output.id}: {state}"
    else:
        text = f"{output.kind} {output.message_type or ''} to {output.destination} as {output.id}: {output.state}"
    if output.erased:
        text += ", erased"
    if output.state == "pending":
        tried = f"after {counted(output.attempts, 'attempt')}" if output.attempts else "no attempt recorded yet"
        text += f", due {shown(output.due_at)}, {tried}"
    return text + (f" ({output.reason})" if output.reason else "")
