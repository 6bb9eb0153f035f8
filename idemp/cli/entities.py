"""What `idemp doctor`, `describe` and `inbox explain` show of stores that keep claims with entities: streams, documents."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from idemp.cli.keys import candidate_keys
from idemp.cli.screen import shown
from idemp.errors import StoreError
from idemp.inbox.resending import unconfirmed
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from idemp.app import App
    from idemp.cli.doctor import Report
    from idemp.clock import Clock
    from idemp.inbox.located import Located
    from idemp.inbox.sql import SqlStore


def look_at_entities(report: Report, store: Any, clock: Clock, *, named: bool) -> None:
    """Outputs of streams or documents whose confirm is not recorded; attempts and sizes of documents.

    Args:
        report: gets the lines.
        store: an app's, or the tables in a database.
        clock: source of time, unless the store has one.
        named: an app names the store. In a database without an app, streams are looked at if they can be read.
    """
    if hasattr(store, "diagnose"):
        with report.check("documents"):
            report.checks += store.diagnose()
    streams, clock = getattr(store, "streams", None), getattr(store, "clock", clock)
    if streams is None and not named and hasattr(store, "engine"):
        from idemp.inbox.sql import SqlStreams

        with suppress(StoreError):
            found = SqlStreams(store.engine, tables=store.tables, clock=clock).pending()
            if found.count:
                report.checks.append(unconfirmed(found.count, clock.now() - found.since if found.since else None))
    elif streams is not None and report.inbox_answers:
        with report.check("streams"):
            streams.verify()
            report.add("ok", "streams", type(streams).__name__)
            found = streams.pending()
            report.checks.append(unconfirmed(found.count, clock.now() - found.since if found.since else None))


def described_inbox(app: App) -> dict[str, Any]:
    """Which kind of inbox an app has, and where."""
    store: Any = app.store
    if hasattr(store, "streams"):
        return {"kind": "streams", "place": repr(store.streams), "beside": type(store.beside).__name__}
    if hasattr(store, "states"):
        return {"kind": "documents", "place": repr(store.states), "beside": repr(store.own)}
    return {"kind": "tables" if hasattr(store, "tables") else type(store).__name__, "place": "", "beside": ""}


def told_inbox(inbox: dict[str, Any]) -> list[str]:
    """The same in a line; none about tables."""
    if inbox["kind"] == "streams":
        return [f"inbox: event streams in {inbox['place']}; what is no handling is in a {inbox['beside']}"]
    if inbox["kind"] == "documents":
        own = "the same collection" if inbox["beside"] == inbox["place"] else inbox["beside"]
        return [f"inbox: documents in {inbox['place']}; idemp's own are in {own}"]
    return []


def located(store: Any, message_id: str, consumers: Iterable[str], message_types: Iterable[str]) -> list[Located]:
    """Where streams or documents have a message, at each of the consumers."""
    keys = candidate_keys(message_id, message_types)
    return _located(store, consumers, keys)


def located_in(store: SqlStore, message_id: str, consumer: str | None) -> list[Located]:
    """Where the streams in a database have a message, at one consumer or at all."""
    from sqlalchemy import select

    from idemp.inbox.sql import SqlStreams
    from idemp.inbox.sql.engine import start_errors
    from idemp.inbox.stream import StreamInbox

    tables = store.tables
    with start_errors(store.engine), store.engine.connect() as connection:
        types = connection.scalars(select(tables.message_type.c.name)).all()
        consumers = [consumer] if consumer else connection.scalars(select(tables.consumer.c.name)).all()
        named = connection.scalars(select(tables.commit.c.message_key).where(tables.commit.c.original_id == message_id))
        keys = list(dict.fromkeys((*candidate_keys(message_id, types), *named)))
    return _located(StreamInbox(SqlStreams(store.engine, tables=tables), store), consumers, keys)


def _located(store: Any, consumers: Iterable[str], keys: Iterable[UUID]) -> list[Located]:
    keys = list(keys)
    found = (store.locate(consumer, key) for consumer in consumers for key in keys)
    return [each for each in found if each is not None]


def explained(found: Located) -> dict[str, Any]:
    """A handled message for programs; names as in the story of one in tables."""
    claim, sendings = found.handling.claim, found.handling.sendings
    return {
        "claim": {
            "consumer": claim.consumer,
            "key": claim.id.key,
            "original_id": claim.id.text,
            "message_type": claim.message_type,
            "claimed_at": found.handling.claimed_at,
        },
        "place": found.place,
        "outputs": [
            {
                "id": each.output.id,
                "ordinal": each.output.ordinal,
                "kind": each.output.kind.value,
                "destination": each.output.routing_key,
                "message_type": each.output.message.type,
                "size": len(each.output.message.body),
                "state": "pending" if each.pending else "confirmed",
            }
            for each in sendings
        ],
        "pending": sum(each.pending for each in sendings),
    }


def told(found: Located) -> list[str]:
    """The same for people."""
    data = explained(found)
    claim, outputs = data["claim"], data["outputs"]
    return [
        f"{claim['original_id']} ({claim['message_type']}) at consumer {claim['consumer']}",
        f"  {shown(claim['claimed_at'])}  committed, with {counted(len(outputs), 'output')}, as {found.place}",
        *(
            f"    {each['ordinal']}. {each['kind']} {each['message_type'] or ''} to {each['destination']} as {each['id']}: "
            + ("confirmed" if each["state"] == "confirmed" else "no confirm is recorded")
            for each in outputs
        ),
    ]
