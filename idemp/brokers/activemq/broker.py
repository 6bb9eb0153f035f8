"""Queues on ActiveMQ. It has no exchanges, so a registry queue, which all clients browse, lists the types that each queue takes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from idemp.brokers.activemq.link import Link, addresses
from idemp.brokers.activemq.publisher import ActivemqPublisher
from idemp.brokers.activemq.receiver import ActivemqReceiver
from idemp.context import EXCHANGE
from idemp.errors import Unavailable
from idemp.messages import Output
from idemp.ports import Finding
from idemp.settings import Settings

__all__ = ["ActivemqBroker", "open_broker"]

REGISTRY: Final = "idemp.registry"
FRESH: Final = 5.0  # seconds for which a browsed registry is used
TIMEOUT: Final = 5.0


def open_broker(settings: Settings) -> ActivemqBroker:
    """Return the broker that the settings name; an entry point of the group `idemp.brokers`.

    Example:
        >>> open_broker(Settings(broker_url="stomp://activemq")).identity
        'activemq'
    """
    return ActivemqBroker(settings.broker_url)


class ActivemqBroker:
    """An ActiveMQ broker.

    Args:
        url: `stomp://USER:PASSWORD@HOST:PORT` or `stomp+ssl://…`; several hosts are separated by semicolons.

    Raises:
        ConfigurationError: The URL is not one of ActiveMQ.

    Example:
        >>> ActivemqBroker("stomp+ssl://shop:secret@activemq").identity
        'activemq'
    """

    identity = "activemq"  # STOMP cannot ask for the broker's name

    def __init__(self, url: str) -> None:
        self._hosts = addresses(url)
        self._queues: dict[str, set[str]] = {}  # types that each queue takes
        self._read_at = float("-inf")

    def declare(self, queue: str, types: Sequence[str]) -> list[Finding]:
        """Register a queue and the types that it takes. Types that it took before are kept.

        Raises:
            Unavailable: The broker cannot be reached.
        """
        link = self._link(TIMEOUT)
        try:
            self._browse(link)
            for name, wanted in ((f"{queue}.unstorable", set[str]()), (queue, set(types))):
                if name in self._queues and wanted <= self._queues[name]:
                    continue
                body = json.dumps({"queue": name, "types": sorted(wanted)}).encode()
                headers = {"destination": f"/queue/{REGISTRY}", "persistent": "true", "receipt": name}
                link.send("SEND", {**headers, "content-length": str(len(body))}, body)
                answer = link.next(TIMEOUT)
                if answer is None or answer.kind != "receipt":
                    raise Unavailable(
                        f"ActiveMQ does not take {name} into its registry: {answer.text if answer else 'no answer'}"
                    )
                self._queues.setdefault(name, set()).update(wanted)
        finally:
            link.close()
        return []

    def receiver(self, queue: str, prefetch: int = 40) -> ActivemqReceiver:
        """Return a new receiver, which connects at its first use."""
        return ActivemqReceiver(queue, lambda: self._link(TIMEOUT), prefetch)

    def publisher(self) -> ActivemqPublisher:
        """Return a new publisher, which connects at its first use."""
        return ActivemqPublisher(self._link, self._route)

    def _route(self, link: Link, output: Output) -> Sequence[str]:
        """Return the queues that take an output. A queue that idemp did not declare takes only outputs that are not mandatory."""
        fresh = time.monotonic() - self._read_at < FRESH
        if not (fresh and (queues := self._found(output))):
            self._browse(link)
            queues = self._found(output)
        return queues

    def _found(self, output: Output) -> Sequence[str]:
        key = output.routing_key
        if output.exchange:
            return sorted(name for name, types in self._queues.items() if output.exchange == EXCHANGE and key in types)
        return [key] if key in self._queues or not output.mandatory else []

    def _browse(self, link: Link) -> None:
        """Read the registry without consuming it."""
        headers = {"destination": f"/queue/{REGISTRY}", "id": "registry", "browser": "true", "ack": "auto"}
        link.send("SUBSCRIBE", headers)
        queues: dict[str, set[str]] = {}
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = link.next(deadline - time.monotonic())
            if answer is None or answer.kind == "error":
                raise Unavailable(f"the registry of ActiveMQ cannot be read: {answer.text if answer else 'no answer in time'}")
            if answer.headers.get("browser") == "end":
                break
            if answer.kind == "message":
                entry = json.loads(answer.body)
                queues.setdefault(entry["queue"], set()).update(entry["types"])
        link.send("UNSUBSCRIBE", {"id": "registry"})
        self._queues, self._read_at = queues, time.monotonic()

    def _link(self, timeout: float) -> Link:
        return Link(self._hosts, timeout)
