"""One connection to a store that kombu makes queues of, with the few verbs that receiving and publishing need.

Every message is put into its queues by name, never through an exchange: kombu gives back an unacked message by routing
it once more, to every queue that is bound by then, and to none where the exchange was declared elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kombu.connection import Connection
from kombu.exceptions import ChannelError, KombuError, OperationalError
from kombu.transport.virtual import NotEquivalentError

from idemp.broker.kombu.link import said
from idemp.broker.kombu.settling import arrived_by_kombu
from idemp.broker.kombu.topology import dead_name
from idemp.broker.routing import matches
from idemp.broker.urls import readable, shown
from idemp.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from idemp.broker.kombu.settling import Arrived
    from idemp.broker.port import Topology
    from idemp.clock import Clock

#: The exchange whose bindings name the queues that were declared: most stores forget a queue that is empty.
REGISTRY: Final = "idemp.queues"

UNKNOWN_OPTION: Final = (
    "Leave options that Redis' client does not know out of the URL; KombuBroker(visibility_timeout=…) sets that."
)
_DELAY: Final = ".delay"
_NOT_BEFORE: Final = "not_before"


@dataclass(frozen=True, slots=True)
class Held:
    """A message in our hands.

    Attributes:
        queue: where from.
        tag: unique for this time of holding it.
        arrived: what it is; `None` if what stood in the queue is no message.
        redelivered: whether it was given back before.
        raw: as it stood in the queue.
    """

    queue: str
    tag: str
    arrived: Arrived | None
    redelivered: bool
    raw: bytes = b""


def delay_name(queue: str) -> str:
    """Where messages wait for their time.

    Example:
        >>> delay_name("orders")
        'orders.delay'
    """
    return f"{queue}{_DELAY}"


def told(error: BaseException) -> str:
    """What the store's client said, to go on in a sentence.

    Example:
        >>> told(OSError("Connection refused."))
        'Connection refused'
    """
    return said(error)


class Line:
    """A connection with one channel, over any transport that has a channel of kombu's own making.

    Args:
        url: where the store is.
        timeout: seconds for connecting, and for each answer.
        clock: by which delayed messages come due.
        options: kombu's transport options.

    Raises:
        BrokerUnavailable: no connection; `__cause__` says why.
        ConfigurationError: the URL or its credentials can't be used.
    """

    #: What the store's client raises, whatever the reason.
    errors: ClassVar[tuple[type[BaseException], ...]] = (KombuError, OperationalError, OSError)
    #: Of these, what means that it got the command and refused it.
    refusals: ClassVar[tuple[type[BaseException], ...]] = ()
    #: Of these, what nothing but another configuration mends.
    denials: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(
        self, url: str, *, timeout: float, clock: Clock, options: Mapping[str, Any] | None = None, ssl: Any = None
    ) -> None:
        self.shown = shown(url)
        self._clock = clock
        readable(url)
        try:
            settings: Any = Connection(url, ssl=ssl or False, transport_options=dict(options or {}))  # type: ignore[no-untyped-call]
            settings.connect_timeout = timeout
            self._transport = settings.transport
            self._transport.establish_connection()
            self.channel: Any = self._transport.create_channel(self._transport)
        except ImportError as error:
            raise ConfigurationError(f"{self.shown}: {told(error)}.", fix="pip install 'idemp[redis]'") from error
        except TypeError as error:
            raise ConfigurationError(f"{self.shown}: {told(error)}.", fix=UNKNOWN_OPTION) from error
        except self.denials as error:
            raise ConfigurationError(f"No connection to {self.shown}: {told(error)}.", fix="Check the URL.") from error
        except self.errors as error:
            raise BrokerUnavailable(
                f"No connection to {self.shown}: {told(error)}.", fix="Check the URL and the broker."
            ) from error

    def limit(self, seconds: float) -> None:
        """Let each answer from now on take no longer."""

    # Queues

    def declare(self, topology: Topology) -> None:
        """Declare all that an app needs."""
        for queue in topology.queues:
            self.declare_queue(queue)
            self.declare_queue(dead_name(queue))
        if not topology.exchange:
            return
        if any(not pattern for _, pattern, _ in self.bindings(topology.exchange)):
            raise ConfigurationError(f"The exchange {topology.exchange!r} exists with another type.", fix="Delete it.")
        try:
            self.channel.exchange_declare(topology.exchange, "topic", durable=True)
        except NotEquivalentError as error:
            raise ConfigurationError(f"{error}.", fix="Delete the exchange.") from error
        for binding in topology.bindings:
            self.channel.queue_bind(binding.queue, topology.exchange, binding.routing_key)

    def declare_queue(self, queue: str) -> None:
        """Make sure that a queue exists, and is known also while it is empty."""
        self.channel.exchange_declare(REGISTRY, "direct", durable=True)
        self.channel.queue_declare(queue)
        self.channel.queue_bind(queue, REGISTRY, queue)

    def bindings(self, exchange: str) -> Sequence[tuple[str, str | None, str]]:
        """Routing key, pattern (empty but for topic exchanges) and queue of each binding."""
        try:
            return list(self.channel.get_table(exchange))
        except KeyError:
            return []

    def knows(self, queue: str) -> bool:
        """Whether a queue was declared, by us or by other users of kombu."""
        if self.is_bound(queue):
            return True
        try:
            self.channel.queue_declare(queue, passive=True)
        except ChannelError:
            return False
        return True

    def is_bound(self, queue: str) -> bool:
        """Whether a queue is known also while it is empty."""
        # kombu's SimpleQueue and Celery bind a queue to the exchange of its own name.
        return any(queue == known for name in (REGISTRY, queue) for _, _, known in self.bindings(name))

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message goes to."""
        if not exchange:
            return [routing_key] if self.knows(routing_key) else []
        taking = {
            queue
            for key, pattern, queue in self.bindings(exchange)
            if (matches(key, routing_key) if pattern else key == routing_key)
        }
        return sorted(taking)

    def depth(self, queue: str) -> int:
        """How many messages are ready."""
        return int(self.channel.queue_declare(queue).message_count)

    # Messages

    def put(self, queue: str, body: bytes, properties: Mapping[str, Any], *, delay: float = 0.0) -> None:
        """Put a message into a queue, for after `delay` seconds."""
        left = dict(properties)
        message = self.channel.prepare_message(
            body,
            content_type=left.pop("content_type", None),
            content_encoding=left.pop("content_encoding", None),
            headers=left.pop("application_headers", None),
            properties={"priority": None, **left},
        )
        if delay > 0:
            self._put_delayed(queue, message, self._now() + delay)
        else:
            self.channel.basic_publish(message, "", queue)

    def take(self, queues: Sequence[str]) -> Held | None:
        """The next message of the first of these queues that has one."""
        for queue in queues:
            message = self.channel.basic_get(queue)
            if message is not None:
                message.delivery_info.update(exchange="", routing_key=queue)
                redelivered = bool(message._raw.get("redelivered"))  # noqa: SLF001 - kombu notes it nowhere else
                return Held(queue, message.delivery_tag, arrived_by_kombu(message), redelivered)
        return None

    def ack(self, held: Held) -> bool:
        """Forget it for good. `False` if it went back meanwhile and comes again."""
        self.channel.basic_ack(held.tag)
        return True

    def give_back(self, held: Sequence[Held]) -> None:
        """Put them back, in this order."""
        for each in held:
            self.channel.basic_reject(each.tag, requeue=True)

    def hold(self, queue: str, wanted: Collection[str] | None, limit: int) -> list[Held]:
        """Take up to `limit` messages, of these ids or any."""
        kept, others = list[Held](), list[Held]()
        for _ in range(self.depth(queue)):
            if len(kept) == limit or (held := self.take([queue])) is None:
                break
            is_wanted = wanted is None or (held.arrived and held.arrived.properties.get("message_id") in wanted)
            (kept if is_wanted else others).append(held)
        self.give_back(others)
        return kept

    def browse(self, queue: str, limit: int) -> list[Arrived]:
        """Up to `limit` messages, left where they are."""
        held = self.hold(queue, None, self.depth(queue))
        self.give_back(held)  # all of them, so that the order stays
        return [each.arrived for each in held[:limit] if each.arrived is not None]

    def tend(self, queues: Sequence[str]) -> None:
        """What has to be done about twice a second: delayed messages that are due go to their queue."""
        now = self._now()
        for queue in queues:
            waiting = delay_name(queue)
            for _ in range(self.depth(waiting)):
                message = self.channel.basic_get(waiting)
                if message is None:
                    break
                due = message.properties.get(_NOT_BEFORE, 0.0) <= now
                message.delivery_info.update(exchange="", routing_key=queue if due else waiting)
                self.channel.basic_reject(message.delivery_tag, requeue=True)

    def touch(self, held: Sequence[Held]) -> None:
        """Say that we still hold them."""

    def close(self) -> None:
        """Close the connection, without a word about what is held; raises nothing."""
        with suppress(*self.errors):
            self._transport.close_connection(self._transport)

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _put_delayed(self, queue: str, message: dict[str, Any], due: float) -> None:
        message["properties"][_NOT_BEFORE] = due
        self.channel.basic_publish(message, "", delay_name(queue))
