"""ActiveMQ as a broker: hands out receivers and publishers, declares, looks into queues."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from idemp.broker.guarantees import guarantees_of
from idemp.broker.stomp.address import Address
from idemp.broker.stomp.limits import Limits
from idemp.broker.stomp.link import Link, Refused, StompError, connected
from idemp.broker.stomp.publisher import StompPublisher
from idemp.broker.stomp.receiver import StompReceiver
from idemp.broker.stomp.statistics import NoStatistics, Statistics
from idemp.broker.stomp.taking import StompTaken
from idemp.broker.stomp.topology import Known, declare, read, usable
from idemp.broker.stomp.wire import destination, message_of
from idemp.broker.urls import endpoint_of, place_of
from idemp.clock import Clock, SystemClock
from idemp.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.broker.port import Guarantees, Topology
    from idemp.diagnosis import BrokerCommands, Diagnosis
    from idemp.messages import Message

_EVERYTHING = 1_000_000


class StompBroker:
    """ActiveMQ (5.16 or newer). Safe to share between threads; each thread takes its own receiver and publisher.

    Args:
        url: `stomp://user:password@host:61613`, or `stomp+ssl://…` for TLS; several, with `;` between, are tried in turn.
        connect_timeout: seconds for connecting.
        settle_timeout: seconds that the copy of a retried or parked message may take, and any other answer.
        clock: by which delayed messages come due.

    Raises:
        ConfigurationError: the URL can't be used, or stomp.py is not installed.

    Example:
        >>> broker = StompBroker("stomp://shop:secret@broker:61613")
        >>> broker
        StompBroker('stomp://***@broker:61613')
        >>> broker.guarantees.at_least_once
        True
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 5.0, settle_timeout: float = 10.0, clock: Clock | None = None
    ) -> None:
        self._url = url
        self._address = Address.of(url)
        self._connect_timeout = connect_timeout
        self._settle_timeout = settle_timeout
        self._clock: Clock = clock or SystemClock()
        self._limits = Limits()
        self._statistics = Statistics(self._open)

    @property
    def guarantees(self) -> Guarantees:
        """What the transport promises."""
        return guarantees_of("stomp://")

    def declare(self, topology: Topology) -> None:
        """Make sure that queues, exchange and bindings are known. Repeating it is harmless.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: a name that ActiveMQ can't have, or a binding to a queue that does not exist.
        """
        with self._link("declaring") as link:
            declare(link, topology, self._deadline())

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> StompReceiver:
        """A receiver on a connection of its own, with up to `prefetch` messages of each queue in its memory.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: a queue was never declared, or this user may not consume it.
        """
        link = self._open()
        try:
            with self._losing("consuming"):
                known = read(link, self._deadline())
                _check(link, known, queues)
                return StompReceiver(
                    link,
                    {queue: known.queues.get(queue, False) for queue in queues},
                    prefetch=prefetch,
                    settle_timeout=self._settle_timeout,
                    clock=self._clock,
                )
        except BaseException:
            link.close()
            raise

    def identity(self) -> str:
        """The hosts of its URL: ActiveMQ tells clients no name of its own."""
        return place_of(self._url)

    def publisher(self) -> StompPublisher:
        """A publisher on a connection of its own, opened at its first use."""
        return StompPublisher(
            self._open,
            self._statistics,
            self._clock,
            connect_timeout=self._connect_timeout,
            endpoint=endpoint_of(self._address.shown),
        )

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` messages of a queue without taking them; also those that are in somebody's hands.

        Where a policy counts for the queue, the broker shows no more than its `maxBrowsePageSize`, 400 by default.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        self._ready(queue)
        with self._link(f"browsing {queue!r}") as link:
            found = link.browse(destination(queue), limit, self._deadline())
            return [message_of(frame.headers, frame.body) for frame in found]

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> StompTaken:
        """Take messages out of a queue by message id (`None`: any).

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        expected = self._ready(queue)
        link = self._open()
        try:
            with self._losing(f"taking from {queue!r}"):
                ids = None if wanted is None else frozenset(wanted)
                return StompTaken(link, queue, ids, limit, expected=expected, timeout=self._settle_timeout)
        except BaseException:
            link.close()
            raise

    def depth(self, queue: str) -> int:
        """How many messages are ready in a queue.

        Without the statistics plugin it counts those in consumers' hands, too, and no more than `browse` shows.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        ready = self._ready(queue)
        if ready is not None:
            return ready
        with self._link(f"looking at {queue!r}") as link:
            return len(link.browse(destination(queue), _EVERYTHING, self._deadline()))

    def inspect(self, topology: Topology | None = None, commands: BrokerCommands | None = None) -> list[Diagnosis]:
        """Look at the live broker, and whether it knows what an app needs; changes nothing of that.

        Args:
            topology: what the app needs.
            commands: what mends it.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: it refuses the user.
        """
        from idemp.broker.stomp.inspecting import inspect

        with self._link("looking at the broker") as link:
            return inspect(link, self._statistics, topology, commands, self._deadline())

    def _ready(self, queue: str) -> int | None:
        """How many messages of a queue nobody has, `None` if the broker does not tell."""
        if not usable(queue):  # the broker would take it for many queues, or for a topic
            raise ConfigurationError(f"ActiveMQ can't have a queue {queue!r}.", fix="Name one queue.")
        try:
            numbers = self._statistics.of(queue)
        except NoStatistics:
            return None
        if numbers is not None:
            return numbers.ready
        with self._link(f"looking for {queue!r}") as link:
            _check(link, read(link, self._deadline()), [queue])
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address.shown!r})"

    def _deadline(self) -> float:
        return time.monotonic() + self._settle_timeout

    def _open(self, timeout: float | None = None) -> Link:
        return connected(self._address, self._connect_timeout if timeout is None else timeout, self._limits)

    @contextmanager
    def _link(self, doing: str) -> Iterator[Link]:
        with self._losing(doing), self._open() as link:
            yield link

    @contextmanager
    def _losing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StompError as error:
            if "not authorized" in str(error):
                raise ConfigurationError(
                    f"No {doing} at {self._address.shown}: {error}.", fix="Give this user the rights."
                ) from error
            # Refused where the store has no space, say.
            how = "refuses" if isinstance(error, Refused) else "was lost while"
            raise BrokerUnavailable(f"{self._address.shown} {how} {doing}: {error}.", fix="Try again.") from error


def _check(link: Link, known: Known, queues: Sequence[str]) -> None:
    for queue in queues:
        if not known.has(queue):
            raise ConfigurationError(f"{link.shown} has no queue {queue!r}.", fix="Declare it first.")
