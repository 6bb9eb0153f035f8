"""Publishing over STOMP: a receipt for every send, many of them in flight, one deadline."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from idemp.broker.port import Endpoint, Refusal
from idemp.broker.stomp.limits import is_too_large
from idemp.broker.stomp.link import Late, Lost, Refused, StompError, TooLarge
from idemp.broker.stomp.statistics import NoStatistics
from idemp.broker.stomp.topology import Known, read, usable, waiting_queue
from idemp.broker.stomp.wire import DUE, UNSAYABLE, destination, headers_of
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, check_process, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.broker.stomp.link import Link
    from idemp.broker.stomp.statistics import Statistics
    from idemp.clock import Clock
    from idemp.messages import Output

_FRESH_SECONDS: Final = 5.0
"""How old our knowledge of bindings may be."""
_NOT_ALLOWED: Final = "not authorized"
_NOBODY: Final = "temp-queue://"
"""All that the broker says of a temporary queue whose owner is gone is its name."""


@dataclass(slots=True)
class _Sent:
    """An output on its way: the receipts that it waits for, or its answer."""

    receipts: list[str] = field(default_factory=list)
    answer: Refusal | None = None

    @property
    def suspect(self) -> bool:
        """Whether the connection was cut for it, or for one that was under way with it."""
        return self.answer is not None and self.answer.kind == "closed" and is_too_large(self.answer.detail)


class StompPublisher(ForkAware):
    """Publishes on a connection of its own, which it rebuilds by itself.

    Args:
        opens: opens a connection within so many seconds.
        statistics: tells whether a queue exists that idemp did not declare.
        clock: by which delayed outputs come due.
        connect_timeout: seconds for connecting; never more than the deadline of a call leaves.
        endpoint: the broker, for traces.
    """

    def __init__(
        self,
        opens: Callable[[float], Link],
        statistics: Statistics,
        clock: Clock,
        *,
        connect_timeout: float,
        endpoint: Endpoint,
    ) -> None:
        self.endpoint = endpoint
        self._opens = opens
        self._statistics = statistics
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._lock = renewed_in_child(threading.Lock())
        self._link: Link | None = None
        self._known: Known | None = None
        self._foreign: set[str] = set()
        self.track()

    def after_fork_in_child(self) -> None:
        """Open another connection at the next publish."""
        self._link = self._known = None

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send all within `timeout` seconds in sum; per output `None` if the broker has it, else why not."""
        check_process()
        began = time.monotonic()
        deadline = began + timeout
        sent = [_Sent() for _ in outputs]
        with self._lock:
            if sent:
                self._publish(list(zip(outputs, sent, strict=True)), began, deadline)
        return [each.answer for each in sent]

    def keep_alive(self) -> None:
        """Nothing to do: the client sends its heartbeats by itself."""

    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        with self._lock:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, pairs: Sequence[tuple[Output, _Sent]], began: float, deadline: float) -> None:
        self._send_together(pairs, began, deadline)
        # The broker cuts the connection for a frame that is too large without naming it: alone, it shows which one it is.
        for output, each in pairs:
            if each.suspect and time.monotonic() < deadline:
                each.receipts, each.answer = [], None
                self._send_together([(output, each)], began, deadline)

    def _send_together(self, pairs: Sequence[tuple[Output, _Sent]], began: float, deadline: float) -> None:
        try:
            link = self._ready(deadline)
        except (BrokerUnavailable, ConfigurationError) as error:
            for _, each in pairs:
                each.answer = Refusal("closed", error.message)
            return
        link.limit(deadline - time.monotonic())
        broken: Refusal | None = None
        for output, each in pairs:
            if broken is None:
                broken = self._send(link, output, each, began, deadline)
            if broken is not None and not each.receipts:
                each.answer = each.answer or broken
        _settle(link, [each for _, each in pairs], deadline)
        if link.lost is not None:
            self._discard()

    def _send(self, link: Link, output: Output, sent: _Sent, began: float, deadline: float) -> Refusal | None:
        """Send one output, or write its answer; returns why nothing more can be sent."""
        if time.monotonic() >= deadline:
            return Refusal("timeout", "the time was up before it was sent")
        try:
            queues = self._routed(link, output, began, deadline)
        except (BrokerUnavailable, ConfigurationError) as error:
            return Refusal("closed", error.message)
        except StompError as error:
            link.fail(str(error))
            return Refusal("timeout" if isinstance(error, Late) else "closed", str(error))
        if isinstance(queues, Refusal):
            sent.answer = queues
            return None
        try:
            headers = headers_of(output.message, wait=output.delay)
        except UNSAYABLE as error:
            sent.answer = Refusal("unsendable", f"never sent: {error}")
            return None
        for queue in queues:
            where = queue
            if output.delay > 0:
                where = waiting_queue(queue, output.delay)
                headers[DUE] = str(round(1000 * (self._clock.now().timestamp() + output.delay)))
            try:
                sent.receipts.append(
                    link.post("SEND", {**headers, **_placed(where, output.message.body)}, output.message.body)
                )
            except TooLarge as error:
                sent.answer = Refusal("unsendable", str(error))
                return None
            except Lost as error:
                sent.receipts.clear()
                sent.answer = _gone(error, deadline)
                return sent.answer
        return None

    def _routed(self, link: Link, output: Output, began: float, deadline: float) -> list[str] | Refusal:
        """The queues that an output goes to."""
        key, exchange = output.routing_key, output.exchange
        if not exchange and not usable(key):
            return Refusal("unsendable", f"never sent: ActiveMQ can't have a queue {key!r}")
        found = self._looked_up(self._current(link, deadline), output)
        if not found and self._current(link, deadline).read < began:
            self._known = None  # perhaps it was declared since
            found = self._looked_up(self._current(link, deadline), output)
        if found or exchange:
            if not found and output.mandatory:
                return Refusal("returned", f"no queue takes {key!r} of exchange {exchange!r}")
            return found
        return self._of_others(output, deadline)

    def _looked_up(self, known: Known, output: Output) -> list[str]:
        if output.exchange:
            return known.bound(output.exchange, output.routing_key)
        there = known.has(output.routing_key) or output.routing_key in self._foreign
        return [output.routing_key] if there else []

    def _of_others(self, output: Output, deadline: float) -> list[str] | Refusal:
        """A queue that idemp did not declare; the broker would make it, so that nobody saw a slip of the pen."""
        queue = output.routing_key
        if output.delay > 0:
            return Refusal("unsendable", f"never sent: no app of idemp consumes {queue!r}, where it would wait")
        try:
            exists = queue.startswith("/") or self._statistics.of(queue, deadline) is not None
        except Late as error:
            return Refusal("timeout", str(error))
        except NoStatistics:
            return Refusal(
                "returned",
                f"idemp declared no queue {queue!r}, and the broker does not tell whether there is one: "
                "it needs statisticsBrokerPlugin and XStream",
            )
        if exists:
            self._foreign.add(queue)
            return [queue]
        return Refusal("returned", f"there is no queue {queue!r}") if output.mandatory else []

    def _current(self, link: Link, deadline: float) -> Known:
        if self._known is None or time.monotonic() - self._known.read > _FRESH_SECONDS:
            self._known = read(link, deadline)
        return self._known

    def _ready(self, deadline: float) -> Link:
        if self._link is None or self._link.lost is not None:
            self._discard()
            self._link = self._opens(max(0.05, min(self._connect_timeout, deadline - time.monotonic())))
        return self._link

    def _discard(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            self._known = None


def _settle(link: Link, sent: Sequence[_Sent], deadline: float) -> None:
    """Wait for the receipts, and write each answer."""
    for each in sent:
        for receipt in each.receipts:
            refusal = _awaited(link, receipt, deadline)
            each.answer = each.answer or refusal


def _awaited(link: Link, receipt: str, deadline: float) -> Refusal | None:
    try:
        link.answer(receipt, deadline)
    except TooLarge as error:
        return Refusal("unsendable", str(error))
    except Refused as error:
        if str(error).startswith(_NOBODY):
            return Refusal("returned", f"there is no queue {str(error)!r}")
        return Refusal("unsendable" if _NOT_ALLOWED in str(error) else "nacked", str(error))
    except Late:
        # A broker without sendFailIfNoSpace reads nothing more until it has space.
        link.fail("no receipt came in time")
        return Refusal("timeout", "no receipt came in time; the broker may have no space left")
    except Lost as error:
        return _gone(error, deadline)
    return None


def _gone(error: Lost, deadline: float) -> Refusal:
    return Refusal("timeout" if time.monotonic() >= deadline else "closed", str(error))


def _placed(queue: str, body: bytes) -> dict[str, str]:
    # Without its length the broker takes a body for a text, which ends at its first zero byte.
    return {"destination": destination(queue), "content-length": str(len(body))}
