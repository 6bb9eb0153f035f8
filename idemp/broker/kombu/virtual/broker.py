"""A virtual transport as a broker: hands out receivers and publishers, declares, looks into queues."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from idemp.broker.kombu.virtual.line import Held, Line, told
from idemp.broker.kombu.virtual.publisher import VirtualPublisher
from idemp.broker.kombu.virtual.receiver import VirtualReceiver
from idemp.broker.kombu.wire import message_of
from idemp.broker.urls import endpoint_of, shown
from idemp.clock import Clock, SystemClock
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from idemp.broker.kombu.settling import Arrived
    from idemp.broker.port import Topology
    from idemp.messages import Message


class VirtualBroker:
    """Redis, or kombu's own memory.

    Args:
        url: `redis://…`, `rediss://…` or `memory://`.
        connect_timeout: seconds for connecting.
        settle_timeout: seconds that the copy of a retried or parked message may take, and any other answer.
        visibility_timeout: seconds after which a message comes again whose receiver died.
        clock: by which delayed messages come due.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        settle_timeout: float = 10.0,
        visibility_timeout: float = 3600.0,
        clock: Clock | None = None,
    ) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._settle_timeout = settle_timeout
        self._visibility_timeout = visibility_timeout
        self._clock: Clock = clock or SystemClock()

    def declare(self, topology: Topology) -> None:
        """Make sure that queues, exchange and bindings exist."""
        with self._line("declaring") as line:
            line.declare(topology)

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> VirtualReceiver:
        """A receiver on a connection of its own."""
        line = self._open(self._connect_timeout)
        return VirtualReceiver(
            line,
            queues,
            prefetch=prefetch,
            publisher=self.publisher(),
            settle_timeout=self._settle_timeout,
            clock=self._clock,
        )

    def publisher(self) -> VirtualPublisher:
        """A publisher on a connection of its own, opened at its first use."""
        return VirtualPublisher(self._open, connect_timeout=self._connect_timeout, endpoint=endpoint_of(self._url))

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` messages of a queue, without taking them."""
        with self._line(f"browsing {queue!r}") as line:
            _check(line, queue)
            return [_message_of(arrived) for arrived in line.browse(queue, limit)]

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> VirtualTaken:
        """Take messages out of a queue by message id (`None`: any)."""
        line = self._open(self._connect_timeout)
        try:
            with _losing(line, f"taking from {queue!r}"):
                _check(line, queue)
                return VirtualTaken(line, line.hold(queue, None if wanted is None else frozenset(wanted), limit))
        except BaseException:
            line.close()
            raise

    def depth(self, queue: str) -> int:
        """How many messages are ready in a queue."""
        with self._line(f"looking at {queue!r}") as line:
            _check(line, queue)
            return line.depth(queue)

    def _open(self, timeout: float) -> Line:
        if not self._url.startswith("redis"):
            return Line(self._url, timeout=timeout, clock=self._clock)
        try:
            from idemp.broker.kombu.virtual.redis_line import RedisLine
        except ImportError as error:
            raise ConfigurationError(f"{shown(self._url)}: {error}.", fix="pip install 'idemp[redis]'") from error
        return RedisLine(self._url, timeout=timeout, clock=self._clock, visibility_timeout=self._visibility_timeout)

    @contextmanager
    def _line(self, doing: str) -> Iterator[Line]:
        line = self._open(self._connect_timeout)
        try:
            with _losing(line, doing):
                yield line
        finally:
            line.close()


class VirtualTaken:
    """Messages in our hands; whatever was not accepted goes back at the end of the `with` block.

    Attributes:
        messages: those that were wanted.
        arrived: the same as they came, for exact copies.
    """

    def __init__(self, line: Line, held: Sequence[Held]) -> None:
        self._line = line
        self._held = [each for each in held if each.arrived is not None]
        self._accepted: set[int] = set()
        self.arrived: Sequence[Arrived] = [each.arrived for each in self._held if each.arrived is not None]
        self.messages: Sequence[Message] = [_message_of(arrived) for arrived in self.arrived]

    def accept(self, index: int) -> None:
        """Remove one for good: it was published elsewhere, or shall be dropped.

        Raises:
            BrokerUnavailable: the connection is lost; it comes again.
        """
        try:
            known = index not in self._accepted and self._line.ack(self._held[index])
        except self._line.errors as error:
            raise BrokerUnavailable(f"The message goes back to its queue: {told(error)}.", fix="Try again.") from error
        if not known:
            raise BrokerError(f"The message {index} is not in our hands any more.", committed="unknown")
        self._accepted.add(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._line.give_back([each for index, each in enumerate(self._held) if index not in self._accepted])
        except self._line.errors as lost:
            raise BrokerUnavailable(f"What was not accepted comes back later: {told(lost)}.") from lost
        finally:
            self._line.close()


@contextmanager
def _losing(line: Line, doing: str) -> Iterator[None]:
    try:
        yield
    except line.denials as error:
        raise ConfigurationError(f"No {doing} at {line.shown}: {told(error)}.", fix="Check name and rights.") from error
    except line.errors as error:
        raise BrokerUnavailable(f"Lost {line.shown} while {doing}: {told(error)}.", fix="Try again.") from error


def _check(line: Line, queue: str) -> None:
    if not line.knows(queue):
        raise ConfigurationError(f"{line.shown} has no queue {queue!r}.", fix="Declare it first.")


def _message_of(arrived: Arrived) -> Message:
    return message_of(arrived.properties, arrived.headers, arrived.body)
