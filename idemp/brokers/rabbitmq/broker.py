"""Queues and exchange on RabbitMQ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Any, Final

from amqp.exceptions import AccessRefused, NotAllowed, NotFound, PreconditionFailed, ResourceLocked

from idemp.brokers.rabbitmq.link import LINK_ERRORS, Link, addresses
from idemp.brokers.rabbitmq.publisher import RabbitPublisher
from idemp.brokers.rabbitmq.receiver import RabbitReceiver
from idemp.context import EXCHANGE
from idemp.errors import Unavailable, describe_error
from idemp.ports import Finding
from idemp.settings import Settings

__all__ = ["RabbitBroker", "open_broker"]

NEVER: Final = 2**31 - 1  # RabbitMQ 4 drops a message after 20 deliveries otherwise
ARGUMENTS: Final = {"x-queue-type": "quorum", "x-delivery-limit": NEVER, "x-overflow": "reject-publish"}
DIFFERS: Final = re.compile(
    r"inequivalent arg '([^']+)' .* but current is (?:none|(?:the value )?'(.*?)'(?: of type '(\w+)')?)", re.DOTALL
)
LONGEST: Final = 20  # arguments of a queue
REFUSED: Final = (PreconditionFailed, AccessRefused, NotAllowed, ResourceLocked)


def open_broker(settings: Settings) -> RabbitBroker:
    """Return the broker that the settings name; an entry point of the group `idemp.brokers`.

    Example:
        >>> open_broker(Settings(broker_url="amqp://rabbit/shop")).identity
        'rabbitmq:shop'
    """
    return RabbitBroker(settings.broker_url)


class RabbitBroker:
    """A virtual host of RabbitMQ.

    Args:
        url: `amqp://USER:PASSWORD@HOST/VHOST` or `amqps://…`; several hosts are separated by semicolons.
        heartbeat: Heartbeat interval in seconds; a connection that is silent for two intervals counts as lost.

    Raises:
        ConfigurationError: The URL is not one of RabbitMQ.

    Example:
        >>> RabbitBroker("amqps://shop:secret@rabbit/shop").identity
        'rabbitmq:shop'
    """

    def __init__(self, url: str, *, heartbeat: int = 30) -> None:
        self._hosts, self._heartbeat = addresses(url), heartbeat
        self._types: dict[str, Sequence[str]] = {}
        self._declaring: Link | None = None

    @property
    def identity(self) -> str:
        """Identity of the broker: the name of the virtual host, because its nodes may have several addresses."""
        return f"rabbitmq:{self._hosts[0].vhost}"

    def declare(self, queue: str, types: Sequence[str]) -> list[Finding]:
        """Declare the queues and the exchange, and bind the queue to the types that it takes. Other bindings are kept.

        Raises:
            Unavailable: The broker cannot be reached, or is starting.
        """
        self._types[queue] = types
        try:
            findings = [finding for name in (f"{queue}.unstorable", queue) if (finding := self._declare_queue(name))]
            return findings or self._bind(queue)
        finally:
            if self._declaring is not None:
                self._declaring.close()
                self._declaring = None

    def receiver(self, queue: str, prefetch: int = 40) -> RabbitReceiver:
        """Return a new receiver, which connects at its first use."""

        def connect() -> Link:
            if queue in self._types:  # the queue may have been deleted
                for finding in self.declare(queue, self._types[queue]):
                    if finding.level == "red":
                        raise Unavailable(str(finding))
            return self._link(5.0)

        return RabbitReceiver(queue, connect, prefetch)

    def publisher(self) -> RabbitPublisher:
        """Return a new publisher, which connects at its first use."""
        return RabbitPublisher(self._link)

    def _link(self, timeout: float) -> Link:
        return Link(self._hosts, timeout=timeout, heartbeat=self._heartbeat)

    def _declare_queue(self, name: str) -> Finding | None:
        try:
            self._run("queue_declare", name, durable=True, auto_delete=False, arguments=dict(ARGUMENTS))
        except REFUSED as error:
            return self._look_at(name, error)
        return None

    def _look_at(self, name: str, error: Exception) -> Finding:
        """Return a finding about a queue that cannot be declared with our arguments."""
        text = describe_error(error)
        try:
            self._run("queue_declare", name, passive=True)
        except NotFound:
            return Finding(
                "red", f"the queue {name} does not exist and may not be created ({text})", "declare it, or grant configure"
            )
        except REFUSED as refused:
            return Finding("red", f"the queue {name} cannot be used: {describe_error(refused)}", "grant read and write")
        if isinstance(error, AccessRefused):
            return Finding("yellow", f"the queue {name} exists, and its arguments cannot be checked", "grant configure")
        others = self._differing(name, error)
        given = (f"no {key}" if value is None else f"{key}={value}" for key, value in sorted(others.items()))
        kind, shown = others.get("x-queue-type", "quorum"), ", ".join(given)
        if kind == "classic":
            fix = "move to a quorum queue with x-delivery-limit 2147483647"
            return Finding("yellow", f"the queue {name} is not a quorum queue", fix)
        # Another value of our arguments is red, and so is a time to live, because it drops messages.
        if kind == "quorum" and others and not set(others) & {*ARGUMENTS, "x-message-ttl", "x-expires"}:
            return Finding("yellow", f"the queue {name} has further arguments ({shown})", "check that they drop no messages")
        dropping = ": RabbitMQ 4 drops a message after 20 deliveries" if others.get("x-delivery-limit", NEVER) is None else ""
        command = f"rabbitmqctl delete_queue {quote(name)} --vhost {quote(self._hosts[0].vhost)}"
        fix = f"use a new name, or once it is empty: {command}"
        return Finding("red", f"the queue {name} has other arguments ({shown or text}){dropping}", fix)

    def _differing(self, name: str, error: Exception) -> dict[str, Any]:
        """Return the arguments of a queue that differ from ours. RabbitMQ names one at a time, so they are tried out."""
        arguments: dict[str, Any] = dict(ARGUMENTS)
        tried: dict[str, Any] = {}
        while (named := DIFFERS.search(str(error))) and named[1] not in tried and len(tried) < LONGEST:
            number = named[3] not in ("longstr", "bool", None)
            tried[named[1]] = value = int(named[2]) if number else named[2] == "true" if named[3] == "bool" else named[2]
            arguments[named[1]] = "classic" if named[1] == "x-queue-type" and value is None else value
            try:
                given = {key: each for key, each in arguments.items() if each is not None}
                self._run("queue_declare", name, durable=True, auto_delete=False, arguments=given)
            except REFUSED as another:
                error = another
            else:
                break
        return {key: arguments[key] for key in tried}

    def _bind(self, queue: str) -> list[Finding]:
        try:
            self._run("exchange_declare", EXCHANGE, "topic", durable=True, auto_delete=False)
            for type in self._types[queue]:
                self._run("queue_bind", queue, EXCHANGE, type)
        except REFUSED as error:
            return [
                Finding(
                    "yellow", f"{queue} cannot be bound to {EXCHANGE}: {describe_error(error)}", "grant configure, or bind it"
                )
            ]
        return []

    def _run(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of a channel. A refusal closes the channel, so the next call opens another connection."""
        try:
            link = self._declaring = self._declaring or self._link(5.0)
            getattr(link.channel, method)(*arguments, **options)
        except LINK_ERRORS as error:
            if self._declaring is not None:
                self._declaring.drop()
                self._declaring = None
            if isinstance(error, REFUSED) or (isinstance(error, NotFound) and options.get("passive")):
                raise
            text = (
                "RabbitMQ is starting, or its node for a queue is down"
                if isinstance(error, NotFound)
                else "the connection was lost"
            )
            raise Unavailable(f"{text}: {describe_error(error)}") from error
