"""Receiving over a virtual transport: one message at a time, taken when it is asked for."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.kombu.settling import Arrived, Copies, encoded, lost
from idemp.broker.kombu.virtual.line import told
from idemp.broker.port import Park, Release, Retry
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.broker.kombu.virtual.line import Held, Line
    from idemp.broker.kombu.virtual.publisher import VirtualPublisher
    from idemp.broker.kombu.wire import Parcel
    from idemp.broker.port import Delivery, Settlement
    from idemp.clock import Clock

_TEND_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 2.0  # between two looks whether the queues are still declared
_SHORTEST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.05
_CLOSE_SECONDS: Final = 1.0


class VirtualCopies(Copies):
    """Copies of messages, of which delayed ones wait beside their queue."""

    def _delayed(
        self,
        queue: str,
        arrived: Arrived,
        headers: Mapping[str, Any],
        delay: float,
        delays: Sequence[float],  # noqa: ARG002 - any delay will do
    ) -> Parcel:
        return replace(encoded(queue, arrived, headers), delay=delay)


class VirtualReceiver(ForkAware):
    """Consumes queues on a connection of its own. Used by one thread; `keep_alive` and `cancel` by any.

    Args:
        line: the connection.
        queues: the queues to consume.
        prefetch: how many unsettled deliveries of each queue may be held.
        publisher: for the copies of retried and parked messages; closed with the receiver.
        settle_timeout: seconds that a copy may take.
        clock: for the time of a message's first failure.

    Raises:
        BrokerUnavailable: a queue is missing.
    """

    def __init__(
        self,
        line: Line,
        queues: Sequence[str],
        *,
        prefetch: int,
        publisher: VirtualPublisher,
        settle_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._line = line
        self._queues = list(queues)
        self._prefetch = prefetch
        self._publisher = publisher
        self._copies = VirtualCopies(publisher, timeout=settle_timeout, clock=clock)
        self._held: dict[str, Held] = {}
        self._cancelled = False
        self._closed = False
        self._tended = float("-inf")
        self._looked = time.monotonic()
        self._bound: list[str] = []  # the queues that were bound when it was opened
        self.track()
        try:
            self._check()
        except BaseException:
            line.close()
            raise

    def after_fork_in_child(self) -> None:
        """Be closed here: what is held is the parent's."""
        self._closed = True

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery, or `None` after `timeout` seconds.

        Raises:
            BrokerUnavailable: the connection is lost, or a queue was deleted (`FLUSHALL`); what is not settled will come
                again. Close it, open another.
        """
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while True:
            with self._failing():
                delivery = self._next()
            left = deadline - time.monotonic()
            if delivery is not None or left <= 0:
                return delivery
            time.sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once. `Retry` and `Park` first make sure of the copy, then ack.

        Raises:
            BrokerUnavailable: it could not be settled; the message will come again.
            BrokerError: it was settled before.
        """
        held: Held = delivery.tag
        if self._closed:
            raise lost(ConnectionResetError("the receiver is closed"))
        if self._held.get(held.tag) is not held:
            raise BrokerError("This delivery is settled already.", committed="unknown", fix="Settle each once.")
        if held.arrived is not None and isinstance(settlement, Retry | Park):
            self._copies.secure(held.queue, held.arrived, settlement, ())
        try:
            if isinstance(settlement, Release):
                self._line.give_back([held])
            elif not self._line.ack(held):
                self._held.pop(held.tag, None)
                raise BrokerUnavailable(
                    "The message went back to its queue: nothing was heard of it for longer than the visibility timeout.",
                    committed="unknown",
                    fix="Nothing is lost: the message comes again.",
                )
        except self._line.errors as error:
            raise lost(error) from error
        self._held.pop(held.tag, None)

    def keep_alive(self) -> None:
        """Say that a long handler still holds its message; called from another thread, never raises."""
        with suppress(*self._line.errors):
            if not self._closed:
                self._line.touch(list(self._held.values()))

    def cancel(self) -> None:
        """Take no more; nothing is taken ahead of its time."""
        self._cancelled = True

    def close(self) -> None:
        """Give back what is not settled and close; never blocks on a dead link."""
        if self._closed:
            return
        self._closed = True
        with suppress(*self._line.errors):
            self._line.limit(_CLOSE_SECONDS)
            self._line.give_back(list(self._held.values()))
        self._held.clear()
        self._line.close()
        self._publisher.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line.shown!r})"

    def _check(self) -> None:
        if self._prefetch < 1:
            raise ConfigurationError(f"prefetch={self._prefetch} is not supported.", fix="Take 1 or more.")
        with self._failing():
            missing = [queue for queue in self._queues if not self._line.knows(queue)]
            self._bound = [queue for queue in self._queues if self._line.is_bound(queue)]
        if missing:
            raise BrokerUnavailable(f"{self._line.shown} has no queue {missing[0]!r}.", fix="Declare it first.")

    def _look(self) -> None:
        """Make sure that nobody has deleted the queues: the store cancels no consumer."""
        gone = [queue for queue in self._bound if not self._line.is_bound(queue)]
        if gone:
            raise BrokerUnavailable(f"{self._line.shown} has no queue {gone[0]!r} any more.", fix="Declare it again.")

    def _next(self) -> Delivery | None:
        if self._cancelled:
            return None
        now = time.monotonic()
        if now - self._tended >= _TEND_SECONDS:
            self._tended = now
            self._line.tend(self._queues)
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look()
        counts = Counter(held.queue for held in self._held.values())
        free = [queue for queue in self._queues if counts[queue] < self._prefetch]
        while free and (held := self._line.take(free)) is not None:
            # The others first, next time.
            self._queues.remove(held.queue)
            self._queues.append(held.queue)
            if held.arrived is not None:
                self._held[held.tag] = held
                return held.arrived.delivery(held.queue, redelivered=held.redelivered, tag=held)
            self._copies.secure(held.queue, Arrived({}, {}, held.raw), Park("Unreadable"), ())
            self._line.ack(held)
        return None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        if self._closed:
            raise BrokerUnavailable("The receiver is closed.", fix="Open another.")
        try:
            yield
        except self._line.errors as error:
            raise BrokerUnavailable(
                f"Consuming from {self._line.shown} ended: {told(error)}.", fix="Close this receiver and open another."
            ) from error
