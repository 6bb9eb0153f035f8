"""Ending a delivery: the confirmed copy first, the ack after it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from idemp.broker.kombu.link import LINK_ERRORS, said
from idemp.broker.kombu.topology import DEFAULT_DELAYS, dead_queue, delay_queue, tier_for
from idemp.broker.kombu.wire import (
    PERSISTENT,
    Parcel,
    attempt_of,
    bytes_of,
    copied_headers,
    message_of,
    parcel,
    users_headers,
)
from idemp.broker.port import Delivery, Park, Release, Retry, always
from idemp.clock import Clock, SystemClock
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.messages import ATTEMPT_HEADER, DEAD_PREFIX, DEFERRED_HEADER, FIRST_SEEN_HEADER, counter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from idemp.broker.kombu.link import Link
    from idemp.broker.kombu.publisher import ConfirmingPublisher
    from idemp.broker.port import Refusal, Settlement

REASON_HEADER = f"{DEAD_PREFIX}reason"
EXPIRATION_HEADER = f"{DEAD_PREFIX}expiration"
USER_ID_HEADER = f"{DEAD_PREFIX}user-id"
LOST_HEADERS_HEADER = f"{DEAD_PREFIX}headers-dropped"
_LONG = 1000
FEW: Final = 16
"""Commands to a queue that are never kept back: half of what RabbitMQ allows."""
_AFTER_ALL_OTHERS = {"x-priority": -1_000_000}


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message as it came, for an exact copy.

    Attributes:
        properties: AMQP properties, without headers.
        headers: all headers, as they were decoded.
        body: the bytes.
    """

    properties: Mapping[str, Any]
    headers: Mapping[Any, Any]
    body: bytes

    def delivery(self, queue: str, *, redelivered: bool, tag: Any, alive: Callable[[], bool] = always) -> Delivery:
        """What the protocol sees of it."""
        return Delivery(
            message=message_of(self.properties, self.headers, self.body),
            queue=queue,
            attempt=attempt_of(self.headers),
            redelivered=redelivered,
            tag=tag,
            alive=alive,
        )


class SendsParcels(Protocol):
    """What copies are published with."""

    def publish_parcels(self, parcels: Sequence[Parcel | Refusal], timeout: float) -> list[Refusal | None]:
        """Send all within `timeout` seconds in sum; per parcel `None` if it is confirmed, else why not."""
        ...


class Copies:
    """Makes and secures the copies that `Retry` and `Park` need.

    Args:
        publisher: with a connection of its own.
        timeout: seconds that a copy may take.
        clock: for the time of the first failure.
    """

    def __init__(self, publisher: SendsParcels, *, timeout: float = 10.0, clock: Clock | None = None) -> None:
        self._publisher = publisher
        self._timeout = timeout
        self._clock: Clock = clock or SystemClock()

    def secure(self, queue: str, arrived: Arrived, settlement: Retry | Park, delays: Sequence[float]) -> None:
        """Publish the copy and wait for its confirm.

        Raises:
            BrokerUnavailable: there is none; the delivery must not be acked.
        """
        copy = self.made(queue, arrived, settlement, delays)
        (refusal,) = self._publisher.publish_parcels([copy], self._timeout)
        if refusal is not None:
            raise BrokerUnavailable(
                f"The copy to {copy.routing_key} is not confirmed ({refusal.kind}): {refusal.detail}.",
                committed="unknown",
                fix="Nothing is lost: the message comes again.",
            )

    def made(self, queue: str, arrived: Arrived, settlement: Retry | Park, delays: Sequence[float]) -> Parcel:
        """The copy, ready to be sent."""
        if isinstance(settlement, Park):
            return _parked(queue, arrived, settlement)
        # What a copy can't carry as a property has to outlive the retries, for whoever reads the dead letter.
        headers = {**copied_headers(arrived.headers), **_replaced(arrived)}
        headers.setdefault(FIRST_SEEN_HEADER, self._clock.now().isoformat())
        if settlement.counted:
            headers[ATTEMPT_HEADER] = settlement.attempt or attempt_of(arrived.headers) + 1
        else:
            headers[DEFERRED_HEADER] = counter(arrived.headers, DEFERRED_HEADER) + 1
        try:
            return self._delayed(queue, arrived, headers, settlement.delay.total_seconds(), delays)
        except ValueError as error:
            return _parked(queue, arrived, Park("Uncopyable", {f"{DEAD_PREFIX}error": str(error)}))

    def _delayed(
        self, queue: str, arrived: Arrived, headers: Mapping[str, Any], delay: float, delays: Sequence[float]
    ) -> Parcel:
        """The copy that comes after a delay, here through the delay tier for it."""
        hop = delay_queue(queue, tier_for(delay, delays or DEFAULT_DELAYS))
        return replace(encoded(hop.name, arrived, headers), hop=hop)


class KombuSettler:
    """Settles messages that a kombu `Consumer` of the user's own received from RabbitMQ.

    Dead-letter queue and delay tiers are declared when they are first needed and missing.

    Args:
        publisher: for the copies; never on the consuming connection.
        queue: the queue that is consumed.
        delays: the delay tiers to use, in seconds.
        timeout: seconds that a copy may take.
        clock: for the time of the first failure.
    """

    def __init__(
        self,
        publisher: ConfirmingPublisher,
        queue: str,
        *,
        delays: Sequence[float] = DEFAULT_DELAYS,
        timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self._delays = tuple(delays)
        self._copies = Copies(publisher, timeout=timeout, clock=clock)

    def delivery(self, message: Any) -> Delivery:
        """What the protocol sees of a kombu message; its body is never decoded."""
        redelivered = bool((message.delivery_info or {}).get("redelivered"))
        alive = partial(_is_open, message)
        return arrived_by_kombu(message).delivery(self._queue, redelivered=redelivered, tag=message, alive=alive)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once; on the thread that consumes.

        Raises:
            BrokerUnavailable: it could not be settled; the message will come again.
            ConfigurationError: the message is settled already: by the callback itself, or by a `no_ack` consumer.
        """
        message = delivery.tag
        if message.acknowledged:
            raise ConfigurationError(
                "The message is acknowledged already.", fix="Leave acking to idemp, and never consume with no_ack=True."
            )
        if isinstance(settlement, Retry | Park):
            self._copies.secure(self._queue, arrived_by_kombu(message), settlement, self._delays)
        try:
            message.requeue() if isinstance(settlement, Release) else message.ack()
        except LINK_ERRORS as error:
            raise lost(error) from error


def _is_open(message: Any) -> bool:
    connection = getattr(message.channel, "connection", None)  # a closed channel has none
    return connection is not None and bool(connection.connected)


def lost(error: BaseException) -> BrokerUnavailable:
    """A delivery that could not be settled."""
    return BrokerUnavailable(
        f"The connection was lost before the message was settled: {said(error)}.",
        committed="unknown",
        fix="Nothing is lost: the message comes again.",
    )


def make_sure_of_acks(link: Link, queues: Sequence[str], seconds: float) -> None:
    """Wait until quorum queues have got all acks and rejects of this channel.

    A channel of RabbitMQ's sends a queue no more than 32 before the first are written, keeps the others back, and forgets
    them if the connection ends. Most answers come from the channel alone, and say nothing of the queue. A consumer's
    beginning and end are answered when all before them is written: at the second of two such answers the channel
    has heard of that, and sends what it kept back before it does anything else.

    That consumer has one message in hand at most, and only where no other takes it; it goes back with the connection.

    Args:
        link: the connection; the caller holds its lock.
        queues: where the deliveries came from.
        seconds: the longest wait.

    Raises:
        Exception: one of `LINK_ERRORS`: the connection is lost, or the time is up.
    """
    deadline = time.monotonic() + seconds
    with link.limited_to(seconds):
        link.channel.basic_qos(0, 1, False)
    for queue in queues:
        with link.limited_to(deadline - time.monotonic()):
            consumer = link.channel.basic_consume(queue, callback=_leave, arguments=_AFTER_ALL_OTHERS)
        with link.limited_to(deadline - time.monotonic()):
            link.channel.basic_cancel(consumer)


def _leave(_: object) -> None:
    """Not settled: it goes back when the connection ends."""


def arrived_by_amqp(message: Any) -> Arrived:
    """A message of py-amqp's."""
    properties = dict(message.properties)
    headers = properties.pop("application_headers", None) or {}
    return Arrived(properties, headers, bytes_of(message.body))


def arrived_by_kombu(message: Any) -> Arrived:
    """A message of kombu's."""
    properties = {
        name: value for name, value in (message.properties or {}).items() if name in _COPIED or name in _REPLACED
    }
    properties["content_type"] = message.content_type
    properties["content_encoding"] = message.content_encoding
    headers = dict(message.headers or {})
    if not message.errors:
        headers.pop("compression", None)  # kombu has decompressed the body
    return Arrived(properties, headers, bytes_of(message.body, message.content_encoding or ""))


_COPIED = (
    "content_type",
    "content_encoding",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)
# A copy that expires would be lost, and RabbitMQ refuses one in the name of another user.
_REPLACED = {"expiration": EXPIRATION_HEADER, "user_id": USER_ID_HEADER}


def _parked(queue: str, arrived: Arrived, park: Park) -> Parcel:
    hop = dead_queue(queue)
    story = {**_replaced(arrived), REASON_HEADER: park.reason, **park.headers}
    headers = copied_headers(arrived.headers)
    try:
        made = encoded(hop.name, arrived, {**headers, **story})
    except ValueError:
        # Headers and story are too long together for AMQP: body and properties matter more.
        story = {name: value[:_LONG] if isinstance(value, str) else value for name, value in story.items()}
        story = {name: value for name, value in users_headers(story).items() if len(str(value)) <= _LONG}
        made = encoded(hop.name, arrived, {**story, LOST_HEADERS_HEADER: len(headers)})
    return replace(made, hop=hop)


def _replaced(arrived: Arrived) -> dict[str, Any]:
    """What no copy can say as a property; an earlier copy's note of it tells more than a later property."""
    found = {header: arrived.properties[name] for name, header in _REPLACED.items() if name in arrived.properties}
    return {**found, **{header: arrived.headers[header] for header in _REPLACED.values() if header in arrived.headers}}


def encoded(queue: str, arrived: Arrived, headers: Mapping[str, Any]) -> Parcel:
    """A copy to another queue, with these headers.

    Raises:
        ValueError: AMQP has no way to say it.
    """
    properties = {name: arrived.properties[name] for name in _COPIED if name in arrived.properties}
    properties["delivery_mode"] = PERSISTENT
    try:
        return _to_queue(queue, arrived.body, properties, headers)
    except ValueError:
        return _to_queue(queue, arrived.body, properties, users_headers(headers))


def _to_queue(queue: str, body: bytes, properties: Mapping[str, Any], headers: Mapping[str, Any]) -> Parcel:
    return parcel("", queue, body, {**properties, "application_headers": dict(headers)}, mandatory=True)
