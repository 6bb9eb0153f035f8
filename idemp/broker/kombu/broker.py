"""RabbitMQ, or another transport of kombu, as a broker: receivers and publishers, declaring, looking into queues."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from amqp.exceptions import AccessRefused, NotAllowed, NotFound

from idemp.broker.guarantees import guarantees_of, misspelt
from idemp.broker.kombu import topology as layout
from idemp.broker.kombu.consuming import KombuReceiver
from idemp.broker.kombu.inspecting import Inspection
from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.pulling import KombuPuller
from idemp.broker.kombu.rebuilding import Rebuild
from idemp.broker.kombu.taking import KombuTakenMessages, held, seen
from idemp.broker.kombu.urls import VIRTUAL_SCHEMES, hosts_of
from idemp.broker.kombu.virtual.broker import VirtualBroker
from idemp.broker.urls import place_of, readable, shown
from idemp.errors import BrokerUnavailable, ConfigurationError, GuaranteeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from idemp.broker.kombu.rebuilding import Rebuilt
    from idemp.broker.kombu.virtual.broker import VirtualTaken
    from idemp.broker.kombu.virtual.publisher import VirtualPublisher
    from idemp.broker.kombu.virtual.receiver import VirtualReceiver
    from idemp.broker.port import Guarantees, Topology
    from idemp.clock import Clock
    from idemp.diagnosis import BrokerCommands, Diagnosis
    from idemp.messages import Message


class KombuBroker:
    """RabbitMQ (3.10 or newer). Safe to share between threads; each thread takes its own receiver and publisher.

    Takes `redis://…`, `rediss://…` (Redis 5 or newer) and kombu's `memory://` as well, with `allow_at_most_once=True`.

    Args:
        url: `pyamqp://user:password@host:5672/vhost`, or `amqps://…` for TLS; several, with `;` between, are
            tried in turn.
        prefetch: how many unsettled deliveries of each queue a receiver gets ahead, unless it says otherwise.
        allow_at_most_once: take a transport that may lose messages all the same.
        heartbeat: seconds; a connection that is silent for two of them is dead.
        connect_timeout: seconds for connecting.
        settle_timeout: seconds that the copy of a retried or parked message may take.
        max_in_flight: how many messages a publisher sends before it waits for confirms.
        visibility_timeout: seconds after which Redis delivers a message again whose receiver died; 1 hour if `None`.
        clock: for the time of a message's first failure, and by which delayed messages of Redis come due.

    Raises:
        GuaranteeError: the transport may lose messages, or is not supported.
        ConfigurationError: the URL can't be used.

    Example:
        >>> broker = KombuBroker("pyamqp://guest:secret@broker/shop")
        >>> broker
        KombuBroker('pyamqp://***@broker/shop')
        >>> broker.guarantees.at_least_once
        True
    """

    def __init__(
        self,
        url: str,
        *,
        prefetch: int = 20,
        allow_at_most_once: bool = False,
        heartbeat: float = 30,
        connect_timeout: float = 5.0,
        settle_timeout: float = 10.0,
        max_in_flight: int = 1000,
        visibility_timeout: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._guarantees = _accepted(url, allow_at_most_once=allow_at_most_once)
        self._virtual: VirtualBroker | None = None
        if self._guarantees.name != "pyamqp":
            visible = self._guarantees.horizon_seconds if visibility_timeout is None else visibility_timeout
            self._guarantees = replace(self._guarantees, horizon_seconds=visible)
            self._virtual = VirtualBroker(
                url,
                connect_timeout=connect_timeout,
                settle_timeout=settle_timeout,
                visibility_timeout=visible,
                clock=clock,
            )
        self._url = url
        self._prefetch = prefetch
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._settle_timeout = settle_timeout
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._delays: dict[str, tuple[float, ...]] = {}
        self._single_active: dict[str, bool] = {}

    @property
    def guarantees(self) -> Guarantees:
        """What the transport promises."""
        return self._guarantees

    def declare(self, topology: Topology) -> None:
        """Make sure that queues, exchange and bindings exist. Repeating it is harmless.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: something of that name exists with other arguments.
        """
        if self._virtual is not None:
            self._virtual.declare(topology)
            return
        with self._link("declaring") as link:
            layout.declare(link.channel, topology)
        self._delays.update(dict.fromkeys(topology.queues, topology.delays))
        self._single_active.update(dict.fromkeys(topology.queues, topology.single_active))

    def declare_hops(self, hops: Iterable[layout.Hop]) -> None:
        """Make sure that queues exist which belong to no app's topology. Repeating it is harmless.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: one of that name exists with other arguments, or this is no RabbitMQ.
        """
        if self._virtual is not None:
            raise ConfigurationError(
                f"Queues of {self._guarantees.name} have no arguments.", fix="Take RabbitMQ: pyamqp://…"
            )
        with self._link("declaring") as link:
            for hop in hops:
                hop.declare(link.channel)

    def receiver(self, queues: Sequence[str], *, prefetch: int | None = None) -> KombuReceiver | VirtualReceiver:
        """A receiver on a connection of its own.

        Raises:
            BrokerUnavailable: no connection, or a queue's node is down.
            ConfigurationError: a queue does not exist, or this user may not consume it.
        """
        prefetch = self._prefetch if prefetch is None else prefetch
        if self._virtual is not None:
            return self._virtual.receiver(queues, prefetch=prefetch)
        with self._errors(f"consuming {', '.join(map(repr, queues))}"):
            return KombuReceiver(
                self._url,
                queues,
                prefetch=prefetch,
                delays=self._delays,
                keeps_order=any(self._single_active.get(queue) for queue in queues),
                heartbeat=self._heartbeat,
                connect_timeout=self._connect_timeout,
                settle_timeout=self._settle_timeout,
                clock=self._clock,
            )

    def identity(self) -> str:
        """RabbitMQ's cluster name and virtual host; the hosts of the URL where the transport has no such name.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: it refuses the user.
        """
        if self._virtual is not None:
            return place_of(self._url)
        with self._link("connecting") as link:
            return link.identity(self._url)

    def publisher(self) -> ConfirmingPublisher | VirtualPublisher:
        """A publisher on a connection of its own, opened at its first use."""
        if self._virtual is not None:
            return self._virtual.publisher()
        return ConfirmingPublisher(
            self._url,
            connect_timeout=self._connect_timeout,
            heartbeat=self._heartbeat,
            max_in_flight=self._max_in_flight,
        )

    def puller(self, queue: str) -> KombuPuller:
        """What takes messages of one queue when asked, on a connection of its own; of RabbitMQ only.

        Raises:
            BrokerUnavailable: no connection.
        """
        return KombuPuller(self._url, queue, heartbeat=self._heartbeat, connect_timeout=self._connect_timeout)

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` messages of a queue (a dead-letter queue, say) without taking them.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        if self._virtual is not None:
            return self._virtual.browse(queue, limit)
        with self._link(f"browsing {queue!r}") as link:
            # Closing the connection puts back what was looked at.
            return [seen(raw, queue) for raw in held(link, queue, None, limit)]

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> KombuTakenMessages | VirtualTaken:
        """Take messages out of a queue by message id (`None`: any), to move or drop them one by one.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        if self._virtual is not None:
            return self._virtual.take(queue, wanted, limit)
        with self._errors(f"taking from {queue!r}"):
            link = self._open()
            try:
                found = held(link, queue, None if wanted is None else frozenset(wanted), limit)
            except BaseException:
                link.close()
                raise
            return KombuTakenMessages(link, found, queue)

    def depth(self, queue: str) -> int:
        """How many messages are ready in a queue; those in the hands of consumers don't count.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: there is no such queue.
        """
        if self._virtual is not None:
            return self._virtual.depth(queue)
        with self._link(f"looking at {queue!r}") as link:
            return int(link.channel.queue_declare(queue, passive=True).message_count)

    def inspect(self, topology: Topology | None = None, commands: BrokerCommands | None = None) -> list[Diagnosis]:
        """Look at the live broker, and whether it has what an app needs; changes nothing of that.

        Args:
            topology: what the app needs.
            commands: what mends it.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: it refuses the user.
        """
        if self._virtual is None:
            return Inspection(self._url, topology, commands, self._heartbeat, self._connect_timeout).run()
        if not self._url.startswith(("redis:", "rediss:")):
            return []
        from idemp.broker.kombu.virtual.inspecting import inspect

        return inspect(self._url, timeout=self._connect_timeout)

    def rebuild(
        self,
        topology: Topology,
        queue: str,
        progress: Callable[[int], object] = lambda _: None,
        commands: BrokerCommands | None = None,
    ) -> Rebuilt:
        """Make a queue of an app anew that exists with other arguments, and keep its messages.

        Args:
            topology: what the app needs.
            queue: one of its queues, dead-letter queues or delay tiers.
            progress: called with the number of messages that were moved.
            commands: how a person runs it again, for errors.

        Raises:
            BrokerUnavailable: the broker can't be reached, or confirms nothing; run it again, it goes on where it stopped.
            ConfigurationError: there is no such queue, it has consumers, or we may not.
        """
        if self._virtual is not None:
            raise ConfigurationError(
                f"Queues of {self._guarantees.name} have no arguments.", fix="Nothing is to be done."
            )
        with self._errors(f"rebuilding {queue!r}"):
            return Rebuild(self._url, topology, queue, progress, self._connect_timeout, commands=commands).run()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _open(self) -> Link:
        # Short-lived, and in the caller's hands for as long as it likes: no heartbeat.
        return Link.open(self._url, connect_timeout=self._connect_timeout, heartbeat=0)

    @contextmanager
    def _link(self, doing: str) -> Iterator[Link]:
        with self._errors(doing):
            link = self._open()
            try:
                yield link
            finally:
                link.close()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        where = shown(self._url)
        try:
            yield
        except BrokerUnavailable as error:
            if _is_refusal(error.__cause__):
                fix = (
                    "Declare it first."
                    if isinstance(error.__cause__, NotFound)
                    else "Check user, password, vhost and rights."
                )
                raise ConfigurationError(error.message, fix=fix) from error
            raise
        except LINK_ERRORS as error:
            if _is_refusal(error):
                fix = "Declare it first." if isinstance(error, NotFound) else "Check name and rights."
                raise ConfigurationError(f"No {doing} at {where}: {said(error)}.", fix=fix) from error
            raise BrokerUnavailable(f"Lost {where} while {doing}: {said(error)}.", fix="Try again.") from error


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the broker says that there is no such thing, or that the user has no right to it: no waiting helps.

    A queue whose node is down is "not found", too, and comes back with its node.
    """
    if isinstance(error, NotFound):
        return "is down or inaccessible" not in said(error)
    return isinstance(error, AccessRefused | NotAllowed)


def _accepted(url: str, *, allow_at_most_once: bool) -> Guarantees:
    guarantees = guarantees_of(url)
    if guarantees.name in {"pyamqp", "amqp"}:
        hosts_of(url)
    if (words := misspelt(url)) is not None:
        raise GuaranteeError(f"idemp knows no transport {words[0]!r}.", fix=f"Did you mean {words[1]!r}?")
    scheme = url.partition("://")[0]
    if guarantees.name != "pyamqp" and (";" in url or scheme not in VIRTUAL_SCHEMES):
        raise GuaranteeError(
            f"idemp has no adapter for {shown(url)}." if "://" in url else "The broker URL has no scheme.",
            fix="Use RabbitMQ (pyamqp:// or amqps://), ActiveMQ (stomp://), Redis (redis://) or a file (local://).",
        )
    if not guarantees.at_least_once and not allow_at_most_once:
        raise GuaranteeError(
            f"{guarantees.name}:// may lose messages: {guarantees.remarks}.",
            fix="Take RabbitMQ (pyamqp://), or accept the loss: IDEMP_ALLOW_AT_MOST_ONCE=true, or in idemp.toml.",
        )
    if guarantees.name != "pyamqp":
        readable(url)
    return guarantees
