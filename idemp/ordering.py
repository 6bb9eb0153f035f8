"""What a consuming thread keeps in hand, so that messages of a key are handled in the order in which they came.

A message that failed is not copied to a delay tier, where others of its key would overtake it: its delivery stays
unsettled in the worker's hand until its next attempt is due, and those that arrive with the same key wait behind it. All of
them are the broker's still: whatever ends the worker or its connection gives them back in their old order.

```
arrives ── key held? ── no ──► handled ── committed, or parked for good ──► settled
              │ yes               │ failed, or in flight elsewhere
              ▼                   ▼
       waits in line       first in line, until its time comes ──► handled …
```
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from idemp.broker.copies import retried
from idemp.deadletter import REPLAYS_HEADER
from idemp.deliverylog import about
from idemp.messages import counter
from idemp.showing import logger

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Retry
    from idemp.clock import Clock

log = logger("idemp.worker")

ORDERED_PREFETCH: Final = 100
"""How many messages a thread holds whose queue keeps an order; no setting, and never smaller in a later release.

A quorum queue puts what is given back behind what was given back before. That is in order as long as whoever consumes takes
at once all that his predecessor held: one who takes less, and ends, puts the oldest behind those that he did not take.
"""

MOST_REMEMBERED: Final = 10 * ORDERED_PREFETCH
"""Of how many messages a thread remembers the attempts; far more than it ever holds."""


class Ordered(Protocol):
    """What stands in line.

    Attributes:
        delivery: what arrived; before each attempt the broker would have delivered it so, had it made a copy.
    """

    delivery: Delivery

    @property
    def order(self) -> bytes | None:
        """Its key; `None` if it keeps no order."""
        ...


T = TypeVar("T", bound=Ordered)


@dataclass(slots=True)
class _Line(Generic[T]):
    """Deliveries of one key, in the order in which they came.

    Attributes:
        due: when the first one's turn comes, by the monotonic clock.
        waiting: never empty, but while the first one has its turn.
        since: when a failure began to hold back the others; `None` while nothing does.
    """

    due: float
    waiting: deque[T] = field(default_factory=deque)
    since: float | None = None


class Lines(Generic[T]):
    """The deliveries that one thread holds, by key. All that arrives by a connection, and goes with it.

    Args:
        consumer: whose they are, for the log.
        clock: source of time.

    Example:
        >>> from dataclasses import dataclass
        >>> from datetime import timedelta
        >>> from idemp import Message
        >>> from idemp.broker.port import Delivery, Retry
        >>> from idemp.testing import FakeClock
        >>> @dataclass
        ... class Arrival:
        ...     delivery: Delivery
        ...     order: bytes
        >>> first, second = (Arrival(Delivery(message=Message(body=b""), queue="orders"), b"7") for _ in range(2))
        >>> clock = FakeClock()
        >>> lines = Lines("orders", clock)
        >>> lines.hold(first, Retry(timedelta(seconds=5), counted=True))
        >>> lines.join(second), lines.turn()
        (True, None)
        >>> _ = clock.advance(timedelta(seconds=5))
        >>> lines.turn() is first, first.delivery.attempt
        (True, 2)
        >>> lines.passed(first)
        >>> lines.turn() is second
        True
    """

    def __init__(self, consumer: str, clock: Clock) -> None:
        self._consumer = consumer
        self._clock = clock
        self._lines: dict[bytes, _Line[T]] = {}
        self._attempts: dict[bytes, int] = {}  # of what has failed and not ended, whatever became of its connection

    def join(self, arrival: T) -> bool:
        """Whether others of its key are held, so that it waits behind them from now on."""
        line = self._lines.get(arrival.order) if arrival.order is not None else None
        if line is None:
            return False
        line.waiting.append(arrival)
        return True

    def hold(self, arrival: T, retry: Retry) -> None:
        """It has failed: it is the first of its key until its next attempt is due, and those after it wait."""
        assert arrival.order is not None  # noqa: S101
        now = self._clock.monotonic()
        line = self._lines.setdefault(arrival.order, _Line(now))
        line.due = now + retry.delay.total_seconds()
        line.waiting.appendleft(arrival)
        if line.since is None:
            line.since = now
            log.info(
                "%s: what comes after %s with the same key waits for it",
                self._consumer,
                _named(arrival.delivery),
                extra={"event": "key_held", **about(self._consumer, arrival.delivery)},
            )
        delivery = arrival.delivery
        message = retried(delivery.message, retry, self._clock.now())
        attempt = (retry.attempt or delivery.attempt + 1) if retry.counted else delivery.attempt
        arrival.delivery = replace(delivery, message=message, attempt=attempt)
        self._remember(delivery, attempt)

    def recalled(self, delivery: Delivery) -> Delivery:
        """A delivery with the attempts it had in this hand, if it comes again since its connection was lost.

        Else a message whose attempts take longer than a connection lasts would fail for ever.
        """
        if not delivery.redelivered or not self._attempts:
            return delivery
        attempt = self._attempts.get(_identity(delivery), 1)
        return replace(delivery, attempt=attempt) if attempt > delivery.attempt else delivery

    def turn(self) -> T | None:
        """One whose turn has come, out of its line; after its attempt it is held again, or has `passed`."""
        now = self._clock.monotonic()
        line = min(self._lines.values(), key=lambda each: each.due, default=None)
        return line.waiting.popleft() if line is not None and line.due <= now else None

    def passed(self, arrival: T) -> None:
        """It has had its attempt: unless it is held again, the next one of its key comes at once."""
        key = arrival.order
        line = self._lines.get(key) if key is not None else None
        if line is not None and line.waiting and line.waiting[0] is arrival:
            return
        if self._attempts:
            self._attempts.pop(_identity(arrival.delivery), None)
        if key is None or line is None:
            return
        if line.since is not None:
            waiting, seconds = len(line.waiting), round(self._clock.monotonic() - line.since, 3)
            log.info(
                "%s: %d that waited for %s go on",
                self._consumer,
                waiting,
                _named(arrival.delivery),
                extra={
                    "event": "key_let_go",
                    **about(self._consumer, arrival.delivery),
                    "waiting": waiting,
                    "seconds": seconds,
                },
            )
        line.since, line.due = None, self._clock.monotonic()
        if not line.waiting:
            del self._lines[key]

    def patience(self, longest: float) -> float:
        """Seconds until the next turn, `longest` at most."""
        if not self._lines:
            return longest
        due = min(line.due for line in self._lines.values())
        return min(longest, max(0.0, due - self._clock.monotonic()))

    def _remember(self, delivery: Delivery, attempt: int) -> None:
        identity = _identity(delivery)
        self._attempts.pop(identity, None)  # the latest is the last
        self._attempts[identity] = attempt
        if len(self._attempts) > MOST_REMEMBERED:
            del self._attempts[next(iter(self._attempts))]

    def drop(self) -> list[T]:
        """Forget all but their attempts: they come again. In their order, key by key."""
        lines, self._lines = self._lines, {}
        return [arrival for line in lines.values() for arrival in line.waiting]


def _identity(delivery: Delivery) -> bytes:
    """Equal for deliveries of one message; each replay of a dead letter is counted by itself, as ever."""
    message = delivery.message
    told = f"{message.type}\n{message.message_id}\n{counter(message.headers, REPLAYS_HEADER)}\n".encode()
    return hashlib.sha256(told + message.body).digest()


def _named(delivery: Delivery) -> str:
    return f"{delivery.message.type or 'message'} {delivery.message.message_id or 'without an id'}"
