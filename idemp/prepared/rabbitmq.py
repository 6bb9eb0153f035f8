"""Prepared messages in RabbitMQ alone: a queue that holds them back, one for the checker, one for what is parked."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.topology import lasting_queue, waiting_queue
from idemp.broker.port import Park
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, renewed_in_child
from idemp.messages import DEAD_PREFIX, Message, Output, OutputKind
from idemp.prepared.carried import CARRIED_HEADER, Carried
from idemp.prepared.port import Decision, Prepared, Record, State, Taken
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from idemp.broker.kombu.pulling import KombuPuller
    from idemp.broker.port import Delivery, Publisher

LARGEST_TEXT: Final = 100_000
"""Bytes of all but the body: RabbitMQ takes about 130,000 bytes of headers, and copies have a little more than this."""
_LONGEST_DELAY: Final = timedelta(milliseconds=2**32 - 1)
_MOST_COPIES: Final = 1000
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2)  # seconds

T = TypeVar("T")

log = logger("idemp.prepared")


@dataclass(slots=True, eq=False)
class _Held:
    """A delivery in our hands.

    Attributes:
        delivery: a copy of a prepared message, not acked.
        carried: what it carries.
        until: when its lease is over; in seconds of this process, since it ends with the connection at the latest.
    """

    delivery: Delivery
    carried: Carried
    until: float = 0.0


class RabbitMQHome(ForkAware):
    """Prepared messages in RabbitMQ (3.10 or newer), without a table. Needs a barrier: the barrier is the decision.

    They wait in the quorum queue `<name>.prepared`, whose time to live is the delay of the check; dead-lettering, at least
    once, takes them to `<name>.check`, which checkers take from. What nobody knows goes back as a copy; what was checked too
    often goes to `<name>.parked` and stays there. Every copy is confirmed before its message is acked, so that a crash
    makes two of one, never none; both meet the same fate, and have the same id.

    Args:
        broker: a URL, or a broker that you have.
        name: what its three queues begin with. One home, one name: other homes need others.
        check_after: how long a message waits before each check; the queue's, so it is the same for all.
        timeout: how long a confirm may take.

    Raises:
        ConfigurationError: the broker is no RabbitMQ, or can't wait so long.

    Example:
        >>> home = RabbitMQHome("pyamqp://guest:secret@broker/shop", "orders")
        >>> home, home.decides
        (RabbitMQHome('pyamqp://***@broker/shop', 'orders'), False)
    """

    decides = False

    def __init__(
        self,
        broker: KombuBroker | str,
        name: str,
        *,
        check_after: timedelta = timedelta(seconds=60),
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self._broker = KombuBroker(broker) if isinstance(broker, str) else broker
        if self._broker.guarantees.name != "pyamqp":
            raise ConfigurationError(
                f"{self._broker!r} can't keep prepared messages.", fix="Take RabbitMQ, or a table: SqlHome."
            )
        if not timedelta(0) < check_after <= _LONGEST_DELAY:
            raise ConfigurationError(
                f"RabbitMQ can't wait for {check_after}.", fix="Take more than 0, at most 49 days."
            )
        self.check_after = check_after
        self._name = name
        self._waiting, self._due, self._parked = f"{name}.prepared", f"{name}.check", f"{name}.parked"
        self._timeout = timeout.total_seconds()
        self._publisher: Publisher = self._broker.publisher()
        self._declared = False
        self._lock = renewed_in_child(threading.RLock())  # around all that is consumed
        self._puller: KombuPuller | None = None
        self._held: list[_Held] = []
        self.track()

    def after_fork_in_child(self) -> None:
        """Hold nothing: what was taken is the parent's."""
        self._puller, self._held = None, []

    @property
    def place(self) -> str:
        """The broker and the name."""
        return f"{self._broker!r} {self._name}"

    def __repr__(self) -> str:
        where = repr(self._broker).partition("(")[2][:-1]
        return f"{type(self).__name__}({where}, {self._name!r})"

    def verify(self) -> None:
        """Make its queues, or make sure that they are as they would be made.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: one of that name has other arguments.
        """
        fix = f"Is check_after another one? Wait until {self._waiting} is empty and delete it, or take another name."
        waiting = waiting_queue(self._waiting, self._due, self.check_after.total_seconds())
        queues = (lasting_queue(self._parked), lasting_queue(self._due), waiting)
        self._broker.declare_hops(replace(queue, fix=fix) for queue in queues)
        self._declared = True

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """Send it to the queue that holds it back, and wait for the confirm.

        Raises:
            BrokerUnavailable: there is no confirm; if it is there all the same, its checker will roll it back.
            BrokerError: no queue can hold it.
            ConfigurationError: `check_after` is not the queue's.
        """
        if check_after != self.check_after:
            raise ConfigurationError(
                f"{self!r} checks after {self.check_after}, not after {check_after}.",
                fix="Give the home the same check_after: RabbitMQ's queue has one for all.",
            )
        if (size := len(Carried(prepared).text())) > LARGEST_TEXT:
            raise BrokerError(
                f"Headers and properties of message {prepared.id} have {size} bytes, RabbitMQ takes {LARGEST_TEXT}.",
                fix="Put it into the body.",
            )
        self._send(self._waiting, Carried(prepared))

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:  # noqa: ARG002
        """Nothing to note here; a rollback ends what was taken."""
        if decision is Decision.ROLLBACK:
            self._end(prepared)
        return decision is Decision.COMMIT

    def published(self, prepared: Prepared) -> None:
        """Ends what was taken. The copy that a producer's message still has here is ended by its check."""
        self._end(prepared)

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """What has come to the queue of what is due, for as long as this connection lives."""
        with self._lock:
            fresh = self._puller is None
            try:
                return self._take(limit, lease)
            except BrokerUnavailable:
                self._disconnect()
                if fresh:
                    raise
            return self._take(limit, lease)  # a connection that lay idle is lost without anybody's fault

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:  # noqa: ARG002
        """Send a copy back to where it waits, for as long as the first time, and end this one."""
        if self._is_held(taken):
            self._send(self._waiting, Carried(taken, taken.checks + checked, reason))
            self._end(taken)

    def park(self, prepared: Prepared, reason: str) -> bool:
        """Send a copy to what is parked, and end this one; without one in hand, take those that are in the queues."""
        if isinstance(prepared, Taken):
            if not self._is_held(prepared):
                return False
            self._send(self._parked, Carried(prepared, prepared.checks, reason))
            self._end(prepared)
            return True
        return _patiently(lambda: self._park(prepared.id, reason)) is not None

    def resume(self, id: UUID) -> bool:
        """Send a copy to what is due."""
        return _patiently(lambda: self._move(self._parked, self._due, id, None) or None) is not None

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """Those in the queues; what a checker has in its hands is not seen, nor is anything that was decided."""
        self._declare()
        found: dict[UUID, Record] = {}
        for queue, there in self._queues():
            if state in {None, there}:
                for message in self._broker.browse(queue, limit):
                    with suppress(ValueError):
                        carried = _read(message)
                        found.setdefault(carried.prepared.id, carried.record(there))
        return list(found.values())[:limit]

    def find(self, id: UUID) -> Record | None:
        """One of those in the queues."""
        return _patiently(lambda: self._find(id))

    def _find(self, id: UUID) -> Record | None:
        self._declare()
        for queue, there in self._queues():
            with self._broker.take(queue, [str(id)], 1) as taken, suppress(ValueError):
                for message in taken.messages:
                    return _read(message).record(there)
        return None

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:  # noqa: ARG002
        """None: what is decided is not here any more."""
        return ()

    def forget(self, ids: Collection[UUID]) -> None:
        """Nothing: what is decided is not here any more."""

    def close(self) -> None:
        """Close the connections; what was taken goes back."""
        with self._lock:
            self._disconnect()
        self._publisher.close()

    def _queues(self) -> tuple[tuple[str, State], ...]:
        # In the order in which messages move: what moves meanwhile is seen further on.
        return ((self._waiting, State.PREPARED), (self._due, State.PREPARED), (self._parked, State.PARKED))

    def _declare(self) -> None:
        if not self._declared:
            self.verify()

    # Sending ---------------------------------------------------------------------------------------------------------

    def _send(self, queue: str, carried: Carried) -> None:
        self._declare()
        prepared = carried.prepared
        message = Message(
            body=prepared.message.body,
            type=prepared.message.type,
            message_id=str(prepared.id),
            content_type=prepared.message.content_type,
            headers={CARRIED_HEADER: carried.text()},
        )
        where: dict[str, Any] = {"kind": OutputKind.SEND, "exchange": "", "routing_key": queue}
        copy = Output(id=prepared.id, ordinal=0, message=message, **where)
        (refusal,) = self._publisher.publish([copy], self._timeout)
        if refusal is None:
            return
        why = f"Message {prepared.id} is not in {queue} ({refusal.kind}): {refusal.detail}."
        if refusal.kind == "unsendable":
            raise BrokerError(why, fix="Mend the message.")
        self._declared = False  # it may have been deleted
        raise BrokerUnavailable(why, fix="Try again; whether a copy is there or not, that is harmless.")

    def _park(self, id: UUID, reason: str) -> bool | None:
        moved = [self._move(queue, self._parked, id, reason) for queue in (self._waiting, self._due)]
        return any(moved) or None

    def _move(self, queue: str, to: str, id: UUID, reason: str | None) -> bool:
        """Move all copies of a message, with a new count of checks; whether there was one."""
        self._declare()
        with self._broker.take(queue, [str(id)], _MOST_COPIES) as taken:
            try:
                copies = [_read(message) for message in taken.messages]
            except ValueError:
                return False  # a stranger's, under the same id
            if not copies:
                return False
            self._send(to, Carried(copies[0].prepared, reason=reason))
            for index in range(len(taken.messages)):
                taken.accept(index)
            return True

    # Consuming -------------------------------------------------------------------------------------------------------

    def _take(self, limit: int, lease: timedelta) -> list[Taken]:
        now = time.monotonic()
        found = [held for held in self._held if held.until <= now][:limit]
        found += self._arriving(limit - len(found))
        for held in found:
            held.until = now + lease.total_seconds()
        return [held.carried.taken(held) for held in found]

    def _arriving(self, limit: int) -> list[_Held]:
        if limit < 1:
            return []
        if self._puller is None:
            self._declare()
            self._puller = self._broker.puller(self._due)
        found: list[_Held] = []
        for delivery in self._puller.pull(limit):
            try:
                found.append(_Held(delivery, _read(delivery.message)))
            except ValueError as error:
                self._set_aside(self._puller, delivery, str(error))
        self._held += found
        return found

    def _set_aside(self, puller: KombuPuller, delivery: Delivery, why: str) -> None:
        log.error(
            "A message in %s is none that idemp prepared: it goes to the dead-letter queue",
            self._due,
            extra={"event": "prepared_unreadable", "queue": self._due, "message_id": delivery.message.message_id},
        )
        puller.park(delivery, Park("NoPreparedMessage", {f"{DEAD_PREFIX}error": why}))

    def _is_held(self, taken: Taken) -> bool:
        with self._lock:
            return taken.tag in self._held

    def _end(self, prepared: Prepared) -> None:
        """Ack what is in our hands. If its connection is lost it comes again, and meets the same fate."""
        with self._lock:
            if not isinstance(prepared, Taken) or prepared.tag not in self._held or self._puller is None:
                return
            self._held.remove(prepared.tag)
            try:
                self._puller.ack([prepared.tag.delivery])
                self._puller.beat()  # checks may take longer than two heartbeats
            except BrokerUnavailable:
                self._disconnect()

    def _disconnect(self) -> None:
        """What was in our hands goes back."""
        puller, self._puller, self._held = self._puller, None, []
        self._declared = False  # perhaps the queues are gone
        if puller is not None:
            puller.close()


def _read(message: Message) -> Carried:
    return Carried.read(message.headers.get(CARRIED_HEADER), message.body)


def _patiently(look: Callable[[], T | None]) -> T | None:
    """Look again if nothing is found: what an earlier look gave back is on its way into its queue for a moment."""
    for pause in _PAUSES:
        if (found := look()) is not None:
            return found
        time.sleep(pause)
    return look()
