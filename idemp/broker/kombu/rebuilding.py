"""Making a queue anew whose arguments can't be changed, without losing a message.

All that it needs of others is looked at, and declared where it is missing, before anything moves. Its messages go aside
into another durable queue, each acked after its confirm; the queue is deleted, declared as it must be, and they come
back; no other queue is touched. Whatever interrupts it, the next run sees from the queues how far it was, and goes on. A
message that was confirmed and not yet acked when the connection broke comes twice, under the same id.

Nobody may publish to the queue meanwhile: what arrives in the very moment of the deletion RabbitMQ confirms and drops. What
can be seen of consumers and publishers is refused before anything is moved.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from amqp.exceptions import (
    AccessRefused,
    AMQPNotImplementedError,
    NotAllowed,
    NotFound,
    PreconditionFailed,
    ResourceLocked,
)

from idemp.broker.kombu import topology as layout
from idemp.broker.kombu.inspecting import QueueState, aside_name, place_of, queue_state, waiting_aside
from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.settling import USER_ID_HEADER, arrived_by_amqp
from idemp.broker.kombu.wire import PERSISTENT, Parcel, copied_headers, parcel
from idemp.diagnosis import BrokerCommands
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.broker.port import Topology

    Packs = Callable[[Any, str], Parcel]

_EXPIRATION_HEADER: Final = "idemp-moved-expiration"
_BATCH: Final = 100
_PREFETCH: Final = 500
_SILENCE: Final = 0.2
_WATCH: Final = 0.5
_PATIENCE: Final = 2.0  # seconds in which a queue that somebody goes on publishing to is waited for
_FLOODED: Final = 10.0  # seconds after which a queue that fills as fast as we empty it is left alone
_GIVES_NOTHING: Final = 20.0  # seconds without a message from a queue that has some: under load it pauses for long
_TRIES: Final = 50
_CONFIRM_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was done.

    Attributes:
        queue: its name.
        rebuilt: whether it was deleted and made anew in this run.
        aside: how many messages went aside in this run.
        back: how many came back.
    """

    queue: str
    rebuilt: bool
    aside: int
    back: int


class Rebuild:
    """One run.

    Args:
        url: the broker.
        topology: what the app needs.
        queue: one of its queues.
        progress: called with the number of messages that were moved.
        connect_timeout: seconds.
        watch: seconds in which nothing may be published to the queue before it is touched, by default half a second; 0:
            nobody looks.
        commands: how a person runs it again.

    Raises:
        ConfigurationError: the app has no such queue.
    """

    def __init__(
        self,
        url: str,
        topology: Topology,
        queue: str,
        progress: Callable[[int], object],
        connect_timeout: float,
        watch: float | None = None,
        commands: BrokerCommands | None = None,
    ) -> None:
        known = {hop.name: hop for hop in layout.hops(topology)}
        if queue not in known:
            raise ConfigurationError(f"The app has no queue {queue!r}.", fix=f"It has {', '.join(known)}.")
        self._url = url
        self._topology = topology
        self._hop = known[queue]
        self._aside = aside_name(queue)
        self._commands = commands
        self._progress = progress
        self._connect_timeout = connect_timeout
        self._user = place_of(url)[1]
        self._publisher = ConfirmingPublisher(url, connect_timeout=connect_timeout)
        self._on_condition = True
        self._watch = _WATCH if watch is None else watch

    def run(self) -> Rebuilt:
        """Do what is left to do.

        Raises:
            ConfigurationError: it has consumers or is a stream, another run is under way, or we may not.
            BrokerUnavailable: the broker was lost, or confirms nothing: run it again.
            BrokerError: somebody published into it while it was deleted, and those messages are gone.
        """
        link = self._open()
        try:
            self._lock(link)
            state = queue_state(link, self._hop.name, self._hop.arguments)
            if state.state == "refused":
                raise ConfigurationError(f"The queue {self._hop.name!r}: {state.detail}.", fix="Mend permissions.")
            with self._telling_what_is_aside():
                if state.state == "other":
                    if not state.ready:
                        self._refuse_streams()
                    self._refuse_traffic(link, state)
                self._prepare(link, state)
                aside = self._cleared(link) if state.state == "other" else 0
                self._hop.declare(link.open_channel())
                self._bind(link)
                back = self._return(link)
            return Rebuilt(self._hop.name, state.state == "other", aside, back)
        finally:
            self._publisher.close()
            link.close()

    @contextmanager
    def _telling_what_is_aside(self) -> Iterator[None]:
        """An error of the block says how many messages are aside, if any, and what brings them back."""
        try:
            yield
        except (BrokerError, ConfigurationError, *LINK_ERRORS) as error:
            try:
                link = self._open()
                try:
                    count = waiting_aside(link, self._hop.name)
                finally:
                    link.close()
            except (BrokerError, *LINK_ERRORS):
                where = f"What was moved so far is in {self._aside}"
            else:
                if not count:
                    raise
                where = f"{self._aside} holds {counted(count, 'message')}"
            raise self._with_place(error, where) from error

    def _with_place(self, error: Exception, where: str) -> BrokerError | ConfigurationError:
        commands = self._commands or BrokerCommands("MODULE:APP")
        again = f"un `{commands.rebuild(self._hop.name).text}` again."
        if isinstance(error, BrokerError | ConfigurationError):
            fix = f"R{again}" if not error.fix or error.fix.startswith("Run it again") else f"{error.fix} Then r{again}"
            return type(error)(f"{error.message} {where}.", committed=error.committed, fix=fix)
        if isinstance(error, AccessRefused | NotAllowed | NotFound):
            return ConfigurationError(f"{said(error)}. {where}.", fix=f"Mend permissions. Then r{again}")
        return BrokerUnavailable(f"Lost the broker while moving: {said(error)}. {where}.", fix=f"R{again}")

    def _prepare(self, link: Link, state: QueueState) -> None:
        """All that may be refused of what the queue needs, before anything moves.

        What else is wrong with a dead-letter queue is another run's task.
        """
        if self._hop.name not in self._topology.queues:
            return
        dead = layout.dead_queue(self._hop.name)
        if queue_state(link, dead.name, dead.arguments).state == "missing":
            dead.declare(link.open_channel())
        if self._topology.exchange:
            layout.declare_exchange(link.open_channel(), self._topology.exchange)
        if state.state == "other":
            self._bind(link)  # the queue that is there: whoever may not bind it, may not bind the new one

    def _bind(self, link: Link) -> None:
        if self._topology.exchange:
            layout.bind(link.open_channel(), self._topology, self._hop.name)

    def _open(self) -> Link:
        return Link.open(self._url, connect_timeout=self._connect_timeout, heartbeat=0)

    def _refuse_streams(self) -> None:
        """A stream hands out nothing that came before, and for a while says that it is empty. Nothing else answers so.

        Asked only of a queue that says it is empty, or that gives us nothing: a message that we got and returned would count
        as a delivery.
        """
        link = self._open()
        try:
            link.channel.basic_get(self._hop.name)
        except AMQPNotImplementedError as error:
            raise ConfigurationError(
                f"The queue {self._hop.name!r} is a stream, whose messages can't be moved.",
                fix="Give the app a queue of another name; or delete the stream yourself, with the messages that it keeps.",
            ) from error
        except (AccessRefused, ResourceLocked):
            pass  # no stream: a queue for one consumer at a time
        finally:
            link.close()

    def _refuse_traffic(self, link: Link, before: QueueState) -> None:
        if before.consumers:
            raise ConfigurationError(
                f"The queue {self._hop.name!r} has {counted(before.consumers, 'consumer')}.",
                fix="Stop the workers first.",
            )
        deadline = time.monotonic() + self._watch
        while (left := deadline - time.monotonic()) > 0:
            if link.wait_readable(left):
                link.read()
        if self._watch and queue_state(link, self._hop.name, self._hop.arguments).ready > before.ready:
            raise ConfigurationError(
                f"Somebody publishes to the queue {self._hop.name!r}: RabbitMQ would confirm and drop what comes in the "
                "moment in which it is deleted.",
                fix="Stop whoever does, until it is made anew.",
            )

    def _lock(self, link: Link) -> None:
        """Keep others away: an exclusive queue is gone with its connection, however that ends."""
        try:
            link.open_channel().queue_declare(f"{self._hop.name}.rebuilding", exclusive=True, durable=False)
        except ResourceLocked as error:
            raise ConfigurationError(
                f"Somebody else rebuilds {self._hop.name!r} already: {said(error)}.", fix="Wait for the other one."
            ) from error

    # Aside

    def _cleared(self, link: Link) -> int:
        try:
            return self._clear(link)
        except BrokerUnavailable:
            with suppress(*LINK_ERRORS, BrokerError):
                self._refuse_streams()
            raise

    def _clear(self, link: Link) -> int:
        """Move all messages aside and delete the queue.

        It is deleted while we consume it, so that what somebody publishes at the last moment is in our hands, not in it.
        """
        layout.declare_queue(link.open_channel(), self._aside, layout.dead_queue("").arguments)
        move = Move(link, self._publisher, self._hop.name, self._aside, self._set_aside, self._progress)
        move.begin()
        for _ in range(_TRIES):
            move.drain()
            gone = self._delete()
            if gone is None:
                continue
            if gone > (rescued := move.rescue()):
                raise BrokerError(
                    f"Lost {counted(gone - rescued, 'message')}, published into {self._hop.name!r} at the last moment.",
                    committed="unknown",
                    fix="Run it again for the others, and stop whoever publishes to it.",
                )
            return move.moved
        raise _flooded(self._hop.name)

    def _delete(self) -> int | None:
        """Delete the queue: how many messages the broker says were in it; `None` if it was not the moment yet."""
        link = self._open()  # RabbitMQ closes the whole connection over what it does not know
        try:
            options = {"if_empty": True} if self._on_condition else {}
            return int(link.channel.queue_delete(self._hop.name, **options) or 0)
        except PreconditionFailed:
            return None
        except AMQPNotImplementedError:
            self._on_condition = False  # quorum queues have no conditions
            return None
        finally:
            link.close()

    def _set_aside(self, raw: Any, queue: str) -> Parcel:
        arrived = arrived_by_amqp(raw)
        properties, headers = dict(arrived.properties), copied_headers(arrived.headers)
        if "expiration" in properties:
            headers[_EXPIRATION_HEADER] = properties.pop("expiration")
        if properties.get("user_id", self._user) != self._user:
            headers[USER_ID_HEADER] = properties.pop("user_id")
        return _packed(queue, arrived.body, properties, headers)

    # Back

    def _return(self, link: Link) -> int:
        """Move what is aside back, and remove the place where it was."""
        try:
            link.open_channel().queue_declare(self._aside, passive=True)
        except NotFound:
            return 0
        moved = Move(link, self._publisher, self._aside, self._hop.name, self._bring_back, self._progress).run()
        link.open_channel().queue_delete(self._aside)  # empty: nobody but the holder of the lock puts anything there
        return moved

    def _bring_back(self, raw: Any, queue: str) -> Parcel:
        arrived = arrived_by_amqp(raw)
        properties, headers = dict(arrived.properties), copied_headers(arrived.headers)
        expiration = headers.pop(_EXPIRATION_HEADER, None)
        if expiration is not None:
            properties["expiration"] = expiration
        return _packed(queue, arrived.body, properties, headers)


class Move:
    """Moves messages from a queue to another, each acked after its confirm.

    Args:
        link: where it consumes.
        publisher: with a connection of its own.
        source: from here.
        target: to there.
        pack: the copy of a message for a queue.
        progress: called with the number of messages of each batch.

    Attributes:
        moved: how many so far.
    """

    def __init__(
        self,
        link: Link,
        publisher: ConfirmingPublisher,
        source: str,
        target: str,
        pack: Packs,
        progress: Callable[[int], object],
    ) -> None:
        self._link = link
        self._publisher = publisher
        self._source = source
        self._target = target
        self._pack = pack
        self._progress = progress
        self._held: list[Any] = []
        self._channel = link.open_channel()
        self._expected = 0
        self._cancelled = False
        self.moved = 0

    def run(self) -> int:
        """Move all that there is; how many there were. Nobody else may publish there.

        Raises:
            BrokerUnavailable: the broker was lost, or a copy has no confirm; what is not acked stays where it was.
        """
        tag = self.begin()
        self.drain()
        self._channel.basic_cancel(tag)
        self._pass_on(acked=True)
        self._channel.close()
        return self.moved

    def begin(self) -> str:
        """Let messages come."""
        self._expected = self._ready()
        self._channel.basic_qos(0, _PREFETCH, False)
        consume = self._channel.basic_consume
        return str(consume(self._source, callback=self._held.append, on_cancel=self._on_cancel))

    def drain(self) -> None:
        """Move until there is nothing left, or nothing but what somebody else goes on publishing.

        Raises:
            BrokerUnavailable: the broker was lost, a copy has no confirm, or messages come as fast as they are moved; what
                is not acked stays where it was.
        """
        patience, hope = time.monotonic() + _PATIENCE, time.monotonic() + _GIVES_NOTHING
        while True:
            before = self.moved
            silent = not self._fill()
            self._pass_on(acked=True)
            if self.moved > before:
                hope = time.monotonic() + _GIVES_NOTHING
                if self.moved < self._expected:
                    patience = time.monotonic() + _PATIENCE
            if (silent or time.monotonic() > patience) and self.moved >= self._expected and not self._ready():
                return
            if self.moved > self._expected and time.monotonic() > patience + _FLOODED:
                raise _flooded(self._source)
            if silent and time.monotonic() > hope:
                raise BrokerUnavailable(f"The queue {self._source!r} has messages and gives none.", fix="Run it again.")

    def rescue(self) -> int:
        """Move what came before the queue was deleted, and is not acked: the broker has forgotten it."""
        deadline = time.monotonic() + _PATIENCE
        while not self._cancelled and (left := deadline - time.monotonic()) > 0:
            if self._link.wait_readable(left):
                self._link.read()
        return self._pass_on(acked=False)

    def _on_cancel(self, _tag: str) -> None:
        self._cancelled = True

    def _fill(self) -> bool:
        """Wait for a batch, or for silence; whether anything came."""
        before = len(self._held)
        deadline = time.monotonic() + _SILENCE
        while len(self._held) < before + _BATCH and (left := deadline - time.monotonic()) > 0:
            if self._link.wait_readable(left):
                self._link.read()
        return len(self._held) > before

    def _ready(self) -> int:
        channel = self._link.open_channel()
        count = int(channel.queue_declare(self._source, passive=True).message_count)
        channel.close()
        return count

    def _pass_on(self, *, acked: bool) -> int:
        held = list(self._held)
        self._held.clear()
        if not held:
            return 0
        parcels = [self._pack(raw, self._target) for raw in held]
        answers = self._publisher.publish_parcels(parcels, _CONFIRM_SECONDS)
        if acked:
            try:
                for raw, refusal in zip(held, answers, strict=True):
                    if refusal is None:
                        self._channel.basic_ack(raw.delivery_tag)
                self._channel.basic_qos(0, _PREFETCH, False)  # its answer: the acks before it have arrived
            except LINK_ERRORS as error:
                raise BrokerUnavailable(f"Lost the broker while moving: {said(error)}.", fix="Run it again.") from error
        refused = [refusal for refusal in answers if refusal is not None]
        if refused:
            raise BrokerUnavailable(
                f"No confirm for {counted(len(refused), 'copy', 'copies')} to {self._target!r} "
                f"({refused[0].kind}: {refused[0].detail}).",
                fix="Run it again: it goes on where it stopped.",
            )
        self.moved += len(held)
        self._progress(len(held))
        return len(held)


def _flooded(queue: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"So much is published into {queue!r} that it is never empty.", fix="Stop whoever does, and run it again."
    )


def _packed(queue: str, body: bytes, properties: dict[str, Any], headers: dict[str, Any]) -> Parcel:
    kept = {**properties, "delivery_mode": PERSISTENT, "application_headers": headers}
    return parcel("", queue, body, kept, mandatory=True)
