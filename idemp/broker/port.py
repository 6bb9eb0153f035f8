"""The broker port: receive, settle, publish-and-confirm, declare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from types import TracebackType

    from idemp.messages import Message, Output


def always() -> bool:
    """Of a delivery whose loss would not show."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One arrival of a message at one consumer.

    Attributes:
        message: what arrived.
        queue: where from.
        attempt: 1 for the first try of the handler; only failures of the handler count.
        redelivered: the broker's hint that it delivered this before; never relied on.
        tag: the adapter's own handle for settling.
        alive: whether it can still be settled, as far as one can see without waiting; called by the thread that received it.
    """

    message: Message
    queue: str
    attempt: int = 1
    redelivered: bool = False
    tag: Any = None
    alive: Callable[[], bool] = field(default=always, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the broker may forget the message."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Deliver it again after a delay, without holding up others.

    Attributes:
        delay: at least this long.
        counted: whether it counts as an attempt (the handler failed) or not (in flight, nothing ran).
        reason: why, for people.
        attempt: which attempt the next delivery is, if it counts; default one more than this one.
        attempts: how many there may be, where that is known.
    """

    delay: timedelta
    counted: bool
    reason: str = field(default="", compare=False)
    attempt: int | None = field(default=None, compare=False)
    attempts: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Park:
    """Into the dead-letter queue, with the reason.

    Attributes:
        reason: short and stable, such as the error's class name.
        headers: `idemp-dead-…` headers that tell the whole story.
        attempts: how many attempts there might have been, where that is known.
    """

    reason: str
    headers: Mapping[str, Any] = field(default_factory=dict)
    attempts: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Release:
    """Give it back untouched, for somebody else to take at once (shutdown)."""


Settlement = Ack | Retry | Park | Release


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a publish has no positive confirm.

    Attributes:
        kind: "unsendable" (it can't be encoded, is too large, or is not allowed), "returned" (no queue takes it), "nacked"
            (the broker refused it: its queue may be full), "timeout", "blocked" (resource alarm) or "closed" (channel or
            connection lost). After the last three it may have arrived all the same.
        detail: what the broker said.
    """

    kind: Literal["unsendable", "returned", "nacked", "timeout", "blocked", "closed"]
    detail: str = ""


class Receiver(Protocol):
    """Consumes some queues on a connection of its own. Used by one thread; `keep_alive` and `cancel` by any."""

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery, or `None` after `timeout` seconds.

        Raises:
            BrokerUnavailable: the connection is lost; what is not settled will come again. Close it, open another.
        """
        ...

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, once. `Retry` and `Park` make sure of the copy before the message is acked.

        That may end later, so that no delivery waits for the copy of another: then a lost connection shows in a later
        call, and a copy that the broker refuses is told in the log while its message comes again. At the end of `close`
        all that was settled has ended.

        Raises:
            BrokerUnavailable: it could not be settled; the message will come again.
        """
        ...

    def keep_alive(self) -> None:
        """Service heartbeats while a handler runs; called from another thread, never blocks for long, never raises."""
        ...

    def cancel(self) -> None:
        """Take no more, and give back at once what was not handed out; what was can still be settled.

        For a process that is told to end while a handler still runs: called from another thread, never blocks for long,
        never raises.
        """
        ...

    def close(self) -> None:
        """End what was settled, give back what was not, and close; never blocks on a dead link."""
        ...


@runtime_checkable
class OrderedReceiver(Receiver, Protocol):
    """A receiver that can say when what it settled has ended for good; for queues with `Topology.single_active`.

    Receivers that end each delivery at once have no use for it: a plain `Receiver` does for them.

    Of such queues no later delivery may reach anybody before an earlier one: what is not settled is given back when the
    receiver closes, all of it at once and in its order. Until then `Release` and `cancel` leave it in its hands, and a copy
    that is refused costs the connection.
    """

    def end_settled(self) -> None:
        """Wait until all that was settled has ended, so that it can't come again.

        Raises:
            BrokerUnavailable: some of it has not; all that has not ended will come again. Close it, open another.
        """
        ...


class Publisher(Protocol):
    """Publishes with confirms on a connection of its own, which it rebuilds by itself. Used by one thread at a time."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send all, wait at most `timeout` seconds in sum; per output `None` if the broker confirmed it, else why not."""
        ...

    def keep_alive(self) -> None:
        """Service heartbeats of an idle connection; called from another thread, never blocks for long, never raises."""
        ...

    def close(self) -> None:
        """Close the connection; never blocks on a dead link."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A broker as traces name it. Publishers that know theirs have it as `endpoint`.

    Attributes:
        system: `messaging.system` by OpenTelemetry's conventions; one's own name for a kind that has none there.
        address: `server.address`; `None` if there are several, or none.
        port: `server.port`.
    """

    system: str = "unknown"
    address: str | None = None
    port: int | None = None


@runtime_checkable
class SendingPublisher(Publisher, Protocol):
    """A publisher that need not be waited for: while confirms are on their way, more can be sent.

    Brokers that confirm at once have no use for it: a plain `Publisher` does for them.
    """

    def send(self, outputs: Sequence[Output], timeout: float) -> int:
        """Send all, and return without waiting for their confirms; never raises for what the broker says.

        Returns:
            The number under which `answered` tells of them. It counts from 1 up.
        """
        ...

    def answered(self, seconds: float) -> list[tuple[int, list[Refusal | None]]]:
        """The calls of `send` all of whose outputs have an answer by now, each told once; the answers as of `publish`.

        Where there is none yet, it waits up to `seconds` for one. Each call is answered soon after its own timeout.
        """
        ...


@dataclass(frozen=True, slots=True)
class Binding:
    """Messages published under `routing_key` (`*` one word, `#` any words) reach `queue`."""

    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What an app needs on the broker.

    Attributes:
        exchange: the topic exchange for published outputs.
        queues: queues with a dead-letter queue (`<name>.dead`) and delay tiers of their own.
        bindings: which published types reach which queue.
        delays: the delays that `Retry` will ask for, in seconds.
        single_active: whether each queue has one active consumer at a time; others wait until that one ends.
    """

    exchange: str
    queues: tuple[str, ...]
    bindings: tuple[Binding, ...] = ()
    delays: tuple[float, ...] = ()
    single_active: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """What a transport promises, so that idemp can refuse what would lose messages.

    Attributes:
        name: the transport.
        at_least_once: a crash between taking a message and settling it loses nothing.
        confirms: a publish is confirmed by the broker for that very message.
        delays: how `Retry` waits.
        horizon_seconds: how late the transport may redeliver, seconds; the retention window must be longer.
        remarks: one sentence for the table in the README.
        single_active: a queue can have one active consumer at a time, and what that gives back comes in its old order.
    """

    name: str
    at_least_once: bool
    confirms: bool
    delays: str
    horizon_seconds: float
    remarks: str = ""
    single_active: bool = False


class Broker(Protocol):
    """Hands out receivers and publishers. Safe to share between threads; each thread gets its own of both."""

    @property
    def guarantees(self) -> Guarantees:
        """What the transport promises."""
        ...

    def identity(self) -> str | None:
        """What tells this broker from others and stays the same when it moves to another host, for people and as a key.

        RabbitMQ's cluster name and virtual host, for example. `None` where a broker is never shared by several processes.

        Raises:
            BrokerUnavailable: the broker can't be reached.
        """
        ...

    def declare(self, topology: Topology) -> None:
        """Make sure that queues, exchange and bindings exist. Repeating it is harmless.

        Raises:
            BrokerUnavailable: the broker can't be reached.
            ConfigurationError: something of that name exists with other arguments.
        """
        ...

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> Receiver:
        """A receiver on a connection of its own, with up to `prefetch` messages of each queue in its memory."""
        ...

    def publisher(self) -> Publisher:
        """A publisher on a connection of its own, opened at its first use."""
        ...

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` messages of a queue (a dead-letter queue, say) without taking them."""
        ...

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> TakenMessages:
        """Take messages out of a queue by message id (`None`: any), to move or drop them one by one."""
        ...

    def depth(self, queue: str) -> int:
        """How many messages are ready in a queue; those in the hands of consumers don't count."""
        ...


class TakenMessages(Protocol):
    """Messages in our hands; whatever was not accepted goes back at the end of the `with` block."""

    messages: Sequence[Message]

    def accept(self, index: int) -> None:
        """Remove one for good: it was published elsewhere, or shall be dropped."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
