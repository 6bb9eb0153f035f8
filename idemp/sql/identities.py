"""Stored identities of message types: a start-up check that finds what would let handled messages run again.

A row covers the former identity that its release claims by, too, until the claims of that time are older than their retention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, exists, or_, select, update

from idemp.errors import ConfigurationError
from idemp.identity import Key, name_number
from idemp.ports import Identity
from idemp.sql.engine import Database

__all__ = ["compare", "register_names"]

LONG_AGO = 0.0


def register_names(database: Database, connection: Connection, names: Sequence[tuple[str, str]]) -> None:
    """Store names with their numbers, each with its kind, and compare those that are there.

    Raises:
        ConfigurationError: Another name has the number of one of them.

    Example:
        >>> from idemp.sql.schema import upgrade
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     database = Database(f"sqlite:///{folder}/shop.db")
        ...     upgrade(database)
        ...     with database.short() as connection:
        ...         register_names(database, connection, [("consumer", "billing")])
    """
    table = database.tables.name
    for kind, name in names:  # all before the first SELECT, whose snapshot may be the one of the transaction
        new = {"id": name_number(kind, name), "kind": kind, "name": name}
        connection.execute(database.dialect.insert_new(table, ["id"]), new)
    for kind, name in names:
        stored = connection.execute(select(table).where(table.c.id == name_number(kind, name))).one()
        if (stored.kind, stored.name) != (kind, name):
            raise ConfigurationError(
                f"the {kind} {name!r} and the {stored.kind} {stored.name!r} have the same number in {table.name}: rename one of them"
            )


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
    check = _Check(database, connection)
    before = {row.type: row for row in check.rows(consumer)}
    for each in identities:
        check.compare(each)
    if not complete:
        return
    known = {each.type for each in identities} | {each.former.type for each in identities if each.former}
    known |= {_covered(row)[1] for row in check.rows(consumer) if row.covers}
    gone = [row for type, row in before.items() if type not in known or (type in types and not _opted_in(type, identities))]
    for row in gone:
        if row.type in types and not _is_former(row.type, identities) and check.has_claims(row):
            raise ConfigurationError(
                f"{consumer}: {row.type} was opted in and is not now, so messages that were handled would be handled again: "
                "give it its Idempotent policy back until its claims are older than its retention"
            )
    new = [each.type for each in identities if each.type not in before and each.former is None and not each.unrelated]
    if new and (lost := [row.type for row in gone if row.type not in types and check.has_claims(row)]):
        raise ConfigurationError(
            f"{consumer}: {', '.join(new)} is new, and {', '.join(lost)} is not handled any more. If the type was renamed, "
            f"say Idempotent(previous=Previous(type={lost[0]!r})); if not, say previous='none'"
        )


class _Check:
    def __init__(self, database: Database, connection: Connection) -> None:
        self._database, self._connection = database, connection
        table, now = database.tables.identity, database.dialect.now
        # Without a time, the former release has run since.
        self._young = or_(table.c.covers_since.is_(None), table.c.covers_since > now - table.c.retention)
        self._select = select(table, case((table.c.covers.is_(None), False), else_=self._young).label("young"))
        self._table, self._now = table, now

    def rows(self, consumer: str) -> Sequence[Row[Any]]:
        return self._connection.execute(self._select.where(self._table.c.consumer == consumer)).all()

    def row(self, identity: Identity) -> Row[Any] | None:
        ours = (self._table.c.consumer == identity.consumer, self._table.c.type == identity.type)
        return self._connection.execute(self._select.where(*ours)).first()

    def compare(self, each: Identity) -> None:
        """Compare and store one identity."""
        former, table = each.former, self._table
        self._connection.execute(update(table).where(table.c.covers == _place(each), self._young).values(covers_since=None))
        stored = self.row(each)
        if stored is not None and stored.young and stored.covers == _place(each):
            return  # back to the former release: the later one claims by its key, too
        same_row = former is not None and (former.consumer, former.type) == (each.consumer, each.type)
        if stored is not None:
            allowed = {each.descriptor, former.descriptor if same_row and former else each.descriptor}
            self._refuse_another_key(each, stored, allowed)
            if stored.young and (former is None or stored.covers != _place(former)):
                consumer, type, descriptor = _covered(stored)
                raise ConfigurationError(
                    f"{each.consumer}: {each.type} was {type!r} of {consumer!r} with the key {Key.described(descriptor)}, and claims "
                    "of that time still count: keep its previous=Previous(…) until they are older than the retention"
                )
        covers = {} if former is None else self._cover(stored, former, same_row=same_row)
        self._write(each, covers)

    def has_claims(self, row: Row[Any]) -> bool:
        """Return whether claims of a stored identity, or of the one that it covers, count."""
        return self._has_claims(row.consumer, row.type, row.retention) or (
            row.young and self._has_claims(*_covered(row)[:2], row.retention)
        )

    def _refuse_another_key(self, each: Identity, stored: Row[Any], allowed: set[str]) -> None:
        descriptor = stored.descriptor.decode()
        if descriptor not in allowed and self.has_claims(stored):
            was, now = Key.described(descriptor), Key.described(each.descriptor)
            raise ConfigurationError(
                f"{each.consumer}: the key of {each.type} was {was} and is {now} now, so messages that were handled would be handled "
                "again: go back to the former key, or name it in Idempotent(previous=Previous(key=…))"
            )

    def _cover(self, stored: Row[Any] | None, former: Identity, *, same_row: bool) -> dict[str, Any]:
        """Return what a row notes of the former identity that it covers."""
        place = _place(former)
        if stored is not None and stored.covers == place:
            return {"covers_since": self._now} if stored.covers_since is None else {}
        if same_row:
            changed = stored is not None and stored.descriptor.decode() == former.descriptor
            return {"covers": place, "covers_since": self._now if changed else LONG_AGO}
        before = self.row(former)
        if before is not None:
            if before.descriptor.decode() != former.descriptor and self.has_claims(before):
                raise ConfigurationError(
                    f"{former.consumer}: previous says that the key of {former.type} was {Key.described(former.descriptor)}, and it "
                    f"was {Key.described(before.descriptor.decode())}"
                )
            if before.young:
                raise ConfigurationError(
                    f"{former.consumer}: {former.type} was itself changed within its retention, and only one former identity can be "
                    "named: wait until the claims before that change are older than their retention"
                )
        self._write(former, {})  # a purge finds its claims by it
        return {"covers": place, "covers_since": LONG_AGO if before is None else self._now}

    def _write(self, each: Identity, covers: dict[str, Any]) -> None:
        key = {"consumer": each.consumer, "type": each.type}
        values: dict[str, Any] = {"descriptor": each.descriptor.encode(), "retention": each.retention}
        self._connection.execute(self._database.dialect.insert_new(self._table, ["consumer", "type"]), {**key, **values})
        ours = (self._table.c.consumer == each.consumer, self._table.c.type == each.type)
        self._connection.execute(update(self._table).where(*ours).values(**values, **covers))

    def _has_claims(self, consumer: str, type: str, retention: float) -> bool:
        inbox = self._database.tables.inbox
        alive = inbox.c.claimed_at > self._now - retention
        ours = (inbox.c.consumer_id == name_number("consumer", consumer), inbox.c.type_id == name_number("type", type), alive)
        return bool(self._connection.execute(select(exists().where(*ours))).scalar())


def _place(identity: Identity) -> bytes:
    return json.dumps([identity.consumer, identity.type, identity.descriptor]).encode()


def _covered(row: Row[Any]) -> tuple[str, str, str]:
    consumer, type, descriptor = json.loads(row.covers)
    return consumer, type, descriptor


def _opted_in(type: str, identities: Sequence[Identity]) -> bool:
    return any(type == each.type for each in identities)


def _is_former(type: str, identities: Sequence[Identity]) -> bool:
    return any(each.former is not None and type == each.former.type for each in identities)
