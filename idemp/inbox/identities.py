"""Whether a deploy changed what makes two messages the same, while claims of the former kind still count: the decision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from idemp.errors import IdentityChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from idemp.inbox.port import Identity

_Consumer = TypeVar("_Consumer")  # by its name, or by its number in the database

OFF: Final = "off"
"""The descriptor of a type that is not opted in."""
_ABOUT: Final = "; about "
_READ_AS: Final = "; read as "


def described(key: str, encoding: str) -> str:
    """The descriptor of a key whose values are read so; see `idemp.encodings`.

    Example:
        >>> described("field:order_id", "uuid"), described("message_id", "")
        ('field:order_id; read as uuid', 'message_id')
    """
    return f"{key}{_READ_AS}{encoding}" if encoding else key


def is_same(descriptor: str, other: str) -> bool:
    """Whether two descriptors identify messages alike. Those of earlier releases do not say how values are read.

    Example:
        >>> is_same("field:order_id; read as uuid", "field:order_id; read as str")
        False
        >>> is_same("field:order_id; read as uuid", "field:order_id")
        True
    """
    (key, encoding, about), (other_key, other_encoding, other_about) = _parts(descriptor), _parts(other)
    return (key, about) == (other_key, other_about) and (
        encoding == other_encoding or not encoding or not other_encoding
    )


def with_entity(identity: Identity) -> Identity:
    """With its entity in its descriptor: for stores that find a claim by it, so that it may not change unsaid.

    Example:
        >>> from idemp.inbox.port import Identity
        >>> with_entity(Identity("carts.Add", "field:request_id", entity="field:cart")).descriptor
        'field:request_id; about field:cart'
    """
    about = f"{_ABOUT}{identity.entity}" if identity.entity is not None else ""
    return replace(identity, descriptor=identity.descriptor + about)


@dataclass(frozen=True, slots=True)
class Stored:
    """An identity that a start has stored.

    Attributes:
        number: of two, the one with the higher number was stored later.
        consumer: whose it is.
        message_type: canonical type name, as it was then.
        descriptor: the key's name, or `OFF`.
        ended_at: since when it is no longer current, `None` while it is.

    Example:
        >>> Stored(1, "orders", "orders.Place", "field:order_no", None).key
        ('orders', 'orders.Place', 'field:order_no')
    """

    number: int
    consumer: str
    message_type: str
    descriptor: str
    ended_at: datetime | None

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it this one."""
        return self.consumer, self.message_type, self.descriptor


@dataclass(frozen=True, slots=True)
class Agreement:
    """What becomes of the stored identities once an app's own are stored.

    Attributes:
        living: those by which claims may count that still count.
        forgotten: those of the app's consumer by which none do.
        ended: those that are current no longer, from now on.
    """

    living: Sequence[Stored]
    forgotten: Sequence[Stored]
    ended: Sequence[Stored]


def still_used(
    users: Mapping[_Consumer, datetime],
    retention: Mapping[str, timedelta],
    late_before: Callable[[_Consumer, timedelta], datetime],
) -> list[_Consumer]:
    """The consumers whose claims of a queue's messages may still count.

    A consumer may have several queues, and nobody says when it leaves one. It has left it when it has consumed for a whole
    window without using it: what it claimed there counts no longer. A consumer that stands still leaves nothing.

    Args:
        users: when each consumer last used the queue: at a start, and at each beat of a worker that started there.
        retention: windows of the app that starts; the longest decides.
        late_before: the moment before which a consumer's claims don't count, given a window.

    Example:
        >>> from datetime import UTC, datetime, timedelta
        >>> day = lambda number: datetime(2026, 3, number, tzinfo=UTC)
        >>> week = {"orders.Place": timedelta(days=7)}
        >>> still_used({"orders": day(1), "billing": day(9)}, week, lambda consumer, window: day(9) - window)
        ['billing']
    """
    longest = max(retention.values(), default=timedelta(0))
    return [consumer for consumer, used_at in users.items() if used_at >= late_before(consumer, longest)]


def agreement(
    stored: Sequence[Stored],
    consumer: str,
    current: Sequence[Identity],
    covered: Mapping[str, Sequence[Identity]],
    retention: Mapping[str, timedelta],
    late_before: Callable[[timedelta], datetime],
) -> Agreement:
    """Compare the identities of an app with those stored for its consumer and its queue, in the order of their numbers.

    A stored identity *lives* while claims made by it may count: while it is current, and for one retention window of
    consuming time after it ended. Living ones that differ from the app's must be covered by its `previous=`. An app
    that comes back to a living identity (a rollback, an old process restarted in the middle of a deploy) needs no cover
    for its successor: that one covers it, so it claims both ids.

    Args:
        stored: those of this consumer, and of all others of its queue.
        consumer: the app's.
        current: the app's identities.
        covered: by current type name, what its `previous=` names; see `Upkeep.agree_identities`.
        retention: windows, by current type name.
        late_before: the moment before which this consumer's claims don't count, given a window.

    Raises:
        IdentityChanged: a living identity differs and is not covered.

    Example:
        >>> from datetime import UTC, datetime
        >>> from idemp.inbox.port import Identity
        >>> stored = [Stored(1, "orders", "orders.Place", "field:order_no", None)]
        >>> current, never = [Identity("orders.Place", "field:order_id")], datetime(1970, 1, 1, tzinfo=UTC)
        >>> agreement(stored, "orders", current, {"orders.Place": current}, {}, lambda window: never)
        Traceback (most recent call last):
        ...
        idemp.errors.IdentityChanged: Consumer 'orders' now identifies 'orders.Place' by 'field:order_id'; until now ...
        >>> covered = {"orders.Place": [Identity("orders.Place", "field:order_no")]}
        >>> agreement(stored, "orders", current, covered, {}, lambda window: never).ended == stored
        True
    """
    longest = max(retention.values(), default=timedelta(0))

    def lives(former: Stored) -> bool:
        window = retention.get(_present_name(former.message_type, current), longest)
        return former.ended_at is None or former.ended_at >= late_before(window)

    living = [former for former in stored if lives(former)]
    own = {(consumer, identity.message_type, identity.descriptor) for identity in current}
    return Agreement(
        living=living,
        forgotten=[former for former in stored if former not in living and former.consumer == consumer],
        ended=[
            former
            for identity in current
            for former in _ended_by(identity, living, consumer, covered)
            if former.key not in own
        ],
    )


def _ended_by(
    identity: Identity, living: Sequence[Stored], consumer: str, covered: Mapping[str, Sequence[Identity]]
) -> list[Stored]:
    """The living identities that the current one replaces, all of them covered.

    Raises:
        IdentityChanged: one is not.
    """
    own = (consumer, identity.message_type, identity.descriptor)
    names = {identity.message_type, *identity.aliases}
    formers = [former for former in living if former.message_type in names and former.key != own]
    mine = next((former for former in living if former.key == own), None)
    cover = [
        (item.consumer or consumer, item.message_type, item.descriptor)
        for item in covered.get(identity.message_type, ())
    ]
    refused = []
    for former in formers:
        if _harmless(former, identity, consumer) or any(
            former.key[:2] == (name, message_type) and is_same(former.descriptor, descriptor)
            for name, message_type, descriptor in cover
        ):
            continue
        if (
            mine is not None
            and former.number > mine.number
            and OFF not in {mine.descriptor, former.descriptor}
            and _parts(mine.descriptor)[2] == _parts(former.descriptor)[2]
        ):
            continue  # it came later, so it covers this one: with ids that are noted under both
        refused.append(former)
    if refused:
        # A key stands there twice, with and without how it is read: whoever covers only the latter is refused again.
        first = refused[0]
        told = [former for former in refused if is_same(former.descriptor, first.descriptor)]
        raise _changed(max(told, key=lambda former: bool(_parts(former.descriptor)[1])), identity, consumer)
    return [former for former in formers if former.ended_at is None]


def _harmless(former: Stored, identity: Identity, consumer: str) -> bool:
    if former.key[:2] == (consumer, identity.message_type) and is_same(former.descriptor, identity.descriptor):
        return True  # one of them is of an earlier release
    if former.consumer == consumer and former.descriptor == identity.descriptor:
        # Only the type's name differs. It is no part of such an id, and a type that is off has no ids at all.
        return not identity.scoped_by_type or identity.descriptor == OFF
    return former.consumer != consumer and former.descriptor == OFF == identity.descriptor


def _present_name(message_type: str, current: Sequence[Identity]) -> str:
    """The name under which a stored type stands in the app now."""
    return next((item.message_type for item in current if message_type in item.aliases), message_type)


def _changed(former: Stored, identity: Identity, consumer: str) -> IdentityChanged:
    was = f"{former.message_type!r} by {former.descriptor!r}"
    if former.consumer != consumer:
        was = f"the queue's consumer was {former.consumer!r} and identified {was}"
    else:
        was = f"it identified {was}"
    when = "until now" if former.ended_at is None else f"until {former.ended_at:%Y-%m-%d %H:%M} UTC"
    parts, also = [], ""
    if former.descriptor == OFF:
        parts.append("opted_in=False")
    else:
        (key, encoding, about), present = _parts(former.descriptor), _parts(identity.descriptor)
        if key != present[0]:
            parts.append(f"key={_key_text(key)}")
            if encoding:
                also = " (and message=…, the class as it was, if the present one does not have that key as it was)"
        elif encoding and encoding != present[1]:
            parts.append("message=…")
        if about and about != present[2]:
            parts.append(f"entity={_key_text(about)}")
    if former.message_type != identity.message_type:
        parts.append(f"type={former.message_type!r}")
    if former.consumer != consumer:
        parts.append(f"consumer={former.consumer!r}")
    return IdentityChanged(
        f"Consumer {consumer!r} now identifies {identity.message_type!r} by {identity.descriptor!r}; {when} {was}, "
        "and claims of that kind still count: their redeliveries would be handled again.",
        fix=f"Add previous=[Previous({', '.join(parts)})]{also} to the type's policy for one retention window"
        + (", with the message class as it was before," if "message=…" in parts else ",")
        + " or change it back.",
    )


def _parts(descriptor: str) -> tuple[str, str, str]:
    """The key's name, how its values are read, and the entity's name."""
    rest, _, about = descriptor.partition(_ABOUT)
    key, _, encoding = rest.partition(_READ_AS)
    return key, encoding, about


def _key_text(descriptor: str) -> str:
    """A stored descriptor as somebody would write it in a policy."""
    kind, _, value = descriptor.partition(":")
    match kind:
        case "field":
            names = value.split(",")
            return repr(names[0] if len(names) == 1 else names)
        case "header" | "typed-header":
            return f"Key.header({value!r})"
        case "call":
            return f"Key.call(..., {value!r})"
    return f"Key.{kind}()"
