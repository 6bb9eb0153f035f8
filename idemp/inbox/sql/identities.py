"""Whether a deploy changed what makes two messages the same, while claims of the former kind still count."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, insert, select, update

from idemp.errors import IdentityChanged
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from idemp.clock import Clock
    from idemp.inbox.port import Identity
    from idemp.inbox.sql.liveness import Liveness
    from idemp.inbox.sql.names import Names
    from idemp.inbox.sql.tables import Tables

OFF: Final = "off"
"""The descriptor of a type that is not opted in."""


@dataclass(frozen=True, slots=True)
class _Stored:
    id: int
    consumer_id: int
    consumer: str
    message_type: str
    descriptor: str
    ended_at: datetime | None


class Identities:
    """Compares the identities of an app with those stored, and stores them.

    A stored identity *lives* while claims made by it may count: while it is current, and for one retention window of
    consuming time after it ended. Living ones that differ from the app's must be covered by its `previous=`. An app
    that comes back to a living identity (a rollback, an old process restarted in the middle of a deploy) needs no cover
    for its successor: that one covers it, so it claims both ids.

    Example:
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.port import Identity
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.liveness import Liveness
        >>> from idemp.inbox.sql.names import Names
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables, clock = create_engine_safely("sqlite://"), Tables(), SystemClock()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> identities = Identities(engine, tables, clock, Liveness(engine, tables, clock, names), names)
        >>> week = {"orders.Place": timedelta(days=7)}
        >>> identities.agree("orders", "orders", [Identity("orders.Place", "field:order_no")], {}, week)
        >>> identities.agree("orders", "orders", [Identity("orders.Place", "field:order_id")], {}, week)
        Traceback (most recent call last):
        ...
        idemp.errors.IdentityChanged: Consumer 'orders' now identifies 'orders.Place' by 'field:order_id'; until now ...
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock, liveness: Liveness, names: Names) -> None:
        self._short = Short(engine, at_start=True)
        self._clock = clock
        self._liveness = liveness
        self._names = names
        consumer, kind, identity = tables.consumer, tables.message_type, tables.identity
        # All of them, so that two new consumers of one queue can't pass each other. Nobody else locks these rows.
        self._lock = select(consumer.c.id).order_by(consumer.c.id).with_for_update()
        self._stored = (
            select(
                identity.c.id,
                identity.c.consumer_id,
                consumer.c.name.label("consumer"),
                kind.c.name.label("message_type"),
                identity.c.descriptor,
                identity.c.ended_at,
            )
            .select_from(identity)
            .join(consumer, consumer.c.id == identity.c.consumer_id)
            .join(kind, kind.c.id == identity.c.type_id)
            .where((consumer.c.id == bindparam("consumer")) | (consumer.c.queue == bindparam("queue")))
            .order_by(identity.c.id)
        )
        self._set_queue = update(consumer).where(consumer.c.id == bindparam("consumer")).values(queue=bindparam("at"))
        one = identity.c.id == bindparam("identity")
        self._end = update(identity).where(one).values(ended_at=bindparam("now"))
        self._reopen = update(identity).where(one).values(ended_at=None)
        self._forget = delete(identity).where(one)
        self._insert = insert(identity).values(
            {name: bindparam(name) for name in ("consumer_id", "type_id", "descriptor", "since")}
        )

    def agree(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Store the current identities, or refuse them; nothing is stored then.

        Raises:
            IdentityChanged: a living identity differs and is not covered.
        """
        consumer_id = self._names.id("consumer", consumer)
        type_ids = {
            identity.message_type: self._names.id("message_type", identity.message_type) for identity in current
        }
        longest = max(retention.values(), default=timedelta(0))

        def work(connection: Connection) -> None:
            connection.execute(self._lock).all()
            rows = connection.execute(self._stored, {"consumer": consumer_id, "queue": queue})
            stored = [_Stored(*row) for row in rows]
            living = []
            for former in stored:
                window = retention.get(_present_name(former.message_type, current), longest)
                if former.ended_at is None or former.ended_at >= self._liveness.late_before_by(
                    connection, consumer_id, window
                ):
                    living.append(former)
                elif former.consumer_id == consumer_id:
                    connection.execute(self._forget, {"identity": former.id})
            ended = [former for identity in current for former in _ended_by(identity, living, consumer, covered)]
            self._write(connection, consumer_id, type_ids=type_ids, current=current, living=living, ended=ended)
            connection.execute(self._set_queue, {"consumer": consumer_id, "at": queue})

        self._short.run(work)

    def _write(
        self,
        connection: Connection,
        consumer_id: int,
        *,
        type_ids: Mapping[str, int],
        current: Iterable[Identity],
        living: Sequence[_Stored],
        ended: Iterable[_Stored],
    ) -> None:
        now = self._clock.now()
        for former in ended:
            connection.execute(self._end, {"identity": former.id, "now": now})
        for identity in current:
            same = next((former for former in living if _is_same(former, identity, consumer_id)), None)
            if same is None:
                values = {"consumer_id": consumer_id, "type_id": type_ids[identity.message_type], "since": now}
                connection.execute(self._insert, {**values, "descriptor": identity.descriptor})
            elif same.ended_at is not None:
                connection.execute(self._reopen, {"identity": same.id})


def _ended_by(
    identity: Identity, living: Sequence[_Stored], consumer: str, covered: Mapping[str, Sequence[Identity]]
) -> list[_Stored]:
    """The living identities that the current one replaces, all of them covered.

    Raises:
        IdentityChanged: one is not.
    """
    names = {identity.message_type, *identity.aliases}
    formers = [former for former in living if former.message_type in names and not _equals(former, identity, consumer)]
    mine = next((former for former in living if _equals(former, identity, consumer)), None)
    cover = {
        (item.consumer or consumer, item.message_type, item.descriptor)
        for item in covered.get(identity.message_type, ())
    }
    for former in formers:
        if (former.consumer, former.message_type, former.descriptor) in cover or _harmless(former, identity, consumer):
            continue
        if mine is not None and former.id > mine.id and OFF not in {mine.descriptor, former.descriptor}:
            continue  # it came later, so it covers this one
        raise _changed(former, identity, consumer)
    return [former for former in formers if former.ended_at is None]


def _equals(former: _Stored, identity: Identity, consumer: str) -> bool:
    return (former.consumer, former.message_type, former.descriptor) == (
        consumer,
        identity.message_type,
        identity.descriptor,
    )


def _is_same(former: _Stored, identity: Identity, consumer_id: int) -> bool:
    return (former.consumer_id, former.message_type, former.descriptor) == (
        consumer_id,
        identity.message_type,
        identity.descriptor,
    )


def _harmless(former: _Stored, identity: Identity, consumer: str) -> bool:
    if former.consumer == consumer and former.descriptor == identity.descriptor:
        # Only the type's name differs. It is no part of such an id, and a type that is off has no ids at all.
        return not identity.scoped_by_type or identity.descriptor == OFF
    return former.consumer != consumer and former.descriptor == OFF == identity.descriptor


def _present_name(message_type: str, current: Iterable[Identity]) -> str:
    """The name under which a stored type stands in the app now."""
    return next((item.message_type for item in current if message_type in item.aliases), message_type)


def _changed(former: _Stored, identity: Identity, consumer: str) -> IdentityChanged:
    was = f"{former.message_type!r} by {former.descriptor!r}"
    if former.consumer != consumer:
        was = f"the queue's consumer was {former.consumer!r} and identified {was}"
    else:
        was = f"it identified {was}"
    when = "until now" if former.ended_at is None else f"until {former.ended_at:%Y-%m-%d %H:%M} UTC"
    parts = []
    if former.descriptor == OFF:
        parts.append("opted_in=False")
    elif former.descriptor != identity.descriptor:
        parts.append(f"key={_key_text(former.descriptor)}")
    if former.message_type != identity.message_type:
        parts.append(f"type={former.message_type!r}")
    if former.consumer != consumer:
        parts.append(f"consumer={former.consumer!r}")
    return IdentityChanged(
        f"Consumer {consumer!r} now identifies {identity.message_type!r} by {identity.descriptor!r}; {when} {was}, "
        "and claims of that kind still count: their redeliveries would be handled again.",
        fix=f"Add previous=[Previous({', '.join(parts)})] to the type's policy for one retention window, "
        "or change it back.",
    )


def _key_text(descriptor: str) -> str:
    """A stored descriptor as somebody would write it in a policy."""
    kind, _, value = descriptor.partition(":")
    match kind:
        case "field":
            names = value.split(",")
            return repr(names[0] if len(names) == 1 else names)
        case "header":
            return f"Key.header({value!r})"
        case "call":
            return f"Key.call(..., {value!r})"
    return f"Key.{kind}()"
