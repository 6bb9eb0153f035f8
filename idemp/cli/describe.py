"""`idemp describe`: the wired pipeline, printed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from idemp.broker.copies import dead_queue
from idemp.broker.guarantees import guarantees_of
from idemp.broker.making import missing_file
from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.entities import described_inbox, told_inbox
from idemp.cli.screen import Paragraph, Rows, shown
from idemp.cli.wiring import configured_app
from idemp.fingerprint import Fingerprint
from idemp.identity import Key
from idemp.plurals import counted
from idemp.policy import Policy, Previous

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.app import App
    from idemp.broker.port import Guarantees
    from idemp.prepared import PreparedMessages
    from idemp.work import Registration

_TYPES: Final = {
    "type": "message type",
    "handler": "handler",
    "idempotent": "idempotent",
    "key": "key",
    "retention": "window",
    "claim": "claim",
    "redispatch": "redispatch",
    "attempts": "attempts",
    "retry_delays": "retried after",
    "replies": "replies",
    "aliases": "aliases",
    "others": "other options",
}
_OWN_COLUMN: Final = frozenset(_TYPES)
_BINDINGS: Final = {"routing_key": "published as", "queue": "reaches queue"}


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "describe")(describe)


def describe(
    screen: Screen,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="What to describe.")],
    *,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Print how an app is wired: queue, message types and policies, effects, prepared messages, bindings, guarantees."""
    found = configured_app(app, database=database, broker=broker, schema=schema, prefix=prefix)
    data = described(found)
    guarantees = data["guarantees"]
    unused = ", ".join(data["unused_policies"])
    screen.result(
        data,
        f"consumer {found.name}, queue {found.queue}, dead letters in {data['dead_letter_queue']}",
        f"database {data['database']}, tables {data['tables']}*" if data["tables"] else f"store {data['database']}",
        *told_inbox(data["inbox"]),
        *(f"database {name} (two-phase commit): {place}" for name, place in data["databases"].items()),
        Paragraph(Text("broker "), f"{data['broker']}: {guarantees['remarks']}"),
        Paragraph(
            Text("  "),
            f"at least once: {_yes(guarantees['at_least_once'])}, confirms: {_yes(guarantees['confirms'])}, "
            f"delays: {guarantees['delays']}, redelivers for up to {guarantees['horizon_seconds']:g} s",
        ),
        "",
        Rows([{**item, "others": _others(item["policy"])} for item in data["types"]], _TYPES),
        *(
            f"effect {each['name']}: {counted(each['max_attempts'], 'attempt')}, {shown(each['timeout'])} each"
            for each in data["effects"]
        ),
        *(Paragraph(Text("prepared messages "), text) for text in _told_prepared(data["prepared"])),
        *([f"policies in the settings that no handler here uses: {unused}"] if unused else []),
        "",
        Rows(data["bindings"], _BINDINGS, f"exchange {data['exchange']}"),
    )


def described(app: App) -> dict[str, Any]:
    """The wiring of an app, with stable field names."""
    settings = app.settings
    app.registry.build(settings.messages)
    topology = app.topology()
    where, tables = _database(app)
    broker, guarantees = _broker(app)
    return {
        "consumer": app.name,
        "queue": app.queue,
        "dead_letter_queue": dead_queue(app.queue),
        "database": where,
        "tables": tables,
        "inbox": described_inbox(app),
        "databases": {
            name: each.place for name, each in (app.coordinator.databases if app.coordinator else {}).items()
        },
        "broker": broker,
        "exchange": topology.exchange,
        "wire": settings.wire,
        "threads": settings.threads,
        "prefetch": settings.prefetch,
        "relay": settings.relay,
        "unused_policies": app.registry.unused(),
        "types": [_type(item, app) for item in app.registry.registrations()],
        "effects": [
            {
                "name": effect.name,
                "takes": effect.codec.cls.__name__,
                "retry": effect.retry,
                "max_attempts": effect.max_attempts,
                "timeout": effect.timeout,
            }
            for effect in app.registry.effects.values()
        ],
        "prepared": _prepared(app.prepared),
        "bindings": [asdict(binding) for binding in topology.bindings],
        "delays_seconds": topology.delays,
        "guarantees": asdict(guarantees),
    }


def _broker(app: App) -> tuple[str, Guarantees]:
    """The broker and what it promises; an embedded one is not made for that."""
    url = app.broker_url or ""
    if (file := missing_file(url)) is not None:
        return f"LocalBroker({str(file)!r}), not made yet", guarantees_of(url)
    return repr(app.broker), app.broker.guarantees


def _prepared(prepared: PreparedMessages | None) -> dict[str, Any] | None:
    if prepared is None:
        return None
    return {
        "home": type(prepared.home).__name__,
        "place": prepared.home.place,
        "barrier": prepared.barrier.place if prepared.barrier is not None else None,
        "checker": _name(prepared.asked) if prepared.asked is not None else None,
        "check_after": prepared.check_after,
        "max_checks": prepared.max_checks,
    }


def _told_prepared(data: dict[str, Any] | None) -> list[str]:
    if data is None:
        return []
    decided = f"barrier in {data['barrier']}" if data["barrier"] else f"checker {data['checker'] or 'none'}"
    checks = f"checked after {shown(data['check_after'])}, {counted(data['max_checks'], 'time')} at most"
    return [f"in {data['home']} {data['place']}, {decided}, {checks}"]


def _database(app: App) -> tuple[str, str]:
    """URL and the beginning of the tables' names, of streams likewise; of another kind of store, its class."""
    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.engine import shown

    store = getattr(app.store, "beside", app.store)
    if not isinstance(store, SqlStore):
        return type(app.store).__name__, ""
    tables = store.configured_tables
    return shown(store.engine), (f"{tables.schema}." if tables.schema else "") + tables.prefix


def _type(item: Registration, app: App) -> dict[str, Any]:
    policy = item.policy
    function = app.registry.declared[item.message_type].function
    opted_in = policy.idempotent
    return {
        "type": item.message_type,
        "aliases": item.aliases,
        "handler": _name(function),
        "idempotent": opted_in,
        "key": policy.key.name if opted_in else None,
        "retention": policy.retention if opted_in else None,
        "claim": policy.claim if opted_in else None,
        "redispatch": policy.redispatch if opted_in else None,
        "fingerprint": policy.fingerprint.mode if opted_in else None,
        "on_conflict": policy.on_conflict if opted_in else None,
        "late": policy.late if opted_in else None,
        "attempts": policy.attempts,
        "retry_delays": policy.retry_delays,
        "replies": item.replies,
        "policy": {name: _option(getattr(policy, name)) for name in Policy.model_fields},
    }


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _others(policy: dict[str, Any]) -> str:
    """The options that are not the default and have no column, as they are written in a file."""
    default = {name: _option(getattr(Policy(), name)) for name in Policy.model_fields}
    return ", ".join(
        f"{name} = {shown(value)}"
        for name, value in policy.items()
        if name not in _OWN_COLUMN and value != default[name]
    )


def _option(value: Any) -> Any:
    """An option's value as people name it; durations stay what they are."""
    match value:
        case Key():
            return value.name
        case Fingerprint():
            return f"{value.mode}: {', '.join(value.names)}" if value.names else value.mode
        case Previous():
            said = {name: _option(getattr(value, name)) for name in sorted(value.model_fields_set)}
            return ", ".join(f"{name} {option}" for name, option in said.items())
        case type():
            return value.__qualname__ if value.__module__ == "builtins" else f"{value.__module__}.{value.__qualname__}"
        case tuple():
            return tuple(_option(each) for each in value)
    return value


def _yes(value: bool) -> str:
    return "yes" if value else "no"
