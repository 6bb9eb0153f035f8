"""`idemp prepared`: messages that wait for the fate of their producer's local work."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from idemp.cli.command import Broker, Database, Limit, Prefix, Schema, Screen, group, verb
from idemp.cli.exits import ExitCode, NotFound
from idemp.cli.screen import plain
from idemp.cli.wiring import configured_app
from idemp.errors import ConfigurationError, InvalidId, StoreUnavailable
from idemp.prepared.port import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.prepared import PreparedMessages, Record

commands = group("prepared", "Messages that wait for the fate of their producer's local work.")

_App = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Whose prepared messages.")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The message's id, or its producer's key.")]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids, or keys.")]
_State = Annotated[State | None, typer.Option("--state", help="Only these; otherwise all that are not final.")]
_All = Annotated[bool, typer.Option("--all", help="All of them.")]
_Reason = Annotated[str, typer.Option("--reason", help="Why, for people.")]

_COLUMNS: Final = {
    "id": "id",
    "state": "state",
    "key": "key",
    "type": "type",
    "destination": "to",
    "prepared_at": "prepared at",
    "due_at": "due at",
    "checks": "checks",
    "attempts": "attempts",
    "reason": "reason",
}
_EVERYTHING: Final = 100_000
_AT_ONCE: Final = 1000


@verb(commands, "list")
def list_(
    screen: Screen,
    app: _App,
    *,
    state: _State = None,
    limit: Limit = 50,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Those that wait, are committed and not confirmed, or parked; the oldest first."""
    home = _prepared(app, reading=True, database=database, broker=broker, schema=schema, prefix=prefix).home
    found = home.browse(state, limit + 1)
    screen.rows([_row(record) for record in found[:limit]], _COLUMNS, empty="No such message is prepared.")
    screen.more(found, limit)


@verb(commands, "show")
def show(
    screen: Screen,
    app: _App,
    id: _Id,
    *,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """One of them, with its properties, headers and body."""
    messages = _prepared(app, reading=True, database=database, broker=broker, schema=schema, prefix=prefix)
    record = _found(messages, id)
    message = record.prepared.message
    whole = {**_row(record), "headers": dict(message.headers), "body": message.body}
    screen.result(whole, *(f"{name}: {plain(value)}" for name, value in whole.items() if value is not None))


@verb(commands, "resume")
def resume(
    screen: Screen,
    app: _App,
    ids: _Ids = None,
    *,
    everything: _All = False,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Have parked messages checked again, with a new count of checks."""
    if not ids and not everything:
        raise typer.BadParameter("Say which ones: ids, keys, or --all.")
    messages = _prepared(app, database=database, broker=broker, schema=schema, prefix=prefix)
    records = (
        messages.home.browse(State.PARKED, _EVERYTHING) if everything else [_found(messages, id_) for id_ in ids or ()]
    )
    if len(records) == _EVERYTHING:
        screen.note("… and there are more: run it again.", more=True, limit=_EVERYTHING)
    told = [{**_row(record), "resumed": messages.home.resume(record.prepared.id)} for record in records]
    screen.rows(told, {"id": "id", "key": "key", "type": "type", "resumed": "resumed"}, empty="None is parked.")
    if not all(row["resumed"] for row in told):
        raise typer.Exit(ExitCode.FAILED)


@verb(commands, "park")
def park(
    screen: Screen,
    app: _App,
    id: _Id,
    *,
    reason: _Reason = "by hand",
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Set one that is undecided aside: it is neither checked nor published until it is resumed, or its producer decides."""
    messages = _prepared(app, database=database, broker=broker, schema=schema, prefix=prefix)
    record = _found(messages, id)
    parked = messages.home.park(record.prepared, reason)
    told = "is parked" if parked else f"is {record.state.value} and was left as it is"
    screen.result({"id": record.prepared.id, "parked": parked}, f"{record.prepared.id} {told}.")
    if not parked:
        raise typer.Exit(ExitCode.FAILED)


@verb(commands, "check")
def check(
    screen: Screen,
    app: _App,
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=_AT_ONCE, help="At most so many.")] = _AT_ONCE,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """One round of the checker now, as a worker of the app runs them: decide what is due, publish what is committed.

    What was decided and published for longer than the retention is forgotten, too.
    """
    messages = _prepared(app, database=database, broker=broker, schema=schema, prefix=prefix)
    try:
        messages.verify()
        done = {**asdict(messages.run_once(limit)), "forgotten": 0}
        gone = 0 if done["unasked"] else messages.purge(_AT_ONCE)
        done["forgotten"] += gone
        while gone == _AT_ONCE:
            gone = messages.purge(_AT_ONCE)
            done["forgotten"] += gone
    finally:
        messages.close()
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in done.items() if count)
    screen.result(done, f"{told}." if told else "Nothing was due.")
    if done["parked"] or done["unasked"] or done["refused"]:
        raise typer.Exit(ExitCode.FAILED)


def _prepared(where: str, *, reading: bool = False, **options: Any) -> PreparedMessages:
    """The prepared messages of an app, once their tables or queues are known to be there.

    Raises:
        ConfigurationError: the app prepares none, or the tables are missing.
        StoreUnavailable: the database can't be reached, or takes no writes and not only reading was asked for.
    """
    app = configured_app(where, **options)
    if app.prepared is None:
        raise ConfigurationError(
            f"{where} prepares no messages.", fix="Its module has to make a PreparedMessages(app, home, …)."
        )
    if not app.prepared.home.decides:
        app.prepared.ready()  # a broker's queues have to be found
        return app.prepared
    try:
        app.prepared.home.verify()
    except StoreUnavailable as error:
        if not (reading and error.refuses_writes):
            raise
    return app.prepared


def _found(messages: PreparedMessages, text: str) -> Record:
    for id_ in _ids_of(messages, text):
        record = messages.home.find(id_)
        if record is not None:
            return record
    raise NotFound(f"No message {text!r} is prepared.", fix="What was decided long ago is forgotten.")


def _ids_of(messages: PreparedMessages, text: str) -> Iterator[UUID]:
    with suppress(ValueError):
        yield UUID(text)
    with suppress(InvalidId):  # what can't be a key is nobody's
        yield messages.id_of(text)


def _row(record: Record) -> dict[str, Any]:
    prepared = record.prepared
    output = prepared.output
    return {
        "id": prepared.id,
        "state": record.state.value,
        "key": prepared.key,
        "type": prepared.message.type,
        "destination": f"{output.exchange}/{output.routing_key}" if output.exchange else output.routing_key,
        "prepared_at": record.prepared_at,
        "due_at": record.due_at,
        "checks": record.checks,
        "attempts": record.attempts,
        "reason": record.reason,
    }
