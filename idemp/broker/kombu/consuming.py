"""Receiving from RabbitMQ: one connection, a deque of what came, settled on the consuming thread."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.settling import Copies, arrived_by_amqp, lost
from idemp.broker.kombu.topology import DEFAULT_DELAYS
from idemp.broker.kombu.urls import shown
from idemp.broker.port import Delivery, Park, Release, Retry
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.broker.port import Settlement
    from idemp.clock import Clock

_PATIENT_LOOK = 1.0  # seconds between two looks at the heartbeat while nothing comes
_BRIEFLY = 1.0


class KombuReceiver:
    """Consumes queues on a connection of its own, opened here. Used by one thread; `keep_alive` by any.

    Args:
        url: where RabbitMQ is.
        queues: the queues to consume.
        prefetch: how many unsettled deliveries of each queue the broker sends ahead.
        delays: per queue, the delay tiers that were declared, in seconds.
        heartbeat: seconds; a connection that is silent for two of them is dead.
        connect_timeout: seconds for connecting.
        settle_timeout: seconds that the copy of a `Retry` or `Park` may take.
        clock: for the time of a message's first failure.

    Raises:
        BrokerUnavailable: no connection, or a queue is missing.
    """

    def __init__(
        self,
        url: str,
        queues: Sequence[str],
        *,
        prefetch: int,
        delays: Mapping[str, Sequence[float]] | None = None,
        heartbeat: float = 30,
        connect_timeout: float = 5.0,
        settle_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        if prefetch < 1:
            # 0 is "no limit" in AMQP.
            raise ConfigurationError(f"prefetch={prefetch} is not supported.", fix="Take 1 or more.")
        self._url = url
        self._delays = dict(delays or {})
        self._arrived: deque[tuple[str, Any]] = deque()
        self._unsettled: set[int] = set()
        self._publisher = ConfirmingPublisher(url, connect_timeout=connect_timeout, heartbeat=heartbeat)
        self._copies = Copies(self._publisher, timeout=settle_timeout, clock=clock)
        self._link = Link.open(url, connect_timeout=connect_timeout, heartbeat=heartbeat)
        with self._guarded():
            self._link.channel.basic_qos(0, prefetch, False)
            for queue in queues:
                self._link.channel.basic_consume(queue, callback=partial(self._on_message, queue))

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery, or `None` after `timeout` seconds.

        Raises:
            BrokerUnavailable: the connection is lost; what is not settled will come again. Close it, open another.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._guarded():
                if not self._arrived:
                    self._link.read_pending()
                    self._link.beat()
            if self._arrived:
                return self._next()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with self._failing():
                self._link.wait_readable(min(left, _PATIENT_LOOK, (self._link.heartbeat or 4) / 4))

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once. `Retry` and `Park` first make sure of the copy, then ack.

        Raises:
            BrokerUnavailable: it could not be settled; the message will come again.
            BrokerError: it was settled before.
        """
        message = delivery.tag
        tag: int = message.delivery_tag
        if message.channel is not self._link.channel or not self._link.alive:
            raise lost(ConnectionResetError("it came over a connection that is gone"))
        if tag not in self._unsettled:
            raise BrokerError("This delivery is settled already.", committed="unknown", fix="Settle each once.")
        if isinstance(settlement, Retry | Park):
            delays = self._delays.get(delivery.queue) or DEFAULT_DELAYS
            self._copies.secure(delivery.queue, arrived_by_amqp(message), settlement, delays)
        try:
            with self._link.lock:
                if isinstance(settlement, Release):
                    self._link.channel.basic_reject(tag, requeue=True)
                else:
                    self._link.channel.basic_ack(tag)
        except LINK_ERRORS as error:
            self._link.discard()
            raise lost(error) from error
        self._unsettled.discard(tag)

    def keep_alive(self) -> None:
        """Service heartbeats while a handler runs; called from another thread, never blocks for long, never raises."""
        if self._link.lock.acquire(timeout=_BRIEFLY):
            try:
                if self._link.alive:
                    with self._link.limited_to(_BRIEFLY):
                        # Sending only: the broker's own stay unread until the handler is done.
                        self._link.send_heartbeat()
            except LINK_ERRORS:
                self._link.discard()
            finally:
                self._link.lock.release()
        self._publisher.keep_alive()

    def close(self) -> None:
        """Give back what is not settled and close; never blocks on a dead link."""
        self._link.close()
        self._arrived.clear()
        self._publisher.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _on_message(self, queue: str, message: Any) -> None:
        self._arrived.append((queue, message))

    def _next(self) -> Delivery:
        queue, message = self._arrived.popleft()
        self._unsettled.add(message.delivery_tag)
        redelivered = bool(message.delivery_info["redelivered"])
        return arrived_by_amqp(message).delivery(queue, redelivered=redelivered, tag=message)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._failing(), self._link.lock:
            yield

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except LINK_ERRORS as error:
            self._link.discard()
            raise BrokerUnavailable(
                f"Consuming from {shown(self._url)} ended: {said(error)}.", fix="Close this receiver and open another."
            ) from error
