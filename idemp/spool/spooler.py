"""Draining a queue into its spool: receive, COMMIT, ack. A crash between the last two stores twice, and loses nothing."""

from __future__ import annotations

import enum
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Ack, Park
from idemp.clock import SystemClock
from idemp.columns import columns_of
from idemp.consuming import Pause
from idemp.deadletter import dead_letter_headers
from idemp.errors import BrokerUnavailable, IdempError, OversizedMessage, StoreUnavailable, TransientStoreError
from idemp.showing import logger
from idemp.spool.store import Unstorable

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from idemp.broker.port import Broker, Delivery, Receiver
    from idemp.clock import Clock
    from idemp.spool.store import SpoolStore

log = logger("idemp.spool")

CHUNK: Final = 500
MOST_MESSAGES: Final = 1_000_000
MOST_BYTES: Final = 4 * 1024**3
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_LOOK_SECONDS: Final = 1.0
_MORE_SECONDS: Final = 0.05  # for what is on its way already
_ROOM: Final = 0.9  # of the limits: below it, a full spool takes messages again
_AWAY = (BrokerUnavailable, StoreUnavailable, TransientStoreError)


@dataclass(slots=True)
class Tally:
    """What became of a queue's messages.

    Attributes:
        stored: how many are in the spool and acked.
        parked: how many the spool can't take; they are in the dead-letter queue.
        full: whether it ended because the spool was full.
    """

    stored: int = 0
    parked: int = 0
    full: bool = False


class _Ended(enum.Enum):
    STOPPED = enum.auto()
    EMPTY = enum.auto()
    FULL = enum.auto()


class Spooler:
    """Drains one queue into its spool. Several may drain the same one; then its order is that of their transactions.

    Args:
        broker: where the queue is.
        store: where the spool is.
        queue: the queue.
        chunk: how many messages share a transaction, and are in memory at once.
        most_messages: beyond so many in the spool it stops consuming: the rest waits in the queue.
        most_bytes: the same, by the sum of their bodies.
        max_body_bytes: larger messages are parked, as every consumer does.
        clock: for the times that dead letters tell.

    Attributes:
        tally: what became of the messages so far.
    """

    def __init__(
        self,
        broker: Broker,
        store: SpoolStore,
        queue: str,
        *,
        chunk: int = CHUNK,
        most_messages: int = MOST_MESSAGES,
        most_bytes: int = MOST_BYTES,
        max_body_bytes: int = 8 * 1024 * 1024,
        clock: Clock | None = None,
    ) -> None:
        self._broker = broker
        self._store = store
        self._queue = queue
        self._chunk = chunk
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._max_body_bytes = max_body_bytes
        self._clock: Clock = clock or SystemClock()
        self.tally = Tally()

    def run(
        self, stop: threading.Event, *, until_empty: bool = False, told: Callable[[Tally], object] = lambda _: None
    ) -> None:
        """Drain until somebody asks to stop; through outages, and through times when the spool is full.

        Args:
            stop: set it to end: what was received and not stored goes back.
            until_empty: end when the queue is empty, when the spool is full, or when broker or database are away.
            told: called after each transaction.

        Raises:
            IdempError: with `until_empty`, the broker or the database is away; else what no waiting mends.
        """
        outage = Pause(stop, self._queue)
        while not stop.is_set():
            try:
                ended = self._drain(stop, outage, told, until_empty=until_empty)
                self.tally.full = ended is _Ended.FULL
                if until_empty or ended is _Ended.STOPPED:
                    break
                self._wait_for_room(stop)
            except _AWAY as error:
                if until_empty:
                    raise
                outage.after(f"{self._queue}: the broker or the database is away, spooling pauses", error)

    def _drain(
        self, stop: threading.Event, outage: Pause, told: Callable[[Tally], object], *, until_empty: bool
    ) -> _Ended:
        with closing(self._broker.receiver([self._queue], prefetch=self._chunk)) as receiver:
            while not stop.is_set():
                deliveries = self._collect(receiver)
                if deliveries and not self._settle(receiver, deliveries):
                    return _Ended.FULL  # closing gives all back that is in our hands
                outage.over(f"{self._queue}: broker and database are back")
                told(self.tally)
                if not deliveries and until_empty and not self._broker.depth(self._queue):
                    return _Ended.EMPTY
        return _Ended.STOPPED

    def _collect(self, receiver: Receiver) -> list[Delivery]:
        found: list[Delivery] = []
        size = 0
        while len(found) < self._chunk and size < _CHUNK_BYTES:
            delivery = receiver.receive(_MORE_SECONDS if found else _LOOK_SECONDS)
            if delivery is None:
                break
            found.append(delivery)
            size += len(delivery.message.body)
        return found

    def _settle(self, receiver: Receiver, deliveries: Sequence[Delivery]) -> bool:
        """Store and ack, or park; `False` if the spool is full."""
        for delivery in deliveries:
            if len(delivery.message.body) > self._max_body_bytes:
                self._park(receiver, delivery, self._oversized(delivery))
        fitting = [each for each in deliveries if len(each.message.body) <= self._max_body_bytes]
        try:
            return self._append(receiver, fitting)
        except Unstorable as error:
            if len(fitting) == 1:
                self._park(receiver, fitting[0], error)
                return True
        # By halves, so that only what the database can't take is parked, and order is kept.
        half = len(fitting) // 2
        return self._settle(receiver, fitting[:half]) and self._settle(receiver, fitting[half:])

    def _append(self, receiver: Receiver, deliveries: Sequence[Delivery]) -> bool:
        if not deliveries:
            return True
        rows = [columns_of(delivery.message, "") for delivery in deliveries]
        if not self._store.append(self._queue, rows, most_messages=self._most_messages, most_bytes=self._most_bytes):
            return False
        for delivery in deliveries:
            receiver.settle(delivery, Ack())
        self.tally.stored += len(deliveries)
        return True

    def _park(self, receiver: Receiver, delivery: Delivery, error: IdempError) -> None:
        message = delivery.message
        reason = type(error).__name__
        receiver.settle(
            delivery, Park(reason, dead_letter_headers(delivery, error, consumer=self._queue, clock=self._clock))
        )
        self.tally.parked += 1
        log.error(
            "%s: not spooled, parked: %s",
            self._queue,
            error,
            extra={
                "event": "not_spooled",
                "queue": self._queue,
                "message_id": message.message_id,
                "message_type": message.type,
                "reason": reason,
            },
        )

    def _oversized(self, delivery: Delivery) -> OversizedMessage:
        return OversizedMessage(
            f"The body has {len(delivery.message.body)} bytes; {self._max_body_bytes} is the limit.",
            fix="Raise max_body_bytes, or have the producer send a reference.",
        )

    def _wait_for_room(self, stop: threading.Event) -> None:
        """Consume nothing until the spool was read and released; the messages wait where they are."""
        level = self._store.level(self._queue)
        log.warning(
            "%s: the spool is full, spooling pauses",
            self._queue,
            extra={
                "event": "spool_full",
                "queue": self._queue,
                "messages": level.messages,
                "bytes": level.stored_bytes,
            },
        )
        while not stop.wait(_LOOK_SECONDS):
            level = self._store.level(self._queue)
            if level.messages <= _ROOM * self._most_messages and level.stored_bytes <= _ROOM * self._most_bytes:
                log.info(
                    "%s: the spool has room again", self._queue, extra={"event": "spool_room", "queue": self._queue}
                )
                return
