"""Receives from the local broker's file."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from idemp.broker.copies import attempt_of
from idemp.broker.local.file import DELAYED, LEASED, READY, numbers
from idemp.broker.local.leases import ALIVE_PATIENCE, Leased, LeaseLost
from idemp.broker.port import Ack, Delivery, Release
from idemp.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from idemp.broker.local.leases import Holder
    from idemp.broker.port import Settlement

SHORTEST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.05
IDLE_BURIAL: Final = 0.1
BUSY_BURIAL: Final = 1.0


class LocalReceiver:
    """Consumes queues of a `LocalBroker`: leases up to `prefetch` messages at once, and hands them out one by one."""

    def __init__(self, holder: Holder, prefetch: int) -> None:
        self._holder = holder
        self._prefetch = prefetch
        self._buffer: deque[Leased] = deque()
        self._held: set[tuple[int, int]] = set()
        self._renew_at = 0.0
        self._buried_at = 0.0
        self._seen: int | None = None
        self._look_at = 0.0
        self._cancelled = False
        self._closed = False
        self._pause = threading.Event().wait

    def receive(self, timeout: float) -> Delivery | None:
        """The oldest ready message of all queues, unless `prefetch` messages are unsettled."""
        deadline = time.monotonic() + timeout
        pause = SHORTEST_PAUSE
        while True:
            delivery = self._next()
            left = deadline - time.monotonic()
            if delivery is not None or left <= 0:
                return delivery
            self._pause(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once, in one transaction."""
        leased = delivery.tag
        with self._holder.link.lock:
            self._check_open()
            if not isinstance(leased, Leased) or leased.owner != self._holder.name:
                raise BrokerError("This delivery came from another receiver.")
            if (leased.id, leased.lease) not in self._held:
                raise BrokerError("This delivery is not in this receiver's hands: it was settled before.")
            try:
                self._holder.settle(leased, settlement)
            except LeaseLost:
                self._held.discard((leased.id, leased.lease))
                raise
            self._held.discard((leased.id, leased.lease))
            if not isinstance(settlement, Ack):
                self._seen = None  # it may be the next one again

    def keep_alive(self) -> None:
        """Renew the leases of what is held."""
        lock = self._holder.link.lock
        if not lock.acquire(timeout=ALIVE_PATIENCE):
            return  # the receiver's thread is in a transaction: the next call will do
        try:
            if self._held and not self._closed:
                with suppress(BrokerError):
                    self._renew()
        finally:
            lock.release()

    def cancel(self) -> None:
        """Take no more, and give back what is leased and was not handed out."""
        lock = self._holder.link.lock
        if not lock.acquire(timeout=ALIVE_PATIENCE):
            return  # `close` gives it back
        try:
            self._cancelled = True
            while self._buffer and not self._closed:
                leased = self._buffer.popleft()
                self._held.discard((leased.id, leased.lease))
                with suppress(BrokerError):
                    self._holder.settle(leased, Release())
        finally:
            lock.release()

    def close(self) -> None:
        """Give back what is not settled."""
        with self._holder.link.lock:
            if not self._closed:
                self._closed = True
                self._holder.close()

    def _next(self) -> Delivery | None:
        with self._holder.link.lock:
            self._check_open()
            self._holder.link.check_file()
            now = self._holder.now()
            if self._holder.was_set_back(now):
                self._seen, self._renew_at = None, 0.0
            if self._buffer and now >= self._renew_at:
                self._renew()  # what lay here for long may be somebody else's by now
            if not self._buffer and not self._cancelled:
                self._fill(now)
            return self._handed_out(self._buffer.popleft()) if self._buffer else None

    def _fill(self, now: float) -> None:
        room = self._prefetch - len(self._held)
        if room > 0:
            self._lease_ready(room, now)
            if self._bury() and not self._buffer:
                self._lease_ready(room, now)

    def _lease_ready(self, room: int, now: float) -> None:
        """Lease what is ready. As long as nothing changes in the file, nothing but its version is looked at."""
        version = self._holder.link.data_version()
        if version is None or version != self._seen or now >= self._look_at:
            ready, self._look_at = self._look(now)
            self._seen = version
            if ready:
                self._lease(room, now)

    def _lease(self, room: int, now: float) -> None:
        self._seen = None
        found = self._holder.lease(room)
        renew_at = now + self._holder.seconds / 2
        self._renew_at = min(self._renew_at, renew_at) if self._held else renew_at
        self._held.update((leased.id, leased.lease) for leased in found)
        self._buffer.extend(found)

    def _look(self, now: float) -> tuple[bool, float]:
        """Whether anything is ready, and when to look again though nobody changed the file."""
        queues = numbers(self._holder.queues)
        ready, *dues = self._holder.link.rows(
            f"SELECT EXISTS (SELECT 1 FROM messages WHERE state = {READY} AND queue IN ({queues})),"
            f" (SELECT min(due) FROM messages WHERE state = {DELAYED}),"
            f" (SELECT min(due) FROM messages WHERE state = {LEASED} AND queue IN ({queues}))"
        )[0]
        next_due = min((due for due in dues if due is not None), default=float("inf"))
        return bool(ready) or next_due <= now, next_due

    def _bury(self) -> bool:
        """Now and then, see whether others died with messages in their hands. Whether any came back."""
        now = time.monotonic()
        if now < self._buried_at + (BUSY_BURIAL if self._buffer else IDLE_BURIAL):
            return False
        self._buried_at = now
        if not self._holder.bury():
            return False
        self._seen = None
        return True

    def _renew(self) -> None:
        now = self._holder.now()
        ours = self._holder.renew()
        self._renew_at = now + self._holder.seconds / 2
        self._held -= {(leased.id, leased.lease) for leased in self._buffer} - ours
        self._buffer = deque(leased for leased in self._buffer if (leased.id, leased.lease) in ours)

    def _handed_out(self, leased: Leased) -> Delivery:
        return Delivery(
            message=leased.message,
            queue=self._holder.queues[leased.queue],
            attempt=attempt_of(leased.message),
            redelivered=leased.delivery_count > 1,
            tag=leased,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerUnavailable(
                "The receiver is closed; what it held will be delivered again.", fix="Open another."
            )
