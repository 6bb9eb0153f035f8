"""Receiver for one queue. Each message is acknowledged individually, so that no other one is acknowledged with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from idemp.brokers.activemq.link import Arrival, Link
from idemp.errors import Unavailable
from idemp.messages import Delivery, read_properties

__all__ = ["PROPERTIES", "ActivemqReceiver", "properties_of"]

PROPERTIES: Final = "idemp"  # header with all properties of a message of idemp's, as JSON
NATIVE: Final = {"type": "type", "correlation-id": "correlation_id", "content-type": "content_type"}
TOGETHER: Final = 0.005  # seconds between messages that arrive together
OWN: Final = frozenset(
    {"ack", "content-length", "destination", "expires", "message-id", "persistent", "priority", "redelivered", "reply-to"}
    | {"subscription", "timestamp", *NATIVE}
)
"""Headers that the broker sets, and those that become properties."""


class ActivemqReceiver:
    """Consumes one queue. Connects at first use. Any unclear error costs the connection, and unsettled messages are redelivered.

    Args:
        queue: Name of the queue.
        connect: Function that opens a link.
        prefetch: Maximum number of unacknowledged messages.

    Example:
        >>> receiver = ActivemqReceiver("billing", lambda: None, 20)
        >>> receiver.ack([])
        >>> receiver.close()
    """

    def __init__(self, queue: str, connect: Callable[[], Link], prefetch: int) -> None:
        self._queue, self._connect, self._prefetch = queue, connect, prefetch
        self._link: Link | None = None
        self._arrived: deque[Arrival] = deque()
        self._generation = 0  # of the connection: an acknowledgement is valid on its own connection only

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Return messages that have arrived; wait for the first one only.

        Raises:
            Unavailable: The connection is lost, or cannot be opened.
        """
        deadline = time.monotonic() + timeout
        try:
            link = self._open()
            while len(self._arrived) < limit:
                arrival = link.next(TOGETHER if self._arrived else deadline - time.monotonic())
                if arrival is None or arrival.kind == "woken":
                    break
                self._arrived.append(arrival)
        except Unavailable:
            self._drop()
            raise
        count = min(limit, len(self._arrived))
        return [self._delivery(self._arrived.popleft()) for _ in range(count)]

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages of this connection. The broker redelivers those of earlier connections anyway.

        Raises:
            Unavailable: The connection is lost, so the messages are redelivered.
        """
        link, tags = self._link, [tag for generation, tag in (each.tag for each in deliveries) if generation == self._generation]
        try:
            for tag in tags if link is not None and link.alive else ():
                link.send("ACK", {"id": tag})  # type: ignore[union-attr]
        except Unavailable:
            self._drop()
            raise

    def keep_alive(self) -> None:
        """Do nothing: a thread of the connection sends heartbeats."""

    def wake(self) -> None:
        """End a waiting `receive`."""
        if self._link is not None:
            self._link.wake()

    def close(self) -> None:
        """Close the connection; the broker redelivers unacknowledged messages."""
        if self._link is not None:
            self._link.close()
        self._drop()

    def _open(self) -> Link:
        if self._link is None or not self._link.alive:
            self._drop()
            self._link = link = self._connect()
            headers = {"destination": f"/queue/{self._queue}", "id": "0", "ack": "client-individual"}
            link.send("SUBSCRIBE", {**headers, "activemq.prefetchSize": str(self._prefetch)})
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link = None
        self._generation += 1
        self._arrived.clear()

    def _delivery(self, message: Arrival) -> Delivery:
        again = message.headers.get("redelivered") == "true"
        tag = (self._generation, message.headers["ack"])
        return Delivery(self._queue, properties_of(message), message.body, again, tag)


def properties_of(message: Arrival) -> dict[str, Any]:
    """Return the properties of a message as AMQP names them; those of other producers are read from STOMP headers.

    Example:
        >>> properties_of(Arrival("message", {"type": "shop.Pay", "message-id": "ID:7", "reply-to": "/queue/a", "x": "1"}))
        {'message_id': 'ID:7', 'type': 'shop.Pay', 'reply_to': 'a', 'headers': {'x': '1'}}
    """
    headers = message.headers
    if PROPERTIES in headers:
        return read_properties(headers[PROPERTIES].encode("utf-8", "surrogatepass"))
    properties: dict[str, Any] = {"message_id": headers.get("message_id") or headers.get("message-id")}
    properties |= {name: headers[native] for native, name in NATIVE.items() if native in headers}
    if "reply-to" in headers:
        properties["reply_to"] = headers["reply-to"].removeprefix("/queue/")
    if headers.get("timestamp", "").isdecimal():
        properties["timestamp"] = int(headers["timestamp"][:20]) / 1000
    properties["headers"] = {name: value for name, value in headers.items() if name not in OWN and name != "message_id"}
    return properties
