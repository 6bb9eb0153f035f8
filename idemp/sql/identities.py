"""Stored identities of message types: a start-up check that finds what would let handled messages run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, select, update

from idemp.errors import ConfigurationError
from idemp.ports import Identity
from idemp.sql.engine import Database

__all__ = ["compare"]


def compare(
    database: Database,
    connection: Connection,
    consumer: str,
    types: Sequence[str],
    identities: Sequence[Identity],
    *,
    complete: bool,
) -> None:
    """Compare the identities of a consumer with the stored ones, and store them.

    Raises:
        ConfigurationError: One was changed while former claims count; the text names the way out.
    """
    table = database.tables.identity
    stored = {row.type: row for row in connection.execute(select(table).where(table.c.consumer == consumer))}
    for each in identities:
        _compare_one(database, connection, each)
    if not complete:
        return
    known = {each.type for each in identities} | {each.former.type for each in identities if each.former}
    gone = [type for type in stored if type not in known]
    for type in gone:
        if type in types and _has_claims(database, connection, stored[type]):
            raise ConfigurationError(
                f"{consumer}: {type} was opted in and is not now, so messages that were handled would be handled again: "
                "give it its Idempotent policy back until its claims are older than its retention"
            )
    new = [each.type for each in identities if each.type not in stored and each.former is None and not each.unrelated]
    if new and (lost := [type for type in gone if type not in types and _has_claims(database, connection, stored[type])]):
        raise ConfigurationError(
            f"{consumer}: {', '.join(new)} is new, and {', '.join(lost)} is not handled any more. If the type was renamed, "
            f"say Idempotent(previous=Previous(type={lost[0]!r})); if not, say previous='none'"
        )


def _compare_one(database: Database, connection: Connection, each: Identity) -> None:
    table, now = database.tables.identity, database.dialect.now
    ours = (table.c.consumer == each.consumer, table.c.type == each.type)
    row = {"consumer": each.consumer, "type": each.type, "descriptor": each.descriptor.encode(), "retention": each.retention}
    connection.execute(database.dialect.insert_new(table, ["consumer", "type"]), row)
    stored = connection.execute(select(table, (table.c.covers_since > now - table.c.retention).label("young")).where(*ours)).one()
    descriptor, covered = stored.descriptor.decode(), json.loads(stored.covers) if stored.covers else None
    former = each.former
    place = [former.consumer, former.type, former.descriptor] if former else None
    same_row = former is not None and (former.consumer, former.type) == (each.consumer, each.type)
    if [each.consumer, each.type, each.descriptor] == covered:
        return  # back to the former release: the later one claimed by its key, too
    if descriptor != each.descriptor and not (same_row and former is not None and former.descriptor == descriptor):
        raise ConfigurationError(
            f"{each.consumer}: the key of {each.type} was {descriptor!r} and is {each.descriptor!r} now, so messages that were "
            "handled would be handled again: go back to the former key, or name it in Idempotent(previous=Previous(key=…))"
        )
    if covered is not None and stored.young and covered != place:
        raise ConfigurationError(
            f"{each.consumer}: {each.type} was {covered[1]!r} of {covered[0]!r} with the key {covered[2]!r}, and claims of that time "
            "still count: keep its previous=Previous(…) until they are older than the retention"
        )
    values: dict[str, Any] = {"descriptor": each.descriptor.encode(), "retention": each.retention}
    if covered is None or covered != place:
        changed = former is not None and _was_stored(database, connection, former, descriptor if same_row else None)
        values |= {"covers": json.dumps(place).encode() if changed else None, "covers_since": now if changed else None}
    connection.execute(update(table).where(*ours).values(values))


def _was_stored(database: Database, connection: Connection, former: Identity, descriptor: str | None) -> bool:
    """Return whether a former identity has been stored; one with another key is refused."""
    if descriptor is None:
        table = database.tables.identity
        ours = (table.c.consumer == former.consumer, table.c.type == former.type)
        stored = connection.execute(select(table.c.descriptor).where(*ours)).scalar()
        if stored is None:
            return False
        descriptor = stored.decode()
        if descriptor != former.descriptor:
            raise ConfigurationError(
                f"{former.consumer}: previous says that the key of {former.type} was {former.descriptor!r}, and it was {descriptor!r}"
            )
    return descriptor == former.descriptor


def _has_claims(database: Database, connection: Connection, row: Any) -> bool:
    """Return whether claims of a stored identity count."""
    inbox, name = database.tables.inbox, database.tables.name
    numbers = {
        kind: select(name.c.id).where(name.c.kind == kind, name.c.name == text).scalar_subquery()
        for kind, text in (("consumer", row.consumer), ("type", row.type))
    }
    alive = inbox.c.claimed_at > database.dialect.now - row.retention
    ours = (inbox.c.consumer_id == numbers["consumer"], inbox.c.type_id == numbers["type"], alive)
    return bool(connection.execute(select(exists().where(*ours))).scalar())
