"""Receiver for one queue, with one acknowledgement a group."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from idemp.brokers.rabbitmq.link import LINK_ERRORS, Link
from idemp.errors import Unavailable, describe_error
from idemp.messages import UNREADABLE, Delivery

__all__ = ["RabbitReceiver"]


class RabbitReceiver:
    """Consumes one queue. Connects at first use. Any unclear error costs the connection, and unsettled messages are redelivered.

    Args:
        queue: Name of the queue.
        connect: Function that declares the queue and opens a link.
        prefetch: Maximum number of unacknowledged messages.

    Example:
        >>> receiver = RabbitReceiver("billing", lambda: None, 20)
        >>> receiver.ack([])
        >>> receiver.close()
    """

    def __init__(self, queue: str, connect: Callable[[], Link], prefetch: int) -> None:
        self._queue, self._connect, self._prefetch = queue, connect, prefetch
        self._link: Link | None = None
        self._generation = 0  # of the connection: delivery tags begin at 1 with each
        self._arrived: deque[Any] = deque()
        self._held: set[int] = set()  # tags that were handed out and not acknowledged
        self._consumer = ""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Return messages that have arrived; wait for the first one only.

        Raises:
            Unavailable: The connection is lost, or cannot be opened.
        """
        deadline = time.monotonic() + timeout
        try:
            link = self._open()
            link.read()
            while not self._arrived and (rest := deadline - time.monotonic()) > 0:
                link.wait(min(rest, 1.0))
                if self._was_woken():
                    break
                link.read()
        except LINK_ERRORS as error:
            self._drop()
            raise Unavailable(f"the connection to RabbitMQ was lost: {describe_error(error)}") from error
        deliveries: list[Delivery] = []
        while self._arrived and len(deliveries) < limit:
            message = self._arrived.popleft()
            self._held.add(message.delivery_tag)
            deliveries.append(self._delivery(message))
        return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages of this connection. The broker redelivers those of earlier connections anyway.

        Raises:
            Unavailable: The connection is lost, so the messages are redelivered.
        """
        tags = sorted(tag for generation, tag in (each.tag for each in deliveries) if generation == self._generation)
        if not tags or self._link is None:
            return
        self._held -= set(tags)
        lowest = min(self._held, default=tags[-1] + 1)
        together = [tag for tag in tags if tag < lowest]  # `multiple` acknowledges all tags up to this one
        try:
            with self._link.lock:
                if together:
                    self._link.channel.basic_ack(together[-1], multiple=True)
                for tag in tags[len(together) :]:
                    self._link.channel.basic_ack(tag)
        except LINK_ERRORS as error:
            self._drop()
            raise Unavailable(f"the connection to RabbitMQ was lost: {describe_error(error)}") from error

    def keep_alive(self) -> None:
        """Send a heartbeat while a handler runs. Another thread calls this."""
        if (link := self._link) is not None:
            link.beat()

    def wake(self) -> None:
        """End a waiting `receive`."""
        with suppress(OSError):
            os.write(self._wake, b"x")

    def close(self) -> None:
        """Close the connection; the broker redelivers unacknowledged messages."""
        if self._link is not None:
            with suppress(*LINK_ERRORS), self._link.lock:
                # A quorum queue forgets acknowledgements that come right before the end, unless a cancel follows them.
                self._link.channel.basic_cancel(self._consumer)
            self._link.close()
        self._drop()
        if self._woken >= 0:
            os.close(self._woken)
            os.close(self._wake)
            self._woken = self._wake = -1

    def _open(self) -> Link:
        if self._link is None or not self._link.alive:
            self._drop()
            self._link = link = self._connect()
            link.watch(self._woken)
            link.channel.basic_qos(0, self._prefetch, False)
            self._consumer = link.channel.basic_consume(self._queue, callback=self._arrived.append, on_cancel=self._cancelled)
        return self._link

    def _cancelled(self, _tag: str) -> None:
        raise ConnectionResetError("the broker has cancelled the consumer: its queue was deleted")

    def _drop(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link = None
        self._generation += 1
        self._arrived.clear()
        self._held.clear()

    def _was_woken(self) -> bool:
        os.set_blocking(self._woken, False)
        with suppress(BlockingIOError):
            return bool(os.read(self._woken, 1024))
        return False

    def _delivery(self, message: Any) -> Delivery:
        properties: dict[str, Any] = {}
        for name, value in message.properties.items():
            try:
                properties[name] = _plain(value)
            except RecursionError:
                properties[UNREADABLE] = f"{name} is nested too deeply"
        properties.pop("delivery_mode", None)
        if "application_headers" in properties:
            properties["headers"] = properties.pop("application_headers")
        body = message.body.encode() if isinstance(message.body, str) else bytes(message.body or b"")
        redelivered = bool(message.delivery_info["redelivered"])
        return Delivery(self._queue, properties, body, redelivered, (self._generation, message.delivery_tag))


def _plain(value: Any) -> Any:
    """Return a value of AMQP as JSON has it."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        return moment.timestamp()
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
