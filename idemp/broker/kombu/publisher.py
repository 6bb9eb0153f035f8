"""Publishing with the broker's word for each message, many in flight; one failure never holds up the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from amqp.exceptions import AMQPError, ChannelError

from idemp.broker.kombu.call import Call
from idemp.broker.kombu.confirms import Confirms
from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.topology import delay_hop
from idemp.broker.kombu.urls import hosts_of
from idemp.broker.kombu.wire import Parcel, parcel_of
from idemp.broker.port import Refusal
from idemp.broker.urls import endpoint_of, shown
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, check_process, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.messages import Output

_BURST = 64  # publishes between two looks at what the broker says
_SHORTEST_WAIT = 0.001  # seconds: what poll can do
_WORTH_IT = 1.0  # seconds that must be left for sending again
_PATIENT_LOOK = 1.0  # seconds between two looks at the heartbeat while waiting
# Codes with which a broker closes a whole connection because of one message.
_BLAMING_CODES = frozenset({501, 502, 503, 505, 540, 541})


class ConfirmingPublisher(ForkAware):
    """Publishes with confirms on a connection of its own, which it rebuilds by itself.

    Never use the connection of a consumer for it. Publishing, closing and `keep_alive` may come from different threads;
    they take turns.

    Args:
        url: `pyamqp://user:password@host:5672/vhost`, or `amqps://…` for TLS; several, with `;` between, are
            tried in turn.
        connect_timeout: seconds for connecting; never more than the deadline of a call leaves.
        heartbeat: seconds; a connection that is silent for two of them is dead.
        max_in_flight: how many messages wait for their confirm at once.

    Example:
        >>> ConfirmingPublisher("pyamqp://guest:secret@broker/shop")
        ConfirmingPublisher('pyamqp://***@broker/shop')
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 5.0, heartbeat: float = 30, max_in_flight: int = 1000
    ) -> None:
        hosts_of(url)
        if max_in_flight < 1:
            raise ConfigurationError(f"max_in_flight={max_in_flight} lets nothing leave.", fix="Take 1 or more.")
        self._url = url
        self.endpoint = endpoint_of(url)
        self._connect_timeout = connect_timeout
        self._heartbeat = heartbeat
        self._max_in_flight = max_in_flight
        self._lock = renewed_in_child(threading.RLock())
        self._link: Link | None = None
        self._confirms = Confirms[_Place](_answered)
        self._sent: dict[int, Call] = {}  # calls of `send` that were not told yet
        self._tickets = 0
        self.track()

    def after_fork_in_child(self) -> None:
        """Open another connection at the next publish; what is under way is the parent's."""
        self._link = None
        self._confirms = Confirms[_Place](_answered)
        self._sent.clear()

    def identity(self) -> str:
        """The broker's identity, as of `KombuBroker.identity`, read on a connection of its own.

        Raises:
            BrokerUnavailable: the broker can't be reached.
        """
        link = Link.open(self._url, connect_timeout=self._connect_timeout, heartbeat=0)
        try:
            return link.identity(self._url)
        finally:
            link.close()

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send all within `timeout` seconds in sum; per output `None` if the broker confirmed it, else why not."""
        return self.publish_parcels([_packed(output) for output in outputs], timeout)

    def publish_parcels(self, parcels: Sequence[Parcel | Refusal], timeout: float) -> list[Refusal | None]:
        """What `publish` does, for messages that are encoded already or are refused already."""
        check_process()
        with self._lock:
            return self._completed(Call(parcels, time.monotonic() + timeout)).result()

    def send(self, outputs: Sequence[Output], timeout: float) -> int:
        """Send all, and return without waiting for their confirms; the number under which `answered` tells of them.

        What the broker does not take at once is waited for: when too many are in flight, when it takes no messages for now,
        or when it nacked one.
        """
        check_process()
        call = Call([_packed(output) for output in outputs], time.monotonic() + timeout)
        with self._lock:
            link = self._look()
            in_flight = len(self._confirms) + len(outputs)
            if link is None or link.blocked or in_flight > self._max_in_flight or self._confirms.should_move:
                self._completed(call)
            else:
                self._send_over(link, call)
            self._tickets += 1
            self._sent[self._tickets] = call
            return self._tickets

    def answered(self, seconds: float) -> list[tuple[int, list[Refusal | None]]]:
        """The calls of `send` all of whose outputs have an answer by now, each told once; waits up to `seconds` for one.

        Those whose connection was lost are sent again, once without waiting, unless their time is nearly over.
        """
        deadline = time.monotonic() + (seconds if seconds >= _SHORTEST_WAIT else 0.0)
        with self._lock:
            while True:
                self._look()
                self._give_up([call for call in self._sent.values() if call.left <= 0 and not call.is_answered])
                if not (done := self._answered_calls()):
                    self._send_lost_again()
                    done = self._answered_calls()
                left = deadline - time.monotonic()
                if done or not self._sent or left <= 0:
                    return [(ticket, self._sent.pop(ticket).result()) for ticket in done]
                self._wait(min(left, _PATIENT_LOOK, *(call.left for call in self._sent.values())))

    def keep_alive(self) -> None:
        """Service heartbeats of an idle connection; called from another thread, never blocks for long, never raises."""
        if not self._lock.acquire(blocking=False):
            return  # whoever publishes reads and beats as well
        try:
            link = self._link
            if link is not None:
                link.read_pending()
                with link.limited_to(1.0):
                    link.beat()
        except LINK_ERRORS:
            self._discard()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection; never blocks on a dead link. Publishing again opens another."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _wait(self, seconds: float) -> None:
        """Wait for an answer on the connection that there is; without one, only time can pass."""
        link = self._link
        if link is None:
            time.sleep(max(0.0, seconds))
            return
        try:
            link.beat()
            link.wait_readable(seconds)
        except LINK_ERRORS:
            self._discard()

    def _answered_calls(self) -> list[int]:
        """The calls of `send` that are at their end; queues that were missing, and can be declared, are no end."""
        answered = [(ticket, call) for ticket, call in self._sent.items() if call.is_answered]
        for _, call in answered:
            if call.declarable and call.left > 0:
                self._completed(call)
        return [ticket for ticket, _ in answered]

    def _send_lost_again(self) -> None:
        """What closed a connection may be one of the messages on it: those that lost two are waited for, one by one."""
        for call in self._sent.values():
            if call.is_answered or call.sent_on is self._link or call.left < _WORTH_IT:
                continue
            try:
                link = self._open(call) if call.sendings == 1 else None
            except BrokerUnavailable as error:
                call.refuse(call.waiting, Refusal("closed", error.message))
                continue
            except LINK_ERRORS:
                link = None
            if link is None or link.blocked:
                self._completed(call)
            else:
                self._send_over(link, call)

    def _send_over(self, link: Link, call: Call) -> None:
        """Send what has no answer, and do not wait; if the connection is lost, that shows at the next look."""
        call.sent_on = link
        call.sendings += 1
        try:
            waiting = call.waiting
            for start in range(0, len(waiting), _BURST):
                if start:
                    link.read_pending()  # what comes back must not pile up
                if link.blocked:
                    break  # the rest is refused when its time is up, and stays pending
                self._send_burst(link, call, waiting[start : start + _BURST])
        except LINK_ERRORS:
            self._discard()

    def _send_burst(self, link: Link, call: Call, indexes: Sequence[int]) -> None:
        for index in indexes:
            self._confirms.sent((call, index), call.parcel(index))
        with link.limited_to(call.left):
            link.publish(map(call.parcel, indexes))

    def _completed(self, call: Call) -> Call:
        """Run a call, and once more for the queues that were missing."""
        self._run(call)
        if call.left > 0 and (homeless := call.declarable):
            self._declare_hops(call, homeless)
            self._run(call)
        return call

    def _run(self, call: Call) -> Call:
        """Bring a call to its end: every parcel confirmed, refused, or out of time."""
        window = self._max_in_flight
        # An old connection may be dead without our knowing, and what closed it may hit the next one, too.
        second_chance = self._look() is not None or call.sent_on is not None
        while call.waiting and call.left > 0:
            try:
                link = self._open(call)
                self._transmit(call, link, window)
            except BrokerUnavailable as error:
                call.refuse(call.waiting, Refusal("closed", error.message))
                return call
            except LINK_ERRORS as error:
                in_flight = self._confirms.waiting
                if call.left <= 0:
                    break
                self._discard()
                if _blames_a_message(error) and in_flight:
                    alone = all(owner is call for owner, _ in in_flight)
                    guilty = call.blame(error, [index for _, index in in_flight] if alone else [])
                    # Not known which one: send the rest one by one until it shows.
                    window = self._max_in_flight if guilty else 1
                elif second_chance:
                    second_chance = False
                else:
                    call.refuse(call.waiting, Refusal("closed", said(error)))
                    return call
        if call.waiting:
            self._give_up([call])
        return call

    def _transmit(self, call: Call, link: Link, window: int) -> None:
        """Send what waits, at most `window` at once, until all is answered or the time is up."""
        confirms = self._confirms
        unsent = deque(call.waiting)
        while call.left > 0 and not call.is_answered:
            room = 0 if link.blocked else min(_BURST, window - len(confirms))
            if unsent and room > 0:
                self._send_burst(link, call, [unsent.popleft() for _ in range(min(room, len(unsent)))])
            else:
                link.wait_readable(min(call.left, _PATIENT_LOOK))
            link.read_pending()
            link.beat()

    def _give_up(self, calls: Sequence[Call]) -> None:
        """The time is up: what has no answer by now counts as failed, and the channel it came over is never used again."""
        link = self._link
        if link is not None and any(call.sent_on in (None, link) for call in calls):
            with suppress(*LINK_ERRORS):
                link.read_pending()
            self._discard()
        if link is not None and link.blocked:
            refusal = Refusal("blocked", "the broker takes no messages for now (memory or disk alarm)")
        else:
            refusal = Refusal("timeout", "no confirm in time")
        for call in calls:
            call.refuse(call.waiting, refusal)

    def _look(self) -> Link | None:
        """The connection of earlier calls, if it is still good as far as one can see."""
        if self._link is not None:
            try:
                self._link.read_pending()
            except LINK_ERRORS:
                self._discard()
        return self._link

    def _open(self, call: Call) -> Link:
        if self._link is not None:
            if self._confirms.should_move:
                self._confirms = self._confirms.moved(self._link, call.left)
            return self._link
        patience = min(self._connect_timeout, call.left)
        link = Link.open(
            self._url, connect_timeout=patience, heartbeat=self._heartbeat, operation_timeout=max(0.1, patience)
        )
        try:
            link.channel.confirm_select()
        except BaseException:
            link.discard()
            raise
        self._link = link
        self._confirms.listen(link.channel)
        return link

    def _discard(self) -> None:
        if self._link is not None:
            self._link.discard()
        self._link = None
        self._confirms = Confirms[_Place](_answered)

    def _declare_hops(self, call: Call, homeless: list[int]) -> None:
        """Make the delay tiers and dead-letter queues that were missing; what still fails keeps its refusal."""
        refusals: dict[str, Refusal | None] = {}
        for index in homeless:
            hop = call.hop(index)
            if hop.name not in refusals:
                refusals[hop.name] = None
                try:
                    link = self._open(call)
                    with link.limited_to(call.left):
                        channel = link.open_channel()
                        hop.declare(channel)
                        channel.close()
                except (ConfigurationError, BrokerUnavailable) as error:
                    refusals[hop.name] = Refusal("nacked", error.message)
                except LINK_ERRORS as error:
                    self._discard()
                    refusals[hop.name] = Refusal("closed", said(error))
            if (refusal := refusals[hop.name]) is None:
                del call.answers[index]
            else:
                call.answers[index] = refusal


def _packed(output: Output) -> Parcel | Refusal:
    try:
        return delay_hop(output) if output.delay > 0 else parcel_of(output)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is about this output alone
        return Refusal("unsendable", f"never sent: {error}")


_Place = tuple[Call, int]  # of a parcel: in which call, and the how manyth


def _answered(place: _Place, refusal: Refusal | None) -> None:
    call, index = place
    call.answers[index] = refusal


def _blames_a_message(error: BaseException) -> bool:
    if isinstance(error, ChannelError):
        return True
    return isinstance(error, AMQPError) and error.reply_code in _BLAMING_CODES
