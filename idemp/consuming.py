"""One consuming thread of a worker: receive, run, settle; through outages of broker and database."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from idemp.broker.port import OrderedReceiver, Park, Release, Retry
from idemp.bulk.batch import Batch, may_share
from idemp.deliverylog import about, tell
from idemp.errors import (
    BrokerReplaced,
    BrokerUnavailable,
    ConfigurationError,
    IdempError,
    LostAfterCommit,
    StoreReplaced,
    StoreUnavailable,
)
from idemp.ordering import Lines
from idemp.outcome import Outcome
from idemp.policy import MOST_IN_BATCH
from idemp.showing import described, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from idemp.app import App
    from idemp.broker.port import Delivery, Receiver
    from idemp.dispatch import Refused
    from idemp.handling import CameTo, Ended, Handling
    from idemp.suspects import Turns

log = logger("idemp.worker")

LONGEST_PAUSE: Final = 5.0
_RECEIVE_SECONDS: Final = 0.25
_CONFIRM_SECONDS: Final = 0.05
_GATHER_SECONDS: Final = 0.002
_SHARE_OF_WAITING: Final = 0.05
_COMES_AGAIN: Final = "It comes again: as a duplicate, or, of a type that is not opted in, to be handled once more."

T = TypeVar("T")


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

    Attributes:
        alive_at: the last sign of life outside of handlers, by the monotonic clock; read from other threads, as the others.
        handling_since: since when a delivery runs, with its claim and its handler; `None` while none does.
        away: the server that it waits for; `None` while it consumes.
        ended_by: the error that ends it, and with it the process; `None` while there is none.
    """

    def __init__(self, app: App, stop: threading.Event, kept: KeptAlive, turns: Turns) -> None:
        self._app = app
        self._stop = stop
        self._kept = kept
        self._publisher = app.broker.publisher()
        self._protocol = app.protocol(self._publisher, turns)
        self._outage = Pause(stop, app.name)
        self._receiver: Receiver | None = None
        self._in_hand: Sequence[_Arrival] = ()
        self._underway: dict[int, Sequence[_Arrival]] = {}  # by what is sent; as many as the broker sends ahead
        self._answered: deque[tuple[_Arrival, Refused]] = deque()
        self._lines = Lines[_Arrival](app.name, app.clock)
        self.alive_at = time.monotonic()
        self.handling_since: float | None = None
        self.away: str | None = "the broker"
        self.ended_by: BaseException | None = None

    def cancel(self) -> None:
        """Take no more, and give back at once what no handler has yet; called from another thread, never raises."""
        receiver = self._receiver
        if receiver is not None:
            receiver.cancel()

    def in_hand(self) -> tuple[str, list[str | None]]:
        """Return the consumer, and the types of the messages whose handling runs; called from other threads."""
        return self._app.name, [arrival.delivery.message.type for arrival in self._in_hand]

    def report_long(self, seconds: float) -> None:
        """Log the deliveries whose handling has been running for so long; called from another thread."""
        for delivery in [arrival.delivery for arrival in self._in_hand]:
            log.warning(
                "%s: handling %s %s has been running for %.0f s",
                self._app.name,
                delivery.message.type or "message",
                delivery.message.message_id or "without an id",
                seconds,
                extra={"event": "handler_runs_long", **about(self._app.name, delivery), "seconds": round(seconds, 3)},
            )

    def tell_abandoned(self) -> None:
        """Log the deliveries that are still running, which the end of the process cuts off; called from another thread."""
        for arrival in self._in_hand:
            delivery, seconds = arrival.delivery, round(time.monotonic() - arrival.began, 3)
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
            BrokerReplaced: waiting does not help.
            StoreReplaced: likewise.
            BaseException: whatever a handler raised beyond `Exception`; its message returned to the queue.
        """
        known = True  # the app has just declared it
        with self._kept.while_used(self._publisher):
            while not self._stop.is_set():
                self.alive_at, self.away = time.monotonic(), "the broker"
                try:
                    if not known:
                        self._app.broker.declare(self._app.topology())
                    known = False
                    self._consume()
                except BrokerReplaced:
                    raise
                except (BrokerUnavailable, ConfigurationError) as error:
                    self._outage.after(f"{self._app.name}: the broker is away", error)
            self._settle_underway()
            self._protocol.dispatcher.flush()
            self._publisher.close()

    def _consume(self) -> None:
        receiver = self._app.broker.receiver([self._app.queue], prefetch=self._app.prefetch)
        self._receiver, self.away = receiver, None
        try:
            with self._kept.while_used(receiver):
                while not self._stop.is_set():
                    self.alive_at = time.monotonic()
                    delivery = receiver.receive(0.0 if self._underway else self._lines.patience(_RECEIVE_SECONDS))
                    self._outage.over(f"{self._app.name}: the broker is back")
                    patience = _CONFIRM_SECONDS if delivery is None else self._live(receiver, delivery)
                    if (held := self._lines.turn()) is not None:
                        held.began = time.monotonic()
                        self._run([held])
                    self._settle_confirmed(self._lines.patience(patience))
                self._settle_underway()
        except (BrokerUnavailable, ConfigurationError):
            raise
        except BaseException as error:
            # The process is to end: what the receiver gives back is not for the other threads of this process.
            self.ended_by = error
            self._stop.set()
            raise
        finally:
            self._receiver = None
            for arrival in self._lines.drop():
                arrival.handling.abandon()
            receiver.close()

    def _live(self, receiver: Receiver, delivery: Delivery) -> float:
        """Handle a delivery, with others that share its transaction, and send its outputs.

        Returns:
            How long to wait for confirms before the next one, seconds.
        """
        began = time.monotonic()
        gathered = self._gathered(receiver, delivery)
        sharing = [arrival for arrival in gathered if _shares(arrival)]
        others = [arrival for arrival in gathered if not _shares(arrival) and not self._lines.join(arrival)]
        self._run(sharing)
        self._run(others)
        # What takes long to handle must not keep others from being acked for long.
        return (time.monotonic() - began) * _SHARE_OF_WAITING

    def _run(self, group: list[_Arrival]) -> None:
        self._in_hand = group
        try:
            for handled in self._handled(group):
                self._send(handled)
                for arrival in handled:
                    self._lines.passed(arrival)
        finally:
            self._in_hand = ()

    def _gathered(self, receiver: Receiver, delivery: Delivery) -> list[_Arrival]:
        """A delivery and those after it, up to one that can't share a transaction.

        While they come one after the other, the next one is waited for a little; a single one waits for nobody.
        """
        gathered: list[_Arrival] = []
        most, until = MOST_IN_BATCH, time.monotonic() + _GATHER_SECONDS
        more: Delivery | None = delivery
        try:
            while more is not None:
                more = self._lines.recalled(more)
                arrival = _Arrival(more, receiver, self._protocol.arrive(more), time.monotonic())
                gathered.append(arrival)
                most = min(most, arrival.waits())
                if len(gathered) >= most or self._stop.is_set():
                    break
                more = receiver.receive(max(0.0, until - time.monotonic()) if len(gathered) > 1 else 0.0)
        except BrokerUnavailable:
            for arrival in gathered:  # they come again
                arrival.handling.abandon()
            raise
        return gathered

    def _handled(self, group: list[_Arrival]) -> Iterator[list[_Arrival]]:
        """Those that were handled, up to where outputs are sent; at the end of the worker others are given back.

        Those of a batch come together, before any of them runs alone.
        """
        came_to: list[CameTo] | None = [None] * len(group)
        if len(group) > 1:
            members = [arrival.handling.member for arrival in group if arrival.handling.member]
            batch: Batch[CameTo] = Batch(self._protocol, members, self._protocol.ended)
            came_to = self._through_outages(
                lambda: self._protocol.together(batch), lambda: [group[place].delivery for place in batch.running]
            )
        together = list(zip(group, came_to or [None] * len(group), strict=True))
        shared = [arrival for arrival, each in together if each is not None and self._go_on(arrival, each)]
        if shared:
            yield shared
        for arrival in (arrival for arrival, each in together if each is None):
            if came_to is not None and self._alone(arrival):
                yield [arrival]
                if len(group) > 1:
                    self._settle_confirmed(0.0)
            else:
                arrival.handling.abandon()
                arrival.receiver.settle(arrival.delivery, Release())

    def _alone(self, arrival: _Arrival) -> bool | None:
        return self._through_outages(lambda: self._go_on(arrival, None), lambda: [arrival.delivery])

    def _go_on(self, arrival: _Arrival, came_to: CameTo) -> bool:
        """After its batch, or alone; anew if the database was away before."""
        if arrival.used:
            arrival.handling = self._protocol.arrive(arrival.delivery)
        arrival.used = True
        member = arrival.handling.member
        if member is not None:
            with member.turn():
                arrival.handling.joined(came_to)
        return True

    def _send(self, handled: list[_Arrival]) -> None:
        """Send what they emitted, all together; what emitted nothing is at its end."""
        by_timeout: dict[timedelta, list[_Arrival]] = {}
        for arrival in handled:
            shipment = arrival.handling.shipment
            if shipment is None:
                self._end(arrival, arrival.handling.ended)
            elif shipment.outputs:
                by_timeout.setdefault(shipment.timeout, []).append(arrival)
            else:
                self._end(arrival, arrival.handling.confirmed(self._protocol.dispatcher.dispatch(shipment)))
        for sent in by_timeout.values():
            shipments = [arrival.handling.shipment for arrival in sent if arrival.handling.shipment is not None]
            self._underway[self._protocol.dispatcher.send(*shipments)] = sent

    def _settle_confirmed(self, patience: float) -> None:
        """Settle the deliveries whose outputs are confirmed by now, or refused; wait a while if there are none."""
        for ticket, answers in self._protocol.dispatcher.answered(patience):
            self._answered.extend(zip(self._underway.pop(ticket), answers, strict=True))
        while self._answered:  # one after the other: a lost connection shows in between
            arrival, refused = self._answered.popleft()
            self._end(arrival, arrival.handling.confirmed(refused))

    def _settle_underway(self) -> None:
        """Wait for all confirms that are still to come."""
        while self._underway or self._answered:
            self.alive_at = time.monotonic()
            self._settle_confirmed(_CONFIRM_SECONDS)

    def _end(self, arrival: _Arrival, ended: Ended) -> None:
        receiver, delivery, (outcome, settlement) = arrival.receiver, arrival.delivery, ended
        tell(self._app.name, delivery, outcome, settlement, seconds=time.monotonic() - arrival.began)
        if receiver is not self._receiver:
            return  # its connection was lost, and it comes again
        # What is pending is committed: of it nothing but outputs are still to come, which keep no order.
        if arrival.order is not None and isinstance(settlement, Retry) and outcome is not Outcome.PENDING:
            self._lines.hold(arrival, settlement)
            return
        try:
            receiver.settle(delivery, settlement)
            if arrival.order is not None and isinstance(settlement, Park) and isinstance(receiver, OrderedReceiver):
                receiver.end_settled()  # if it came again, it might be handled after those that wait for it
        except BrokerUnavailable as error:
            if isinstance(settlement, Retry | Park | Release):
                raise
            raise LostAfterCommit(error.message, fix=_COMES_AGAIN) from error

    def _through_outages(self, run: Callable[[], T], running: Callable[[], Sequence[Delivery]]) -> T | None:
        """While the database is away what runs is held, and consumption with it. `None` at the end of the worker."""
        app, outage = self._app, Pause(self._stop, self._app.name)
        while not self._stop.is_set():
            self.handling_since = time.monotonic()
            try:
                done = run()
            except (StoreReplaced, BrokerUnavailable):
                raise
            except StoreUnavailable as error:
                self.alive_at, self.handling_since, self.away = time.monotonic(), None, "the database"
                outage.after(f"{app.name}: the database takes no handlings, consumption pauses", error)
                continue
            except BaseException as error:
                for delivery in running():
                    log.critical(
                        "%s: handling %s %s ended the worker: %s",
                        app.name,
                        delivery.message.type,
                        delivery.message.message_id,
                        described(error),
                        extra={"event": "handler_ended_worker", **about(app.name, delivery)},
                    )
                raise
            finally:
                self.alive_at, self.handling_since = time.monotonic(), None
            self.away = None
            outage.over(f"{app.name}: the database takes handlings again")
            return done
        return None


@dataclass(slots=True)
class _Arrival:
    """A delivery on its way.

    Attributes:
        delivery: what arrived.
        receiver: where it is to be settled.
        handling: what is done with it.
        began: when, by the monotonic clock.
        used: whether its handling has gone on; after an outage, or a failure, it takes another one.
        order: what it has in common with those whose order it keeps; `None` if it keeps none.
    """

    delivery: Delivery
    receiver: Receiver
    handling: Handling
    began: float
    used: bool = False
    order: bytes | None = field(init=False)

    def __post_init__(self) -> None:
        self.order = self.handling.order

    def waits(self) -> int:
        """It waits for others; how many may share its transaction, itself included."""
        member = self.handling.member
        if member is None:
            return 1
        member.watch.waits()
        return member.work.policy.batch if may_share(member.work) else 1


def _shares(arrival: _Arrival) -> bool:
    """Whether it waits for a transaction that it may share."""
    return arrival.handling.member is not None and may_share(arrival.handling.member.work)


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
