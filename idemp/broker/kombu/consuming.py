"""Receiving from RabbitMQ: one connection, a deque of what came, settled on the consuming thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.outstanding import MOST_OUTSTANDING, Outstanding
from idemp.broker.kombu.posting import Post
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.settling import FEW, Copies, arrived_by_amqp, lost, make_sure_of_acks
from idemp.broker.kombu.topology import DEFAULT_DELAYS
from idemp.broker.port import Delivery, Park, Release, Retry
from idemp.broker.urls import shown
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.broker.port import Settlement
    from idemp.clock import Clock

_PATIENT_LOOK = 1.0  # seconds between two looks at the heartbeat while nothing comes
_BRIEFLY = 1.0
_SURE_SECONDS = 2.0


class KombuReceiver:
    """Consumes queues on a connection of its own, opened here. Used by one thread; `keep_alive` and `cancel` by any.

    Up to `prefetch` messages of each queue are in memory at once, each with its whole body, undecoded: plan for `prefetch`
    times the largest body, per receiver. AMQP knows no limit by size, so a body beyond `max_body_bytes` is received, too,
    before it is parked; its copy shares the bytes. Each message holds its place until it is acked: a retried or parked
    one until the broker has confirmed its copy, which nobody waits for.

    Args:
        url: where RabbitMQ is.
        queues: the queues to consume.
        prefetch: how many unsettled deliveries of each queue the broker sends ahead.
        delays: per queue, the delay tiers that were declared, in seconds.
        keeps_order: give nothing back before the end, when all goes back at once: quorum queues put behind what was given
            back before, and another consumer would get later messages while earlier ones are still in our hands.
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
        keeps_order: bool = False,
        heartbeat: float = 30,
        connect_timeout: float = 5.0,
        settle_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        if prefetch < 1:
            # 0 is "no limit" in AMQP.
            raise ConfigurationError(f"prefetch={prefetch} is not supported.", fix="Take 1 or more.")
        self._url = url
        self._queues = tuple(queues)
        self._delays = dict(delays or {})
        self._settle_timeout = settle_timeout
        self._keeps_order = keeps_order
        self._arrived: deque[tuple[str, Any]] = deque()
        self._unsettled: set[int] = set()
        self._acked: list[int] = []  # and not told yet
        self._consumers: list[str] = []
        self._unsure = 0  # acks and rejects that the queues may not have got
        # For what came back or lost its connection; opens none before.
        self._publisher = ConfirmingPublisher(url, connect_timeout=connect_timeout, heartbeat=heartbeat)
        self._copies = Copies(self._publisher, timeout=settle_timeout, clock=clock)
        self._post = Post(url, connect_timeout=connect_timeout, heartbeat=heartbeat, write_timeout=settle_timeout)
        self._outstanding = Outstanding(self._post, self._publisher, timeout=settle_timeout)
        # Around the two above and whenever acks are told, which need to know them; taken before the link's lock.
        self._settling = threading.Lock()
        self._link = Link.open(url, connect_timeout=connect_timeout, heartbeat=heartbeat)
        with self._guarded():
            self._link.channel.basic_qos(0, prefetch, False)
            for queue in self._queues:
                consumer = self._link.channel.basic_consume(queue, callback=partial(self._on_message, queue))
                self._consumers.append(consumer)

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery, or `None` after `timeout` seconds.

        Raises:
            BrokerUnavailable: the connection is lost; what is not settled will come again. Close it, open another.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._finish_settled()
            if not self._arrived:
                with self._guarded():
                    self._link.read_pending()
                    self._link.beat()
            with self._link.lock:  # `cancel` takes from it as well
                if self._arrived:
                    return self._next()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wait(left)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once. For `Retry` and `Park` the copy is sent; the ack follows when it is confirmed.

        That happens in later calls of any method, as do acks: those of several deliveries in one word. A copy that is
        refused is told in the log (`copy_refused`), and its delivery is given back after a pause.

        Raises:
            BrokerUnavailable: the connection is lost; what is not settled comes again.
            BrokerError: it was settled before.
        """
        message = delivery.tag
        tag: int = message.delivery_tag
        if message.channel is not self._link.channel or not self._link.alive:
            raise lost(ConnectionResetError("it came over a connection that is gone"))
        if tag not in self._unsettled:
            raise BrokerError("This delivery is settled already.", committed="unknown", fix="Settle each once.")
        if isinstance(settlement, Release) and self._keeps_order:
            return
        if isinstance(settlement, Retry | Park):
            self._send_copy(delivery, settlement)
            with self._link.lock:
                self._unsettled.discard(tag)
            return
        try:
            with self._link.lock:
                self._unsettled.discard(tag)
                if isinstance(settlement, Release):
                    self._reject(tag)
                else:
                    self._acked.append(tag)
        except LINK_ERRORS as error:
            self._link.discard()
            raise lost(error) from error

    def end_settled(self) -> None:
        """Wait until all that was settled has ended, so that it can't come again.

        Raises:
            BrokerUnavailable: some of it has not; all that has not ended comes again.
        """
        self._finish_outstanding(time.monotonic() + self._settle_timeout)
        while not self._outstanding.idle:  # a refused copy costs the connection, after a pause
            self._wait(self._outstanding.patience)
            self._finish_settled()
        with self._guarded():
            make_sure_of_acks(self._link, self._queues, self._settle_timeout)

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
        if self._settling.acquire(blocking=False):  # else the consuming thread is at it
            try:
                self._post.keep_alive()
                with suppress(BrokerUnavailable):
                    self._outstanding.look()
                    self._end_deliveries()
            finally:
                self._settling.release()

    def cancel(self) -> None:
        """Take no more; what was not handed out goes back at once. From any thread, never blocks for long or raises."""
        if self._keeps_order or not self._link.lock.acquire(timeout=_BRIEFLY):
            return  # `close` gives it back
        try:
            with suppress(TimeoutError), self._link.limited_to(_BRIEFLY):
                while self._consumers and self._link.alive:
                    self._link.channel.basic_cancel(self._consumers.pop())
                while self._arrived and self._link.alive:
                    _, message = self._arrived.popleft()
                    self._reject(message.delivery_tag)
        except LINK_ERRORS:
            self._link.discard()
        finally:
            self._link.lock.release()

    def close(self) -> None:
        """Give back what is not settled and close; never blocks on a dead link.

        Copies that have no answer are waited for, up to the settle timeout; what has none then is given back, too.
        After many acks the queues are waited for as well, two seconds at most.
        """
        with suppress(BrokerUnavailable):
            self._finish_outstanding(time.monotonic() + self._settle_timeout)
        self._make_sure()
        self._link.close()
        self._arrived.clear()
        self._post.close()
        self._publisher.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _on_message(self, queue: str, message: Any) -> None:
        self._arrived.append((queue, message))

    def _next(self) -> Delivery:
        queue, message = self._arrived.popleft()
        self._unsettled.add(message.delivery_tag)
        redelivered = bool(message.delivery_info["redelivered"])
        alive = partial(self._is_alive, message)
        return arrived_by_amqp(message).delivery(queue, redelivered=redelivered, tag=message, alive=alive)

    def _is_alive(self, message: Any) -> bool:
        """Whether this delivery can still be settled: reads what has arrived, so that a closed connection shows."""
        link = self._link
        try:
            with link.lock:
                link.read_pending()
                link.beat()
        except LINK_ERRORS:
            link.discard()
            return False
        return message.channel is self._link.channel and self._link.alive

    # Copies and what follows them ------------------------------------------------------------------------------------

    def _send_copy(self, delivery: Delivery, settlement: Retry | Park) -> None:
        delays = self._delays.get(delivery.queue) or DEFAULT_DELAYS
        copy = self._copies.made(delivery.queue, arrived_by_amqp(delivery.tag), settlement, delays)
        if len(self._outstanding) >= MOST_OUTSTANDING:
            self._finish_outstanding(time.monotonic() + self._settle_timeout, most=MOST_OUTSTANDING - 1)
        with self._settling:
            self._outstanding.send(delivery.tag.delivery_tag, copy)

    def _finish_settled(self, seconds: float | None = None) -> None:
        """Ack what is done or copied by now, give back what can't be. Waits only for copies that have to be sent again."""
        if not self._acked and self._outstanding.idle:
            return
        with self._settling:
            if self._acked:
                with self._guarded():
                    self._tell_acks()
            if self._outstanding.idle:
                return
            self._outstanding.look()
            if self._outstanding.must_send_again:
                with self._guarded():
                    # Copies of what can't be acked any more would only double it.
                    self._link.read_pending()
                self._outstanding.send_again(self._settle_timeout if seconds is None else seconds)
            self._end_deliveries()

    def _finish_outstanding(self, deadline: float, *, most: int = 0) -> None:
        """Wait for answers, until no more than `most` copies have none."""
        self._finish_settled()
        while len(self._outstanding) > most and (left := deadline - time.monotonic()) > 0:
            with self._guarded():
                self._link.read_pending()
                self._link.beat()
            self._wait(left)
            self._finish_settled(max(0.0, deadline - time.monotonic()))

    def _end_deliveries(self) -> None:
        confirmed, refused = self._outstanding.take_confirmed(), self._outstanding.take_refused()
        if confirmed or refused or self._acked:
            with self._guarded():
                self._acked += confirmed
                self._tell_acks(but_not=refused)
                if refused and self._keeps_order:
                    raise ConnectionAbortedError("a copy was refused, and its message may not come after later ones")
                for tag in refused:
                    self._reject(tag)

    def _tell_acks(self, *, but_not: Sequence[int] = ()) -> None:
        """Ack what is to be acked, as many as possible in one word. The caller holds `_settling`.

        Else a copy whose answer is being looked at by the other thread would be in nobody's hands, and its delivery be
        acked along with those above it.

        RabbitMQ keeps back all but the first 32 single ones to a quorum queue until those are written, and forgets them
        if the connection ends meanwhile.
        """
        # What nobody has in hand yet has higher tags than all that was handed out. It is not looked at: this may be the
        # thread that keeps alive, while the consuming one takes the next.
        tags, self._acked = self._acked, []
        held = [*but_not, *self._unsettled, *self._outstanding.tags]
        lowest = min(held, default=None)
        together = {tag for tag in tags if lowest is None or tag < lowest}
        alone = [tag for tag in tags if tag not in together]
        self._unsure += len(alone) + bool(together)
        self._link.ack(alone, up_to=max(together, default=None))

    def _reject(self, tag: int) -> None:
        self._unsure += 1
        self._link.channel.basic_reject(tag, requeue=True)

    def _make_sure(self) -> None:
        """Wait until the queues have what we told them, if it was much; raises nothing."""
        if not self._link.lock.acquire(timeout=_BRIEFLY):
            return
        try:
            if self._unsure > FEW and self._link.alive and not self._link.blocked:
                make_sure_of_acks(self._link, self._queues, _SURE_SECONDS)
        except LINK_ERRORS:
            self._link.discard()
        finally:
            self._link.lock.release()

    def _wait(self, seconds: float) -> None:
        """Wait until something arrives: a delivery, or an answer to a copy."""
        patience = min(seconds, _PATIENT_LOOK, (self._link.heartbeat or 4) / 4)
        if not self._outstanding.idle:
            patience = min(patience, self._outstanding.patience)
        with self._failing():
            self._link.wait_readable(patience, beside=self._post.fileno() if self._outstanding else None)

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
                f"Consuming {', '.join(map(repr, self._queues))} from {shown(self._url)} ended: {said(error)}.",
                fix="Close this receiver and open another.",
            ) from error
