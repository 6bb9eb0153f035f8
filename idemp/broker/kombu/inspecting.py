"""A look at a live RabbitMQ through plain AMQP: confirms, alarms, rights, and whether queues are as they must be."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ConsumerCancelled, NotAllowed, NotFound, PreconditionFailed, ResourceLocked

from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.topology import Hop, hops, is_dead_name
from idemp.broker.kombu.urls import hosts_of
from idemp.broker.kombu.wire import parcel
from idemp.broker.urls import shown
from idemp.diagnosis import BrokerCommands, Command, Diagnosis, Verdict, shell
from idemp.errors import BrokerUnavailable
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from idemp.broker.port import Refusal, Topology

_OLDEST: Final = (3, 10)
_NEEDED_FRAME: Final = 131_072
_SECONDS: Final = 5.0
_ALARM_SECONDS: Final = 2.0
# What the broker says of an alarm, and the commands that set its limits back to their defaults.
_ALARMS: Final = {
    "memory": ("set_vm_memory_high_watermark", "0.4"),
    "disk": ("set_disk_free_limit", "50MB"),
}

State = Literal["right", "missing", "other", "refused"]


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a queue is, compared with what it must be.

    Attributes:
        state: "right", "missing", "other" (arguments or type), or "refused" (we may not ask, or it is somebody's own).
        detail: what the broker said.
        ready: how many messages are ready.
        consumers: how many consumers it has.
    """

    state: State
    detail: str = ""
    ready: int = 0
    consumers: int = 0


def queue_state(link: Link, name: str, arguments: Mapping[str, Any]) -> QueueState:
    """Compare a queue with what it must be; makes none."""
    try:
        found = link.open_channel().queue_declare(name, passive=True)
    except NotFound as error:
        return QueueState("missing", said(error))
    except (AccessRefused, ResourceLocked) as error:
        return QueueState("refused", said(error))
    counts = (int(found.message_count), int(found.consumer_count))
    channel = link.open_channel()
    try:
        channel.queue_declare(name, durable=True, auto_delete=False, arguments=dict(arguments))
    except PreconditionFailed as error:
        return QueueState("other", said(error), *counts)
    except (AccessRefused, ResourceLocked) as error:
        return QueueState("refused", said(error), *counts)
    channel.close()
    return QueueState("right", "", *counts)


def aside_name(queue: str) -> str:
    """Where a queue's messages are while it is made anew.

    Example:
        >>> aside_name("orders")
        'orders.aside'
    """
    return f"{queue}.aside"


def waiting_aside(link: Link, queue: str) -> int:
    """How many messages of a queue are aside: a rebuild is under way, or stopped half-way."""
    try:
        return int(link.open_channel().queue_declare(aside_name(queue), passive=True).message_count)
    except (NotFound, AccessRefused, ResourceLocked):
        return 0


@dataclass(slots=True)
class Inspection:
    """Looks at a broker and collects what it finds. Changes nothing but temporary queues of its own.

    Args:
        url: the broker.
        topology: what an app needs; without it only the broker itself is looked at.
        commands: what mends the app's queues.
        heartbeat: seconds, as the app asks for.
        connect_timeout: seconds.
    """

    url: str
    topology: Topology | None = None
    commands: BrokerCommands | None = None
    heartbeat: float = 30.0
    connect_timeout: float = 5.0
    found: list[Diagnosis] = field(default_factory=list)

    def run(self) -> list[Diagnosis]:
        """All that was found.

        Raises:
            BrokerUnavailable: the broker can't be reached.
        """
        try:
            with self._link() as link:
                self._connection(link)
                blocked = self._alarm(link)
                if not blocked:
                    self._confirms(link)
            if self.topology is not None:
                # On another connection: from one that has published during an alarm the broker reads nothing more.
                with self._link() as link:
                    declared = self._queues(link, self.topology)
                    self._exchange(link, self.topology, blocked=blocked, declared=declared)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, AccessRefused | NotAllowed):
                raise
            self._locked_out(error)
        return self.found

    @contextmanager
    def _link(self) -> Iterator[Link]:
        link = Link.open(self.url, connect_timeout=self.connect_timeout, heartbeat=self.heartbeat)
        try:
            yield link
        except LINK_ERRORS as error:
            raise BrokerUnavailable(
                f"Lost {shown(self.url)} while looking: {said(error)}.", fix="Try again."
            ) from error
        finally:
            link.close()

    def _add(self, verdict: Verdict, name: str, detail: str, fix: str = "", *commands: Command) -> None:
        self.found.append(Diagnosis(verdict, name, detail, fix, commands))

    # The broker itself ----------------------------------------------------------------------------------------------

    def _locked_out(self, error: BrokerUnavailable) -> None:
        vhost, _ = place_of(self.url)
        told = said(error.__cause__) if error.__cause__ is not None else error.message
        if isinstance(error.__cause__, AccessRefused):
            self._add("failed", "broker", error.message, "Correct user and password, or add the user.")
        elif "not found" in told:
            add = shell("rabbitmqctl", "add_vhost", vhost)
            self._add("failed", "broker", error.message, "Add the vhost.", add, self._permit())
        else:
            self._add("failed", "rights", error.message, "Let the user in.", self._permit())

    def _connection(self, link: Link) -> None:
        told = link.connection.server_properties or {}
        version = str(told.get("version", "unknown"))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        product = f"{shown(self.url)}: {told.get('product', 'a broker')} {version}"
        if len(numbers) == len(_OLDEST) and numbers < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            self._add(
                "failed", "broker", f"{product} has no quorum queues that idemp needs.", f"Use {needed} or newer."
            )
        else:
            self._add("ok", "broker", product)
        if link.heartbeat:
            self._add("ok", "heartbeat", f"{link.heartbeat:g} s, as both sides agreed")
        else:
            fix = "Set heartbeat in the broker's configuration."
            self._add("warning", "heartbeat", "The broker wants none: a dead link is noticed late.", fix)
        if 0 < (largest := int(link.connection.frame_max or 0)) < _NEEDED_FRAME:
            detail = f"Frames have at most {largest} bytes: the story of a dead letter may not fit."
            self._add(
                "warning", "frame size", detail, f"Set frame_max = {_NEEDED_FRAME} in the broker's configuration."
            )

    def _alarm(self, link: Link) -> bool:
        """Whether the broker takes nothing for now. It says so only to whoever has tried to publish."""
        reasons: list[str] = []
        answers: list[object] = []
        _hear_reasons(link.connection, reasons)
        channel = link.open_channel()
        channel.confirm_select()
        for event in ("basic_ack", "basic_nack"):
            channel.events[event].add(lambda *_: answers.append(1))
        channel.basic_publish(amqp.Message(b""), "", _nowhere())
        deadline = time.monotonic() + _ALARM_SECONDS
        try:
            while not reasons and not answers and (left := deadline - time.monotonic()) > 0:
                if link.wait_readable(left):
                    link.read()
        except AccessRefused:
            return False  # which the next look tells
        if not reasons:
            if answers:
                self._add("ok", "alarms", "none")
            return False
        link.blocked = True
        (reason, *_) = reasons
        commands = [shell("rabbitmqctl", *limit) for word, limit in _ALARMS.items() if word in reason]
        fix = "Make room: let consumers drain, free the disk. Where only the limit was too tight, set it back."
        self._add("failed", "alarms", f"The broker takes no messages for now: {reason}.", fix, *commands)
        return True

    def _confirms(self, link: Link) -> None:
        """A message that nobody takes comes back, and one into a queue of our own is confirmed."""
        try:
            own = link.open_channel().queue_declare(exclusive=True, auto_delete=True).queue
        except AccessRefused as error:
            detail = f"No temporary queue could be made to try them: {said(error)}."
            self._add("warning", "confirms", detail, "Allow configure on amq.gen-.*")
            own = ""
        targets = [_nowhere(), own] if own else [_nowhere()]
        publisher = ConfirmingPublisher(self.url, connect_timeout=self.connect_timeout, heartbeat=self.heartbeat)
        try:
            answers = publisher.publish_parcels(
                [
                    parcel("", name, b"{}", {"message_id": name, "expiration": "60000"}, mandatory=True)
                    for name in targets
                ],
                _SECONDS,
            )
        finally:
            publisher.close()
        self._judge(answers)

    def _judge(self, answers: list[Refusal | None]) -> None:
        lost, *kept = answers
        if lost is not None and "ACCESS_REFUSED" in lost.detail:
            self._add("failed", "rights", f"No writing to queues: {lost.detail}.", _PERMIT, self._permit())
        elif lost is None or lost.kind != "returned":
            how = "was confirmed" if lost is None else f"was {lost.kind}: {lost.detail}"
            self._add(
                "failed", "confirms", f"A message to a queue that does not exist {how}.", "Use another transport."
            )
        elif any(kept):
            said_ = "; ".join(f"{answer.kind}: {answer.detail}" for answer in kept if answer is not None)
            self._add(
                "failed", "confirms", f"A message into a queue of our own was not confirmed ({said_}).", "Try again."
            )
        else:
            self._add("ok", "confirms", "a message into a queue was confirmed, one to no queue came back")

    # What the app needs ---------------------------------------------------------------------------------------------

    def _exchange(self, link: Link, topology: Topology, *, blocked: bool, declared: bool) -> None:
        name = topology.exchange
        if not name:
            return
        try:
            link.open_channel().exchange_declare(name, "topic", passive=True)
            link.open_channel().exchange_declare(name, "topic", durable=True, auto_delete=False)
        except NotFound:
            detail = f"The exchange {name!r} is missing: what is published comes back and stays pending."
            verdict: Verdict = "failed" if declared else "warning"
            self._add(verdict, "exchange", detail, "Make it, with its bindings.", *self._declaring())
        except PreconditionFailed as error:
            fix = "Give idemp an exchange of its own (setting exchange), or delete this one and declare it anew."
            self._add("failed", "exchange", f"The exchange {name!r} is not as it must be: {said(error)}.", fix)
        except AccessRefused as error:
            self._add("failed", "rights", f"The exchange {name!r}: {said(error)}.", _PERMIT, self._permit())
        else:
            if not blocked:
                self._writes(link, name)

    def _writes(self, link: Link, exchange: str) -> None:
        """Whether we may publish there, without publishing: the broker looks at rights before it refuses a false user."""
        channel = link.open_channel()
        channel.confirm_select()
        message = amqp.Message(b"", user_id=_nowhere(), expiration="0")
        try:
            channel.basic_publish(message, exchange, _nowhere())
            channel.queue_declare(_nowhere(), passive=True)  # an answer to wait for
        except PreconditionFailed:
            self._add("ok", "exchange", f"{exchange} is a durable topic exchange, and takes what is published")
        except AccessRefused as error:
            self._add("failed", "rights", f"No publishing: {said(error)}.", _PERMIT, self._permit())
        except NotFound:
            self._add("ok", "exchange", f"{exchange} is a durable topic exchange")

    def _queues(self, link: Link, topology: Topology) -> bool:
        """Look at each; whether any of them is declared. What is wrong comes first: nothing can be declared before."""
        states = {hop.name: (hop, queue_state(link, hop.name, hop.arguments)) for hop in hops(topology)}
        missing = [found for found in states.values() if found[1].state == "missing"]
        for hop, state in states.values():
            if state.state == "other":
                self._queue(hop, state, topology)
        for name in states:
            self._aside(link, name)
        if len(missing) == len(states):
            detail = f"None of {', '.join(topology.queues)} is declared yet."
            self._add("warning", "queue", detail, "The worker declares them at its start.", *self._declaring())
            return False
        for hop, state in states.values():
            if state.state != "other":
                self._queue(hop, state, topology)
        for queue in topology.queues:
            self._reads(link, queue, states)
        return True

    def _aside(self, link: Link, queue: str) -> None:
        if count := waiting_aside(link, queue):
            detail = f"{aside_name(queue)} holds {counted(count, 'message')} of {queue}: a rebuild stopped half-way."
            fix = "Nobody handles them there. Run it again, it brings them back; or wait for the one that runs."
            self._add("failed", "messages aside", detail, fix, *self._rebuilding(queue))

    def _queue(self, hop: Hop, state: QueueState, topology: Topology) -> None:
        name = (
            "queue" if hop.name in topology.queues else "dead-letter queue" if is_dead_name(hop.name) else "delay tier"
        )
        match state.state:
            case "missing":
                self._add("failed", name, f"The {name} {hop.name!r} is missing.", "Make it.", *self._declaring())
            case "other":
                detail = f"The {name} {hop.name!r} exists with other arguments: {state.detail}."
                fix = "Stop its consumers and whoever publishes to it, then make it anew; its messages are kept."
                self._add("failed", name, detail, fix, *self._rebuilding(hop.name))
            case "refused":
                self._add("failed", "rights", f"The {name} {hop.name!r}: {state.detail}.", _PERMIT, self._permit())
            case _ if is_dead_name(hop.name) and state.ready:
                queue = hop.name.removesuffix(".dead") if len(topology.queues) > 1 else None
                see = (self.commands or BrokerCommands("MODULE:APP")).dead_letters(queue)
                fix = f"See them with `{see.text}`."
                self._add("warning", "dead letters", f"{state.ready} in {hop.name}", fix, see)
            case _:
                detail = (
                    f"{hop.name} has {counted(state.ready, 'message')} ready and {counted(state.consumers, 'consumer')}"
                )
                self._add("ok", name, detail)

    def _reads(self, link: Link, queue: str, states: Mapping[str, tuple[Hop, QueueState]]) -> None:
        """Whether we may consume. Asked of an empty queue only: of another, a message would be taken and given back."""
        if states[queue][1].state != "right" or states[queue][1].ready:
            return
        channel = link.open_channel()
        try:
            came = channel.basic_get(queue)
            if came is not None:
                channel.basic_reject(came.delivery_tag, requeue=True)
            channel.close()
        except AccessRefused as error:
            self._add("failed", "rights", f"No consuming from {queue!r}: {said(error)}.", _PERMIT, self._permit())
        except ConsumerCancelled:
            return

    def _declaring(self) -> tuple[Command, ...]:
        return (self.commands.declare(),) if self.commands is not None else ()

    def _rebuilding(self, queue: str) -> tuple[Command, ...]:
        return (self.commands.rebuild(queue),) if self.commands is not None else ()

    def _permit(self) -> Command:
        vhost, user = place_of(self.url)
        return shell("rabbitmqctl", "set_permissions", "-p", vhost, user, ".*", ".*", ".*")


_PERMIT: Final = "Grant the rights; narrower patterns than these do as well (see the how-to on least privilege)."


def place_of(url: str) -> tuple[str, str]:
    """Vhost and user of a URL.

    Example:
        >>> place_of("pyamqp://me:secret@broker/shop"), place_of("pyamqp://broker//"), place_of("pyamqp://broker")
        (('shop', 'me'), ('/', 'guest'), ('/', 'guest'))
    """
    parts = urlsplit("http://" + hosts_of(url)[0].partition("://")[2])
    return unquote(parts.path[1:]) or "/", unquote(parts.username or "") or "guest"


def _hear_reasons(connection: Any, reasons: list[str]) -> None:
    """Note why the broker blocks this connection: py-amqp drops the reason unread."""
    blocked = spec.Connection.Blocked
    connection._METHODS = {**connection._METHODS, blocked: spec.method(blocked, "s")}  # noqa: SLF001
    connection._callbacks[blocked] = lambda reason: reasons.append(str(reason))  # noqa: SLF001


def _nowhere() -> str:
    return f"idemp.doctor.{uuid4().hex}"
