"""Callbacks of kombu's `Consumer` and `ConsumerMixin`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from idemp.errors import Unreadable, describe_error
from idemp.integrations._settling import BlockingCallbacks

__all__ = ["KombuCallbacks"]


class KombuCallbacks(BlockingCallbacks):
    """`on_message` and `on_decode_error` of a `kombu.Consumer`: they run a wrapped handler and settle each message.

    While they wait, heartbeats go on if the transport has them.

    Args:
        handle: Function returned by `Inbox.wrap`.
        dead: Function of a message that cannot succeed on another run, and of its error. If it returns, the message is acknowledged,
            unless it has settled the message itself. If it raises, the message is requeued.
        pause: Time before a message is requeued.

    Raises:
        ConfigurationError: `handle` or `dead` is `async def`, or `pause` is not a duration.

    Example:
        >>> from kombu import Connection, Consumer, Queue
        >>> from idemp.integrations import reject
        >>> def handle(message, redelivered=False):
        ...     print("handled", message.body)
        >>> callbacks = KombuCallbacks(handle, dead=reject)
        >>> with Connection("memory://") as connection:
        ...     queue = Queue("payments")
        ...     connection.SimpleQueue("payments").put({"payment_id": 7})
        ...     with Consumer(
        ...         connection, [queue], on_message=callbacks.on_message, on_decode_error=callbacks.on_decode_error
        ...     ):
        ...         connection.drain_events(timeout=5)
        handled b'{"payment_id": 7}'
    """

    def on_message(self, message: Any) -> None:
        """Handle and settle a `kombu.Message`.

        Raises:
            Exception: An error of the connection, on which the message cannot be settled: the broker delivers it again.

        Example:
            >>> KombuCallbacks(lambda message: None, dead=print).on_message.__name__
            'on_message'
        """
        self.settle(message, _id(message), lambda again: self.handle(message, redelivered=again), partial(_wait, message))

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Pass a `kombu.Message` whose body kombu cannot decode to `dead`.

        Raises:
            Exception: An error of the connection, on which the message cannot be settled: the broker delivers it again.

        Example:
            >>> KombuCallbacks(lambda message: None, dead=print).on_decode_error.__name__
            'on_decode_error'
        """

        def refuse(_: bool) -> None:
            raise Unreadable(f"kombu cannot decode the body: {describe_error(exc)}") from exc

        self.settle(message, _id(message), refuse, partial(_wait, message))


def _id(message: Any) -> str | None:
    id: str | None = (message.properties or {}).get("message_id")
    return id


def _wait(message: Any, seconds: float) -> None:
    """Wait, and send heartbeats. The broker's are not read meanwhile, so kombu's own check would report a dead connection."""
    connection: Any = getattr(message.channel, "connection", None)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        if getattr(connection, "heartbeat", 0) and hasattr(connection, "send_heartbeat"):
            connection.send_heartbeat()
