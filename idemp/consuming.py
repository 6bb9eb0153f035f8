"""One consuming thread of a worker: receive, run, settle; through outages of broker and database."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from idemp.broker.port import Park, Release, Retry
from idemp.deliverylog import about, tell
from idemp.errors import BrokerUnavailable, ConfigurationError, IdempError, LostAfterCommit, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.app import App
    from idemp.broker.port import Delivery, Receiver
    from idemp.dispatch import Refused
    from idemp.handling import Ended, Handling
    from idemp.suspects import Turns

log = logging.getLogger("idemp.worker")

LONGEST_PAUSE: Final = 5.0
_RECEIVE_SECONDS: Final = 0.25
_CONFIRM_SECONDS: Final = 0.05
_SHARE_OF_WAITING: Final = 0.05
_COMES_AGAIN: Final = "It comes again: as a duplicate, or, of a type that is not opted in, to be handled once more."


class _Alive(Protocol):
    def keep_alive(self) -> None: ...


class KeptAlive:
    """Parties whose heartbeats are serviced from another thread.

    Example:
        >>> from idemp.broker.memory import InMemoryBroker
        >>> kept, publisher = KeptAlive(), InMemoryBroker().publisher()
        >>> with kept.while_used(publisher):
        ...     kept.keep_alive()
    """

    def __init__(self) -> None:
        self._parties: set[_Alive] = set()
        self._lock = threading.Lock()

    @contextmanager
    def while_used(self, party: _Alive) -> Iterator[None]:
        """While the block runs, the party is kept alive."""
        with self._lock:
            self._parties.add(party)
        try:
            yield
        finally:
            with self._lock:
                self._parties.discard(party)

    def keep_alive(self) -> None:
        """Service all of them."""
        with self._lock:
            parties = list(self._parties)
        for party in parties:
            party.keep_alive()


class Consuming:
    """What one consuming thread does until it is told to stop.

    Args:
        app: whose queue and handlers.
        stop: ends it.
        kept: services heartbeats while a handler runs.
        turns: shared with the other consuming threads.
    """

    def __init__(self, app: App, stop: threading.Event, kept: KeptAlive, turns: Turns) -> None:
        self._app = app
        self._stop = stop
        self._kept = kept
        self._publisher = app.broker.publisher()
        self._protocol = app.protocol(self._publisher, turns)
        self._outage = Pause(stop, app.name)
        self._receiver: Receiver | None = None
        self._in_hand: tuple[Delivery, float] | None = None  # and since when
        self._underway: dict[int, _Arrival] = {}  # by what is sent; as many as the broker sends ahead
        self._answered: deque[tuple[int, Refused]] = deque()

    def cancel(self) -> None:
        """Take no more, and give back at once what no handler has yet; called from another thread, never raises."""
        receiver = self._receiver
        if receiver is not None:
            receiver.cancel()

    def tell_abandoned(self) -> None:
        """Log the delivery that is still running, which the end of the process cuts off; called from another thread."""
        in_hand = self._in_hand
        if in_hand is None:
            return
        delivery, began = in_hand
        seconds = round(time.monotonic() - began, 3)
        log.warning(
            "%s: %s %s still runs after %.1f s and is cut off: the database rolls its transaction back; it comes again",
            self._app.name,
            delivery.message.type or "message",
            delivery.message.message_id or "without an id",
            seconds,
            extra={"event": "handler_abandoned", **about(self._app.name, delivery), "seconds": seconds},
        )

    def run(self) -> None:
        """Consume until the end; after each loss of the connection, with queue and exchange made sure of.

        Raises:
            BaseException: whatever a handler raised beyond `Exception`; its message returned to the queue.
        """
        known = True  # the app has just declared it
        with self._kept.while_used(self._publisher):
            while not self._stop.is_set():
                try:
                    if not known:
                        self._app.broker.declare(self._app.topology())
                    known = False
                    self._consume()
                except (BrokerUnavailable, ConfigurationError) as error:
                    self._outage.after(f"{self._app.name}: the broker is away", error)
            self._settle_underway()
            self._protocol.dispatcher.flush()
            self._publisher.close()

    def _consume(self) -> None:
        receiver = self._app.broker.receiver([self._app.queue], prefetch=self._app.settings.prefetch)
        self._receiver = receiver
        try:
            with self._kept.while_used(receiver):
                while not self._stop.is_set():
                    delivery = receiver.receive(0.0 if self._underway else _RECEIVE_SECONDS)
                    self._outage.over(f"{self._app.name}: the broker is back")
                    patience = _CONFIRM_SECONDS if delivery is None else self._live(receiver, delivery)
                    self._settle_confirmed(patience)
                self._settle_underway()
        finally:
            self._receiver = None
            receiver.close()

    def _live(self, receiver: Receiver, delivery: Delivery) -> float:
        """Handle a delivery and send its outputs; how long to wait for confirms before the next one, seconds."""
        began = time.monotonic()
        self._in_hand = delivery, began
        try:
            handling = self._handled(delivery)
        finally:
            self._in_hand = None
        if handling is None:
            receiver.settle(delivery, Release())
            return 0.0
        arrival, shipment = _Arrival(delivery, receiver, handling, began), handling.shipment
        if shipment is None:
            self._end(arrival, handling.ended)
        elif shipment.outputs:
            self._underway[self._protocol.dispatcher.send(shipment)] = arrival
        else:
            self._end(arrival, handling.confirmed(self._protocol.dispatcher.dispatch(shipment)))
        # What takes long to handle must not keep others from being acked for long.
        return (time.monotonic() - began) * _SHARE_OF_WAITING

    def _settle_confirmed(self, patience: float) -> None:
        """Settle the deliveries whose outputs are confirmed by now, or refused; wait a while if there are none."""
        self._answered.extend(self._protocol.dispatcher.answered(patience))
        while self._answered:  # one after the other: a lost connection shows in between
            ticket, refused = self._answered.popleft()
            arrival = self._underway.pop(ticket)
            self._end(arrival, arrival.handling.confirmed(refused))

    def _settle_underway(self) -> None:
        """Wait for all confirms that are still to come."""
        while self._underway:
            self._settle_confirmed(_CONFIRM_SECONDS)

    def _end(self, arrival: _Arrival, ended: Ended) -> None:
        receiver, delivery, (outcome, settlement) = arrival.receiver, arrival.delivery, ended
        tell(self._app.name, delivery, outcome, settlement, seconds=time.monotonic() - arrival.began)
        if receiver is not self._receiver:
            return  # its connection was lost, and it comes again
        try:
            receiver.settle(delivery, settlement)
        except BrokerUnavailable as error:
            if isinstance(settlement, Retry | Park | Release):
                raise
            raise LostAfterCommit(error.message, fix=_COMES_AGAIN) from error

    def _handled(self, delivery: Delivery) -> Handling | None:
        """Run a delivery; while the database is away it is held, and consumption with it. `None` at the end."""
        app, outage = self._app, Pause(self._stop, self._app.name)
        while not self._stop.is_set():
            try:
                handling = self._protocol.begin(delivery)
            except StoreUnavailable as error:
                outage.after(f"{app.name}: the database is away, consumption pauses", error)
                continue
            except BrokerUnavailable:
                raise
            except BaseException as error:
                log.critical(
                    "%s: handling %s %s ended the worker: %r",
                    app.name,
                    delivery.message.type,
                    delivery.message.message_id,
                    error,
                    extra={"event": "handler_ended_worker", **about(app.name, delivery)},
                )
                raise
            outage.over(f"{app.name}: the database is back")
            return handling
        return None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A delivery whose outputs are on their way.

    Attributes:
        delivery: what arrived.
        receiver: where it is to be settled.
        handling: what is done with it.
        began: when, by the monotonic clock.
    """

    delivery: Delivery
    receiver: Receiver
    handling: Handling
    began: float


class Pause:
    """Growing pauses during an outage: one log line when it begins, one when it is over."""

    def __init__(self, stop: threading.Event, consumer: str) -> None:
        self._stop = stop
        self._consumer = consumer
        self._seconds = 0.0

    def after(self, what: str, error: IdempError) -> None:
        """Log it if it is news, and wait."""
        if self._seconds == 0:
            kind = type(error).__name__
            log.warning("%s: %s", what, error, extra={"event": "outage", "consumer": self._consumer, "error": kind})
        self._seconds = min(LONGEST_PAUSE, self._seconds * 2 or 0.1)
        self._stop.wait(self._seconds)

    def over(self, what: str) -> None:
        """Log it if there was an outage."""
        if self._seconds:
            log.info(what, extra={"event": "outage_over", "consumer": self._consumer})
        self._seconds = 0.0
