"""Receiving over STOMP: each message is acked by itself, and given back by the end of its subscription."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

from idemp.broker.copies import attempt_of, dead_queue, parked, retried
from idemp.broker.port import Ack, Delivery, Park, Release, Retry
from idemp.broker.stomp.link import Refused, StompError, TooLarge
from idemp.broker.stomp.topology import waiting_queue
from idemp.broker.stomp.waiting import Waiting, move, tell_refused
from idemp.broker.stomp.wire import DUE, UNSAYABLE, destination, headers_of, message_of
from idemp.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.broker.port import Settlement
    from idemp.broker.stomp.client import Frame
    from idemp.broker.stomp.link import Link
    from idemp.clock import Clock

_MOST_SLOTS: Final = 64
_CLOSE_SECONDS: Final = 1.0
_MOVE_SECONDS: Final = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


@dataclass(slots=True, eq=False)
class _Slot:
    """A subscription, and what of it is in our hands. The broker gives back a subscription's messages all at once.

    Attributes:
        queue: what it consumes.
        size: how many messages the broker sends ahead.
        single_active: whether the queue has one active consumer at a time.
        name: the subscription's.
        held: acks of what was handed out and has not ended.
        released: whether some of it was given back, which takes the end of the subscription.
        latest: the place of what was handed out last among all of the receiver's.
    """

    queue: str
    size: int
    single_active: bool
    name: str = ""
    held: set[str] = field(default_factory=set)
    released: bool = False
    latest: int = 0


class StompReceiver:
    """Consumes queues on a connection of its own. Used by one thread; `keep_alive` and `cancel` by any.

    To give back one message and keep another, each has a subscription of its own; of a queue with one active consumer
    everything is given back at once, in its order, when the receiver closes.

    Args:
        link: the connection.
        queues: the queues to consume, and of each whether it has one active consumer at a time.
        prefetch: how many unsettled deliveries of each queue may be held.
        settle_timeout: seconds that a copy may take.
        clock: by which delayed messages come due.

    Raises:
        StompError: a subscription is refused, or the connection is gone; the link is still to be closed.
    """

    def __init__(
        self, link: Link, queues: Mapping[str, bool], *, prefetch: int, settle_timeout: float, clock: Clock
    ) -> None:
        self._link = link
        self._settle_timeout = settle_timeout
        self._clock = clock
        self._ready: deque[Frame] = deque()
        self._slots: dict[str, _Slot] = {}
        self._handed = 0
        self._pause = 0.0
        self._refused: deque[tuple[float, _Slot]] = deque()
        self._moving = threading.Lock()
        self._cancelled = False
        self._closed = False
        for queue, single_active in queues.items():
            for size in [prefetch] if single_active else _sizes(prefetch):
                self._subscribe(_Slot(queue, size, single_active))
        self._waiting = Waiting(link, list(queues), clock)
        link.end_fired(time.monotonic() + settle_timeout)

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery, or `None` after `timeout` seconds.

        Raises:
            BrokerUnavailable: the connection is lost; what is not settled will come again. Close it, open another.
        """
        deadline = time.monotonic() + timeout
        with self._failing():
            while True:
                self._give_back_refused()
                soon = min(deadline, self._refused[0][0]) if self._refused else deadline
                with self._moving:
                    if not self._cancelled:
                        self._waiting.move_due(self._settle_timeout)
                        soon = min(soon, time.monotonic() + max(0.0, self._waiting.seconds()))
                found = self._link.wait(self._look, soon)
                if isinstance(found, Delivery) or time.monotonic() >= deadline:
                    return found if isinstance(found, Delivery) else None

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once. `Retry` and `Park` move it in one transaction of the broker's.

        A copy that the broker refuses is told in the log (`copy_refused`), and its message comes again after a pause.

        Raises:
            BrokerUnavailable: it could not be settled; the message will come again.
        """
        frame: Frame = delivery.tag
        slot = self._slots.get(frame.headers["subscription"])
        with self._failing():
            if slot is None or frame.headers["ack"] not in slot.held:
                raise BrokerError(
                    "This delivery is not in this receiver's hands: it was settled before.", committed="unknown"
                )
            slot.held.discard(frame.headers["ack"])
            match settlement:
                case Ack():
                    self._link.fire("ACK", {"id": frame.headers["ack"]})
                case Retry() | Park():
                    if not self._moved(slot, delivery, settlement):
                        return
                case Release():
                    slot.released = True
                case _:  # pragma: no cover - the type checker proves that there is no other
                    assert_never(settlement)
            if (slot.released or self._cancelled) and not slot.held and not slot.single_active:
                self._renew(slot)

    def end_settled(self) -> None:
        """Wait until the broker has every ack.

        Raises:
            BrokerUnavailable: it has not; what has not ended will come again. Close it, open another.
        """
        with self._failing():
            self._link.end_fired(time.monotonic() + self._settle_timeout)

    def keep_alive(self) -> None:
        """Move what comes due while a handler runs; the client sends its heartbeats by itself."""
        if self._closed or self._cancelled or not self._moving.acquire(blocking=False):
            return
        try:
            self._waiting.move_due(_MOVE_SECONDS)
        except StompError as error:
            self._link.fail(str(error))
        finally:
            self._moving.release()

    def cancel(self) -> None:
        """Take no more, and give back at once what was not handed out; what was can still be settled."""
        with self._link.changed:
            if self._cancelled or self._closed:
                return
            self._cancelled = True
            # What is held of a queue with one active consumer is given back by `close`, so that none overtakes another.
            leaving = [slot for slot in self._leaving() if not slot.held and not slot.single_active]
            for slot in leaving:
                del self._slots[slot.name]
                self._link.forget(slot.name)
        with suppress(StompError):
            for slot in leaving:
                self._link.unsubscribe(slot.name)
            if self._moving.acquire(timeout=_CLOSE_SECONDS):  # else `close` gives it back
                try:
                    self._waiting.give_back()
                finally:
                    self._moving.release()

    def close(self) -> None:
        """End what was settled, give back what was not, and close; never blocks on a dead link."""
        if not self._closed:
            self._closed = True
            with suppress(StompError):
                for slot in self._leaving():
                    self._link.unsubscribe(slot.name)
                self._link.end_fired(time.monotonic() + _CLOSE_SECONDS)
            self._link.close()

    # Inside

    def _leaving(self) -> list[_Slot]:
        """The subscriptions in the order in which they are to end.

        The broker gives what comes back to whoever is free, so first those that hold nothing; and it puts what comes back
        behind what came back before, so then the earliest message first.
        """
        with self._link.changed:
            names = [frame.headers["subscription"] for frame in self._ready]
            places = {name: place for place, name in enumerate(names, start=self._handed)}
            return sorted(
                self._slots.values(), key=lambda slot: slot.latest if slot.held else places.get(slot.name, -1)
            )

    def _look(self) -> Delivery | bool | None:
        """The next delivery; `True` where something else is to be looked at; called under the link's lock."""
        if self._waiting.arrived() and not self._cancelled:
            return True
        while self._ready and not self._cancelled:
            frame = self._ready.popleft()
            slot = self._slots.get(frame.headers["subscription"])
            if slot is not None:
                slot.held.add(frame.headers["ack"])
                slot.latest = self._handed
                self._handed += 1
                return self._delivery(slot.queue, frame)
        return None

    def _delivery(self, queue: str, frame: Frame) -> Delivery:
        message = message_of(frame.headers, frame.body)
        return Delivery(
            message=message,
            queue=queue,
            attempt=attempt_of(message),
            redelivered=frame.headers.get("redelivered") == "true",
            tag=frame,
            alive=lambda: self._link.lost is None,
        )

    def _moved(self, slot: _Slot, delivery: Delivery, settlement: Retry | Park) -> bool:
        """Whether the copy is there; what the broker refuses goes back to its queue after a pause, which grows."""
        try:
            self._move(delivery, settlement)
        except (Refused, *UNSAYABLE) as error:
            if self._link.lost is not None:
                raise Refused(str(error)) from error
            self._pause = 0.0 if slot.single_active else min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
            tell_refused(delivery.queue, delivery.message.message_id, error, self._pause)
            if slot.single_active:
                raise Refused(str(error)) from error
            self._refused.append((time.monotonic() + self._pause, slot))
            return False
        self._pause = 0.0
        return True

    def _give_back_refused(self) -> None:
        while self._refused and self._refused[0][0] <= time.monotonic():
            slot = self._refused.popleft()[1]
            slot.released = True
            if not slot.held:
                self._renew(slot)

    def _move(self, delivery: Delivery, settlement: Retry | Park) -> None:
        message = delivery.message
        if isinstance(settlement, Park):
            self._park(delivery, settlement)
            return
        delay = settlement.delay.total_seconds()
        now = self._clock.now()
        headers = headers_of(retried(message, settlement, now), wait=delay)
        where = delivery.queue
        if delay > 0:
            where = waiting_queue(delivery.queue, delay)
            headers[DUE] = str(round(1000 * (now.timestamp() + delay)))
        self._put(delivery, where, headers)

    def _park(self, delivery: Delivery, park: Park) -> None:
        """Where the whole story makes the frame too large, the reason alone; the log says more (`delivery_ended`)."""
        where = dead_queue(delivery.queue)
        try:
            self._put(delivery, where, headers_of(parked(delivery.message, park), lasting=True))
        except TooLarge:
            if self._link.lost is not None:
                raise
            self._put(delivery, where, headers_of(parked(delivery.message, Park(park.reason)), lasting=True))

    def _put(self, delivery: Delivery, where: str, headers: Mapping[str, str]) -> None:
        deadline = time.monotonic() + self._settle_timeout
        move(self._link, delivery.tag, where, headers, delivery.message.body, deadline)

    def _subscribe(self, slot: _Slot) -> None:
        headers = {"ack": "client-individual", "activemq.prefetchSize": str(slot.size)}
        if slot.single_active:
            headers["activemq.exclusive"] = "true"
        with self._link.changed:
            slot.name = self._link.subscribe(destination(slot.queue), self._ready, headers)
            self._slots[slot.name] = slot
        slot.released = False

    def _renew(self, slot: _Slot) -> None:
        with self._link.changed:
            if self._slots.pop(slot.name, None) is None:
                return
        self._link.unsubscribe(slot.name)
        if not self._cancelled:
            self._subscribe(slot)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        if self._closed:
            raise BrokerUnavailable("The receiver is closed.", fix="Open another.")
        try:
            yield
        except StompError as error:
            # Whatever the broker did not take, the state of the rest is best told by a new connection.
            self._link.fail(str(error))
            raise BrokerUnavailable(
                f"Consuming from {self._link.shown} ended: {error}.",
                fix="Nothing is lost: close this receiver and open another, what has not ended comes again.",
            ) from error


def _sizes(prefetch: int) -> Sequence[int]:
    """How many messages each subscription gets ahead.

    Example:
        >>> _sizes(3), sum(_sizes(1000)), len(_sizes(1000))
        ([1, 1, 1], 1000, 64)
    """
    slots = min(prefetch, _MOST_SLOTS)
    return [prefetch // slots + (number < prefetch % slots) for number in range(slots)]
