"""Queues, exchanges and delay tiers: declared such that no hop loses a message."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed, ResourceLocked

from idemp.broker.kombu.link import said
from idemp.broker.kombu.wire import SHORT_STRING, Parcel, check_names, parcel, properties_of
from idemp.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from idemp.broker.port import Topology
    from idemp.messages import Output

#: The delay tiers of a queue whose application named none, in seconds.
DEFAULT_DELAYS: Final = (1.0, 5.0, 30.0, 120.0, 600.0)

# RabbitMQ 4 drops a message after 20 deliveries unless told otherwise, and 3.10 knows no word for "never": so many that
# it never happens. Were it to happen, the message goes to the dead-letter queue.
_DELIVERY_LIMIT: Final = 2**31 - 1
_DEAD: Final = ".dead"
_DIGITS: Final = 20  # of a digest
_LONGEST_DELAY_MS: Final = 2**32 - 1
_REFUSALS = (AccessRefused, PreconditionFailed, ResourceLocked)


@dataclass(frozen=True, slots=True)
class Hop:
    """A queue on the way of a message, with all that is needed to declare it.

    Attributes:
        name: the queue.
        arguments: its arguments.
        fix: what to do where one of that name has other arguments; by default `idemp broker rebuild` does it.
    """

    name: str
    arguments: Mapping[str, Any]
    fix: str = ""

    def declare(self, channel: Any) -> None:
        """Make sure that it exists.

        Raises:
            ConfigurationError: one of that name has other arguments, or we may not.
        """
        declare_queue(channel, self.name, self.arguments, fix=self.fix)


def dead_name(queue: str) -> str:
    """The dead-letter queue of a queue.

    Example:
        >>> dead_name("orders")
        'orders.dead'
    """
    return f"{queue}{_DEAD}"


def is_dead_name(queue: str) -> bool:
    """Whether a queue is some queue's dead-letter queue."""
    return queue.endswith(_DEAD)


def delay_name(queue: str, milliseconds: int) -> str:
    """One delay tier of a queue.

    Example:
        >>> delay_name("orders", 1500)
        'orders.delay.1500ms'
    """
    return f"{queue}.delay.{milliseconds}ms"


def exchange_delay_name(exchange: str, routing_key: str, milliseconds: int) -> str:
    """The delay tier of one routing key of an exchange, within the 255 bytes that a name may have.

    The digest keeps apart what reads alike: routing keys have dots, and long names are cut.

    Example:
        >>> exchange_delay_name("shop", "orders.Placed", 1500)
        'shop.delay.1500ms.orders.Placed.dcc4bd405575e3a7ac1e'
    """
    digest = sha256(json.dumps([exchange, routing_key, milliseconds]).encode()).hexdigest()[:_DIGITS]
    readable = f"{exchange}.delay.{milliseconds}ms.{routing_key}".encode()
    return f"{readable[: SHORT_STRING - _DIGITS - 1].decode('utf-8', 'ignore')}.{digest}"


def main_queue(queue: str, *, single_active: bool = False) -> Hop:
    """A queue for work: never drops, its last resort is the dead-letter queue."""
    alone = {"x-single-active-consumer": True} if single_active else {}
    return Hop(queue, {**_forwarding("", dead_name(queue)), "x-delivery-limit": _DELIVERY_LIMIT, **alone})


def dead_queue(queue: str) -> Hop:
    """Where messages stay until somebody looks."""
    return lasting_queue(dead_name(queue))


def lasting_queue(queue: str) -> Hop:
    """A queue that never drops anything, nor hands it on by itself."""
    return Hop(queue, {"x-queue-type": "quorum", "x-delivery-limit": _DELIVERY_LIMIT})


def waiting_queue(queue: str, then: str, seconds: float) -> Hop:
    """Holds each message back for a time, then hands it to another queue, whatever happens meanwhile.

    Example:
        >>> waiting_queue("orders.prepared", "orders.check", 60).arguments["x-message-ttl"]
        60000
    """
    arguments = {**_forwarding("", then), "x-message-ttl": _milliseconds(seconds), "x-delivery-limit": _DELIVERY_LIMIT}
    return Hop(queue, arguments)


def delay_queue(queue: str, milliseconds: int) -> Hop:
    """Holds messages back for a time, then hands them to `queue`."""
    arguments = {**_forwarding("", queue), "x-message-ttl": milliseconds}
    return Hop(delay_name(queue, milliseconds), arguments)


def tier_for(delay: float, delays: Iterable[float]) -> int:
    """The smallest tier that waits long enough, else the longest one, in milliseconds.

    Example:
        >>> tier_for(3, [1, 5, 30]), tier_for(0.2, [1, 5, 30]), tier_for(900, [1, 5, 30])
        (5000, 1000, 30000)
    """
    tiers = sorted(delays)
    return _milliseconds(next((tier for tier in tiers if tier >= delay), tiers[-1]))


def delay_hop(output: Output) -> Parcel:
    """An output that the broker shall hold back: into a delay tier, which is declared when it is missing.

    The messages of a tier have one destination: RabbitMQ hands on no more than 32 of a queue before it knows what became
    of them, so that those that no queue takes hold up all behind them.

    Tiers have two significant digits, so that arbitrary delays make few queues: it waits up to a tenth longer.

    Raises:
        ValueError: longer than RabbitMQ can wait, or AMQP has no way to say it.
    """
    milliseconds = _rounded_up(output.delay * 1000)
    if milliseconds > _LONGEST_DELAY_MS:
        raise ValueError(f"a delay of {output.delay:g} s is longer than RabbitMQ can wait (49 days)")
    # A time to live would end the wait early.
    message = replace(output.message, ttl=None)
    hop = delay_queue(output.routing_key, milliseconds)
    if output.exchange:
        check_names(output.exchange, output.routing_key)
        arguments = {**_forwarding(output.exchange, output.routing_key), "x-message-ttl": milliseconds}
        hop = Hop(exchange_delay_name(output.exchange, output.routing_key, milliseconds), arguments)
    made = parcel("", hop.name, message.body, properties_of(message), mandatory=True)
    return replace(made, hop=hop)


def hops(topology: Topology) -> Iterator[Hop]:
    """All queues that an app needs, each with its dead-letter queue before it and its delay tiers after it.

    Example:
        >>> from idemp.broker.port import Topology
        >>> [hop.name for hop in hops(Topology(exchange="", queues=("orders",), delays=(0.5,)))]
        ['orders.dead', 'orders', 'orders.delay.500ms']
    """
    for queue in topology.queues:
        yield dead_queue(queue)
        yield main_queue(queue, single_active=topology.single_active)
        for delay in topology.delays:
            yield delay_queue(queue, _milliseconds(delay))


def declare(channel: Any, topology: Topology) -> None:
    """Declare all that an app needs.

    Raises:
        ConfigurationError: something of that name exists with other arguments, or we may not.
    """
    for hop in hops(topology):
        hop.declare(channel)
    if topology.exchange:
        declare_exchange(channel, topology.exchange)
        for queue in dict.fromkeys(binding.queue for binding in topology.bindings):
            bind(channel, topology, queue)


def declare_exchange(channel: Any, name: str) -> None:
    """Declare the exchange that an app's messages are published to.

    Raises:
        ConfigurationError: one of that name is something else, or we may not.
    """
    _checked(f"exchange {name!r}", channel.exchange_declare, name, "topic", durable=True, auto_delete=False)


def bind(channel: Any, topology: Topology, queue: str) -> None:
    """Bind one of an app's queues to its exchange; both must exist.

    Raises:
        ConfigurationError: we may not.
        BrokerUnavailable: one of them is missing.
    """
    for binding in topology.bindings:
        if binding.queue == queue:
            what = f"binding of {queue!r} to {topology.exchange!r}"
            _checked(what, channel.queue_bind, queue, topology.exchange, binding.routing_key)


def declare_queue(channel: Any, name: str, arguments: Mapping[str, Any], *, fix: str = "") -> None:
    """Declare a durable queue."""
    _checked(
        f"queue {name!r}",
        channel.queue_declare,
        name,
        durable=True,
        auto_delete=False,
        arguments=dict(arguments),
        fix=fix,
    )


def _forwarding(exchange: str, routing_key: str) -> dict[str, Any]:
    """Arguments of a quorum queue whose messages go on to another without a chance to get lost."""
    return {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": exchange,
        "x-dead-letter-routing-key": routing_key,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


def _checked(what: str, call: Any, *arguments: Any, fix: str = "", **options: Any) -> None:
    try:
        call(*arguments, **options)
    except PreconditionFailed as error:
        raise ConfigurationError(
            f"The {what} exists with other arguments: {said(error)}.",
            fix=fix or _anew(what),
        ) from error
    except NotFound as error:
        # What is bound was declared just before: it is there unless the broker is only starting up.
        raise BrokerUnavailable(
            f"The {what} can't be declared: {said(error)}.", fix="Try again: the broker may be starting."
        ) from error
    except _REFUSALS as error:
        raise ConfigurationError(f"The {what} can't be declared: {said(error)}.", fix="Mend permissions.") from error


def _anew(what: str) -> str:
    kind, _, name = what.partition(" ")
    if kind != "queue":
        return "Delete it, or give yours another name; idemp declares it anew."
    return (
        f"Make it anew, with its messages: `idemp broker rebuild MODULE:APP --queue {name.strip(chr(39))}`. Or empty "
        "and delete it, or give yours another name."
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _rounded_up(milliseconds: float) -> int:
    whole = max(1, math.ceil(milliseconds))
    step: int = 10 ** max(0, len(str(whole)) - 2)
    return -(-whole // step) * step
