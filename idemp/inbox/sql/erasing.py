"""What an operator takes away: the bytes of a message's outputs, or its outputs that nobody will ever take."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, func, select, update

from idemp.errors import StoreError
from idemp.inbox.sql.short import Locking, Short

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.tables import Tables

ERASED: Final = "erased"
DISCARDED: Final = "discarded"
_ONE_UNIT: Final = timedelta(minutes=1)  # all claims of one unit of work are made within it
_KEPT_IN_ENVELOPES: Final = ("type", "content_type", "mandatory", "delay", "ttl", "priority", DISCARDED)


class Erasing:
    """Erases and discards, one message at a time; nothing here is on a delivery's way.

    Example:
        >>> from uuid import UUID
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> Erasing(engine, tables).discard("orders", UUID(int=1))
        Traceback (most recent call last):
        ...
        idemp.errors.StoreError: Consumer 'orders' has no claim with the key 00000000-0000-0000-0000-000000000001...
    """

    def __init__(self, engine: Engine, tables: Tables) -> None:
        self._short = Short(engine)
        inbox, output, pending, consumer = tables.inbox, tables.output, tables.pending, tables.consumer
        claim, of_claim, waiting = (
            (table.c.consumer_id == bindparam("consumer"), table.c.message_key == bindparam("key"))
            for table in (inbox, output, pending)
        )
        quarantined = pending.c.quarantined_at.is_not(None)
        self._find_consumer = select(consumer.c.id).where(consumer.c.name == bindparam("name"))
        self._locked = Locking(select(inbox.c.message_key).where(*claim), skip=False)
        unsent = pending.join(output, output.c.output_id == pending.c.output_id)
        self._unsent = select(func.count()).select_from(unsent).where(*of_claim)
        self._outputs = select(output.c.output_id).where(*of_claim)
        self._quarantined = (
            select(output.c.ordinal, output.c.envelope, pending.c.output_id)
            .select_from(output.join(pending, pending.c.output_id == output.c.output_id))
            .where(*of_claim, *waiting, quarantined)
        )
        change = update(output).where(*of_claim, output.c.ordinal == bindparam("at")).values(envelope=bindparam("told"))
        self._mark = change
        self._erase = change.values(body=b"")
        # The same outputs stand under former ids, too (`previous=`), whose claims are of the same type and moment.
        twin, copied = inbox.alias(), output.alias()
        self._copies = (
            select(copied.c.consumer_id, copied.c.message_key, copied.c.ordinal, copied.c.envelope)
            .select_from(inbox)
            .join(
                twin,
                (twin.c.consumer_id.in_(select(consumer.c.id)))
                & (twin.c.type_id == inbox.c.type_id)
                & twin.c.claimed_at.between(bindparam("since"), bindparam("until")),
            )
            .join(copied, (copied.c.consumer_id == twin.c.consumer_id) & (copied.c.message_key == twin.c.message_key))
            .where(*claim, copied.c.output_id.in_(bindparam("ids", expanding=True)))
        )
        self._claimed_at = select(inbox.c.claimed_at).where(*claim)
        self._drop = delete(pending).where(pending.c.output_id == bindparam("id"), quarantined)

    def erase(self, consumer: str, key: UUID) -> int:
        """Drop bodies, headers and addresses of a handling's outputs, under all of its ids; how many outputs there were.

        The claim still answers DUPLICATE. Its outputs can't be sent again: their envelopes say `"erased": true`.

        Raises:
            StoreError: nothing is known of this id, or some output waits still; one in quarantine does.
        """

        def work(connection: Connection) -> int:
            claim = self._claim(connection, consumer, key)
            if unsent := connection.scalar(self._unsent, claim):
                raise StoreError(
                    f"{unsent} of its outputs still wait for the broker's confirm, or to be done.",
                    fix="Let the relay send the messages first (`idemp relay MODULE:APP`), and the workers do the effects; "
                    "`idemp inbox discard ID` gives up what is in quarantine.",
                )
            ids = list(connection.scalars(self._outputs, claim))
            claimed_at = connection.execute(self._claimed_at, claim).scalar_one()
            around = {"since": claimed_at - _ONE_UNIT, "until": claimed_at + _ONE_UNIT}
            for row in connection.execute(self._copies, {**claim, **around, "ids": ids}).all():
                place = {"consumer": row.consumer_id, "key": row.message_key, "at": row.ordinal}
                connection.execute(self._erase, {**place, "told": _erased(row.envelope)})
            return len(ids)

        return self._short.run(work)

    def discard(self, consumer: str, key: UUID) -> int:
        """Let quarantined outputs of a handling pend no more; how many there were. Their envelopes say `"discarded": true`.

        Raises:
            StoreError: nothing is known of this id.
        """

        def work(connection: Connection) -> int:
            claim = self._claim(connection, consumer, key)
            rows = connection.execute(self._quarantined, claim).all()
            for row in rows:
                told = json.dumps({**json.loads(row.envelope), DISCARDED: True})
                connection.execute(self._mark, {**claim, "at": row.ordinal, "told": told})
                connection.execute(self._drop, {"id": row.output_id})
            return len(rows)

        return self._short.run(work)

    def _claim(self, connection: Connection, consumer: str, key: UUID) -> dict[str, Any]:
        """Which claim it is; its row is locked, so that nobody else erases or purges meanwhile."""
        claim = {"consumer": connection.scalar(self._find_consumer, {"name": consumer}), "key": key}
        if claim["consumer"] is None or connection.execute(self._locked.on(connection), claim).first() is None:
            raise StoreError(
                f"Consumer {consumer!r} has no claim with the key {key}.", fix="Look with `idemp inbox list`."
            )
        return claim


def _erased(envelope: str) -> str:
    values = json.loads(envelope)
    return json.dumps({ERASED: True, **{name: values[name] for name in _KEPT_IN_ENVELOPES if name in values}})
