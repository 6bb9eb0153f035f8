"""Messages of a queue in our hands: fetched many at a time, accepted with the broker's word that it knows."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from idemp.broker.kombu.link import LINK_ERRORS, said
from idemp.broker.kombu.settling import FEW, REASON_HEADER, Arrived, arrived_by_amqp, encoded, make_sure_of_acks
from idemp.broker.kombu.topology import is_dead_name
from idemp.broker.kombu.wire import copied_headers, message_of
from idemp.broker.port import Refusal
from idemp.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from idemp.broker.kombu.link import Link
    from idemp.broker.kombu.wire import Parcel
    from idemp.messages import Message

_LARGEST_PREFETCH: Final = 65_535
_SILENCE: Final = 0.5  # seconds without a message after which the queue is asked whether there are more
_SURE_SECONDS: Final = 5.0
_PATIENCE: Final = 20.0  # seconds without a message although the queue has some


class KombuTakenMessages:
    """Messages in our hands; whatever was not accepted goes back at the end of the `with` block.

    Attributes:
        messages: those that were wanted.
        arrived: the same as they came, for exact copies.
    """

    def __init__(self, link: Link, held: Sequence[Any], queue: str) -> None:
        self._link = link
        self._queue = queue
        self._unsure = 0  # accepted, and perhaps not known to the queue yet
        self._tags = [raw.delivery_tag for raw in held]
        self.messages: Sequence[Message] = [seen(raw, queue) for raw in held]
        self.arrived: Sequence[Arrived] = [arrived_by_amqp(raw) for raw in held]

    def accept(self, index: int) -> None:
        """Remove one for good: it was published elsewhere, or shall be dropped.

        Raises:
            BrokerUnavailable: the connection is lost; all come again that were not accepted before.
        """
        self.accept_all([index])

    def accept_all(self, indexes: Sequence[int]) -> None:
        """Remove several for good, with one round trip for all: an ack alone has no answer, and may never have arrived.

        Raises:
            BrokerUnavailable: the connection is lost; those come again of which the broker had not heard.
        """
        try:
            for index in indexes:
                self._link.channel.basic_ack(self._tags[index])
                self._unsure += 1
            self._link.channel.basic_qos(0, 1, False)  # a channel works through its methods in order
        except LINK_ERRORS as error:
            raise BrokerUnavailable(f"The message goes back to its queue: {said(error)}.", fix="Try again.") from error

    def check(self) -> None:
        """Make sure that they are still in our hands, as far as one can see without waiting.

        Raises:
            BrokerUnavailable: the connection is lost, and they went back.
        """
        try:
            self._link.read_pending()
        except LINK_ERRORS as error:
            raise BrokerUnavailable(f"The messages went back to their queue: {said(error)}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsure > FEW and self._link.alive:
            with suppress(*LINK_ERRORS):
                make_sure_of_acks(self._link, [self._queue], _SURE_SECONDS)
        self._link.close()


def held(link: Link, queue: str, wanted: Collection[str] | None, limit: int) -> list[Any]:
    """Messages that were fetched and not acked, those that are wanted; the others are held as well, until the end.

    One by one (`basic.get`) each would cost a round trip through the queue's log: these come as to a consumer.

    Raises:
        BrokerUnavailable: the queue has messages and gives none.
    """
    found: list[Any] = []
    needed = _ready(link, queue) if wanted is not None else min(_ready(link, queue), limit)
    arrived = 0

    def keep(raw: Any) -> None:
        nonlocal arrived
        arrived += 1
        if len(found) < limit and (wanted is None or raw.properties.get("message_id") in wanted):
            found.append(raw)

    tags = _consume(link, queue, needed, keep)
    silent_since = time.monotonic()
    while arrived < needed and len(found) < limit:
        before = arrived
        if link.wait_readable(_SILENCE):
            link.read()
        if arrived > before:
            silent_since = time.monotonic()
        elif time.monotonic() - silent_since >= _SILENCE and not _ready(link, queue):
            break  # somebody else took the rest
        elif time.monotonic() - silent_since >= _PATIENCE:
            raise BrokerUnavailable(f"The queue {queue!r} has messages and gives none.", fix="Look at its replicas.")
    for tag in tags:
        link.channel.basic_cancel(tag)
    return found


def seen(raw: Any, queue: str) -> Message:
    """What a held message is, with the broker's reason for putting it into a dead-letter queue, if it was the broker."""
    arrived = arrived_by_amqp(raw)
    message = message_of(arrived.properties, arrived.headers, arrived.body)
    reason = arrived.headers.get("x-first-death-reason")
    if isinstance(reason, str) and REASON_HEADER not in message.headers and is_dead_name(queue):
        # The broker itself put it there: its time to live had passed, or it was delivered too often.
        return replace(message, headers={**message.headers, REASON_HEADER: f"broker: {reason}"})
    return message


def exact_copy(
    arrived: Arrived, queue: str, rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Parcel | Refusal:
    """The message for another queue: body, properties and headers as they came, but for what `rewrite` changes.

    Example:
        >>> copy = exact_copy(Arrived({"app_id": "till", "type": "t"}, {"a": b"1"}, b"{}"), "q", lambda headers: headers)
        >>> copy.content.properties["app_id"], copy.content.properties["application_headers"], copy.content.body
        ('till', {'a': b'1'}, b'{}')
    """
    try:
        return encoded(queue, arrived, rewrite(copied_headers(arrived.headers)))
    except ValueError as error:
        return Refusal("unsendable", f"never sent: {error}")


def _ready(link: Link, queue: str) -> int:
    return int(link.channel.queue_declare(queue, passive=True).message_count)


def _consume(link: Link, queue: str, count: int, keep: Callable[[Any], None]) -> list[str]:
    """Let `count` messages come; nothing more comes before some of them are acked."""
    tags = []
    while count > 0:
        share = min(count, _LARGEST_PREFETCH)
        link.channel.basic_qos(0, share, False)
        tags.append(str(link.channel.basic_consume(queue, callback=keep)))
        count -= share
    return tags
