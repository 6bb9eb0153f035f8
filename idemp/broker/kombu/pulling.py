"""Messages of one queue, taken when somebody asks for them: between two questions none waits in our hands."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.settling import FEW, Copies, arrived_by_amqp, make_sure_of_acks
from idemp.broker.kombu.taking import held
from idemp.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.broker.port import Delivery, Park

_SURE_SECONDS = 2.0


class KombuPuller:
    """Pulls messages of one queue, on a connection of its own, opened here. Used by one thread at a time.

    A consumer would get messages ahead; these would wait for whoever owns it, while others ask for them in vain.

    Args:
        url: where RabbitMQ is.
        queue: its messages.
        heartbeat: seconds; call `beat` more often than that.
        connect_timeout: seconds for connecting.

    Raises:
        BrokerUnavailable: no connection.
    """

    def __init__(self, url: str, queue: str, *, heartbeat: float = 30, connect_timeout: float = 5.0) -> None:
        self._queue = queue
        self._publisher = ConfirmingPublisher(url, connect_timeout=connect_timeout, heartbeat=heartbeat)
        self._unsure = 0  # acks that the queue may not have got
        self._link = Link.open(url, connect_timeout=connect_timeout, heartbeat=heartbeat)

    def pull(self, limit: int) -> list[Delivery]:
        """Up to `limit` of the messages that are ready, ours until they are acked or the connection ends.

        Raises:
            BrokerUnavailable: the connection is lost, and all goes back that was pulled and not acked. Close it.
        """
        with self._guarded():
            self._link.read_pending()
            self._link.beat()
            return [
                arrived_by_amqp(raw).delivery(self._queue, redelivered=raw.delivery_info["redelivered"], tag=raw)
                for raw in held(self._link, self._queue, None, limit)
            ]

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Remove messages for good.

        Raises:
            BrokerUnavailable: as in `pull`.
        """
        with self._guarded():
            self._link.ack([delivery.tag.delivery_tag for delivery in deliveries])
            self._unsure += len(deliveries)

    def park(self, delivery: Delivery, park: Park) -> None:
        """Put a copy into the dead-letter queue of this one, then ack.

        Raises:
            BrokerUnavailable: there is no confirm, or as in `pull`.
        """
        Copies(self._publisher).secure(self._queue, arrived_by_amqp(delivery.tag), park, ())
        self.ack([delivery])

    def beat(self) -> None:
        """Read what has come, and send a heartbeat if it is time.

        Raises:
            BrokerUnavailable: as in `pull`.
        """
        with self._guarded():
            self._link.read_pending()
            self._link.beat()

    def close(self) -> None:
        """Give back what was not acked, and close; never blocks for long on a dead link."""
        if self._unsure > FEW and self._link.alive:
            with suppress(*LINK_ERRORS):
                make_sure_of_acks(self._link, [self._queue], _SURE_SECONDS)
        self._link.close()
        self._publisher.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except LINK_ERRORS as error:
            self._link.discard()
            raise BrokerUnavailable(
                f"Taking from {self._queue!r} ended: {said(error)}.", fix="Nothing is lost: the messages come again."
            ) from error
